-- give_back: a node returns running jobs to the queue. They keep their submission time. Only 'lost' counts a loss.
-- ARGV: node why, then per job: id lease cost max_kv_tokens preemptions, and for 'failed' its code
--   why: 'drain': the node leaves. 'handover': it will leave; a job returns only if another node has capacity for it, no
--   pause holds it back, and it was not lost before. Its ledger says 'drain'. 'pressure': the node lacks capacity; a job
--   returns only if another node has capacity for it. 'lacking': it lacks the job's adapter, or does not know a field of it; a job returns only if some node is not
--   known to lack that too.
--   'lost': one of its ranks ended during a step with the job, which may be why. A job lost too often is a dead letter.
--   'failed': an error of the node or its engine ended the attempt. It returns after a pause, if it has another attempt.
--   cost: predicted KV tokens. max_kv_tokens: the most that the job may hold. From its MAX_PREEMPTIONS-th return on,
--   a job costs max_kv_tokens, so that the next node can keep it to its end. preemptions: how often the node's engine
--   preempted the job's sequences.
-- Answer: {OK | KEEP | FENCED | GONE, for each job}, {{id, tenant, state, code} of an ended job, …}
--   KEEP: no other node could take the job, so it stays with this node; or it has no further attempt.
local node, why, config, now = ARGV[1], ARGV[2], read_config(), clock()
local MAX_JOBS, MAX_PREEMPTIONS, FIRST, ARGS = 128, 3, 3, why == 'failed' and 6 or 5
local told = why == 'handover' and 'drain' or why
if #ARGV >= FIRST + ARGS * MAX_JOBS then return redis.error_reply('TOO_MANY_JOBS') end
if not ({drain = 1, handover = 1, pressure = 1, lacking = 1, lost = 1, failed = 1})[why] then return redis.error_reply('BAD_REASON') end

-- Whether a node can continue the job and has slots for its choices.
local function can_continue(other, job)
  local record = record_of(other)
  if job.revision ~= record.revision and redis.call('LLEN', log_key(job.id)) > 0 then return false end
  local num_busy = finite(record.num_running) + finite(record.num_waiting)
  -- A record may be 2 s old.
  if why == 'handover' then num_busy = math.max(num_busy, redis.call('SCARD', P .. ':running:' .. other)) end
  return num_busy + tonumber(job.n) <= finite(record.max_num_seqs)
end

local function fits_elsewhere(job, cost)
  local candidates = redis.call('ZREVRANGEBYSCORE', P .. ':free', '+inf', cost, 'LIMIT', 0, 8)
  for _, other in ipairs(candidates) do
    if other ~= node and can_continue(other, job) then return true end
  end
  return false
end

local paused = why == 'handover' and read_pauses()

-- Whether jobs waited when the script began that go before one of this level: then no node has room for it.
local lengths = {}
for level = 0, LEVELS - 1 do lengths[level] = why == 'handover' and redis.call('ZCARD', P .. ':waiting:' .. level) or 0 end
local function is_behind_others(job)
  for level = 0, tonumber(job.level) do
    if lengths[level] > 0 then return true end
  end
  return false
end

-- Whether no other node would continue the job soon. One that was lost before may have to run alone there.
local function must_stay(job, cost)
  if why == 'handover' and (paused.has(job) or tonumber(job.losses) > 0 or is_behind_others(job)) then return true end
  return (why == 'handover' or why == 'pressure') and not fits_elsewhere(job, cost)
end

-- This node, and the pool's other nodes that are already known to lack what the job needs.
local function all_that_lack(id)
  local known, all = redis.call('HGET', job_key(id), 'lacks') or '', node
  for _, other in ipairs(redis.call('ZRANGE', P .. ':nodes', 0, -1)) do
    if other ~= node and is_listed(known, other) then all = all .. ' ' .. other end
  end
  return all
end

-- Queues a job again, unless no other node could take it.
local function give(job, cost, max_kv_tokens, engine_preemptions, code)
  local pause
  if why == 'failed' then
    local number
    number, pause = rare.next_attempt(job, now)
    if not number then return 'KEEP' end
    redis.call('HSET', job_key(job.id), 'attempts', number + 1)
    told = 'failed/' .. code
  elseif why == 'lost' then
    if end_if_lost_too_often(job, node .. '/' .. now, config, now) then return 'OK' end
  elseif why == 'lacking' then
    local lacks = all_that_lack(job.id)
    if not may_be_elsewhere(job, lacks) then return 'KEEP' end
    redis.call('HSET', job_key(job.id), 'lacks', lacks)
  else
    local preemptions = tonumber(job.preemptions) + 1
    if preemptions >= MAX_PREEMPTIONS then cost = math.max(cost, max_kv_tokens) end
    if must_stay(job, cost) then return 'KEEP' end
    redis.call('HSET', job_key(job.id), 'preemptions', preemptions)
  end
  note_preemptions(job.id, engine_preemptions)
  requeue(job, now, told, cost, now + config.avoid_ms, pause)
  count_event('given_back_' .. (why == 'failed' and why or told))
  return 'OK'
end

redis.call('ZREM', P .. ':free', '')
local answers = {}
for at = FIRST, #ARGV, ARGS do
  local id, lease = ARGV[at], ARGV[at + 1]
  local cost, max_kv_tokens = tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3])
  local job = config and mended(read_job(id))
  local answer = 'OK'
  if not job then
    answer = 'GONE'
  elseif not holds(job, node, lease) then
    answer = 'FENCED'
    count_event('fenced')
  elseif not end_if_over(job, config, now) then
    answer = give(job, cost, max_kv_tokens, tonumber(ARGV[at + 4]), ARGV[at + 5])
  end
  answers[#answers + 1] = answer
end
flush()
return {answers, lists.ended}
