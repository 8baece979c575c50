"""Read the rest of a stream from another process.

Without arguments this program submits a job, reads a few chunks, and starts a second process. That process knows only
the job's id and the last index. It reads the rest.
"""

import subprocess
import sys

from penstock import Client

NUM_CHUNKS_HERE = 3


def begin() -> None:
    """Submit a job, print its first chunks, and let another process print the others."""
    with Client() as client:
        job = client.submit("Once upon a time", max_tokens=32, temperature=0)
        for chunk in job.stream():
            print(chunk.text, end="", flush=True)
            if chunk.index + 1 == NUM_CHUNKS_HERE:
                break
    subprocess.run([sys.executable, __file__, job.id, str(NUM_CHUNKS_HERE - 1)], check=True)


def go_on(job_id: str, last_index: int) -> None:
    """Print what comes behind the chunk of that index."""
    with Client() as client:
        for chunk in client.attach(job_id, after=last_index).stream():
            print(chunk.text, end="", flush=True)
    print(f"\n(from chunk {last_index + 1} on: by another process)")


if len(sys.argv) == 1:
    begin()
else:
    go_on(sys.argv[1], int(sys.argv[2]))
