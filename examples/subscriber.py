"""Read a job's tokens with nothing but a Redis client and msgpack, as a program in any language could.

A job submitted with `channel=True` publishes each chunk on its own channel. A message is one msgpack map: `s` is the
text that became complete, and only the last map has `e`. docs/PROTOCOL.md describes the other fields.
"""

from typing import Any

import msgpack  # type: ignore[import-untyped]
import redis
import uuid_utils

from penstock import Client, redis_url_of

url = redis_url_of()  # of the running `penstock serve`, or PENSTOCK_REDIS_URL; another language reads the latter
connection: Any = redis.Redis.from_url(url)

with Client(url) as client, connection.pubsub() as channel:
    pool = next(iter(client.pools()))
    job_id = f"{pool}.{uuid_utils.uuid7()}"
    # Subscribed before the job exists, so that no message is missed.
    channel.subscribe(f"penstock:{{{pool}}}:channel:{job_id}")
    client.submit("Once upon a time", job_id=job_id, channel=True, max_tokens=32, temperature=0)
    for message in channel.listen():
        if message["type"] == "message":
            chunk = msgpack.unpackb(message["data"])
            print(chunk.get("s", ""), end="", flush=True)
            if "e" in chunk:
                break

print()
