"""Every Redis key and channel: its type, its writers, its content and its lifetime.

All keys of a pool share the hash tag `{pool}`, so that one script works in one cluster slot. P stands for
`penstock:{pool}`. Times are milliseconds of Redis's clock. Lifetimes such as `result_ttl_ms` are settings of the pool,
which its nodes announce (`gpu_node/settings.py`). Four functions shared by the scripts count as writers. `end` closes a
job. `requeue` queues a job again (give_back, sweep, heartbeat). `release` queues a job that waited for its time, its
tenant's tokens or its key (take, sweep). `ring` wakes a node. finish submits what takes the place of a job whose output
was refused, as `submit` does. audit may write all keys, and change those that say where an open job waits. forget
deletes the keys of an unused pool, and erase those of a tenant's ended jobs, with what the pool counted of the tenant.

    key                      type    writers                              content; lifetime
    P:queue:<l>:<tenant>     stream  submit; take, end (XDEL, DEL empty)  queued job ids of a level: 0 interactive …
                                                                          2 batch, + 3 for background work
    P:requeued:<l>:<tenant>  zset    submit, requeue, release; take, end  queued again or formerly waiting ids, by
                                                                          submission time
    P:delayed:<l>:<t>        zset    submit, requeue; release, end        ids of jobs with not_before, by that time
    P:delayed                zset    submit, release, end                 `<l>:<t>` → when to look at its delayed jobs
    P:awaiting:<t>           zset    submit, release; end                 ids that wait for tokens, by level and time
    P:awaiting:<t>:<key>     zset    submit, release; end                 the same of those that wait for their key
    P:awaiting               zset    submit, release, requeue, end        tenant, or `<t>:<key>` → when to look at them
    P:keyed:<t>:<key>        set     submit, release; requeue, end        ids with that key that are queued or running
    P:paced:<t>:<key>        list    submit, release                      when the last ones joined; while they count
    P:keys:<t>               set     submit, release; requeue, end        the tenant's keys with open jobs
    P:waiting:<l>            zset    submit, requeue, release; take, end  all queued ids, by submission time
    P:tasks                  zset    submit, requeue, release; take, end  queued ids without KV cache, by submission
    P:tenant_tasks           hash    submit, requeue, release; take, end  tenant → number of its ids in P:tasks
    P:deadlines              zset    submit, requeue, release; take,      queued ids with a deadline or TTL, by its end
                                     end, sweep
    P:virtual_time:<l>       zset    submit, requeue, release; take,      tenants with queued jobs, by virtual time
                                     finish, end
    P:virtual_clock:<l>      string  submit, requeue, release; take       the highest virtual time at which a job
                                                                          started, plus 1 per tenant that entered
    P:debt:<l>               zset    take, finish, end; submit, requeue,  virtual times of tenants without queued jobs
                                     release                              that are ahead of the virtual clock
    P:head_served            hash    take                                 class → when the head of its queue was taken
    P:background_turns       hash    take                                 level → its turns of background time, the last
    P:reservations           hash    take; sweep, leave                   node → job for which it keeps room; how long
    P:job:<id>               hash    scripts                              the job's record; result_ttl_ms after its end
    P:request:<id>           string  submit; end, purge,                  the request (wire.py); result_ttl_ms after the
                                     delete_response                      end, for a dead letter 7 days; deleted when
                                                                          the job succeeds
    P:dead_letters           zset    end; sweep, purge                    dead letters by end time; 10,000 for 7 days
    P:log:<id>               list    emit, finish, end; delete_response,  chunks (wire.py); log_ttl_ms after the end
                                     ack
    P:result:<id>            string  finish; shorten_result (PEXPIRE),    the result (results.py); result_ttl_ms, a
                                     delete_response, ack                 large one log_ttl_ms after it was fetched
    P:response:<id>          string  submit; end (PEXPIRE),               the record of a stored response; the job's
                                     delete_response                      `keep` ms after its end, as then its result
    P:running:<node>         set     take; requeue, end, heartbeat        ids of the jobs that a node runs
    P:last_take:<node>       string  take; leave                          number and answer of the last take; 1 min
    P:open                   set     submit; end                          ids of queued and running jobs
    P:tenant:<t>:open        set     submit; end                          the same for one tenant
    P:jobs:<t>               zset    submit, requeue, release; take,      ids of the tenant's queued jobs, by id (all
                                     end                                  scores are 0)
    P:jobs:<state>:<t>       zset    submit (scheduled), take (running),  the same of its jobs in another state; ended
                                     end; submit, sweep                   ones until the record expires
    P:tagged:<t>:<tag>       zset    submit; sweep                        the same by tag, and by `#<hash>` of custom_id
    P:tag_counts:<t>:<tag>   hash    submit, end, change; sweep           jobs of a tag: `<level>`, `<state>:<level>`
    P:metadata:<id>          string  submit; end (PEXPIRE)                the job's metadata, as long as its record
    P:ended:<t>              stream  end; sweep                           the tenant's completions: its ended jobs
                                                                          about 200,000 for result_ttl_ms
    P:ended                  zset    end; sweep                           tenant → when to look at its oldest completion
    P:ended_before           hash    sweep                                tenant → its last completion, after it expired
    P:untold                 stream  end; untold                          ends that webhook endpoints are to be told of
    P:untold_sizes           hash    end; untold                          tenant → number of its entries, up to 100,000
    P:idem:<t>:<hash>        string  submit; end                          the job's id; idem_ttl_ms after its end
    P:nodes                  zset    join, heartbeat, emit; declare_dead, node → last heartbeat; 0: declared dead by its
                                     sweep, leave                         successor
    P:seats                  hash    declare_dead; sweep, leave           seat (a lock on a host) → the nodes that held
                                                                          it, the present holder last
    P:revisions              zset    join, heartbeat; sweep               model revision → last heartbeat
    P:free                   zset    heartbeat, ring, finish; sweep, leave  node → free KV tokens: ring takes the most
    P:pressure               hash    heartbeat; sweep, leave              node → pressure record (wire.py)
    P:paces                  hash    heartbeat; sweep, leave              node that takes jobs → its pace, its most
                                                                          sequences, its KV tokens and its revision
    P:left                   string  take                                 when a take left jobs, and the first; 1 min
    P:adapters               hash    node; sweep, leave                   node with adapters → its pool record
    P:backlog                hash    submit, requeue, release, take, end  level → predicted KV tokens of its queued jobs
    P:queued                 hash    submit, requeue, release, take, end  tenant → those of its foreground jobs; no
                                                                          field where it is 0
    P:queued_background      hash    submit, requeue, release, take, end  the same of its background jobs
    P:stored                 hash    submit, emit, requeue, end; sweep,   tenant → bytes that its jobs occupy
                                     purge, delete_response, ack
    P:reserved               hash    take, emit; requeue, end             tenant → bytes that its running jobs may still
                                                                          write
    P:expiry                 zset    end; shorten_result; submit, sweep,  `<bytes> <tenant> <key>` per stored key of an
                                     purge, delete_response, ack          ended job, by expiry time
    P:usage:<day>            hash    end                                  `<tenant>:<account>:<what>` → jobs; tokens of
                                                                          prompts, cached and completions; 92 days
    P:hour_usage:<hour>      hash    end                                  the same per hour; 72 hours
    P:recent_use:<window>    hash    take, requeue, finish                tenant → KV-token-ms ÷ weight of foreground
                                                                          work in share_window_ms; two such windows
    P:refused:<t>            hash    submit                               its recently refused cost, since when, and the
                                                                          bodies that it counts; 10 min
    P:lengths                hash    end                                  tenant → length of its recent outputs
    P:rate:<t>               hash    submit, release; end                 when its next job and token are due, in ms,
                                                                          and the ms per job and token of that rate
    P:may_use:<t>            zset    submit, release; requeue, end        queued and running ids of the tenant, by the
                                                                          most tokens that they may use
    P:may_use                hash    submit, release; end                 tenant → their sum; no field where it is 0
    P:used:<t>               hash    end, requeue                         slot of 5 s → tokens of the tenant's jobs that
                                                                          ended then; 65 s
    P:readers                zset    reader_heartbeat, submit, attach;    inbox → last heartbeat of its process
                                     sweep
    P:counts                 hash    scripts                              counters of events, for operators
    P:events                 zset    scripts                              the newest 256 events of jobs, by time
    P:node_events            zset    scripts                              the newest 256 events of nodes, by time
    P:audit                  string  audit                                the audit that repairs the pool now; 10 s
    P:record                 string  node, declare                        the pool record (wire.py)
    P:paused                 hash    pause                                `pool`, `level:<l>` or `tenant:<t>` → since
                                                                          when nodes take no such job
    P:bulk:<id>              hash    bulk, change, end                    a bulk action's request, cursor, lease and
                                                                          report; result_ttl_ms after its end
    P:bulks                  zset    bulk, change                         ids of the open bulk actions, by their begin
    P:config                 hash    join, declare; sweep, declare_dead   protocol version; the pool's policy, limits
                                                                          and incarnation (completions.py); its clock
                                                                          (prelude.lua), and the last sweep's time
    P:profile:<id>           list    node; penstock profile (LPOP)        a node's answer to `penstock profile`, 8
                                                                          pieces at a time; 30 s
    penstock:profile:<node>  string  penstock profile; node (DEL)         a request to profile that node; 15 s
    penstock:pools           hash    unconfined nodes, penstock pools     pool → further names that it may serve
                                                                          (wire.py); a hint: readers look at 10,000
                                                                          fields, and need P:record for a pool
    penstock:keys            hash    penstock keys                        API key's id, or `opened` → record (tenant.py)
    penstock:seal            string  the first gateway that needs it      32 random bytes, with which all gateways seal
                                                                          the summaries of conversations; no expiry
    penstock:webhook_secrets hash    gateways                             webhook endpoint → its secrets (webhook.py)

    W stands for penstock:webhook:{all}; webhooks.lua writes these keys, for gateways. broker/schedules.py has S.

    W:endpoints              hash    webhooks                             endpoint → its record (webhook.py)
    W:tenant:<t>             zset    webhooks                             the tenant's endpoints, by their time
    W:delivery:<w>:<event>   hash    webhooks                             a delivery; a day after it was delivered, 7
                                                                          days after it was given up
    W:due:<w>                zset    webhooks                             pending deliveries of an endpoint, by the time
                                                                          of their next attempt
    W:leased:<w>             zset    webhooks                             those that a process makes now, by lease
    W:delivered:<w>          zset    webhooks                             the newest 1,000 delivered ones; a day
    W:dead:<w>               zset    webhooks                             the newest 10,000 given up; 7 days
    W:next                   zset    webhooks                             endpoint → when to look at its deliveries
    W:pending                hash    webhooks                             tenant → number of its pending deliveries
    W:counts                 hash    webhooks                             counters of attempts, for operators

    channel
    P:inbox:<process>          one per reading process and pool: all chunks of a step for that reader, concatenated
    penstock:echo:<process>    messages of a reading process to itself, which prove that its subscription is alive
    P:channel:<t>:<id>         a job's own channel, one chunk a message, if requested; or by a name, of several jobs
    P:doorbell:<node>          a node's doorbell: an empty message, the id of a canceled job, or `profile`

Stored files and batches belong to no pool. F stands for `penstock:{.files}`; no pool can have that name. Their only
writer is files.lua. Its functions are named here; `close` ends a batch. `create` stands for
create_with_input too, which also saves a file and ends its upload, and `delete` for delete_batch.

    key                      type    functions                            content; lifetime
    F:storage                string  storage                              id of the storage that has the contents
    F:file:<id>              hash    save, finish, create, lose; delete,  the record of a stored file
                                     expire, close
    F:files:<tenant>         zset    as F:file, without lose              ids of the tenant's files, by creation
    F:upload:<id>            hash    upload; save, end_upload, finish,    tenant and bytes of an upload
                                     expire, create
    F:uploads                zset    upload, keep_upload; as F:upload     ids of the uploads, by when each is dropped
                                                                          unless its gateway renews it
    F:stored, F:num_files    hash    as F:files                           tenant → bytes, number of its files; `*`: all
    F:uploading,             hash    as F:upload                          tenant → bytes and number of its uploads; `*`:
    F:num_uploads                                                         all
    F:expiry                 zset    save, finish, close; delete, expire  `file:<id>`, `batch:<id>` by when it ends
    F:garbage                zset    save, delete, end_upload, expire,    objects of the storage that are to be deleted
                                     finish, create, close; forget
    F:idem:<tenant>:<hash>   string  save, create                         id and digest of what a key made; 24 h
    F:batch:<id>             hash    create, take, keep, start, fail,     the record of a batch, until it expires
                                     commit, finalize, finish, cancel,
                                     pause; expire, delete
    F:batches:<tenant>       zset    create; expire, delete               ids of the tenant's batches, by creation
    F:open_batches           zset    create, take, keep, release; close   ids of the open batches, by the time at which
                                                                          any process may take it
    F:untold                 zset    close; told                          `<id> <status> <tenant>` of ended batches of
                                                                          which no webhook endpoint is told yet
    F:parts:<batch>          list    commit; finish                       `<name> <kind> <bytes>` per committed part
    F:rows:<batch>           string  commit; finish                       a bit per row: whether a part has it
    F:num_open, F:rows_left  hash    create, start, commit; close         tenant → its open batches, and their rows that
                                                                          no part has; `*`: all
    F:keys                   hash    create; KeyStore, TenantBroker       id of an API key → its record without the
                                                                          digest, for processes that run batches
"""

from __future__ import annotations

import hashlib

from penstock.contract.job import pool_of

FILES = ".files"
"""Stands for a pool in the prefix of the keys of stored files and batches."""
POOLS = "penstock:pools"
API_KEYS = "penstock:keys"
SEAL_KEY = "penstock:seal"
WEBHOOK_SECRETS = "penstock:webhook_secrets"
WEBHOOKS = "penstock:webhook:{all}"
"""W, the prefix of the keys of webhooks."""


def prefix(pool: str) -> str:
    """Return P, the common prefix of the pool's keys."""
    return f"penstock:{{{pool}}}"


def config(pool: str) -> str:
    """Hash: the pool's protocol version, policy, times and limits."""
    return f"{prefix(pool)}:config"


def record(pool: str) -> str:
    """String: the pool's record, as its nodes announce it."""
    return f"{prefix(pool)}:record"


def job(job_id: str) -> str:
    """Hash: a job's record."""
    return f"{prefix(pool_of(job_id))}:job:{job_id}"


def request(job_id: str) -> str:
    """String: a job's request."""
    return f"{prefix(pool_of(job_id))}:request:{job_id}"


def log(job_id: str) -> str:
    """List: a job's chunks."""
    return f"{prefix(pool_of(job_id))}:log:{job_id}"


def result(job_id: str) -> str:
    """String: a job's result."""
    return f"{prefix(pool_of(job_id))}:result:{job_id}"


def response(job_id: str) -> str:
    """String: the record of a stored response."""
    return f"{prefix(pool_of(job_id))}:response:{job_id}"


def paused(pool: str) -> str:
    """Hash: what is paused of the pool."""
    return f"{prefix(pool)}:paused"


def bulk(pool: str, bulk_id: str) -> str:
    """Hash: a bulk action."""
    return f"{prefix(pool)}:bulk:{bulk_id}"


def bulks(pool: str) -> str:
    """Zset: the open bulk actions."""
    return f"{prefix(pool)}:bulks"


def key_hash(idempotency_key: str | None) -> str:
    """Return what a Redis key contains of an idempotency key; an empty text without one."""
    return hashlib.blake2b(idempotency_key.encode(), digest_size=16).hexdigest() if idempotency_key else ""


def idempotency(pool: str, tenant: str, hashed_key: str) -> str:
    """String: the id of the job that was submitted with an idempotency key."""
    return f"{prefix(pool)}:idem:{tenant}:{hashed_key}"


def waiting(pool: str, level: int) -> str:
    """Zset: queued job ids of one level, by submission time."""
    return f"{prefix(pool)}:waiting:{level}"


def nodes(pool: str) -> str:
    """Zset: node ids by last heartbeat."""
    return f"{prefix(pool)}:nodes"


def dead_letters(pool: str) -> str:
    """Zset: ids of dead letters by end time."""
    return f"{prefix(pool)}:dead_letters"


def pressure(pool: str) -> str:
    """Hash: node id → packed pressure record."""
    return f"{prefix(pool)}:pressure"


def adapters(pool: str) -> str:
    """Hash: node id → the pool record that it announced, for nodes with adapters."""
    return f"{prefix(pool)}:adapters"


def backlog(pool: str) -> str:
    """Hash: level → predicted KV tokens of its queued jobs."""
    return f"{prefix(pool)}:backlog"


def delayed_lanes(pool: str) -> str:
    """Zset: `<level>:<tenant>` by the time at which to look at its delayed jobs."""
    return f"{prefix(pool)}:delayed"


def delayed(pool: str, level: int, tenant: str) -> str:
    """Zset: ids of the jobs of one level and tenant that wait for their time, by that time."""
    return f"{prefix(pool)}:delayed:{level}:{tenant}"


def awaiting_tenants(pool: str) -> str:
    """Zset: tenants with jobs that wait for their tokens, by the time at which to look at these."""
    return f"{prefix(pool)}:awaiting"


def awaiting(pool: str, tenant: str) -> str:
    """Zset: ids of a tenant's jobs that wait for its tokens, by level × 1e13 + submission time."""
    return f"{prefix(pool)}:awaiting:{tenant}"


def queue(pool: str, level: int, tenant: str) -> str:
    """Stream: queued job ids of one level and tenant."""
    return f"{prefix(pool)}:queue:{level}:{tenant}"


def requeued(pool: str, level: int, tenant: str) -> str:
    """Zset: queued again or formerly delayed ids of one level and tenant, by submission time."""
    return f"{prefix(pool)}:requeued:{level}:{tenant}"


def queued(pool: str) -> str:
    """Hash: tenant → predicted KV tokens of its queued foreground jobs."""
    return f"{prefix(pool)}:queued"


def queued_background(pool: str) -> str:
    """Hash: tenant → predicted KV tokens of its queued background jobs."""
    return f"{prefix(pool)}:queued_background"


def stored(pool: str) -> str:
    """Hash: tenant → bytes of Redis memory that its jobs occupy, open or ended."""
    return f"{prefix(pool)}:stored"


def reserved(pool: str) -> str:
    """Hash: tenant → bytes of Redis memory that its running jobs may still write."""
    return f"{prefix(pool)}:reserved"


def expiry(pool: str) -> str:
    """Zset: the stored keys of ended jobs, by expiry time."""
    return f"{prefix(pool)}:expiry"


def usage(pool: str, day: int) -> str:
    """Hash: tokens used per tenant and account on a day, in days since 1970-01-01 UTC."""
    return f"{prefix(pool)}:usage:{day}"


def hour_usage(pool: str, hour: int) -> str:
    """Hash: tokens used per tenant and account in an hour, in hours since 1970-01-01 UTC."""
    return f"{prefix(pool)}:hour_usage:{hour}"


def open_jobs(pool: str) -> str:
    """Set: ids of queued and running jobs."""
    return f"{prefix(pool)}:open"


def open_of_tenant(pool: str, tenant: str) -> str:
    """Set: ids of a tenant's queued and running jobs."""
    return f"{prefix(pool)}:tenant:{tenant}:open"


def concurrency_keys(pool: str, tenant: str) -> str:
    """Set: a tenant's concurrency keys with open jobs."""
    return f"{prefix(pool)}:keys:{tenant}"


def metadata(job_id: str) -> str:
    """String: a job's metadata."""
    return f"{prefix(pool_of(job_id))}:metadata:{job_id}"


def jobs_in(pool: str, tenant: str, state: str) -> str:
    """Zset: ids of a tenant's jobs in a state other than queued, by id and so by the time when they were created."""
    return f"{prefix(pool)}:jobs:{state}:{tenant}"


def tagged(pool: str, tenant: str, tag: str) -> str:
    """Zset: ids of a tenant's jobs with a tag, by id; also with the mark of a custom_id."""
    return f"{prefix(pool)}:tagged:{tenant}:{tag}"


def ended(pool: str, tenant: str) -> str:
    """Stream: a tenant's completions, `<uuid> <state>[ <tag>…]` each."""
    return f"{prefix(pool)}:ended:{tenant}"


def ended_before(pool: str) -> str:
    """Hash: tenant → the id of its last completion that expired together with all others."""
    return f"{prefix(pool)}:ended_before"


def untold(pool: str) -> str:
    """Stream: ends of jobs that webhook endpoints are to be told of."""
    return f"{prefix(pool)}:untold"


def webhook_delivery(endpoint_id: str, event_id: str) -> str:
    """Hash: one delivery."""
    return f"{WEBHOOKS}:delivery:{endpoint_id}:{event_id}"


def webhook_list(state: str, endpoint_id: str) -> str:
    """Zset: events of an endpoint by time: `due`, `delivered` or `dead`."""
    return f"{WEBHOOKS}:{state}:{endpoint_id}"


def counts(pool: str) -> str:
    """Hash: counters of events."""
    return f"{prefix(pool)}:counts"


def events(pool: str, kind: str = "") -> str:
    """Zset: the newest events of jobs, or of the kind "node_" those of nodes, by time."""
    return f"{prefix(pool)}:{kind}events"


def stored_file(file_id: str) -> str:
    """Hash: the record of a stored file."""
    return f"{prefix(FILES)}:file:{file_id}"


def files_of(tenant: str) -> str:
    """Zset: ids of a tenant's stored files, by creation."""
    return f"{prefix(FILES)}:files:{tenant}"


def batch(batch_id: str) -> str:
    """Hash: the record of a batch."""
    return f"{prefix(FILES)}:batch:{batch_id}"


def batches_of(tenant: str) -> str:
    """Zset: ids of a tenant's batches, by creation."""
    return f"{prefix(FILES)}:batches:{tenant}"


def batch_parts(batch_id: str) -> str:
    """List: the committed parts of a batch."""
    return f"{prefix(FILES)}:parts:{batch_id}"


def batch_rows(batch_id: str) -> str:
    """String: a bit per row of a batch that a part has."""
    return f"{prefix(FILES)}:rows:{batch_id}"


def key_terms() -> str:
    """Hash: the records of API keys without their digests, by id."""
    return f"{prefix(FILES)}:keys"


def open_batches() -> str:
    """Hash: tenant → its batches that have not ended."""
    return f"{prefix(FILES)}:num_open"


def rows_left() -> str:
    """Hash: tenant → rows of open batches that no part has."""
    return f"{prefix(FILES)}:rows_left"


def profile_request(node_id: str) -> str:
    """String: a request to profile a node. No pool's prefix: only operators may write it."""
    return f"penstock:profile:{node_id}"


def profile(pool: str, profile_id: str) -> str:
    """List: pieces of a node's profile."""
    return f"{prefix(pool)}:profile:{profile_id}"


def inbox_channel(pool: str, process: str) -> str:
    """Channel of one reading process: chunks of the pool's jobs that it reads."""
    return f"{prefix(pool)}:inbox:{process}"


def echo_channel(process: str) -> str:
    """Channel on which a reading process hears itself."""
    return f"penstock:echo:{process}"


def own_channel(job_id: str, tenant: str, name: str = "") -> str:
    """Channel of one job, or of a tenant's jobs that share a name, for Redis clients in any language."""
    return f"{prefix(pool_of(job_id))}:channel:{tenant}:{name or job_id}"


def doorbell(pool: str, node_id: str) -> str:
    """Channel that wakes a node."""
    return f"{prefix(pool)}:doorbell:{node_id}"
