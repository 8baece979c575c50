"""A CSV classified overnight: `python examples/classify_csv.py REVIEWS.csv LABELED.csv [HH:MM]`.

Each row gets one label in a new column. The rows are queued at once, and no node takes one before HH:MM, if that is
given. They run as class `batch`, so people who chat with the model go before them. After an interruption, the same
command continues where it stopped.
"""

import asyncio
import csv
import json
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

from penstock import redis_url_of
from penstock.producer.batch.records import Batch
from penstock.producer.batch.runner import run_batch

LABELS = ["praise", "complaint", "question"]


def requests_of(source: Path) -> Iterator[str]:
    """Yield a line of a batch file for each row of the CSV."""
    with source.open(newline="") as file:
        for number, row in enumerate(csv.DictReader(file)):
            messages = [{"role": "user", "content": f"Is this praise, a complaint or a question?\n\n{row['text']}"}]
            body = {"messages": messages, "structured_outputs": {"choice": LABELS}, "temperature": 0}
            yield json.dumps({"custom_id": str(number), "url": "/v1/chat/completions", "body": body}) + "\n"


def next_time(clock: str) -> float:
    """Return the time since 1970 at which the clock shows HH:MM next."""
    at, now = datetime.strptime(clock, "%H:%M").time(), datetime.now()
    then = datetime.combine(now, at)
    return (then if then > now else then + timedelta(days=1)).timestamp()


def main(source: Path, target: Path, clock: str | None = None) -> None:
    """Classify the rows of `source` into `target`."""
    requests, results = target.with_suffix(".requests.jsonl"), target.with_suffix(".results.jsonl")
    requests.write_text("".join(requests_of(source)))
    batch = Batch(str(requests), str(results), not_before_s=next_time(clock) if clock else None)
    done = asyncio.run(run_batch(redis_url_of(), batch))
    print(f"{done.num_answered} rows have a label, {done.num_failed} have none")

    labels = {}
    for answer in map(json.loads, results.read_bytes().splitlines()):
        response = answer["response"]
        labels[answer["custom_id"]] = response["body"]["choices"][0]["message"]["content"] if response else ""
    with source.open(newline="") as file, target.open("w", newline="") as out:
        reader = csv.DictReader(file)
        writer = csv.DictWriter(out, [*(reader.fieldnames or ()), "label"])
        writer.writeheader()
        writer.writerows({**row, "label": labels[str(number)]} for number, row in enumerate(reader))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:4])
