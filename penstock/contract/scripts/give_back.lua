-- give_back: a node returns jobs it holds; they are queued again with their age, and with no loss.
-- ARGV: node only_if_room, then per job: id lease cost most
-- only_if_room: '1' returns a job only where another node has room for it. From its MAX_PREEMPTIONS-th time on a job
-- costs `most`, what it may hold at its end, so that whoever takes it can keep it.
-- Answer per job: OK | NO_ROOM | FENCED | GONE
local MAX_JOBS, MAX_PREEMPTIONS, FIRST, ARGS = 128, 3, 3, 4
local node, only_if_room, now = ARGV[1], ARGV[2] == '1', clock()
local schema = read_schema()
if #ARGV >= FIRST + ARGS * MAX_JOBS then return redis.error_reply('TOO_MANY_JOBS') end

-- Whether a node that could go on with the job has so much room left.
local function has_room(other, job)
  local ok, record = pcall(cmsgpack.unpack, redis.call('HGET', P .. ':pressure', other) or '')
  if not ok or type(record) ~= 'table' then return false end
  if job.revision ~= record.revision and redis.call('LLEN', log_key(job.id)) > 0 then return false end
  return (record.num_running or 0) + (record.num_waiting or 0) + tonumber(job.n) <= (record.max_num_seqs or 0)
end

local function fits_elsewhere(job, cost)
  local roomy = redis.call('ZREVRANGEBYSCORE', P .. ':free', '+inf', cost, 'LIMIT', 0, 8)
  for _, other in ipairs(roomy) do
    if other ~= node and has_room(other, job) then return true end
  end
  return false
end

redis.call('ZREM', P .. ':free', '')
local answers = {}
for at = FIRST, #ARGV, ARGS do
  local id, lease, cost, most = ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3])
  local job = schema and read_job(id)
  local answer = 'OK'
  if not job then
    answer = 'GONE'
  elseif not holds(job, node, lease) then
    answer = 'FENCED'
    tally('fenced')
  elseif not end_if_over(job, schema, now) then
    local preemptions = tonumber(job.preemptions) + 1
    if preemptions >= MAX_PREEMPTIONS then cost = math.max(cost, most) end
    if only_if_room and not fits_elsewhere(job, cost) then
      answer = 'NO_ROOM'
    else
      redis.call('HSET', job_key(id), 'preemptions', preemptions)
      requeue(job, cost, now + schema.avoid_ms)
      tally(only_if_room and 'given_back_pressure' or 'given_back_drain')
    end
  end
  answers[#answers + 1] = answer
end
flush()
return answers
