-- join: a node enters the pool. The first node writes the pool's config. While another node lives, a node with a
-- different config is refused. A dead node that was not swept yet does not count: no process may be left to sweep it.
-- ARGV: node revision, then the config as field value …
-- Answer: {OK} | {MISMATCH, field, the pool's value}
local node, revision, config, now = ARGV[1], ARGV[2], read_config(), clock()
local alive = config and redis.call('ZCOUNT', P .. ':nodes', now - config.lease_ms, '+inf') or 0
for at = 3, #ARGV, 2 do
  local known = redis.call('HGET', KEYS[1], ARGV[at])
  -- A damaged value is replaced. Some settings may be empty.
  local is_right = known and #known < 16 and string.find(known, '^%d*$') and not (known == '' and default_of(ARGV[at]))
  if known and ARGV[at] == 'policy' then is_right = string.find(POLICIES, ' ' .. known .. ' ', 1, true) end
  if known and known ~= ARGV[at + 1] and alive > 0 and is_right then
    return {'MISMATCH', ARGV[at], known}
  end
end
redis.call('ZREM', P .. ':free', '')
redis.call('HSET', KEYS[1], 'version', PROTOCOL_VERSION, unpack(ARGV, 3))
-- Cursors into completions state it, so they notice that Redis lost everything.
redis.call('HSETNX', KEYS[1], 'incarnation', now)
if redis.call('ZADD', P .. ':nodes', now, node) == 1 then note_event(now, 'node_joined', node, '-', '-', '-') end
redis.call('ZADD', P .. ':revisions', now, revision)
return {'OK'}
