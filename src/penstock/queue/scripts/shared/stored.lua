-- Stored bytes.
-- P:stored sums, per tenant, the bytes of open and of ended jobs. An expiring key runs no script. So P:expiry lists each
-- stored key of an ended job as `<bytes> <tenant> <key>` by its expiry time, to be subtracted then.

-- Bytes that Redis compares with maxmemory, and maxmemory (0: none). Redis does not count its buffers for the append-only
-- file and for replicas, which grow while a disk or a replica is slow.
local function used_memory()
  local info = redis.call('INFO', 'memory')
  local function bytes(name) return tonumber(string.match(info, name .. ':(%d+)')) end
  return bytes('used_memory') - bytes('mem_not_counted_for_evict'), bytes('maxmemory')
end

-- The sum of a hash of numbers.
local function total(name)
  local sum = 0
  for _, value in ipairs(redis.call('HVALS', P .. name)) do sum = sum + finite(value) end
  return sum
end

-- Bytes that a tenant's jobs occupy and may still write, and those that they may occupy of Redis's limit.
local function bytes_of(tenant)
  return finite(redis.call('HGET', P .. ':stored', tenant)) + finite(redis.call('HGET', P .. ':reserved', tenant))
end

-- Bytes that a tenant may occupy beside others, and those that it may occupy alone. own_percent: that of its key, or 0 for
-- the pool's setting. limit: Redis's. percent: the part of it that all tenants may fill together. used: what they fill.
-- A tenant alone may fill its own percent. Beside others, it may fill a fixed multiple of what remains free, and a smaller
-- one where little is free. So several tenants that take all they get leave memory for another one. Source: Choudhury and
-- Hahne, "Dynamic queue length thresholds for shared-memory packet switches" (1998). There the multiple is fixed. It would
-- leave the sixth of such tenants 1/7776 of the memory where one may fill 50 of 60 percent.
local function memory_share_of(own_percent, limit, percent, used)
  local DEFAULT_PERCENT = 50
  local alone = own_percent > 0 and own_percent or
    whole(redis.call('HGET', KEYS[1], 'tenant_memory_percent')) or DEFAULT_PERCENT
  local most = limit * alone / 100
  if alone >= percent then return most, most end
  local free = math.min(1, math.max(0, percent - 100 * used / limit) / (percent - alone))
  return most * free * math.min(1, 2 * free), most
end

-- Reserves what a job that is being taken may write beyond what its log has, as its field `reserved`.
local function reserve_output(job)
  local _, bytes = logged_of(job.logged)
  job.reserved = math.max(job.output - bytes, bytes > 0 and MIN_RESERVED_BYTES or 0)
  count_bytes(P .. ':reserved', job.tenant, job.reserved)
end

local function expiry_member(bytes, tenant, key) return string.format('%d %s %s', bytes, tenant, key) end

local function count_stored(tenant, key, bytes, till)
  if bytes == 0 then return end
  add_entry(P .. ':expiry', till, expiry_member(bytes, tenant, key))
  count_bytes(P .. ':stored', tenant, bytes)
end

local function subtract_stored(member)
  local bytes, tenant = string.match(member, '^(%d+) (%S+) ')
  if redis.call('ZREM', P .. ':expiry', member) == 0 then return end
  if not whole(bytes) then return count_event('unknown_sums') end
  count_bytes(P .. ':stored', tenant, -tonumber(bytes))
end

-- The same for a listed member, once for all that a script collects.
local function forget_stored(member, tenant, bytes)
  unlist_member(P .. ':expiry', member)
  count_bytes(P .. ':stored', tenant, -bytes)
end

-- Subtracts up to `max_keys` keys that have expired since the last call. A job leaves its tenant's list with its record.
local function subtract_expired(max_keys)
  local members = redis.call('ZRANGEBYSCORE', P .. ':expiry', '-inf', pool_time.of_redis(), 'LIMIT', 0, max_keys)
  for _, member in ipairs(members) do
    subtract_stored(member)
    local tenant, id, state, tags = string.match(member, '^%d+ (%S+) job:(%S+) ?(%S*)(.*)$')
    if id then
      if state ~= '' then redis.call('ZREM', lists.key(state, tenant), id) end
      if tags ~= '' then rare.untag(tenant, tags, id) end
    end
  end
end

-- Parses a job's field `stored` into bytes of log, large result, dead letter's request, rest and response; nil if it has
-- none. A job without a response has no bytes of one.
local function stored_of(text)
  local log, result, request, rest, response = string.match(text or '', '^(%d+) (%d+) (%d+) (%d+) ?(%d*)$')
  if not log or #text > 70 then return nil end
  return {log = tonumber(log), result = tonumber(result), request = tonumber(request), job = tonumber(rest),
    response = tonumber(response) or 0}
end

-- Deletes a dead letter and its request. Returns 1 if it was one, else 0: other jobs keep their requests.
local function delete_dead_letter(id)
  if redis.call('ZREM', P .. ':dead_letters', id) == 0 then return 0 end
  local tenant, stored = unpack(redis.call('HMGET', job_key(id), 'tenant', 'stored'))
  stored = stored_of(stored)
  redis.call('DEL', P .. ':request:' .. id)
  if stored then subtract_stored(expiry_member(stored.request, tenant or '-', 'request:' .. id)) end
  return 1
end

-- Lifetime of the record of a stored response, in ms after its job's end; nil for a job without one.
local function response_life(job)
  if job.life == nil then job.life = whole(job.keep or redis.call('HGET', job_key(job.id), 'keep')) or false end
  return job.life or nil
end

-- Lifetime of a result, in ms. A large result whose last chunk was pushed to a waiting reader expires with the log. The
-- result of a stored response lives as long as that.
local function result_life(job, config, bytes)
  local keep = response_life(job)
  if keep then return keep end
  local was_read = job.needs_reader ~= '0' and (job.inboxes ~= '' or channels.is(job.channel))
  return bytes > LARGE_RESULT_BYTES and was_read and config.log_ttl_ms or config.result_ttl_ms
end
