-- cancel: ends a queued job, flags a running one and tells its node.
-- ARGV: id tenant
-- Answer: the state it has now, or NOT_FOUND
local id, tenant = ARGV[1], ARGV[2]
local schema, job = read_schema(), read_job(ARGV[1])
if not schema or not job or job.tenant ~= tenant then return 'NOT_FOUND' end
if is_terminal(job.state) then return job.state end
redis.call('ZREM', P .. ':free', '')
redis.call('HSET', job_key(id), 'cancel', '1')
if job.state == 'running' then
  redis.call('PUBLISH', P .. ':ctl:' .. job.node, id)
  return 'running'
end
job.cancel = '1'
end_if_over(job, schema, clock())
flush()
return 'cancelled'
