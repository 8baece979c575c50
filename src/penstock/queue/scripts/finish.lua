-- finish: append the last chunks of jobs, store their results and end them. Repeating the call is harmless.
-- ARGV: node, msgpack of [end…], then a result for each job
--   end: a map: id, lease, index, state, code, message, param, kv_token_ms, prompt, completion, cached, reasoning,
--   log_bytes, preemptions, chunks
--   index: index of the first chunk in the job's log.
--   code, message, param, preemptions, chunks: absent for '', 0 and none.
--   kv_token_ms: KV tokens × milliseconds that the node held them; corrects the tenant's charge. Absent: it stays.
--   preemptions: how often the node's engine preempted the job's sequences.
--   prompt, completion, cached, reasoning: tokens that the job used; reasoning is absent for 0. log_bytes: size of all
--   its chunks. Absent where unknown.
--   successor: {id, request} of the job that takes its place if it has another attempt, because its check refused the
--   output; absent for none.
--   result: '' if the job ended before its node had read the chunks that an earlier node logged; then none is stored.
-- Answer, one per job: OK | FENCED | NEED n | GONE (as for emit) | ERR text.
--   A queued job that was never taken, as Redis says, is ended as one of this node: Redis lost the take.
local node, ends = ARGV[1], cmsgpack.unpack(ARGV[2])
local MAX_JOBS, RESULTS, PUSH = 64, 2, 1000
if #ends > MAX_JOBS then return redis.error_reply('TOO_MANY_JOBS') end
local config, now = read_config(), clock()
-- The cost of the jobs that this call ends, which the doorbells of these had taken from the node's free KV tokens.
local freed = 0

-- What this script and end_job need of a record, in one read.
local FIELDS = {'state', 'node', 'lease', 'first', 'needs_reader', 'inboxes', 'channel', 'tenant', 'level', 'n', 'weight',
  'held', 'idem', 'charge', 'window', 'reserved', 'account', 'ms_per_token', 'charged', 'keep', 'response_bytes', 'loss_nodes',
  'past_leases', 'in_feed', 'extra', 'webhooks', 'stopped_by', 'cost'}

-- Appends chunks from `from` on, except the last ones, which go in with the terminal chunk. Returns these.
local function append(log, chunks, from)
  while #chunks - from >= PUSH do
    redis.call('RPUSH', log, unpack(chunks, from, from + PUSH - 1))
    from = from + PUSH
  end
  return {unpack(chunks, from)}
end

-- A queued job that no node has taken, as Redis says, or nil. Its node has it: Redis lost the take. No other lease exists
-- in this history of Redis, so the node may end it. What the take charged is lost too, and stays so.
local function read_untaken(id)
  local job = mended(read_job(id))
  if not job or job.taken ~= '' or redis.call('EXISTS', log_key(id)) == 1 then return nil end
  return job
end

local function finish_job(one, result)
  local id, lease, index, state = one.id, one.lease, one.index, one.state
  local kv_token_ms, chunks = one.kv_token_ms, one.chunks or {}
  if not is_terminal(state) then return 'ERR BAD_STATE ' .. state end
  local job = config and mended(read_job(id, FIELDS))
  if not job then return 'GONE' end
  if is_terminal(job.state) and job.node == node and job.lease == lease then return 'OK' end
  local untaken = job.state == 'queued' and read_untaken(id)
  if not untaken and not holds(job, node, lease) then
    count_event('fenced')
    return 'FENCED'
  end
  local log = log_key(id)
  local length = redis.call('LLEN', log)
  if index > length then return 'NEED ' .. length end
  local fields = job.first == '' and #chunks > 0 and {'first', now} or {}
  if untaken then
    for name, value in pairs(untaken) do job[name] = job[name] or value end
    kv_token_ms = nil
    for _, value in ipairs({'node', node, 'lease', lease, 'taken', now}) do fields[#fields + 1] = value end
  end
  local last = append(log, chunks, 1 + length - index)
  for i = 1, #chunks do publish(job, chunks[i]) end
  if result ~= '' then
    sure('SET', P .. ':result:' .. id, result, 'PX', result_life(job, config, #result))
  else
    sure('DEL', P .. ':result:' .. id)
  end
  if kv_token_ms and config.policy ~= 'round_robin' then
    correct_charge(job, kv_token_ms / weight_of(job) - charged_of(job))
  end
  note_preemptions(id, one.preemptions or 0)
  local number, pause
  if one.successor and redis.call('HGET', job_key(id), 'cancel') ~= '1' then number, pause = rare.next_attempt(job, now) end
  if number then
    fields[#fields + 1], fields[#fields + 2] = 'retried_as', string.match(one.successor[1], '[^.]*$')
    -- The end of the last job is told.
    job.webhooks = ''
  end
  local reported = {prompt = one.prompt, completion = one.completion, cached = one.cached,
    reasoning = one.reasoning, log_bytes = one.log_bytes, result_bytes = #result, kv_token_ms = kv_token_ms}
  local logged = {length = math.max(length, index + #chunks) - #last, chunks = last, fields = fields}
  end_job(job, config, now, state, one.code or '', one.message or '', one.param or '', reported, logged)
  if number then rare.submit_successor(job, one.successor, number, pause, now) end
  freed = freed + finite(job.cost)
  return 'OK'
end

redis.call('ZREM', P .. ':free', '')
collect()
local answers = {}
for i, one in ipairs(ends) do
  local ok, answer = pcall(finish_job, one, ARGV[RESULTS + i])
  if not ok then answer = 'ERR ' .. tostring(type(answer) == 'table' and answer.err or answer) end
  answers[i] = answer
end
-- Else the next jobs would all go to the nodes that had a heartbeat since. A node that drains or left has no entry.
if freed > 0 then redis.call('ZADD', P .. ':free', 'XX', 'INCR', freed, node) end
correct_charges()
write_collected()
flush()
return answers
