-- forget: delete the keys of a pool that has neither live nodes nor open jobs. Results, and the requests and records of
-- dead letters, stay until they expire.
-- ARGV: names of keys, without the pool's prefix, that only a scan finds. With such names, nothing else is deleted.
-- Answer: {OK} | {NODES, number of live nodes} | {JOBS, number of open jobs}
local config, now = read_config(), clock()
local alive = config and redis.call('ZCOUNT', P .. ':nodes', now - config.lease_ms, '+inf') or 0
if alive > 0 then return {'NODES', alive} end
local open = redis.call('SCARD', P .. ':open')
if open > 0 then return {'JOBS', open} end
for _, name in ipairs(ARGV) do redis.call('DEL', P .. ':' .. name) end
if ARGV[1] then return {'OK'} end
redis.call('DEL', KEYS[1])
for _, tenant in ipairs(redis.call('HKEYS', P .. ':stored')) do
  for state in string.gmatch('scheduled queued running succeeded failed cancelled expired dead', '%a+') do
    redis.call('DEL', lists.key(state, tenant))
  end
end
for _, tenant in ipairs(redis.call('ZRANGE', P .. ':ended', 0, -1)) do redis.call('DEL', P .. ':ended:' .. tenant) end
for _, name in ipairs({'record', 'nodes', 'revisions', 'free', 'left', 'pressure', 'paces', 'adapters', 'reservations',
  'head_served', 'background_turns', 'delayed', 'deadlines', 'tasks', 'tenant_tasks', 'backlog', 'queued',
  'queued_background', 'stored', 'reserved', 'may_use', 'awaiting', 'lengths', 'expiry', 'readers', 'seats', 'sweep',
  'counts', 'events', 'node_events', 'audit', 'dead_letters', 'paused', 'bulks', 'ended', 'ended_before', 'untold', 'untold_sizes'}) do
  redis.call('DEL', P .. ':' .. name)
end
for level = 0, LEVELS - 1 do
  for _, name in ipairs({'waiting', 'virtual_time', 'virtual_clock', 'debt'}) do
    redis.call('DEL', P .. ':' .. name .. ':' .. level)
  end
end
return {'OK'}
