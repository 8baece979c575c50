-- cancel: end a queued job; for a running job, set its cancel flag and notify its node.
-- ARGV: id tenant
-- Answer: {the job's state after the call (`cancelling` ends within a step), or NOT_FOUND,
--   {{id, tenant, state, code} of the job if this call ended it}}
local id, tenant = ARGV[1], ARGV[2]
local config, job = read_config(), mended(read_job(ARGV[1]))
if not config or not job or job.tenant ~= tenant then return {'NOT_FOUND', {}} end
if is_terminal(job.state) then return {job.state, {}} end
redis.call('ZREM', P .. ':free', '')
redis.call('HSET', job_key(id), 'cancel', '1')
if job.state == 'running' then
  redis.call('PUBLISH', P .. ':doorbell:' .. job.node, id)
  return {'cancelling', {}}
end
job.cancel = '1'
end_if_over(job, config, clock())
flush()
return {'cancelled', lists.ended}
