-- take: assign queued jobs to a node, in the order of the pool's policy, as far as they fit. policy.py implements the
-- same order in Python. A job's cost counts at most as the node's whole KV cache, so an empty node can take any job.
-- Tasks, such as tokenization, occupy no sequence and no KV cache. The walk takes them in the same order, whatever
-- capacity is left. Where it stops, because a job does not fit, the oldest other tasks follow: nothing that they need is
-- reserved for that job. `task_slots` alone limits them.
-- A burst is divided: from the second job on, or with `left_some` from the first one on, a take leaves other nodes their
-- share of what waits (*Shares of nodes*).
-- ARGV: node, msgpack of a map: call, nonce, revision, hold_ms, kv_tokens, slots, kv_total, slots_total, task_slots, held,
--   background_due, left_some
--   call: number of this take; repeating the last call gets the same answer. nonce: makes leases unique.
--   kv_tokens, slots: free KV tokens and sequence slots, a list by level. kv_total, slots_total: the node's whole capacity.
--   task_slots: tasks that the node can take. held: tenant → [KV tokens, sequences, weight] of the node's jobs, absent for
--   none.
--   background_due: whether background work had less than its share of the node's time lately; absent for false.
--   left_some: whether this node's last take left other nodes jobs that they may still take; absent for false.
--   hold_ms: expected time for which a KV token of cost is held. A tenant is charged cost × hold_ms ÷ weight.
-- Answer: {OK, {row…}, {depth0, … depth5}, again_in_ms, num_nodes, {{id, tenant, state, code} of an ended job, …}}
--   | {UNKNOWN_NODE} | {STALE}
--   row: {id, lease, losses, chunks, cost, deadline_in_ms, request, tenant, urgency, preemptions, weight, n, level,
--   waited_ms, taken_at}. urgency is the level that the job counts as. waited_ms: time since its submission. taken_at:
--   when this lease began. A request above MAX_REQUEST_BYTES is '' here; the node reads it separately.
--   depth: jobs still queued per level, without those that a pause holds back.
--   again_in_ms: when a job may become available, 0 if unknown.
--   STALE: a later take of this node was already answered.
--
-- Skipped: some jobs are not for the node that takes: those with tokens of another revision, those that it gave back lately
-- or whose adapter it lacks, and tasks while it has no free task slot. They do not count among the MAX_EXAMINED jobs of a
-- level. So jobs that old nodes gave back in a rolling upgrade do not keep new nodes from the jobs behind them. At most
-- MAX_SKIPPED jobs of a level are skipped. Under `fair` its tenants share this number evenly, so that none hides others.
--
-- Tasks: a task costs 1, plus 1 for each KiB of its prompt, which counts in its tenant's virtual time and is not corrected at
-- its end. A cost of zero would let a flood of tasks come first forever. The tasks behind the walk pass jobs that wait for
-- capacity and take none of it. Only an isolated job holds tasks back: beside it no task runs, and a node that is
-- reserved for it takes none.
--
-- Reservations: each node reserves capacity for at most one job, and at most one node does so for isolated jobs. A reservation
-- lasts a lease, so that the other nodes continue. No job is too large for all nodes: the nodes of a pool agree on the
-- longest context, and the engine can run the choices of a job one after another.
--
-- Shares of a full node (`held`): a tenant's share is its weight ÷ the weights of all tenants with jobs there. What it holds
-- is its part of the sequence slots or of the KV tokens, whichever is larger. A tenant's interactive jobs preempt no running
-- job of another tenant while it used more than the mean of all tenants with recent use.
local MAX_TAKEN, MAX_EXAMINED, MAX_SKIPPED, MAX_TENANTS, PAGE, MAX_REQUEST_BYTES = 128, 160, 512, 128, 32, 16384
local LEAST_URGENT = LEVELS - 1
-- A take adds background jobs up to this number of jobs, because a chat waits while the node prepares what it took.
local MAX_WITH_BACKGROUND = 32

local node, asked = ARGV[1], cmsgpack.unpack(ARGV[2])
local call, kv_tokens, slots, task_slots = asked.call, {}, {}, asked.task_slots
for level = 0, LEAST_URGENT do
  kv_tokens[level], slots[level] = asked.kv_tokens[level + 1], asked.slots[level + 1]
end
local kv_total, slots_total, revision, held_by_tenant = asked.kv_total, asked.slots_total, asked.revision, asked.held

local config = read_config()
local now = clock()
if not config or not redis.call('ZSCORE', P .. ':nodes', node) then return {'UNKNOWN_NODE'} end
local policy = config.policy
local num_held = redis.call('SCARD', P .. ':running:' .. node)
local num_nodes = redis.call('ZCARD', P .. ':nodes')

-- No paused job is handed out.
local paused = read_pauses()

-- How many jobs of paused tenants wait in a level. Of very many such tenants, the jobs of some count as not paused.
function paused.num_of_tenants(level)
  local MAX_COUNTED = 32
  local num_jobs, num_tenants = 0, 0
  for tenant in pairs(paused.tenants) do
    local of_tenant = {level = level, tenant = tenant}
    num_tenants = num_tenants + 1
    if num_tenants > MAX_COUNTED then break end
    num_jobs = num_jobs + redis.call('XLEN', queue_key(of_tenant)) + redis.call('ZCARD', requeued_key(of_tenant))
  end
  return num_jobs
end

-- The levels in which this call found that no job waits. It adds none while it looks.
local empty_levels = {}

local function depths()
  local depth = {}
  for level = 0, LEAST_URGENT do
    local is_paused = paused.of_pool or paused.levels[tostring(level)]
    local num_waiting = (is_paused or empty_levels[level]) and 0 or redis.call('ZCARD', P .. ':waiting:' .. level)
    depth[level + 1] = num_waiting > 0 and math.max(0, num_waiting - paused.num_of_tenants(level)) or 0
  end
  return depth
end

-- The requests of jobs up to MAX_REQUEST_BYTES, by id. `held` bounds the size of most of them.
local function requests_of(jobs)
  local keys, ids, requests = {}, {}, {}
  for _, job in ipairs(jobs) do
    local key = P .. ':request:' .. job.id
    if (whole(job.held) or MAX_NUMBER) <= MAX_REQUEST_BYTES or redis.call('STRLEN', key) <= MAX_REQUEST_BYTES then
      keys[#keys + 1], ids[#ids + 1] = key, job.id
    end
  end
  if #keys == 0 then return requests end
  for at, request in ipairs(redis.call('MGET', unpack(keys))) do requests[ids[at]] = request end
  return requests
end

local function row(job, taken_at, request)
  -- While the time is in doubt, a deadline may only seem to have passed.
  local least = pool_time.is_in_doubt() and config.lease_ms or 1
  local deadline_in = job.deadline == '' and 0 or math.max(least, tonumber(job.deadline) - now)
  -- A job that no node had before has no log.
  local num_chunks = job.revision == '' and 0 or redis.call('LLEN', log_key(job.id))
  return {job.id, job.lease, tonumber(job.losses), num_chunks, tonumber(job.cost), deadline_in,
    request or '', job.tenant, finite(job.urgency), tonumber(job.preemptions), tostring(weight_of(job)),
    tonumber(job.n), tonumber(job.level), math.max(0, now - tonumber(job.submitted)), taken_at}
end

-- A repeated call gets the same answer, without jobs that the node no longer holds.
local last_take_key = P .. ':last_take:' .. node
local _, last = pcall(cmsgpack.unpack, redis.call('GET', last_take_key) or '')
-- A damaged answer counts as none: a heartbeat returns the jobs whose take was not answered.
if type(last) == 'table' and type(last.call) == 'number' and type(last.ids) == 'table' and type(last.leases) == 'table' then
  if call < last.call then return {'STALE'} end
  if call == last.call then
    local rows = {}
    for i, id in ipairs(last.ids) do
      local job = mended(read_job(id))
      if job and holds(job, node, last.leases[i]) then
        local taken, retaken = unpack(redis.call('HMGET', job_key(id), 'taken', 'retaken'))
        rows[#rows + 1] = row(job, whole(retaken) or whole(taken) or now, requests_of({job})[id])
      end
    end
    return {'OK', rows, depths(), 0, num_nodes}
  end
end

if paused.of_pool then return {'OK', {}, depths(), 0, num_nodes} end

-- Eligibility --------------------------------------------------------------------------------------

-- The fields that inspecting, taking and ending a job need. Reading a field that a new job lacks takes as long as
-- reading ten fields that it has.
local EXAMINED_FIELDS = {'state', 'tenant', 'level', 'n', 'cost', 'entry', 'submitted', 'losses', 'preemptions',
  'weight', 'deadline', 'needs_reader', 'unread', 'inboxes', 'channel', 'cancel', 'first', 'held', 'output', 'avoid', 'revision',
  'memory_percent'}

-- `tried` holds the ids of jobs that this call must not look at again.
local tried, over, gone, again_in = {}, {}, {}, 0

local function look_again_in(ms)
  local MAX_MS = 3600000
  again_in = math.min(again_in == 0 and MAX_MS or again_in, ms)
end

if not pool_time.is_in_doubt() then
  local next_up = redis.call('ZRANGE', P .. ':delayed', 0, 0, 'WITHSCORES')[2]
  if next_up then
    release_delayed(config, now)
    if tonumber(next_up) > now then look_again_in(tonumber(next_up) - now) end
  end
  next_up = release_waiting(config, now)
  if next_up then look_again_in(math.max(1, next_up - now)) end
end

local is_for_us
do
  -- A job with tokens in its log may continue only on a node with the same model revision.
  local function is_foreign(job)
    return job.revision ~= '' and job.revision ~= revision and redis.call('LLEN', log_key(job.id)) > 0
  end

  -- The jobs that a node skips have few different revisions and lists of nodes without an adapter. So the answers for
  -- these are cached during one script.
  local live_revisions, elsewhere = {}, {}

  local function has_live_revision(job)
    if not pool_time.has_heartbeats() then return true end
    if live_revisions[job.revision] == nil then
      local last = redis.call('ZSCORE', P .. ':revisions', job.revision)
      live_revisions[job.revision] = last and now - tonumber(last) < config.lease_ms or false
    end
    return live_revisions[job.revision]
  end

  local function avoided_until(job)
    return math.min(whole(redis.call('HGET', job_key(job.id), 'avoid_until')) or 0, now + config.avoid_ms)
  end

  -- Whether this node gave the job back because it cannot run it, and another node may be able to.
  local function is_for_others(job)
    local lacks = job.avoid ~= '' and redis.call('HGET', job_key(job.id), 'lacks')
    if not lacks or not is_listed(lacks, node) then return false end
    local name = (redis.call('LLEN', log_key(job.id)) > 0 and job.revision or '') .. ' ' .. lacks
    if elsewhere[name] == nil then elsewhere[name] = may_be_elsewhere(job, lacks) end
    return elsewhere[name]
  end

  -- Whether this node may take the job at all. Also records jobs that must be ended, and when to look again.
  function is_for_us(job)
    if why_over(job, config, now) then
      over[#over + 1], tried[job.id] = job, true
    elseif paused.is_any and paused.has(job) then
      return false
    elseif is_foreign(job) then
      if not has_live_revision(job) then gone[#gone + 1], tried[job.id] = job, true end
    elseif job.avoid == node and avoided_until(job) > now then
      look_again_in(avoided_until(job) - now)
    elseif not is_for_others(job) then
      return true
    end
    return false
  end
end

-- Whether the job is a task and the node can take no more tasks. The record of a job that is skipped is not read for it.
local function has_no_slot_for(id) return task_slots == 0 and redis.call('ZSCORE', P .. ':tasks', id) end

-- Ids of jobs whose records say that a list should not have them, each with what the list tells.
local strays = {}

local function new_count(max_count) return {count = 0, max_count = max_count} end

-- Returns an iterator over the eligible jobs among the ids that `read_page` returns. `examined` bounds the jobs that it
-- returns or that this call ends. `skipped` bounds the others, which stay queued for other nodes or a later call. `known`:
-- what the list tells of its jobs.
local function reader(examined, skipped, known, read_page)
  known.state = 'queued'
  local ids, at = {}, 1
  return function()
    while ids and examined.count < examined.max_count and skipped.count < skipped.max_count do
      if at > #ids then
        ids, at = read_page(), 1
        if #ids == 0 then
          ids = nil
          return nil
        end
      end
      local id = ids[at]
      local has_slot = not has_no_slot_for(id)
      local job = has_slot and listed_job(id, EXAMINED_FIELDS, known)
      if has_slot and not job and #strays < PAGE then strays[#strays + 1] = {id = id, known = known} end
      local is_eligible = job and is_for_us(job)
      local counted = (is_eligible or tried[id]) and examined or skipped
      at, counted.count = at + 1, counted.count + 1
      if is_eligible then return job end
    end
  end
end

local function reader_of_index(examined, skipped, known, key)
  local offset = -PAGE
  return reader(examined, skipped, known, function()
    offset = offset + PAGE
    return redis.call('ZRANGE', key, offset, offset + PAGE - 1)
  end)
end

local function reader_of_stream(examined, skipped, known, key)
  -- Of many tenants, a take gets few jobs each. So the first page is short, and each further one twice as long.
  local FIRST_PAGE = 2
  local from, count = '-', FIRST_PAGE
  return reader(examined, skipped, known, function()
    local ids = {}
    count = math.min(2 * count, PAGE)
    for i, entry in ipairs(redis.call('XRANGE', key, from, '+', 'COUNT', count)) do
      ids[i], from = entry[2][2] or '', '(' .. entry[1]
    end
    return ids
  end)
end

-- Order --------------------------------------------------------------------------------------------
-- The queue of a level is {head, next, charge}. head: the job whose age raises the level, for foreground work. next(may):
-- returns the next job; under fair and round_robin, the next
-- job of a tenant for which may(tenant) holds. charge(job, by): called for a
-- taken job. A queue returns no job of `tried`.

-- Shares (policy_state.py, Shares). goes_first: whether a tenant recently used no more than the mean of all tenants
-- with queued jobs. may_displace: the same, with the mean over these and all tenants with recent use. Each job that is
-- taken changes both.
local read_uses, goes_first, may_displace, note_taken
do
  local uses, waiters, num_waiters, num_users = nil, {}, 0, 0
  local use_of_waiters, use_of_all = 0, 0

  local function use_of(tenant) return math.max(0, uses[tenant] or 0) end

  function read_uses()
    uses = {}
    local _, window = share_window()
    local this = redis.call('HGETALL', P .. ':recent_use:' .. window)
    local last = redis.call('HGETALL', P .. ':recent_use:' .. (window - 1))
    for _, found in ipairs({this, last}) do
      for at = 1, #found, 2 do uses[found[at]] = (uses[found[at]] or 0) + finite(found[at + 1]) end
    end
    for _, name in ipairs(redis.call('HKEYS', P .. ':queued')) do
      waiters[name], num_waiters, use_of_waiters = true, num_waiters + 1, use_of_waiters + use_of(name)
    end
    num_users = num_waiters
    for name in pairs(uses) do
      use_of_all = use_of_all + use_of(name)
      if not waiters[name] and use_of(name) > 0 then num_users = num_users + 1 end
    end
  end

  function goes_first(tenant) return not uses or use_of(tenant) * num_waiters <= use_of_waiters end
  function may_displace(tenant) return not uses or use_of(tenant) * num_users <= use_of_all end

  function note_taken(job, charge)
    if not uses or is_background(job) then return end
    local tenant = job.tenant
    local before = use_of(tenant)
    uses[tenant] = (uses[tenant] or 0) + math.floor(math.min(MAX_CHARGE, charge) + 0.5)
    local by = use_of(tenant) - before
    use_of_waiters, use_of_all = use_of_waiters + by, use_of_all + by
  end
end

local function any_tenant() return true end

local QUEUES
do
  -- One tenant's jobs, oldest first, merged from its requeued jobs and its stream.
  local function reader_of_tenant(examined, skipped, level, tenant)
    local known = {level = tostring(level), tenant = tenant}
    local requeued = reader_of_index(examined, skipped, known, requeued_key(known))
    local fresh = reader_of_stream(examined, skipped, known, queue_key(known))
    local one, other
    return function()
      one, other = one or requeued(), other or fresh()
      local job = one
      if one and (not other or is_older(one, other)) then
        one = nil
      else
        job, other = other, nil
      end
      return job
    end
  end

  -- The tenants with queued jobs that a call looks at, beside the paused ones, and their virtual times, as they were when
  -- the call first looked at the level.
  local tenants_of = {}
  function paused.tenants_of(level)
    local last = MAX_TENANTS + paused.num_tenants - 1
    tenants_of[level] = tenants_of[level] or redis.call('ZRANGE', P .. ':virtual_time:' .. level, 0, last, 'WITHSCORES')
    return tenants_of[level]
  end

  -- A level's jobs, oldest first. While tenants are paused, they are merged from the queues of the others, because a
  -- call skips a limited number of jobs.
  function paused.reader_by_age(examined, level)
    if paused.levels[tostring(level)] then return function() end end
    -- A pool whose index of a level is lost still has the queues of its tenants.
    if not next(paused.tenants) then
      empty_levels[level] = redis.call('ZCARD', P .. ':waiting:' .. level) == 0
      if not empty_levels[level] then
        return reader_of_index(examined, new_count(MAX_SKIPPED), {level = tostring(level)}, P .. ':waiting:' .. level)
      end
    end
    local readers, heads = {}, {}
    local found = paused.tenants_of(level)
    for at = 1, #found, 2 do
      if not paused.tenants[found[at]] then
        readers[#readers + 1] = reader_of_tenant(examined, new_count(MAX_SKIPPED), level, found[at])
      end
    end
    return function()
      local best
      for at, read in ipairs(readers) do
        if heads[at] == nil then heads[at] = read() or false end
        if heads[at] and (not best or is_older(heads[at], heads[best])) then best = at end
      end
      if not best then return nil end
      local job = heads[best]
      heads[best] = nil
      return job
    end
  end

  local function queue_by_age(level)
    local read = paused.reader_by_age(new_count(MAX_EXAMINED), level)
    local head = read()
    local is_first = true
    return {head = head, next = function()
      if is_first then
        is_first = false
        if head and not tried[head.id] then return head end
      end
      return read()
    end}
  end

  -- A job's cost without the output tokens that its log has. The position of its last chunk tells their number, for each
  -- choice. At least 1: a job that outgrew its prediction comes first.
  local function remaining_cost(job)
    local last = job.first ~= '' and redis.call('LRANGE', log_key(job.id), -1, -1)[1]
    local ok, chunk = pcall(cmsgpack.unpack, last or '')
    local has_tokens = ok and type(chunk) == 'table' and type(chunk.p) == 'number' and type(chunk.t) == 'table'
    local done = has_tokens and #chunk.t > 0 and chunk.p + #chunk.t or 0
    return math.max(1, tonumber(job.cost) - done * tonumber(job.n))
  end

  local function queue_by_cost(level)
    local MAX_SORTED = 64
    local read = paused.reader_by_age(new_count(MAX_SORTED), level)
    local jobs = {}
    for job in read do
      job.remaining = remaining_cost(job)
      jobs[#jobs + 1] = job
    end
    local head, at = jobs[1], 0
    table.sort(jobs, function(one, other)
      if one.remaining ~= other.remaining then return one.remaining < other.remaining end
      return is_older(one, other)
    end)
    return {head = head, next = function()
      repeat at = at + 1 until not jobs[at] or not tried[jobs[at].id]
      return jobs[at]
    end}
  end

  local function queue_by_virtual_time(level)
    local examined, tenants = new_count(MAX_EXAMINED), {}
    local found = paused.tenants_of(level)
    if not found[1] then return queue_by_age(level) end
    for at = 1, #found, 2 do
      local is_paused = paused.levels[tostring(level)] or paused.tenants[found[at]]
      if not is_paused then tenants[#tenants + 1] = {name = found[at], time = virtual_time_of(found[at + 1], 0)} end
    end

    -- Each tenant has its share of the jobs that may be skipped. So a tenant's jobs for other nodes hide no other tenant's.
    local max_skipped = math.ceil(MAX_SKIPPED / math.max(1, #tenants))

    -- The oldest remaining job of a tenant, or nil.
    local function oldest_of(tenant)
      tenant.read = tenant.read or reader_of_tenant(examined, new_count(max_skipped), level, tenant.name)
      while not tenant.job or tried[tenant.job.id] do
        tenant.job = tenant.read()
        if not tenant.job then return nil end
      end
      return tenant.job
    end

    -- The tenants stay in the order of their virtual times, and of their names at the same time.
    local function next_tenant(may)
      for _, tenant in ipairs(tenants) do
        if may(tenant.name) and oldest_of(tenant) then return tenant end
      end
    end

    local function is_behind(one, other)
      return one.time > other.time or (one.time == other.time and one.name > other.name)
    end

    local function move_back(at)
      while tenants[at + 1] and is_behind(tenants[at], tenants[at + 1]) do
        tenants[at], tenants[at + 1] = tenants[at + 1], tenants[at]
        at = at + 1
      end
    end

    local first = next_tenant(any_tenant)
    return {
      head = first and first.job,
      next = function(may)
        local tenant = next_tenant(may)
        local job = tenant and tenant.job
        if tenant then tenant.job = nil end
        return job
      end,
      charge = function(job, by)
        for at, tenant in ipairs(tenants) do
          if tenant.name == job.tenant then
            tenant.time = tenant.time + by
            move_back(at)
            return
          end
        end
      end,
    }
  end

  QUEUES = {priority = queue_by_age, sjf = queue_by_cost, fair = queue_by_virtual_time, round_robin = queue_by_virtual_time}
end
local queues, taken, num_passed = {}, {}, 0

-- An isolated job becomes a dead letter at its next loss: it, or a job that ran beside it, killed its nodes.
local function is_isolated(job)
  local losses = whole(job.losses) or 0
  if losses == 0 or losses < config.max_losses - 1 then return false end
  local mark = whole(redis.call('HGET', job_key(job.id), 'loss_mark')) or 0
  return redis.call('LLEN', log_key(job.id)) - mark < config.progress_chunks
end

-- Whether the node runs an isolated job. Such a job runs alone until it ends or makes progress.
local function runs_isolated()
  if num_held ~= 1 then return false end
  local job = read_job(redis.call('SRANDMEMBER', P .. ':running:' .. node), {'state', 'losses'})
  return job and is_isolated(job)
end

-- P:reservations records, per node, the job for which it keeps capacity free, and until when. All isolated jobs share
-- one name, so that only one node at a time idles for them.
local ISOLATED = 'isolated'
local reserves_for, reserved_elsewhere

local function is_reserved_elsewhere(name)
  if not reserved_elsewhere then
    reserved_elsewhere = {}
    local found = redis.call('HGETALL', P .. ':reservations')
    for at = 1, #found, 2 do
      local reserved, till = string.match(found[at + 1], '^(%S+) (%d+)$')
      local is_open = whole(till) and whole(till) > now and whole(till) <= now + config.lease_ms
      if found[at] ~= node and is_open then reserved_elsewhere[reserved] = true end
    end
  end
  return reserved_elsewhere[name]
end

-- Handles a job that does not fit; returns whether the walk continues. Younger jobs may overtake it until it is
-- bypass_ms old. From then on this node keeps capacity free for it, unless another node already does.
local function pass(job, name)
  local MAX_PASSED = 16
  if now - tonumber(job.submitted) < config.bypass_ms then
    num_passed = num_passed + 1
    return num_passed < MAX_PASSED
  end
  if is_reserved_elsewhere(name) then return true end
  reserves_for = name
  return false
end

-- Shares of nodes -----------------------------------------------------------------------------------
-- The take that comes first would get a whole burst. So a take of several jobs leaves other live nodes their share of what
-- waits: what nodes hold and get is divided by their paces, as P:paces has them. What nodes hold is counted now. More work
-- than all nodes have room for is not divided. A node may have no use for what is left for it, so P:left notes the time
-- and the first job that was left: while it still waits LEFT_MS later, takes leave nothing.

local shares = {num_taken = 0}
local sharing = late(function(made)
  local MAX_NODES, LEFT_MS, LIKE_MEAN, UNLIMITED = 32, 50, 0.2, math.huge
  -- Under whether the job has begun: how many jobs this take may have, and the nodes for which it leaves others.
  local limits, others = {}, {}

  -- How many jobs wait for an engine in what is not paused.
  local function num_waiting()
    local count = -redis.call('ZCARD', P .. ':tasks')
    for level = 0, LEAST_URGENT do
      if not paused.levels[tostring(level)] then count = count + redis.call('ZCARD', P .. ':waiting:' .. level) end
    end
    return count
  end

  -- The other live nodes that take jobs and have room for jobs like this one, and this node, which is the last.
  local function nodes_for(job, has_begun)
    -- A heartbeat comes every sixth of a lease.
    local silent_since = now - config.lease_ms / 3
    local names = redis.call('ZREVRANGEBYSCORE', P .. ':nodes', '+inf', silent_since, 'LIMIT', 0, MAX_NODES)
    local nodes, sum, num_known = {}, 0, 0
    local function note_node(name, pace, max_num, kv_tokens)
      local most = math.min(max_num, math.floor(kv_tokens / math.max(1, tonumber(job.cost))))
      local held = name == node and num_held or redis.call('SCARD', P .. ':running:' .. name)
      if pace > 0 then sum, num_known = sum + pace, num_known + 1 end
      if name == node or held < most then nodes[#nodes + 1] = {name = name, pace = pace, held = held, room = most - held} end
    end
    local found, own_pace = redis.call('HMGET', P .. ':paces', node, unpack(names)), 0
    for at, text in ipairs(found) do
      local pace, max_num, kv_tokens, of = string.match(text or '', '^(%S+) (%d+) (%d+) (.*)$')
      if at == 1 then
        own_pace = finite(pace)
      elseif max_num and names[at - 1] ~= node and not (has_begun and of ~= revision) then
        note_node(names[at - 1], math.max(0, finite(pace)), tonumber(max_num), tonumber(kv_tokens))
      end
    end
    if #nodes == 0 then return nodes end
    note_node(node, own_pace, slots_total, kv_total)
    -- A node that has not run yet counts as one of the mean pace. So does one that differs little from it, as paces of equal
    -- nodes do: two shares that are rounded up would leave 5 of 20 jobs to the last of three nodes.
    local mean = num_known > 0 and sum / num_known or 1
    for _, one in ipairs(nodes) do
      if one.pace <= 0 or math.abs(one.pace - mean) <= LIKE_MEAN * mean then one.pace = mean end
    end
    return nodes
  end

  -- How many jobs this take may have, and the nodes that then get some.
  local function divide(job, has_begun)
    local nodes = nodes_for(job, has_begun)
    if #nodes < 2 then return UNLIMITED end
    local num_jobs, room, own, pace = num_waiting(), 0, nodes[#nodes], 0
    for _, one in ipairs(nodes) do room, pace = room + one.room, pace + one.pace end
    if num_jobs >= room then return UNLIMITED end
    -- Each node gets what it lacks of its part of all jobs. One that holds more already gets none, and a node at most its room.
    local total = num_jobs
    for _, one in ipairs(nodes) do total = total + one.held end
    local function part_of(one) return total / pace * one.pace - one.held end
    local function give_fixed(fixed)
      repeat
        local is_done = true
        for _, one in ipairs(nodes) do
          local gets = not one.gets and fixed(one)
          if gets then
            one.gets, is_done = gets, false
            total, pace = total - one.held - gets, pace - one.pace
          end
        end
      until is_done
    end
    give_fixed(function(one) return part_of(one) < 0 and 0 end)
    give_fixed(function(one) return part_of(one) > one.room and one.room end)
    for _, one in ipairs(nodes) do
      one.gets = one.gets or part_of(one)
      if one ~= own and one.gets > 0 then others[#others + 1] = one.name end
    end
    -- Paces of equal nodes differ a little: 10.2 of 20 jobs are 10.
    return math.ceil(own.gets - 0.25)
  end

  -- Whether what was left earlier still waits, so that this take may have it. Else notes that it leaves the job.
  local function is_overdue(job)
    local at, id = string.match(redis.call('GET', P .. ':left') or '', '^(%d+) (%S+)$')
    local since, state, by = whole(at) or now, unpack(id and redis.call('HMGET', job_key(id), 'state', 'node') or {})
    local waited_ms = now - since
    if state == 'queued' and waited_ms >= LEFT_MS then return true end
    -- If this node took the job itself, the next one has been left for as long.
    if waited_ms < 0 or waited_ms >= LEFT_MS or (state ~= 'queued' and by ~= node) then since = now end
    shares.left = since .. ' ' .. job.id
    look_again_in(LEFT_MS - now + since)
    return false
  end

  function made.leaves(job)
    -- Of a job that some node lacks something for, this take cannot tell which other node could run it.
    if job.avoid ~= '' and redis.call('HGET', job_key(job.id), 'lacks') then return false end
    local has_begun = job.revision ~= ''
    limits[has_begun] = limits[has_begun] or divide(job, has_begun)
    if shares.num_taken < limits[has_begun] then return false end
    if shares.is_over == nil then shares.is_over = not is_overdue(job) end
    return shares.is_over
  end

  function made.write()
    redis.call('SET', P .. ':left', shares.left, 'PX', 60000)
    for _, name in ipairs(others) do redis.call('PUBLISH', P .. ':doorbell:' .. name, '') end
  end
end)

-- Whether the take leaves this job, and what follows, to other nodes.
function shares.leaves(job)
  local counts = shares.num_taken > 0 or asked.left_some
  return num_nodes > 1 and counts and not is_task(job) and sharing.leaves(job)
end

function shares.write()
  if shares.left then sharing.write() end
end

-- `fit` has functions that tell whether the node and Redis have capacity for a job.
-- Memory. A job is taken only if Redis has memory for its output, and its tenant's share has. Otherwise it stays queued
-- until something expires, and the jobs behind it go on. memory_left: nil before it is read, false without a limit.
local fit = {}
do
  -- Background work leaves a part of the memory to foreground work, and to the results that wait for their readers. So does
  -- a tenant that has taken its share of what submit.lua lets all tenants fill.
  local MEMORY_PERCENT, BACKGROUND_PERCENT, SUBMIT_PERCENT, MEMORY_RETRY_MS = 95, 80, 90, 1000
  local memory_left, memory_limit
  local taken_bytes = {}

  function fit.has_memory(job)
    if memory_left == nil then
      local used, limit = used_memory()
      memory_limit, memory_left = limit, limit > 0 and limit * MEMORY_PERCENT / 100 - used - total(':reserved')
    end
    job.output = whole(job.output) or 0
    job.logged = job.revision ~= '' and redis.call('HGET', job_key(job.id), 'logged') or ''
    if not memory_left then return true end
    local of_tenant = taken_bytes[job.tenant] or bytes_of(job.tenant)
    local would_use = memory_limit * MEMORY_PERCENT / 100 - memory_left + job.output
    local share, most = memory_share_of(whole(job.memory_percent) or 0, memory_limit, SUBMIT_PERCENT, would_use)
    local keeps_back = is_background(job) or of_tenant + job.output > share
    local kept_back = keeps_back and memory_limit * (MEMORY_PERCENT - BACKGROUND_PERCENT) / 100 or 0
    if job.output > memory_left - kept_back or of_tenant + job.output > most then
      look_again_in(MEMORY_RETRY_MS)
      return false
    end
    memory_left, taken_bytes[job.tenant] = memory_left - job.output, of_tenant + job.output
    return true
  end
end

-- Shares of the node under `fair` (gpu_node/engine/policy/by_policy.py). A tenant below its share does not wait for one above
-- it: the engine preempts what those above hold beyond their shares, so that counts as free here.
do
  local held, weights

  local function read_held()
    held, weights = {}, 0
    for tenant, row in pairs(held_by_tenant) do
      held[tenant] = {kv = row[1], slots = row[2], weight = row[3]}
      weights = weights + row[3]
    end
  end

  local function holding_of(job)
    if not held[job.tenant] then
      held[job.tenant] = {kv = 0, slots = 0, weight = weight_of(job)}
      weights = weights + held[job.tenant].weight
    end
    return held[job.tenant]
  end

  local function part_of(kv, num_slots) return math.max(kv / kv_total, num_slots / slots_total) end

  function fit.fits_by_share(job, need, seqs)
    if policy ~= 'fair' or is_task(job) or not held_by_tenant or tonumber(job.level) >= CLASSES - 1 then return false end
    if not held then read_held() end
    local own = holding_of(job)
    local share = own.weight / weights
    if part_of(own.kv, own.slots) > 0 and part_of(own.kv + need, own.slots + seqs) > share then return false end
    local free_kv, free_slots = kv_tokens[LEAST_URGENT], slots[LEAST_URGENT]
    for tenant, one in pairs(held) do
      local its_share = one.weight / weights
      if tenant ~= job.tenant and part_of(one.kv, one.slots) > its_share then
        free_kv = free_kv + math.max(0, one.kv - its_share * kv_total)
        free_slots = free_slots + math.max(0, one.slots - its_share * slots_total)
      end
    end
    return need <= free_kv and seqs <= free_slots
  end

  function fit.holds_nothing(tenant)
    if not held then read_held() end
    return held[tenant] == nil
  end

  function fit.note_held(job, need, seqs)
    if not held or is_task(job) then return end
    local own = holding_of(job)
    own.kv, own.slots = own.kv + need, own.slots + seqs
  end
end

-- What a start charges its tenant: under round_robin a turn (TURN of policy.py).
local function charge_of(job)
  return policy == 'round_robin' and 1e6 or tonumber(job.cost) * asked.hold_ms / weight_of(job)
end

-- Takes a job if it fits. Returns whether the walk continues. DUE is the urgency of background work that is due: it needs
-- free capacity, as the least urgent work does. Then it counts as 0.
local DUE = -1
local function try(job, urgency, is_head)
  tried[job.id] = true
  if #taken >= (is_background(job) and MAX_WITH_BACKGROUND or MAX_TAKEN) then return false end
  if shares.leaves(job) then return false end
  local is_alone = is_isolated(job)
  if is_alone and num_held + #taken > 0 then return pass(job, ISOLATED) end
  if is_task(job) and task_slots == 0 then return true end
  local need, seqs = is_task(job) and 0 or math.min(tonumber(job.cost), kv_total), math.min(tonumber(job.n), slots_total)
  -- A more urgent job may have left less than nothing. A task fits all the same.
  local room_of = urgency == DUE and LEAST_URGENT or urgency
  local has_room = is_task(job) or (need <= kv_tokens[room_of] and seqs <= slots[room_of])
  if not has_room and not fit.fits_by_share(job, need, seqs) then return pass(job, job.id) end
  if not fit.has_memory(job) then return true end
  if is_task(job) then task_slots = task_slots - 1 else shares.num_taken = shares.num_taken + 1 end
  fit.note_held(job, need, seqs)
  urgency = math.max(0, urgency)
  for q = urgency, LEAST_URGENT do kv_tokens[q], slots[q] = kv_tokens[q] - need, slots[q] - seqs end
  local queue = queues[tonumber(job.level)]
  job.urgency, job.charge, job.is_head = urgency, charge_of(job), is_head
  if queue and queue.charge then queue.charge(job, job.charge) end
  note_taken(job, job.charge)
  taken[#taken + 1] = job
  return not is_alone
end

-- Background work goes after all foreground work. The exception: while it had less than its share of the node's time, its
-- next job goes first. Its classes share that by weight, as tenants do by virtual time: a turn advances the turns of its
-- class by the job's cost ÷ weight. A class that waits anew starts where the last turn was.
local walk_queue, turns_of_background
do
  local CLASS_WEIGHT = {[0] = 4, 2, 1}

  local function take_due_background(first_of)
    local turns = redis.call('HMGET', P .. ':background_turns', 'last', CLASSES, CLASSES + 1, CLASSES + 2)
    local best, best_turn
    local last = finite(turns[1])
    for class = 0, CLASSES - 1 do
      local turn = math.max(last, finite(turns[class + 2]))
      local has_jobs = not paused.levels[tostring(CLASSES + class)] and
        redis.call('ZCARD', P .. ':waiting:' .. CLASSES + class) > 0
      if has_jobs and (not best or turn < best_turn) then
        best, best_turn = class, turn
      end
    end
    local job = best and first_of(CLASSES + best)
    if not job then return true end
    local num_taken = #taken
    local goes_on = try(job, DUE, false)
    if #taken > num_taken then
      turns_of_background = {CLASSES + best, best_turn + tonumber(job.cost) / CLASS_WEIGHT[best], 'last', best_turn}
    end
    return goes_on
  end

  -- Policy fcfs: oldest first over all classes, merged from the classes' indexes; foreground work before background work.
  local function walk_by_age()
    local readers, heads = {}, {}
    for level = 0, LEAST_URGENT do
      readers[level] = paused.reader_by_age(new_count(MAX_EXAMINED), level)
    end

    local function head_of(level)
      while heads[level] == nil or (heads[level] and tried[heads[level].id]) do heads[level] = readers[level]() or false end
      return heads[level]
    end

    local function walk(first_level, last_level)
      while true do
        local best
        for level = first_level, last_level do
          local head = head_of(level)
          if head and (not best or is_older(head, heads[best])) then best = level end
        end
        if not best then return true end
        if not try(heads[best], last_level, false) then return false end
      end
    end

    if asked.background_due and not take_due_background(head_of) then return end
    if walk(0, CLASSES - 1) then walk(CLASSES, LEAST_URGENT) end
  end

  -- The heads whose age has raised them above their class, most urgent first.
  local function risen_heads()
    local served = redis.call('HMGET', P .. ':head_served', 0, 1, 2)
    local risen = {}
    for class = 0, CLASSES - 1 do
      local head = queues[class].head
      if head then
        local since = math.max(tonumber(head.submitted), whole(served[class + 1]) or 0)
        local level = class - math.floor(math.max(0, now - since) / config.aging_ms)
        if level < class then risen[#risen + 1] = {level = level, class = class, job = head} end
      end
    end
    table.sort(risen, function(one, other)
      if one.level ~= other.level then return one.level < other.level end
      return one.class > other.class
    end)
    return risen
  end

  local function first_of(level)
    queues[level] = QUEUES[policy](level)
    return queues[level].next(any_tenant)
  end

  local function walk_by_class()
    if asked.background_due and not take_due_background(first_of) then return end
    for class = 0, CLASSES - 1 do queues[class] = QUEUES[policy](class) end
    if policy == 'fair' and redis.call('ZCARD', P .. ':waiting:0') > 0 then read_uses() end
    local risen = risen_heads()
    local function risen_to(class) return risen[1] and risen[1].level <= class and table.remove(risen, 1).job end
    -- Interactive jobs of tenants above their share count as standard and follow the standard jobs. This is decided anew
    -- for each job.
    local function upcoming()
      local job = risen_to(0)
      if job then return job, 0 end
      job = queues[0].next(goes_first)
      if job then return job, may_displace(job.tenant) and 0 or 1 end
      job = risen_to(1) or queues[1].next(any_tenant) or queues[0].next(any_tenant)
      if job then return job, 1 end
      job = risen_to(2) or queues[2].next(any_tenant)
      if job then return job, 2 end
      for level = CLASSES, LEAST_URGENT do
        queues[level] = queues[level] or QUEUES[policy](level)
        job = queues[level].next(any_tenant)
        if job then return job, level end
      end
    end
    local job, urgency = upcoming()
    while job and try(job, urgency, job == queues[tonumber(job.level)].head) do job, urgency = upcoming() end
    -- Where the walk stopped for a job that does not fit, tenants that hold nothing here need not wait for it.
    if policy ~= 'fair' or not held_by_tenant or reserves_for == ISOLATED then return end
    for class = 0, CLASSES - 2 do
      job = queues[class].next(fit.holds_nothing)
      while job do
        tried[job.id] = true
        local need, seqs = math.min(tonumber(job.cost), kv_total), math.min(tonumber(job.n), slots_total)
        if not is_isolated(job) and fit.fits_by_share(job, need, seqs) and not try(job, class, false) then return end
        job = queues[class].next(fit.holds_nothing)
      end
    end
  end

  function walk_queue()
    if policy == 'fcfs' then walk_by_age() else walk_by_class() end
  end
end

-- Takes the oldest tasks that the walk did not reach. An isolated one waits for its place in the order. An id is stale
-- if Redis lost the job's record, or P:tasks lists what is no waiting task.
local stale = {}

local function take_tasks()
  local MAX_TASKS_EXAMINED = 64
  local num_examined = paused.is_any and MAX_SKIPPED or MAX_TASKS_EXAMINED
  for _, id in ipairs(redis.call('ZRANGE', P .. ':tasks', 0, num_examined - 1)) do
    if task_slots == 0 then return end
    local job = not tried[id] and listed_job(id, EXAMINED_FIELDS, {state = 'queued'})
    if not tried[id] and not job then
      stale[#stale + 1] = id
    elseif job and is_for_us(job) and not is_isolated(job) and not try(job, tonumber(job.level), false) then
      return
    end
  end
end

if not runs_isolated() then
  walk_queue()
  -- An isolated job runs alone, and gets a node only once that node is empty.
  local is_for_isolated = reserves_for == ISOLATED or (taken[1] and is_isolated(taken[1]))
  if not is_for_isolated then take_tasks() end
end

-- Writes -------------------------------------------------------------------------------------------

redis.call('HDEL', P .. ':reservations', node)
if reserves_for then redis.call('HSET', P .. ':reservations', node, reserves_for .. ' ' .. now + config.lease_ms) end
for _, id in ipairs(stale) do redis.call('ZREM', P .. ':tasks', id) end
for _, stray in ipairs(strays) do remove_stray(stray.id, stray.known) end
collect()
for _, job in ipairs(over) do end_if_over(job, config, now) end
for _, job in ipairs(gone) do
  end_job(job, config, now, 'failed', 'revision_gone', 'the model that wrote the first tokens is no longer served', '')
end
if turns_of_background then redis.call('HSET', P .. ':background_turns', unpack(turns_of_background)) end
-- The TTL has had its effect: a job that a node has begun ends at its deadline alone.
local function begin_deadline(job)
  local begun_deadline = job.deadline ~= '' and redis.call('HGET', job_key(job.id), 'begun_deadline')
  if not begun_deadline then return end
  job.deadline = whole(begun_deadline) and begun_deadline or ''
  redis.call('HSET', job_key(job.id), 'deadline', job.deadline)
  redis.call('HDEL', job_key(job.id), 'begun_deadline')
end

shares.write()
charge_tenants(taken)
leave_queues(taken)

-- Lua allows 200 local names a function.
local function hand_out()
  local rows, ids, leases, requests = {}, {}, {}, requests_of(taken)
  local _, window = share_window()
  for i, job in ipairs(taken) do
    reserve_output(job)
    begin_deadline(job)
    if job.is_head and not is_background(job) then redis.call('HSET', P .. ':head_served', job.level, now) end
    job.lease = call .. ':' .. asked.nonce .. ':' .. i
    local taken_at = job.revision == '' and 'taken' or 'retaken'
    sure('HSET', job_key(job.id), 'state', 'running', 'node', node, 'lease', job.lease, 'entry', '',
      'revision', revision, 'urgency', job.urgency, 'charge', job.charge, 'window', window, taken_at, now, 'reserved',
      job.reserved or 0)
    add_member(P .. ':running:' .. node, job.id)
    lists.move(job, 'queued', 'running')
    ids[i], leases[i], rows[i] = job.id, job.lease, row(job, now, requests[job.id])
    if rows[i][3] > 0 or rows[i][4] > 0 then
      count_event('takeovers')
      local past = redis.call('HGET', job_key(job.id), 'past_leases') or ''
      note_event(now, 'takeover', node, job.id, string.match(past, '(%S+)@%S+$') or '-', string.match(past, ':(%a+)$') or '-')
    end
  end
  redis.call('SET', last_take_key, cmsgpack.pack({call = call, ids = ids, leases = leases}), 'PX', 60000)
  return rows
end
local rows = hand_out()
write_collected()
flush()
return {'OK', rows, depths(), again_in, num_nodes, lists.ended}
