-- attach: add a reader to a job.
-- ARGV: id tenant inbox channel
--   inbox: the reading process, '' for none. channel: the job's field of that name (prelude.lua), '0' for none.
-- Answer: {OK, state, chunks, pushed} | {NOT_FOUND} | {CHANNEL_CONFLICT}
--   chunks: number of chunks in the log. pushed: 1 if new chunks will be pushed to the reader, 0 if the job already has
--   MAX_INBOXES readers. NOT_FOUND: unknown id, or a job of another tenant.
--   CHANNEL_CONFLICT: the open job publishes on another channel.
local id, tenant, inbox, channel = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local job = read_job(id)
if not job or job.tenant ~= tenant then return {'NOT_FOUND'} end
check_version(redis.call('HGET', KEYS[1], 'version') or PROTOCOL_VERSION)
if not is_terminal(job.state) and channels.differ(job, channel) then return {'CHANNEL_CONFLICT'} end
redis.call('ZREM', P .. ':free', '')
local pushed, now = 1, clock()
if not is_terminal(job.state) and (inbox ~= '' or channels.is(channel)) then
  pushed = add_reader(job, inbox, channel, now)
end
local chunks = redis.call('LLEN', log_key(id))
if is_terminal(job.state) then chunks = tonumber(redis.call('HGET', job_key(id), 'chunks')) end
return {'OK', shown_state(job, now), chunks, pushed}
