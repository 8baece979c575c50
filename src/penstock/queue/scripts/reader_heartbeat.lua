-- reader_heartbeat: record the heartbeat of a reading process.
-- ARGV: inbox
-- Answer: OK
redis.call('ZREM', P .. ':free', '')
-- Taken out first: a second one in the same millisecond would change nothing, and WAIT and WAITAOF wait for changes.
redis.call('ZREM', P .. ':readers', ARGV[1])
redis.call('ZADD', P .. ':readers', clock(), ARGV[1])
return 'OK'
