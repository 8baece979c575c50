-- submit: accepts a job, or says why not. A known id or idempotency key with the same body is the same job.
-- ARGV: id tenant p n cost body_hash request deadline_in_ms inbox channel background idem_hash
--       not_before_in_ms weight
-- Answer: {OK|EXISTS, id, state, chunks, pushed} | {ID_CONFLICT|IDEMPOTENCY_CONFLICT|UNKNOWN_POOL|BAD_ID_AGE}
--       | {BUSY, what, limit}
local MAX_AGE_MS, MAX_AHEAD_MS = 86400000, 300000

local id, tenant, p, n, cost = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
local body, request, deadline_in, inbox, channel = ARGV[6], ARGV[7], tonumber(ARGV[8]), ARGV[9], ARGV[10]
local background, idem, not_before_in, weight = ARGV[11], ARGV[12], tonumber(ARGV[13]), ARGV[14]

local schema = read_schema()
if not schema then return {'UNKNOWN_POOL'} end
local now = clock()
local idem_key = P .. ':idem:' .. tenant .. ':' .. idem

local function same_or(job, conflict)
  if job.body ~= body or job.tenant ~= tenant then return {conflict} end
  -- The free write: a repeated submit is answered by a full Redis too.
  redis.call('ZREM', P .. ':free', '')
  local pushed = add_reader(job, inbox, channel, now)
  return {'EXISTS', job.id, job.state, redis.call('LLEN', log_key(job.id)), pushed}
end

local known = read_job(id)
if known then return same_or(known, 'ID_CONFLICT') end
if idem ~= '' then
  local other = redis.call('GET', idem_key)
  known = other and read_job(other)
  if known then return same_or(known, 'IDEMPOTENCY_CONFLICT') end
end

local dot = string.find(id, '.', 1, true)
local minted = tonumber(string.sub(id, dot + 1, dot + 8) .. string.sub(id, dot + 10, dot + 13), 16)
if not minted or now - minted > MAX_AGE_MS or minted - now > MAX_AHEAD_MS then return {'BAD_ID_AGE'} end

local open = redis.call('SCARD', P .. ':open')
if open >= schema.max_open_jobs then return {'BUSY', 'open jobs', schema.max_open_jobs} end
local queued = 0
for _, v in ipairs(redis.call('HVALS', P .. ':backlog')) do queued = queued + tonumber(v) end
if queued > 0 and queued + cost > schema.max_queued_cost then
  return {'BUSY', 'queued KV tokens', schema.max_queued_cost}
end

local deadline = deadline_in > 0 and tostring(now + deadline_in) or ''
-- One that nobody reads from the start has the grace time to find a reader.
local unread = (inbox == '' and channel ~= '1') and now or ''
local is_later = not_before_in > 0
local job = {id = id, tenant = tenant, p = p, cost = tostring(cost), submitted = now + not_before_in, deadline = deadline}
redis.call('SET', P .. ':in:' .. id, request)
local entry = is_later and LATER or redis.call('XADD', queue_key(job), '*', 'id', id)
-- A small hash is searched from its front: what emit reads at every step comes first.
redis.call('HSET', job_key(id), 'state', 'queued', 'node', '', 'lease', '', 'first', '', 'cancel', '',
  'deadline', deadline, 'background', background, 'unread', unread, 'inboxes', inbox, 'channel', channel,
  'tenant', tenant, 'p', p, 'n', n, 'cost', cost, 'body', body, 'entry', entry, 'submitted', job.submitted,
  'losses', 0, 'preemptions', 0, 'weight', weight)
if is_later then
  redis.call('ZADD', P .. ':later', job.submitted, id)
  note_due(job)
else
  note_queued(job)
end
redis.call('SADD', P .. ':open', id)
redis.call('SADD', P .. ':tenant:' .. tenant .. ':open', id)
if idem ~= '' then redis.call('SET', idem_key, id, 'PX', schema.idem_ttl_ms) end
if inbox ~= '' then redis.call('ZADD', P .. ':readers', now, inbox) end
if not is_later then ring(cost) end
return {'OK', id, 'queued', 0, 1}
