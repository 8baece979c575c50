-- take: gives a node the oldest queued jobs that fit, class by class. What does not fit stays, and nobody passes it:
-- a job counts at most as the node's whole KV cache, so a node that runs dry can always take the head.
-- ARGV: node call nonce room0 room1 room2 slots0 slots1 slots2 kv_total slots_total revision
-- Answer: {OK, {{id, lease, losses, chunks, cost, deadline_in_ms, request}…}, {depth0, depth1, depth2}, again_in_ms}
--       | {UNKNOWN_NODE} | {STALE}
-- A request above MAX_REQUEST_BYTES is answered as '' and read apart.
local MAX_TAKEN, MAX_LOOKED, PAGE, MAX_REQUEST_BYTES = 128, 256, 32, 16384

local node, call, nonce = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local room = {tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])}
local slots = {tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9])}
local kv_total, slots_total, revision = tonumber(ARGV[10]), tonumber(ARGV[11]), ARGV[12]

local schema = read_schema()
local now = clock()
if not schema or not redis.call('ZSCORE', P .. ':nodes', node) then return {'UNKNOWN_NODE'} end

local function depths()
  local depth = {}
  for p = 1, CLASSES do depth[p] = redis.call('ZCARD', P .. ':wait:' .. (p - 1)) end
  return depth
end

local function row(job)
  local deadline_in = job.deadline == '' and 0 or math.max(1, tonumber(job.deadline) - now)
  local request_key = P .. ':in:' .. job.id
  local request = redis.call('STRLEN', request_key) <= MAX_REQUEST_BYTES and redis.call('GET', request_key)
  return {job.id, job.lease, tonumber(job.losses), redis.call('LLEN', log_key(job.id)), tonumber(job.cost), deadline_in,
    request or ''}
end

-- The same call again: the same answer, less what has moved on since.
local took_key = P .. ':took:' .. node
local took = redis.call('GET', took_key)
if took then
  took = cmsgpack.unpack(took)
  if call < took.call then return {'STALE'} end
  if call == took.call then
    local rows = {}
    for i, id in ipairs(took.ids) do
      local job = read_job(id)
      if job and holds(job, node, took.leases[i]) then rows[#rows + 1] = row(job) end
    end
    return {'OK', rows, depths(), 0}
  end
end

-- A job that has tokens in its log goes on only where they would be the same.
local function is_foreign(job)
  return job.revision ~= '' and job.revision ~= revision and redis.call('LLEN', log_key(job.id)) > 0
end

local function has_live_revision(job)
  if not may_judge(schema, now) then return true end
  local last = redis.call('ZSCORE', P .. ':revs', job.revision)
  return last and now - tonumber(last) < schema.lease_ms
end

local taken, over, gone, again_in, looked = {}, {}, {}, 0, 0

-- Looks at one job; false when it does not fit, which ends the walk.
local function consider(job, p)
  if why_over(job, schema, now) then
    over[#over + 1] = job
  elseif is_foreign(job) then
    if not has_live_revision(job) then gone[#gone + 1] = job end
  elseif job.avoid == node and tonumber(job.avoid_until) > now then
    local wait = tonumber(job.avoid_until) - now
    again_in = again_in == 0 and wait or math.min(again_in, wait)
  else
    local need, seqs = math.min(tonumber(job.cost), kv_total), math.min(tonumber(job.n), slots_total)
    if need > room[p] or seqs > slots[p] or #taken >= MAX_TAKEN then return false end
    for q = p, CLASSES do room[q], slots[q] = room[q] - need, slots[q] - seqs end
    taken[#taken + 1] = job
  end
  return true
end

local function walk(p)
  local offset = 0
  while looked < MAX_LOOKED do
    local ids = redis.call('ZRANGE', P .. ':wait:' .. (p - 1), offset, offset + PAGE - 1)
    for _, id in ipairs(ids) do
      looked = looked + 1
      local job = read_job(id)
      if job and not consider(job, p) then return false end
    end
    if #ids < PAGE then return true end
    offset = offset + PAGE
  end
  return false
end

for p = 1, CLASSES do
  if not walk(p) then break end
end

redis.call('DEL', took_key)
for _, job in ipairs(over) do end_if_over(job, schema, now) end
for _, job in ipairs(gone) do
  end_job(job, schema, now, 'failed', 'revision_gone', 'the model that wrote the first tokens is no longer served', '')
end
local ids, leases, rows = {}, {}, {}
for i, job in ipairs(taken) do
  leave_queue(job)
  job.lease = call .. ':' .. nonce .. ':' .. i
  redis.call('HSET', job_key(job.id), 'state', 'running', 'node', node, 'lease', job.lease, 'entry', '',
    'revision', revision)
  redis.call('HSETNX', job_key(job.id), 'taken', now)
  redis.call('SADD', P .. ':run:' .. node, job.id)
  ids[i], leases[i], rows[i] = job.id, job.lease, row(job)
end
redis.call('SET', took_key, cmsgpack.pack({call = call, ids = ids, leases = leases}), 'PX', 60000)
flush()
return {'OK', rows, depths(), again_in}
