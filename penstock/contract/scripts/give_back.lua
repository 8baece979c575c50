-- give_back: a node returns jobs it holds; they are queued again with their age, and with no loss.
-- ARGV: node, then per job: id lease cost
-- Answer per job: OK | FENCED | GONE
local MAX_JOBS = 128
local node, now = ARGV[1], clock()
local schema = read_schema()
if #ARGV > 1 + 3 * MAX_JOBS then return redis.error_reply('TOO_MANY_JOBS') end

redis.call('ZREM', P .. ':free', '')
local answers = {}
for at = 2, #ARGV, 3 do
  local id, lease, cost = ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 2])
  local job = schema and read_job(id)
  local answer = 'OK'
  if not job then
    answer = 'GONE'
  elseif not holds(job, node, lease) then
    answer = 'FENCED'
  elseif not end_if_over(job, schema, now) then
    redis.call('HINCRBY', job_key(id), 'preemptions', 1)
    requeue(job, cost, now + schema.avoid_ms)
  end
  answers[#answers + 1] = answer
end
flush()
return answers
