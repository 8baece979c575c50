-- Damaged data.
-- One damaged key, record or field stops no other job: a script that stops after a part of its writes would leave half of
-- them, each time again. So what is damaged is mended where a script meets it, or ends its job alone.

-- A key of another type than the scripts write holds nothing that they can use, and neither does a sum that is no whole
-- number. It is deleted, and the command is repeated. Redis compares the types itself, so this costs no further call.
-- What a deleted sum was is unknown: an event counts it, and `penstock audit --repair` computes the sums anew.
do
  local plain, try, type = redis, redis.pcall, type

  local function mend(problem, ...)
    local command, key, field = ...
    if string.find(problem, 'WRONGTYPE', 1, true) then
      plain.call('DEL', key)
      count_event('damaged_keys')
    elseif command == 'HINCRBY' and (string.find(problem, 'hash value') or string.find(problem, 'overflow')) then
      plain.call('HDEL', key, field)
      count_event('unknown_sums')
    end
    return plain.call(...)
  end

  redis = {pcall = try, error_reply = plain.error_reply, call = function(...)
    local answer = try(...)
    if type(answer) == 'table' and answer.err then return mend(answer.err, ...) end
    return answer
  end}
end

-- A whole number below MAX_NUMBER, or nil. NaN passes no comparison, and infinity is too large.
local function whole(text)
  local number = tonumber(text)
  return number and number >= 0 and number < MAX_NUMBER and number % 1 == 0 and number or nil
end

-- A number that may be negative or have a fraction, such as a sum; 0 for a damaged one.
local function finite(text)
  local number = tonumber(text or '') or 0
  return number > -MAX_NUMBER and number < MAX_NUMBER and number or 0
end

-- Ends a job that must not run any longer. Returns whether it did so.
local end_if_over

-- mended: a job that was read, whole or mended. listed_job: the job of a list, the same; nil if its record says that the
-- list should not have it. `known` is what the list tells: state, level, tenant, node, entry.
local records = late(function(made)
  -- A number of a record that the script may not have read.
  local function is_number(text) return not text or whole(text) end

  -- A number that the record may lack.
  local function is_none(text) return not text or text == '' or whole(text) end

  local function is_weight(text)
    local weight = tonumber(text or '1')
    return weight and weight > 0 and weight <= 1000
  end

  local function is_entry(text)
    return not text or text == '' or text == DELAYED or (#text < 22 and string.find(text, '^%d+%-%d+$'))
  end

  local function is_level(text) return #text == 1 and text >= '0' and text <= '5' end

  local function is_tenant(text) return not text or (text ~= '-' and string.find(text, '^[%w_-]+$')) end

  -- Whether the record says what its list tells.
  local function is_as_listed(job, known)
    return job.state == known.state and (not known.level or known.level == job.level) and
      (not known.tenant or known.tenant == job.tenant) and (not known.node or known.node == job.node) and
      (job.entry == DELAYED) == (known.entry == DELAYED)
  end

  local sound_tenants = {}

  local function is_sound_tenant(tenant)
    if not tenant then return true end
    if sound_tenants[tenant] == nil then sound_tenants[tenant] = is_tenant(tenant) and true or false end
    return sound_tenants[tenant]
  end

  -- Whether these are as submit writes them, by one comparison.
  local function are_as_submitted(cost, output, submitted, entry)
    return cost and output and submitted and entry and #cost < 16 and #output < 16 and #submitted < 16 and #entry < 22 and
      string.find(cost .. ' ' .. output .. ' ' .. submitted .. ' ' .. entry, '^%d+ %d+ %d+ %d+%-%d+$')
  end

  -- The usual record costs these comparisons: few of them call a function, because take looks at many records. Without a
  -- list, the state is not compared. A field that was not read is nil.
  local function is_whole(job, known)
    local level, n, needs_reader, weight = job.level, job.n, job.needs_reader, job.weight
    local losses, preemptions, mark, deadline, unread = job.losses, job.preemptions, job.loss_mark, job.deadline, job.unread
    local cost, output, submitted, entry = job.cost, job.output, job.submitted, job.entry
    return (losses == '0' or is_number(losses)) and (preemptions == '0' or is_number(preemptions)) and
      (n == '1' or is_number(n)) and (needs_reader == '1' or needs_reader == '0' or is_number(needs_reader)) and
      (not deadline or deadline == '' or whole(deadline)) and (not unread or unread == '' or whole(unread)) and
      (not (cost or submitted or entry) or are_as_submitted(cost, output, submitted, entry) or
        (is_number(cost) and is_number(submitted) and is_none(output) and is_entry(entry))) and
      (not mark or is_none(mark)) and (weight == '1' or is_weight(weight)) and (level == '1' or is_level(level)) and
      (known and known.tenant == job.tenant or is_sound_tenant(job.tenant)) and (not known or is_as_listed(job, known))
  end

  -- The functions for what is damaged. Few calls of a script need them, so few create them.
  local function menders()
    local function find_level(id)
      for level = 0, LEVELS - 1 do
        if redis.call('ZSCORE', P .. ':waiting:' .. level, id) then return tostring(level) end
      end
      return '1'
    end

    -- The tenant that has the job open, or '-', which is the name of none.
    local function find_tenant(id)
      for _, tenant in ipairs(redis.call('HKEYS', P .. ':stored')) do
        if redis.call('SISMEMBER', P .. ':tenant:' .. tenant .. ':open', id) == 1 then return tenant end
      end
      return '-'
    end

    -- Since when a job counts as submitted: its place in the queue, or the time in its id.
    local function find_submitted(job)
      local index = P .. (job.entry == DELAYED and ':delayed:' .. job.level .. ':' .. job.tenant or ':waiting:' .. job.level)
      local score = redis.call('ZSCORE', index, job.id)
      if whole(score) then return score end
      local high, low = string.match(job.id, '(%x%x%x%x%x%x%x%x)%-(%x%x%x%x)%-[^.]*$')
      return string.format('%d', high and tonumber(high .. low, 16) or 0)
    end

    local function find_deadline(job)
      local score = redis.call('ZSCORE', P .. ':deadlines', job.id)
      return whole(score) and score or ''
    end

    -- What a damaged field was, as far as other keys tell it, or its default.
    local function found(job, name)
      if name == 'level' then return find_level(job.id) end
      if name == 'tenant' then return find_tenant(job.id) end
      if name == 'submitted' then return find_submitted(job) end
      if name == 'deadline' then return find_deadline(job) end
      if name == 'n' then return redis.call('ZSCORE', P .. ':tasks', job.id) and '0' or '1' end
      if name == 'needs_reader' then return tonumber(job.level) >= CLASSES and '0' or '1' end
      if name == 'cost' then count_event('unknown_sums') end
      if name == 'cost' or name == 'weight' then return '1' end
      return (name == 'losses' or name == 'preemptions') and '0' or ''
    end

    local function is_right(name, value)
      if value == '' then return is_listed('deadline unread loss_mark output entry', name) end
      if name == 'level' then return is_level(value) end
      if name == 'tenant' then return is_tenant(value) end
      if name == 'weight' then return is_weight(value) end
      if name == 'entry' then return is_entry(value) end
      return whole(value)
    end

    -- Whether the record of a listed job is right and the list is not.
    local function is_elsewhere(job, known)
      if is_terminal(job.state) then return true end
      if job.state == 'running' and known.state == 'queued' then
        local node = redis.call('HGET', job_key(job.id), 'node') or ''
        return redis.call('SISMEMBER', P .. ':running:' .. node, job.id) == 1
      end
      return job.state == 'queued' and known.state == 'running' and
        redis.call('ZSCORE', P .. ':waiting:' .. job.level, job.id) ~= false
    end

    local function mend(job, known)
      local fields = {}
      local function set(name, value)
        job[name], fields[#fields + 1], fields[#fields + 2] = value, name, value
      end
      for name, value in pairs(known) do
        if job[name] and job[name] ~= value then set(name, value) end
      end
      -- The first ones find the others.
      for _, name in ipairs({'level', 'tenant', 'entry', 'submitted', 'deadline', 'n', 'cost', 'needs_reader', 'losses',
        'preemptions', 'loss_mark', 'output', 'unread', 'weight'}) do
        if job[name] and not is_right(name, job[name]) then set(name, found(job, name)) end
      end
      if job.entry == DELAYED and known.state and known.entry ~= DELAYED then set('entry', '') end
      -- A full Redis takes a write behind a free one.
      redis.call('ZREM', P .. ':free', '')
      if #fields > 0 then redis.call('HSET', job_key(job.id), unpack(fields)) end
      count_event('mended_records')
      return job
    end

    -- A job whose whole record is lost. It gets a new one, in which it ends. nil if no tenant has it open.
    local function lost_job(id, known)
      local tenant = known.tenant or find_tenant(id)
      if redis.call('SISMEMBER', P .. ':tenant:' .. tenant .. ':open', id) == 0 then return nil end
      local job, fields = {tenant = tenant, level = known.level or find_level(id), state = known.state, entry = known.entry or '',
        node = known.node or '', n = '1', cost = '1', losses = '0', preemptions = '0', needs_reader = '1'}, {}
      for name, value in pairs(job) do fields[#fields + 1], fields[#fields + 2] = name, value end
      job.id = id
      job.submitted, job.deadline = find_submitted(job), find_deadline(job)
      redis.call('ZREM', P .. ':free', '')
      redis.call('HSET', job_key(id), 'submitted', job.submitted, unpack(fields))
      job = read_job(id)
      job.problem = 'its record'
      return job
    end

    return mend, lost_job, is_elsewhere
  end

  function made.mended(job, known)
    if not job or is_whole(job, known) then return job end
    return menders()(job, known or {})
  end

  function made.listed_job(id, fields, known)
    local job = read_job(id, fields)
    if job and is_whole(job, known) then return job end
    local mend, lost_job, is_elsewhere = menders()
    if not job then
      if redis.call('EXISTS', job_key(id)) == 0 then return lost_job(id, known) end
      redis.call('HSET', job_key(id), 'state', '')
      job = read_job(id, fields)
    end
    return not is_elsewhere(job, known) and mend(job, known) or nil
  end
end)

local function mended(job, known) return records.mended(job, known) end
local function listed_job(id, fields, known) return records.listed_job(id, fields, known) end
