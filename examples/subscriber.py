"""Read a job's tokens with nothing but a Redis client, as a program in any language could.

A job submitted with `channel="json"` publishes each chunk on a channel. A message is one JSON object: `text` is what
became complete, and only the last one has `outcome`. docs/howto/redis_channels.md says how to repair gaps.
"""

import json
from typing import Any

import redis

from penstock import Client, redis_url_of

url = redis_url_of()  # of the running `penstock serve`, or PENSTOCK_REDIS_URL; another language reads the latter
connection: Any = redis.Redis.from_url(url)

with Client(url) as client, connection.pubsub() as channel:
    pool = client.served_pool().pool  # where `submit` sends jobs that name no model
    # Jobs may share a channel, so it is subscribed to before the job exists, and no message is missed.
    channel.subscribe(f"penstock:{{{pool}}}:channel:default:stories")
    client.submit("Once upon a time", channel={"name": "stories"}, max_tokens=32, temperature=0)
    for message in channel.listen():
        if message["type"] == "message":
            event = json.loads(message["data"])
            print(event.get("text", ""), end="", flush=True)
            if "outcome" in event:
                break

print()
