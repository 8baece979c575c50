"""Every Redis key and channel, its type, its life and its only writers.

All keys of a pool share the hash tag `{pool}`, so that a script stays in one cluster slot. P is `penstock:{pool}`.
Times are Redis milliseconds. Of the scripts' functions, `end` closes a job, `requeue` queues one again (give_back,
sweep, beat), `let_in` queues one whose time has come (take, sweep), `ring` wakes a node; audit may write all of them,
and forget removes those of a pool that nobody needs any more.

    key                    type    writers                              holds; life
    P:q:<p>:<tenant>       stream  submit; take, end (XDEL, DEL empty)  job ids; p: 0 interactive … 2 batch
    P:back:<p>:<tenant>    zset    requeue, let_in; take, end           ids given back or let in, by submitted ms
    P:later                zset    submit; let_in, end                  ids of jobs with not_before, by when it comes
    P:wait:<p>             zset    submit, requeue, let_in; take, end   all queued ids by submitted ms
    P:due                  zset    submit, requeue, let_in; take, end   ids that wait, by deadline
    P:turn:<p>             zset    submit, requeue, let_in; take,       tenants with queued jobs, by virtual time
                                   finish, end
    P:vtime:<p>            string  submit, requeue, let_in; take        highest virtual time that anybody started at,
                                                                        and one more for each tenant that came
    P:debt:<p>             zset    take, finish, end; submit, requeue,  tenants without queued jobs that are ahead of it
                                   let_in
    P:head                 hash    take                                 class → when the head of its queue was taken
    P:hold                 hash    take; sweep, leave                   node → what it makes room for, and until when
    P:job:<id>             hash    scripts                              the job's record; result_ttl_ms after its end
    P:in:<id>              string  submit; end, purge                   the request (wire.py); gone at the end, a dead
                                                                        letter's after 7 days
    P:dead                 zset    end; sweep, purge                    dead letters by end; 10,000 for 7 days
    P:log:<id>             list    emit, finish, end                    chunks (wire.py); log_ttl_ms after the end
    P:out:<id>             string  finish; deliver (PEXPIRE)            the result (wire.py); result_ttl_ms, a large one
                                                                        log_ttl_ms once it was delivered
    P:run:<node>           set     take; requeue, end, beat             ids a node holds
    P:took:<node>          string  take; leave                          last call number and its answer; 1 min
    P:open                 set     submit; end                          ids not yet terminal
    P:tenant:<t>:open      set     submit; end                          the same, of one tenant
    P:idem:<t>:<hash>      string  submit; end                          the job's id; idem_ttl_ms after its end
    P:nodes                zset    join, beat, emit; succeed, sweep,    node → last beat; 0: its successor knows it dead
                                   leave
    P:seats                hash    succeed; sweep, leave                seat of a host → who held it, the holder last
    P:revs                 zset    join, beat; sweep                    revision → last beat
    P:free                 zset    beat, ring; sweep, leave             node → free KV tokens: who is rung
    P:pressure             hash    beat; sweep, leave                   node → pressure record (wire.py)
    P:adapters             hash    node; sweep, leave                   node → what it announced, if it has adapters
    P:backlog              hash    submit, requeue, let_in, take, end   queued cost in tokens per class
    P:queued               hash    submit, requeue, let_in, take, end   the same per tenant; no field where it is 0
    P:bytes                hash    submit; end                          bytes that open jobs may come to hold, per class
    P:kept                 hash    submit, end; sweep, purge            bytes per tenant: of open jobs as predicted, of
                                                                        ended ones as stored
    P:expiry               zset    end; deliver; submit, sweep, purge   `<bytes> <tenant> <key>` of what is stored of
                                                                        ended jobs, by when it expires
    P:usage:<day>          hash    end                                  `<tenant>:<account>:<what>` → jobs and tokens of
                                                                        prompts, cached and completions; 92 days
    P:used:<window>        hash    take, requeue, finish                tenant → charged KV-token-ms ÷ weight in each
                                                                        window of share_window_ms; two of these
    P:refused              hash    submit                               cost refused lately, and when; 10 min
    P:rate:<t>             hash    submit; end                          ms when its next job and token are due
    P:readers              zset    read_beat, submit, attach; sweep     inbox → last beat
    P:sweep                string  sweep, succeed                       when it last ran
    P:count                hash    scripts                              how often what happened, for operators
    P:audit                string  audit                                who repairs this pool at the moment; 10 s
    P:schema               hash    join                                 protocol version; the pool's policy and limits
    penstock:pools         hash    node, penstock pools                 pool → pool record (wire.py)
    penstock:keys          hash    penstock keys                        API key's id → its record (api_keys.py)

    channel
    penstock:inbox:<process>   one per reading process: this step's chunks for that reader, back to back
    P:ch:<id>                  a job's own channel, one chunk a message, when asked for at submit or attach
    P:ctl:<node>               doorbell of a node: empty, or the id of a job that was cancelled
"""

from __future__ import annotations

from penstock.contract.job import pool_of

POOLS = "penstock:pools"
API_KEYS = "penstock:keys"


def prefix(pool: str) -> str:
    """P, the prefix of all of a pool's keys."""
    return f"penstock:{{{pool}}}"


def schema(pool: str) -> str:
    """Hash: the pool's protocol version, times and limits."""
    return f"{prefix(pool)}:schema"


def job(job_id: str) -> str:
    """Hash: a job's record."""
    return f"{prefix(pool_of(job_id))}:job:{job_id}"


def request(job_id: str) -> str:
    """String: a job's request."""
    return f"{prefix(pool_of(job_id))}:in:{job_id}"


def log(job_id: str) -> str:
    """List: a job's chunks."""
    return f"{prefix(pool_of(job_id))}:log:{job_id}"


def result(job_id: str) -> str:
    """String: a job's result."""
    return f"{prefix(pool_of(job_id))}:out:{job_id}"


def waiting(pool: str, priority: int) -> str:
    """Zset: queued job ids of one class."""
    return f"{prefix(pool)}:wait:{priority}"


def nodes(pool: str) -> str:
    """Zset: node ids by last beat."""
    return f"{prefix(pool)}:nodes"


def dead(pool: str) -> str:
    """Zset: dead letters by when they died."""
    return f"{prefix(pool)}:dead"


def pressure(pool: str) -> str:
    """Hash: node id to packed pressure record."""
    return f"{prefix(pool)}:pressure"


def adapters(pool: str) -> str:
    """Hash: node id to the pool record that it announced, for those with adapters."""
    return f"{prefix(pool)}:adapters"


def backlog(pool: str) -> str:
    """Hash: queued cost per class."""
    return f"{prefix(pool)}:backlog"


def queued(pool: str) -> str:
    """Hash: queued cost per tenant."""
    return f"{prefix(pool)}:queued"


def promised_bytes(pool: str) -> str:
    """Hash: bytes that open jobs may come to hold, per class."""
    return f"{prefix(pool)}:bytes"


def kept_bytes(pool: str) -> str:
    """Hash: bytes per tenant, of its open jobs as predicted and of its ended ones as stored."""
    return f"{prefix(pool)}:kept"


def expiry(pool: str) -> str:
    """Zset: what is stored of ended jobs, by when it expires."""
    return f"{prefix(pool)}:expiry"


def usage(pool: str, day: int) -> str:
    """Hash: tokens used on a day, counted from 1970, per tenant and account."""
    return f"{prefix(pool)}:usage:{day}"


def open_jobs(pool: str) -> str:
    """Set: ids of jobs that are not terminal."""
    return f"{prefix(pool)}:open"


def counts(pool: str) -> str:
    """Hash: how often what happened."""
    return f"{prefix(pool)}:count"


def inbox_channel(process: str) -> str:
    """Channel of one reading process."""
    return f"penstock:inbox:{process}"


def own_channel(job_id: str) -> str:
    """A job's own channel, for any Redis client in any language."""
    return f"{prefix(pool_of(job_id))}:ch:{job_id}"


def doorbell(pool: str, node_id: str) -> str:
    """Channel that wakes one node."""
    return f"{prefix(pool)}:ctl:{node_id}"
