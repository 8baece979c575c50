-- ack: a reader has stored the results of ended jobs, so Redis need not keep them. A job's record stays until its time is
-- over, with its state, its usage and its idempotency key. A job of a stored response keeps its result.
-- ARGV: tenant id …
-- Answer: number of jobs whose result this call has freed
local MAX_JOBS = 128
local tenant, config, now = ARGV[1], read_config(), clock()
if #ARGV > MAX_JOBS + 1 then return redis.error_reply('TOO_MANY_JOBS') end

-- The bytes of a job's record without its small result.
local function bytes_without_result(id, stored)
  return stored.job - (stored.result == 0 and redis.call('STRLEN', P .. ':result:' .. id) or 0)
end

local function free(id, state, stored)
  local listed = lists.record(id, state)
  local member = expiry_member(stored.job, tenant, listed)
  local till = redis.call('ZSCORE', P .. ':expiry', member)
  local left = bytes_without_result(id, stored)
  redis.call('DEL', P .. ':result:' .. id)
  redis.call('DEL', P .. ':log:' .. id)
  subtract_stored(expiry_member(stored.log, tenant, 'log:' .. id))
  subtract_stored(expiry_member(stored.result, tenant, 'result:' .. id))
  if till and left ~= stored.job then
    subtract_stored(member)
    count_stored(tenant, listed, left, till)
  end
  redis.call('HSET', job_key(id), 'result_until', now, 'stored', string.format('0 0 %d %d', stored.request, left))
end

redis.call('ZREM', P .. ':free', '')
local num_freed = 0
for at = 2, #ARGV do
  local job = config and read_job(ARGV[at])
  local stored = job and is_terminal(job.state) and job.tenant == tenant and not response_life(job) and
    stored_of(redis.call('HGET', job_key(job.id), 'stored'))
  if stored and redis.call('EXISTS', P .. ':result:' .. job.id, P .. ':log:' .. job.id) > 0 then
    free(job.id, job.state, stored)
    num_freed = num_freed + 1
  end
end
return num_freed
