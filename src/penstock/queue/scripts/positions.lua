-- positions: the positions of jobs in the queue, by level and age. It writes nothing.
-- ARGV: msgpack of [id…], as many as MAX_POSITIONS of broker/jobs.py.
-- Answer: {number of queued jobs per level, their cost, level of each job, ahead of each job, fair cost of each job,
--   what is paused of each job}
--   ahead: the older queued jobs of its level. TAKEN: a node has the job, which has no token yet. DELAYED_JOB: its time
--   has not come. GONE: it has tokens and runs, has ended, or is unknown.
--   fair cost: under `fair` and `round_robin`, the cost of its level's jobs that start before it; otherwise -1.
--   paused: `pool`, `class` or `tenant`, the widest pause that holds the job back; '' without one.
local TAKEN, DELAYED_JOB, GONE = -1, -2, -3
local MAX_COUNTED, MAX_TENANTS = 16, 128

local function place_of(id)
  -- A damaged record is no place in the queue.
  local state, first, level = unpack(redis.pcall('HMGET', job_key(id), 'state', 'first', 'level'))
  if state == 'queued' and not string.find(level or '', '^[0-5]$') then return 0, GONE end
  if state == 'queued' then return tonumber(level), redis.call('ZRANK', P .. ':waiting:' .. level, id) or DELAYED_JOB end
  return 0, state == 'running' and first == '' and TAKEN or GONE
end

read_config({'version'})
local counts, costs, levels, ahead = {}, {}, {}, {}
for level = 0, LEVELS - 1 do
  counts[level + 1] = redis.call('ZCARD', P .. ':waiting:' .. level)
  costs[level + 1] = tonumber(redis.call('HGET', P .. ':backlog', level) or '0') or 0
end

-- Milliseconds at which an entry of a stream was added.
local function time_of(entry) return tonumber(string.match(entry, '^%d+')) end

-- How many of its tenant's jobs of its level start before a job: an exact number if they are few. Otherwise it assumes
-- that the others came evenly.
local function num_own_ahead(key, entry)
  local first = redis.call('XRANGE', key, '-', entry, 'COUNT', MAX_COUNTED)
  if #first < MAX_COUNTED then return math.max(0, #first - 1) end
  local from, till = time_of(first[#first][1]), time_of(redis.call('XREVRANGE', key, '+', '-', 'COUNT', 1)[1][1])
  local part = till > from and (time_of(entry) - from) / (till - from) or 0.5
  return MAX_COUNTED - 1 + part * (redis.call('XLEN', key) - MAX_COUNTED)
end

-- Predicted cost of the queued jobs of each tenant, by kind of work. With more than MAX_TENANTS: of none.
local queued_of = {}
local function read_queued(name)
  if not queued_of[name] then
    local key, costs_of = P .. name, {}
    local num_tenants = redis.call('HLEN', key)
    local found = num_tenants <= MAX_TENANTS and redis.call('HGETALL', key) or {}
    for at = 1, #found, 2 do costs_of[found[at]] = tonumber(found[at + 1]) end
    queued_of[name] = {key = key, num_tenants = num_tenants, costs_of = costs_of}
  end
  return queued_of[name]
end

local policy = redis.call('HGET', KEYS[1], 'policy')
local in_turns = policy == 'round_robin'

-- Tenants are served equally, by cost ÷ weight. So before a job starts, each other tenant is served about what the job's
-- own tenant has ahead of it, divided by its weight, or all that it has queued. Under round_robin all weights are 1, and
-- the jobs of all tenants count as equally large.
local function fair_cost_of(id, level)
  local tenant, weight, entry = unpack(redis.call('HMGET', job_key(id), 'tenant', 'weight', 'entry'))
  local queued = read_queued(level >= CLASSES and ':queued_background' or ':queued')
  local like = {level = level, tenant = tenant}
  local key, requeued = queue_key(like), requeued_key(like)
  local num_own = redis.call('XLEN', key) + redis.call('ZCARD', requeued)
  local own = queued.costs_of[tenant] or tonumber(redis.call('HGET', queued.key, tenant) or '0')
  local num_ahead = entry ~= '' and num_own_ahead(key, entry) + redis.call('ZCARD', requeued) or 0
  local own_ahead = own * num_ahead / math.max(1, num_own)
  local served = own_ahead / (not in_turns and tonumber(weight or '') or 1)
  local sum = own_ahead + served * (queued.num_tenants > MAX_TENANTS and queued.num_tenants - 1 or 0)
  for other, cost in pairs(queued.costs_of) do
    if other ~= tenant then sum = sum + math.min(cost, served) end
  end
  return math.floor(math.min(sum, costs[level + 1]))
end

local names = {}
for _, name in ipairs(redis.call('HKEYS', P .. ':paused')) do names[name] = true end

local function paused_of(id, level)
  if names.pool then return 'pool' end
  if names['level:' .. level] then return 'class' end
  local tenant = next(names) and redis.call('HGET', job_key(id), 'tenant')
  return tenant and names['tenant:' .. tenant] and 'tenant' or ''
end

local paused = {}
local is_fair, fair_costs = in_turns or policy == 'fair', {}
for i, id in ipairs(cmsgpack.unpack(ARGV[1])) do
  levels[i], ahead[i] = place_of(id)
  local is_known, cost = is_fair and ahead[i] >= 0, nil
  if is_known then is_known, cost = pcall(fair_cost_of, id, levels[i]) end
  fair_costs[i] = is_known and cost or -1
  paused[i] = ahead[i] >= 0 and paused_of(id, levels[i]) or ''
end
return {counts, costs, levels, ahead, fair_costs, paused}
