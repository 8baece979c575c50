-- emit: append chunks of many jobs to their logs and publish them. A node calls it once per step for its whole batch.
-- A chunk whose index is already in the log is published again but not appended, because a node repeats a lost call.
-- ARGV: node, msgpack of [[id, lease, index, [chunk…], progress]…]
--   index: index of the first chunk in the job's log. progress: a message about the job's prefill, or ''. It goes to the
--   readers' inboxes, and is not stored.
-- Answer, one per job: OK | FENCED | CANCEL | EXPIRED | UNREAD | NEED n | GONE | ERR text
--   FENCED: the lease is lost. CANCEL, EXPIRED, UNREAD (no reader lives): the node must end the job.
--   NEED n: chunks from index n on are missing. GONE: no such job. ERR: a script error for this job only.
local node, emissions = ARGV[1], cmsgpack.unpack(ARGV[2])
local config = read_config({'version', 'abandon_after_ms', 'reattach_grace_ms'})
local now = clock()
local PUSH = 1000
-- Tenant → bytes to add to its P:stored and P:reserved. They are added once per call, because the jobs of a batch have
-- few tenants.
local counted = {}

-- Reads only the needed fields, without a loop: half of this script's time is spent on reading records.
local function read_running(id)
  local v = redis.call('HMGET', job_key(id), 'state', 'node', 'lease', 'first', 'cancel', 'deadline', 'needs_reader',
    'unread', 'inboxes', 'channel')
  return v[1] and {id = id, state = v[1], node = v[2], lease = v[3], first = v[4] or '', cancel = v[5],
    deadline = v[6] or '', needs_reader = v[7], unread = v[8] or '', inboxes = v[9] or '', channel = v[10] or ''}
end

local function emit_job(id, lease, index, chunks, progress)
  local job = config and read_running(id)
  if not job then return 'GONE' end
  if not holds(job, node, lease) then
    count_event('fenced')
    return 'FENCED'
  end
  local log = log_key(id)
  local length = redis.call('LLEN', log)
  if index > length then return 'NEED ' .. length end
  if job.first == '' and #chunks > 0 then redis.call('HSET', job_key(id), 'first', now) end
  for from = 1 + length - index, #chunks, PUSH do
    redis.call('RPUSH', log, unpack(chunks, from, math.min(from + PUSH - 1, #chunks)))
  end
  local num_logged = math.max(length, index + #chunks)
  if math.floor(num_logged / COUNTED_CHUNKS) > math.floor(length / COUNTED_CHUNKS) then
    local tenant, logged, grown = count_log(id)
    local sums = tenant and counted[tenant] or {0, 0}
    if tenant then counted[tenant] = {sums[1] + logged, sums[2] + grown} end
  end
  if progress ~= '' then push(job, progress) end
  for i = 1, #chunks do publish(job, chunks[i]) end
  if job.cancel == '1' then return 'CANCEL' end
  if is_expired(job, now) then return 'EXPIRED' end
  if lacks_reader(job, config, now) then return 'UNREAD' end
  return 'OK'
end

redis.call('ZREM', P .. ':free', '')
redis.call('ZADD', P .. ':nodes', 'XX', now, node)
local answers = {}
for i, emission in ipairs(emissions) do
  local ok, answer = pcall(emit_job, emission[1], emission[2], emission[3], emission[4], emission[5])
  if not ok then answer = 'ERR ' .. tostring(type(answer) == 'table' and answer.err or answer) end
  answers[i] = answer
end
-- A damaged sum stops no node: the next script that changes it begins it anew.
for tenant, sums in pairs(counted) do
  pcall(count_bytes, P .. ':stored', tenant, sums[1])
  pcall(count_bytes, P .. ':reserved', tenant, sums[2])
end
flush()
return answers
