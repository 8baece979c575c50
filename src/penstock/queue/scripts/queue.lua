-- Shared by the scripts that queue or end jobs; follows prelude.lua. Damaged data, where a job may run, virtual time of
-- tenants, the queue, stored bytes, used tokens, and the end of a job. Scripts that run at every engine step omit it,
-- because Lua creates every function anew at each call.

-- Damaged data -------------------------------------------------------------------------------------
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

-- Jobs and nodes -----------------------------------------------------------------------------------

-- Whether a job occupies no sequence in an engine, and so needs no KV cache.
local function is_task(job) return job.n == '0' end

local function is_older(one, other)
  local mine, theirs = tonumber(one.submitted), tonumber(other.submitted)
  if mine ~= theirs then return mine < theirs end
  return one.id < other.id
end

-- What is paused (pause.lua): the pool, levels and tenants. `has`: whether a pause holds a job back.
local function read_pauses()
  local paused = {levels = {}, tenants = {}, num_tenants = 0, is_any = false}
  for _, name in ipairs(redis.call('HKEYS', P .. ':paused')) do
    local kind, what = string.match(name, '^(%a+):(.*)$')
    paused.of_pool = paused.of_pool or name == 'pool'
    paused.is_any = paused.is_any or kind == 'level' or kind == 'tenant'
    if kind == 'level' then
      paused.levels[what] = true
    elseif kind == 'tenant' then
      paused.tenants[what], paused.num_tenants = true, paused.num_tenants + 1
    end
  end
  function paused.has(job)
    return paused.of_pool or paused.levels[tostring(job.level)] or paused.tenants[job.tenant] or false
  end
  return paused
end

-- A node's pressure record; an empty table if the node has not reported one.
local function record_of(node)
  local ok, record = pcall(cmsgpack.unpack, redis.call('HGET', P .. ':pressure', node) or '')
  return ok and type(record) == 'table' and record or {}
end

-- Whether a node outside of `lacks` could run the job: it does not drain, and once the job has tokens, it has the job's
-- revision.
local function may_be_elsewhere(job, lacks)
  local has_tokens = redis.call('LLEN', log_key(job.id)) > 0
  for _, node in ipairs(redis.call('ZRANGE', P .. ':nodes', 0, -1)) do
    local record = is_listed(lacks, node) and {draining = true} or record_of(node)
    local is_foreign = has_tokens and record.revision and record.revision ~= job.revision
    if record.draining ~= true and not is_foreign then return true end
  end
  return false
end

-- Collected writes --------------------------------------------------------------------------------
-- A script for many jobs calls `collect` before its first write, and write_collected after its last one.

local function trim_to(key, most) redis.call('ZREMRANGEBYRANK', key, 0, -1 - most) end

local collect, write_collected
do
  function collect()
    collected = {sums = {}, bytes = {}, charges = {}, removed = {}, added = {}, unlisted = {}, entries = {}, lives = {},
      debts = {}}
  end

  local function write_sums(key, sums, removes_zero)
    for field, by in pairs(sums) do
      local is_changed = by ~= 0 or not removes_zero
      if is_changed and redis.call('HINCRBY', key, field, by) == 0 and removes_zero then redis.call('HDEL', key, field) end
    end
  end

  local function write_members(key, members, command) redis.call(command, key, unpack(members)) end
  local function write_life(key, life_ms) redis.call('PEXPIRE', key, life_ms) end

  function write_collected()
    local all = collected
    collected = nil
    for key, sums in pairs(all.sums) do write_sums(key, sums, false) end
    for key, sums in pairs(all.bytes) do write_sums(key, sums, true) end
    for command, sets in pairs({SREM = all.removed, SADD = all.added, ZREM = all.unlisted}) do
      for key, members in pairs(sets) do write_members(key, members, command) end
    end
    for key, entries in pairs(all.entries) do write_members(key, entries, 'ZADD') end
    for key in pairs(all.debts) do trim_to(key, MAX_DEBTS) end
    for key, life_ms in pairs(all.lives) do write_life(key, life_ms) end
  end
end

local function add_to_list(name, key, member)
  local members = collect_in(name, key)
  members[#members + 1] = member
end

-- Each of these collects a write: a sum of a hash, a member of a set to add, and one of a sorted set to remove.
local function add_sum(key, field, by) collect_sum('sums', key, field, by) end
local function add_member(key, member) add_to_list('added', key, member) end
local function unlist_member(key, member) add_to_list('unlisted', key, member) end

-- These collect a write or, in a script that collects none, write at once.
local function remove_member(key, member)
  if collected then add_to_list('removed', key, member) else redis.call('SREM', key, member) end
end

local function add_entry(key, score, member)
  if collected then
    add_to_list('entries', key, score)
    add_to_list('entries', key, member)
  else
    redis.call('ZADD', key, score, member)
  end
end

-- Adds to a field of a hash that lives for life_ms from now on.
local function add_with_life(key, life_ms, field, by)
  if collected then
    add_sum(key, field, by)
    collected.lives[key] = life_ms
  else
    redis.call('HINCRBY', key, field, by)
    redis.call('PEXPIRE', key, life_ms)
  end
end

-- Virtual time ------------------------------------------------------------------------------------
-- Virtual time of a class's tenants, in predicted KV-token-ms ÷ weight (policy_state.py, VirtualTimes). It is kept
-- under every policy, so that a pool may change its policy while jobs wait.

local function virtual_time_key(job) return P .. ':virtual_time:' .. job.level end
local function weight_of(job) return tonumber(job.weight) or 1 end

local share_window
do
  local length, window

  -- The length of a window, in ms, and the number of the current one. They stay the same during a script.
  function share_window()
    if not length then
      length = whole(redis.call('HGET', KEYS[1], 'share_window_ms')) or SHARE_WINDOW_MS
      window = math.floor(clock() / length)
    end
    return length, window
  end
end

local enter_tenant, leave_tenant_if_last, charge_tenants, correct_charge, correct_charges, virtual_time_of, charged_of
do
  -- Virtual times are below this. One that is not, such as infinity, would let all tenants wait that come after it.
  local MAX_TIME = 1e24

  -- A virtual time as Redis has it; `instead` for a damaged one.
  function virtual_time_of(text, instead)
    local time = tonumber(text or '')
    return time and time > -MAX_TIME and time < MAX_TIME and time or instead
  end

  local function debt_key(job) return P .. ':debt:' .. job.level end

  local clocks = {}

  -- The class's virtual clock: the highest virtual time at which a job started, plus 1 for each tenant that entered.
  local function virtual_clock(job)
    local level = tostring(job.level)
    clocks[level] = clocks[level] or virtual_time_of(redis.call('GET', P .. ':virtual_clock:' .. level), 0)
    return clocks[level]
  end

  local function set_clock(level, time)
    redis.call('SET', P .. ':virtual_clock:' .. level, time)
    clocks[tostring(level)] = time
  end

  function enter_tenant(job)
    if redis.call('ZSCORE', virtual_time_key(job), job.tenant) then return end
    local now = virtual_clock(job)
    local debt = virtual_time_of(redis.call('ZSCORE', debt_key(job), job.tenant), 0)
    redis.call('ZADD', virtual_time_key(job), math.max(debt, now), job.tenant)
    redis.call('ZREM', debt_key(job), job.tenant)
    set_clock(job.level, now + 1)
  end

  -- Remembers the virtual time of a tenant without queued jobs while it is ahead of the virtual clock.
  local function remember_debt(job, time)
    if time > virtual_clock(job) then
      add_entry(debt_key(job), time, job.tenant)
      if collected then collected.debts[debt_key(job)] = true else trim_to(debt_key(job), MAX_DEBTS) end
    else
      redis.call('ZREM', debt_key(job), job.tenant)
    end
  end

  function leave_tenant_if_last(job)
    if redis.call('EXISTS', queue_key(job), requeued_key(job)) > 0 then return end
    local time = redis.call('ZSCORE', virtual_time_key(job), job.tenant)
    redis.call('ZREM', virtual_time_key(job), job.tenant)
    if time then remember_debt(job, virtual_time_of(time, 0)) end
  end

  -- A tenant's use in this and the last window, over all classes, in KV-token-ms ÷ weight (policy_state.py, RecentUse).

  -- Adds a charge for foreground work. A refund (negative) is subtracted in the window of its charge, `since`. If that window
  -- is too old, the refund is dropped: in another window it would be a credit.
  local function note_use(job, amount, since)
    -- Background work fills idle capacity, so it costs its tenant no place in the order of foreground work.
    if tonumber(job.level) >= CLASSES then return end
    local tenant = job.tenant
    local length, window = share_window()
    if amount < 0 then
      since = whole(since) or 0
      if since < window - 1 then return end
      window = since
    end
    local whole = math.floor(math.max(-MAX_CHARGE, math.min(MAX_CHARGE, amount)) + 0.5)
    add_with_life(P .. ':recent_use:' .. window, 2 * length, tenant, whole)
  end

  -- Charges the tenants of jobs that are being taken. Must be called while the jobs are still queued.
  function charge_tenants(jobs)
    local charged, clocks = {}, {}
    for _, job in ipairs(jobs) do
      local level, name = job.level, job.level .. ':' .. job.tenant
      local of_tenant = charged[name]
      if not of_tenant then
        local time = redis.call('ZSCORE', virtual_time_key(job), job.tenant)
        of_tenant = {job = job, time = virtual_time_of(time, virtual_clock(job))}
        charged[name] = of_tenant
      end
      local clock_of_level = clocks[level] or {job = job, read = virtual_clock(job), time = 0}
      clocks[level] = clock_of_level
      clock_of_level.time = math.max(clock_of_level.time, of_tenant.time)
      of_tenant.time = of_tenant.time + job.charge
      note_use(job, job.charge)
    end
    for level, one in pairs(clocks) do
      if one.time > one.read then
        set_clock(level, one.time)
        redis.call('ZREMRANGEBYSCORE', debt_key(one.job), '-inf', one.time)
      end
    end
    for _, one in pairs(charged) do redis.call('ZADD', virtual_time_key(one.job), one.time, one.job.tenant) end
  end

  local function correct(level, tenant, by)
    local like = {level = level, tenant = tenant}
    if redis.call('ZSCORE', virtual_time_key(like), tenant) then
      redis.call('ZINCRBY', virtual_time_key(like), by, tenant)
    else
      remember_debt(like, virtual_time_of(redis.call('ZSCORE', debt_key(like), tenant), virtual_clock(like)) + by)
    end
  end

  -- What a take charged the job's tenant.
  function charged_of(job) return math.max(0, virtual_time_of(job.charge, 0)) end

  -- Corrects an earlier charge of a tenant by `by`; negative if the charge was too high.
  function correct_charge(job, by)
    note_use(job, by, job.window)
    if collected then
      collect_sum('charges', job.level, job.tenant, by)
    else
      correct(job.level, job.tenant, by)
    end
  end

  -- Writes the collected corrections, one for each tenant and level.
  function correct_charges()
    for level, tenants in pairs(collected.charges) do
      for tenant, by in pairs(tenants) do correct(level, tenant, by) end
    end
  end
end

-- Functions that few jobs need; see *Rare functions*.
local rare

-- Lists of jobs ----------------------------------------------------------------------------------
-- Each job is in one list of its tenant, that of its state: P:jobs:<tenant> while it is queued, else
-- P:jobs:<state>:<tenant>. All scores are 0, so ids order a list, and an id begins with its time. A job is also in
-- P:tagged:<tenant>:<tag> of each of its tags. Its custom_id is a tag of its own, `#<hash>`, which no caller sees.

local lists = {ended = {}}  -- ended: id, tenant, state and code of the jobs that this call ended and no node reported

function lists.key(state, tenant) return P .. ':jobs:' .. (state == 'queued' and '' or state .. ':') .. tenant end

function lists.leave(state, job)
  local key = lists.key(state, job.tenant)
  if collected then unlist_member(key, job.id) else redis.call('ZREM', key, job.id) end
end

function lists.move(job, from, to)
  lists.leave(from, job)
  add_entry(lists.key(to, job.tenant), 0, job.id)
end

-- Bytes of a job's tags, which spaces separate, and of its metadata.
function lists.bytes_of(tags, metadata)
  -- Memory of a tag of a job, without twice its length. Jobs of one tag share its counts.
  local TAG_BYTES = 200
  local bytes = metadata ~= '' and #metadata + KEY_BYTES or 0
  for tag in string.gmatch(tags, '%S+') do bytes = bytes + 2 * #tag + TAG_BYTES end
  return bytes
end

-- Stores a new job's tags and metadata.
function lists.add(job, tags, metadata)
  if tags == '' and metadata == '' then return end
  redis.call('HSET', job_key(job.id), 'extra', lists.bytes_of(tags, metadata))
  local number = 0
  for tag in string.gmatch(tags, '%S+') do
    local is_custom = string.sub(tag, 1, 1) == '#'
    if not is_custom then number = number + 1 end
    redis.call('HSET', job_key(job.id), is_custom and 'custom' or 'tag' .. number, tag)
    redis.call('ZADD', P .. ':tagged:' .. job.tenant .. ':' .. tag, 0, job.id)
  end
  if number > 0 then rare.count_tags(job.tenant, tags, job.level, 1) end
  if metadata ~= '' then redis.call('SET', P .. ':metadata:' .. job.id, metadata) end
end

-- A list of a job's tags.
function lists.read_tags(id)
  local tags = {}
  for _, tag in ipairs(redis.call('HMGET', job_key(id), 'tag1', 'tag2', 'tag3', 'tag4', 'custom')) do
    tags[#tags + 1] = tag or nil
  end
  return tags
end

-- The tags of a job, separated by spaces. `extra`: its field of that name, '' or nil for a job that has no tags.
function lists.tags_of(id, extra)
  return extra and extra ~= '' and table.concat(lists.read_tags(id), ' ') or ''
end

-- What P:expiry says of an ended job's record: its key, and what lists the job.
function lists.record_with(id, state, tags) return 'job:' .. id .. ' ' .. state .. (tags ~= '' and ' ' .. tags or '') end

function lists.record(id, state)
  return lists.record_with(id, state, lists.tags_of(id, redis.call('HGET', job_key(id), 'extra') or ''))
end

-- The queue --------------------------------------------------------------------------------------

-- Tenants' delayed jobs lie in lanes, one for each level of a tenant: P:delayed:<lane>. P:delayed is their index, by the
-- time at which to look at each.
local function lane_of(job) return job.level .. ':' .. job.tenant end

local function is_background(job) return tonumber(job.level) >= CLASSES end

-- Sums a tenant's queued cost. Background work does not count as foreground work that waits.
local function count_queued(job, cost)
  if is_background(job) then
    count_bytes(P .. ':queued_background', job.tenant, cost)
  else
    count_bytes(P .. ':queued', job.tenant, cost)
  end
end

local function forget_task(job)
  redis.call('ZREM', P .. ':tasks', job.id)
  if redis.call('HINCRBY', P .. ':tenant_tasks', job.tenant, -1) <= 0 then
    redis.call('HDEL', P .. ':tenant_tasks', job.tenant)
  end
end

local function leave_queue(job)
  if job.deadline ~= '' then redis.call('ZREM', P .. ':deadlines', job.id) end
  if job.entry == DELAYED then
    local lane = lane_of(job)
    if redis.call('ZREM', P .. ':delayed:' .. lane, job.id) == 1 and redis.call('EXISTS', P .. ':delayed:' .. lane) == 0 then
      redis.call('ZREM', P .. ':delayed', lane)
    end
    redis.call('ZREM', P .. ':awaiting:' .. job.tenant, job.id)
    local name = redis.call('HGET', job_key(job.id), 'key')
    if name then redis.call('ZREM', P .. ':awaiting:' .. job.tenant .. ':' .. name, job.id) end
    return
  end
  if job.entry ~= '' then
    local key = queue_key(job)
    redis.call('XDEL', key, job.entry)
    if redis.call('XLEN', key) == 0 then redis.call('DEL', key) end
  else
    redis.call('ZREM', requeued_key(job), job.id)
  end
  leave_tenant_if_last(job)
  redis.call('ZREM', P .. ':waiting:' .. job.level, job.id)
  if is_task(job) then forget_task(job) end
  redis.call('HINCRBY', P .. ':backlog', job.level, -tonumber(job.cost))
  count_queued(job, -tonumber(job.cost))
end

-- Removes an id from the queue that its record says to be elsewhere, or that has none.
local function remove_stray(id, known)
  redis.call('ZREM', P .. ':waiting:' .. known.level, id)
  if not known.tenant then return end
  redis.call('ZREM', requeued_key(known), id)
  local key = queue_key(known)
  for _, entry in ipairs(redis.call('XRANGE', key, '-', '+', 'COUNT', LOG_PAGE)) do
    if entry[2][2] == id then redis.call('XDEL', key, entry[1]) end
  end
  if redis.call('XLEN', key) == 0 then redis.call('DEL', key) end
  leave_tenant_if_last(known)
end

-- Removes jobs that are being taken from their queues: what leave_queue does, in fewer calls.
local function leave_queues(jobs)
  local queues, waiting, due = {}, {}, {}
  for _, job in ipairs(jobs) do
    local name = lane_of(job)
    queues[name] = queues[name] or {job = job, entries = {}, requeued = {}}
    waiting[job.level] = waiting[job.level] or {}
    if job.entry ~= '' then table.insert(queues[name].entries, job.entry) else table.insert(queues[name].requeued, job.id) end
    table.insert(waiting[job.level], job.id)
    if job.deadline ~= '' then due[#due + 1] = job.id end
    if is_task(job) then forget_task(job) end
    add_sum(P .. ':backlog', job.level, -tonumber(job.cost))
    count_queued(job, -tonumber(job.cost))
  end
  for _, one in pairs(queues) do
    if #one.entries > 0 then
      redis.call('XDEL', queue_key(one.job), unpack(one.entries))
      if redis.call('XLEN', queue_key(one.job)) == 0 then redis.call('DEL', queue_key(one.job)) end
    end
    if #one.requeued > 0 then redis.call('ZREM', requeued_key(one.job), unpack(one.requeued)) end
    leave_tenant_if_last(one.job)
  end
  for level, ids in pairs(waiting) do redis.call('ZREM', P .. ':waiting:' .. level, unpack(ids)) end
  if #due > 0 then redis.call('ZREM', P .. ':deadlines', unpack(due)) end
end

local function note_due(job)
  if job.deadline ~= '' then redis.call('ZADD', P .. ':deadlines', job.deadline, job.id) end
end

local function note_queued(job)
  redis.call('ZADD', P .. ':waiting:' .. job.level, job.submitted, job.id)
  if is_task(job) then
    redis.call('ZADD', P .. ':tasks', job.submitted, job.id)
    redis.call('HINCRBY', P .. ':tenant_tasks', job.tenant, 1)
  end
  note_due(job)
  redis.call('HINCRBY', P .. ':backlog', job.level, tonumber(job.cost))
  count_queued(job, tonumber(job.cost))
  enter_tenant(job)
end

-- Wakes the node with the most free KV tokens, except `but`, which has just given the job back. Lowers that node's
-- entry by the job's cost, so that the next call wakes another node.
local function ring_doorbell(cost, but)
  local top = redis.call('ZREVRANGE', P .. ':free', 0, but and 1 or 0)
  local node = top[1] ~= but and top[1] or top[2]
  if node then
    redis.call('ZINCRBY', P .. ':free', -cost, node)
    redis.call('PUBLISH', P .. ':doorbell:' .. node, '')
  end
end

-- Wakes nodes for new jobs of these costs, as a doorbell for each job would, but each node at most once.
local function ring_doorbells(costs)
  local MAX_NODES = 16
  if #costs == 0 then return end
  local found, nodes = redis.call('ZREVRANGE', P .. ':free', 0, MAX_NODES - 1, 'WITHSCORES'), {}
  for at = 1, #found, 2 do nodes[#nodes + 1] = {name = found[at], free = tonumber(found[at + 1]), cost = 0} end
  for _, cost in ipairs(nodes[1] and costs or {}) do
    local best = nodes[1]
    for at = 2, #nodes do
      if nodes[at].free > best.free then best = nodes[at] end
    end
    best.free, best.cost, best.rings = best.free - cost, best.cost + cost, true
  end
  for _, node in ipairs(nodes) do
    if node.rings then
      redis.call('ZINCRBY', P .. ':free', -node.cost, node.name)
      redis.call('PUBLISH', P .. ':doorbell:' .. node.name, '')
    end
  end
end

-- The tokens that a tenant with a token rate uses in any minute are at most its limit, its burst and one job. So a job is
-- queued only while the sum of two numbers is within limit and burst. One is the tokens of the tenant's jobs that ended
-- in the last minute. The other is what its queued and running jobs, without the largest one, may use at most.
-- Otherwise the job waits outside of the queue, in P:awaiting:<tenant>, until older tokens or jobs no longer count.
-- Background work over its tenant's rates waits there too, until the rates allow it.
local token_limit = late(function(made)
  local MAX_WAITING_TENANTS = 32
  -- Tokens count until the last slot of time that has a part of the last minute has passed.
  local SLOT_MS, NUM_SLOTS, LOOK_AGAIN_MS = 5000, 13, 60000

  local function bounds_key(tenant) return P .. ':may_use:' .. tenant end
  local function awaiting_key(tenant) return P .. ':awaiting:' .. tenant end

  local function remove_bound(id, tenant)
    local bound = redis.call('ZSCORE', bounds_key(tenant), id)
    if not bound then return end
    redis.call('ZREM', bounds_key(tenant), id)
    count_now(P .. ':may_use', tenant, -(whole(bound) or 0))
  end

  local function add_bound(job)
    redis.call('ZADD', bounds_key(job.tenant), job.may_use, job.id)
    count_now(P .. ':may_use', job.tenant, job.may_use)
  end

  -- The tokens of a tenant's jobs that ended in the last minute: their sum, and {slot, tokens} from the oldest slot on.
  local function used_lately(tenant, now)
    local slots, sum, oldest = {}, 0, math.floor(now / SLOT_MS) - NUM_SLOTS + 1
    local found = redis.call('HGETALL', P .. ':used:' .. tenant)
    for at = 1, #found, 2 do
      local slot, tokens = whole(found[at]) or 0, whole(found[at + 1]) or 0
      if slot >= oldest then slots[#slots + 1], sum = {slot, tokens}, sum + tokens end
    end
    table.sort(slots, function(one, other) return one[1] < other[1] end)
    return sum, slots
  end

  -- Milliseconds for which a job must wait for its tenant's tokens; 0 for none. If it waits for the end of another job, that
  -- end looks at it again (settle_tokens).
  local function token_wait_of(job, now)
    local sum = finite(redis.call('HGET', P .. ':may_use', job.tenant)) + job.may_use
    local largest = whole(redis.call('ZREVRANGE', bounds_key(job.tenant), 0, 0, 'WITHSCORES')[2]) or 0
    local used, slots = used_lately(job.tenant, now)
    local over = used + sum - math.max(largest, job.may_use) - job.minute_tokens
    if over <= 0 then return 0 end
    for _, one in ipairs(slots) do
      over = over - one[2]
      if over <= 0 then return math.max(1, (one[1] + NUM_SLOTS) * SLOT_MS - now) end
    end
    return LOOK_AGAIN_MS
  end

  -- Ms for which a job must wait for its tenant's tokens and rates; 0 for none.
  local function wait_of(job, now)
    local wait = job.may_use and token_wait_of(job, now) or 0
    return wait == 0 and job.to_pay and rare.pay(job, now) or wait
  end

  function made.admits_job(job, now)
    if job.key and not rare.admits(job, now) then return false end
    if not job.may_use and not job.to_pay then return true end
    local is_first = rare.is_first(job.tenant, job)
    local wait = is_first and wait_of(job, now) or LOOK_AGAIN_MS
    if wait == 0 then
      if job.may_use then add_bound(job) end
      return true
    end
    rare.await(job.tenant, job, is_first, wait, now)
    return false
  end

  function made.read_terms(job)
    local may_use, minute_tokens, key, key_terms, to_pay =
      unpack(redis.call('HMGET', job_key(job.id), 'may_use', 'minute_tokens', 'key', 'key_terms', 'to_pay'))
    job.may_use, job.minute_tokens = whole(may_use), whole(minute_tokens)
    job.key, job.key_terms, job.to_pay = key or nil, key_terms or nil, to_pay or nil
    -- A damaged limit holds no job back.
    if not job.minute_tokens then job.may_use = nil end
    return job
  end

  -- Queues a job that waited for its time or for tokens. `since`: when it counts as submitted.
  function made.queue_late(job, since)
    job.submitted = since
    redis.call('HSET', job_key(job.id), 'entry', '', 'submitted', since)
    redis.call('ZADD', requeued_key(job), since, job.id)
    note_queued(job)
    ring_doorbell(tonumber(job.cost))
  end

  -- Queues a tenant's waiting jobs as far as its tokens allow.
  local function release_of(tenant, config, now)
    for _ = 1, MAX_DELAYED do
      local id = redis.call('ZRANGE', awaiting_key(tenant), 0, 0)[1]
      if not id then
        redis.call('ZREM', P .. ':awaiting', tenant)
        return
      end
      local job = listed_job(id, nil, {state = 'queued', tenant = tenant, entry = DELAYED})
      local is_waiting = job and not (job.problem and end_if_over(job, config, now))
      local wait = is_waiting and wait_of(made.read_terms(job), now) or 0
      if wait > 0 then
        redis.call('ZADD', P .. ':awaiting', now + wait, tenant)
        return
      end
      redis.call('ZREM', awaiting_key(tenant), id)
      if is_waiting then
        if job.may_use then add_bound(job) end
        made.queue_late(job, now)
      end
    end
  end

  -- Queues the jobs of the lanes that are due.
  function made.release_due(config, now)
    for _, lane in ipairs(redis.call('ZRANGEBYSCORE', P .. ':awaiting', '-inf', now, 'LIMIT', 0, MAX_WAITING_TENANTS)) do
      local tenant, key = string.match(lane, '^([^:]+):(.+)$')
      if key then rare.release_key(lane, tenant, config, now) else release_of(lane, config, now) end
    end
  end

  -- Counts the tokens of a job that ends, in place of those that it might have used.
  function made.settle_tokens(job, used, now)
    remove_bound(job.id, job.tenant)
    if used > 0 then
      local key, slot = P .. ':used:' .. job.tenant, math.floor(now / SLOT_MS)
      for _, other in ipairs(redis.call('HKEYS', key)) do
        if (whole(other) or 0) <= slot - NUM_SLOTS then redis.call('HDEL', key, other) end
      end
      redis.call('HINCRBY', key, slot, used)
      redis.call('PEXPIRE', key, NUM_SLOTS * SLOT_MS)
    end
    if redis.call('ZADD', P .. ':awaiting', 'XX', 'CH', now, job.tenant) == 1 then ring_doorbell(0) end
  end
end)

-- Whether a job may be queued now. If not, it waits behind its tenant's or its key's older and more urgent ones.
local function admits_job(job, now)
  return not (job.key or job.may_use or job.to_pay) or token_limit.admits_job(job, now)
end

-- Queues jobs whose tenants have tokens again. Returns the time for the next look, or nil if no job waits for tokens.
local function release_waiting(config, now)
  local _, due = unpack(redis.call('ZRANGE', P .. ':awaiting', 0, 0, 'WITHSCORES'))
  if not due or tonumber(due) > now then return tonumber(due or '') end
  token_limit.release_due(config, now)
  return tonumber(redis.call('ZRANGE', P .. ':awaiting', 0, 0, 'WITHSCORES')[2] or '')
end

-- GCRA: the time, in ms, at which a tenant's next unit is due after it takes `amount` units now. If that exceeds a burst
-- of burst_ms: nil, and the ms to wait. A tenant without debt may take any amount. A debt is a number of units: P:rate
-- states it in ms at some rate, and at another rate it takes another time.
-- https://en.wikipedia.org/wiki/Generic_cell_rate_algorithm
local function next_due(now, burst_ms, amount, ms_per_unit, stated_due, stated_rate)
  local debt, stated = math.max(0, finite(stated_due) - now), finite(stated_rate)
  if stated > 0 and stated ~= ms_per_unit then debt = debt * ms_per_unit / stated end
  local later = now + debt + amount * ms_per_unit
  if debt > 0 and later > now + burst_ms then return nil, math.min(debt, later - burst_ms - now) end
  return later
end

local delayed = late(function(made)
  local MAX_READY, RELEASE_MS = 128, 20

  -- Reserves a due job's tokens of its tenant's rate. Returns 0, or the ms until the rate allows the job. `before`: what the
  -- tenant's jobs that this script has postponed will reserve, in ms.
  local function reserve_tokens(job, now, before)
    local to_charge, ms_per_token, burst_ms =
      unpack(redis.call('HMGET', job_key(job.id), 'to_charge', 'ms_per_token', 'burst_ms'))
    ms_per_token = finite(ms_per_token)
    if not whole(to_charge) or ms_per_token <= 0 then return 0 end
    local key, length = P .. ':rate:' .. job.tenant, whole(to_charge) * ms_per_token
    local jobs, tokens, stated = unpack(redis.call('HMGET', key, 'jobs', 'tokens', 'ms_per_token'))
    local later, wait = next_due(now, finite(burst_ms), whole(to_charge), ms_per_token, tokens, stated)
    if not later then
      local after = before[job.tenant] or 0
      before[job.tenant] = after + length
      return math.max(1, math.ceil(wait + after))
    end
    redis.call('HSET', key, 'tokens', later, 'ms_per_token', ms_per_token)
    redis.call('PEXPIRE', key, math.ceil(math.max(later, finite(jobs)) - now) + 1)
    redis.call('HSET', job_key(job.id), 'charged', to_charge)
    return 0
  end

  -- Queues the due jobs of a lane, oldest due time first, while fewer than MAX_READY jobs of its tenant and level are queued.
  -- One that its tenant's rate does not allow yet stays delayed. Returns how many it looked at.
  function made.release_lane(lane, config, now, max_count, before)
    local key, level, tenant = P .. ':delayed:' .. lane, string.match(lane, '^([0-5]):(.+)$')
    if not level then
      redis.call('ZREM', P .. ':delayed', lane)
      return 0
    end
    local like = {level = level, tenant = tenant}
    local ready = redis.call('XLEN', queue_key(like)) + redis.call('ZCARD', requeued_key(like))
    local ids = redis.call('ZRANGEBYSCORE', key, '-inf', now, 'LIMIT', 0, math.max(0, math.min(max_count, MAX_READY - ready)))
    for _, id in ipairs(ids) do
      local job = listed_job(id, nil, {state = 'queued', level = level, tenant = tenant, entry = DELAYED})
      if job and job.problem and end_if_over(job, config, now) then job = nil end
      redis.call('ZREM', key, id)
      if job then lists.move(job, 'scheduled', 'queued') end
      local wait = job and reserve_tokens(job, now, before) or 0
      if wait > 0 then
        redis.call('HSET', job_key(id), 'submitted', now + wait)
        redis.call('ZADD', key, now + wait, id)
        lists.move(job, 'queued', 'scheduled')
      elseif job and admits_job(token_limit.read_terms(job), now) then
        token_limit.queue_late(job, job.submitted)
      end
    end
    -- A lane with further due jobs goes behind the others, and waits until the queue has taken some of its jobs.
    local first = redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')[2]
    if first then
      redis.call('ZADD', P .. ':delayed', math.max(tonumber(first), now + RELEASE_MS), lane)
    else
      redis.call('ZREM', P .. ':delayed', lane)
    end
    return #ids
  end
end)

-- Queues delayed jobs whose time has come: a part of each tenant's, at the pace at which the pool takes them. So jobs that
-- fall due together neither fill the queue nor keep other tenants' due jobs waiting.
local function release_delayed(config, now)
  local MAX_LANES = 32
  local before, left = {}, MAX_DELAYED
  local lanes = redis.call('ZRANGEBYSCORE', P .. ':delayed', '-inf', now, 'LIMIT', 0, MAX_LANES)
  for at, lane in ipairs(lanes) do
    left = left - delayed.release_lane(lane, config, now, math.ceil(left / (#lanes - at + 1)), before)
  end
end

-- Keeps a new job until its time.
local function delay_job(job)
  local key = P .. ':delayed:' .. lane_of(job)
  redis.call('ZADD', key, job.submitted, job.id)
  redis.call('ZADD', P .. ':delayed', 'LT', job.submitted, lane_of(job))
end

-- Adds what the engine of a node that ends its lease preempted to the job's ledger.
local function note_preemptions(id, count)
  if count > 0 then redis.call('HINCRBY', job_key(id), 'engine_preemptions', count) end
end

-- Adds the lease that ends now to the job's ledger.
local function note_lease_end(job, now, why)
  local taken, retaken, past, count = unpack(redis.call('HMGET', job_key(job.id), 'taken', 'retaken', 'past_leases',
    'num_past_leases'))
  local ended = string.format('%s@%s-%d:%s', job.node, retaken or taken or now, now, why)
  count = (whole(count) or 0) + 1
  local was_short = #(past or '') <= MAX_SHORT_BYTES
  past = past and (past .. ' ' .. ended) or ended
  if count > MAX_PAST_LEASES then past = string.match(past, '^%S+ (.+)$') or ended end
  redis.call('HSET', job_key(job.id), 'past_leases', past, 'num_past_leases', count)
  if #past > MAX_SHORT_BYTES and was_short then
    redis.call('HINCRBY', job_key(job.id), 'held', WIDE_RECORD_BYTES - RECORD_BYTES)
    count_bytes(P .. ':stored', job.tenant, WIDE_RECORD_BYTES - RECORD_BYTES)
  end
end

-- Rare functions ---------------------------------------------------------------------------------
-- Keys, rates of background work, further attempts, and counts of tags. They are made at their first use, because a script
-- pays for each function that it makes.
rare = late(function(made)
  -- Jobs of a tenant with the same key share the limits that each of them states: the most that are queued or running, and
  -- the most that join the queue in a span of time. Those beyond them wait in P:awaiting:<tenant>:<key>. `key_terms` of a job:
  -- `<most jobs> <jobs in a span> <its ms>`, '-' for no limit.

  local CLASS_STEP = 1e13
  -- The end of a job looks at its key at once; this is for ends that Redis has lost.
  local LOOK_AGAIN_MS = 600000

  -- A job's place among those that wait: the most urgent level first, then the oldest.
  local function place_of(job) return tonumber(job.level) * CLASS_STEP + tonumber(job.submitted) end

  -- Whether no older and more urgent job waits in a lane.
  function made.is_first(lane, job)
    return redis.call('ZCOUNT', P .. ':awaiting:' .. lane, '-inf', place_of(job)) == 0
  end

  -- Lets a job wait in a lane, behind those. `wait`: ms until the next look at it, if it is the first.
  function made.await(lane, job, is_first, wait, now)
    redis.call('ZADD', P .. ':awaiting:' .. lane, place_of(job), job.id)
    if is_first then
      redis.call('ZADD', P .. ':awaiting', now + wait, lane)
    else
      redis.call('ZADD', P .. ':awaiting', 'NX', now + wait, lane)
    end
  end

  local function name_of(job) return job.tenant .. ':' .. job.key end

  -- Ms for which a job must wait for its key; 0 for none.
  local function wait_for_key(job, now)
    local name = name_of(job)
    local most, num, span = string.match(job.key_terms or '', '^(%S+) (%S+) (%S+)$')
    most, num, span = whole(most), whole(num), whole(span)
    if most and redis.call('SCARD', P .. ':keyed:' .. name) >= most then return LOOK_AGAIN_MS end
    local oldest = num and num > 0 and span and whole(redis.call('LINDEX', P .. ':paced:' .. name, num - 1))
    return oldest and math.max(0, oldest + span - now) or 0
  end

  local function take_place(job, now)
    local name = name_of(job)
    local num, span = string.match(job.key_terms or '', '^%S+ (%d+) (%d+)$')
    redis.call('SADD', P .. ':keyed:' .. name, job.id)
    if num then
      redis.call('LPUSH', P .. ':paced:' .. name, now)
      redis.call('LTRIM', P .. ':paced:' .. name, 0, num - 1)
      redis.call('PEXPIRE', P .. ':paced:' .. name, span)
    end
  end

  -- Whether a job with a key may join the queue now. If not, it waits.
  function made.admits(job, now)
    local name = name_of(job)
    if redis.call('SISMEMBER', P .. ':keyed:' .. name, job.id) == 1 then return true end
    redis.call('SADD', P .. ':keys:' .. job.tenant, job.key)
    local is_first = made.is_first(name, job)
    local wait = is_first and wait_for_key(job, now) or LOOK_AGAIN_MS
    if wait == 0 then
      take_place(job, now)
      return true
    end
    made.await(name, job, is_first, wait, now)
    return false
  end

  -- Gives back the place of a job that ends or waits again, and looks at the jobs behind it.
  function made.give_up(job, now)
    job.key = redis.call('HGET', job_key(job.id), 'key')
    if not job.key then return end
    local name = name_of(job)
    redis.call('SREM', P .. ':keyed:' .. name, job.id)
    if redis.call('ZADD', P .. ':awaiting', 'XX', 'CH', now, name) == 1 then ring_doorbell(0) end
    if redis.call('EXISTS', P .. ':keyed:' .. name, P .. ':awaiting:' .. name) == 0 then
      redis.call('SREM', P .. ':keys:' .. job.tenant, job.key)
    end
  end

  -- Queues the waiting jobs of `<tenant>:<key>` as far as its limits allow.
  function made.release_key(name, tenant, config, now)
    for _ = 1, MAX_DELAYED do
      local id = redis.call('ZRANGE', P .. ':awaiting:' .. name, 0, 0)[1]
      if not id then
        redis.call('ZREM', P .. ':awaiting', name)
        return
      end
      local job = listed_job(id, nil, {state = 'queued', tenant = tenant, entry = DELAYED})
      local is_waiting = job and not (job.problem and end_if_over(job, config, now))
      local wait = is_waiting and token_limit.read_terms(job).key and wait_for_key(job, now) or 0
      if wait > 0 then
        redis.call('ZADD', P .. ':awaiting', now + wait, name)
        return
      end
      redis.call('ZREM', P .. ':awaiting:' .. name, id)
      if is_waiting then
        if job.key then take_place(job, now) end
        if token_limit.admits_job(job, now) then token_limit.queue_late(job, now) end
      end
    end
  end

  -- Counts a job for the rates of its tenant that it waits for: `to_pay` is `<ms per job> <ms per token> <tokens> <burst in
  -- ms>`, '-' for no limit. Returns 0, or the ms until they allow it. Chats are refused where a burst is used up. So waiting
  -- work uses half of it.
  function made.pay(job, now)
    local PART_OF_BURST = 0.5
    local per_job, per_token, tokens, burst_ms = string.match(job.to_pay, '^(%S+) (%S+) (%d+) (%d+)$')
    local key, fields, latest = P .. ':rate:' .. job.tenant, {}, now
    local found = redis.call('HMGET', key, 'jobs', 'ms_per_job', 'tokens', 'ms_per_token')
    for at, unit in ipairs({{'jobs', per_job, 1}, {'tokens', per_token, tonumber(tokens or 0)}}) do
      local name, ms, amount = unit[1], tonumber(unit[2] or ''), unit[3]
      local due, stated = found[2 * at - 1], found[2 * at]
      if ms and ms > 0 then
        local later, wait = next_due(now, burst_ms * PART_OF_BURST, amount, ms, due, stated)
        if not later then return math.max(1, math.ceil(wait)) end
        for _, value in ipairs({name, later, name == 'jobs' and 'ms_per_job' or 'ms_per_token', ms}) do
          fields[#fields + 1] = value
        end
        due = later
      end
      latest = math.max(latest, finite(due))
    end
    if fields[1] then
      redis.call('HSET', key, unpack(fields))
      redis.call('PEXPIRE', key, math.ceil(latest - now) + 1)
    end
    job.to_pay = nil
    if redis.call('HDEL', job_key(job.id), 'to_pay') == 1 and tonumber(per_token or '') then
      redis.call('HSET', job_key(job.id), 'charged', tokens)
    end
    return 0
  end

  -- Moves an open job that is in no queue out of it until a time, in ms. From then on it counts as submitted. Its tokens stay
  -- charged, and no longer count as those that it may use in this minute.
  function made.postpone(job, at, now)
    if not redis.call('HGET', job_key(job.id), 'accepted') then
      redis.call('HSET', job_key(job.id), 'accepted', job.submitted)
    end
    if redis.call('HGET', job_key(job.id), 'may_use') then token_limit.settle_tokens(job, 0, now) end
    made.give_up(job, now)
    redis.call('HDEL', job_key(job.id), 'to_charge')
    job.entry, job.submitted = DELAYED, at
    redis.call('HSET', job_key(job.id), 'entry', DELAYED, 'submitted', at)
    delay_job(job)
    note_due(job)
  end

  -- `tag`: `<tenant>:<tag>`.
  local function counts_key(tag) return P .. ':tag_counts:' .. tag end
  local function is_custom(tag) return string.sub(tag, 1, 1) == '#' end

  -- Counts a tenant's jobs of these tags, as long as one of these is listed: `<level>`, those that were accepted, and
  -- `<state>:<level>`, those that have ended.
  function made.count_tags(tenant, tags, field, by)
    for tag in string.gmatch(tags, '%S+') do
      if not is_custom(tag) then redis.call('HINCRBY', counts_key(tenant .. ':' .. tag), field, by) end
    end
  end

  -- Counts an ended job for its tags. `recent`: the ends since `begun`, each of which counts e times less after RATE_MS. `at`:
  -- when the last one came.
  function made.end_tags(job, state, now)
    local RATE_MS, FEW = 60000, 0.05
    made.count_tags(job.tenant, job.tags, state .. ':' .. job.level, 1)
    for tag in string.gmatch(job.tags, '%S+') do
      if not is_custom(tag) then
        local key = counts_key(job.tenant .. ':' .. tag)
        local begun, at, recent = unpack(redis.call('HMGET', key, 'begun', 'at', 'recent'))
        recent = finite(recent) * math.exp(math.min(0, finite(at) - now) / RATE_MS)
        -- An end after a long pause begins anew, and does not count itself.
        if not begun or recent < FEW and now - finite(at) > RATE_MS then begun, recent = now, -1 end
        redis.call('HSET', key, 'begun', begun, 'at', now, 'recent', string.format('%.4f', recent + 1))
      end
    end
  end

  -- Removes a job from the sets of these tags. The last one takes the counts with it.
  function made.untag(tenant, tags, id)
    for tag in string.gmatch(tags, '%S+') do
      local key = P .. ':tagged:' .. tenant .. ':' .. tag
      redis.call('ZREM', key, id)
      if redis.call('EXISTS', key) == 0 then redis.call('DEL', counts_key(tenant .. ':' .. tag)) end
    end
  end

  -- How often a job may be tried, and the mean ms before its second attempt: its own terms, or else the pool's.
  function made.terms_of(retry)
    local DEFAULT_PAUSE_MS = 1000
    local most, pause = string.match(retry or '', '^(%S+) (%S+)$')
    local of_pool = redis.call('HMGET', KEYS[1], 'max_attempts', 'retry_backoff_ms')
    return whole(most) or whole(of_pool[1]) or 1, whole(pause) or whole(of_pool[2]) or DEFAULT_PAUSE_MS
  end

  -- The number of a job's present attempt, and the ms before the next one; nil if this was the last one. The pause doubles with
  -- each attempt, and is chosen between half and one and a half of that. A lease has random digits.
  function made.next_attempt(job, now)
    local MAX_PAUSE_MS = 3600000
    local retry, number = unpack(redis.call('HMGET', job_key(job.id), 'retry', 'attempts'))
    local most, mean = made.terms_of(retry)
    number = whole(number) or 1
    if number >= most then return nil end
    local share = tonumber(string.match(job.lease, ':(%x%x%x%x)') or '8000', 16) / 65535
    local pause = math.floor(math.min(MAX_PAUSE_MS, mean * 2 ^ (number - 1)) * (0.5 + share))
    local deadline = whole(redis.call('HGET', job_key(job.id), 'deadline') or '')
    if deadline and now + pause >= deadline then return nil end
    return number, pause
  end

  -- Submits the job that takes the place of a refused one, `successor` (its id and its request): with the same terms, as another
  -- attempt, and with a reader again only once one attaches.
  function made.submit_successor(old, successor, number, pause, now)
    local COPIED = {'deadline', 'needs_reader', 'channel', 'tenant', 'level', 'n', 'cost', 'weight', 'body', 'output',
      'memory_percent', 'account', 'limits', 'max_wait', 'in_feed', 'webhooks', 'model', 'words', 'ms_per_token', 'may_use',
      'minute_tokens', 'retry', 'key', 'key_terms', 'tag1', 'tag2', 'tag3', 'tag4', 'custom', 'extra', 'submitted',
      'accepted'}
    local id, request = unpack(successor)
    local job, fields = {id = id}, {}
    for at, value in ipairs(redis.call('HMGET', job_key(old.id), unpack(COPIED))) do
      if value then job[COPIED[at]] = value end
    end
    job.state, job.node, job.lease, job.first, job.cancel, job.entry = 'queued', '', '', '', '', DELAYED
    job.unread, job.inboxes, job.losses, job.preemptions, job.idem = channels.is(job.channel) and '' or now, '', 0, 0, ''
    job.held = #request + RECORD_BYTES + (whole(job.extra) or 0)
    job.accepted, job.attempts, job.retry_of = job.accepted or job.submitted, number + 1, string.match(old.id, '[^.]*$')
    if job.ms_per_token then job.charged = 0 end
    if pause > 0 then job.submitted = now + pause end
    for name, value in pairs(job) do
      if name ~= 'id' then fields[#fields + 1], fields[#fields + 2] = name, value end
    end
    sure('SET', P .. ':request:' .. id, request)
    redis.call('HSET', job_key(id), unpack(fields))
    redis.call('SADD', P .. ':open', id)
    redis.call('SADD', P .. ':tenant:' .. job.tenant .. ':open', id)
    redis.call('ZADD', lists.key(pause > 0 and 'scheduled' or 'queued', job.tenant), 0, id)
    for _, tag in ipairs(lists.read_tags(id)) do redis.call('ZADD', P .. ':tagged:' .. job.tenant .. ':' .. tag, 0, id) end
    made.count_tags(job.tenant, lists.tags_of(id, job.extra), job.level, 1)
    local metadata = job.extra and redis.call('GET', P .. ':metadata:' .. old.id)
    if metadata then sure('SET', P .. ':metadata:' .. id, metadata) end
    count_bytes(P .. ':stored', job.tenant, job.held)
    count_event('submitted')
    count_event('output_rejected')
    note_due(job)
    if pause > 0 then
      delay_job(job)
    elseif admits_job(token_limit.read_terms(job), now) then
      token_limit.queue_late(job, job.submitted)
    end
  end

end)

-- running → queued. The job keeps its submission time, so jobs submitted later stay behind it. Its tenant's charge is
-- refunded. Until `avoid_until`, in ms, its last node does not take it again. `why`: drain, pressure, lacking (see
-- give_back.lua), lost (its node), unlisted (by its node's heartbeat), repaired (by an audit), or failed/<code> (after an
-- error). `pause`: ms before the next attempt, or nil; it then counts as submitted after these.
local function requeue(job, now, why, cost, avoid_until, pause)
  note_lease_end(job, now, why)
  local tenant, logged, grown = count_log(job.id)
  count_bytes(P .. ':stored', tenant or job.tenant, logged)
  count_bytes(P .. ':reserved', job.tenant, grown - (whole(redis.call('HGET', job_key(job.id), 'reserved')) or 0))
  redis.call('SREM', P .. ':running:' .. job.node, job.id)
  job.cost = tostring(cost)
  redis.call('HSET', job_key(job.id), 'state', 'queued', 'entry', '', 'node', '', 'lease', '', 'cost', cost,
    'reserved', 0, 'avoid', job.node, 'avoid_until', avoid_until)
  if pause and pause > 0 then
    lists.move(job, 'running', 'scheduled')
    rare.postpone(job, now + pause, now)
    return correct_charge(job, -charged_of(job))
  end
  redis.call('ZADD', requeued_key(job), job.submitted, job.id)
  lists.move(job, 'running', 'queued')
  note_queued(job)
  correct_charge(job, -charged_of(job))
  ring_doorbell(cost, avoid_until > 0 and job.node or nil)
end

-- Stored bytes ------------------------------------------------------------------------------------
-- P:stored sums, per tenant, the bytes of open and of ended jobs. An expiring key runs no script. So P:expiry lists each
-- stored key of an ended job as `<bytes> <tenant> <key>` by its expiry time, to be subtracted then.

-- Bytes that Redis compares with maxmemory, and maxmemory (0: none). Redis does not count its buffers for the append-only
-- file and for replicas, which grow while a disk or a replica is slow.
local function used_memory()
  local info = redis.call('INFO', 'memory')
  local function bytes(name) return tonumber(string.match(info, name .. ':(%d+)')) end
  return bytes('used_memory') - bytes('mem_not_counted_for_evict'), bytes('maxmemory')
end

-- The sum of a hash of numbers.
local function total(name)
  local sum = 0
  for _, value in ipairs(redis.call('HVALS', P .. name)) do sum = sum + finite(value) end
  return sum
end

-- Bytes that a tenant's jobs occupy and may still write, and those that they may occupy of Redis's limit.
local function bytes_of(tenant)
  return finite(redis.call('HGET', P .. ':stored', tenant)) + finite(redis.call('HGET', P .. ':reserved', tenant))
end

-- Bytes that a tenant may occupy beside others, and those that it may occupy alone. own_percent: that of its key, or 0 for
-- the pool's setting. limit: Redis's. percent: the part of it that all tenants may fill together. used: what they fill.
-- A tenant alone may fill its own percent. Beside others, it may fill a fixed multiple of what remains free, and a smaller
-- one where little is free. So several tenants that take all they get leave memory for another one. Source: Choudhury and
-- Hahne, "Dynamic queue length thresholds for shared-memory packet switches" (1998). There the multiple is fixed. It would
-- leave the sixth of such tenants 1/7776 of the memory where one may fill 50 of 60 percent.
local function memory_share_of(own_percent, limit, percent, used)
  local DEFAULT_PERCENT = 50
  local alone = own_percent > 0 and own_percent or
    whole(redis.call('HGET', KEYS[1], 'tenant_memory_percent')) or DEFAULT_PERCENT
  local most = limit * alone / 100
  if alone >= percent then return most, most end
  local free = math.min(1, math.max(0, percent - 100 * used / limit) / (percent - alone))
  return most * free * math.min(1, 2 * free), most
end

-- Reserves what a job that is being taken may write beyond what its log has, as its field `reserved`.
local function reserve_output(job)
  local _, bytes = logged_of(job.logged)
  job.reserved = math.max(job.output - bytes, bytes > 0 and MIN_RESERVED_BYTES or 0)
  count_bytes(P .. ':reserved', job.tenant, job.reserved)
end

local function expiry_member(bytes, tenant, key) return string.format('%d %s %s', bytes, tenant, key) end

local function count_stored(tenant, key, bytes, till)
  if bytes == 0 then return end
  add_entry(P .. ':expiry', till, expiry_member(bytes, tenant, key))
  count_bytes(P .. ':stored', tenant, bytes)
end

local function subtract_stored(member)
  local bytes, tenant = string.match(member, '^(%d+) (%S+) ')
  if redis.call('ZREM', P .. ':expiry', member) == 0 then return end
  if not whole(bytes) then return count_event('unknown_sums') end
  count_bytes(P .. ':stored', tenant, -tonumber(bytes))
end

-- The same for a listed member, once for all that a script collects.
local function forget_stored(member, tenant, bytes)
  unlist_member(P .. ':expiry', member)
  count_bytes(P .. ':stored', tenant, -bytes)
end

-- Subtracts up to `max_keys` keys that have expired since the last call. A job leaves its tenant's list with its record.
local function subtract_expired(max_keys)
  local members = redis.call('ZRANGEBYSCORE', P .. ':expiry', '-inf', pool_time.of_redis(), 'LIMIT', 0, max_keys)
  for _, member in ipairs(members) do
    subtract_stored(member)
    local tenant, id, state, tags = string.match(member, '^%d+ (%S+) job:(%S+) ?(%S*)(.*)$')
    if id then
      if state ~= '' then redis.call('ZREM', lists.key(state, tenant), id) end
      if tags ~= '' then rare.untag(tenant, tags, id) end
    end
  end
end

-- Parses a job's field `stored` into bytes of log, large result, dead letter's request, rest and response; nil if it has
-- none. A job without a response has no bytes of one.
local function stored_of(text)
  local log, result, request, rest, response = string.match(text or '', '^(%d+) (%d+) (%d+) (%d+) ?(%d*)$')
  if not log or #text > 70 then return nil end
  return {log = tonumber(log), result = tonumber(result), request = tonumber(request), job = tonumber(rest),
    response = tonumber(response) or 0}
end

-- Deletes a dead letter and its request. Returns 1 if it was one, else 0: other jobs keep their requests.
local function delete_dead_letter(id)
  if redis.call('ZREM', P .. ':dead_letters', id) == 0 then return 0 end
  local tenant, stored = unpack(redis.call('HMGET', job_key(id), 'tenant', 'stored'))
  stored = stored_of(stored)
  redis.call('DEL', P .. ':request:' .. id)
  if stored then subtract_stored(expiry_member(stored.request, tenant or '-', 'request:' .. id)) end
  return 1
end

-- Lifetime of the record of a stored response, in ms after its job's end; nil for a job without one.
local function response_life(job)
  if job.life == nil then job.life = whole(job.keep or redis.call('HGET', job_key(job.id), 'keep')) or false end
  return job.life or nil
end

-- Lifetime of a result, in ms. A large result whose last chunk was pushed to a waiting reader expires with the log. The
-- result of a stored response lives as long as that.
local function result_life(job, config, bytes)
  local keep = response_life(job)
  if keep then return keep end
  local was_read = job.needs_reader ~= '0' and (job.inboxes ~= '' or channels.is(job.channel))
  return bytes > LARGE_RESULT_BYTES and was_read and config.log_ttl_ms or config.result_ttl_ms
end

-- The end of a job --------------------------------------------------------------------------------

local ending = late(function(made)
  -- Makes an ended job a dead letter.
  local function dead_letter(job, now)
    redis.call('ZADD', P .. ':dead_letters', now, job.id)
    for _, id in ipairs(redis.call('ZRANGE', P .. ':dead_letters', 0, -1 - MAX_DEAD)) do delete_dead_letter(id) end
  end

  -- Lifetimes, in ms, of an ended job's record and log. The log of a stored response stands in for a missing result.
  local function record_life(job, config, is_dead)
    return math.max(response_life(job) or config.result_ttl_ms, is_dead and DEAD_LIFE_MS or 0)
  end

  -- Lifetime, in ms, of an ended job's request; nil for a job that completed. Other jobs can be inspected and submitted
  -- again.
  local function request_life(state, config)
    if state == 'succeeded' then return nil end
    return state == 'dead' and DEAD_LIFE_MS or config.result_ttl_ms
  end

  local function log_life(job, config, result_bytes)
    return math.max(config.log_ttl_ms, result_bytes == 0 and response_life(job) or 0)
  end

  -- Counts the bytes that are stored of a job after its end. Returns the fields of its record that say so.
  local function count_ended(job, config, log_bytes, result_bytes, state, is_wide)
    local now = pool_time.of_redis()
    local is_large, is_dead, kept = result_bytes > LARGE_RESULT_BYTES, state == 'dead', request_life(state, config)
    local function with_key(bytes) return bytes > 0 and bytes + KEY_BYTES or 0 end
    local bytes = {log = with_key(log_bytes), result = is_large and with_key(result_bytes) or 0,
      request = kept and with_key(redis.call('STRLEN', P .. ':request:' .. job.id)) or 0,
      job = (is_wide and WIDE_RECORD_BYTES or RECORD_BYTES) + (is_large and 0 or result_bytes) + (whole(job.extra) or 0),
      response = with_key(whole(job.response_bytes) or 0)}
    local large_result_life = result_life(job, config, result_bytes)
    count_stored(job.tenant, 'log:' .. job.id, bytes.log, now + log_life(job, config, result_bytes))
    count_stored(job.tenant, 'result:' .. job.id, bytes.result, now + large_result_life)
    count_stored(job.tenant, 'request:' .. job.id, bytes.request, now + (kept or 0))
    count_stored(job.tenant, lists.record_with(job.id, state, job.tags), bytes.job, now + record_life(job, config, is_dead))
    count_stored(job.tenant, 'response:' .. job.id, bytes.response, now + (response_life(job) or 0))
    local stored = string.format('%d %d %d %d', bytes.log, bytes.result, bytes.request, bytes.job) ..
      (bytes.response > 0 and ' ' .. bytes.response or '')
    if large_result_life < record_life(job, config, is_dead) then
      return 'stored', stored, 'result_until', now + large_result_life
    end
    return 'stored', stored
  end

  -- Terminal chunks, packed by hand because cmsgpack does not keep the order of map keys.
  local function pack_string(s)
    local n = #s
    if n < 32 then return string.char(0xa0 + n) .. s end
    if n < 256 then return string.char(0xd9, n) .. s end
    return struct.pack('>BH', 0xda, n) .. s
  end

  local function pack_uint(n)
    if n < 128 then return string.char(n) end
    if n < 256 then return string.char(0xcc, n) end
    if n < 65536 then return struct.pack('>BH', 0xcd, n) end
    return struct.pack('>BI4', 0xce, n)
  end

  local HEAD = string.char(0x84) .. pack_string('v') .. pack_uint(tonumber(PROTOCOL_VERSION)) .. pack_string('j')
  local INDEX, END = pack_string('i'), pack_string('e') .. string.char(0x84) .. pack_string('state')
  local CODE, MESSAGE, PARAM = pack_string('code'), pack_string('message'), pack_string('param')

  local function terminal_chunk(id, index, state, code, message, param)
    return HEAD .. pack_string(id) .. INDEX .. pack_uint(index) .. END .. pack_string(state) .. CODE .. pack_string(code) ..
      MESSAGE .. pack_string(message) .. PARAM .. pack_string(param)
  end

  -- Number of bytes and tokens in a job's log, for a job whose node did not report them.
  local function measure_log(id)
    local bytes, tokens, from, page = 0, 0, 0, nil
    repeat
      page = redis.call('LRANGE', log_key(id), from, from + LOG_PAGE - 1)
      for _, chunk in ipairs(page) do
        local ok, fields = pcall(cmsgpack.unpack, chunk)
        bytes = bytes + #chunk
        if ok and type(fields) == 'table' and type(fields.t) == 'table' then tokens = tokens + #fields.t end
      end
      from = from + LOG_PAGE
    until #page < LOG_PAGE
    return bytes, tokens
  end

  local DAY_MS, USAGE_DAYS = 86400000, 92
  local HOUR_MS, USAGE_HOURS = 3600000, 72
  local USED = {'jobs', 'prompt', 'completion', 'cached'}

  -- Counts a job's tokens per tenant and account in P:usage:<day> and P:hour_usage:<hour>. Only `end_job` calls it, once per
  -- job.
  local function add_usage(job, account, now, used)
    local day, hour = P .. ':usage:' .. math.floor(now / DAY_MS), P .. ':hour_usage:' .. math.floor(now / HOUR_MS)
    local name = job.tenant .. ':' .. (account or '') .. ':'
    for _, what in ipairs(USED) do
      local amount = what == 'jobs' and 1 or used[what]
      if amount > 0 then
        what = name .. what
        add_with_life(day, USAGE_DAYS * DAY_MS, what, amount)
        add_with_life(hour, USAGE_HOURS * HOUR_MS, what, amount)
      end
    end
  end

  -- Corrects the charge to a tenant's token rate by `by` tokens; negative if the charge was too high. A debt is kept
  -- until it is worked off. A refund never gives more than a full burst, because a due time in the past counts as now.
  -- ms_per_token: the rate at the job's submit. The rate that the debt is stated at goes first: it may be newer.
  local function correct_rate(job, ms_per_token, by, now)
    local key = P .. ':rate:' .. job.tenant
    local jobs, tokens, stated = unpack(redis.call('HMGET', key, 'jobs', 'tokens', 'ms_per_token'))
    if finite(stated) > 0 then ms_per_token = finite(stated) end
    local due = math.max(now, finite(tokens)) + by * ms_per_token
    local life = math.ceil(math.max(due, finite(jobs)) - now)
    if life <= 0 then
      redis.call('DEL', key)
    else
      redis.call('HSET', key, 'tokens', due, 'ms_per_token', ms_per_token)
      redis.call('PEXPIRE', key, life)
    end
  end

  -- Remembers the length of a tenant's recent outputs, for its token rate: the longest one, which fades by a tenth per job.
  local function note_length(job, state, num_tokens)
    if state ~= 'succeeded' or num_tokens == 0 then return end
    local known = whole(redis.call('HGET', P .. ':lengths', job.tenant)) or 0
    redis.call('HSET', P .. ':lengths', job.tenant, math.max(math.ceil(num_tokens / tonumber(job.n)), math.floor(known * 0.9)))
  end

  -- Appends an ended job to its tenant's completions, as `<uuid> <state>[ <tag>…]`. If the tenant has none yet, its first
  -- entry says in `after` which was the last one before, for cursors. Nothing here may keep a job from ending.
  local MAX_ENDED = 200000

  local function note_completion(job, config, now, state)
    local key = P .. ':ended:' .. job.tenant
    local tags = job.tags
    if tags ~= '' then tags = string.gsub(tags, ' ?#%S+', '') end
    local entry = string.match(job.id, '[^.]*$') .. ' ' .. state .. (tags ~= '' and ' ' .. tags or '')
    if redis.pcall('XADD', key, 'NOMKSTREAM', 'MAXLEN', '~', MAX_ENDED, '*', 'j', entry) then return end
    local last = redis.call('HGET', P .. ':ended_before', job.tenant) or '0-0'
    redis.call('XADD', key, '*', 'j', entry, 'after', last)
    redis.call('ZADD', P .. ':ended', now + config.result_ttl_ms, job.tenant)
  end

  -- Notes in P:untold that the endpoints which a job names are to be told of its end. Gateways hand that to webhooks.lua.
  -- Nothing here may keep a job from ending.
  local MAX_UNTOLD = 100000

  local function note_webhooks(job, state)
    local size = redis.pcall('HGET', P .. ':untold_sizes', job.tenant)
    if type(size) == 'table' or finite(size) >= MAX_UNTOLD then
      count_event('webhooks_dropped')
      return
    end
    local kind = (whole(job.response_bytes) or 0) > 0 and 'response' or 'job'
    local entry = table.concat({string.match(job.id, '[^.]*$'), state, kind, job.tenant, job.webhooks}, ' ')
    if type(redis.pcall('XADD', P .. ':untold', '*', 'e', entry)) == 'string' then
      count_now(P .. ':untold_sizes', job.tenant, 1)
    end
  end

  -- Fields that the end of a job needs beside JOB_FIELDS.
  local END_FIELDS = {'held', 'reserved', 'idem', 'ms_per_token', 'charged', 'account', 'past_leases', 'keep', 'response_bytes',
    'in_feed', 'extra', 'webhooks', 'stopped_by'}

  local function read_end_fields(job)
    if job.past_leases then return end
    for at, value in ipairs(redis.call('HMGET', job_key(job.id), unpack(END_FIELDS))) do job[END_FIELDS[at]] = value or '' end
  end

  local function read_tags(job)
    if not job.tags then job.tags = lists.tags_of(job.id, job.extra) end
  end

  local function leave_sets(job, state)
    if job.state == 'queued' then
      leave_queue(job)
      if job.entry == DELAYED then lists.leave('scheduled', job) end
    else
      remove_member(P .. ':running:' .. job.node, job.id)
    end
    lists.move(job, job.state, state)
    remove_member(P .. ':open', job.id)
    remove_member(P .. ':tenant:' .. job.tenant .. ':open', job.id)
  end

  -- Counts a job that a bulk action asked to stop by how it ended: it may have been faster.
  local function note_stopped(job, state)
    local action = P .. ':bulk:' .. job.stopped_by
    if not redis.call('HGET', action, 'asked_to_stop') then return end
    redis.call('HINCRBY', action, 'asked_to_stop', -1)
    redis.call('HINCRBY', action, state == 'cancelled' and 'changed' or 'already_over', 1)
  end

  -- Corrects what the job was charged for its tenant's limits of tokens. A task keeps its charge: its node reports no tokens.
  local function correct_tokens(job, state, now, reported)
    local ms_per_token = finite(job.ms_per_token)
    if ms_per_token <= 0 or is_task(job) then return end
    note_length(job, state, reported.completion)
    local num_used = reported.prompt + reported.completion
    correct_rate(job, ms_per_token, num_used - (whole(job.charged) or 0), now)
    token_limit.settle_tokens(job, num_used, now)
  end

  -- Ends a job; the only way to a terminal state. The record keeps node and lease, to recognize a repeated finish.
  -- `reported`: what the job's node reported: tokens of prompt, completion, cached and reasoning; kv_token_ms; bytes of the
  -- log before the terminal chunk and of the result. Without it, bytes and completion tokens come from the log, and prompt
  -- tokens are not counted. `last`: of finish, the length of the log, the chunks that go into it before the terminal one,
  -- and further fields of the record.
  function made.end_job(job, config, now, state, code, message, param, reported, last)
    if not reported then lists.ended[#lists.ended + 1] = {job.id, job.tenant, state, code} end
    reported = reported or {}
    if code == 'node_lost' then state = 'dead' end
    local log, chunks = log_key(job.id), last and last.chunks or {}
    local length = last and last.length or redis.call('LLEN', log)
    if not reported.completion or not reported.log_bytes then
      if #chunks > 0 then length, chunks = redis.call('RPUSH', log, unpack(chunks)), {} end
      local bytes, tokens = measure_log(job.id)
      reported = {prompt = reported.prompt or 0, completion = reported.completion or tokens,
        cached = reported.cached or 0, log_bytes = bytes, result_bytes = reported.result_bytes,
        kv_token_ms = reported.kv_token_ms, reasoning = reported.reasoning}
    end
    read_end_fields(job)
    read_tags(job)
    leave_sets(job, state)
    local is_dead, kept = state == 'dead', request_life(state, config)
    count_event('ended_' .. state)
    if state == 'expired' then count_event('expired_level_' .. job.level) end
    if is_dead then
      count_event('dead_letters')
      note_event(now, 'dead_letter', job.node, job.id, '-', '-')
    end
    if is_dead then dead_letter(job, now) end
    if kept then sure('PEXPIRE', P .. ':request:' .. job.id, kept) else sure('DEL', P .. ':request:' .. job.id) end
    local held, reserved = whole(job.held), job.reserved == '' and 0 or whole(job.reserved)
    if not held or not reserved then count_event('unknown_sums') end
    count_bytes(P .. ':stored', job.tenant, -(held or 0))
    count_bytes(P .. ':reserved', job.tenant, -(reserved or 0))
    local is_wide = #message > MAX_SHORT_BYTES or #param > MAX_SHORT_BYTES or #job.past_leases > MAX_SHORT_BYTES or
      #job.inboxes > MAX_SHORT_BYTES or #(job.loss_nodes or '') > MAX_SHORT_BYTES
    add_usage(job, job.account, now, reported)
    if not is_task(job) and job.in_feed ~= '0' then note_completion(job, config, now, state) end
    if job.webhooks ~= '' then note_webhooks(job, state) end
    if job.extra ~= '' then rare.give_up(job, now) end
    if job.tags ~= '' then rare.end_tags(job, state, now) end
    if job.stopped_by ~= '' then note_stopped(job, state) end
    correct_tokens(job, state, now, reported)
    if job.idem ~= '' then
      -- A caller that repeats its request after a broken connection gets a new job, not this job's `unread`.
      redis.call('PEXPIRE', P .. ':idem:' .. job.idem, code == 'unread' and 0 or config.idem_ttl_ms)
    end
    local index = length + #chunks
    local chunk = terminal_chunk(job.id, index, state, code, message, param)
    chunks[#chunks + 1] = chunk
    sure('RPUSH', log, unpack(chunks))
    sure('PEXPIRE', log, log_life(job, config, reported.result_bytes or 0))
    local used = string.format('%d %d %d ', reported.prompt, reported.completion, reported.cached) ..
      (reported.kv_token_ms and string.format('%.0f', reported.kv_token_ms) or '') ..
      (reported.reasoning and string.format(' %d', reported.reasoning) or '')
    local key = job_key(job.id)
    if last and last.fields[1] then sure('HSET', key, unpack(last.fields)) end
    sure('HSET', key, 'state', state, 'finished', now, 'chunks', index + 1, 'code', code, 'message', message, 'param', param,
      'used', used, count_ended(job, config, reported.log_bytes + #chunk, reported.result_bytes or 0, state, is_wide))
    sure('PEXPIRE', key, record_life(job, config, is_dead))
    local keep = response_life(job)
    if keep then redis.call('PEXPIRE', P .. ':response:' .. job.id, keep) end
    if job.extra ~= '' then redis.call('PEXPIRE', P .. ':metadata:' .. job.id, record_life(job, config, is_dead)) end
    publish(job, chunk)
  end
end)

local function end_job(...) return ending.end_job(...) end

-- State, code and message with which a job must end now; nil if it may still run.
local function why_over(job, config, now)
  if job.problem then
    return 'failed', 'internal_error', job.problem .. ' in Redis was lost or damaged'
  end
  if job.cancel == '1' then return 'cancelled', 'cancelled', 'the job was cancelled' end
  if is_expired(job, now) then
    if redis.call('HGET', job_key(job.id), 'begun_deadline') then
      return 'expired', 'not_started_in_time', 'no node started the job within its ttl_s'
    end
    return 'expired', 'deadline_exceeded', 'the deadline passed before the job was done'
  end
  if lacks_reader(job, config, now) then return 'cancelled', 'unread', 'the job has no reader any more' end
end

-- Counts a loss of a job, and ends it as a dead letter after too many. Returns whether it has ended. A loss counts against
-- the job only if it made no progress since its last loss and now lost something else. `lost`: a node, or one life of the
-- ranks of a node.
local function end_if_lost_too_often(job, lost, config, now)
  local length = redis.call('LLEN', log_key(job.id))
  local losses, nodes = whole(job.losses) or 0, job.loss_nodes
  local entry = ' ' .. lost .. '@'
  if length - (whole(job.loss_mark) or 0) >= config.progress_chunks then
    losses, nodes = 0, entry .. now
  elseif not string.find(nodes, entry, 1, true) then
    losses, nodes = losses + 1, nodes .. entry .. now
  end
  count_event('losses')
  redis.call('HSET', job_key(job.id), 'losses', losses, 'loss_mark', length, 'loss_nodes', nodes)
  if losses < config.max_losses then return false end
  end_job(job, config, now, 'dead', 'node_lost', 'its nodes died ' .. losses .. ' times without progress', '')
  return true
end

function end_if_over(job, config, now)
  local state, code, message = why_over(job, config, now)
  if state then end_job(job, config, now, state, code, message, '') end
  return state ~= nil
end
