-- What every script shares; messages.lua follows. The other files of this folder are for scripts that queue or end jobs
-- (script_text.py).
--
-- KEYS[1] is P:config. Every other key of the pool shares its hash tag and is built from its prefix P. The docstring of
-- keys.py lists all keys with their writers.
-- Order inside a script: validate all input, read all keys, then write. Lua does not roll back, so nothing may fail
-- after the first write. Every script except submit starts with a free write, a DEL or ZREM of a missing member. A full
-- Redis checks its memory limit only before a script's first write, so it refuses submits and nothing else. take leaves
-- jobs queued that Redis has no memory for.
--
-- A job's hash has these fields:
--   state tenant level n entry body cost submitted taken first finished deadline needs_reader inboxes channel unread;
--   node lease avoid avoid_until losses loss_nodes loss_mark preemptions cancel chunks revision code message param;
--   urgency charge window weight held output reserved logged memory_percent idem lacks ms_per_token charged to_charge;
--   burst_ms may_use minute_tokens account stored result_until keep response_bytes retaken past_leases num_past_leases
--   engine_preemptions used limits in_feed begun_deadline accepted tag1 … tag4 extra retry_of
--   webhooks deleted model words stopped_by max_wait retry attempts retried_as key key_terms
--   to_pay
-- level: the job's class for foreground work, and its class + CLASSES for background work. Levels are served in order.
-- needs_reader: '0' for a job that needs no reader. '1' for one that is canceled reattach_grace_ms after its last reader
-- left; a larger number: after so many ms, at most MAX_READER_SILENCE_MS (sweep.lua).
-- n: sequences that the job occupies in an engine; 0 for a task that needs no engine.
-- entry: position of a queued job: its id in the tenant's stream, or '' for a requeued job. DELAYED is that of a job
-- that waits for its time (P:delayed), for its tenant's tokens and rates (P:awaiting:<tenant>), or for its key
-- (P:awaiting:<tenant>:<key>).
-- unread: time since which the job has no reader, '' with a reader. inboxes: its readers, separated by spaces.
-- lease: fencing token, `<call>:<nonce>:<i>` of the take that assigned it. loss_mark: length of the log at its last
-- loss.
-- losses, loss_nodes: losses since the job last made progress; `node@ms` of each. lacks: nodes that cannot run it.
-- urgency, charge, window: class it was taken as, what its tenant was charged, and the share window of that charge.
-- ms_per_token, charged: tenant's token rate and the tokens charged to it, if the tenant has such a limit. to_charge,
-- burst_ms: tokens that a delayed job reserves when it is due, and the burst of that rate. may_use, minute_tokens: the most
-- tokens that the job may use, and that its tenant's jobs may use in a minute, both for a tenant with a token rate.
-- held, reserved: bytes of a job that count, while it is open, in P:stored and P:reserved. output: bytes of log and
-- result that it may write. logged: `<chunks> <bytes>` of its log that `held` includes. stored: bytes that count in
-- P:stored after its end, as `<log> <large result> <dead letter's request> <rest>[ <response>]`. memory_percent: its
-- tenant's share, if not the pool's. result_until: expiry of a large result, 0 for one that was deleted.
-- keep: ms after the end for which the record of a stored response, of response_bytes, and the job's result are kept.
-- deleted: '1' if the record of its stored response was deleted.
-- taken, retaken: times of the first take and of the last later one. past_leases: the newest MAX_PAST_LEASES leases that
-- ended before the job did, as `<node>@<taken>-<ended>:<why>`; num_past_leases counts all of them.
-- preemptions: how often a node gave the job back. engine_preemptions: how often engines preempted its sequences, over the
-- leases that ended; a lost node's are not known.
-- used: `<prompt> <completion> <cached> <kv_token_ms>` of an ended job, and `<reasoning>` if it is not 0; kv_token_ms is ''
--   if its node did not report it.
-- in_feed: '0' for a job whose end is not in P:ended:<tenant>.
-- limits: `<max_tokens> <max_total_tokens>` of a job whose max_tokens is lowered to what its prompt leaves.
-- begun_deadline: only of a job whose TTL ends before its deadline, until a node takes it. Until then `deadline` is the
-- end of the TTL; from then on it is begun_deadline ('': none).
-- accepted: when a job was accepted that was not queued at once. tag1 … tag4: its tags. extra: bytes of its tags with
-- their entries in P:tagged:<tenant>:<tag>, and of its metadata. retry_of: the id, without its pool, of the ended job that
-- it repeats. webhooks: ids of the webhook endpoints that are told of its end, separated by spaces. model, words: the
-- model's name and the first words of the prompt, at most MAX_SHORT_BYTES each, for lists of jobs. stopped_by: the bulk
-- action that asked the job to stop while a node ran it.
-- retry: `<most attempts> <mean pause in ms>` of a job that states them, '-' for the pool's. attempts: the number of its
-- present attempt, if it is not the first. retried_as: the id, without its pool, of the job that took the place of this one,
-- because its output was refused.
-- key, key_terms, to_pay: see rare.lua.
-- max_wait: ms for which the caller of foreground work waits for the end of a pause, if not the pool's; 0: without end.

-- damage.lua replaces it for its scripts. `sure` is for commands that fail for no key's type: of strings that they replace,
-- of lives, messages and deletions, and of a key that the script has read.
local redis, sure = redis, redis.call
local P = string.sub(KEYS[1], 1, -8)
local PROTOCOL_VERSION = '1'
local CLASSES, LEVELS = 3, 6
local MAX_INBOXES = 16
local MAX_DEBTS = 1000
local DELAYED = 'delayed'
local MAX_DELAYED = 64
local MAX_PAST_LEASES = 8
local MAX_DEAD, DEAD_LIFE_MS = 10000, 604800000
local LARGE_RESULT_BYTES, LOG_PAGE = 65536, 500
-- Memory of a job's record with its entries in other keys, of a wide record, and of another key of a job. A record is
-- wide if a field is above MAX_SHORT_BYTES, because Redis stores such a hash in another way.
-- tests/queue/test_memory_accounting.py compares them with MEMORY USAGE.
local RECORD_BYTES, WIDE_RECORD_BYTES, KEY_BYTES, MAX_SHORT_BYTES = 1120, 5184, 256, 64
local COUNTED_CHUNKS, MIN_RESERVED_BYTES = 12, 4096
local SHARE_WINDOW_MS, MAX_CHARGE = 10000, 1e15
-- Numbers in Redis are smaller: Redis's integers, Lua's numbers and Python's times have them exactly.
local MAX_NUMBER = 2 ^ 53
local POLICIES = ' fcfs priority sjf fair round_robin '
local JOB_FIELDS = {'state', 'tenant', 'level', 'n', 'entry', 'cost', 'submitted', 'deadline', 'needs_reader',
  'inboxes', 'channel', 'unread', 'node', 'lease', 'avoid', 'avoid_until', 'losses', 'loss_nodes', 'loss_mark', 'preemptions',
  'cancel', 'revision', 'first', 'taken', 'body', 'urgency', 'charge', 'weight', 'window'}
local CONFIG_FIELDS = {'version', 'lease_ms', 'abandon_after_ms', 'reattach_grace_ms', 'log_ttl_ms', 'result_ttl_ms',
  'idem_ttl_ms', 'max_open_jobs', 'max_queued_cost', 'max_losses', 'progress_chunks', 'avoid_ms', 'aging_ms', 'bypass_ms',
  'policy'}

-- The pool's clock, in ms. Redis's clock may jump: after a fail-over it is that of another machine. The pool's clock is
-- ahead_ms ahead of it, and does not jump: a sweep corrects ahead_ms (sweep.lua). It never shows less than at the last
-- sweep. If that was longer ago than half a lease, or is still to come, the time is in doubt until the next sweep. Then
-- nothing passes its deadline, and no process counts as silent.
local clock, pool_time = nil, {}
do
  local MAX_AHEAD_MS = 1e13
  local ahead, swept, max_gap, redis_now, now, in_doubt

  -- Takes the clock's fields of P:config.
  function pool_time.read(ahead_ms, swept_ms, lease_ms)
    ahead, swept = tonumber(ahead_ms or '') or 0, tonumber(swept_ms or '')
    -- NaN is in no range.
    if not (ahead > -MAX_AHEAD_MS and ahead < MAX_AHEAD_MS) then ahead = 0 end
    if swept and not (swept >= 0 and swept < MAX_NUMBER) then swept = nil end
    local lease = tonumber(lease_ms or '') or 0
    max_gap = (lease > 0 and lease < MAX_NUMBER and lease or 15000) / 2
  end

  -- Redis's own time, by which keys expire: P:expiry and result_until are stated in it. It stays the same during a script.
  function pool_time.of_redis()
    if not redis_now then
      local t = redis.call('TIME')
      redis_now = tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
    end
    return redis_now
  end

  -- The pool's time. It stays the same during a script. `seen`: what it is as the caller knows, which counts while it is in
  -- doubt; 0 or nil if unknown. Second, how far ahead of Redis's clock it is, and third, when the last sweep was, or nil.
  function clock(seen)
    if not now then
      if not ahead then pool_time.read(unpack(redis.call('HMGET', KEYS[1], 'ahead_ms', 'swept_ms', 'lease_ms'))) end
      now = pool_time.of_redis() + ahead
      in_doubt = swept and (now < swept or now - swept > max_gap) or false
      if in_doubt then now = seen and seen >= swept and seen or math.max(now, swept) end
    end
    return now, ahead, swept
  end

  function pool_time.is_in_doubt()
    clock()
    return in_doubt
  end

  -- Whether heartbeats of readers and revisions are reliable. During an outage of Redis no heartbeat arrives; then no
  -- reader and no revision counts as dead before a sweep has reset their heartbeats.
  function pool_time.has_heartbeats()
    clock()
    return swept and not in_doubt
  end
end

-- A table of functions that are made when the first of them is used: a script pays for each function that it makes.
local function late(make)
  return setmetatable({}, {__index = function(made, name)
    setmetatable(made, nil)
    make(made)
    return made[name]
  end})
end

local function job_key(id) return P .. ':job:' .. id end
local function log_key(id) return P .. ':log:' .. id end
local function queue_key(job) return P .. ':queue:' .. job.level .. ':' .. job.tenant end
local function requeued_key(job) return P .. ':requeued:' .. job.level .. ':' .. job.tenant end

-- The job's record as a table of strings ('' for an absent field), or nil. `fields` must start with 'state'.
local function read_job(id, fields)
  fields = fields or JOB_FIELDS
  local values = redis.call('HMGET', job_key(id), unpack(fields))
  if not values[1] then return nil end
  local job = {id = id}
  for i = 1, #fields do job[fields[i]] = values[i] or '' end
  return job
end

-- Ends the script for a pool of another protocol version. Must be called before the first write. connection.py
-- translates the error. What is no number is no version: heartbeats write it again.
local function check_version(version)
  if version ~= PROTOCOL_VERSION and string.find(version, '^%d+$') and #version < 6 then
    error('OTHER_PROTOCOL_VERSION ' .. version .. ' ' .. string.match(P, '{(.*)}'), 0)
  end
end

-- The default of a pool's setting, which stands in for a damaged one until a heartbeat writes the pool's own again; nil for
-- one that may be absent. gpu_node/settings.py has the same values.
local function default_of(name)
  return ({lease_ms = 15000, abandon_after_ms = 30000, reattach_grace_ms = 5000, log_ttl_ms = 120000,
    result_ttl_ms = 86400000, idem_ttl_ms = 86400000, max_open_jobs = 1000000, max_queued_cost = 2147483648, max_losses = 3,
    progress_chunks = 64, avoid_ms = 2000, aging_ms = 60000, bypass_ms = 2000})[name]
end

-- The pool's times and limits as numbers, its policy as text, or nil for an unknown pool. `names` must start with 'version'.
local function read_config(names)
  names = names or CONFIG_FIELDS
  local values = redis.call('HMGET', KEYS[1], 'ahead_ms', 'swept_ms', 'lease_ms', unpack(names))
  pool_time.read(values[1], values[2], values[3])
  if values[4] then check_version(values[4]) end
  if not values[4] then return nil end
  local config = {}
  for i, name in ipairs(names) do
    if name == 'policy' then
      local policy = values[i + 3] or ''
      config.policy = string.find(POLICIES, ' ' .. policy .. ' ', 1, true) and policy or 'fair'
    elseif i > 1 then
      local number = tonumber(values[i + 3])
      if not (number and number >= 0 and number < MAX_NUMBER and number % 1 == 0) then
        number = default_of(name)
      end
      config[name] = number
    end
  end
  return config
end

-- What a script for many jobs collects, by key, and write_collected in writes.lua writes once; nil in any other script.
-- `sums` are added to fields of hashes, and `bytes` too, whose fields are removed at 0. Members of sets are `removed` and
-- `added`. Members of sorted sets are `unlisted`, and `entries` (score, member …) are new ones. `lives` are in ms.
-- `charges` are corrections of virtual times, by level and tenant (correct_charges). `debts` names the sorted sets of debts
-- that grew.
local collected

local function collect_in(name, key)
  local of_key = collected[name][key]
  if not of_key then
    of_key = {}
    collected[name][key] = of_key
  end
  return of_key
end

local function collect_sum(name, key, field, by)
  local sums = collect_in(name, key)
  sums[field] = (sums[field] or 0) + by
end

-- Adds to an event counter for operators; only for rare events, or once per submission. It begins with a free write
-- (see above), because this may be the script's first write.
local function count_event(event, by)
  if collected then
    collect_sum('sums', P .. ':counts', event, by or 1)
    return
  end
  redis.call('HDEL', P .. ':counts', '')
  redis.call('HINCRBY', P .. ':counts', event, by or 1)
end

-- Adds to the newest events of nodes, or to those of jobs, which operators see; only for rare events, and after a free
-- write (see above). Apart, because a lost node may move many jobs. `fields`: kind, node, job, from, why; '-' for an
-- absent one.
local function note_event(now, kind, ...)
  local MAX_EVENTS = 256
  local event = table.concat({string.format('%d', now), kind, ...}, ' ')
  if string.sub(kind, 1, 5) == 'node_' then
    redis.call('ZADD', P .. ':node_events', now, event)
    redis.call('ZREMRANGEBYRANK', P .. ':node_events', 0, -MAX_EVENTS - 1)
  else
    redis.call('ZADD', P .. ':events', now, event)
    redis.call('ZREMRANGEBYRANK', P .. ':events', 0, -MAX_EVENTS - 1)
  end
end

-- Whether `name` is in the list `names`, which is separated by spaces.
local function is_listed(names, name) return string.find(' ' .. names .. ' ', ' ' .. name .. ' ', 1, true) ~= nil end

-- Frees the seats of a node that left, except those that a successor holds already.
local function free_seats(node)
  local seats = redis.call('HGETALL', P .. ':seats')
  for at = 1, #seats, 2 do
    if string.match(seats[at + 1], '%S+$') == node then redis.call('HDEL', P .. ':seats', seats[at]) end
  end
end

local function is_terminal(state)
  return state == 'succeeded' or state == 'failed' or state == 'cancelled' or state == 'expired' or state == 'dead'
end

-- The state that callers see. Redis stores a scheduled job as queued, and a cancelling one as running (output.py,
-- state_of).
local function shown_state(job, now)
  if job.state == 'queued' and job.entry == DELAYED and (tonumber(job.submitted) or 0) > now then return 'scheduled' end
  if job.state == 'running' and job.cancel == '1' then return 'cancelling' end
  return job.state
end

local function holds(job, node, lease)
  return job.state == 'running' and job.node == node and job.lease == lease
end

local function is_expired(job, now)
  return job.deadline ~= '' and (tonumber(job.deadline) or now + 1) <= now and not pool_time.is_in_doubt()
end

-- Bytes of jobs ------------------------------------------------------------------------------------
-- Per tenant, P:stored sums the bytes that its jobs occupy, and P:reserved those that its running jobs may still write.

-- Counts at once, for a sum that the same script reads again.
local function count_now(key, tenant, by)
  if by ~= 0 and redis.call('HINCRBY', key, tenant, by) == 0 then redis.call('HDEL', key, tenant) end
end

local function count_bytes(key, tenant, by)
  if collected then collect_sum('bytes', key, tenant, by) else count_now(key, tenant, by) end
end

-- Parses `logged`: the number of chunks that `held` includes, and their bytes.
local function logged_of(text)
  local chunks, bytes = string.match(text or '', '^(%d+) (%d+)$')
  if not chunks or #text > 30 then return 0, 0 end
  return tonumber(chunks), tonumber(bytes)
end

-- Moves the bytes of newly logged chunks from `reserved` to `held`. What stays reserved is at least as much as these
-- chunks took, because a job without max_tokens may write more than was predicted. Returns the tenant, or nil, and what
-- the caller must add to the tenant's P:stored and P:reserved.
local function count_log(id)
  local tenant, held, reserved, logged = unpack(redis.call('HMGET', job_key(id), 'tenant', 'held', 'reserved', 'logged'))
  held = tonumber(held or '')
  if not held or not (held >= 0 and held < MAX_NUMBER) or not tenant then return nil, 0, 0 end
  local chunks, bytes = logged_of(logged)
  local new = 0
  repeat
    local page = redis.call('LRANGE', log_key(id), chunks, chunks + LOG_PAGE - 1)
    for _, chunk in ipairs(page) do new = new + #chunk end
    chunks = chunks + #page
  until #page < LOG_PAGE
  reserved = tonumber(reserved or '') or 0
  if not (reserved >= 0 and reserved < MAX_NUMBER) then reserved = 0 end
  local left = math.max(reserved - new, new, MIN_RESERVED_BYTES)
  redis.call('HSET', job_key(id), 'held', held + new, 'reserved', left, 'logged', chunks .. ' ' .. bytes + new)
  return tenant, new, left - reserved
end
