-- pause: stop or resume handing out jobs of the pool, of some levels, or of a tenant. Jobs are accepted meanwhile, and
-- running ones go on. A repeated call changes nothing.
-- ARGV: on, names
--   on: '1' to pause. names: fields of P:paused: `pool`, `level:<level>`, `tenant:<tenant>`.
-- Answer: {OK, {name, since when it is paused, …}} | {UNKNOWN_POOL} | {TOO_MANY}
local MAX_PAUSES = 1024
local config, now = read_config(), clock()
if not config then return {'UNKNOWN_POOL'} end
if ARGV[1] == '1' and redis.call('HLEN', P .. ':paused') + #ARGV > MAX_PAUSES then return {'TOO_MANY'} end
redis.call('HDEL', P .. ':paused', '')
for at = 2, #ARGV do
  if ARGV[1] ~= '1' then
    redis.call('HDEL', P .. ':paused', ARGV[at])
  elseif not redis.call('HGET', P .. ':paused', ARGV[at]) then
    redis.call('HSET', P .. ':paused', ARGV[at], now)
  end
end
if ARGV[1] ~= '1' then
  for _, node in ipairs(redis.call('ZRANGE', P .. ':nodes', 0, -1)) do redis.call('PUBLISH', P .. ':doorbell:' .. node, '') end
end
return {'OK', redis.call('HGETALL', P .. ':paused')}
