-- count: how many jobs of a tenant, or of a tag of it, are in which state, by level. It writes nothing.
-- ARGV: tenant, tag ('' for all of the tenant's jobs)
-- Answer: {now, the fields of P:tag_counts of the tag, {state, level, jobs}, …}
--   The rows are, of a tag, its running and scheduled jobs; of a tenant, all its jobs, where level '' stands for jobs of
--   which only the state is counted. -1 jobs: too many others are in that state to look at each.
local MAX_LOOKED, MAX_SCHEDULED, MAX_KEYS, CLASS_STEP, AT_ONCE = 1000, 1000, 150, 1e13, 500
local tenant, tag = ARGV[1], ARGV[2]
local rows = {}

local function add_row(state, level, num)
  if num ~= 0 then rows[#rows + 1] = {state, tostring(level), num} end
end

-- Calls `each` with the ids of a set that are also in the set `other`, if there is one.
local function walk(key, other, each)
  local ids = redis.call('ZRANGE', key, 0, -1)
  for from = 1, #ids, AT_ONCE do
    local till = math.min(#ids, from + AT_ONCE - 1)
    local scores = other and redis.call('ZMSCORE', other, unpack(ids, from, till))
    for at = from, till do
      if not scores or scores[at - from + 1] then each(ids[at]) end
    end
  end
end

-- Adds the jobs of a set, by their levels, that are also in the set `other`, if there is one.
local function add_each(state, key, other)
  local of_level = {}
  walk(key, other, function(id)
    local level = redis.call('HGET', job_key(id), 'level') or '1'
    of_level[level] = (of_level[level] or 0) + 1
  end)
  for level, num in pairs(of_level) do add_row(state, level, num) end
end

local function count_of_tag()
  local tagged = P .. ':tagged:' .. tenant .. ':' .. tag
  local num_tagged = redis.call('ZCARD', tagged)
  if num_tagged == 0 then return end
  local running, scheduled = lists.key('running', tenant), lists.key('scheduled', tenant)
  local num_running, num_scheduled = redis.call('ZCARD', running), redis.call('ZCARD', scheduled)
  if num_running <= MAX_LOOKED then
    add_each('running', running, tagged)
  elseif num_tagged <= MAX_LOOKED then
    add_each('running', tagged, running)
  else
    add_row('running', '', -1)
  end
  if num_tagged <= math.min(num_scheduled, MAX_LOOKED) then
    add_each('scheduled', tagged, scheduled)
  elseif num_scheduled <= MAX_SCHEDULED then
    for level = 0, LEVELS - 1 do
      local num = 0
      walk(P .. ':delayed:' .. level .. ':' .. tenant, tagged, function() num = num + 1 end)
      add_row('scheduled', level, num)
    end
  else
    add_row('scheduled', '', -1)
  end
end

-- Jobs that wait in a lane of P:awaiting, by level: their scores begin with it.
local function num_awaiting(lane, level)
  local behind = string.format('(%.0f', (level + 1) * CLASS_STEP)
  return redis.call('ZCOUNT', P .. ':awaiting:' .. lane, level * CLASS_STEP, behind)
end

local function count_of_tenant()
  local num_queued = redis.call('ZCARD', lists.key('queued', tenant))
  local keyed = redis.call('SRANDMEMBER', P .. ':keys:' .. tenant, MAX_KEYS)
  for level = 0, LEVELS - 1 do
    local like = {level = level, tenant = tenant}
    local num = redis.call('XLEN', queue_key(like)) + redis.call('ZCARD', requeued_key(like)) + num_awaiting(tenant, level)
    for _, key in ipairs(keyed) do num = num + num_awaiting(tenant .. ':' .. key, level) end
    add_row('queued', level, num)
    num_queued = num_queued - num
    add_row('scheduled', level, redis.call('ZCARD', P .. ':delayed:' .. level .. ':' .. tenant))
  end
  add_row('queued', '', math.max(0, num_queued))
  local running = lists.key('running', tenant)
  local num_running = redis.call('ZCARD', running)
  if num_running <= MAX_LOOKED then add_each('running', running) else add_row('running', '', num_running) end
  for state in string.gmatch('succeeded failed cancelled expired dead', '%a+') do
    add_row(state, '', redis.call('ZCARD', lists.key(state, tenant)))
  end
end

if tag ~= '' then count_of_tag() else count_of_tenant() end
local fields = tag ~= '' and redis.call('HGETALL', P .. ':tag_counts:' .. tenant .. ':' .. tag) or {}
return {clock(), fields, unpack(rows)}
