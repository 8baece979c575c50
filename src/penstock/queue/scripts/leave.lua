-- leave: a node leaves the pool. If it still holds jobs, it stays listed until a sweep requeues them.
-- ARGV: node
-- Answer: the number of jobs that it still holds
local node = ARGV[1]
local left = redis.call('SCARD', P .. ':running:' .. node)
redis.call('ZREM', P .. ':free', node)
redis.call('HDEL', P .. ':paces', node)
redis.call('HDEL', P .. ':reservations', node)
redis.call('DEL', P .. ':last_take:' .. node)
if left == 0 then
  if redis.call('ZREM', P .. ':nodes', node) == 1 then note_event(clock(), 'node_left', node, '-', '-', '-') end
  redis.call('HDEL', P .. ':pressure', node)
  redis.call('HDEL', P .. ':adapters', node)
  free_seats(node)
end
return left
