-- audit: compare jobs, tenants' virtual times and sums with the jobs' records. With a repairer it also corrects them.
-- That is safe beside running nodes: one script run checks and corrects a job, and sums are corrected by differences.
-- ARGV: repairer ('' only checks), msgpack of
--   {jobs = [[id, [[key, entry]…]]…], virtual_times = [[level, tenant]…], idems = [key…], feeds = [tenant…] or nil,
--    wrong_types = [[key, type]…] or nil, strays = [[key, member]…] or nil, sums = [[key, field, by, is_lost]…] or nil}
--   key: a key without P: in which the id was seen. entry: its stream entry, or its member of P:expiry, else ''.
--   virtual_times: tenants that have one. idems: keys without P:. feeds: tenants with completions.
--   wrong_types: keys with the type that they should have. strays: members that name no job.
--   sums: corrections; a repairer's last call has them. is_lost: the stored sum is no number, and `by` is the whole sum.
--   With 'release' instead of msgpack, only the repairer's lock ends.
-- Answer: {OK, {finding…}, {{id, tenant, state, code} of an ended job, …}} | {UNKNOWN_POOL} | {BUSY}; finding: {name, key without P:, id, detail}
--   BUSY: another audit repairs this pool.
-- What cannot be read is a finding, and the others go on. Without a repairer nothing is written: `redis.call` of an audit
-- mends nothing by itself.
-- A repair deletes members that name no job, entries without `id` and keys of another type, and writes what the lists of a job
-- tell of its fields. A job whose record or request is lost ends as `failed: internal_error`. The repairer's lock ends with
-- it, also if it fails. broker/audit.py lists the invariants.
local redis = _G.redis
if ARGV[2] == 'release' then
  if redis.pcall('GET', P .. ':audit') == ARGV[1] then redis.call('DEL', P .. ':audit') end
  return {'OK', {}, {}}
end
local MAX_ROWS, REPAIR_MS, EXPIRY_SLACK_MS = 32, 10000, 5000
local repairer, asked = ARGV[1], cmsgpack.unpack(ARGV[2])
local config, now = read_config(), clock()
if not config then return {'UNKNOWN_POOL'} end
if #asked.jobs > MAX_ROWS or #asked.virtual_times > MAX_ROWS or #asked.idems > MAX_ROWS
  or #(asked.feeds or {}) > MAX_ROWS or #(asked.wrong_types or {}) > MAX_ROWS or #(asked.strays or {}) > MAX_ROWS then
  return redis.error_reply('TOO_MANY_ROWS')
end
local repairs = repairer ~= ''
if repairs then
  local other = redis.pcall('GET', P .. ':audit')
  if type(other) == 'string' and other ~= repairer then return {'BUSY'} end
  redis.call('DEL', P .. ':audit')
  redis.call('SET', P .. ':audit', repairer, 'PX', REPAIR_MS)
end

local findings = {}
local function find(name, key, id, detail) findings[#findings + 1] = {name, key, id, detail or ''} end

-- A whole number is digits, as many as Lua and Python hold exactly. `tonumber` also takes NaN and infinity.
local function is_whole(text) return #text < 16 and string.find(text, '^%d+$') ~= nil end

-- Keys that list jobs ------------------------------------------------------------------------------
-- Names of keys are without P:. The value of an id in a key is false if it is absent, else its score, its stream entry,
-- or '' in a set.

-- The keys that must list a job, and its values there, by its record.
local function keys_of(job)
  if not job then return {} end
  local keys = {}
  for _, tag in ipairs(lists.read_tags(job.id)) do keys['tagged:' .. job.tenant .. ':' .. tag] = '0' end
  local list = job.state
  if job.state == 'queued' and job.entry == DELAYED and
    redis.call('ZSCORE', P .. ':delayed:' .. lane_of(job), job.id) then list = 'scheduled' end
  keys[string.sub(lists.key(list, job.tenant), #P + 2)] = '0'
  if is_terminal(job.state) then return keys end
  keys.open, keys['tenant:' .. job.tenant .. ':open'] = '', ''
  local may_use = job.entry ~= DELAYED and redis.call('HGET', job_key(job.id), 'may_use')
  if may_use then keys['may_use:' .. job.tenant] = may_use end
  local key = redis.call('HGET', job_key(job.id), 'key')
  local lane_of_key = key and job.tenant .. ':' .. key
  if key and job.entry ~= DELAYED then keys['keyed:' .. lane_of_key] = '' end
  if job.state == 'running' then
    keys['running:' .. job.node] = ''
    return keys
  end
  if job.deadline ~= '' then keys.deadlines = job.deadline end
  if job.entry == DELAYED then
    local place = redis.call('ZSCORE', P .. ':awaiting:' .. job.tenant, job.id)
    local of_key = lane_of_key and redis.call('ZSCORE', P .. ':awaiting:' .. lane_of_key, job.id)
    if of_key then
      keys['awaiting:' .. lane_of_key] = of_key
    elseif place then
      keys['awaiting:' .. job.tenant] = place
    else
      keys['delayed:' .. lane_of(job)] = job.submitted
    end
    if lane_of_key and place and not of_key then keys['keyed:' .. lane_of_key] = '' end
    return keys
  end
  keys['waiting:' .. job.level] = job.submitted
  if is_task(job) then keys.tasks = job.submitted end
  if job.entry ~= '' then
    keys['queue:' .. job.level .. ':' .. job.tenant] = job.entry
  else
    keys['requeued:' .. job.level .. ':' .. job.tenant] = job.submitted
  end
  return keys
end

local function kind_of(name)
  local head = string.match(name, '^[^:]+')
  if head == 'queue' then return 'stream' end
  if head == 'open' or head == 'tenant' or head == 'running' or head == 'keyed' then return 'set' end
  return 'zset'
end

local function value_in(name, id, entry)
  local key, kind = P .. ':' .. name, kind_of(name)
  if kind == 'set' then return redis.pcall('SISMEMBER', key, id) == 1 and '' end
  if kind == 'zset' then
    local score = redis.pcall('ZSCORE', key, id)
    return type(score) == 'string' and score
  end
  local found = redis.pcall('XRANGE', key, entry, entry)[1]
  return found ~= nil and found[2][2] == id and entry
end

local function is_same(one, other)
  if one == false or other == false then return one == other end
  return one == other or (tonumber(one) ~= nil and tonumber(one) == tonumber(other))
end

local function put(name, id, wanted)
  local key, kind = P .. ':' .. name, kind_of(name)
  if kind == 'set' then
    redis.call('SADD', key, id)
  elseif kind == 'zset' then
    redis.call('ZADD', key, wanted, id)
    if string.match(name, '^requeued:') then enter_tenant(read_job(id)) end
  else
    -- A stream entry cannot be restored at its old position, so the job goes to the requeued jobs.
    redis.call('HSET', job_key(id), 'entry', '')
    local job = read_job(id)
    redis.call('ZADD', requeued_key(job), job.submitted, id)
    enter_tenant(job)
  end
end

local function remove(name, id, entry)
  local key, kind = P .. ':' .. name, kind_of(name)
  if kind == 'set' then
    redis.call('SREM', key, id)
  elseif kind == 'zset' then
    redis.call('ZREM', key, id)
  else
    redis.call('XDEL', key, entry)
    if redis.call('XLEN', key) == 0 then redis.call('DEL', key) end
  end
end

local function check_key(job, id, name, entry, wanted)
  local is = value_in(name, id, entry)
  if is_same(is, wanted) then return end
  if wanted == false then
    find('stray', name, id, 'its record says otherwise')
    if repairs then remove(name, id, entry) end
  else
    find(is == false and 'missing' or 'wrong_score', name, id, 'should be ' .. wanted)
    if repairs then put(name, id, wanted) end
  end
end

-- What P:expiry says of a stored key of an ended job.
local function counted_as(name, id, state) return name == 'job' and lists.record(id, state) or name .. ':' .. id end

-- Checks a member of P:expiry: its key must exist, with the bytes that the job's record says.
local function check_expiry(id, member)
  local key = string.match(member, '^%d+ %S+ (.+)$') or ''
  local job = read_job(id, {'state', 'tenant', 'stored'})
  local stored = job and stored_of(job.stored)
  local bytes = stored and stored[string.match(key, '^%l+') or '']
  local is_stored = redis.call('EXISTS', P .. ':' .. string.match(key, '^%S*')) == 1
  if job and string.match(key, '^job:') then key = counted_as('job', id, job.state) end
  local is_right = is_stored and bytes and member == expiry_member(bytes, job.tenant, key)
  local score = tonumber(redis.call('ZSCORE', P .. ':expiry', member) or '')
  local goes_soon = score and score < pool_time.of_redis() + EXPIRY_SLACK_MS
  if score and not goes_soon and not is_right then
    find('stray', 'expiry', id, key .. ' is not stored')
    if repairs then subtract_stored(member) end
  end
end

-- Checks that each stored key of an ended job has its member in P:expiry.
local function check_counted(job)
  local stored = stored_of(redis.call('HGET', job_key(job.id), 'stored'))
  for name, bytes in pairs(stored or {}) do
    local key = counted_as(name, job.id, job.state)
    local life = redis.call('PTTL', P .. ':' .. name .. ':' .. job.id)
    local member = expiry_member(bytes, job.tenant, key)
    if bytes > 0 and life > EXPIRY_SLACK_MS and not redis.call('ZSCORE', P .. ':expiry', member) then
      find('missing', 'expiry', job.id, key .. ' is stored')
      if repairs then count_stored(job.tenant, key, bytes, pool_time.of_redis() + life) end
    end
  end
end

-- Whether a job ended as a dead letter. It may be in P:dead_letters but need not, because it may have been purged.
local function is_dead_letter(job) return job and redis.call('HGET', job_key(job.id), 'code') == 'node_lost' end

-- Whether a record has expired, but no sweep has subtracted its bytes and removed the job from its tenant's list yet.
local function awaits_sweep(job, seen)
  for _, one in ipairs(seen) do
    if not job and one[1] == 'expiry' and string.match(one[2], '^%d+ %S+ job:') then
      local score = tonumber(redis.call('ZSCORE', P .. ':expiry', one[2]) or '')
      return score ~= nil and score < pool_time.of_redis() + EXPIRY_SLACK_MS
    end
  end
  return false
end

local function check_keys(job, id, seen)
  local wanted, is_expiring = keys_of(job), awaits_sweep(job, seen)
  for name, value in pairs(wanted) do check_key(job, id, name, value, value) end
  for _, one in ipairs(seen) do
    local name, entry = one[1], one[2]
    local known = wanted[name]
    if name == 'dead_letters' and is_dead_letter(job) then known = '' end
    if is_expiring and (string.match(name, '^jobs:') or string.match(name, '^tagged:')) then known = '' end
    if name == 'expiry' then
      known = ''
      check_expiry(id, entry)
    end
    if known == nil or (kind_of(name) == 'stream' and known ~= entry) then check_key(job, id, name, entry, false) end
  end
end

-- Lifetimes ----------------------------------------------------------------------------------------

local STORED_KEYS = {'job', 'request', 'log', 'result', 'response', 'metadata'}

local function check_life(name, id, is_open)
  local key = name .. ':' .. id
  local life = redis.call('PTTL', P .. ':' .. key)
  if is_open and life >= 0 then
    find('would_vanish', key, id, 'an open job lives for ever')
    if repairs then redis.call('PERSIST', P .. ':' .. key) end
  elseif not is_open and life == -1 then
    find('lives_for_ever', key, id, 'its job has ended or is unknown')
    local ttl_ms = name == 'log' and config.log_ttl_ms or config.result_ttl_ms
    if repairs then redis.call('PEXPIRE', P .. ':' .. key, ttl_ms) end
  end
end

-- State and index in the last chunk of a log; nil if that is not a terminal chunk.
local function end_in_log(id)
  local last = redis.call('LINDEX', log_key(id), -1)
  local ok, chunk = pcall(cmsgpack.unpack, last or '')
  if ok and type(chunk) == 'table' and type(chunk.e) == 'table' then return chunk.e.state, chunk.i end
end

local function check_ended(job)
  local id, state, index = job.id, end_in_log(job.id)
  local length = redis.call('LLEN', log_key(id))
  if length > 0 and state ~= job.state then
    find('no_terminal_chunk', 'log:' .. id, id, 'the record says ' .. job.state .. ', the log ' .. tostring(state))
  elseif length > 0 and index ~= length - 1 then
    find('wrong_index', 'log:' .. id, id, 'the terminal chunk says ' .. tostring(index) .. ' of ' .. length)
  end
  local chunks, losses, nodes = unpack(redis.call('HMGET', job_key(id), 'chunks', 'losses', 'loss_nodes'))
  if length > 0 and tonumber(chunks or '') ~= length then
    find('wrong_count', 'job:' .. id, id, 'chunks is ' .. tostring(chunks) .. ', the log has ' .. length)
  end
  check_counted(job)
  local result_until = tonumber(redis.call('HGET', job_key(id), 'result_until') or '')
  local may_be_gone = result_until and result_until < pool_time.of_redis() + EXPIRY_SLACK_MS
  if job.state == 'succeeded' and not may_be_gone and redis.call('EXISTS', P .. ':result:' .. id) == 0 then
    find('no_result', 'result:' .. id, id, 'the job is done')
  end
  local _, num_nodes = string.gsub(nodes or '', '%S+', '')
  if is_dead_letter(job) and
    (tonumber(losses or '0') < config.max_losses or num_nodes < config.max_losses) then
    find('not_lost', 'job:' .. id, id, 'node_lost after ' .. tostring(losses) .. ' losses on ' .. num_nodes .. ' nodes')
  end
end

local function check_open(job)
  local id = job.id
  if end_in_log(id) then find('end_of_open_job', 'log:' .. id, id, 'the record says ' .. job.state) end
  if redis.call('EXISTS', P .. ':request:' .. id) == 0 then
    find('no_request', 'request:' .. id, id, 'the job cannot be run')
    if repairs then end_job(job, config, now, 'failed', 'internal_error', 'the request of this job is lost', '') end
  elseif job.state == 'running' and not redis.call('ZSCORE', P .. ':nodes', job.node) then
    find('stranded', 'running:' .. job.node, id, 'no sweep finds a node that is not in the pool')
    if repairs then requeue(job, now, 'repaired', job.cost, 0) end
  end
end

-- Checks the job's ledger: it lists as many past leases as it counts, up to a limit, and no more of a kind than the
-- job's record counts.
local function check_ledger(job)
  local past, count = unpack(redis.call('HMGET', job_key(job.id), 'past_leases', 'num_past_leases'))
  local _, num_listed = string.gsub(past or '', '%S+@%d+%-%d+:%l+', '')
  local _, num_given_back = string.gsub(past or '', ':drain', '')
  local _, num_pressed = string.gsub(past or '', ':pressure', '')
  local key, num_past = 'job:' .. job.id, is_whole(count or '0') and tonumber(count or '0') or -1
  if num_listed ~= math.min(num_past, MAX_PAST_LEASES) then
    find('wrong_ledger', key, job.id, num_listed .. ' past leases are listed of ' .. num_past)
  elseif num_given_back + num_pressed > tonumber(job.preemptions) then
    find('wrong_ledger', key, job.id, 'more returns are listed than the ' .. job.preemptions .. ' of the record')
  end
end

-- Damaged records ---------------------------------------------------------------------------------

local OPEN_STATES = {queued = true, running = true}

local RIGHT = {
  state = function(text) return OPEN_STATES[text] or is_terminal(text) end,
  tenant = function(text) return string.find(text, '^[%w_-]+$') ~= nil end,
  level = function(text) return string.find(text, '^[0-5]$') ~= nil end,
  entry = function(text) return text == '' or text == DELAYED or (#text < 22 and string.find(text, '^%d+%-%d+$') ~= nil) end,
  weight = function(text)
    local weight = text == '' and 1 or tonumber(text)
    return weight ~= nil and weight > 0 and weight <= 1000
  end,
}
for _, name in ipairs({'n', 'cost', 'submitted', 'losses', 'preemptions', 'needs_reader'}) do RIGHT[name] = is_whole end
for _, name in ipairs({'deadline', 'unread', 'loss_mark', 'taken', 'first'}) do
  RIGHT[name] = function(text) return text == '' or is_whole(text) end
end

-- What the keys in which a job was seen tell of it.
local function told_by(seen)
  local told = {state = 'queued', level = '1', n = '1', cost = '1', submitted = tostring(now), losses = '0', preemptions = '0',
    needs_reader = '1', entry = ''}
  for _, one in ipairs(seen) do
    local name, entry = one[1], one[2]
    local kind, rest = string.match(name, '^([^:]+):?(.*)$')
    local level, tenant = string.match(rest, '^([0-5]):([%w_-]+)$')
    if kind == 'running' then told.state, told.node = 'running', rest end
    if kind == 'tenant' then told.open, tenant = true, string.match(rest, '^([%w_-]+):open$') end
    if kind == 'jobs' then tenant = string.match(rest, '([%w_-]+)$') end
    if kind == 'jobs' and is_terminal(string.match(rest, '^(%l+):') or '') then told.ended = string.match(rest, '^%l+') end
    if kind == 'waiting' then level = rest end
    if kind == 'queue' then told.entry = entry end
    if kind == 'delayed' or kind == 'awaiting' then told.entry = DELAYED end
    if kind == 'awaiting' or kind == 'keyed' then tenant = string.match(rest, '^[^:]+') end
    if kind == 'tasks' then told.n = '0' end
    told.level, told.tenant = level or told.level, tenant or told.tenant
  end
  if told.ended and not told.open then told.state = told.ended end
  return told
end

-- Reports the wrong fields of a record. A repair writes what the other keys tell, or a default. Returns whether the record
-- can be compared with them.
local function check_fields(job, seen)
  local wrong, told = {}, nil
  for name, is_right in pairs(RIGHT) do
    if not is_right(job[name]) then wrong[#wrong + 1] = name end
  end
  table.sort(wrong)
  for _, name in ipairs(wrong) do
    told = told or told_by(seen)
    find('wrong_field', 'job:' .. job.id, job.id, name .. ' is ' .. string.sub(job[name], 1, 32))
    if repairs and (name ~= 'tenant' or told.tenant) then
      job[name] = told[name] or ''
      redis.call('HSET', job_key(job.id), name, job[name])
    end
  end
  if repairs and told and told.node and job.state == 'running' and job.node == '' then
    redis.call('HSET', job_key(job.id), 'node', told.node)
  end
  return #wrong == 0 or (repairs and RIGHT.tenant(job.tenant))
end

-- A job that its tenant has open, and whose record is lost. A repair ends it.
local function end_lost_job(id, seen)
  local told = told_by(seen)
  if not told.open then return end
  find('no_record', 'job:' .. id, id, 'the job is open')
  if not repairs then return end
  local fields = {}
  for _, name in ipairs({'tenant', 'level', 'n', 'submitted', 'losses', 'preemptions', 'needs_reader', 'entry', 'node'}) do
    fields[#fields + 1], fields[#fields + 2] = name, told[name] or ''
  end
  redis.call('HSET', job_key(id), 'state', told.state, 'cost', '0', unpack(fields))
  end_job(read_job(id), config, now, 'failed', 'internal_error', 'the record of this job is lost', '')
end

local function check_job(id, seen)
  local job = read_job(id)
  if not job then
    if redis.call('EXISTS', job_key(id)) == 1 then
      redis.call(repairs and 'DEL' or 'EXISTS', job_key(id))
      find('wrong_field', 'job:' .. id, id, 'state is absent')
      if not repairs then return end
    end
    end_lost_job(id, seen)
    job = read_job(id)
  elseif not check_fields(job, seen) then
    return
  end
  check_keys(job, id, seen)
  local is_open = job and not is_terminal(job.state)
  for _, name in ipairs(STORED_KEYS) do check_life(name, id, is_open) end
  if not job then return end
  job = read_job(id)
  check_ledger(job)
  if is_open then check_open(job) else check_ended(job) end
end

-- Tenants and sums ---------------------------------------------------------------------------------

local function check_tenant(level, tenant)
  local job = {level = level, tenant = tenant}
  local has_jobs = redis.call('EXISTS', queue_key(job), requeued_key(job)) > 0
  local has_virtual_time = redis.call('ZSCORE', virtual_time_key(job), tenant)
  if has_jobs and not has_virtual_time then
    find('missing', 'virtual_time:' .. level, tenant, 'the tenant has queued jobs')
    if repairs then enter_tenant(job) end
  elseif has_virtual_time and not has_jobs then
    find('stray', 'virtual_time:' .. level, tenant, 'the tenant has no queued job')
    if repairs then leave_tenant_if_last(job) end
  end
end

-- An idempotency key must live as long as its job is open, and expire after that.
local function check_idem(key)
  local id = redis.call('GET', P .. ':' .. key)
  local job = id and string.find(id, '^[%w._-]+$') and read_job(id)
  id = job and id or string.sub(id or '', 1, 64)
  local is_open, life = job and not is_terminal(job.state), redis.call('PTTL', P .. ':' .. key)
  if is_open and life >= 0 then
    find('would_vanish', key, id, 'the key of an open job lives for ever')
    if repairs then redis.call('PERSIST', P .. ':' .. key) end
  elseif not is_open and life == -1 then
    find('lives_for_ever', key, id, 'its job has ended or is unknown')
    if repairs then redis.call('PEXPIRE', P .. ':' .. key, config.idem_ttl_ms) end
  end
end

-- A sweep drops old completions of the tenants that P:ended lists.
local function check_feed(tenant)
  local has_feed, is_listed = redis.call('EXISTS', P .. ':ended:' .. tenant) == 1, redis.call('ZSCORE', P .. ':ended', tenant)
  if has_feed and not is_listed then
    find('missing', 'ended', tenant, 'the tenant has completions')
    if repairs then redis.call('ZADD', P .. ':ended', now, tenant) end
  elseif is_listed and not has_feed then
    find('stray', 'ended', tenant, 'the tenant has no completions')
    if repairs then redis.call('ZREM', P .. ':ended', tenant) end
  end
end

local function check_nodes()
  local known = {}
  for _, node in ipairs(redis.call('ZRANGE', P .. ':nodes', 0, -1)) do known[node] = true end
  for _, node in ipairs(redis.call('ZRANGE', P .. ':free', 0, -1)) do
    if not known[node] then
      find('stray', 'free', node, 'the node is not in the pool')
      if repairs then redis.call('ZREM', P .. ':free', node) end
    end
  end
  for _, name in ipairs({'pressure', 'adapters', 'reservations'}) do
    for _, node in ipairs(redis.call('HKEYS', P .. ':' .. name)) do
      if not known[node] then
        find('stray', name, node, 'the node is not in the pool')
        if repairs then redis.call('HDEL', P .. ':' .. name, node) end
      end
    end
  end
end

local REMOVE = {zset = 'ZREM', set = 'SREM', stream = 'XDEL', hash = 'HDEL'}

local function check_member(name, member)
  local key = P .. ':' .. name
  find('stray', name, member, 'it names no job')
  local command = REMOVE[redis.call('TYPE', key).ok]
  if repairs and command then redis.call(command, key, member) end
end

local function check_type(name, wanted)
  local key = P .. ':' .. name
  local is = redis.call('TYPE', key).ok
  if is == wanted or is == 'none' then return end
  find('wrong_type', name, '-', 'it is a ' .. is .. ', not a ' .. wanted)
  if repairs then redis.call('DEL', key) end
end

local function correct_sum(name, field, by, is_lost)
  local key = P .. ':' .. name
  if is_lost then redis.call('HSET', key, field, string.format('%d', by)) else redis.call('HINCRBY', key, field, by) end
  if is_lost and by == 0 then redis.call('HDEL', key, field) end
end

-- Runs a check of one row. What it cannot read is a finding.
local function guarded(key, id, check, ...)
  local is_done, problem = pcall(check, ...)
  if is_done then return end
  local text = type(problem) == 'table' and problem.err or tostring(problem)
  if string.find(text, 'NOPERM', 1, true) then error(problem) end
  find('unchecked', key, id, string.sub(text, 1, 160))
end

for _, row in ipairs(asked.wrong_types or {}) do guarded(row[1], '-', check_type, row[1], row[2]) end
for _, row in ipairs(asked.strays or {}) do guarded(row[1], row[2], check_member, row[1], row[2]) end
for _, row in ipairs(asked.jobs) do guarded('job:' .. row[1], row[1], check_job, row[1], row[2]) end
for _, row in ipairs(asked.virtual_times) do guarded('virtual_time:' .. row[1], row[2], check_tenant, row[1], row[2]) end
for _, key in ipairs(asked.idems) do guarded(key, '-', check_idem, key) end
for _, tenant in ipairs(asked.feeds or {}) do guarded('ended', tenant, check_feed, tenant) end
guarded('nodes', '-', check_nodes)
if repairs and asked.sums then
  for _, row in ipairs(asked.sums) do guarded(row[1], row[2], correct_sum, row[1], row[2], row[3], row[4]) end
  redis.call('DEL', P .. ':audit')
end
flush()
return {'OK', findings, lists.ended}
