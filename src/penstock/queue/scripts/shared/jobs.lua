-- Where a job may run, and what is paused.

-- Whether a job occupies no sequence in an engine, and so needs no KV cache.
local function is_task(job) return job.n == '0' end

local function is_older(one, other)
  local mine, theirs = tonumber(one.submitted), tonumber(other.submitted)
  if mine ~= theirs then return mine < theirs end
  return one.id < other.id
end

-- What is paused (pause.lua): the pool, levels and tenants. `has`: whether a pause holds a job back.
local function read_pauses()
  local paused = {levels = {}, tenants = {}, num_tenants = 0, is_any = false}
  for _, name in ipairs(redis.call('HKEYS', P .. ':paused')) do
    local kind, what = string.match(name, '^(%a+):(.*)$')
    paused.of_pool = paused.of_pool or name == 'pool'
    paused.is_any = paused.is_any or kind == 'level' or kind == 'tenant'
    if kind == 'level' then
      paused.levels[what] = true
    elseif kind == 'tenant' then
      paused.tenants[what], paused.num_tenants = true, paused.num_tenants + 1
    end
  end
  function paused.has(job)
    return paused.of_pool or paused.levels[tostring(job.level)] or paused.tenants[job.tenant] or false
  end
  return paused
end

-- A node's pressure record; an empty table if the node has not reported one.
local function record_of(node)
  local ok, record = pcall(cmsgpack.unpack, redis.call('HGET', P .. ':pressure', node) or '')
  return ok and type(record) == 'table' and record or {}
end

-- Whether a node outside of `lacks` could run the job: it does not drain, and once the job has tokens, it has the job's
-- revision.
local function may_be_elsewhere(job, lacks)
  local has_tokens = redis.call('LLEN', log_key(job.id)) > 0
  for _, node in ipairs(redis.call('ZRANGE', P .. ':nodes', 0, -1)) do
    local record = is_listed(lacks, node) and {draining = true} or record_of(node)
    local is_foreign = has_tokens and record.revision and record.revision ~= job.revision
    if record.draining ~= true and not is_foreign then return true end
  end
  return false
end
