-- outbox: remove events from P:outbox that were handed to webhooks.lua. Repeating the call is harmless.
-- ARGV: entry id and tenant of each event
redis.call('ZREM', P .. ':free', '')
for at = 1, #ARGV, 2 do
  if redis.call('XDEL', P .. ':outbox', ARGV[at]) == 1 then
    count_now(P .. ':outbox_sizes', ARGV[at + 1], -1)
  end
end
return 'OK'
