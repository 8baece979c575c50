-- leave: a node that holds nothing any more goes. What it still holds is left to sweep.
-- ARGV: node
-- Answer: the number of jobs it still holds
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
