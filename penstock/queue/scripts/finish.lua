-- finish: append a job's last chunks, store its result and end the job. Repeating the call is harmless.
-- ARGV: node id lease index state code message param kv_token_ms result prompt completion cached log_bytes
--   preemptions k chunk1 … chunkk
--   index: index of chunk1 in the log. k: number of chunks.
--   kv_token_ms: KV tokens × milliseconds that the node held them; corrects the tenant's charge. '': the charge stays.
--   result: '' if the job ended before its node had read the chunks that an earlier node logged; then none is stored.
--   preemptions: how often the node's engine preempted the job's sequences.
--   prompt, completion, cached: tokens that the job used. log_bytes: size of all its chunks. '' where unknown.
-- Answer: OK | FENCED | NEED n | GONE (as for emit)
local node, id, lease, index = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local state, code, message, param = ARGV[5], ARGV[6], ARGV[7], ARGV[8]
local kv_token_ms, result = tonumber(ARGV[9]), ARGV[10]
local reported = {prompt = tonumber(ARGV[11]), completion = tonumber(ARGV[12]), cached = tonumber(ARGV[13]),
  log_bytes = tonumber(ARGV[14]), result_bytes = #result, kv_token_ms = kv_token_ms}
local preemptions, count, FIRST, PUSH = tonumber(ARGV[15]), tonumber(ARGV[16]), 17, 1000

if state == 'done' then state = 'succeeded' end
if not is_terminal(state) then return redis.error_reply('BAD_STATE ' .. state) end
local config = read_config()
local job = config and read_job(id)
if not job then return 'GONE' end
if is_terminal(job.state) and job.node == node and job.lease == lease then return 'OK' end
if not holds(job, node, lease) then
  count_event('fenced')
  return 'FENCED'
end
local log = log_key(id)
local length = redis.call('LLEN', log)
if index > length then return 'NEED ' .. length end
local now = clock()

redis.call('DEL', P .. ':result:' .. id)
if job.first == '' and count > 0 then redis.call('HSET', job_key(id), 'first', now) end
local from = FIRST + length - index
while from < FIRST + count do
  local to = math.min(from + PUSH, FIRST + count) - 1
  redis.call('RPUSH', log, unpack(ARGV, from, to))
  from = to + 1
end
for i = FIRST, FIRST + count - 1 do publish(job, ARGV[i]) end
if result ~= '' then redis.call('SET', P .. ':result:' .. id, result, 'PX', result_life(job, config, #result)) end
if kv_token_ms then correct_charge(job, kv_token_ms / weight_of(job) - (tonumber(job.charge) or 0)) end
note_preemptions(id, preemptions)
end_job(job, config, now, state, code, message, param, reported)
flush()
return 'OK'
