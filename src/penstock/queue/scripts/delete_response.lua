-- delete_response: delete the record of a stored response, with its job's log and result. An open job is canceled; what
-- is stored of it at its end expires like that of any other job.
-- ARGV: id tenant repeats
--   repeats: 1 if the caller waits until the deletion is on disk or replicated. Then a response that was deleted before
--   is answered as if this call had deleted it. The unchanged field is written for WAITAOF and WAIT, which would
--   otherwise wait for nothing.
-- Answer: {OK, {{id, tenant, state, code} of the job if this call ended it}} | {NOT_FOUND, {}}
local id, tenant, repeats = ARGV[1], ARGV[2], ARGV[3] == '1'
local config, job, now = read_config(), mended(read_job(ARGV[1])), clock()
local is_stored = redis.call('EXISTS', P .. ':response:' .. id) == 1
if not config or not job or job.tenant ~= tenant then return {'NOT_FOUND', {}} end
if not is_stored then
  if not repeats or redis.call('HGET', job_key(id), 'deleted') ~= '1' then return {'NOT_FOUND', {}} end
  redis.call('DEL', P .. ':response:' .. id)
  redis.call('HSET', job_key(id), 'deleted', '1')
  return {'OK', {}}
end
local stored = stored_of(redis.call('HGET', job_key(id), 'stored'))
redis.call('DEL', P .. ':response:' .. id)
redis.call('HSET', job_key(id), 'deleted', '1')
redis.call('HDEL', job_key(id), 'words', 'keep', 'response_bytes')
if is_terminal(job.state) then
  redis.call('DEL', P .. ':log:' .. id)
  redis.call('DEL', P .. ':result:' .. id)
  if job.state ~= 'dead' then redis.call('DEL', P .. ':request:' .. id) end
  redis.call('HSET', job_key(id), 'result_until', 0)
  for name, bytes in pairs(stored or {}) do
    local is_gone = name == 'log' or name == 'result' or name == 'response' or (name == 'request' and job.state ~= 'dead')
    if is_gone then
      subtract_stored(expiry_member(bytes, tenant, name .. ':' .. id))
    end
  end
  return {'OK', {}}
end
redis.call('HSET', job_key(id), 'cancel', '1')
if job.state == 'running' then
  redis.call('PUBLISH', P .. ':doorbell:' .. job.node, id)
else
  job.cancel = '1'
  end_if_over(job, config, now)
  flush()
end
return {'OK', lists.ended}
