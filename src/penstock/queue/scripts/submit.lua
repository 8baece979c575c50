-- submit: accept jobs, or answer why each is refused. A known id or idempotency key with the same body is the same job.
-- What is read of the pool and of a tenant is read once per call; each accepted job then counts for the next ones.
-- ARGV: inbox, seen_ms, msgpack of [terms…], msgpack of [row…], then request and response of each job
--   seen_ms: the pool's time as the caller knows it, 0 if it does not (prelude.lua, clock)
--   terms: a map: tenant, and of contract/tenant.py max_open_jobs, max_queued_cost, jobs_per_minute, tokens_per_minute,
--   burst_s, weight, memory_percent, account, as far as they are not their defaults
--   row: a map, without what DEFAULTS has or what may be absent:
--   terms: their number. id. level: see prelude.lua. cost: predicted KV tokens. body: the request's hash.
--   output: bytes of log and result that the job may write.
--   n: number of sequences, 0 for a task that needs no engine.
--   deadline_in_ms, not_before_in_ms, ttl_in_ms: 0 for none. idem_hash: '' without an idempotency key.
--   rate_prompt, rate_n, rate_max: tokens of the prompt, choices and most tokens of each (0: no limit), for the tenant's
--   token rate. Without rate_prompt the cost counts. most_tokens: the most that the job may use; absent: the cost.
--   max_wait_ms: the longest wait in the queue that the caller of foreground work accepts; absent: that of its class or
--   its pool.
--   waits: 1 for foreground work that waits for the end of a pause; absent for other jobs. Other foreground work is refused
--   during a pause, except with is_repeated: 1 for a job that was accepted before, and lost.
--   channel, needs_reader, limits, model, words: the job's fields of these names (prelude.lua).
--   in_feed: 0 for a job whose end is no completion of its tenant.
--   tags: separated by spaces. metadata: as JSON. retry_of: the uuid of the job's id that it repeats.
--   webhooks: ids of the endpoints that are told of its end, separated by spaces.
--   more: what few jobs have, or absent: a map of the fields retry, key and key_terms (prelude.lua).
--   keep_ms: how long the record of a stored response and the job's result are kept after the end.
--   response: the stored record of a response, or ''.
-- Answer, one per job: {OK|EXISTS, id, state, chunks, pushed} | {ID_CONFLICT|IDEMPOTENCY_CONFLICT|CHANNEL_CONFLICT|
--       UNKNOWN_POOL}
--       | {BAD_ID_AGE, max_age_ms} | {BUSY, limit's name, limit, retry_after_ms, num_ahead, wait_ms, spread}
--       | {PAUSED, field of P:paused, its value} | {ERR, text}
--   num_ahead: queued jobs of its or a more urgent level. ERR: a script error for this job only.
--   wait_ms: how long the job would wait in the queue; -1 where the refusal does not depend on it. spread: the standard
--   error of the pace's logarithm, in thousandths.
-- All accepted jobs are written before anything else. So a full Redis refuses each of them, and answers the other jobs.
--
-- Memory, in bytes. A stored job counts its request, the record of a response, and 1,056 for its record and its entries
-- in other keys. A running job reserves its output: 110 for each token, 28 for each log-probability, and 512. Its
-- tokens are max_tokens per choice, or 256 if it names no limit. A task reserves four times its request, an embedding
-- 16 KiB. emit moves the bytes of a log from reserved to stored every 12 chunks; at least 4 KiB stay reserved, and at
-- least as much as these chunks took. The end of a job replaces both by what stays. That is log, result and a dead
-- letter's request, each with 256 for its key, and 1,056 for the record. A record with a field above 64 bytes counts
-- 5,120, because Redis stores it in another way. Stored bytes are at most 15 % or 72 KiB less than MEMORY USAGE says of
-- all keys of jobs. Where jobs are small they may be 60 % or 96 KiB more, because Valkey keeps small records in less
-- memory than Redis.
--
-- A tenant's share of maxmemory in a pool, in percent. p: memory_percent of the key, or tenant_memory_percent of the pool.
-- limit: 60 for background work, 80 for foreground work of class batch, 90 for other foreground work. used: used memory, all
-- reserved bytes and the job's own. free = (limit − used) ÷ (limit − p), between 0 and 1. The share is p × free where free is ½
-- or more, otherwise 2 × p × free². A p of limit or more is the share itself. So a tenant alone may fill p percent, and some
-- memory remains for another one however many tenants take all they get.
--
-- Rates: P:rate:<t> states a debt in milliseconds at a rate, and names that rate. A submit at another rate converts it, so a
-- changed limit applies to the whole debt. A refund creates a burst of at most burst_s seconds' worth. A job with not_before
-- reserves its tokens when it is due; while the tenant's rate does not allow it, it stays delayed and other jobs go on.
local MAX_JOBS, PAYLOADS = 128, 5
local MEMORY_RETRY_MS, MIN_RETRY_MS, JITTER = 5000, 1000, 0.2
local MAX_RETRY_MS, MAX_KEYS = 600000, 10000

local inbox, all_terms, rows, answers = ARGV[1], cmsgpack.unpack(ARGV[3]), cmsgpack.unpack(ARGV[4]), {}
if #rows > MAX_JOBS then return redis.error_reply('TOO_MANY_JOBS') end

local config = read_config({'version', 'result_ttl_ms', 'max_open_jobs', 'max_queued_cost', 'policy', 'max_wait_ms',
  'max_wait_ms_interactive', 'max_wait_ms_standard', 'max_wait_ms_batch'})
if not config then
  for at = 1, #rows do answers[at] = {'UNKNOWN_POOL'} end
  return answers
end
local now, ahead = clock(tonumber(ARGV[2]))

-- What this call knows of tenants, by name: sums of the queue, rates and refused cost.
local known_of = {}

local TERMS = {__index = {max_open_jobs = 0, max_queued_cost = 0, jobs_per_minute = 0, tokens_per_minute = 0, burst_s = 10,
  weight = '1', memory_percent = 0, account = ''}}
for _, terms in ipairs(all_terms) do
  known_of[terms.tenant] = known_of[terms.tenant] or {}
  setmetatable(terms, TERMS)
end

local DEFAULTS = {__index = {n = '1', channel = '0', needs_reader = 1, deadline_in_ms = 0, not_before_in_ms = 0, ttl_in_ms = 0,
  keep_ms = 0, idem_hash = '', rate_n = 0, rate_max = 0, limits = '', in_feed = 1, tags = '', metadata = '', retry_of = '',
  webhooks = '', model = '', words = ''}}

-- A row becomes its job.
local function job_of(row, request, response)
  local job = setmetatable(row, DEFAULTS)
  job.terms, job.n = all_terms[job.terms], tostring(job.n)
  job.tenant, job.own = job.terms.tenant, known_of[job.terms.tenant]
  job.request, job.response, job.in_background = request, response, job.level >= CLASSES
  -- A task waits for no KV cache, so limits of KV tokens and of waiting do not concern it.
  job.is_light = job.n == '0'
  -- The job occupies `held` bytes from now on. Its output is reserved only when a node takes it.
  job.held = #request + RECORD_BYTES + (response ~= '' and #response + KEY_BYTES or 0) +
    lists.bytes_of(job.tags, job.metadata)
  return job
end

-- Known jobs ---------------------------------------------------------------------------------------

local num_accepted = 0

local function idem_of(job)
  return job.idem_hash ~= '' and (job.tenant .. ':' .. job.idem_hash) or ''
end

local function same_or(known, job, conflict)
  if known.body ~= job.body or known.tenant ~= job.tenant then return {conflict} end
  if channels.differ(known, job.channel) then return {'CHANNEL_CONFLICT'} end
  -- A write without a change, for a caller that waits for the disk: WAITAOF waits for writes of its own connection alone.
  redis.call('HSET', job_key(known.id), 'body', job.body)
  local pushed = add_reader(known, inbox, job.channel, now)
  return {'EXISTS', known.id, shown_state(known, now), redis.call('LLEN', log_key(known.id)), pushed}
end

local KNOWN_FIELDS = {'state', 'tenant', 'body', 'inboxes', 'channel', 'unread', 'cancel', 'submitted', 'entry'}

-- Returns the known job of this id or idempotency key, and the name of the conflict if it has another body; nil for none.
local function find_known(job)
  local known = read_job(job.id, KNOWN_FIELDS)
  if known then return known, 'ID_CONFLICT' end
  local other = job.idem_hash ~= '' and redis.call('GET', P .. ':idem:' .. idem_of(job))
  known = other and read_job(other, KNOWN_FIELDS)
  if known then return known, 'IDEMPOTENCY_CONFLICT' end
end

-- The oldest age of an id, in ms, if the job's id is too old or of a later time.
local function wrong_age(job)
  local MAX_AGE_MS, MAX_AHEAD_MS = 86400000, 300000
  local id = job.id
  local dot = string.find(id, '.', 1, true)
  local minted = tonumber(string.sub(id, dot + 1, dot + 8) .. string.sub(id, dot + 10, dot + 13), 16)
  -- A job of this id may have ended and its record expired. So an id is refused before that can have happened: a record
  -- lives at least record_life after the id's time, less what the id's clock was ahead. Clocks may be behind as much.
  -- Redis's clock and the pool's may differ after a jump. An id is right if it is by one of them. A record expires by
  -- Redis's clock, so it lives less long if that is ahead.
  local record_life = (job.response ~= '' and job.keep_ms or config.result_ttl_ms) + math.min(0, ahead)
  local max_age = math.min(MAX_AGE_MS, math.max(record_life - MAX_AHEAD_MS, MAX_AHEAD_MS))
  local earlier, later = math.min(now, pool_time.of_redis()), math.max(now, pool_time.of_redis())
  if not minted or earlier - minted > max_age or minted - later > MAX_AHEAD_MS then return max_age end
end

-- Refusals -----------------------------------------------------------------------------------------
-- A refused caller is told when to retry. Its own jobs that were refused earlier will come back first. So their cost is
-- kept as a backlog of the tenant's own, P:refused:<tenant>, which decays at the tenant's pace. A body counts once, however
-- often it is sent again.

local refusal_of, count_accepted, write_refused, write_rates
do
  -- What this call has read of the queue, with what it has accepted since; under the number of a level, the jobs that it
  -- has queued there. A sum is read before the first job that it counts is accepted.
  local queue = {}

  local function add_if_read(sums, name, by)
    if sums[name] then sums[name] = sums[name] + by end
  end

  local function own_queued(job)
    local own = job.own
    own.queued = own.queued or finite(redis.call('HGET', P .. ':queued', job.tenant))
    return own.queued
  end

  local function own_background(job)
    local own = job.own
    own.background = own.background or finite(redis.call('HGET', P .. ':queued_background', job.tenant))
    return own.background
  end

  -- Foreground work overtakes background work, so only foreground work counts for it.
  local function ahead_of(job) return own_queued(job) + (job.in_background and own_background(job) or 0) end

  -- Other tenants with queued jobs that this job may wait for.
  local function num_others_of(job)
    queue.tenants = queue.tenants or redis.call('HLEN', P .. ':queued')
    local num_others = queue.tenants - (own_queued(job) > 0 and 1 or 0)
    if not job.in_background then return num_others end
    queue.background_tenants = queue.background_tenants or redis.call('HLEN', P .. ':queued_background')
    return num_others + queue.background_tenants - (own_background(job) > 0 and 1 or 0)
  end

  -- Shares. Under `fair` a tenant's jobs wait for its own queued jobs, at its share of the nodes' pace. So they do under
  -- `round_robin`, where all shares are equal. Under the other policies they wait for the jobs of all tenants.
  local in_turns = config.policy == 'round_robin'
  local is_fair = config.policy == 'fair' or in_turns
  local function share_of(job)
    local own = not in_turns and tonumber(job.terms.weight) or 1
    return is_fair and own / (own + num_others_of(job)) or 1
  end

  local function backlog_of(first_level, last_level)
    queue.backlog = queue.backlog or redis.call('HMGET', P .. ':backlog', 0, 1, 2, 3, 4, 5)
    local sum = 0
    for level = first_level, last_level do sum = sum + finite(queue.backlog[level + 1]) end
    return sum
  end

  -- Cost that completes before this job can start: queued cost of its level and of more urgent ones, but under `fair` not
  -- more than the tenant's own, at its share.
  local function cost_ahead(job)
    local sum, own_ahead, share = backlog_of(0, job.level), ahead_of(job), share_of(job)
    return is_fair and math.min(sum, own_ahead / share) or sum
  end

  -- What the pool's nodes report. First, the cost of this job's kind of work that they complete per millisecond; nil while
  -- no node has reported a pace. Second, the KV tokens that are free for jobs like this one. Third, the spread of the pace.
  -- job_cost.py has the same sum, for the estimates of queued jobs.
  local UNKNOWN_SPREAD = 0.5

  local function add_node(paces, node)
    local spreads = type(node.pace_spreads) == 'table' and node.pace_spreads or {}
    local foreground, background = finite(node.drain_cost_per_s), finite(node.background_cost_per_s)
    if background == 0 then background = foreground end
    for kind, rate in ipairs({foreground, background}) do
      paces[kind].per_s = paces[kind].per_s + rate
      paces[kind].spread = paces[kind].spread + rate * (tonumber(spreads[kind]) or UNKNOWN_SPREAD)
    end
    paces.free[#paces.free + 1] = {finite(node.kv_tokens_available), tonumber(node.sequences_available)}
  end

  local function read_pace(job)
    if not queue.paces then
      queue.paces = {{per_s = 0, spread = 0}, {per_s = 0, spread = 0}, free = {}}
      for _, record in ipairs(redis.call('HVALS', P .. ':pressure')) do
        local ok, node = pcall(cmsgpack.unpack, record)
        if ok and type(node) == 'table' and node.draining ~= true then add_node(queue.paces, node) end
      end
    end
    local pace, free = queue.paces[job.in_background and 2 or 1], 0
    for _, of_node in ipairs(queue.paces.free) do
      local kv_tokens, sequences = unpack(of_node)
      free = free + (sequences and math.min(kv_tokens, sequences * job.cost) or kv_tokens)
    end
    if pace.per_s <= 0 then return nil, free, UNKNOWN_SPREAD end
    return pace.per_s / 1000, free, pace.spread / pace.per_s
  end

  -- Adds jitter from the id's last digits, which are random; Lua's random numbers are the same in every script run.
  local function jittered(job, ms)
    local share = tonumber(string.sub(job.id, -4), 16) / 65535
    return math.floor(ms * (1 - JITTER + 2 * JITTER * share))
  end

  local REFUSALS = {memory = 'refused_memory', ["tenant's memory"] = 'refused_tenant_memory'}

  local function busy(job, what, limit, retry_ms, wait_ms)
    local is_of_tenant = string.find(what, "tenant's ", 1, true)
    count_event(REFUSALS[what] or (is_of_tenant and 'refused_tenant_limit' or 'refused_busy'))
    local num_ahead = 0
    for other = 0, job.level do
      num_ahead = num_ahead + redis.call('ZCARD', P .. ':waiting:' .. other) + (queue[other] or 0)
    end
    return {'BUSY', what, limit, math.ceil(math.min(MAX_RETRY_MS, math.max(MIN_RETRY_MS, retry_ms))), num_ahead,
      math.ceil(wait_ms or -1), math.floor(1000 * select(3, read_pace(job)))}
  end

  -- The fields of P:refused:<tenant>: two, and 4,096 bodies.
  local MAX_REFUSED_BODIES = 4098

  -- A tenant's refused cost, with that of this call, and whether the job's body counts there. `bodies` are those that this
  -- call adds.
  local function read_refused(job, rate, share)
    local refused = job.own.refused
    if not refused then
      local cost, at = unpack(redis.call('HMGET', P .. ':refused:' .. job.tenant, 'cost', 'at'))
      local left = finite(cost) - rate * share * (now - (whole(at) or now))
      refused = {left = math.max(0, left), is_new = left <= 0, bodies = {}}
      -- Beyond that, a further body does not count: its retries could not be told from new ones.
      refused.is_full = left > 0 and redis.call('HLEN', P .. ':refused:' .. job.tenant) >= MAX_REFUSED_BODIES
      job.own.refused = refused
    end
    return refused, refused.bodies[job.body] or redis.call('HGET', P .. ':refused:' .. job.tenant, job.body)
  end

  function write_refused(tenant, refused)
    if not refused or not next(refused.bodies) then return end
    local refused_key = P .. ':refused:' .. tenant
    if refused.is_new then redis.call('DEL', refused_key) end
    redis.call('HSET', refused_key, 'cost', refused.left, 'at', now)
    for body in pairs(refused.bodies) do
      if redis.call('HLEN', refused_key) < MAX_REFUSED_BODIES then redis.call('HSET', refused_key, body, 1) end
    end
    redis.call('PEXPIRE', refused_key, MAX_RETRY_MS)
  end

  -- Refuses a job until `excess`, which the tenant's share of the pace completes, and all its previously refused cost will
  -- be completed. wait_ms: how long the job would wait, if that is known.
  local function busy_until_drained(job, what, limit, excess, wait_ms)
    local rate, free = read_pace(job)
    if not rate then return busy(job, what, limit, jittered(job, MEMORY_RETRY_MS)) end
    local share, cost = share_of(job), job.cost
    local refused, is_known = read_refused(job, rate, share)
    local left = refused.left
    if is_known then
      left = math.max(0, left - cost)
    elseif not refused.is_full then
      refused.left, refused.bodies[job.body] = left + cost, true
    end
    wait_ms = wait_ms or math.max(0, cost_ahead(job) + cost - free) / rate
    return busy(job, what, limit, jittered(job, (excess + left) / (rate * share)), wait_ms)
  end

  -- A limit of the pool refuses only tenants that take their part of it: while others fill it, a tenant may go on up to
  -- limit ÷ number of tenants. Redis's memory bounds the sum.
  local function takes_its_part(own, limit, num_tenants) return own >= limit / math.max(1, num_tenants) end

  local function own_open_jobs(job)
    local own = job.own
    own.open = own.open or redis.call('SCARD', P .. ':tenant:' .. job.tenant .. ':open')
    return own.open + (own.num_accepted or 0)
  end

  local function num_tasks()
    queue.tasks = queue.tasks or redis.call('ZCARD', P .. ':tasks')
    return queue.tasks
  end

  -- Limits of the pool. Each of these functions returns the answer to a refused job, or nil.
  local function exceeds_pool(job)
    local MAX_WAITING_TASKS = 10000
    local is_light, in_background, cost = job.is_light, job.in_background, job.cost
    queue.open = queue.open or redis.call('SCARD', P .. ':open')
    local queued, open = backlog_of(0, CLASSES - 1), queue.open
    local num_tenants = num_others_of(job) + 1
    if open >= config.max_open_jobs and takes_its_part(own_open_jobs(job), config.max_open_jobs, num_tenants) then
      return busy_until_drained(job, 'open jobs', config.max_open_jobs, ahead_of(job) / math.max(1, own_open_jobs(job)))
    end
    if is_light and num_tasks() >= MAX_WAITING_TASKS then
      local own_tasks = finite(redis.call('HGET', P .. ':tenant_tasks', job.tenant))
      local num_with_tasks = redis.call('HLEN', P .. ':tenant_tasks') + (own_tasks > 0 and 0 or 1)
      if takes_its_part(own_tasks, MAX_WAITING_TASKS, num_with_tasks) then
        return busy(job, 'waiting tasks', MAX_WAITING_TASKS, jittered(job, MIN_RETRY_MS))
      end
    end
    if not is_light and not in_background and queued > 0 and queued + cost > config.max_queued_cost and
        takes_its_part(own_queued(job) + cost, config.max_queued_cost, num_tenants) then
      local excess = math.max(0, own_queued(job) + cost - config.max_queued_cost / num_tenants)
      return busy_until_drained(job, 'queued KV tokens', config.max_queued_cost, excess)
    end
  end

  -- The longest wait and the deadline of a job.
  local function exceeds_wait(job)
    local MAX_WAIT_MS = 60000
    local is_light, in_background, not_before_in, cost = job.is_light, job.in_background, job.not_before_in_ms, job.cost
    -- Under `fair`, a tenant without queued jobs is never refused for its wait. A delayed job waits by its caller's wish, and
    -- background work waits as long as it takes.
    local is_waited_for = not is_light and not in_background and not_before_in == 0
    local ahead = is_waited_for and (own_queued(job) > 0 or not is_fair) and cost_ahead(job) or 0
    if ahead > 0 then
      local of_class = 'max_wait_ms_' .. (({[0] = 'interactive', 'standard', 'batch'})[job.level] or '')
      local max_wait = job.max_wait_ms or config[of_class] or config.max_wait_ms or MAX_WAIT_MS
      local rate, free = read_pace(job)
      local wait_ms = rate and math.max(0, ahead + cost - free) / rate or 0
      if wait_ms > max_wait then
        return busy_until_drained(job, 'wait', max_wait / 1000, (wait_ms - max_wait) * rate * share_of(job), wait_ms)
      end
    end
    -- A deadline refuses a job only if it would be too late even though the pool served this tenant alone from now on.
    local deadline_in = job.deadline_in_ms
    if deadline_in > 0 and not is_light and ahead_of(job) > 0 then
      local rate, free = read_pace(job)
      local optimistic = math.min(backlog_of(0, job.level), ahead_of(job))
      local wait_ms = rate and math.max(0, optimistic - free) / rate or 0
      if wait_ms > deadline_in - not_before_in then
        local excess = (wait_ms - deadline_in) * rate * share_of(job)
        return busy_until_drained(job, 'deadline', deadline_in / 1000, excess, wait_ms)
      end
    end
  end

  -- Of Redis's memory, per class of foreground work, and for background work. Background work leaves memory to its own
  -- results, which take.lua lets grow to 80 %.
  local MEMORY_PERCENT, BACKGROUND_PERCENT = {[0] = 90, 90, 80}, 60

  local function exceeds_memory(job)
    local MAX_RELEASED, MAX_LOOKED_AT = 256, 256
    local held, output = job.held, job.output
    if not queue.memory then
      local used, limit = used_memory()
      queue.memory = {used = limit > 0 and used + total(':reserved') or 0, limit = limit}
    end
    local limit = queue.memory.limit
    if limit == 0 then return nil end
    local memory_percent_of_all = job.in_background and BACKGROUND_PERCENT or MEMORY_PERCENT[job.level]
    if queue.memory.used + held + output > limit * memory_percent_of_all / 100 then
      return busy(job, 'memory', memory_percent_of_all, jittered(job, MEMORY_RETRY_MS))
    end
    local own, tenant, memory_percent = job.own, job.tenant, job.terms.memory_percent
    -- Memory of one tenant: beyond its share, only that tenant is refused.
    local share = memory_share_of(memory_percent, limit, memory_percent_of_all, queue.memory.used + held + output)
    local function exceeds()
      own.bytes = own.bytes or bytes_of(tenant)
      return own.bytes + held + output > share
    end

    -- Milliseconds until a stored key of this tenant expires, if it is among the next MAX_LOOKED_AT keys of all tenants.
    local function until_next_goes()
      local next_ones = redis.call('ZRANGE', P .. ':expiry', 0, MAX_LOOKED_AT - 1, 'WITHSCORES')
      for at = 1, #next_ones, 2 do
        if string.match(next_ones[at], '^%d+ (%S+) ') == tenant then return tonumber(next_ones[at + 1]) - now end
      end
      return MAX_RETRY_MS
    end

    if exceeds() and not own.has_released then
      local collecting, counted = collected, own.bytes - bytes_of(tenant)
      -- What has expired is subtracted at once, because it counts for this job.
      collected, own.has_released = nil, true
      subtract_expired(MAX_RELEASED)
      collected, own.bytes = collecting, bytes_of(tenant) + counted
    end
    if exceeds() then
      return busy(job, "tenant's memory", math.floor(100 * share / limit), jittered(job, until_next_goes()))
    end
  end

  local function exceeds_tenant(job)
    local key = job.more and job.more.key
    if key and redis.call('SISMEMBER', P .. ':keys:' .. job.tenant, key) == 0 and
        redis.call('SCARD', P .. ':keys:' .. job.tenant) >= MAX_KEYS then
      return busy(job, "tenant's concurrency keys in use", MAX_KEYS, jittered(job, MIN_RETRY_MS))
    end
    local is_light, cost, tenant_open, tenant_queued = job.is_light, job.cost, job.terms.max_open_jobs, job.terms.max_queued_cost
    local own_open = tenant_open > 0 and own_open_jobs(job)
    if tenant_open > 0 and own_open >= tenant_open then
      return busy_until_drained(job, "tenant's open jobs", tenant_open, ahead_of(job) / own_open)
    end
    if tenant_queued == 0 then return nil end
    local all_queued = own_queued(job) + own_background(job)
    if not is_light and tenant_queued > 0 and all_queued > 0 and all_queued + cost > tenant_queued then
      return busy_until_drained(job, "tenant's queued KV tokens", tenant_queued, all_queued + cost - tenant_queued)
    end
  end

  -- Tokens that the job reserves of its tenant's rate: its prompt and, per choice, the length of the tenant's own outputs
  -- or the caller's limit, whichever is smaller.
  local function tokens_to_reserve(job)
    local UNKNOWN_LENGTH = 256
    if not job.rate_prompt then return job.is_light and 0 or job.cost end
    local longest = job.rate_max > 0 and job.rate_max or nil
    local known = whole(redis.call('HGET', P .. ':lengths', job.tenant))
    local length = math.min(longest or known or UNKNOWN_LENGTH, known or longest or UNKNOWN_LENGTH)
    return job.rate_prompt + job.rate_n * length
  end

  -- A tenant's rates: when the next unit of each is due, and the ms per unit that this is stated at.
  local function read_rates(job)
    if not job.own.rates then
      local found = redis.call('HMGET', P .. ':rate:' .. job.tenant, 'jobs', 'ms_per_job', 'tokens', 'ms_per_token')
      job.own.rates = {until_ms = now, changed = {}, due = {jobs = found[1], tokens = found[3]},
        stated = {jobs = found[2], tokens = found[4]}}
    end
    return job.own.rates
  end

  local function exceeds_rates(job)
    local terms = job.terms
    job.reserved_tokens = terms.tokens_per_minute > 0 and tokens_to_reserve(job) or 0
    if terms.jobs_per_minute == 0 and terms.tokens_per_minute == 0 then return nil end
    local rates, new, rate_until = read_rates(job), {}, now
    local may_wait = job.in_background and not job.is_light
    if may_wait and job.own.has_lane == nil then
      job.own.has_lane = redis.call('EXISTS', P .. ':awaiting:' .. job.tenant) == 1
    end
    -- Background work waits for the rates, behind what waits already.
    local function let_wait()
      local per_job = terms.jobs_per_minute > 0 and 60000 / terms.jobs_per_minute or '-'
      local has_tokens = terms.tokens_per_minute > 0 and job.not_before_in_ms == 0
      job.to_pay = string.format('%s %s %d %d', per_job, has_tokens and 60000 / terms.tokens_per_minute or '-',
        has_tokens and job.reserved_tokens or 0, terms.burst_s * 1000)
      job.own.has_lane = true
    end
    if may_wait and job.own.has_lane then return let_wait() end
    for _, unit in ipairs({{'jobs', 1}, {'tokens', job.reserved_tokens}}) do
      local name, amount = unpack(unit)
      local due, limit_of_unit = finite(rates.due[name]), terms[name .. '_per_minute']
      -- A delayed job reserves its tokens when it is due.
      if limit_of_unit > 0 and not (name == 'tokens' and job.not_before_in_ms > 0) then
        local ms_per_unit = 60000 / limit_of_unit
        local later, wait = next_due(now, terms.burst_s * 1000, amount, ms_per_unit, due, rates.stated[name])
        if not later and may_wait then return let_wait() end
        if not later then return busy(job, "tenant's " .. name .. ' per minute', limit_of_unit, wait) end
        due = later
        new[name] = {later, ms_per_unit}
      end
      -- The debt of a unit that this job does not count must outlive it as well.
      rate_until = math.max(rate_until, due)
    end
    for name, of_unit in pairs(new) do
      rates.due[name], rates.stated[name], rates.changed[name] = of_unit[1], of_unit[2], true
    end
    rates.until_ms = math.max(rates.until_ms, rate_until)
  end

  function write_rates(tenant, rates)
    if not rates or not next(rates.changed) then return end
    local rate_key = P .. ':rate:' .. tenant
    for name, field in pairs({jobs = 'ms_per_job', tokens = 'ms_per_token'}) do
      if rates.changed[name] then redis.call('HSET', rate_key, name, rates.due[name], field, rates.stated[name]) end
    end
    redis.call('PEXPIRE', rate_key, math.ceil(rates.until_ms - now))
  end

  -- Counts an accepted job for the next ones of this call.
  function count_accepted(job, waits)
    local own = job.own
    add_if_read(queue, 'open', 1)
    own.num_accepted = (own.num_accepted or 0) + 1
    add_if_read(own, 'bytes', job.held)
    if queue.memory then queue.memory.used = queue.memory.used + job.held end
    if waits then return end
    queue[job.level] = (queue[job.level] or 0) + 1
    local name, tenants = job.in_background and 'background' or 'queued', job.in_background and 'background_tenants' or 'tenants'
    if own[name] == 0 and job.cost > 0 then add_if_read(queue, tenants, 1) end
    add_if_read(own, name, job.cost)
    if job.is_light then add_if_read(queue, 'tasks', 1) end
    if queue.backlog then
      local at = job.level + 1
      queue.backlog[at] = finite(queue.backlog[at]) + job.cost
    end
  end

  -- The caller of foreground work does not wait for the end of a pause, unless it says so. The widest pause is named.
  local function is_paused(job)
    if job.in_background or job.waits or job.is_repeated then return nil end
    if queue.has_pauses == nil then queue.has_pauses = redis.call('EXISTS', P .. ':paused') == 1 end
    if not queue.has_pauses then return nil end
    for _, name in ipairs({'pool', 'level:' .. job.level, 'tenant:' .. job.tenant}) do
      local since = redis.call('HGET', P .. ':paused', name)
      if since then return {'PAUSED', name, since} end
    end
  end

  -- Returns the answer to a job that a pause or a limit refuses, or nil.
  function refusal_of(job)
    return is_paused(job) or exceeds_pool(job) or exceeds_wait(job) or exceeds_memory(job) or exceeds_tenant(job)
      or exceeds_rates(job)
  end
end

-- Accepted jobs ------------------------------------------------------------------------------------

-- Writes the record. Redis searches a small hash from its front. So the fields that emit reads at every step come first,
-- then take's.
local function write_record(job, entry, is_delayed)
  local terms = job.terms
  local tokens_per_minute = terms.tokens_per_minute
  local fields = {'state', 'queued', 'node', '', 'lease', '', 'first', '', 'cancel', '',
    'deadline', job.deadline, 'needs_reader', job.needs_reader, 'unread', job.unread, 'inboxes', inbox, 'channel', job.channel,
    'tenant', job.tenant, 'level', job.level, 'n', job.n, 'cost', job.cost, 'entry', entry, 'submitted', job.submitted,
    'losses', 0, 'preemptions', 0, 'weight', terms.weight, 'body', job.body, 'held', job.held, 'output', job.output,
    'idem', idem_of(job)}
  local function add(...)
    for _, value in ipairs({...}) do fields[#fields + 1] = value end
  end
  if terms.memory_percent > 0 then add('memory_percent', terms.memory_percent) end
  if terms.account ~= '' then add('account', terms.account) end
  if job.limits ~= '' then add('limits', job.limits) end
  if job.waits or job.max_wait_ms then add('max_wait', job.waits and 0 or job.max_wait_ms) end
  if job.begun_deadline then add('begun_deadline', job.begun_deadline) end
  if entry == DELAYED then add('accepted', now) end
  if job.retry_of ~= '' then add('retry_of', job.retry_of) end
  if job.in_feed == 0 then add('in_feed', 0) end
  if job.webhooks ~= '' then add('webhooks', job.webhooks) end
  if job.model ~= '' then add('model', job.model) end
  if job.words ~= '' then add('words', job.words) end
  if job.response ~= '' then
    redis.call('SET', P .. ':response:' .. job.id, job.response)
    add('keep', job.keep_ms, 'response_bytes', #job.response)
  end
  if tokens_per_minute > 0 then
    add('ms_per_token', 60000 / tokens_per_minute, 'charged', (is_delayed or job.to_pay) and 0 or job.reserved_tokens)
    if is_delayed then add('to_charge', job.reserved_tokens, 'burst_ms', terms.burst_s * 1000) end
  end
  if job.may_use then add('may_use', job.may_use, 'minute_tokens', job.minute_tokens) end
  if job.to_pay then add('to_pay', job.to_pay) end
  for name, value in pairs(job.more or {}) do add(name, value) end
  -- The end of a job looks for its key only if it has this field.
  if job.key then add('extra', 0) end
  sure('HSET', job_key(job.id), unpack(fields))
end

local entered = {}

local function queue_job(job)
  add_entry(P .. ':waiting:' .. job.level, job.submitted, job.id)
  if job.is_light then
    redis.call('ZADD', P .. ':tasks', job.submitted, job.id)
    redis.call('HINCRBY', P .. ':tenant_tasks', job.tenant, 1)
  end
  add_sum(P .. ':backlog', job.level, job.cost)
  count_queued(job, job.cost)
  local name = job.level .. ':' .. job.tenant
  if not entered[name] then
    enter_tenant(job)
    entered[name] = true
  end
end

local to_ring = {}

local function accept(at, job)
  local id, tenant, is_delayed, tokens_per_minute = job.id, job.tenant, job.not_before_in_ms > 0, job.terms.tokens_per_minute
  job.deadline = job.deadline_in_ms > 0 and tostring(now + job.deadline_in_ms) or ''
  if job.ttl_in_ms > 0 and (job.deadline_in_ms == 0 or job.ttl_in_ms < job.deadline_in_ms) then
    job.deadline, job.begun_deadline = tostring(now + job.ttl_in_ms), job.deadline
  end
  -- A job submitted without a reader has reattach_grace_ms to get one.
  job.unread = (inbox == '' and not channels.is(job.channel)) and now or ''
  job.submitted = now + job.not_before_in_ms
  sure('SET', P .. ':request:' .. id, job.request)
  if tokens_per_minute > 0 and not job.is_light then
    job.may_use = job.most_tokens or job.cost
    job.minute_tokens = math.floor(tokens_per_minute * (1 + job.terms.burst_s / 60))
  end
  if job.more then job.key, job.key_terms = job.more.key, job.more.key_terms end
  local waits = is_delayed or not admits_job(job, now)
  write_record(job, waits and DELAYED or redis.call('XADD', queue_key(job), '*', 'id', id), is_delayed)
  if is_delayed then delay_job(job) end
  if not waits then queue_job(job) end
  note_due(job)
  count_event('submitted')
  add_member(P .. ':open', id)
  add_member(P .. ':tenant:' .. tenant .. ':open', id)
  add_entry(lists.key(is_delayed and 'scheduled' or 'queued', tenant), 0, id)
  lists.add(job, job.tags, job.metadata)
  count_bytes(P .. ':stored', tenant, job.held)
  -- The idempotency key lives as long as the job, and idem_ttl_ms after its end.
  if job.idem_hash ~= '' then
    redis.call('SET', P .. ':idem:' .. idem_of(job), id)
  end
  num_accepted = num_accepted + 1
  if not waits then to_ring[#to_ring + 1] = job.cost end
  count_accepted(job, waits)
  answers[at] = {'OK', id, is_delayed and 'scheduled' or 'queued', 0, 1}
end

-- What is done once all accepted jobs are written.
local last_writes = {}

local function submit_job(at, job)
  local known, conflict = find_known(job)
  if known then
    last_writes[#last_writes + 1] = function() answers[at] = same_or(known, job, conflict) end
    return
  end
  local max_age = wrong_age(job)
  if max_age then
    answers[at] = {'BAD_ID_AGE', max_age}
    return
  end
  local refusal = refusal_of(job)
  if refusal then answers[at] = refusal else accept(at, job) end
end

local function guarded(at, call, ...)
  local ok, answer = pcall(call, ...)
  if not ok then answers[at] = {'ERR', tostring(type(answer) == 'table' and answer.err or answer)} end
end

collect()
for at, row in ipairs(rows) do
  guarded(at, submit_job, at, job_of(row, ARGV[PAYLOADS + 2 * at - 2], ARGV[PAYLOADS + 2 * at - 1]))
end
-- A full Redis checks its memory before a script's first write. Where nothing was accepted, this free one is the first.
redis.call('ZREM', P .. ':free', '')
for _, write in ipairs(last_writes) do write() end
write_collected()
for tenant, own in pairs(known_of) do
  write_refused(tenant, own.refused)
  write_rates(tenant, own.rates)
end
if num_accepted > 0 and inbox ~= '' then redis.call('ZADD', P .. ':readers', now, inbox) end
ring_doorbells(to_ring)
return answers
