"""Read a stream to its end by `durable-streams` and print each message as a line of JSON."""

from __future__ import annotations

import json
import os

import durable_streams


def read() -> None:
    live = os.environ["PENSTOCK_LIVE"]
    with durable_streams.stream(os.environ["PENSTOCK_STREAM"], offset="-1", live=live) as reading:
        for message in reading.iter_json():
            print(json.dumps(message), flush=True)
            if (
                "outcome" in message
            ):  # This release does not read `Stream-Closed`, and would poll an ended job for good.
                return


if __name__ == "__main__":
    read()
