-- Collected writes.
-- A script for many jobs calls `collect` before its first write, and write_collected after its last one.

local function trim_to(key, most) redis.call('ZREMRANGEBYRANK', key, 0, -1 - most) end

local collect, write_collected
do
  function collect()
    collected = {sums = {}, bytes = {}, charges = {}, removed = {}, added = {}, unlisted = {}, entries = {}, lives = {},
      debts = {}}
  end

  local function write_sums(key, sums, removes_zero)
    for field, by in pairs(sums) do
      local is_changed = by ~= 0 or not removes_zero
      if is_changed and redis.call('HINCRBY', key, field, by) == 0 and removes_zero then redis.call('HDEL', key, field) end
    end
  end

  local function write_members(key, members, command) redis.call(command, key, unpack(members)) end
  local function write_life(key, life_ms) redis.call('PEXPIRE', key, life_ms) end

  function write_collected()
    local all = collected
    collected = nil
    for key, sums in pairs(all.sums) do write_sums(key, sums, false) end
    for key, sums in pairs(all.bytes) do write_sums(key, sums, true) end
    for command, sets in pairs({SREM = all.removed, SADD = all.added, ZREM = all.unlisted}) do
      for key, members in pairs(sets) do write_members(key, members, command) end
    end
    for key, entries in pairs(all.entries) do write_members(key, entries, 'ZADD') end
    for key in pairs(all.debts) do trim_to(key, MAX_DEBTS) end
    for key, life_ms in pairs(all.lives) do write_life(key, life_ms) end
  end
end

local function add_to_list(name, key, member)
  local members = collect_in(name, key)
  members[#members + 1] = member
end

-- Each of these collects a write: a sum of a hash, a member of a set to add, and one of a sorted set to remove.
local function add_sum(key, field, by) collect_sum('sums', key, field, by) end
local function add_member(key, member) add_to_list('added', key, member) end
local function unlist_member(key, member) add_to_list('unlisted', key, member) end

-- These collect a write or, in a script that collects none, write at once.
local function remove_member(key, member)
  if collected then add_to_list('removed', key, member) else redis.call('SREM', key, member) end
end

local function add_entry(key, score, member)
  if collected then
    add_to_list('entries', key, score)
    add_to_list('entries', key, member)
  else
    redis.call('ZADD', key, score, member)
  end
end

-- Adds to a field of a hash that lives for life_ms from now on.
local function add_with_life(key, life_ms, field, by)
  if collected then
    add_sum(key, field, by)
    collected.lives[key] = life_ms
  else
    redis.call('HINCRBY', key, field, by)
    redis.call('PEXPIRE', key, life_ms)
  end
end
