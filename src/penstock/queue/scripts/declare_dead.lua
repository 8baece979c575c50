-- declare_dead: a process that holds seats of its host declares the earlier holders dead. A seat is a lock that one process
-- at a time can hold; the kernel frees it when that process ends. So the earlier holders are dead, and their jobs need
-- not wait for a lease. As a second proof, an earlier holder must be silent for longer than a heartbeat interval.
-- ARGV: node ('' before it has joined), then its seats
-- Answer: {earlier holders still in the pool, ms until all of them have been silent for long enough}
local MAX_SILENCE_MS = 2500
local node, config, now, _, last = ARGV[1], read_config(), clock()
local silence = config and math.min(config.lease_ms / 5, MAX_SILENCE_MS) or MAX_SILENCE_MS
local holders, dead, num_left, wait = {}, {}, 0, 0
for at = 2, #ARGV do
  local before = {}
  for id in string.gmatch(redis.call('HGET', P .. ':seats', ARGV[at]) or '', '%S+') do
    local last_ms = id ~= node and redis.call('ZSCORE', P .. ':nodes', id)
    if last_ms then
      before[#before + 1] = id
      num_left = num_left + 1
      local silent = pool_time.is_in_doubt() and 0 or now - tonumber(last_ms)
      if silent >= silence then dead[#dead + 1] = id end
      wait = math.max(wait, silence - silent)
    end
  end
  holders[ARGV[at]] = before
end

redis.call('ZREM', P .. ':free', '')
-- A heartbeat of 0 marks a node dead. The next sweep handles it; the sweep is made due at once.
for _, id in ipairs(dead) do redis.call('ZADD', P .. ':nodes', 'XX', 0, id) end
if #dead > 0 and last and last <= now then
  redis.call('HSET', KEYS[1], 'swept_ms', math.min(last, math.floor(now - config.lease_ms / 15) - 1))
end
if node ~= '' then
  for seat, before in pairs(holders) do
    before[#before + 1] = node
    redis.call('HSET', P .. ':seats', seat, table.concat(before, ' '))
  end
end
return {num_left, wait}
