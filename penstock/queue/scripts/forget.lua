-- forget: delete the keys of a pool that has neither live nodes nor open jobs. Results, and the requests and records of
-- dead letters, stay until they expire.
-- Answer: {OK} | {NODES, number of live nodes} | {JOBS, number of open jobs}
local schema, now = read_schema(), clock()
local alive = schema and redis.call('ZCOUNT', P .. ':nodes', now - schema.lease_ms, '+inf') or 0
if alive > 0 then return {'NODES', alive} end
local open = redis.call('SCARD', P .. ':open')
if open > 0 then return {'JOBS', open} end
redis.call('DEL', KEYS[1])
for _, name in ipairs({'nodes', 'revs', 'free', 'pressure', 'adapters', 'hold', 'head', 'later', 'due', 'backlog', 'queued',
  'bytes', 'kept', 'expiry', 'refused', 'readers', 'seats', 'sweep', 'count', 'audit', 'dead'}) do
  redis.call('DEL', P .. ':' .. name)
end
for p = 0, CLASSES - 1 do
  for _, name in ipairs({'wait', 'turn', 'vtime', 'debt'}) do redis.call('DEL', P .. ':' .. name .. ':' .. p) end
end
return {'OK'}
