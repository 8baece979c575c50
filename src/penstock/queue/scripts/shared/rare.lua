-- Rare functions.
-- Keys, rates of background work, further attempts, and counts of tags. They are made at their first use, because a script
-- pays for each function that it makes.
rare = late(function(made)
  -- Jobs of a tenant with the same key share the limits that each of them states: the most that are queued or running, and
  -- the most that join the queue in a span of time. Those beyond them wait in P:awaiting:<tenant>:<key>. `key_terms` of a job:
  -- `<most jobs> <jobs in a span> <its ms>`, '-' for no limit.

  local CLASS_STEP = 1e13
  -- The end of a job looks at its key at once; this is for ends that Redis has lost.
  local LOOK_AGAIN_MS = 600000

  -- A job's place among those that wait: the most urgent level first, then the oldest.
  local function place_of(job) return tonumber(job.level) * CLASS_STEP + tonumber(job.submitted) end

  -- Whether no older and more urgent job waits in a lane.
  function made.is_first(lane, job)
    return redis.call('ZCOUNT', P .. ':awaiting:' .. lane, '-inf', place_of(job)) == 0
  end

  -- Lets a job wait in a lane, behind those. `wait`: ms until the next look at it, if it is the first.
  function made.await(lane, job, is_first, wait, now)
    redis.call('ZADD', P .. ':awaiting:' .. lane, place_of(job), job.id)
    if is_first then
      redis.call('ZADD', P .. ':awaiting', now + wait, lane)
    else
      redis.call('ZADD', P .. ':awaiting', 'NX', now + wait, lane)
    end
  end

  local function name_of(job) return job.tenant .. ':' .. job.key end

  -- Ms for which a job must wait for its key; 0 for none.
  local function wait_for_key(job, now)
    local name = name_of(job)
    local most, num, span = string.match(job.key_terms or '', '^(%S+) (%S+) (%S+)$')
    most, num, span = whole(most), whole(num), whole(span)
    if most and redis.call('SCARD', P .. ':keyed:' .. name) >= most then return LOOK_AGAIN_MS end
    local oldest = num and num > 0 and span and whole(redis.call('LINDEX', P .. ':paced:' .. name, num - 1))
    return oldest and math.max(0, oldest + span - now) or 0
  end

  local function take_place(job, now)
    local name = name_of(job)
    local num, span = string.match(job.key_terms or '', '^%S+ (%d+) (%d+)$')
    redis.call('SADD', P .. ':keyed:' .. name, job.id)
    if num then
      redis.call('LPUSH', P .. ':paced:' .. name, now)
      redis.call('LTRIM', P .. ':paced:' .. name, 0, num - 1)
      redis.call('PEXPIRE', P .. ':paced:' .. name, span)
    end
  end

  -- Whether a job with a key may join the queue now. If not, it waits.
  function made.admits(job, now)
    local name = name_of(job)
    if redis.call('SISMEMBER', P .. ':keyed:' .. name, job.id) == 1 then return true end
    redis.call('SADD', P .. ':keys:' .. job.tenant, job.key)
    local is_first = made.is_first(name, job)
    local wait = is_first and wait_for_key(job, now) or LOOK_AGAIN_MS
    if wait == 0 then
      take_place(job, now)
      return true
    end
    made.await(name, job, is_first, wait, now)
    return false
  end

  -- Gives back the place of a job that ends or waits again, and looks at the jobs behind it.
  function made.give_up(job, now)
    job.key = redis.call('HGET', job_key(job.id), 'key')
    if not job.key then return end
    local name = name_of(job)
    redis.call('SREM', P .. ':keyed:' .. name, job.id)
    if redis.call('ZADD', P .. ':awaiting', 'XX', 'CH', now, name) == 1 then ring_doorbell(0) end
    if redis.call('EXISTS', P .. ':keyed:' .. name, P .. ':awaiting:' .. name) == 0 then
      redis.call('SREM', P .. ':keys:' .. job.tenant, job.key)
    end
  end

  -- Queues the waiting jobs of `<tenant>:<key>` as far as its limits allow.
  function made.release_key(name, tenant, config, now)
    for _ = 1, MAX_DELAYED do
      local id = redis.call('ZRANGE', P .. ':awaiting:' .. name, 0, 0)[1]
      if not id then
        redis.call('ZREM', P .. ':awaiting', name)
        return
      end
      local job = listed_job(id, nil, {state = 'queued', tenant = tenant, entry = DELAYED})
      local is_waiting = job and not (job.problem and end_if_over(job, config, now))
      local wait = is_waiting and token_limit.read_terms(job).key and wait_for_key(job, now) or 0
      if wait > 0 then
        redis.call('ZADD', P .. ':awaiting', now + wait, name)
        return
      end
      redis.call('ZREM', P .. ':awaiting:' .. name, id)
      if is_waiting then
        if job.key then take_place(job, now) end
        if token_limit.admits_job(job, now) then token_limit.queue_late(job, now) end
      end
    end
  end

  -- Counts a job for the rates of its tenant that it waits for: `to_pay` is `<ms per job> <ms per token> <tokens> <burst in
  -- ms>`, '-' for no limit. Returns 0, or the ms until they allow it. Chats are refused where a burst is used up. So waiting
  -- work uses half of it.
  function made.pay(job, now)
    local PART_OF_BURST = 0.5
    local per_job, per_token, tokens, burst_ms = string.match(job.to_pay, '^(%S+) (%S+) (%d+) (%d+)$')
    local key, fields, latest = P .. ':rate:' .. job.tenant, {}, now
    local found = redis.call('HMGET', key, 'jobs', 'ms_per_job', 'tokens', 'ms_per_token')
    for at, unit in ipairs({{'jobs', per_job, 1}, {'tokens', per_token, tonumber(tokens or 0)}}) do
      local name, ms, amount = unit[1], tonumber(unit[2] or ''), unit[3]
      local due, stated = found[2 * at - 1], found[2 * at]
      if ms and ms > 0 then
        local later, wait = next_due(now, burst_ms * PART_OF_BURST, amount, ms, due, stated)
        if not later then return math.max(1, math.ceil(wait)) end
        for _, value in ipairs({name, later, name == 'jobs' and 'ms_per_job' or 'ms_per_token', ms}) do
          fields[#fields + 1] = value
        end
        due = later
      end
      latest = math.max(latest, finite(due))
    end
    if fields[1] then
      redis.call('HSET', key, unpack(fields))
      redis.call('PEXPIRE', key, math.ceil(latest - now) + 1)
    end
    job.to_pay = nil
    if redis.call('HDEL', job_key(job.id), 'to_pay') == 1 and tonumber(per_token or '') then
      redis.call('HSET', job_key(job.id), 'charged', tokens)
    end
    return 0
  end

  -- Moves an open job that is in no queue out of it until a time, in ms. From then on it counts as submitted. Its tokens stay
  -- charged, and no longer count as those that it may use in this minute.
  function made.postpone(job, at, now)
    if not redis.call('HGET', job_key(job.id), 'accepted') then
      redis.call('HSET', job_key(job.id), 'accepted', job.submitted)
    end
    if redis.call('HGET', job_key(job.id), 'may_use') then token_limit.settle_tokens(job, 0, now) end
    made.give_up(job, now)
    redis.call('HDEL', job_key(job.id), 'to_charge')
    job.entry, job.submitted = DELAYED, at
    redis.call('HSET', job_key(job.id), 'entry', DELAYED, 'submitted', at)
    delay_job(job)
    note_due(job)
  end

  -- `tag`: `<tenant>:<tag>`.
  local function counts_key(tag) return P .. ':tag_counts:' .. tag end
  local function is_custom(tag) return string.sub(tag, 1, 1) == '#' end

  -- Counts a tenant's jobs of these tags, as long as one of these is listed: `<level>`, those that were accepted, and
  -- `<state>:<level>`, those that have ended.
  function made.count_tags(tenant, tags, field, by)
    for tag in string.gmatch(tags, '%S+') do
      if not is_custom(tag) then redis.call('HINCRBY', counts_key(tenant .. ':' .. tag), field, by) end
    end
  end

  -- Counts an ended job for its tags. `recent`: the ends since `begun`, each of which counts e times less after RATE_MS. `at`:
  -- when the last one came.
  function made.end_tags(job, state, now)
    local RATE_MS, FEW = 60000, 0.05
    made.count_tags(job.tenant, job.tags, state .. ':' .. job.level, 1)
    for tag in string.gmatch(job.tags, '%S+') do
      if not is_custom(tag) then
        local key = counts_key(job.tenant .. ':' .. tag)
        local begun, at, recent = unpack(redis.call('HMGET', key, 'begun', 'at', 'recent'))
        recent = finite(recent) * math.exp(math.min(0, finite(at) - now) / RATE_MS)
        -- An end after a long pause begins anew, and does not count itself.
        if not begun or recent < FEW and now - finite(at) > RATE_MS then begun, recent = now, -1 end
        redis.call('HSET', key, 'begun', begun, 'at', now, 'recent', string.format('%.4f', recent + 1))
      end
    end
  end

  -- Removes a job from the sets of these tags. The last one takes the counts with it.
  function made.untag(tenant, tags, id)
    for tag in string.gmatch(tags, '%S+') do
      local key = P .. ':tagged:' .. tenant .. ':' .. tag
      redis.call('ZREM', key, id)
      if redis.call('EXISTS', key) == 0 then redis.call('DEL', counts_key(tenant .. ':' .. tag)) end
    end
  end

  -- How often a job may be tried, and the mean ms before its second attempt: its own terms, or else the pool's.
  function made.terms_of(retry)
    local DEFAULT_PAUSE_MS = 1000
    local most, pause = string.match(retry or '', '^(%S+) (%S+)$')
    local of_pool = redis.call('HMGET', KEYS[1], 'max_attempts', 'retry_backoff_ms')
    return whole(most) or whole(of_pool[1]) or 1, whole(pause) or whole(of_pool[2]) or DEFAULT_PAUSE_MS
  end

  -- The number of a job's present attempt, and the ms before the next one; nil if this was the last one. The pause doubles with
  -- each attempt, and is chosen between half and one and a half of that. A lease has random digits.
  function made.next_attempt(job, now)
    local MAX_PAUSE_MS = 3600000
    local retry, number = unpack(redis.call('HMGET', job_key(job.id), 'retry', 'attempts'))
    local most, mean = made.terms_of(retry)
    number = whole(number) or 1
    if number >= most then return nil end
    local share = tonumber(string.match(job.lease, ':(%x%x%x%x)') or '8000', 16) / 65535
    local pause = math.floor(math.min(MAX_PAUSE_MS, mean * 2 ^ (number - 1)) * (0.5 + share))
    local deadline = whole(redis.call('HGET', job_key(job.id), 'deadline') or '')
    if deadline and now + pause >= deadline then return nil end
    return number, pause
  end

  -- Submits the job that takes the place of a refused one, `successor` (its id and its request): with the same terms, as another
  -- attempt, and with a reader again only once one attaches.
  function made.submit_successor(old, successor, number, pause, now)
    local COPIED = {'deadline', 'needs_reader', 'channel', 'tenant', 'level', 'n', 'cost', 'weight', 'body', 'output',
      'memory_percent', 'account', 'limits', 'max_wait', 'in_feed', 'webhooks', 'model', 'words', 'ms_per_token', 'may_use',
      'minute_tokens', 'retry', 'key', 'key_terms', 'tag1', 'tag2', 'tag3', 'tag4', 'custom', 'extra', 'submitted',
      'accepted'}
    local id, request = unpack(successor)
    local job, fields = {id = id}, {}
    for at, value in ipairs(redis.call('HMGET', job_key(old.id), unpack(COPIED))) do
      if value then job[COPIED[at]] = value end
    end
    job.state, job.node, job.lease, job.first, job.cancel, job.entry = 'queued', '', '', '', '', DELAYED
    job.unread, job.inboxes, job.losses, job.preemptions, job.idem = channels.is(job.channel) and '' or now, '', 0, 0, ''
    job.held = #request + RECORD_BYTES + (whole(job.extra) or 0)
    job.accepted, job.attempts, job.retry_of = job.accepted or job.submitted, number + 1, string.match(old.id, '[^.]*$')
    if job.ms_per_token then job.charged = 0 end
    if pause > 0 then job.submitted = now + pause end
    for name, value in pairs(job) do
      if name ~= 'id' then fields[#fields + 1], fields[#fields + 2] = name, value end
    end
    sure('SET', P .. ':request:' .. id, request)
    redis.call('HSET', job_key(id), unpack(fields))
    redis.call('SADD', P .. ':open', id)
    redis.call('SADD', P .. ':tenant:' .. job.tenant .. ':open', id)
    redis.call('ZADD', lists.key(pause > 0 and 'scheduled' or 'queued', job.tenant), 0, id)
    for _, tag in ipairs(lists.read_tags(id)) do redis.call('ZADD', P .. ':tagged:' .. job.tenant .. ':' .. tag, 0, id) end
    made.count_tags(job.tenant, lists.tags_of(id, job.extra), job.level, 1)
    local metadata = job.extra and redis.call('GET', P .. ':metadata:' .. old.id)
    if metadata then sure('SET', P .. ':metadata:' .. id, metadata) end
    count_bytes(P .. ':stored', job.tenant, job.held)
    count_event('submitted')
    count_event('output_rejected')
    note_due(job)
    if pause > 0 then
      delay_job(job)
    elseif admits_job(token_limit.read_terms(job), now) then
      token_limit.queue_late(job, job.submitted)
    end
  end

end)
