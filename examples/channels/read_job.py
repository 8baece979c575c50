"""Print a job's tokens, each once: `python read_job.py JOB_ID CHANNEL`; docs/howto/redis_channels.md says why."""

import json
import os
import sys
import time
import urllib.error
import urllib.request
from http.client import HTTPException

import redis

GATEWAY = os.environ.get("PENSTOCK_URL", "http://127.0.0.1:8000")
HEADERS = {"Authorization": f"Bearer {os.environ.get('PENSTOCK_API_KEY', 'none')}"}
SILENCE_S = 3.0


def get(path):
    return urllib.request.urlopen(urllib.request.Request(GATEWAY + path, headers=HEADERS), timeout=30)


def logged(job_id, seen):
    """Yield the events after number `seen` that the job has by now."""
    with get(f"/v1/jobs/{job_id}") as answer:
        last = json.load(answer)["num_chunks"] - 1
    if seen >= last:
        return
    with get(f"/v1/jobs/{job_id}/stream?after={seen}") as stream:
        for line in stream:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "index" in event:
                    yield event
                if event.get("index", -1) >= last:
                    return


def published(channel):
    """Yield each message; None after silence, and after each subscription."""
    while True:
        try:
            with redis.Redis.from_url(os.environ["REDIS_URL"]).pubsub() as subscription:
                subscription.subscribe(channel)
                subscription.get_message(timeout=SILENCE_S)  # the confirmation
                yield None
                while True:
                    message = subscription.get_message(ignore_subscribe_messages=True, timeout=SILENCE_S)
                    yield json.loads(message["data"]) if message else None
        except (redis.ConnectionError, redis.TimeoutError):
            time.sleep(1)


def events(job_id, channel):
    """Yield a job's events, each once, in order, to the last one."""
    seen = -1
    for message in published(channel):
        if message and (message["id"] != job_id or message["index"] <= seen):
            continue
        found = [message] if message and message["index"] == seen + 1 else logged(job_id, seen)
        try:
            for event in found:
                seen = event["index"]
                yield event
                if "outcome" in event:
                    return
        except urllib.error.HTTPError as error:
            if error.code < 500 and error.code != 429:
                raise
        except (OSError, HTTPException, ValueError):
            pass  # no gateway answers: the next message or silence tries again


if __name__ == "__main__":
    for event in events(*sys.argv[1:]):
        print(event.get("text", ""), end="", flush=True)
    print(f"\n{event['outcome']['state']}")
