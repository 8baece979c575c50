-- erase: delete ended jobs of a tenant with all that is stored of them. Once it has no jobs left, delete its completions
-- and what the pool has counted of it, too.
-- ARGV: tenant, most jobs to delete (0: only count)
-- Answer: {open jobs, ended jobs, bytes that they occupy}, before anything was deleted
local MAX_JOBS = 64
local tenant, num_jobs = ARGV[1], math.min(tonumber(ARGV[2]), MAX_JOBS)
read_config({'version'})
local STATES = {}
for state in string.gmatch('succeeded failed cancelled expired dead done', '%a+') do STATES[#STATES + 1] = state end

local num_open, num_ended = redis.call('SCARD', P .. ':tenant:' .. tenant .. ':open'), 0
for _, state in ipairs(STATES) do num_ended = num_ended + redis.call('ZCARD', lists.key(state, tenant)) end
local answer = {num_open, num_ended, bytes_of(tenant)}
if num_jobs == 0 then return answer end
redis.call('ZREM', P .. ':free', '')

local function erase_job(id, state)
  local idem, stored = unpack(redis.call('HMGET', job_key(id), 'idem', 'stored'))
  local sizes = stored_of(stored)
  if sizes then
    subtract_stored(expiry_member(sizes.job, tenant, lists.record(id, state)))
    for _, name in ipairs({'log', 'result', 'request', 'response'}) do
      subtract_stored(expiry_member(sizes[name], tenant, name .. ':' .. id))
    end
  end
  rare.untag(tenant, table.concat(lists.read_tags(id), ' '), id)
  if idem and idem ~= '' and redis.call('GET', P .. ':idem:' .. idem) == id then redis.call('DEL', P .. ':idem:' .. idem) end
  redis.call('ZREM', P .. ':dead_letters', id)
  redis.call('ZREM', lists.key(state, tenant), id)
  for _, name in ipairs({'job', 'request', 'log', 'result', 'response', 'metadata'}) do
    redis.call('DEL', P .. ':' .. name .. ':' .. id)
  end
end

for _, state in ipairs(STATES) do
  if num_jobs > 0 then
    for _, id in ipairs(redis.call('ZRANGE', lists.key(state, tenant), 0, num_jobs - 1)) do
      erase_job(id, state)
      num_jobs = num_jobs - 1
    end
  end
end

if num_open == 0 and num_jobs > 0 then
  for _, name in ipairs({'ended', 'refused', 'rate', 'used'}) do redis.call('DEL', P .. ':' .. name .. ':' .. tenant) end
  redis.call('ZREM', P .. ':ended', tenant)
  redis.call('HDEL', P .. ':ended_before', tenant)
  redis.call('HDEL', P .. ':lengths', tenant)
  redis.call('HDEL', P .. ':paused', 'tenant:' .. tenant)
  for level = 0, LEVELS - 1 do redis.call('ZREM', P .. ':debt:' .. level, tenant) end
end
return answer
