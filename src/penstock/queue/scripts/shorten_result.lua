-- shorten_result: after its owner fetched a large result, shorten the result's lifetime to log_ttl_ms. Others stay unchanged,
-- and so does the result of a stored response, because it may be retrieved again.
-- ARGV: id tenant
-- Answer: OK | NOT_FOUND
local id, tenant = ARGV[1], ARGV[2]
local config, job, now = read_config(), read_job(ARGV[1]), pool_time.of_redis()
if not config or not job or job.tenant ~= tenant then return 'NOT_FOUND' end
local stored = stored_of(redis.call('HGET', job_key(id), 'stored'))
redis.call('ZREM', P .. ':free', '')
if not stored or stored.result == 0 or response_life(job) then return 'OK' end
local member, till = expiry_member(stored.result, tenant, 'result:' .. id), now + config.log_ttl_ms
if tonumber(redis.call('ZSCORE', P .. ':expiry', member) or '0') > till then
  redis.call('ZADD', P .. ':expiry', till, member)
  redis.call('PEXPIRE', P .. ':result:' .. id, config.log_ttl_ms)
  redis.call('HSET', job_key(id), 'result_until', till)
end
return 'OK'
