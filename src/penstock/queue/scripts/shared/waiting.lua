-- Jobs that wait outside of the queue, for their time or for their tenant's tokens.

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
