-- declare: a pool exists although no node has joined it, so that jobs may wait for its first node. A pool that exists
-- keeps its config and its record, because its nodes know them better.
-- ARGV: the pool's record (wire.py), then its config as field value …
-- Answer: {OK} | {EXISTS}
local now = clock()
if read_config() then
  redis.call('SET', P .. ':record', ARGV[1], 'NX')
  return {'EXISTS'}
end
redis.call('HSET', KEYS[1], 'version', PROTOCOL_VERSION, 'incarnation', now, unpack(ARGV, 2))
redis.call('SET', P .. ':record', ARGV[1])
return {'OK'}
