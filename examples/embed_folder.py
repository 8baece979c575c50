"""Embeddings of a folder: `python examples/embed_folder.py FOLDER VECTORS.jsonl` embeds its *.txt and *.md files.

VECTORS.jsonl has a line per file. Then the program names the most similar file of each file. After an interruption,
the same command continues where it stopped.
"""

import asyncio
import json
import sys
from pathlib import Path

from penstock import redis_url_of
from penstock.producer.batch.records import Batch
from penstock.producer.batch.runner import run_batch


def write_requests(folder: Path, requests: Path) -> None:
    """Write a line of a batch file for each file. Of a text that is too long, the model reads the end."""
    with requests.open("w") as out:
        for path in sorted((*folder.rglob("*.txt"), *folder.rglob("*.md"))):
            body = {"input": path.read_text(), "truncate_prompt_tokens": -1}
            request = {"custom_id": str(path.relative_to(folder)), "url": "/v1/embeddings", "body": body}
            out.write(json.dumps(request) + "\n")


def vectors_in(results: Path) -> dict[str, list[float]]:
    """Return the vector of each file, which has the length 1."""
    answers = map(json.loads, results.read_bytes().splitlines())
    return {
        answer["custom_id"]: answer["response"]["body"]["data"][0]["embedding"]
        for answer in answers
        if answer["response"]
    }


def main(folder: Path, results: Path) -> None:
    """Embed the files, and print the nearest one of each."""
    requests = results.with_suffix(".requests.jsonl")
    write_requests(folder, requests)
    asyncio.run(run_batch(redis_url_of(), Batch(str(requests), str(results))))
    vectors = vectors_in(results)
    for name, vector in vectors.items():
        others = [
            (sum(a * b for a, b in zip(vector, other, strict=True)), other_name)
            for other_name, other in vectors.items()
            if other_name != name
        ]
        if others:
            similarity, nearest = max(others)
            print(f"{name}: {nearest} ({similarity:.3f})")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
