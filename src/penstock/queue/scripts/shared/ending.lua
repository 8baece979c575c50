-- The end of a job.

local ending = late(function(made)
  -- Makes an ended job a dead letter.
  local function dead_letter(job, now)
    redis.call('ZADD', P .. ':dead_letters', now, job.id)
    for _, id in ipairs(redis.call('ZRANGE', P .. ':dead_letters', 0, -1 - MAX_DEAD)) do delete_dead_letter(id) end
  end

  -- Lifetimes, in ms, of an ended job's record and log. The log of a stored response stands in for a missing result.
  local function record_life(job, config, is_dead)
    return math.max(response_life(job) or config.result_ttl_ms, is_dead and DEAD_LIFE_MS or 0)
  end

  -- Lifetime, in ms, of an ended job's request; nil for a job that completed. Other jobs can be inspected and submitted
  -- again.
  local function request_life(state, config)
    if state == 'succeeded' then return nil end
    return state == 'dead' and DEAD_LIFE_MS or config.result_ttl_ms
  end

  local function log_life(job, config, result_bytes)
    return math.max(config.log_ttl_ms, result_bytes == 0 and response_life(job) or 0)
  end

  -- Counts the bytes that are stored of a job after its end. Returns the fields of its record that say so.
  local function count_ended(job, config, log_bytes, result_bytes, state, is_wide)
    local now = pool_time.of_redis()
    local is_large, is_dead, kept = result_bytes > LARGE_RESULT_BYTES, state == 'dead', request_life(state, config)
    local function with_key(bytes) return bytes > 0 and bytes + KEY_BYTES or 0 end
    local bytes = {log = with_key(log_bytes), result = is_large and with_key(result_bytes) or 0,
      request = kept and with_key(redis.call('STRLEN', P .. ':request:' .. job.id)) or 0,
      job = (is_wide and WIDE_RECORD_BYTES or RECORD_BYTES) + (is_large and 0 or result_bytes) + (whole(job.extra) or 0),
      response = with_key(whole(job.response_bytes) or 0)}
    local large_result_life = result_life(job, config, result_bytes)
    count_stored(job.tenant, 'log:' .. job.id, bytes.log, now + log_life(job, config, result_bytes))
    count_stored(job.tenant, 'result:' .. job.id, bytes.result, now + large_result_life)
    count_stored(job.tenant, 'request:' .. job.id, bytes.request, now + (kept or 0))
    count_stored(job.tenant, lists.record_with(job.id, state, job.tags), bytes.job, now + record_life(job, config, is_dead))
    count_stored(job.tenant, 'response:' .. job.id, bytes.response, now + (response_life(job) or 0))
    local stored = string.format('%d %d %d %d', bytes.log, bytes.result, bytes.request, bytes.job) ..
      (bytes.response > 0 and ' ' .. bytes.response or '')
    if large_result_life < record_life(job, config, is_dead) then
      return 'stored', stored, 'result_until', now + large_result_life
    end
    return 'stored', stored
  end

  -- Terminal chunks, packed by hand because cmsgpack does not keep the order of map keys.
  local function pack_string(s)
    local n = #s
    if n < 32 then return string.char(0xa0 + n) .. s end
    if n < 256 then return string.char(0xd9, n) .. s end
    return struct.pack('>BH', 0xda, n) .. s
  end

  local function pack_uint(n)
    if n < 128 then return string.char(n) end
    if n < 256 then return string.char(0xcc, n) end
    if n < 65536 then return struct.pack('>BH', 0xcd, n) end
    return struct.pack('>BI4', 0xce, n)
  end

  local HEAD = string.char(0x84) .. pack_string('v') .. pack_uint(tonumber(PROTOCOL_VERSION)) .. pack_string('j')
  local INDEX, END = pack_string('i'), pack_string('e') .. string.char(0x84) .. pack_string('state')
  local CODE, MESSAGE, PARAM = pack_string('code'), pack_string('message'), pack_string('param')

  local function terminal_chunk(id, index, state, code, message, param)
    return HEAD .. pack_string(id) .. INDEX .. pack_uint(index) .. END .. pack_string(state) .. CODE .. pack_string(code) ..
      MESSAGE .. pack_string(message) .. PARAM .. pack_string(param)
  end

  -- Number of bytes and tokens in a job's log, for a job whose node did not report them.
  local function measure_log(id)
    local bytes, tokens, from, page = 0, 0, 0, nil
    repeat
      page = redis.call('LRANGE', log_key(id), from, from + LOG_PAGE - 1)
      for _, chunk in ipairs(page) do
        local ok, fields = pcall(cmsgpack.unpack, chunk)
        bytes = bytes + #chunk
        if ok and type(fields) == 'table' and type(fields.t) == 'table' then tokens = tokens + #fields.t end
      end
      from = from + LOG_PAGE
    until #page < LOG_PAGE
    return bytes, tokens
  end

  local DAY_MS, USAGE_DAYS = 86400000, 92
  local HOUR_MS, USAGE_HOURS = 3600000, 72
  local USED = {'jobs', 'prompt', 'completion', 'cached'}

  -- Counts a job's tokens per tenant and account in P:usage:<day> and P:hour_usage:<hour>. Only `end_job` calls it, once per
  -- job.
  local function add_usage(job, account, now, used)
    local day, hour = P .. ':usage:' .. math.floor(now / DAY_MS), P .. ':hour_usage:' .. math.floor(now / HOUR_MS)
    local name = job.tenant .. ':' .. (account or '') .. ':'
    for _, what in ipairs(USED) do
      local amount = what == 'jobs' and 1 or used[what]
      if amount > 0 then
        what = name .. what
        add_with_life(day, USAGE_DAYS * DAY_MS, what, amount)
        add_with_life(hour, USAGE_HOURS * HOUR_MS, what, amount)
      end
    end
  end

  -- Corrects the charge to a tenant's token rate by `by` tokens; negative if the charge was too high. A debt is kept
  -- until it is worked off. A refund never gives more than a full burst, because a due time in the past counts as now.
  -- ms_per_token: the rate at the job's submit. The rate that the debt is stated at goes first: it may be newer.
  local function correct_rate(job, ms_per_token, by, now)
    local key = P .. ':rate:' .. job.tenant
    local jobs, tokens, stated = unpack(redis.call('HMGET', key, 'jobs', 'tokens', 'ms_per_token'))
    if finite(stated) > 0 then ms_per_token = finite(stated) end
    local due = math.max(now, finite(tokens)) + by * ms_per_token
    local life = math.ceil(math.max(due, finite(jobs)) - now)
    if life <= 0 then
      redis.call('DEL', key)
    else
      redis.call('HSET', key, 'tokens', due, 'ms_per_token', ms_per_token)
      redis.call('PEXPIRE', key, life)
    end
  end

  -- Remembers the length of a tenant's recent outputs, for its token rate: the longest one, which fades by a tenth per job.
  local function note_length(job, state, num_tokens)
    if state ~= 'succeeded' or num_tokens == 0 then return end
    local known = whole(redis.call('HGET', P .. ':lengths', job.tenant)) or 0
    redis.call('HSET', P .. ':lengths', job.tenant, math.max(math.ceil(num_tokens / tonumber(job.n)), math.floor(known * 0.9)))
  end

  -- Appends an ended job to its tenant's completions, as `<uuid> <state>[ <tag>…]`. If the tenant has none yet, its first
  -- entry says in `after` which was the last one before, for cursors. Nothing here may keep a job from ending.
  local MAX_ENDED = 200000

  local function note_completion(job, config, now, state)
    local key = P .. ':ended:' .. job.tenant
    local tags = job.tags
    if tags ~= '' then tags = string.gsub(tags, ' ?#%S+', '') end
    local entry = string.match(job.id, '[^.]*$') .. ' ' .. state .. (tags ~= '' and ' ' .. tags or '')
    if redis.pcall('XADD', key, 'NOMKSTREAM', 'MAXLEN', '~', MAX_ENDED, '*', 'j', entry) then return end
    local last = redis.call('HGET', P .. ':ended_before', job.tenant) or '0-0'
    redis.call('XADD', key, '*', 'j', entry, 'after', last)
    redis.call('ZADD', P .. ':ended', now + config.result_ttl_ms, job.tenant)
  end

  -- Notes in P:untold that the endpoints which a job names are to be told of its end. Gateways hand that to webhooks.lua.
  -- Nothing here may keep a job from ending.
  local MAX_UNTOLD = 100000

  local function note_webhooks(job, state)
    local size = redis.pcall('HGET', P .. ':untold_sizes', job.tenant)
    if type(size) == 'table' or finite(size) >= MAX_UNTOLD then
      count_event('webhooks_dropped')
      return
    end
    local kind = (whole(job.response_bytes) or 0) > 0 and 'response' or 'job'
    local entry = table.concat({string.match(job.id, '[^.]*$'), state, kind, job.tenant, job.webhooks}, ' ')
    if type(redis.pcall('XADD', P .. ':untold', '*', 'e', entry)) == 'string' then
      count_now(P .. ':untold_sizes', job.tenant, 1)
    end
  end

  -- Fields that the end of a job needs beside JOB_FIELDS.
  local END_FIELDS = {'held', 'reserved', 'idem', 'ms_per_token', 'charged', 'account', 'past_leases', 'keep', 'response_bytes',
    'in_feed', 'extra', 'webhooks', 'stopped_by'}

  local function read_end_fields(job)
    if job.past_leases then return end
    for at, value in ipairs(redis.call('HMGET', job_key(job.id), unpack(END_FIELDS))) do job[END_FIELDS[at]] = value or '' end
  end

  local function read_tags(job)
    if not job.tags then job.tags = lists.tags_of(job.id, job.extra) end
  end

  local function leave_sets(job, state)
    if job.state == 'queued' then
      leave_queue(job)
      if job.entry == DELAYED then lists.leave('scheduled', job) end
    else
      remove_member(P .. ':running:' .. job.node, job.id)
    end
    lists.move(job, job.state, state)
    remove_member(P .. ':open', job.id)
    remove_member(P .. ':tenant:' .. job.tenant .. ':open', job.id)
  end

  -- Counts a job that a bulk action asked to stop by how it ended: it may have been faster.
  local function note_stopped(job, state)
    local action = P .. ':bulk:' .. job.stopped_by
    if not redis.call('HGET', action, 'asked_to_stop') then return end
    redis.call('HINCRBY', action, 'asked_to_stop', -1)
    redis.call('HINCRBY', action, state == 'cancelled' and 'changed' or 'already_over', 1)
  end

  -- Corrects what the job was charged for its tenant's limits of tokens. A task keeps its charge: its node reports no tokens.
  local function correct_tokens(job, state, now, reported)
    local ms_per_token = finite(job.ms_per_token)
    if ms_per_token <= 0 or is_task(job) then return end
    note_length(job, state, reported.completion)
    local num_used = reported.prompt + reported.completion
    correct_rate(job, ms_per_token, num_used - (whole(job.charged) or 0), now)
    token_limit.settle_tokens(job, num_used, now)
  end

  -- Ends a job; the only way to a terminal state. The record keeps node and lease, to recognize a repeated finish.
  -- `reported`: what the job's node reported: tokens of prompt, completion, cached and reasoning; kv_token_ms; bytes of the
  -- log before the terminal chunk and of the result. Without it, bytes and completion tokens come from the log, and prompt
  -- tokens are not counted. `last`: of finish, the length of the log, the chunks that go into it before the terminal one,
  -- and further fields of the record.
  function made.end_job(job, config, now, state, code, message, param, reported, last)
    if not reported then lists.ended[#lists.ended + 1] = {job.id, job.tenant, state, code} end
    reported = reported or {}
    if code == 'node_lost' then state = 'dead' end
    local log, chunks = log_key(job.id), last and last.chunks or {}
    local length = last and last.length or redis.call('LLEN', log)
    if not reported.completion or not reported.log_bytes then
      if #chunks > 0 then length, chunks = redis.call('RPUSH', log, unpack(chunks)), {} end
      local bytes, tokens = measure_log(job.id)
      reported = {prompt = reported.prompt or 0, completion = reported.completion or tokens,
        cached = reported.cached or 0, log_bytes = bytes, result_bytes = reported.result_bytes,
        kv_token_ms = reported.kv_token_ms, reasoning = reported.reasoning}
    end
    read_end_fields(job)
    read_tags(job)
    leave_sets(job, state)
    local is_dead, kept = state == 'dead', request_life(state, config)
    count_event('ended_' .. state)
    if state == 'expired' then count_event('expired_level_' .. job.level) end
    if is_dead then
      count_event('dead_letters')
      note_event(now, 'dead_letter', job.node, job.id, '-', '-')
    end
    if is_dead then dead_letter(job, now) end
    if kept then sure('PEXPIRE', P .. ':request:' .. job.id, kept) else sure('DEL', P .. ':request:' .. job.id) end
    local held, reserved = whole(job.held), job.reserved == '' and 0 or whole(job.reserved)
    if not held or not reserved then count_event('unknown_sums') end
    count_bytes(P .. ':stored', job.tenant, -(held or 0))
    count_bytes(P .. ':reserved', job.tenant, -(reserved or 0))
    local is_wide = #message > MAX_SHORT_BYTES or #param > MAX_SHORT_BYTES or #job.past_leases > MAX_SHORT_BYTES or
      #job.inboxes > MAX_SHORT_BYTES or #(job.loss_nodes or '') > MAX_SHORT_BYTES
    add_usage(job, job.account, now, reported)
    if not is_task(job) and job.in_feed ~= '0' then note_completion(job, config, now, state) end
    if job.webhooks ~= '' then note_webhooks(job, state) end
    if job.extra ~= '' then rare.give_up(job, now) end
    if job.tags ~= '' then rare.end_tags(job, state, now) end
    if job.stopped_by ~= '' then note_stopped(job, state) end
    correct_tokens(job, state, now, reported)
    if job.idem ~= '' then
      -- A caller that repeats its request after a broken connection gets a new job, not this job's `unread`.
      redis.call('PEXPIRE', P .. ':idem:' .. job.idem, code == 'unread' and 0 or config.idem_ttl_ms)
    end
    local index = length + #chunks
    local chunk = terminal_chunk(job.id, index, state, code, message, param)
    chunks[#chunks + 1] = chunk
    sure('RPUSH', log, unpack(chunks))
    sure('PEXPIRE', log, log_life(job, config, reported.result_bytes or 0))
    local used = string.format('%d %d %d ', reported.prompt, reported.completion, reported.cached) ..
      (reported.kv_token_ms and string.format('%.0f', reported.kv_token_ms) or '') ..
      (reported.reasoning and string.format(' %d', reported.reasoning) or '')
    local key = job_key(job.id)
    if last and last.fields[1] then sure('HSET', key, unpack(last.fields)) end
    sure('HSET', key, 'state', state, 'finished', now, 'chunks', index + 1, 'code', code, 'message', message, 'param', param,
      'used', used, count_ended(job, config, reported.log_bytes + #chunk, reported.result_bytes or 0, state, is_wide))
    sure('PEXPIRE', key, record_life(job, config, is_dead))
    local keep = response_life(job)
    if keep then redis.call('PEXPIRE', P .. ':response:' .. job.id, keep) end
    if job.extra ~= '' then redis.call('PEXPIRE', P .. ':metadata:' .. job.id, record_life(job, config, is_dead)) end
    publish(job, chunk)
  end
end)

local function end_job(...) return ending.end_job(...) end

-- State, code and message with which a job must end now; nil if it may still run.
local function why_over(job, config, now)
  if job.problem then
    return 'failed', 'internal_error', job.problem .. ' in Redis was lost or damaged'
  end
  if job.cancel == '1' then return 'cancelled', 'cancelled', 'the job was cancelled' end
  if is_expired(job, now) then
    if redis.call('HGET', job_key(job.id), 'begun_deadline') then
      return 'expired', 'not_started_in_time', 'no node started the job within its ttl_s'
    end
    return 'expired', 'deadline_exceeded', 'the deadline passed before the job was done'
  end
  if lacks_reader(job, config, now) then return 'cancelled', 'unread', 'the job has no reader any more' end
end

-- Counts a loss of a job, and ends it as a dead letter after too many. Returns whether it has ended. A loss counts against
-- the job only if it made no progress since its last loss and now lost something else. `lost`: a node, or one life of the
-- ranks of a node.
local function end_if_lost_too_often(job, lost, config, now)
  local length = redis.call('LLEN', log_key(job.id))
  local losses, nodes = whole(job.losses) or 0, job.loss_nodes
  local entry = ' ' .. lost .. '@'
  if length - (whole(job.loss_mark) or 0) >= config.progress_chunks then
    losses, nodes = 0, entry .. now
  elseif not string.find(nodes, entry, 1, true) then
    losses, nodes = losses + 1, nodes .. entry .. now
  end
  count_event('losses')
  redis.call('HSET', job_key(job.id), 'losses', losses, 'loss_mark', length, 'loss_nodes', nodes)
  if losses < config.max_losses then return false end
  end_job(job, config, now, 'dead', 'node_lost', 'its nodes died ' .. losses .. ' times without progress', '')
  return true
end

function end_if_over(job, config, now)
  local state, code, message = why_over(job, config, now)
  if state then end_job(job, config, now, state, code, message, '') end
  return state ~= nil
end
