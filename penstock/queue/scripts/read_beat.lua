-- read_beat: a reading process is alive.
-- ARGV: inbox
redis.call('ZREM', P .. ':free', '')
redis.call('ZADD', P .. ':readers', clock(), ARGV[1])
return 'OK'
