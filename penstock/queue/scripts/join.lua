-- join: a node enters the pool. The first node writes the pool's schema. While another node lives, a node with a
-- different schema is refused. A dead node that was not swept yet does not count: no process may be left to sweep it.
-- ARGV: node revision, then the schema as field value …
-- Answer: {OK} | {MISMATCH, field, the pool's value}
local node, revision, now = ARGV[1], ARGV[2], clock()
local schema = read_schema()
local alive = schema and redis.call('ZCOUNT', P .. ':nodes', now - schema.lease_ms, '+inf') or 0
for at = 3, #ARGV, 2 do
  local known = redis.call('HGET', KEYS[1], ARGV[at])
  if known and known ~= ARGV[at + 1] and alive > 0 then
    return {'MISMATCH', ARGV[at], known}
  end
end
redis.call('ZREM', P .. ':free', '')
redis.call('HSET', KEYS[1], unpack(ARGV, 3))
redis.call('ZADD', P .. ':nodes', now, node)
redis.call('ZADD', P .. ':revs', now, revision)
return {'OK'}
