-- ack: readers have stored the results of ended jobs, so Redis need not keep them. A job's record stays until its time is
-- over, with its state, its usage and its idempotency key. A job of a stored response keeps its result.
-- ARGV: tenant id, for each job
-- Answer, one per job: 1 if this call has freed its result, else 0
local MAX_JOBS = 128
local config = read_config({'version'})
if #ARGV > 2 * MAX_JOBS then return redis.error_reply('TOO_MANY_JOBS') end

-- Frees a job's result. Returns whether it had one.
local function free(id, tenant, job, stored)
  -- The bytes of the job's record include its small result.
  local result_bytes = stored.result == 0 and redis.call('STRLEN', P .. ':result:' .. id) or 0
  local num_deleted = sure('DEL', P .. ':result:' .. id) + sure('DEL', P .. ':log:' .. id)
  if num_deleted == 0 then return false end
  local log, result = expiry_member(stored.log, tenant, 'log:' .. id), expiry_member(stored.result, tenant, 'result:' .. id)
  local listed = lists.record_with(id, job.state, lists.tags_of(id, job.extra))
  local record = expiry_member(stored.job, tenant, listed)
  local tills = redis.call('ZMSCORE', P .. ':expiry', log, result, record)
  if tills[1] then forget_stored(log, tenant, stored.log) end
  if tills[2] then forget_stored(result, tenant, stored.result) end
  if tills[3] and result_bytes > 0 then
    forget_stored(record, tenant, stored.job)
    count_stored(tenant, listed, stored.job - result_bytes, tills[3])
  end
  sure('HSET', job_key(id), 'result_until', 0, 'stored',
    string.format('0 0 %d %d', stored.request, stored.job - result_bytes))
  if job.words ~= '' then sure('HDEL', job_key(id), 'words') end
  return true
end

redis.call('ZREM', P .. ':free', '')
collect()
local answers = {}
for at = 1, #ARGV, 2 do
  local tenant, id = ARGV[at], ARGV[at + 1]
  local job = config and read_job(id, {'state', 'tenant', 'keep', 'stored', 'extra', 'words'})
  local stored = job and is_terminal(job.state) and job.tenant == tenant and not response_life(job) and stored_of(job.stored)
  answers[#answers + 1] = stored and free(id, tenant, job, stored) and 1 or 0
end
write_collected()
return answers
