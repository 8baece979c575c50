-- untold: remove events from P:untold that were handed to webhooks.lua. Repeating the call is harmless.
-- An empty stream stays: in a new one, ids could repeat, and a late call would remove an event that was handed to no
-- endpoint.
-- ARGV: entry id and tenant of each event
redis.call('ZREM', P .. ':free', '')
for at = 1, #ARGV, 2 do
  if redis.call('XDEL', P .. ':untold', ARGV[at]) == 1 then
    count_now(P .. ':untold_sizes', ARGV[at + 1], -1)
  end
end
return 'OK'
