"""Output of `penstock keys`: JSON objects, and lines for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from penstock.contract.tenant import NO_LIMIT, ApiKey
from penstock.contract.usage import PeriodUsage


def record_object(key: ApiKey) -> dict[str, Any]:
    """Return a key as a JSON object, without its digest and its usage."""
    return {
        "object": "api_key",
        "id": key.key_id,
        "tenant": key.tenant,
        "label": key.label,
        "state": "revoked" if key.is_revoked else "active",
        "created": datetime.fromtimestamp(key.created_s, UTC).isoformat(),
        "scopes": sorted(key.scopes),
        "highest_class": key.highest_class,
        "models": sorted(key.models),
        "limits": key.terms.model_dump(exclude={"account"}),
    }


def key_object(key: ApiKey, num_kept_bytes: int, used: Sequence[int], days: int) -> dict[str, Any]:
    """Return a key with its usage as a JSON object.

    `num_kept_bytes` is what its tenant stores in Redis. `used` counts jobs and prompt, completion and cached tokens of
    the last `days`.
    """
    jobs, prompt, completion, cached = used
    return {
        **record_object(key),
        "tenant_kept_bytes": num_kept_bytes,
        "usage": {
            "days": days,
            "jobs": jobs,
            "prompt_tokens": prompt,
            "cached_tokens": cached,
            "completion_tokens": completion,
        },
    }


def lines_of(shown: dict[str, Any]) -> Iterator[str]:
    """Yield one line for each value of a `key_object`."""
    for name, value in shown.items():
        if name == "limits":
            for limit, number in value.items():
                yield _line(limit, _without_limit(limit) if number == NO_LIMIT else number)
        elif name == "usage":
            counts = " ".join(f"{counter}={count}" for counter, count in value.items() if counter != "days")
            yield _line("usage", f"{counts} (last {value['days']} days)")
        elif name != "object":
            text = ",".join(value) if isinstance(value, list) else value
            yield _line(name, "all" if name == "models" and not value else text)


def line_of(key: ApiKey, num_kept_bytes: int | None, used: Sequence[int] | None) -> str:
    """Return the line of a key in `penstock keys list`, without unset limits and without zero usage."""
    state = "revoked" if key.is_revoked else ",".join(sorted(key.scopes))
    words = [key.key_id, key.tenant, state, f"highest_class={key.highest_class}"]
    words += [f"{name}={value}" for name, value in key.terms.model_dump(exclude_defaults=True).items()]
    if key.models:
        words.append(f"models={','.join(sorted(key.models))}")
    if num_kept_bytes is not None:
        words.append(f"kept_bytes={num_kept_bytes}")
    if used is not None:
        jobs, prompt, completion, _ = used
        words += [f"jobs={jobs}", f"tokens={prompt + completion}"]
    return " ".join([*words, key.label])


def usage_line_of(row: PeriodUsage) -> str:
    """Return a line of `penstock keys usage`."""
    tokens = f"prompt={row.prompt_tokens} cached={row.cached_tokens} completion={row.completion_tokens}"
    return f"{row.label} {row.pool} {row.tenant} {row.account or '-'} jobs={row.jobs} {tokens}"


def _without_limit(name: str) -> str:
    return "as set for the pool" if name == "memory_percent" else "no limit"


def _line(name: str, value: object) -> str:
    return f"{name:<18} {value}".rstrip()
