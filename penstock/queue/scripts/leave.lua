-- leave: a node leaves the pool. If it still holds jobs, it stays listed until a sweep requeues them.
-- ARGV: node
-- Answer: the number of jobs that it still holds
local node = ARGV[1]
local left = redis.call('SCARD', P .. ':run:' .. node)
redis.call('ZREM', P .. ':free', node)
redis.call('HDEL', P .. ':hold', node)
redis.call('DEL', P .. ':took:' .. node)
if left == 0 then
  redis.call('ZREM', P .. ':nodes', node)
  redis.call('HDEL', P .. ':pressure', node)
  redis.call('HDEL', P .. ':adapters', node)
  unseat(node)
end
return left
