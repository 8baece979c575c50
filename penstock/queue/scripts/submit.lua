-- submit: accept a job, or answer why it is refused. A known id or idempotency key with the same body is the same job.
-- ARGV: id tenant level n cost body_hash request deadline_in_ms inbox channel needs_reader idem_hash output
--   tenant_open tenant_queued jobs_per_minute tokens_per_minute burst_s weight not_before_in_ms memory_percent account
--   response keep_ms rate_prompt rate_n rate_max may_use.
--   Then limits and max_wait_ms.
--   level: see prelude.lua. n: number of sequences, 0 for a task that needs no engine. cost: predicted KV tokens.
--   output: bytes of log and result that the job may write.
--   deadline_in_ms, not_before_in_ms: 0 for none. idem_hash: '' without an idempotency key. Tenant limits: 0 for none.
--   rate_prompt, rate_n, rate_max: tokens of the prompt, choices and most tokens of each (0: no limit), for the tenant's
--   token rate. rate_prompt '' counts the cost. may_use: the most tokens that the job may use; '' counts the cost.
--   limits: the job's field of that name, or ''.
--   max_wait_ms: the longest wait in the queue that the caller of foreground work accepts; '' for that of its class
--   or its pool.
--   tags: separated by spaces. metadata: as JSON, or ''. retry_of: the uuid of the job's id that it repeats, or ''. These
--   three follow max_wait_ms.
--   response: the stored record of a response, or ''. keep_ms: how long it and the job's result are kept after the end.
-- Answer: {OK|EXISTS, id, state, chunks, pushed} | {ID_CONFLICT|IDEMPOTENCY_CONFLICT|UNKNOWN_POOL} | {BAD_ID_AGE, max_age_ms}
--       | {BUSY, name of the limit, limit, retry_after_ms, queued jobs of its or a more urgent level, wait_ms}
--   wait_ms: how long the job would wait in the queue; -1 where the refusal does not depend on it.
local MEMORY_RETRY_MS, MIN_RETRY_MS, MAX_RETRY_MS, JITTER = 5000, 1000, 600000, 0.2
local UNKNOWN_LENGTH = 256
local MAX_WAITING_TASKS, MAX_WAIT_MS, MAX_REFUSED_BODIES = 10000, 60000, 66
-- Of Redis's memory, per class of foreground work, and for background work. Background work leaves memory to its own
-- results, which take.lua lets grow to 80 %.
local MEMORY_PERCENT, BACKGROUND_PERCENT = {[0] = 90, 90, 80}, 60

local id, tenant, level, n, cost = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], tonumber(ARGV[5])
local body, request, deadline_in, inbox, channel = ARGV[6], ARGV[7], tonumber(ARGV[8]), ARGV[9], ARGV[10]
local needs_reader, idem, output = ARGV[11], ARGV[12], tonumber(ARGV[13])
local tenant_open, tenant_queued = tonumber(ARGV[14]), tonumber(ARGV[15])
local per_minute, burst_s = {jobs = tonumber(ARGV[16]), tokens = tonumber(ARGV[17])}, tonumber(ARGV[18])
local weight, not_before_in, memory_percent, account = ARGV[19], tonumber(ARGV[20]), tonumber(ARGV[21]), ARGV[22]
local response, keep, rate_prompt, limits = ARGV[23], ARGV[24], ARGV[25], ARGV[29]
local in_background = level >= CLASSES

local config = read_config()
if not config then return {'UNKNOWN_POOL'} end
local now = clock()
local idem_name = idem ~= '' and (tenant .. ':' .. idem) or ''

local function same_or(job, conflict)
  if job.body ~= body or job.tenant ~= tenant then return {conflict} end
  -- The free write lets a full Redis answer a repeated submit.
  redis.call('ZREM', P .. ':free', '')
  -- A write without a change, for a caller that waits for the disk: WAITAOF waits for writes of its own connection alone.
  redis.call('HSET', job_key(job.id), 'body', body)
  local pushed = add_reader(job, inbox, channel, now)
  return {'EXISTS', job.id, shown_state(job, now), redis.call('LLEN', log_key(job.id)), pushed}
end

local known = read_job(id)
if known then return same_or(known, 'ID_CONFLICT') end
if idem ~= '' then
  local other = redis.call('GET', P .. ':idem:' .. idem_name)
  known = other and read_job(other)
  if known then return same_or(known, 'IDEMPOTENCY_CONFLICT') end
end

do
  local MAX_AGE_MS, MAX_AHEAD_MS = 86400000, 300000
  local dot = string.find(id, '.', 1, true)
  local minted = tonumber(string.sub(id, dot + 1, dot + 8) .. string.sub(id, dot + 10, dot + 13), 16)
  -- A job of this id may have ended and its record expired. So an id is refused before that can have happened: a record
  -- lives at least record_life after the id's time, less what the id's clock was ahead. Clocks may be behind as much.
  local record_life = response ~= '' and tonumber(keep) or config.result_ttl_ms
  local max_age = math.min(MAX_AGE_MS, math.max(record_life - MAX_AHEAD_MS, MAX_AHEAD_MS))
  if not minted or now - minted > max_age or minted - now > MAX_AHEAD_MS then return {'BAD_ID_AGE', max_age} end
end

-- Refusals -----------------------------------------------------------------------------------------
-- A refused caller is told when to retry. Its own jobs that were refused earlier will come back first. So their cost is
-- kept as a backlog of the tenant's own, P:refused:<tenant>, which decays at the tenant's pace. A body counts once, however
-- often it is sent again.

local refused_key, rate_key = P .. ':refused:' .. tenant, P .. ':rate:' .. tenant

-- What the pool's nodes report: the cost that they complete per millisecond, nil while no node has reported a rate, and
-- the KV tokens that are free.
local function read_pace()
  local per_s, free = 0, 0
  for _, record in ipairs(redis.call('HVALS', P .. ':pressure')) do
    local ok, node = pcall(cmsgpack.unpack, record)
    if ok and type(node) == 'table' and node.draining ~= true then
      per_s = per_s + (tonumber(node.drain_cost_per_s) or 0)
      free = free + (tonumber(node.kv_tokens_available) or 0)
    end
  end
  return per_s > 0 and per_s / 1000 or nil, free
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
  for other = 0, level do num_ahead = num_ahead + redis.call('ZCARD', P .. ':waiting:' .. other) end
  return {'BUSY', what, limit, math.ceil(math.min(MAX_RETRY_MS, math.max(MIN_RETRY_MS, retry_ms))), num_ahead,
    math.ceil(wait_ms or -1)}
end

-- Shares. Under `fair` a tenant's jobs wait for its own queued jobs, at its share of the nodes' pace. Under the other
-- policies they wait for the jobs of all tenants.
-- Foreground work overtakes background work, so only foreground work counts for it.
local own_queued = tonumber(redis.call('HGET', P .. ':queued', tenant) or '0')
local own_background = tonumber(redis.call('HGET', P .. ':queued_background', tenant) or '0')
local num_others = redis.call('HLEN', P .. ':queued') - (own_queued > 0 and 1 or 0)
if in_background then
  num_others = num_others + redis.call('HLEN', P .. ':queued_background') - (own_background > 0 and 1 or 0)
end
local is_fair = redis.call('HGET', KEYS[1], 'policy') == 'fair'
local share = is_fair and (tonumber(weight) or 1) / ((tonumber(weight) or 1) + num_others) or 1

local own_ahead = own_queued + (in_background and own_background or 0)

local function backlog_of(first_level, last_level)
  local sum = 0
  for other = first_level, last_level do sum = sum + tonumber(redis.call('HGET', P .. ':backlog', other) or '0') end
  return sum
end

-- Cost that completes before this job can start: queued cost of its level and of more urgent ones, but under `fair` not
-- more than the tenant's own, at its share.
local function cost_ahead()
  local sum = backlog_of(0, level)
  return is_fair and math.min(sum, own_ahead / share) or sum
end

-- Refuses a job until `excess`, which the tenant's share of the pace completes, and all its previously refused cost will
-- be completed. wait_ms: how long the job would wait, if that is known.
local function busy_until_drained(what, limit, excess, wait_ms)
  local rate, free = read_pace()
  if not rate then return busy(what, limit, jittered(MEMORY_RETRY_MS)) end
  local refused, at, is_known = unpack(redis.call('HMGET', refused_key, 'cost', 'at', body))
  local left = math.max(0, (tonumber(refused) or 0) - rate * share * (now - (tonumber(at) or now)))
  if not is_known then
    if left == 0 then redis.call('DEL', refused_key) end
    redis.call('HSET', refused_key, 'cost', left + cost, 'at', now)
    if redis.call('HLEN', refused_key) < MAX_REFUSED_BODIES then redis.call('HSET', refused_key, body, 1) end
    redis.call('PEXPIRE', refused_key, MAX_RETRY_MS)
  else
    left = math.max(0, left - cost)
  end
  wait_ms = wait_ms or math.max(0, cost_ahead() + cost - free) / rate
  return busy(what, limit, jittered((excess + left) / (rate * share)), wait_ms)
end

-- Tokens that the job reserves of its tenant's rate: its prompt and, per choice, the length of the tenant's own outputs
-- or the caller's limit, whichever is smaller.
local function tokens_to_reserve()
  if rate_prompt == '' then return is_task({n = n}) and 0 or cost end
  local longest = tonumber(ARGV[27]) > 0 and tonumber(ARGV[27]) or nil
  local known = tonumber(redis.call('HGET', P .. ':lengths', tenant) or '')
  local length = math.min(longest or known or UNKNOWN_LENGTH, known or longest or UNKNOWN_LENGTH)
  return tonumber(rate_prompt) + tonumber(ARGV[26]) * length
end

-- A limit of the pool refuses only tenants that take their part of it: while others fill it, a tenant may go on up to
-- limit ÷ number of tenants. Redis's memory bounds the sum.
local function takes_its_part(own, limit, num_tenants) return own >= limit / math.max(1, num_tenants) end

-- The job occupies `held` bytes from now on. Its output is reserved only when a node takes it.
local held = #request + RECORD_BYTES + (response ~= '' and #response + KEY_BYTES or 0) +
  lists.bytes_of(ARGV[31], ARGV[32])
-- A task waits for no KV cache, so limits of KV tokens and of waiting do not concern it.
local is_light = is_task({n = n})
-- Limits of the pool and of the tenant, each of which may refuse the job.
do
  local own_open = redis.call('SCARD', P .. ':tenant:' .. tenant .. ':open')
  local queued, open = backlog_of(0, CLASSES - 1), redis.call('SCARD', P .. ':open')
  local num_tenants = num_others + 1
  if open >= config.max_open_jobs and takes_its_part(own_open, config.max_open_jobs, num_tenants) then
    return busy_until_drained('open jobs', config.max_open_jobs, own_ahead / math.max(1, own_open))
  end
  if is_light and redis.call('ZCARD', P .. ':tasks') >= MAX_WAITING_TASKS then
    local own_tasks = tonumber(redis.call('HGET', P .. ':tenant_tasks', tenant) or '0')
    local num_with_tasks = redis.call('HLEN', P .. ':tenant_tasks') + (own_tasks > 0 and 0 or 1)
    if takes_its_part(own_tasks, MAX_WAITING_TASKS, num_with_tasks) then
      return busy('waiting tasks', MAX_WAITING_TASKS, jittered(MIN_RETRY_MS))
    end
  end
  if not is_light and not in_background and queued > 0 and queued + cost > config.max_queued_cost and
      takes_its_part(own_queued + cost, config.max_queued_cost, num_tenants) then
    local excess = math.max(0, own_queued + cost - config.max_queued_cost / num_tenants)
    return busy_until_drained('queued KV tokens', config.max_queued_cost, excess)
  end
  -- Under `fair`, a tenant without queued jobs is never refused for its wait. A delayed job waits by its caller's wish, and
  -- background work waits as long as it takes.
  local max_wait = tonumber(ARGV[30] or '')
  if not max_wait then
    local of_class = 'max_wait_ms_' .. (({[0] = 'interactive', 'standard', 'batch'})[level] or '')
    local class_ms, pool_ms = unpack(redis.call('HMGET', KEYS[1], of_class, 'max_wait_ms'))
    max_wait = tonumber(class_ms or '') or tonumber(pool_ms or '') or MAX_WAIT_MS
  end
  local is_waited_for = not is_light and not in_background and not_before_in == 0
  local ahead = is_waited_for and (own_queued > 0 or not is_fair) and cost_ahead() or 0
  if ahead > 0 then
    local rate, free = read_pace()
    local wait_ms = rate and math.max(0, ahead + cost - free) / rate or 0
    if wait_ms > max_wait then
      return busy_until_drained('wait', max_wait / 1000, (wait_ms - max_wait) * rate * share, wait_ms)
    end
  end
  -- A deadline refuses a job only if it would be too late even though the pool served this tenant alone from now on.
  if deadline_in > 0 and not is_light and own_ahead > 0 then
    local rate, free = read_pace()
    local optimistic = math.min(backlog_of(0, level), own_ahead)
    local wait_ms = rate and math.max(0, optimistic - free) / rate or 0
    if wait_ms > deadline_in - not_before_in then
      return busy_until_drained('deadline', deadline_in / 1000, (wait_ms - deadline_in) * rate * share, wait_ms)
    end
  end
  do
    local MAX_RELEASED, MAX_LOOKED_AT = 256, 256
    local memory_percent_of_all = in_background and BACKGROUND_PERCENT or MEMORY_PERCENT[level]
    local used, limit = used_memory()
    if limit > 0 and used + total(':reserved') + held + output > limit * memory_percent_of_all / 100 then
      return busy('memory', memory_percent_of_all, jittered(MEMORY_RETRY_MS))
    end
    -- Memory of one tenant: beyond its share, only that tenant is refused.
    local function exceeds(percent) return bytes_of(tenant) + held + output > limit * percent / 100 end

    -- Milliseconds until a stored key of this tenant expires, if it is among the next MAX_LOOKED_AT keys of all tenants.
    local function until_next_goes()
      local next_ones = redis.call('ZRANGE', P .. ':expiry', 0, MAX_LOOKED_AT - 1, 'WITHSCORES')
      for at = 1, #next_ones, 2 do
        if string.match(next_ones[at], '^%d+ (%S+) ') == tenant then return tonumber(next_ones[at + 1]) - now end
      end
      return MAX_RETRY_MS
    end

    if limit > 0 then
      local percent = memory_percent_of(memory_percent)
      if exceeds(percent) then subtract_expired(now, MAX_RELEASED) end
      if exceeds(percent) then return busy("tenant's memory", percent, jittered(until_next_goes())) end
    end
  end
  if tenant_open > 0 and own_open >= tenant_open then
    return busy_until_drained("tenant's open jobs", tenant_open, own_ahead / own_open)
  end
  local all_queued = own_queued + own_background
  if not is_light and tenant_queued > 0 and all_queued > 0 and all_queued + cost > tenant_queued then
    return busy_until_drained("tenant's queued KV tokens", tenant_queued, all_queued + cost - tenant_queued)
  end
end
local new_rates, rate_until = {}, now
local reserved_tokens = per_minute.tokens > 0 and tokens_to_reserve() or 0
local rates = redis.call('HMGET', rate_key, 'jobs', 'ms_per_job', 'tokens', 'ms_per_token')
for at, unit in ipairs({{'jobs', 'ms_per_job', 1}, {'tokens', 'ms_per_token', reserved_tokens}}) do
  local name, rate_name, amount = unpack(unit)
  local due, limit_of_unit = tonumber(rates[2 * at - 1] or '') or 0, per_minute[name]
  -- A delayed job reserves its tokens when it is due.
  if limit_of_unit > 0 and not (name == 'tokens' and not_before_in > 0) then
    local ms_per_unit = 60000 / limit_of_unit
    local later, wait = next_due(now, burst_s * 1000, amount, ms_per_unit, due, rates[2 * at])
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
local job = {id = id, tenant = tenant, level = level, n = n, cost = tostring(cost), submitted = now + not_before_in,
  deadline = deadline}
redis.call('SET', P .. ':request:' .. id, request)
if per_minute.tokens > 0 and not is_light then
  job.may_use = tonumber(ARGV[28]) or cost
  job.minute_tokens = math.floor(per_minute.tokens * (1 + burst_s / 60))
end
local waits = is_delayed or not token_limit.admits_job(job, now)
local entry = waits and DELAYED or redis.call('XADD', queue_key(job), '*', 'id', id)
-- Redis searches a small hash from its front. So the fields that emit reads at every step come first, then take's.
redis.call('HSET', job_key(id), 'state', 'queued', 'node', '', 'lease', '', 'first', '', 'cancel', '',
  'deadline', deadline, 'needs_reader', needs_reader, 'unread', unread, 'inboxes', inbox, 'channel', channel,
  'tenant', tenant, 'level', level, 'n', n, 'cost', cost, 'entry', entry, 'submitted', job.submitted,
  'losses', 0, 'preemptions', 0, 'weight', weight, 'body', body, 'held', held, 'output', output, 'idem', idem_name)
if memory_percent > 0 then redis.call('HSET', job_key(id), 'memory_percent', memory_percent) end
if account ~= '' then redis.call('HSET', job_key(id), 'account', account) end
if limits ~= '' then redis.call('HSET', job_key(id), 'limits', limits) end
if response ~= '' then
  redis.call('SET', P .. ':response:' .. id, response)
  redis.call('HSET', job_key(id), 'keep', keep, 'response_bytes', #response)
end
if per_minute.tokens > 0 then
  redis.call('HSET', job_key(id), 'ms_per_token', 60000 / per_minute.tokens, 'charged', is_delayed and 0 or reserved_tokens)
  if is_delayed then redis.call('HSET', job_key(id), 'to_charge', reserved_tokens, 'burst_ms', burst_s * 1000) end
end
if job.may_use then redis.call('HSET', job_key(id), 'may_use', job.may_use, 'minute_tokens', job.minute_tokens) end
if is_delayed then delay_job(job) end
if waits then note_due(job) else note_queued(job) end
count_event('submitted')
redis.call('SADD', P .. ':open', id)
redis.call('SADD', P .. ':tenant:' .. tenant .. ':open', id)
redis.call('ZADD', lists.key(is_delayed and 'scheduled' or 'queued', tenant), 0, id)
if waits then redis.call('HSET', job_key(id), 'accepted', now) end
lists.add(job, ARGV[31], ARGV[32])
if ARGV[33] ~= '' then redis.call('HSET', job_key(id), 'retry_of', ARGV[33]) end
count_bytes(P .. ':stored', tenant, held)
-- The idempotency key lives as long as the job, and idem_ttl_ms after its end.
if idem ~= '' then redis.call('SET', P .. ':idem:' .. idem_name, id) end
if #new_rates > 0 then
  redis.call('HSET', rate_key, unpack(new_rates))
  redis.call('PEXPIRE', rate_key, math.ceil(rate_until - now))
end
if inbox ~= '' then redis.call('ZADD', P .. ':readers', now, inbox) end
if not waits then ring_doorbell(cost) end
return {'OK', id, is_delayed and 'scheduled' or 'queued', 0, 1}
