-- join: a node enters the pool. The first one writes the pool's schema; one that is configured otherwise is refused.
-- ARGV: node revision, then field value …
-- Answer: {OK} | {MISMATCH, field, theirs}
local node, revision, now = ARGV[1], ARGV[2], clock()
for at = 3, #ARGV, 2 do
  local known = redis.call('HGET', KEYS[1], ARGV[at])
  if known and known ~= ARGV[at + 1] and redis.call('ZCARD', P .. ':nodes') > 0 then
    return {'MISMATCH', ARGV[at], known}
  end
end
redis.call('ZREM', P .. ':free', '')
redis.call('HSET', KEYS[1], unpack(ARGV, 3))
redis.call('ZADD', P .. ':nodes', now, node)
redis.call('ZADD', P .. ':revs', now, revision)
return {'OK'}
