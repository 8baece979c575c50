-- bulk: the record of an action on all jobs that a filter names. Any process may continue it: the one that holds its
-- lease walks the jobs, newest first, and changes them by change.lua. The action covers jobs accepted before it.
-- ARGV: create id tenant request dry_run | claim id holder lease_ms | end id
--   request: the action with its filter, as JSON. tenant: whose action it is.
--   end: gives it up where it is; what it has changed stays changed.
-- Answer: {OK, fields of the record} | {NOT_FOUND} | {HELD} | {ENDED} | {TOO_MANY, limit} | {UNKNOWN_POOL}
--   HELD: another process has the lease.
local MAX_OPEN = 64
local what, id = ARGV[1], ARGV[2]
local config, now, key = read_config(), clock(), P .. ':bulk:' .. ARGV[2]
if not config then return {'UNKNOWN_POOL'} end
local state, holder, lease_until = unpack(redis.call('HMGET', key, 'state', 'holder', 'lease_until'))
if what == 'create' then
  if not state then
    if redis.call('ZCARD', P .. ':bulks') >= MAX_OPEN then return {'TOO_MANY', MAX_OPEN} end
    redis.call('HSET', key, 'state', 'running', 'tenant', ARGV[3], 'request', ARGV[4], 'dry_run', ARGV[5], 'begun', now,
      'holder', '', 'lease_until', 0, 'cursor', '', 'changed', 0, 'asked_to_stop', 0, 'already_over', 0, 'failed', 0, 'failures', '')
    redis.call('ZADD', P .. ':bulks', now, id)
  end
elseif not state then
  redis.call('ZREM', P .. ':bulks', id)
  return {'NOT_FOUND'}
elseif state ~= 'running' then
  return {'ENDED'}
elseif what == 'claim' then
  if holder ~= ARGV[3] and (whole(lease_until) or 0) > now then return {'HELD'} end
  redis.call('HSET', key, 'holder', ARGV[3], 'lease_until', now + tonumber(ARGV[4]))
else
  redis.call('HSET', key, 'ended', now, 'state', 'cancelled')
  redis.call('PEXPIRE', key, config.result_ttl_ms)
  redis.call('ZREM', P .. ':bulks', id)
end
return {'OK', redis.call('HGETALL', key)}
