-- schedules: schedules of jobs and batches, of all tenants. KEYS[1] belongs to no pool: it only gives the prefix S of the
-- keys, which is penstock:{.schedules}. Gateways decide which runs are due and start them; this script only keeps what
-- they decided, once.
-- ARGV: operation, msgpack of its arguments
--   put: id, tenant, record as JSON, fields, when to look (ms), most schedules of a tenant
--   remove: id, tenant
--   take: now_ms, lease_ms, most; no other call gets these schedules before the lease has ended
--   change: id, version, fields, when to look (-1: never), runs as JSON, number by name
-- Answer of each: put: OK | TOO_MANY | KNOWN. remove: OK | GONE. take: {{id, name, value, …}…}.
--   change: OK | STALE | GONE; STALE: the schedule has changed since it was read.
-- The caller states the time, because only it knows the calendar. A wrong clock starts runs too early or too late, but none
-- twice: `change` moves `next` and `pending` only from the version that its caller saw, and a run's job has an idempotency
-- key of schedule and due time.
-- Fields of S:schedule:<id>: tenant record version next pending paused last last_due problem started missed skipped failed
local MAX_RUNS, MAX_TAKEN = 100, 256
local S = P
-- A key of another type holds nothing that can be used, and would hold up all tenants. It is deleted.
local redis = {pcall = redis.pcall, plain = redis.call}
function redis.call(...)
  local answer = redis.pcall(...)
  if type(answer) ~= 'table' or not answer.err then return answer end
  if string.find(answer.err, 'WRONGTYPE', 1, true) then redis.plain('DEL', (select(2, ...))) end
  return redis.plain(...)
end
local operation, asked = ARGV[1], cmsgpack.unpack(ARGV[2])
-- A free write, as the first one (see prelude.lua).
redis.call('ZREM', S .. ':due', '')

local function schedule_key(id) return S .. ':schedule:' .. id end

local function set_look(id, look_ms)
  if look_ms < 0 then redis.call('ZREM', S .. ':due', id) else redis.call('ZADD', S .. ':due', look_ms, id) end
end

local function set_fields(id, fields)
  for name, value in pairs(fields) do redis.call('HSET', schedule_key(id), name, value) end
end

-- Adds to a sum. One that is no number begins anew.
local function add_to(key, name, by)
  if type(redis.pcall('HINCRBY', key, name, by)) == 'table' then
    redis.call('HDEL', key, name)
    redis.call('HINCRBY', key, name, by)
  end
end

local function next_number()
  add_to(S .. ':counts', 'number', 1)
  return redis.call('HGET', S .. ':counts', 'number')
end

local does = {}

function does.put(id, tenant, record, fields, look_ms, most)
  if redis.call('EXISTS', schedule_key(id)) == 1 then return 'KNOWN' end
  local of_tenant = S .. ':tenant:' .. tenant
  if redis.call('ZCARD', of_tenant) >= most then return 'TOO_MANY' end
  redis.call('HSET', schedule_key(id), 'tenant', tenant, 'record', record, 'version', 1)
  set_fields(id, fields)
  redis.call('ZADD', of_tenant, next_number(), id)
  set_look(id, look_ms)
  return 'OK'
end

function does.remove(id, tenant)
  if redis.call('ZREM', S .. ':tenant:' .. tenant, id) == 0 then return 'GONE' end
  redis.call('ZREM', S .. ':due', id)
  redis.call('DEL', schedule_key(id), S .. ':runs:' .. id)
  return 'OK'
end

function does.take(now_ms, lease_ms, most)
  local found = {}
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', S .. ':due', '-inf', now_ms, 'LIMIT', 0, math.min(most, MAX_TAKEN))) do
    local fields = redis.call('HGETALL', schedule_key(id))
    if #fields == 0 then
      redis.call('ZREM', S .. ':due', id)
    else
      redis.call('ZADD', S .. ':due', now_ms + lease_ms, id)
      table.insert(fields, 1, id)
      found[#found + 1] = fields
    end
  end
  return found
end

function does.change(id, version, fields, look_ms, runs, counts)
  local key = schedule_key(id)
  local known = redis.call('HGET', key, 'version')
  if not known then return 'GONE' end
  if known ~= tostring(version) then return 'STALE' end
  fields.version = version + 1
  set_fields(id, fields)
  set_look(id, look_ms)
  for _, run in ipairs(runs) do redis.call('ZADD', S .. ':runs:' .. id, next_number(), run) end
  redis.call('ZREMRANGEBYRANK', S .. ':runs:' .. id, 0, -MAX_RUNS - 1)
  for name, by in pairs(counts) do
    add_to(key, name, by)
    add_to(S .. ':counts', name, by)
  end
  return 'OK'
end

return does[operation](unpack(asked))
