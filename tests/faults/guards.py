"""The guards of the queue's scripts that `make mutants` removes, and the tests that must fail without each."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.queue.broker.script_text import SHARED_PARTS

TESTS = "tests/queue/scripts/test_"
SKIPPED = "skipped_jobs.py"
CLOCK = "pool_clock.py"
BATCHES = "tests/queue/files/test_batch_records.py"
COMPLETIONS = "tests/queue/broker/test_completions.py"
WEBHOOKS = "tests/queue/test_webhooks.py"


@dataclass(frozen=True)
class Mutant:
    """A guard's text in one script or shared part, its replacement, and the tests that cover it."""

    guard: str
    file: str
    text: str
    instead: str
    tests: str
    """A file of TESTS, without that beginning, or a path."""

    @property
    def script(self) -> str:
        """The path of the script, or of the shared part, from the folder of scripts on."""
        return f"shared/{self.file}.lua" if self.file in SHARED_PARTS else f"{self.file}.lua"

    @property
    def test_file(self) -> str:
        """The path of its tests."""
        return self.tests if "/" in self.tests else TESTS + self.tests


DAMAGED = "tests/queue/test_damaged_records.py"

MUTANTS = (
    Mutant(
        "keys of another type", "damage", "if string.find(problem, 'WRONGTYPE', 1, true) then", "if false then", DAMAGED
    ),
    Mutant("sums that are no numbers", "damage", "elseif command == 'HINCRBY' and", "elseif false and", DAMAGED),
    Mutant(
        "whole numbers",
        "damage",
        "number >= 0 and number < MAX_NUMBER and number % 1 == 0 and number or",
        "number or",
        DAMAGED,
    ),
    Mutant(
        "records are compared",
        "damage",
        "return not is_elsewhere(job, known) and mend(",
        "return job or mend(",
        DAMAGED,
    ),
    Mutant("an ended job in a queue", "damage", "    if is_terminal(job.state) then return true end\n", "", DAMAGED),
    Mutant("a lost record ends its job", "ending", "  if job.problem then\n", "  if false then\n", DAMAGED),
    Mutant(
        "virtual times",
        "virtual_time",
        "return time and time > -MAX_TIME and time < MAX_TIME and",
        "return time and",
        DAMAGED,
    ),
    Mutant("members of the expiry", "stored", "  if not whole(bytes) then", "  if false then", DAMAGED),
    Mutant("names of pauses", "jobs", "elseif kind == 'tenant' then", "else", DAMAGED),
    Mutant("times of reservations", "take", " and whole(till) <= now + config.lease_ms", "", DAMAGED),
    Mutant(
        "the answer of the last take",
        "take",
        "pcall(cmsgpack.unpack, redis.call('GET'",
        "true, cmsgpack.unpack(redis.call('GET'",
        DAMAGED,
    ),
    Mutant("damaged numbers of the config", "prelude", "        number = default_of(name)\n", "", DAMAGED),
    Mutant("a damaged config is written", "heartbeat", "check and is_config_damaged()", "false", DAMAGED),
    Mutant("lanes of delayed jobs", "waiting", "    if not level then\n", "    if false then\n", DAMAGED),
    Mutant("a batch's token", "files", "(read_batch(id, 'token')) == tostring(token)", "true", BATCHES),
    Mutant("a row of one part", "files", "'GETBIT', rows, row) == 1", "'GETBIT', rows, row) == 2", BATCHES),
    Mutant("lease compare", "prelude", " and job.lease == lease", "", "emit.py"),
    Mutant("index compare", "emit", "if index > length then", "if false then", "emit.py"),
    Mutant(
        "a chunk that is none, on a channel", "messages", "pcall(json_of, chunk)", "true, json_of(chunk)", "channels.py"
    ),
    Mutant("a channel's tenant", "messages", "':channel:' .. tenant .. ':'", "':channel:default:'", "channels.py"),
    Mutant(
        "a job's first channel", "submit", "if channels.differ(known, job.channel) then", "if false then", "channels.py"
    ),
    Mutant("a channel is a reader", "messages", "if channels.is(job.channel) then return false end", "", "readers.py"),
    Mutant("call replay", "take", "if call == last.call then", "if false then", "take.py"),
    Mutant("sweep guard", "prelude", " or now - swept > max_gap", "", "sweep.py"),
    Mutant("a clock that never goes back", "prelude", "math.max(now, swept)", "now", CLOCK),
    Mutant("what a process knows of the time", "prelude", "seen and seen >= swept and seen or ", "", CLOCK),
    Mutant(
        "deadlines while the time is in doubt", "prelude", " <= now and not pool_time.is_in_doubt()", " <= now", CLOCK
    ),
    Mutant("deadlines of taken jobs", "take", "pool_time.is_in_doubt() and config.lease_ms or 1", "1", CLOCK),
    Mutant("who knows the time goes first", "sweep", "if in_doubt and seen == 0 then", "if false then", CLOCK),
    Mutant("a clock that comes back", "sweep", "nearer(math.floor((now - last) / SLOWDOWN))", "ahead", CLOCK),
    Mutant("an outage is no jump", "sweep", "then now, by = now + by, 0 end", "then by = 1 end", CLOCK),
    Mutant("ids by either clock", "submit", "math.min(now, pool_time.of_redis()), math.max(now", "now, (now", CLOCK),
    Mutant(
        "held ids",
        "heartbeat",
        "elseif (tonumber(string.match(job.lease, '^(%d+):')) or 0) <= answered then",
        "elseif false then",
        "sweep.py",
    ),
    Mutant("silence of a predecessor", "declare_dead", "if silent >= silence then", "if true then", "declare_dead.py"),
    Mutant("a lease that has just ended", "sweep", "if left ~= 0 then return", "if true then return", "sweep.py"),
    Mutant("the dead stay dead", "sweep", "'(0', '+inf'", "'-inf', '+inf'", "declare_dead.py"),
    Mutant(
        "a seat's holder",
        "prelude",
        "if string.match(seats[at + 1], '%S+$') == node then",
        "if true then",
        "declare_dead.py",
    ),
    Mutant("loss counting", "ending", "elseif not string.find(nodes, entry, 1, true) then", "else", "sweep.py"),
    Mutant("reservation expiry", "take", " and whole(till) > now and", " and", "capacity.py"),
    Mutant("virtual time entry", "virtual_time", "math.max(debt, now), job.tenant", "debt, job.tenant", "policy.py"),
    Mutant("idempotency body", "submit", "known.body ~= job.body or ", "", "submit.py"),
    Mutant("the same job twice in a call", "submit", "if known then return known, 'ID_CONFLICT' end", "", "many.py"),
    Mutant("accepted jobs of a call", "submit", " + (own.num_accepted or 0)", "", "many.py"),
    Mutant("queued cost of a call", "submit", "    add_if_read(own, name, job.cost)\n", "", "many.py"),
    Mutant(
        "known jobs of a full Redis",
        "submit",
        "    last_writes[#last_writes + 1] = function() answers[at] = same_or(known, job, conflict) end",
        "    answers[at] = same_or(known, job, conflict)",
        "many.py",
    ),
    Mutant("an end that fails", "finish", "pcall(finish_job, one", "true, finish_job(one", "many.py"),
    Mutant("tenant check", "attach", " or job.tenant ~= tenant", "", "readers.py"),
    Mutant("terminal once", "cancel", "if is_terminal(job.state) then return {job.state, {}} end", "", "end.py"),
    Mutant("each asked once", "take", "= may_be_elsewhere(job, lacks)", "= false", "adapters.py"),
    Mutant("bound of waiting tasks", "submit", "is_light and num_tasks()", "false and num_tasks()", "tasks.py"),
    Mutant(
        "tasks need no KV capacity",
        "submit",
        "if not is_light and not in_background and queued > 0",
        "if not in_background and queued > 0",
        "tasks.py",
    ),
    Mutant(
        "a backlog refuses no chat",
        "submit",
        "backlog_of(0, CLASSES - 1), queue",
        "backlog_of(0, LEVELS - 1), queue",
        "background.py",
    ),
    Mutant(
        "background work waits",
        "submit",
        "not is_light and not in_background and not_before_in",
        "not is_light and not_before_in",
        "background.py",
    ),
    Mutant(
        "background work after chats",
        "take",
        "if walk(0, CLASSES - 1) then walk(CLASSES, LEAST_URGENT) end",
        "walk(0, LEAST_URGENT)",
        "background.py",
    ),
    Mutant("due jobs flow", "waiting", "math.min(max_count, MAX_READY - ready)", "max_count", "background.py"),
    Mutant("due jobs of each tenant", "waiting", "math.ceil(left / (#lanes - at + 1))", "left", "background.py"),
    Mutant(
        "due background work needs room",
        "take",
        "urgency == DUE and LEAST_URGENT or urgency",
        "math.max(0, urgency)",
        "background.py",
    ),
    Mutant("results of stored responses", "ack", " and not response_life(job)", "", "ack.py"),
    Mutant("results of another tenant", "ack", " and job.tenant == tenant", "", "ack.py"),
    Mutant(
        "tasks need none of their tenant's either",
        "submit",
        "if not is_light and tenant_queued",
        "if tenant_queued",
        "tasks.py",
    ),
    Mutant(
        "debt at another rate", "waiting", "if stated > 0 and stated ~= ms_per_unit then", "if false then", "limits.py"
    ),
    Mutant(
        "debt of the other unit",
        "submit",
        "  rate_until = math.max(rate_until, due)",
        "  if limit_of_unit > 0 then rate_until = math.max(rate_until, due) end",
        "limits.py",
    ),
    Mutant(
        "corrected debt at another rate",
        "ending",
        "if finite(stated) > 0 then ms_per_token",
        "if false then ms_per_token",
        "usage.py",
    ),
    Mutant(
        "refund beside an unpaid debt",
        "ending",
        "local life = math.ceil(math.max(due, finite(jobs)) - now)",
        "local life = math.ceil(math.max(due, 0) - now)",
        "usage.py",
    ),
    Mutant("jobs of other nodes", "take", "(is_eligible or tried[id]) and examined or skipped", "examined", SKIPPED),
    Mutant("bound of skipped jobs", "take", " and skipped.count < skipped.max_count do", " do", SKIPPED),
    Mutant("shares of skipped jobs", "take", "MAX_SKIPPED / math.max(1, #tenants)", "MAX_SKIPPED", SKIPPED),
    Mutant("bound of jobs that end", "take", "(is_eligible or tried[id]) and", "is_eligible and", SKIPPED),
    Mutant("tasks without a slot", "take", "has_slot = not has_no_slot_for(id)", "has_slot = true", SKIPPED),
    Mutant("tasks fit a node without capacity", "take", "is_task(job) or (need", "(need", "tasks.py"),
    Mutant("tasks of a full node", "take", "is_task(job) and task_slots == 0", "false", "tasks.py"),
    Mutant("tasks hold no KV cache", "take", "is_task(job) and 0 or ", "", "tasks.py"),
    Mutant("a node for an isolated job", "take", "if not is_for_isolated then", "if true then", "tasks.py"),
    Mutant("tasks that another node took", "take", "if not tried[id] and not job then", "if false then", "tasks.py"),
    Mutant("stale tasks are forgotten", "take", "ZREM', P .. ':tasks', id", "ZREM', P .. ':tasks', ''", "tasks.py"),
    Mutant(
        "each job ends once", "take", "over[#over + 1], tried[job.id] = job, true", "over[#over + 1] = job", "tasks.py"
    ),
    Mutant("taken tasks leave their index", "queue", "redis.call('ZREM', P .. ':tasks', job.id)", "", "tasks.py"),
    Mutant(
        "returned tasks enter it again",
        "queue",
        "redis.call('ZADD', P .. ':tasks'",
        "redis.call('ZREM', P .. ':tasks'",
        "tasks.py",
    ),
    Mutant("tenant of a response", "delete_response", "or job.tenant ~= tenant ", "", "responses.py"),
    Mutant("only stored responses", "delete_response", "if not is_stored then", "if false then", "responses.py"),
    Mutant("only deleted responses are deleted again", "delete_response", "not repeats or ", "", "responses.py"),
    Mutant("a deletion is known", "delete_response", "'deleted') ~= '1'", "'deleted') == '1'", "responses.py"),
    Mutant("deleted open response", "delete_response", "'cancel', '1')", "'cancel', '')", "responses.py"),
    Mutant("bytes of a deleted response", "delete_response", "or name == 'response'", "", "responses.py"),
    Mutant("a response is read again", "shorten_result", " or response_life(job)", "", "responses.py"),
    Mutant("life of a response's result", "stored", "if keep then return keep end", "", "responses.py"),
    Mutant(
        "life of a response's record",
        "ending",
        "if keep then redis.call('PEXPIRE'",
        "if false then redis.call('PEXPIRE'",
        "responses.py",
    ),
    Mutant("log in place of a result", "ending", "result_bytes == 0 and response_life(job) or 0", "0", "responses.py"),
    Mutant(
        "a completion of each job",
        "ending",
        "if not is_task(job) and job.in_feed ~= '0' then note_",
        "if false then note_",
        COMPLETIONS,
    ),
    Mutant("completions are bounded", "ending", "'MAXLEN', '~', MAX_ENDED, '*'", "'*'", COMPLETIONS),
    Mutant(
        "the last completion before",
        "ending",
        "':ended_before', job.tenant) or '0-0'",
        "':ended_before', '') or '0-0'",
        COMPLETIONS,
    ),
    Mutant(
        "incarnation of a pool",
        "join",
        "'HSETNX', KEYS[1], 'incarnation', now",
        "'HSETNX', KEYS[1], 'incarnation', 1",
        COMPLETIONS,
    ),
    Mutant(
        "a webhook of each job that asks", "ending", "if job.webhooks ~= '' then note_", "if false then note_", WEBHOOKS
    ),
    Mutant("bound of the untold ends", "ending", "finite(size) >= MAX_UNTOLD", "false", WEBHOOKS),
    Mutant("size of the untold ends", "untold", "count_now(P .. ':untold_sizes', ARGV[at + 1], -1)", "", WEBHOOKS),
    Mutant(
        "an event is one delivery",
        "webhooks",
        "delivery_key(endpoint, event)) == 1 then",
        "delivery_key(endpoint, event)) == 2 then",
        WEBHOOKS,
    ),
    Mutant("lease of a delivery", "webhooks", "if known ~= holder then return 'FENCED' end", "", WEBHOOKS),
    Mutant(
        "few deliveries of an endpoint", "webhooks", "most_of_endpoint - redis.call('ZCARD', leased)", "most", WEBHOOKS
    ),
    Mutant("few pending deliveries", "webhooks", "or 0) >= max_pending", "or 0) < 0", WEBHOOKS),
    Mutant("few deliveries of a tenant", "webhooks", "most_of_tenant - of_tenant", "most", WEBHOOKS),
    Mutant("endpoints wait in turn", "webhooks", "math.max(due, now)", "due", WEBHOOKS),
    Mutant("bound of past leases", "queue", "if count > MAX_PAST_LEASES then", "if false then", "job_ledger.py"),
    Mutant("first take", "take", "job.revision == '' and 'taken' or 'retaken'", "'taken'", "job_ledger.py"),
    Mutant(
        "expired jobs leave their list",
        "stored",
        "if state ~= '' then redis.call('ZREM', lists.key",
        "if false then redis.call('ZREM', lists.key",
        "job_ledger.py",
    ),
    Mutant(
        "bytes of a wide record",
        "ending",
        "(is_wide and WIDE_RECORD_BYTES or RECORD_BYTES)",
        "RECORD_BYTES",
        "stored_bytes.py",
    ),
    Mutant("life of hourly usage", "ending", "USAGE_HOURS * HOUR_MS, what", "USAGE_DAYS * DAY_MS, what", "usage.py"),
    Mutant("positions of delayed jobs", "positions", " or DELAYED_JOB end", " or 0 end", "positions.py"),
    Mutant("positions of begun jobs", "positions", " and first == '' and", " and", "positions.py"),
    Mutant(
        "progress is not stored",
        "emit",
        "if progress ~= '' then push(job, progress)",
        "if progress ~= '' then redis.call('RPUSH', log, progress)",
        "emit.py",
    ),
    Mutant("readers guard", "messages", "or not pool_time.has_heartbeats() then", "then", "readers.py"),
    # Limits of the pool and of tenants
    Mutant("open jobs of a pool", "submit", "if open >= config.max_open_jobs and", "if false and", "submit.py"),
    Mutant("open jobs of a tenant", "submit", "own_open >= tenant_open", "false", "limits.py"),
    Mutant("a tenant's part of a limit", "submit", "own >= limit / math.max(1, num_tenants)", "true", "waits.py"),
    Mutant("a tenant's own wait", "submit", "math.min(sum, own_ahead / share)", "sum", "waits.py"),
    Mutant("a retry counts once", "submit", "if is_known then", "if false then", "waits.py"),
    Mutant(
        "a tenant's tasks are counted down",
        "queue",
        "':tenant_tasks', job.tenant, -1)",
        "':tenant_tasks', job.tenant, 0)",
        "waits.py",
    ),
    Mutant(
        "a first job above its tenant's limit", "submit", "all_queued > 0 and all_queued", "all_queued", "limits.py"
    ),
    Mutant("a first job above its tenant's rate", "waiting", "if debt > 0 and later >", "if later >", "limits.py"),
    Mutant("refused cost decays", "submit", " - rate * share * (now - (whole(at) or now))", "", "limits.py"),
    Mutant("memory for more urgent classes", "submit", "{[0] = 90, 90, 80}", "{[0] = 90, 90, 90}", "limits.py"),
    Mutant("memory that open jobs may need", "submit", " + total(':reserved')", "", "limits.py"),
    Mutant(
        "a debt outlives its rate's key",
        "ending",
        "math.max(now, finite(tokens",
        "math.max(0, finite(tokens",
        "usage.py",
    ),
    # Stored bytes and their lives
    Mutant(
        "memory of a tenant",
        "submit",
        "own.bytes + held + output > share",
        "own.bytes + held + output > limit",
        "stored_bytes.py",
    ),
    Mutant(
        "memory that greedy tenants leave", "stored", "most * free * math.min(1, 2 * free)", "most", "stored_bytes.py"
    ),
    Mutant("a key's own share", "submit", "memory_share_of(memory_percent,", "memory_share_of(0,", "stored_bytes.py"),
    Mutant("a queued job reserves nothing", "take", "  reserve_output(job)\n", "", "stored_bytes.py"),
    Mutant(
        "memory for what is taken", "take", "if not fit.has_memory(job) then return true end", "", "stored_bytes.py"
    ),
    Mutant(
        "capacity for a tenant below its share",
        "take",
        "or not held_by_tenant or tonumber",
        "or true or tonumber",
        "tests/queue/test_fair_shares.py",
    ),
    Mutant(
        "no more capacity than its share",
        "take",
        "own.slots + seqs) > share then",
        "own.slots + seqs) > 2 then",
        "tests/queue/test_fair_shares.py",
    ),
    Mutant(
        "logs are counted as they grow",
        "emit",
        "local tenant, logged, grown = count_log(id)",
        "local tenant, logged, grown",
        "stored_bytes.py",
    ),
    Mutant("a returned job reserves nothing", "queue", "'reserved', 0, 'avoid'", "'avoid'", "stored_bytes.py"),
    Mutant("expired bytes free memory", "submit", "subtract_expired(MAX_RELEASED)", "", "stored_bytes.py"),
    Mutant(
        "bytes are subtracted once",
        "stored",
        "'ZREM', P .. ':expiry', member) == 0",
        "'ZREM', P .. ':expiry', member) == -1",
        "stored_bytes.py",
    ),
    Mutant("tokens of a minute", "waiting", "if over <= 0 then return 0 end", "do return 0 end", "token_limits.py"),
    Mutant("one job beyond the tokens", "waiting", " - math.max(largest, job.may_use)", "", "token_limits.py"),
    Mutant(
        "used tokens count a minute",
        "waiting",
        "SLOT_MS, NUM_SLOTS, LOOK",
        "NUM_SLOTS, SLOT_MS, LOOK",
        "token_limits.py",
    ),
    Mutant(
        "an end lets waiting jobs go",
        "waiting",
        "'XX', 'CH', now, job.tenant",
        "'XX', 'CH', 9e15, job.tenant",
        "token_limits.py",
    ),
    Mutant(
        "older jobs wait first", "rare", "'-inf', place_of(job)) == 0", "'-inf', place_of(job)) >= 0", "token_limits.py"
    ),
    Mutant("a key's limit", "rare", "':keyed:' .. name) >= most", "':keyed:' .. name) >= 1e9", "keyed_jobs.py"),
    Mutant("a key's pace", "rare", "math.max(0, oldest + span - now)", "0", "keyed_jobs.py"),
    Mutant(
        "an end frees its place", "ending", "if job.extra ~= '' then rare.give_up(job, now) end", "", "keyed_jobs.py"
    ),
    Mutant(
        "a canceled job leaves its key's lane",
        "queue",
        "redis.call('ZREM', P .. ':awaiting:' .. job.tenant .. ':' .. name, job.id)",
        "",
        "keyed_jobs.py",
    ),
    Mutant(
        "half of a burst is left to chats",
        "rare",
        "local PART_OF_BURST = 0.5",
        "local PART_OF_BURST = 1",
        "keyed_jobs.py",
    ),
    Mutant(
        "a canceled job waits no more",
        "queue",
        "redis.call('ZREM', P .. ':awaiting:' .. job.tenant, job.id)",
        "",
        "token_limits.py",
    ),
    Mutant(
        "preemptions of all leases",
        "queue",
        "'HINCRBY', job_key(id), 'engine_preemptions'",
        "'HSET', job_key(id), 'engine_preemptions'",
        "job_ledger.py",
    ),
    Mutant("large results without a reader", "stored", " and was_read and", " and", "stored_bytes.py"),
    Mutant(
        "a result's life grows no more", "shorten_result", "or '0') > till then", "or '0') > 0 then", "stored_bytes.py"
    ),
    Mutant("tenant of a result", "shorten_result", " or job.tenant ~= tenant", "", "stored_bytes.py"),
    Mutant(
        "bound of dead letters",
        "ending",
        "0, -1 - MAX_DEAD",
        "0, -1 - 10 * MAX_DEAD",
        "tests/queue/broker/test_dead_letters.py",
    ),
    Mutant(
        "a purge of open jobs",
        "stored",
        "if redis.call('ZREM', P .. ':dead_letters', id) == 0 then return 0 end",
        "redis.call('ZREM', P .. ':dead_letters', id)",
        "tests/queue/broker/test_dead_letters.py",
    ),
    Mutant(
        "requests of dead letters",
        "ending",
        "  if state == 'succeeded' then return nil end",
        "  do return nil end",
        "stored_bytes.py",
    ),
    Mutant(
        "deleted responses are kept no longer", "delete_response", "'keep', 'response_bytes')", "'')", "responses.py"
    ),
    # Idempotency and identity
    Mutant("tenant of an id", "submit", " or known.tenant ~= job.tenant then", " then", "submit.py"),
    Mutant("tenant of an idempotency key", "submit", "(job.tenant .. ':' .. job", "(job", "submit.py"),
    Mutant("ids older than records", "submit", "record_life - MAX_AHEAD_MS", "MAX_AGE_MS", "submit.py"),
    Mutant("ids older than responses", "submit", "job.response ~= '' and job.keep_ms or config", "config", "submit.py"),
    Mutant("ids of a later time", "submit", " or minted - later > MAX_AHEAD_MS", "", "submit.py"),
    Mutant("tenant of a canceled job", "cancel", " or job.tenant ~= tenant", "", "readers.py"),
    Mutant("readers of a job", "messages", "if count >= MAX_INBOXES then", "if false then", "readers.py"),
    # Lists, delays, shares
    Mutant(
        "list of a tenant's jobs",
        "submit",
        "add_entry(lists.key(is_delayed and 'scheduled' or 'queued', tenant), 0, id)",
        "",
        "tests/queue/test_job_lists.py",
    ),
    Mutant("jobs before their time", "submit", "waits = is_delayed or", "waits =", "delayed_jobs.py"),
    Mutant("refunds in the window of their charge", "virtual_time", "    window = since\n", "", "policy.py"),
    Mutant("refunds of older windows", "virtual_time", "    if since < window - 1 then return end\n", "", "policy.py"),
    Mutant(
        "interactive jobs above their share",
        "take",
        "queues[0].next(goes_first)",
        "queues[0].next(any_tenant)",
        "policy.py",
    ),
    Mutant("shares of absent tenants", "take", "may_displace(job.tenant) and 0 or 1", "0", "policy.py"),
    Mutant("tokens that a log has", "take", " - done * tonumber(job.n)", "", "policy.py"),
    # Returns of jobs
    Mutant("capacity elsewhere", "give_back", "not fits_elsewhere(job, cost)", "false", "capacity.py"),
    Mutant(
        "jobs that move often", "give_back", "if preemptions >= MAX_PREEMPTIONS then", "if false then", "capacity.py"
    ),
    Mutant(
        "the last node with an adapter",
        "give_back",
        "if not may_be_elsewhere(job, lacks) then",
        "if false then",
        "adapters.py",
    ),
    Mutant("losses of a draining node", "sweep", "not was_draining and end_if_lost", "end_if_lost", "capacity.py"),
    # Pools
    Mutant(
        "a pool with nodes",
        "forget",
        "if alive > 0 then return {'NODES', alive} end",
        "",
        "tests/queue/broker/test_forget.py",
    ),
    Mutant(
        "a pool with jobs",
        "forget",
        "if open > 0 then return {'JOBS', open} end",
        "",
        "tests/queue/broker/test_forget.py",
    ),
    Mutant("config of a living pool", "join", " and alive > 0 and", " and false and", "sweep.py"),
    Mutant("config of a dead pool", "join", " and alive > 0 and", " and", "sweep.py"),
    Mutant(
        "an end of a job that was taken before",
        "finish",
        "if not job or job.taken ~= '' or",
        "if not job or",
        "tests/gpu_node/publishing/test_ended_jobs.py",
    ),
)
