-- Lists of jobs.

-- Functions that few jobs need (rare.lua).
local rare

-- Each job is in one list of its tenant, that of its state: P:jobs:<tenant> while it is queued, else
-- P:jobs:<state>:<tenant>. All scores are 0, so ids order a list, and an id begins with its time. A job is also in
-- P:tagged:<tenant>:<tag> of each of its tags. Its custom_id is a tag of its own, `#<hash>`, which no caller sees.

local lists = {ended = {}}  -- ended: id, tenant, state and code of the jobs that this call ended and no node reported

function lists.key(state, tenant) return P .. ':jobs:' .. (state == 'queued' and '' or state .. ':') .. tenant end

function lists.leave(state, job)
  local key = lists.key(state, job.tenant)
  if collected then unlist_member(key, job.id) else redis.call('ZREM', key, job.id) end
end

function lists.move(job, from, to)
  lists.leave(from, job)
  add_entry(lists.key(to, job.tenant), 0, job.id)
end

-- Bytes of a job's tags, which spaces separate, and of its metadata.
function lists.bytes_of(tags, metadata)
  -- Memory of a tag of a job, without twice its length. Jobs of one tag share its counts.
  local TAG_BYTES = 200
  local bytes = metadata ~= '' and #metadata + KEY_BYTES or 0
  for tag in string.gmatch(tags, '%S+') do bytes = bytes + 2 * #tag + TAG_BYTES end
  return bytes
end

-- Stores a new job's tags and metadata.
function lists.add(job, tags, metadata)
  if tags == '' and metadata == '' then return end
  redis.call('HSET', job_key(job.id), 'extra', lists.bytes_of(tags, metadata))
  local number = 0
  for tag in string.gmatch(tags, '%S+') do
    local is_custom = string.sub(tag, 1, 1) == '#'
    if not is_custom then number = number + 1 end
    redis.call('HSET', job_key(job.id), is_custom and 'custom' or 'tag' .. number, tag)
    redis.call('ZADD', P .. ':tagged:' .. job.tenant .. ':' .. tag, 0, job.id)
  end
  if number > 0 then rare.count_tags(job.tenant, tags, job.level, 1) end
  if metadata ~= '' then redis.call('SET', P .. ':metadata:' .. job.id, metadata) end
end

-- A list of a job's tags.
function lists.read_tags(id)
  local tags = {}
  for _, tag in ipairs(redis.call('HMGET', job_key(id), 'tag1', 'tag2', 'tag3', 'tag4', 'custom')) do
    tags[#tags + 1] = tag or nil
  end
  return tags
end

-- The tags of a job, separated by spaces. `extra`: its field of that name, '' or nil for a job that has no tags.
function lists.tags_of(id, extra)
  return extra and extra ~= '' and table.concat(lists.read_tags(id), ' ') or ''
end

-- What P:expiry says of an ended job's record: its key, and what lists the job.
function lists.record_with(id, state, tags) return 'job:' .. id .. ' ' .. state .. (tags ~= '' and ' ' .. tags or '') end

function lists.record(id, state)
  return lists.record_with(id, state, lists.tags_of(id, redis.call('HGET', job_key(id), 'extra') or ''))
end
