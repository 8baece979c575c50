-- positions: the positions of jobs in the queue, by class and age. It writes nothing.
-- ARGV: msgpack of [id…], as many as MAX_POSITIONS of broker/jobs.py.
-- Answer: {number of queued jobs of class 0, 1, 2, their cost, class of each job, ahead of each job}
--   ahead: the older queued jobs of its class. TAKEN: a node has the job, which has no token yet. DELAYED_JOB: its time
--   has not come. GONE: it has tokens and runs, has ended, or is unknown.
local TAKEN, DELAYED_JOB, GONE = -1, -2, -3

local function place_of(id)
  local state, first, p = unpack(redis.call('HMGET', job_key(id), 'state', 'first', 'priority'))
  if state == 'queued' then return tonumber(p), redis.call('ZRANK', P .. ':waiting:' .. p, id) or DELAYED_JOB end
  return 0, state == 'running' and first == '' and TAKEN or GONE
end

read_config({'version'})
local counts, costs, classes, ahead = {}, {}, {}, {}
for p = 0, CLASSES - 1 do
  counts[p + 1] = redis.call('ZCARD', P .. ':waiting:' .. p)
  costs[p + 1] = tonumber(redis.call('HGET', P .. ':backlog', p) or '0')
end
for i, id in ipairs(cmsgpack.unpack(ARGV[1])) do classes[i], ahead[i] = place_of(id) end
return {counts, costs, classes, ahead}
