"""The input of `penstock batch submit`: checked, completed, and in the form in which a server takes it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.contract.errors import RequestError
from penstock.producer.batch import storage
from penstock.queue.files.batch import MESSAGES_ENDPOINT

if TYPE_CHECKING:
    from penstock.producer.batch.request import InputLine

STDIN = "/dev/stdin"
_REQUEST_MEMBERS = frozenset(("custom_id", "params"))


@contextmanager
def prepared(source: str, model: str | None, retry_of: str | None) -> Iterator[tuple[Path, str]]:
    """Yield a plain file with the checked lines of an input, and the url of its rows.

    Of requests of Anthropic's API, it is the body of a message batch.
    """
    from penstock.producer.batch.request import lines_of, plain_copy, survey_of

    name = STDIN if source == "-" else source
    with (
        storage.local_copy(name, param="input") as packed,
        tempfile.TemporaryDirectory(prefix="penstock-batch-") as folder,
    ):
        with storage.readable("input"):
            path = plain_copy(packed, Path(folder) / "plain")
            survey_of(path)
            if model is not None or retry_of is not None:
                path = _changed(path, Path(folder) / "rows", model, retry_of)
            first = next(lines_of(path))
            is_message = "params" in first.fields and "url" not in first.fields and "body" not in first.fields
            if is_message:
                _write_body(lines_of(path), body := Path(folder) / "body", model)
                yield body, MESSAGES_ENDPOINT
                return
        url = first.fields.get("url")
        if not isinstance(url, str):
            raise RequestError(f"line {first.number}: url must be a text", param="input")
        yield path, url


def _changed(path: Path, target: Path, model: str | None, retry_of: str | None) -> Path:
    """Write the rows that an error file lists (None: all), with `model` in those that name none."""
    from penstock.producer.batch.request import lines_of

    wanted = None if retry_of is None else _failed_in(retry_of)
    num_rows = 0
    with target.open("w", encoding="utf-8") as file:
        for line in lines_of(path):
            if wanted is None or line.custom_id in wanted:
                file.write(json.dumps(_with_model(line, model), ensure_ascii=False) + "\n")
                num_rows += 1
    if not num_rows:
        raise RequestError(f"retry_of: no row of the input is in {retry_of}", param="retry_of")
    return target


def _failed_in(name: str) -> set[str]:
    try:
        with storage.readable("retry_of"):
            return {str(json.loads(line)["custom_id"]) for line in Path(name).read_text("utf-8").splitlines()}
    except (ValueError, KeyError, TypeError):
        raise RequestError(f"retry_of: {name} is no error file of a batch", param="retry_of") from None


def _with_model(line: InputLine, model: str | None) -> dict[str, Any]:
    body = line.fields.get("body")
    if model is None or not isinstance(body, dict) or body.get("model") is not None:
        return line.fields
    return {**line.fields, "body": {**body, "model": model}}


def _write_body(lines: Iterable[InputLine], target: Path, model: str | None) -> None:
    """Write the body of a message batch, with `model` in the requests that name none.

    Raises RequestError for a line that is no request.
    """
    with target.open("wb") as file:
        file.write(b'{"requests": [')
        for at, line in enumerate(lines):
            params = line.fields.get("params")
            if not isinstance(params, dict) or not line.fields.keys() <= _REQUEST_MEMBERS:
                message = "a line of a message batch has custom_id and params, an object, and nothing else"
                raise RequestError(f"line {line.number}: {message}", param="input")
            if model is not None and params.get("model") is None:
                params = {**params, "model": model}
            request = json.dumps({"custom_id": line.custom_id, "params": params}, ensure_ascii=False)
            file.write((b",\n" if at else b"\n") + request.encode(errors="surrogatepass"))
        file.write(b"\n]}")
