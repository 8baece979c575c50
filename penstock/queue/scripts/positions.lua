-- positions: the positions of jobs in the queue, by level and age. It writes nothing.
-- ARGV: msgpack of [id…], as many as MAX_POSITIONS of broker/jobs.py.
-- Answer: {number of queued jobs per level, their cost, level of each job, ahead of each job}
--   ahead: the older queued jobs of its level. TAKEN: a node has the job, which has no token yet. DELAYED_JOB: its time
--   has not come. GONE: it has tokens and runs, has ended, or is unknown.
local TAKEN, DELAYED_JOB, GONE = -1, -2, -3

local function place_of(id)
  local state, first, level = unpack(redis.call('HMGET', job_key(id), 'state', 'first', 'level'))
  if state == 'queued' then return tonumber(level), redis.call('ZRANK', P .. ':waiting:' .. level, id) or DELAYED_JOB end
  return 0, state == 'running' and first == '' and TAKEN or GONE
end

read_config({'version'})
local counts, costs, levels, ahead = {}, {}, {}, {}
for level = 0, LEVELS - 1 do
  counts[level + 1] = redis.call('ZCARD', P .. ':waiting:' .. level)
  costs[level + 1] = tonumber(redis.call('HGET', P .. ':backlog', level) or '0')
end
for i, id in ipairs(cmsgpack.unpack(ARGV[1])) do levels[i], ahead[i] = place_of(id) end
return {counts, costs, levels, ahead}
