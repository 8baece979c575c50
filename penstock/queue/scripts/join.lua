-- join: a node enters the pool. The first one writes the pool's schema; one that is configured otherwise is refused
-- while another lives (a node that died and was not swept yet does not count: perhaps nobody is left to sweep it).
-- ARGV: node revision, then field value …
-- Answer: {OK} | {MISMATCH, field, theirs}
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
