-- change: cancel or reschedule jobs, or change their class, alone or as a step of a bulk action (bulk.lua). The action's
-- report and its cursor change in the same call, so each of its jobs is counted once.
-- ARGV: msgpack of {op, ids, tenant, begins_in_ms, class, background, step}
--   op: cancel, reschedule, change_class, or retry, which changes no job here: its outcomes are those of `step`.
--   tenant: whose jobs they must be; '' for any. begins_in_ms: 0 queues a scheduled job now. class, background: '' to keep
--   it, else the class, and '1' for background work.
--   step: {bulk, holder, from, to, is_last, outcomes, lease_ms} or nil.
--     from, to: the action's cursor before and after this step. outcomes: for retry, one for each id.
-- Answer: {OK, {outcome of each id}, {{id, tenant, state, code} of an ended job, …}, {total…}}
--   | {LOST} | {UNKNOWN_POOL}
--   outcome: changed; asked_to_stop: its node was told to cancel it; over: it had ended; NOT_FOUND; or the code of a failure. later: accepted after the bulk action.
--   LOST: another process continues the action.
--   total: after the last step of an action, how many jobs it changed, asked to stop, found ended, and failed on.
local MAX_JOBS, MAX_FAILURES = 4, 20
local asked = cmsgpack.unpack(ARGV[1])
local config, now, step = read_config(), clock(), asked.step
if not config then return {'UNKNOWN_POOL'} end
if #asked.ids > MAX_JOBS then return redis.error_reply('TOO_MANY_JOBS') end

local action
if step then
  action = P .. ':bulk:' .. step.bulk
  local state, holder, cursor, begun, dry_run =
    unpack(redis.call('HMGET', action, 'state', 'holder', 'cursor', 'begun', 'dry_run'))
  if state ~= 'running' or holder ~= step.holder or cursor ~= step.from then return {'LOST'} end
  step.begun, step.is_dry = whole(begun) or 0, dry_run == '1'
end
redis.call('ZREM', P .. ':free', '')

local function is_scheduled(job)
  return job.entry == DELAYED and redis.call('ZSCORE', P .. ':delayed:' .. lane_of(job), job.id) ~= false
end

local OPS = {}

function OPS.cancel(job)
  redis.call('HSET', job_key(job.id), 'cancel', '1')
  if job.state == 'running' then
    if step then redis.call('HSET', job_key(job.id), 'stopped_by', step.bulk) end
    redis.call('PUBLISH', P .. ':doorbell:' .. job.node, job.id)
  else
    job.cancel = '1'
    end_if_over(job, config, now)
  end
end

function OPS.reschedule(job)
  local was_scheduled = is_scheduled(job)
  if asked.begins_in_ms == 0 and not was_scheduled then return end
  leave_queue(job)
  if was_scheduled then
    if not redis.call('HGET', job_key(job.id), 'accepted') then
      redis.call('HSET', job_key(job.id), 'accepted', job.submitted)
    end
    job.submitted = now + asked.begins_in_ms
    redis.call('HSET', job_key(job.id), 'submitted', job.submitted)
    delay_job(job)
    note_due(job)
  else
    lists.move(job, 'queued', 'scheduled')
    rare.postpone(job, now + asked.begins_in_ms, now)
  end
  if asked.begins_in_ms == 0 then ring_doorbell(tonumber(job.cost)) end
end

local function level_after(job)
  local class = asked.class ~= '' and tonumber(asked.class) or tonumber(job.level) % CLASSES
  local in_background = is_background(job)
  if asked.background ~= '' then in_background = asked.background == '1' end
  return string.format('%d', class + (in_background and CLASSES or 0))
end

function OPS.change_class(job)
  local level, was_scheduled = level_after(job), is_scheduled(job)
  if level == job.level then return end
  leave_queue(job)
  local tags = lists.tags_of(job.id, redis.call('HGET', job_key(job.id), 'extra') or '')
  if tags ~= '' then
    rare.count_tags(job.tenant, tags, job.level, -1)
    rare.count_tags(job.tenant, tags, level, 1)
  end
  job.level = level
  redis.call('HSET', job_key(job.id), 'level', level)
  if asked.background == '1' then redis.call('HSET', job_key(job.id), 'needs_reader', '0') end
  if was_scheduled then
    delay_job(job)
    note_due(job)
  elseif job.entry ~= DELAYED then
    redis.call('HSET', job_key(job.id), 'entry', '')
    redis.call('ZADD', requeued_key(job), job.submitted, job.id)
    note_queued(job)
    ring_doorbell(tonumber(job.cost))
  elseif admits_job(token_limit.read_terms(job), now) then
    token_limit.queue_late(job, now)
  else
    note_due(job)
  end
end

-- What becomes of a job, before anything is changed.
local function outcome_of(job)
  if not job or (asked.tenant ~= '' and job.tenant ~= asked.tenant) then return 'NOT_FOUND' end
  local accepted = step and (whole(redis.call('HGET', job_key(job.id), 'accepted')) or tonumber(job.submitted)) or 0
  if step and accepted > step.begun then return 'later' end
  if is_terminal(job.state) then return 'over' end
  if asked.op == 'cancel' then
    -- One that another caller has asked to stop is not this action's.
    if job.state ~= 'running' then return 'changed' end
    return step and job.cancel == '1' and 'over' or 'asked_to_stop'
  end
  if job.state == 'running' then return 'job_running' end
  if asked.op == 'reschedule' and job.deadline ~= '' and now + asked.begins_in_ms >= tonumber(job.deadline) then
    return 'after_deadline'
  end
  return 'changed'
end

local outcomes = step and step.outcomes or {}
if asked.op ~= 'retry' then
  for at, id in ipairs(asked.ids) do
    local job = mended(read_job(id))
    outcomes[at] = outcome_of(job)
    if (outcomes[at] == 'changed' or outcomes[at] == 'asked_to_stop') and not (step and step.is_dry) then OPS[asked.op](job) end
  end
end

local totals = {}
if step then
  local COUNTED = {changed = 'changed', asked_to_stop = 'asked_to_stop', over = 'already_over', later = '', NOT_FOUND = ''}
  local failures = redis.call('HGET', action, 'failures') or ''
  local _, num_listed = string.gsub(failures, '\n', '')
  for at, outcome in ipairs(outcomes) do
    local name = COUNTED[outcome] or 'failed'
    if name ~= '' then redis.call('HINCRBY', action, name, 1) end
    if name == 'failed' and num_listed < MAX_FAILURES then
      failures, num_listed = failures .. asked.ids[at] .. ' ' .. outcome .. '\n', num_listed + 1
    end
  end
  redis.call('HSET', action, 'cursor', step.to, 'lease_until', now + step.lease_ms, 'failures', failures)
  if step.is_last then
    redis.call('HSET', action, 'state', 'ended', 'ended', now)
    redis.call('PEXPIRE', action, config.result_ttl_ms)
    redis.call('ZREM', P .. ':bulks', step.bulk)
    totals = redis.call('HMGET', action, 'changed', 'asked_to_stop', 'already_over', 'failed')
  end
end
flush()
return {'OK', outcomes, lists.ended, totals}
