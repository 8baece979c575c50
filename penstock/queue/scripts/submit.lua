-- submit: accept a job, or answer why it is refused. A known id or idempotency key with the same body is the same job.
-- ARGV: id tenant p n cost body_hash request deadline_in_ms inbox channel background idem_hash bytes
--   tenant_open tenant_queued jobs_per_minute tokens_per_minute burst_s weight not_before_in_ms memory_percent account
--   response keep_ms
--   p: class. n: number of sequences, 0 for a task that needs no engine. cost: predicted KV tokens.
--   bytes: Redis memory that the job may occupy.
--   deadline_in_ms, not_before_in_ms: 0 for none. idem_hash: '' without an idempotency key. Tenant limits: 0 for none.
--   response: the stored record of a response, or ''. keep_ms: how long it and the job's result are kept after the end.
-- Answer: {OK|EXISTS, id, state, chunks, pushed} | {ID_CONFLICT|IDEMPOTENCY_CONFLICT|UNKNOWN_POOL} | {BAD_ID_AGE, max_age_ms}
--       | {BUSY, name of the limit, limit, retry_after_ms, queued jobs of its or a more urgent class, wait_ms}
--   wait_ms: how long the job would wait in the queue; -1 where the refusal does not depend on it.
local MAX_AGE_MS, MAX_AHEAD_MS = 86400000, 300000
local MEMORY_PERCENT = {[0] = 90, 90, 80}
local MEMORY_SHARE_PERCENT, MAX_RELEASED, MAX_LOOKED_AT = 50, 256, 256
local MEMORY_RETRY_MS, MIN_RETRY_MS, MAX_RETRY_MS, JITTER = 5000, 1000, 600000, 0.2
local MAX_WAITING_TASKS = 10000

local id, tenant, p, n, cost = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
local body, request, deadline_in, inbox, channel = ARGV[6], ARGV[7], tonumber(ARGV[8]), ARGV[9], ARGV[10]
local background, idem, bytes = ARGV[11], ARGV[12], tonumber(ARGV[13])
local tenant_open, tenant_queued = tonumber(ARGV[14]), tonumber(ARGV[15])
local per_minute, burst_s = {jobs = tonumber(ARGV[16]), tokens = tonumber(ARGV[17])}, tonumber(ARGV[18])
local weight, not_before_in, memory_percent, account = ARGV[19], tonumber(ARGV[20]), tonumber(ARGV[21]), ARGV[22]
local response, keep = ARGV[23], ARGV[24]

local config = read_config()
if not config then return {'UNKNOWN_POOL'} end
local now = clock()
local idem_name = idem ~= '' and (tenant .. ':' .. idem) or ''

local function same_or(job, conflict)
  if job.body ~= body or job.tenant ~= tenant then return {conflict} end
  -- The free write lets a full Redis answer a repeated submit.
  redis.call('ZREM', P .. ':free', '')
  local pushed = add_reader(job, inbox, channel, now)
  return {'EXISTS', job.id, job.state, redis.call('LLEN', log_key(job.id)), pushed}
end

local known = read_job(id)
if known then return same_or(known, 'ID_CONFLICT') end
if idem ~= '' then
  local other = redis.call('GET', P .. ':idem:' .. idem_name)
  known = other and read_job(other)
  if known then return same_or(known, 'IDEMPOTENCY_CONFLICT') end
end

local dot = string.find(id, '.', 1, true)
local minted = tonumber(string.sub(id, dot + 1, dot + 8) .. string.sub(id, dot + 10, dot + 13), 16)
-- A job of this id may have ended and its record expired. So an id is refused before that can have happened: a record
-- lives at least record_life after the id's time, less what the id's clock was ahead. Clocks may be behind as much.
local record_life = response ~= '' and tonumber(keep) or config.result_ttl_ms
local max_age = math.min(MAX_AGE_MS, math.max(record_life - MAX_AHEAD_MS, MAX_AHEAD_MS))
if not minted or now - minted > max_age or minted - now > MAX_AHEAD_MS then return {'BAD_ID_AGE', max_age} end

-- Refusals -----------------------------------------------------------------------------------------
-- A refused caller is told when to retry. Jobs refused earlier will come back first. So their cost is kept as a backlog
-- of its own, P:refused, which decays at the rate at which the nodes complete cost.

local refused_key, rate_key = P .. ':refused', P .. ':rate:' .. tenant

-- Cost that the pool's nodes complete per millisecond; nil while no node has reported a rate.
local function drain_rate()
  local per_s = 0
  for _, record in ipairs(redis.call('HVALS', P .. ':pressure')) do
    local ok, node = pcall(cmsgpack.unpack, record)
    if ok and type(node) == 'table' and type(node.drain_cost_per_s) == 'number' then
      per_s = per_s + node.drain_cost_per_s
    end
  end
  return per_s > 0 and per_s / 1000 or nil
end

-- Adds jitter from the id's last digits, which are random; Lua's random numbers are the same in every script run.
local function jittered(ms)
  local share = tonumber(string.sub(id, -4), 16) / 65535
  return math.floor(ms * (1 - JITTER + 2 * JITTER * share))
end

local REFUSALS = {memory = 'refused_memory', ["tenant's memory"] = 'refused_tenant_memory'}

local function busy(what, limit, retry_ms, wait_ms)
  local is_of_tenant = string.find(what, "tenant's ", 1, true)
  count_event(REFUSALS[what] or (is_of_tenant and 'refused_tenant_limit' or 'refused_busy'))
  local num_ahead = 0
  for class = 0, tonumber(p) do num_ahead = num_ahead + redis.call('ZCARD', P .. ':waiting:' .. class) end
  return {'BUSY', what, limit, math.ceil(math.min(MAX_RETRY_MS, math.max(MIN_RETRY_MS, retry_ms))), num_ahead,
    math.ceil(wait_ms or -1)}
end

-- Predicted cost of the queued jobs of the job's class and of more urgent ones, and its own.
local function cost_up_to_own()
  local sum = cost
  for class = 0, tonumber(p) do sum = sum + tonumber(redis.call('HGET', P .. ':backlog', class) or '0') end
  return sum
end

-- Refuses a job until `excess` and all previously refused cost will be completed.
local function busy_until_drained(what, limit, excess)
  local rate = drain_rate()
  if not rate then return busy(what, limit, jittered(MEMORY_RETRY_MS)) end
  local refused, at = unpack(redis.call('HMGET', refused_key, 'cost', 'at'))
  local left = math.max(0, (tonumber(refused) or 0) - rate * (now - (tonumber(at) or now)))
  redis.call('HSET', refused_key, 'cost', left + cost, 'at', now)
  redis.call('PEXPIRE', refused_key, MAX_RETRY_MS)
  return busy(what, limit, jittered((excess + left) / rate), cost_up_to_own() / rate)
end

-- GCRA: the time, in ms, at which a tenant's next unit is due after it takes `amount` units now. If that exceeds a
-- burst of burst_s seconds: nil, and the ms to wait. A tenant without debt may take any amount. A debt is a number of
-- units: P:rate states it in ms at some rate, and at another rate it takes another time.
-- https://en.wikipedia.org/wiki/Generic_cell_rate_algorithm
local function next_due(amount, ms_per_unit, stated_due, stated_rate)
  local debt = math.max(0, (tonumber(stated_due or '') or 0) - now)
  if stated_rate and tonumber(stated_rate) ~= ms_per_unit then debt = debt * ms_per_unit / tonumber(stated_rate) end
  local later = now + debt + amount * ms_per_unit
  if debt > 0 and later > now + burst_s * 1000 then return nil, math.min(debt, later - burst_s * 1000 - now) end
  return later
end

local function used_memory()
  local info = redis.call('INFO', 'memory')
  return tonumber(string.match(info, 'used_memory:(%d+)')), tonumber(string.match(info, 'maxmemory:(%d+)'))
end

local function total(name)
  local sum = 0
  for _, value in ipairs(redis.call('HVALS', P .. name)) do sum = sum + tonumber(value) end
  return sum
end

local queued = total(':backlog')
local open = redis.call('SCARD', P .. ':open')
if open >= config.max_open_jobs then
  return busy_until_drained('open jobs', config.max_open_jobs, queued / open)
end
-- A task waits for no KV cache, so limits of KV tokens do not concern it.
local is_light = is_task({n = n})
if is_light and redis.call('ZCARD', P .. ':tasks') >= MAX_WAITING_TASKS then
  return busy('waiting tasks', MAX_WAITING_TASKS, jittered(MIN_RETRY_MS))
end
if not is_light and queued > 0 and queued + cost > config.max_queued_cost then
  return busy_until_drained('queued KV tokens', config.max_queued_cost, queued + cost - config.max_queued_cost)
end
local used, limit = used_memory()
if limit > 0 and used + total(':promised_bytes') + bytes > limit * MEMORY_PERCENT[tonumber(p)] / 100 then
  return busy('memory', MEMORY_PERCENT[tonumber(p)], jittered(MEMORY_RETRY_MS))
end
-- Memory of one tenant: beyond its share, only that tenant is refused.
local function kept() return tonumber(redis.call('HGET', P .. ':kept_bytes', tenant) or '0') end

-- Milliseconds until a stored key of this tenant expires, if it is among the next MAX_LOOKED_AT keys of all tenants.
local function until_next_goes()
  local next_ones = redis.call('ZRANGE', P .. ':expiry', 0, MAX_LOOKED_AT - 1, 'WITHSCORES')
  for at = 1, #next_ones, 2 do
    if string.match(next_ones[at], '^%d+ (%S+) ') == tenant then return tonumber(next_ones[at + 1]) - now end
  end
  return MAX_RETRY_MS
end

if limit > 0 then
  local share = memory_percent > 0 and memory_percent or
    tonumber(redis.call('HGET', KEYS[1], 'tenant_memory_percent') or '') or MEMORY_SHARE_PERCENT
  if kept() + bytes > limit * share / 100 then subtract_expired(now, MAX_RELEASED) end
  if kept() + bytes > limit * share / 100 then return busy("tenant's memory", share, jittered(until_next_goes())) end
end
local own = redis.call('SCARD', P .. ':tenant:' .. tenant .. ':open')
local own_queued = tonumber(redis.call('HGET', P .. ':queued', tenant) or '0')
if tenant_open > 0 and own >= tenant_open then
  return busy_until_drained("tenant's open jobs", tenant_open, own_queued / own)
end
if not is_light and tenant_queued > 0 and own_queued > 0 and own_queued + cost > tenant_queued then
  return busy_until_drained("tenant's queued KV tokens", tenant_queued, own_queued + cost - tenant_queued)
end
local new_rates, rate_until = {}, now
if is_light then per_minute.tokens = 0 end
local rates = redis.call('HMGET', rate_key, 'jobs', 'ms_per_job', 'tokens', 'ms_per_token')
for at, unit in ipairs({{'jobs', 'ms_per_job', 1}, {'tokens', 'ms_per_token', cost}}) do
  local name, rate_name, amount = unpack(unit)
  local due, limit_of_unit = tonumber(rates[2 * at - 1] or '') or 0, per_minute[name]
  if limit_of_unit > 0 then
    local ms_per_unit = 60000 / limit_of_unit
    local later, wait = next_due(amount, ms_per_unit, due, rates[2 * at])
    if not later then return busy("tenant's " .. name .. ' per minute', limit_of_unit, wait) end
    due = later
    for _, value in ipairs({name, later, rate_name, ms_per_unit}) do new_rates[#new_rates + 1] = value end
  end
  -- The debt of a unit that this job does not count must outlive it as well.
  rate_until = math.max(rate_until, due)
end

-- Writes -------------------------------------------------------------------------------------------

local deadline = deadline_in > 0 and tostring(now + deadline_in) or ''
-- A job submitted without a reader has reattach_grace_ms to get one.
local unread = (inbox == '' and channel ~= '1') and now or ''
local is_delayed = not_before_in > 0
local job = {id = id, tenant = tenant, priority = p, n = n, cost = tostring(cost), submitted = now + not_before_in,
  deadline = deadline}
redis.call('SET', P .. ':request:' .. id, request)
local entry = is_delayed and DELAYED or redis.call('XADD', queue_key(job), '*', 'id', id)
-- Redis searches a small hash from its front. So the fields that emit reads at every step come first, then take's.
redis.call('HSET', job_key(id), 'state', 'queued', 'node', '', 'lease', '', 'first', '', 'cancel', '',
  'deadline', deadline, 'background', background, 'unread', unread, 'inboxes', inbox, 'channel', channel,
  'tenant', tenant, 'priority', p, 'n', n, 'cost', cost, 'entry', entry, 'submitted', job.submitted,
  'losses', 0, 'preemptions', 0, 'weight', weight, 'body', body, 'bytes', bytes, 'idem', idem_name)
if account ~= '' then redis.call('HSET', job_key(id), 'account', account) end
if response ~= '' then
  redis.call('SET', P .. ':response:' .. id, response)
  redis.call('HSET', job_key(id), 'keep', keep, 'response_bytes', #response)
end
if per_minute.tokens > 0 then
  redis.call('HSET', job_key(id), 'ms_per_token', 60000 / per_minute.tokens, 'charged', cost)
end
if is_delayed then
  redis.call('ZADD', P .. ':delayed', job.submitted, id)
  note_due(job)
else
  note_queued(job)
end
count_event('submitted')
redis.call('SADD', P .. ':open', id)
redis.call('SADD', P .. ':tenant:' .. tenant .. ':open', id)
redis.call('ZADD', P .. ':jobs:' .. tenant, 0, id)
redis.call('HINCRBY', P .. ':promised_bytes', p, bytes)
count_kept_bytes(tenant, bytes)
-- The idempotency key lives as long as the job, and idem_ttl_ms after its end.
if idem ~= '' then redis.call('SET', P .. ':idem:' .. idem_name, id) end
if #new_rates > 0 then
  redis.call('HSET', rate_key, unpack(new_rates))
  redis.call('PEXPIRE', rate_key, math.ceil(rate_until - now))
end
if inbox ~= '' then redis.call('ZADD', P .. ':readers', now, inbox) end
if not is_delayed then ring_doorbell(cost) end
return {'OK', id, 'queued', 0, 1}
