-- Virtual time.
-- Virtual time of a class's tenants, in predicted KV-token-ms ÷ weight (policy_state.py, VirtualTimes). It is kept
-- under every policy, so that a pool may change its policy while jobs wait.

local function virtual_time_key(job) return P .. ':virtual_time:' .. job.level end
local function weight_of(job) return tonumber(job.weight) or 1 end

local share_window
do
  local length, window

  -- The length of a window, in ms, and the number of the current one. They stay the same during a script.
  function share_window()
    if not length then
      length = whole(redis.call('HGET', KEYS[1], 'share_window_ms')) or SHARE_WINDOW_MS
      window = math.floor(clock() / length)
    end
    return length, window
  end
end

local enter_tenant, leave_tenant_if_last, charge_tenants, correct_charge, correct_charges, virtual_time_of, charged_of
do
  -- Virtual times are below this. One that is not, such as infinity, would let all tenants wait that come after it.
  local MAX_TIME = 1e24

  -- A virtual time as Redis has it; `instead` for a damaged one.
  function virtual_time_of(text, instead)
    local time = tonumber(text or '')
    return time and time > -MAX_TIME and time < MAX_TIME and time or instead
  end

  local function debt_key(job) return P .. ':debt:' .. job.level end

  local clocks = {}

  -- The class's virtual clock: the highest virtual time at which a job started, plus 1 for each tenant that entered.
  local function virtual_clock(job)
    local level = tostring(job.level)
    clocks[level] = clocks[level] or virtual_time_of(redis.call('GET', P .. ':virtual_clock:' .. level), 0)
    return clocks[level]
  end

  local function set_clock(level, time)
    redis.call('SET', P .. ':virtual_clock:' .. level, time)
    clocks[tostring(level)] = time
  end

  function enter_tenant(job)
    if redis.call('ZSCORE', virtual_time_key(job), job.tenant) then return end
    local now = virtual_clock(job)
    local debt = virtual_time_of(redis.call('ZSCORE', debt_key(job), job.tenant), 0)
    redis.call('ZADD', virtual_time_key(job), math.max(debt, now), job.tenant)
    redis.call('ZREM', debt_key(job), job.tenant)
    set_clock(job.level, now + 1)
  end

  -- Remembers the virtual time of a tenant without queued jobs while it is ahead of the virtual clock.
  local function remember_debt(job, time)
    if time > virtual_clock(job) then
      add_entry(debt_key(job), time, job.tenant)
      if collected then collected.debts[debt_key(job)] = true else trim_to(debt_key(job), MAX_DEBTS) end
    else
      redis.call('ZREM', debt_key(job), job.tenant)
    end
  end

  function leave_tenant_if_last(job)
    if redis.call('EXISTS', queue_key(job), requeued_key(job)) > 0 then return end
    local time = redis.call('ZSCORE', virtual_time_key(job), job.tenant)
    redis.call('ZREM', virtual_time_key(job), job.tenant)
    if time then remember_debt(job, virtual_time_of(time, 0)) end
  end

  -- A tenant's use in this and the last window, over all classes, in KV-token-ms ÷ weight (policy_state.py, RecentUse).

  -- Adds a charge for foreground work. A refund (negative) is subtracted in the window of its charge, `since`. If that window
  -- is too old, the refund is dropped: in another window it would be a credit.
  local function note_use(job, amount, since)
    -- Background work fills idle capacity, so it costs its tenant no place in the order of foreground work.
    if tonumber(job.level) >= CLASSES then return end
    local tenant = job.tenant
    local length, window = share_window()
    if amount < 0 then
      since = whole(since) or 0
      if since < window - 1 then return end
      window = since
    end
    local whole = math.floor(math.max(-MAX_CHARGE, math.min(MAX_CHARGE, amount)) + 0.5)
    add_with_life(P .. ':recent_use:' .. window, 2 * length, tenant, whole)
  end

  -- Charges the tenants of jobs that are being taken. Must be called while the jobs are still queued.
  function charge_tenants(jobs)
    local charged, clocks = {}, {}
    for _, job in ipairs(jobs) do
      local level, name = job.level, job.level .. ':' .. job.tenant
      local of_tenant = charged[name]
      if not of_tenant then
        local time = redis.call('ZSCORE', virtual_time_key(job), job.tenant)
        of_tenant = {job = job, time = virtual_time_of(time, virtual_clock(job))}
        charged[name] = of_tenant
      end
      local clock_of_level = clocks[level] or {job = job, read = virtual_clock(job), time = 0}
      clocks[level] = clock_of_level
      clock_of_level.time = math.max(clock_of_level.time, of_tenant.time)
      of_tenant.time = of_tenant.time + job.charge
      note_use(job, job.charge)
    end
    for level, one in pairs(clocks) do
      if one.time > one.read then
        set_clock(level, one.time)
        redis.call('ZREMRANGEBYSCORE', debt_key(one.job), '-inf', one.time)
      end
    end
    for _, one in pairs(charged) do redis.call('ZADD', virtual_time_key(one.job), one.time, one.job.tenant) end
  end

  local function correct(level, tenant, by)
    local like = {level = level, tenant = tenant}
    if redis.call('ZSCORE', virtual_time_key(like), tenant) then
      redis.call('ZINCRBY', virtual_time_key(like), by, tenant)
    else
      remember_debt(like, virtual_time_of(redis.call('ZSCORE', debt_key(like), tenant), virtual_clock(like)) + by)
    end
  end

  -- What a take charged the job's tenant.
  function charged_of(job) return math.max(0, virtual_time_of(job.charge, 0)) end

  -- Corrects an earlier charge of a tenant by `by`; negative if the charge was too high.
  function correct_charge(job, by)
    note_use(job, by, job.window)
    if collected then
      collect_sum('charges', job.level, job.tenant, by)
    else
      correct(job.level, job.tenant, by)
    end
  end

  -- Writes the collected corrections, one for each tenant and level.
  function correct_charges()
    for level, tenants in pairs(collected.charges) do
      for tenant, by in pairs(tenants) do correct(level, tenant, by) end
    end
  end
end
