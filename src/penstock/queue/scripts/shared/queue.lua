-- The queue: how jobs enter and leave it, and come back to it from a node.

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
