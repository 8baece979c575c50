-- detach: remove a reader from a job. Without readers the job is marked unread; unless it is a background job, it is
-- canceled once its own grace, or reattach_grace_ms, has passed.
-- ARGV: id inbox stops
--   stops: '1' if the reading process stops. Its callers have not left, so the job waits for at least abandon_after_ms, as
--   it does if the process is killed.
-- Answer: OK
local id, inbox, stops = ARGV[1], ARGV[2], ARGV[3] == '1'
local config = read_config()
local job = read_job(id)
redis.call('ZREM', P .. ':free', '')
if not job or is_terminal(job.state) then return 'OK' end
local left = {}
for name in string.gmatch(job.inboxes, '%S+') do
  if name ~= inbox then left[#left + 1] = name end
end
local unread = ''
if #left == 0 and not channels.is(job.channel) then
  unread = tostring(clock() + (stops and config and grace_left(job, config) or 0))
end
redis.call('HSET', job_key(id), 'inboxes', table.concat(left, ' '), 'unread', unread)
return 'OK'
