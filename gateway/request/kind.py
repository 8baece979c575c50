"""The check of a body's headers: it must be plain JSON, and a browser must say so."""

from __future__ import annotations

from starlette.datastructures import Headers

from penstock.contract.errors import RequestError

_UPLOAD = "multipart/form-data"
_OF_BROWSERS = ("origin", "sec-fetch-site")
"""Headers that a browser adds to a request that may change something. A page cannot remove them."""


def check_kind(headers: Headers) -> None:
    """Refuse a body that is compressed, or that a browser sends without declaring it as JSON.

    A browser lets a page of another site send other content types without a CORS preflight, and then names the page's
    origin (`_OF_BROWSERS`). A program, such as curl without `-H`, may leave the type out.
    """
    coding = headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise RequestError(
            f"Content-Encoding {coding[:64]!r} is not supported; send the body uncompressed",
            code="unsupported_media_type",
        )
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and (kind == _UPLOAD or any(name in headers for name in _OF_BROWSERS)):
        raise RequestError("Content-Type must be application/json", code="unsupported_media_type")
