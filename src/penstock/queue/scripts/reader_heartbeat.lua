-- reader_heartbeat: record the heartbeat of a reading process.
-- ARGV: inbox
-- Answer: OK
redis.call('ZREM', P .. ':free', '')
redis.call('ZADD', P .. ':readers', clock(), ARGV[1])
return 'OK'
