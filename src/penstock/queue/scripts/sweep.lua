-- sweep: find nodes without a heartbeat, requeue their jobs, end jobs past their deadline and those whose callers wait no
-- longer for the end of a pause, and queue delayed jobs that are due. Every process calls it; it runs at most once per
-- lease_ms / 15, and as soon as a silent node's lease has ended.
-- If the last run is missing, too old or in the future, Redis was unreachable or its clock jumped, and heartbeats may
-- have been lost. Then this run only resets the heartbeats of all nodes, readers and revisions to now, and corrects the
-- pool's clock (RESET): it goes on from what the caller knows. A caller that knows nothing first waits for one that does
-- (asked_ms of P:config, in Redis's time). After a third of a lease it takes Redis's clock, but none before the last run.
-- ARGV: seen_ms: the pool's time as the caller knows it, 0 if it does not
-- Answer: {SKIPPED, the pool's time, 0 if it is in doubt, left} | {RESET, time, jump}
--   | {OK, time, {lost node, …}, jobs requeued, {{id, tenant, state, code} of an ended job, …}, left}
-- left: after how many ms the lease of the longest silent node ends, -1 if there is none. jump: by how many ms Redis's
-- clock has jumped; 0 if it has not.
local MAX_JOBS, MIN_JUMP_MS, SLOWDOWN = 128, 1000, 100
local MAX_READER_SILENCE_MS, MAX_RELEASED = 600000, 4096
local MAX_TRIMMED, TRIM_EVERY_MS = 16, 10000
local config, seen = read_config(), tonumber(ARGV[1])
local now, ahead, last = clock(seen)
if not config then return {'SKIPPED', 0, -1} end
local in_doubt = pool_time.is_in_doubt()

-- Of the leases that had not ended at a time: after how many ms the first one ends; -1 if there is none.
local function left_ms(at)
  local first = redis.call('ZRANGEBYSCORE', P .. ':nodes', '(' .. (at - config.lease_ms), '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
  return first[2] and math.max(0, math.ceil(tonumber(first[2]) + config.lease_ms - now)) or -1
end

if last and not in_doubt and now - last < config.lease_ms / 15 then
  local left = left_ms(last)
  if left ~= 0 then return {'SKIPPED', now, left} end
end
if in_doubt and seen == 0 then
  local waited_ms = pool_time.of_redis() - (tonumber(redis.call('HGET', KEYS[1], 'asked_ms') or '') or 0)
  if waited_ms < 0 or waited_ms > config.lease_ms then redis.call('HSET', KEYS[1], 'asked_ms', pool_time.of_redis()) end
  if waited_ms < config.lease_ms / 3 or waited_ms > config.lease_ms then return {'SKIPPED', 0, -1} end
end

if not last or in_doubt then
  redis.call('ZREM', P .. ':free', '')
  local by = pool_time.of_redis() + ahead - now
  if math.abs(by) < MIN_JUMP_MS and now + by >= (last or 0) then now, by = now + by, 0 end
  -- A node that its successor declared dead has heartbeat 0, and keeps it.
  for _, set in ipairs({':nodes', ':readers', ':revisions'}) do
    for _, member in ipairs(redis.call('ZRANGEBYSCORE', P .. set, '(0', '+inf')) do
      redis.call('ZADD', P .. set, now, member)
    end
  end
  redis.call('HSET', KEYS[1], 'swept_ms', now, 'ahead_ms', ahead - by)
  count_event('sweep_resets')
  if by ~= 0 then count_event('clock_jumps') end
  return {'RESET', now, by}
end

-- After a jump the pool's clock comes back to Redis's slowly: it goes 1 % faster or slower.
local function nearer(by_ms) return ahead > 0 and math.max(0, ahead - by_ms) or math.min(0, ahead + by_ms) end

-- A node that fell silent while draining was probably killed for draining too slowly, so no job is held responsible.
local function was_draining(node) return record_of(node).draining == true end

local lost, budget = {}, MAX_JOBS
for _, node in ipairs(redis.call('ZRANGEBYSCORE', P .. ':nodes', '-inf', now - config.lease_ms)) do
  local ids = redis.call('SRANDMEMBER', P .. ':running:' .. node, budget)
  local jobs = {}
  for _, id in ipairs(ids) do jobs[#jobs + 1] = listed_job(id, nil, {state = 'running', node = node}) end
  table.sort(jobs, is_older)
  budget = budget - #ids
  lost[#lost + 1] = {node = node, jobs = jobs, empty = #ids == redis.call('SCARD', P .. ':running:' .. node),
    was_draining = was_draining(node)}
  if budget <= 0 then break end
end
local due = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', P .. ':deadlines', '-inf', now, 'LIMIT', 0, MAX_JOBS)) do
  local job = mended(read_job(id))
  if job then due[#due + 1] = job else redis.call('ZREM', P .. ':deadlines', id) end
end

redis.call('ZREM', P .. ':free', '')
redis.call('HSET', KEYS[1], 'swept_ms', now, 'ahead_ms', nearer(math.floor((now - last) / SLOWDOWN)))
local requeued = 0

local function lose(job, was_draining)
  if not was_draining and end_if_lost_too_often(job, job.node, config, now) then return end
  if end_if_over(job, config, now) then return end
  requeue(job, now, 'lost', job.cost, 0)
  requeued = requeued + 1
end

-- Drops completions of a tenant that are older than the jobs' records, about 10,000 at a time. Once the last one is,
-- the key goes, and P:ended_before keeps its id for cursors.
local function trim_completions(tenant)
  local key, oldest = P .. ':ended:' .. tenant, pool_time.of_redis() - config.result_ttl_ms
  local function ms_of(entries) return entries[1] and tonumber(string.match(entries[1][1], '^%d+')) or 0 end
  local newest = redis.pcall('XREVRANGE', key, '+', '-', 'COUNT', 1)
  if ms_of(newest) < oldest then
    redis.call('DEL', key)
    redis.call('ZREM', P .. ':ended', tenant)
    if newest[1] then redis.call('HSET', P .. ':ended_before', tenant, newest[1][1]) end
    return
  end
  redis.call('XTRIM', key, 'MINID', '~', oldest)
  local next_ms = ms_of(redis.call('XRANGE', key, '-', '+', 'COUNT', 1)) + config.result_ttl_ms
  redis.call('ZADD', P .. ':ended', math.max(next_ms, now + TRIM_EVERY_MS), tenant)
end

-- The caller of foreground work that a pause holds back is told so once it has waited for as long as it accepts. The wait
-- of a job that a node had before counts from the pause on. Each call looks at the oldest jobs of a level, and at others in
-- turn, because the oldest ones may wait for longer.
local function end_paused()
  local MAX_LOOKED_AT, MAX_WAIT_MS = 64, 60000
  local since = {}
  local found = redis.call('HGETALL', P .. ':paused')
  for at = 1, #found, 2 do since[found[at]] = whole(found[at + 1]) or now end
  if not next(since) then return end
  local of_pool = redis.call('HMGET', KEYS[1], 'max_wait_ms_interactive', 'max_wait_ms_standard', 'max_wait_ms_batch',
    'max_wait_ms')

  local function end_if_too_late(id, level)
    local tenant, submitted, own, revision = unpack(redis.call('HMGET', job_key(id), 'tenant', 'submitted', 'max_wait',
      'revision'))
    local paused = since.pool or since['level:' .. level] or since['tenant:' .. (tenant or '')]
    local most = whole(own) or whole(of_pool[level + 1]) or whole(of_pool[4]) or MAX_WAIT_MS
    local from = math.max(whole(submitted) or now, (revision or '') ~= '' and paused or 0)
    if not paused or most == 0 or now - from < most then return end
    local job = listed_job(id, nil, {state = 'queued', level = tostring(level)})
    if job then
      end_job(job, config, now, 'failed', 'pool_paused', 'an operator has paused what the job waits for', '')
    end
  end

  for level = 0, CLASSES - 1 do
    local waiting = P .. ':waiting:' .. level
    local num_turns = math.ceil(redis.call('ZCARD', waiting) / MAX_LOOKED_AT)
    local turn = num_turns > 1 and math.floor(now / 1000) % num_turns or 0
    for _, at in ipairs(turn > 0 and {turn, 0} or {0}) do
      for _, id in ipairs(redis.call('ZRANGE', waiting, at * MAX_LOOKED_AT, (at + 1) * MAX_LOOKED_AT - 1)) do
        end_if_too_late(id, level)
      end
    end
  end
end

local nodes_lost = {}
for _, dead in ipairs(lost) do
  redis.call('ZREM', P .. ':free', dead.node)
  redis.call('HDEL', P .. ':paces', dead.node)
  redis.call('HDEL', P .. ':reservations', dead.node)
  for _, job in ipairs(dead.jobs) do lose(job, dead.was_draining) end
  if dead.empty then
    redis.call('ZREM', P .. ':nodes', dead.node)
    redis.call('HDEL', P .. ':pressure', dead.node)
    redis.call('HDEL', P .. ':adapters', dead.node)
    free_seats(dead.node)
    nodes_lost[#nodes_lost + 1] = dead.node
    count_event('nodes_lost')
    note_event(now, 'node_lost', dead.node, '-', '-', '-')
  end
end
for _, job in ipairs(due) do end_if_over(job, config, now) end
end_paused()
release_delayed(config, now)
release_waiting(config, now)
redis.call('ZREMRANGEBYSCORE', P .. ':readers', '-inf', now - math.max(MAX_READER_SILENCE_MS, config.abandon_after_ms))
redis.call('ZREMRANGEBYSCORE', P .. ':revisions', '-inf', now - MAX_READER_SILENCE_MS)
redis.call('ZREMRANGEBYSCORE', P .. ':dead_letters', '-inf', now - DEAD_LIFE_MS)
subtract_expired(MAX_RELEASED)
for _, tenant in ipairs(redis.call('ZRANGEBYSCORE', P .. ':ended', '-inf', now, 'LIMIT', 0, MAX_TRIMMED)) do
  trim_completions(tenant)
end
flush()
return {'OK', now, nodes_lost, requeued, lists.ended, left_ms(now)}
