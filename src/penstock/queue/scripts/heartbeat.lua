-- heartbeat: record a node's heartbeat and its pressure record. With check = '1', also compare the node's list of held
-- jobs with P:running:<node>. Redis assigned a job but the node does not list it: requeue it, without counting a loss,
-- if the node has seen the answer of its take. The node lists a job that is not assigned to it: report the job as fenced.
-- ARGV: node revision free pace record answered_call check, then the held ids
--   free: free KV tokens; negative for a node that drains, which no doorbell then rings. pace: what P:paces has of the node, '' while it takes no jobs. record: packed
--   pressure record. answered_call: number of the last take answered to the node.
-- Answer: {OK, {cancelled…}, {expired…}, {fenced…}, is_damaged, {{id, tenant, state, code} of an ended job, …}} | {SWEPT}
--   is_damaged: 1 if P:config has a number that is none: the node should join once more. cancelled, expired: held jobs that
--   the node must end. SWEPT: a sweep declared the node dead; it must join again.
local node, revision, free, pace, record = unpack(ARGV, 1, 5)
local answered, check, FIRST = tonumber(ARGV[6]), ARGV[7] == '1', 8
local config, now = read_config(), clock()
if not config or not redis.call('ZSCORE', P .. ':nodes', node) then return {'SWEPT'} end

local missing, orphans, cancelled, expired, fenced = {}, {}, {}, {}, {}
if check then
  local held = {}
  for at = FIRST, #ARGV do held[ARGV[at]] = true end
  local running = {}
  for _, id in ipairs(redis.call('SMEMBERS', P .. ':running:' .. node)) do
    local known = {state = 'running', node = node}
    local job = read_job(id, {'state', 'lease', 'cancel', 'deadline'})
    running[id] = true
    if not job then
      local lost = listed_job(id, nil, known)
      if lost then missing[#missing + 1] = lost else orphans[#orphans + 1] = id end
    elseif held[id] then
      if job.cancel == '1' then cancelled[#cancelled + 1] = id
      elseif is_expired(job, now) then expired[#expired + 1] = id end
    elseif (tonumber(string.match(job.lease, '^(%d+):')) or 0) <= answered then
      missing[#missing + 1] = listed_job(id, nil, known)
    end
  end
  for at = FIRST, #ARGV do
    if not running[ARGV[at]] then fenced[#fenced + 1] = ARGV[at] end
  end
end

-- Whether P:config has a number that is none. The node then joins once more, which writes the pool's own.
local function is_config_damaged()
  local found, values = redis.call('HGETALL', KEYS[1]), {}
  for at = 1, #found, 2 do values[found[at]] = found[at + 1] end
  if config.policy ~= values.policy then return true end
  for _, name in ipairs(CONFIG_FIELDS) do
    if name ~= 'policy' and not whole(values[name]) then return true end
  end
  for name, value in pairs(values) do
    local is_of_node = not is_listed('policy ahead_ms swept_ms asked_ms incarnation', name)
    if is_of_node and value ~= '' and not whole(value) then return true end
  end
  return false
end
local is_damaged = check and is_config_damaged()

table.sort(missing, is_older)

redis.call('ZREM', P .. ':free', '')
redis.call('ZADD', P .. ':nodes', now, node)
redis.call('ZADD', P .. ':revisions', now, revision)
if tonumber(free) >= 0 then redis.call('ZADD', P .. ':free', free, node) else redis.call('ZREM', P .. ':free', node) end
redis.call('HSET', P .. ':pressure', node, record)
if pace ~= '' then redis.call('HSET', P .. ':paces', node, pace) else redis.call('HDEL', P .. ':paces', node) end
for _, id in ipairs(orphans) do redis.call('SREM', P .. ':running:' .. node, id) end
for _, job in ipairs(missing) do
  if not end_if_over(job, config, now) then
    requeue(job, now, 'unlisted', job.cost, 0)
    count_event('given_back_unlisted')
  end
end
if #fenced > 0 then count_event('fenced', #fenced) end
flush()
return {'OK', cancelled, expired, fenced, is_damaged and 1 or 0, lists.ended}
