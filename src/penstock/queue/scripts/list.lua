-- list: jobs that a filter names, newest first, from a cursor on. It writes nothing.
-- ARGV: msgpack of {tenants, lists, only_due, tag, custom, metadata, after, since, count, states, levels}
--   tenants: whose jobs. lists: the states whose lists may have such jobs. only_due: the list of scheduled jobs counts
--   only if one of them is due. tag: '' for any. custom: the mark of a custom_id (`lists`), '' for any. metadata: members that a
--   job's metadata must have; empty for any. after: only jobs with an older uuid than this text; '' for all. since:
--   only jobs with a uuid from this text on; '' for all. states, levels: lists of those that the filter names; empty for
--   any. The tenants' lists are at most MAX_LISTS.
-- Answer: {ids of up to `count` jobs, the uuid up to which it looked, 1 if there are no older jobs, number of examined jobs}
local MAX_EXAMINED, MAX_LISTS = 64, 512
local asked = cmsgpack.unpack(ARGV[1])
-- The metadata of a job has up to 10 KB.
local reads_metadata = next(asked.metadata) ~= nil
if reads_metadata then MAX_EXAMINED = 16 end
if #asked.tenants * #asked.lists > MAX_LISTS then return redis.error_reply('TOO_MANY_LISTS') end
-- A pool of another version has other lists.
if (redis.call('HGET', KEYS[1], 'version') or PROTOCOL_VERSION) ~= PROTOCOL_VERSION then return {{}, asked.after, 1, 0} end
local now, pool = clock(), string.match(P, '{(.*)}')
local stop = asked.since ~= '' and '[' .. pool .. '.' .. asked.since or '-'
local FIELDS = {'state', 'level', 'submitted', 'entry', 'cancel'}

local function set_of(names)
  if #names == 0 then return nil end
  local set = {}
  for _, name in ipairs(names) do set[tostring(name)] = true end
  return set
end
local states, levels = set_of(asked.states), set_of(asked.levels)

-- Whether a job of the tenant is due that take and sweep have not queued yet.
local function has_due(tenant)
  for level = 0, LEVELS - 1 do
    if redis.call('ZCOUNT', P .. ':delayed:' .. level .. ':' .. tenant, '-inf', now) > 0 then return true end
  end
  return false
end

-- The sets to walk: of each tenant that of the tag or those of the states, whichever has fewer jobs.
local keys, walks_tags = {}, {}
for _, tenant in ipairs(asked.tenants) do
  local of_tenant, size = {}, 0
  for _, state in ipairs(asked.lists) do
    local key = lists.key(state, tenant)
    local count = redis.call('ZCARD', key)
    if count > 0 and (state ~= 'scheduled' or not asked.only_due or has_due(tenant)) then
      of_tenant[#of_tenant + 1], size = key, size + count
    end
  end
  local tagged = P .. ':tagged:' .. tenant .. ':' .. asked.tag
  if asked.custom ~= '' then
    of_tenant = {P .. ':tagged:' .. tenant .. ':' .. asked.custom}
  elseif asked.tag ~= '' and redis.call('ZCARD', tagged) < size then
    of_tenant, walks_tags[tagged] = {tagged}, true
  end
  for _, key in ipairs(of_tenant) do keys[#keys + 1] = key end
end

-- A heap of the sets by their newest id that is left. Each set is read in pages.
local page, heap = math.max(2, math.ceil(2 * asked.count / math.max(1, #keys))), {}

local function fill(source)
  source.ids = redis.call('ZRANGE', source.key, source.from, stop, 'BYLEX', 'REV', 'LIMIT', 0, page)
  source.at, source.is_last = 1, #source.ids < page
  if not source.is_last then source.from = '(' .. source.ids[page] end
end

local function is_newer(one, other) return one.ids[one.at] > other.ids[other.at] end

local function sift_down(at)
  while true do
    local child = 2 * at
    if not heap[child] then return end
    if heap[child + 1] and is_newer(heap[child + 1], heap[child]) then child = child + 1 end
    if not is_newer(heap[child], heap[at]) then return end
    heap[at], heap[child], at = heap[child], heap[at], child
  end
end

local from = asked.after ~= '' and '(' .. pool .. '.' .. asked.after or '+'
for _, key in ipairs(keys) do
  local source = {key = key, from = from}
  fill(source)
  if source.ids[1] then heap[#heap + 1] = source end
end
for at = math.floor(#heap / 2), 1, -1 do sift_down(at) end

local function has_tag(id)
  for _, tag in ipairs(lists.read_tags(id)) do
    if tag == asked.tag then return true end
  end
  return false
end

-- Whether a job's metadata has the members that the filter names.
local function has_metadata(id)
  local ok, known = pcall(cjson.decode, redis.call('GET', P .. ':metadata:' .. id) or '')
  if not ok or type(known) ~= 'table' then return false end
  for name, value in pairs(asked.metadata) do
    if known[name] ~= value then return false end
  end
  return true
end

-- Whether the filter names a job. A damaged record is left to the caller, which reports it.
local function fits(id, is_tagged)
  local values = redis.pcall('HMGET', job_key(id), unpack(FIELDS))
  if values.err then return true end
  local job = {state = values[1], entry = values[4], cancel = values[5], submitted = tonumber(values[3] or '') or 0}
  if not job.state or (levels and not levels[values[2] or '']) then return false end
  if states then
    local state = shown_state(job, now)
    if not states[state] then return false end
  end
  return (asked.tag == '' or is_tagged or has_tag(id)) and (not reads_metadata or has_metadata(id))
end

local found, num_examined, last = {}, 0, nil
while heap[1] and #found < asked.count and num_examined < MAX_EXAMINED do
  local source = heap[1]
  local id = source.ids[source.at]
  source.at = source.at + 1
  if source.at > #source.ids and not source.is_last then fill(source) end
  if source.at > #source.ids then
    heap[1] = heap[#heap]
    heap[#heap] = nil
  end
  sift_down(1)
  -- A job that an earlier release ended may be in two lists.
  if id ~= last then
    num_examined, last = num_examined + 1, id
    if fits(id, walks_tags[source.key]) then found[#found + 1] = id end
  end
end
return {found, last and string.match(last, '([^.]*)$') or asked.after, heap[1] and 0 or 1, num_examined}
