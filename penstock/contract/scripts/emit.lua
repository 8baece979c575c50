-- emit: one call a step for all jobs of a node's batch; appends each job's chunks and publishes them.
-- A chunk whose index the log already has is published again, not appended again: the caller repeats a lost call.
-- ARGV: node, then per job: id lease index k chunk1 … chunkk
-- Answer per job: OK | FENCED | CANCEL | EXPIRED | UNHEARD | NEED n | GONE | ERR text
local node = ARGV[1]
local schema = read_schema()
local now = clock()
local swept = tonumber(redis.call('GET', P .. ':sweep') or '0')
-- After an outage of Redis itself no reader could beat: judge nobody until a sweep has reset the readers' clocks.
local may_judge = schema and now - swept < schema.lease_ms
local PUSH = 1000
-- Only these: half of this script's time goes into reading records.
local FIELDS = {'state', 'node', 'lease', 'first', 'cancel', 'deadline', 'background', 'unread', 'inboxes', 'channel'}

local silent = {}
local function is_silent(inbox)
  if silent[inbox] == nil then
    local last = redis.call('ZSCORE', P .. ':readers', inbox)
    silent[inbox] = not last or now - tonumber(last) > schema.abandon_after_ms
  end
  return silent[inbox]
end

local function is_unheard(job)
  if job.background ~= '0' or not may_judge then return false end
  if job.unread ~= '' then return is_unread(job, schema, now) end
  if job.channel == '1' then return false end
  for inbox in string.gmatch(job.inboxes, '%S+') do
    if not is_silent(inbox) then return false end
  end
  return true
end

local function emit_job(id, lease, index, first, count)
  local job = schema and read_job(id, FIELDS)
  if not job then return 'GONE' end
  if not holds(job, node, lease) then return 'FENCED' end
  local log = log_key(id)
  local length = redis.call('LLEN', log)
  if index > length then return 'NEED ' .. length end
  if job.first == '' and count > 0 then redis.call('HSET', job_key(id), 'first', now) end
  local from = first + length - index
  while from < first + count do
    local to = math.min(from + PUSH, first + count) - 1
    redis.call('RPUSH', log, unpack(ARGV, from, to))
    from = to + 1
  end
  for i = first, first + count - 1 do publish(job, ARGV[i]) end
  if job.cancel == '1' then return 'CANCEL' end
  if is_expired(job, now) then return 'EXPIRED' end
  if is_unheard(job) then return 'UNHEARD' end
  return 'OK'
end

redis.call('ZREM', P .. ':free', '')
redis.call('ZADD', P .. ':nodes', 'XX', now, node)
local answers, at = {}, 2
while at <= #ARGV do
  local id, lease, index, count = ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3])
  local ok, answer = pcall(emit_job, id, lease, index, at + 4, count)
  if not ok then answer = 'ERR ' .. tostring(type(answer) == 'table' and answer.err or answer) end
  answers[#answers + 1] = answer
  at = at + 4 + count
end
flush()
return answers
