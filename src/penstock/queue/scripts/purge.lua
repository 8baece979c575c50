-- purge: delete dead letters and their requests.
-- ARGV: ids
-- Answer: number of dead letters deleted
local num_purged = 0
redis.call('ZREM', P .. ':free', '')
for _, id in ipairs(ARGV) do num_purged = num_purged + delete_dead_letter(id) end
return num_purged
