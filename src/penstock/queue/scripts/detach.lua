-- detach: remove a reader from a job. Without readers the job is marked unread; unless it is a background job, it is
-- canceled once its own grace, or reattach_grace_ms, has passed.
-- ARGV: id inbox
-- Answer: OK
local id, inbox = ARGV[1], ARGV[2]
local job = read_job(id)
redis.call('ZREM', P .. ':free', '')
if not job or is_terminal(job.state) then return 'OK' end
local left = {}
for name in string.gmatch(job.inboxes, '%S+') do
  if name ~= inbox then left[#left + 1] = name end
end
local unread = (#left == 0 and not channels.is(job.channel)) and tostring(clock()) or ''
redis.call('HSET', job_key(id), 'inboxes', table.concat(left, ' '), 'unread', unread)
return 'OK'
