-- webhooks: the deliveries to webhook endpoints, of all pools. KEYS[1] belongs to no pool: it only gives the prefix W of
-- the keys, which is penstock:webhook:{all}. A delivery is one event for one endpoint, and keys name it `<endpoint>:<event>`.
-- ARGV: operation, msgpack of its arguments
--   put: id, tenant, record as JSON, most endpoints of a tenant (0: it is no new one)
--   remove: id, tenant
--   clear: id; drops some deliveries of an endpoint that was removed
--   add: max_pending, [[endpoint, event, tenant, type, object, created_ms]…]
--   take: number of deliveries, most at a time of an endpoint, most of a tenant, tenant → those that this process makes
--     already, lease_ms, holder
--   end_attempt: endpoint, event, holder, delivered | retry | dead, in_ms, what was answered
--   again: endpoint, [event…]; delivers those that are dead or delivered once more
-- Answer of each:
--   put, remove: OK | TOO_MANY | GONE. clear: OK | MORE
--   add: {NEW | KNOWN | GONE …}; GONE: there is no such endpoint
--   take: {[endpoint, event, type, object, created_ms, attempts, age_ms, the endpoint's record]…}
--   end_attempt: OK | FENCED; FENCED: another process has taken it since
--   again: how many there were
-- Fields of a delivery: tenant type object created since attempts state holder answer ended. since: from when on its
-- attempts count. state: pending, delivered or dead. attempts: those that a process has begun.
--
-- A leased delivery is due again when its lease ends, so a gateway that sleeps through its lease changes nothing, and its
-- receiver may get the event twice. A delivery is known for a day after it was delivered, and for 7 days after it was given
-- up; one that left the list of its endpoint, for 10 min. If Redis loses writes and a job ends again later than that, its
-- end is told again with the same id, which is a hash of type and object.
local MAX_ENDPOINTS, MAX_CLEARED, MAX_EVENTS = 64, 256, 256
local PUT_OFF_MS = 60000
local MAX_DEAD_OF_ENDPOINT, DEAD_MS, MAX_DELIVERED, DELIVERED_MS, SHORT_MS = 10000, 604800000, 1000, 86400000, 600000
local W = P
-- A key of another type holds nothing that can be used, and would hold up all tenants. It is deleted.
local redis = {pcall = redis.pcall, error_reply = redis.error_reply, plain = redis.call}
function redis.call(...)
  local answer = redis.pcall(...)
  if type(answer) ~= 'table' or not answer.err then return answer end
  if string.find(answer.err, 'WRONGTYPE', 1, true) then redis.plain('DEL', (select(2, ...))) end
  return redis.plain(...)
end
local operation, asked = ARGV[1], cmsgpack.unpack(ARGV[2])
local now = clock()
-- A free write, as the first one (see prelude.lua).
redis.call('ZREM', W .. ':next', '')

local function delivery_key(endpoint, event) return W .. ':delivery:' .. endpoint .. ':' .. event end
local function list_key(state, endpoint) return W .. ':' .. state .. ':' .. endpoint end

-- Records may be damaged by what else writes to Redis. A whole number is digits, at most as many as Lua holds exactly.
local function whole(text) return type(text) == 'string' and #text < 16 and string.match(text, '^%d+$') and tonumber(text) or nil end

-- Adds to a sum. One that is no number begins anew: what was added before is unknown.
local function add_to(key, field, by)
  local sum = field ~= '' and redis.pcall('HINCRBY', key, field, by)
  if type(sum) == 'table' then
    redis.call('HDEL', key, field)
    sum = by > 0 and redis.call('HINCRBY', key, field, by)
  end
  if sum and sum <= 0 then redis.call('HDEL', key, field) end
end

local function count(what, by) add_to(W .. ':counts', what, by) end

-- Notes when to look at an endpoint that was looked at now: when its next delivery is due, behind those that wait already.
-- A delivery that is being made is due again when its lease ends.
local function note_next(endpoint)
  local due = redis.call('ZRANGE', list_key('due', endpoint), 0, 0, 'WITHSCORES')[2]
  if due then
    redis.call('ZADD', W .. ':next', math.max(due, now), endpoint)
  else
    redis.call('ZREM', W .. ':next', endpoint)
  end
end

-- Notes that an endpoint has a new delivery. It keeps its place if it waits already.
local function note_new(endpoint) redis.call('ZADD', W .. ':next', 'LT', now, endpoint) end

local function set_due(endpoint, event, time)
  redis.call('ZADD', list_key('due', endpoint), time, event)
  redis.call('ZREM', list_key('leased', endpoint), event)
end

local function begin(endpoint, event, tenant)
  local key = delivery_key(endpoint, event)
  redis.call('HSET', key, 'state', 'pending', 'since', now, 'attempts', 0, 'holder', '', 'answer', '')
  redis.call('PERSIST', key)
  set_due(endpoint, event, now)
  add_to(W .. ':pending', tenant or '', 1)
end

-- Ends a pending delivery. Only the newest ones of a state stay listed.
local function conclude(endpoint, event, tenant, state, answer)
  local life, most = DELIVERED_MS, MAX_DELIVERED
  if state == 'dead' then life, most = DEAD_MS, MAX_DEAD_OF_ENDPOINT end
  redis.call('ZREM', list_key('due', endpoint), event)
  redis.call('ZREM', list_key('leased', endpoint), event)
  add_to(W .. ':pending', tenant or '', -1)
  count(state, 1)
  redis.call('HSET', delivery_key(endpoint, event), 'state', state, 'holder', '', 'answer', answer, 'ended', now)
  redis.call('PEXPIRE', delivery_key(endpoint, event), life)
  local list = list_key(state, endpoint)
  redis.call('ZADD', list, now, event)
  redis.call('PEXPIRE', list, life)
  redis.call('ZREMRANGEBYSCORE', list, '-inf', now - life)
  for _, old in ipairs(redis.call('ZRANGE', list, 0, -1 - most)) do
    redis.call('ZREM', list, old)
    -- For a while it is known, so that a repetition of its event is not a new one.
    redis.call('PEXPIRE', delivery_key(endpoint, old), SHORT_MS)
  end
end

local function tenant_of(endpoint, event) return redis.call('HGET', delivery_key(endpoint, event), 'tenant') or '' end

local function add(max_pending, rows)
  local answers = {}
  for at, row in ipairs(rows) do
    local endpoint, event, tenant, kind, object, created = unpack(row)
    if redis.call('EXISTS', delivery_key(endpoint, event)) == 1 then
      answers[at] = 'KNOWN'
    elseif redis.call('HEXISTS', W .. ':endpoints', endpoint) == 0 then
      answers[at] = 'GONE'
    else
      answers[at] = 'NEW'
      local is_full = (whole(redis.call('HGET', W .. ':pending', tenant)) or 0) >= max_pending
      redis.call('HSET', delivery_key(endpoint, event), 'tenant', tenant, 'type', kind, 'object', object, 'created',
        created)
      begin(endpoint, event, tenant)
      note_new(endpoint)
      if is_full then conclude(endpoint, event, tenant, 'dead', 'the tenant has too many pending deliveries') end
    end
  end
  return answers
end

-- Drops deliveries of an endpoint that was deleted, and its lists once they are empty.
local function clear(endpoint)
  for _, state in ipairs({'due', 'delivered', 'dead'}) do
    for _, event in ipairs(redis.call('ZRANGE', list_key(state, endpoint), 0, MAX_CLEARED - 1)) do
      if state == 'due' then add_to(W .. ':pending', tenant_of(endpoint, event), -1) end
      redis.call('DEL', delivery_key(endpoint, event))
      redis.call('ZREM', list_key(state, endpoint), event)
    end
    if redis.call('EXISTS', list_key(state, endpoint)) == 1 then return 'MORE' end
  end
  redis.call('DEL', list_key('leased', endpoint))
  redis.call('ZREM', W .. ':next', endpoint)
  return 'OK'
end

local function give_up(endpoint, why)
  for _, event in ipairs(redis.call('ZRANGE', list_key('due', endpoint), 0, MAX_CLEARED - 1)) do
    conclude(endpoint, event, tenant_of(endpoint, event), 'dead', why)
  end
  note_next(endpoint)
end

local FIELDS = {'type', 'object', 'created', 'attempts', 'since'}

-- Leases up to `most` due deliveries of an endpoint, and adds them to `taken`.
local function lease(endpoint, record, most, most_of_endpoint, lease_ms, holder, taken)
  local due, leased = list_key('due', endpoint), list_key('leased', endpoint)
  redis.call('ZREMRANGEBYSCORE', leased, '-inf', now)
  most = math.max(0, math.min(most, most_of_endpoint - redis.call('ZCARD', leased)))
  for _, event in ipairs(redis.call('ZRANGEBYSCORE', due, '-inf', now, 'LIMIT', 0, most)) do
    local key = delivery_key(endpoint, event)
    local fields = redis.pcall('HMGET', key, unpack(FIELDS))
    if fields.err or not fields[1] then
      redis.call('ZREM', due, event)
    else
      local attempts, since = (whole(fields[4]) or 0) + 1, whole(fields[5]) or now
      redis.call('HSET', key, 'holder', holder, 'attempts', attempts)
      redis.call('ZADD', due, now + lease_ms, event)
      redis.call('ZADD', leased, now + lease_ms, event)
      taken[#taken + 1] = {endpoint, event, fields[1], fields[2] or '', whole(fields[3]) or now, attempts, now - since, record}
    end
  end
  note_next(endpoint)
  local first_end = redis.call('ZCARD', leased) >= most_of_endpoint and
    redis.call('ZRANGE', leased, 0, 0, 'WITHSCORES')[2]
  if first_end then redis.call('ZADD', W .. ':next', first_end, endpoint) end
end

local function take(most, most_of_endpoint, most_of_tenant, num_of_tenant, lease_ms, holder)
  local taken = {}
  local endpoints = redis.call('ZRANGEBYSCORE', W .. ':next', '-inf', now, 'LIMIT', 0, MAX_ENDPOINTS)
  local function serve(endpoint)
    local record = redis.call('HGET', W .. ':endpoints', endpoint)
    if not record then
      clear(endpoint)
    else
      local is_json, decoded = pcall(cjson.decode, record)
      local is_whole = is_json and type(decoded) == 'table' and type(decoded.tenant) == 'string'
      local before, of_tenant = #taken, is_whole and num_of_tenant[decoded.tenant] or 0
      if not is_whole then
        give_up(endpoint, 'the record of the endpoint is damaged')
      elseif decoded.status == 'disabled' then
        give_up(endpoint, 'the endpoint is disabled')
      elseif before < most then
        local left = math.min(most - before, most_of_tenant - of_tenant)
        lease(endpoint, record, left, most_of_endpoint, lease_ms, holder, taken)
        num_of_tenant[decoded.tenant] = of_tenant + #taken - before
      end
    end
  end
  for _, endpoint in ipairs(endpoints) do
    -- A list of another type holds up its own endpoint alone.
    if not pcall(serve, endpoint) then redis.call('ZADD', W .. ':next', now + PUT_OFF_MS, endpoint) end
  end
  return taken
end

local function end_attempt(endpoint, event, holder, outcome, in_ms, answer)
  local found = redis.pcall('HMGET', delivery_key(endpoint, event), 'holder', 'tenant')
  if found.err then return 'FENCED' end
  local known, tenant = unpack(found)
  if known ~= holder then return 'FENCED' end
  if outcome == 'retry' then
    redis.call('HSET', delivery_key(endpoint, event), 'holder', '', 'answer', answer)
    set_due(endpoint, event, now + in_ms)
    count('retried', 1)
  else
    conclude(endpoint, event, tenant, outcome, answer)
  end
  note_next(endpoint)
  return 'OK'
end

local function again(endpoint, events)
  local number = 0
  for _, event in ipairs(events) do
    local found = redis.pcall('HMGET', delivery_key(endpoint, event), 'state', 'tenant')
    local state, tenant = unpack(found.err and {} or found)
    if state == 'dead' or state == 'delivered' then
      redis.call('ZREM', list_key(state, endpoint), event)
      begin(endpoint, event, tenant)
      note_new(endpoint)
      number = number + 1
    end
  end
  return number
end

-- Stores a new or changed endpoint.
local function put(id, tenant, record, most)
  local of_tenant = W .. ':tenant:' .. tenant
  if not redis.call('ZSCORE', of_tenant, id) then
    if most == 0 then return 'GONE' end
    if redis.call('ZCARD', of_tenant) >= most then return 'TOO_MANY' end
    redis.call('ZADD', of_tenant, now, id)
  end
  redis.call('HSET', W .. ':endpoints', id, record)
  return 'OK'
end

-- Its deliveries are dropped by calls of clear or, if their process dies, of take.
local function remove(id, tenant)
  if redis.call('ZREM', W .. ':tenant:' .. tenant, id) == 0 then return 'GONE' end
  redis.call('HDEL', W .. ':endpoints', id)
  redis.call('ZADD', W .. ':next', now, id)
  return 'OK'
end

for _, argument in ipairs(asked) do
  if type(argument) == 'table' and #argument > MAX_EVENTS then return redis.error_reply('TOO_MANY_EVENTS') end
end
local operations = {put = put, remove = remove, clear = clear, add = add, take = take, end_attempt = end_attempt, again = again}
return operations[operation](unpack(asked))
