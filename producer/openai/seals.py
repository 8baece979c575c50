"""Seals of texts that a client keeps and sends back: summaries of conversations, and the reasoning of earlier answers.

A text is the tenant's own, so the seal does not hide it. It shows that a gateway made the text for this tenant and this
model, and that nothing was changed.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from typing import Literal, NamedTuple

from penstock.queue.wire import pack

THOUGHTS = "thoughts"
"""The option of a body with the seals of earlier reasoning, not checked yet: index of the message, digest and tag."""
SealedKind = Literal["summary", "reasoning"]
_VERSIONS: dict[SealedKind, bytes] = {"summary": b"\x01", "reasoning": b"\x02"}
"""The first byte of what is sealed, by its kind."""
_TAG_BYTES = hashlib.sha256().digest_size


class Seal(NamedTuple):
    """What a gateway compares: the digest of a text, and the tag that came with it."""

    digest: bytes
    tag: bytes


def sealed(kind: SealedKind, text: str, key: bytes, *, tenant: str, model: str) -> str:
    """Return a text with its seal, as a text without special characters."""
    data = text.encode(errors="replace")
    tag = _tag_of(kind, hashlib.sha256(data).digest(), key, tenant=tenant, model=model)
    return base64.urlsafe_b64encode(_VERSIONS[kind] + tag + data).decode()


def opened(kind: SealedKind, content: str) -> tuple[str, Seal]:
    """Return the text, and the seal that is not checked yet. Raises ValueError for what is no sealed text."""
    raw = _decoded(kind, content)
    data = raw[_TAG_BYTES:]
    text = data.decode()  # UnicodeDecodeError is a ValueError.
    if not text:
        raise ValueError("no text is sealed")
    return text, Seal(hashlib.sha256(data).digest(), raw[:_TAG_BYTES])


def signature(kind: SealedKind, digest: bytes, key: bytes, *, tenant: str, model: str) -> str:
    """Return the seal of a text that stands beside it. `digest`: SHA-256 of the text in UTF-8."""
    tag = _tag_of(kind, digest, key, tenant=tenant, model=model)
    return base64.urlsafe_b64encode(_VERSIONS[kind] + tag).decode()


def signed(kind: SealedKind, text: str, given: str) -> Seal:
    """Return the seal that a text has by its signature, not checked yet. Raises ValueError for what is no signature."""
    tag = _decoded(kind, given)
    if len(tag) != _TAG_BYTES:
        raise ValueError("not a signature")
    return Seal(hashlib.sha256(text.encode(errors="replace")).digest(), tag)


def is_genuine(kind: SealedKind, seal: Seal, key: bytes, *, tenant: str, model: str) -> bool:
    """Return whether the text was sealed with this key for this tenant and model."""
    return hmac.compare_digest(seal.tag, _tag_of(kind, seal.digest, key, tenant=tenant, model=model))


def _decoded(kind: SealedKind, content: str) -> bytes:
    """Return what follows the first byte. Raises ValueError for another kind, and for what is not encoded."""
    try:
        raw = base64.b64decode(content, altchars=b"-_", validate=True)
    except binascii.Error as error:
        raise ValueError("not encoded") from error
    if raw[:1] != _VERSIONS[kind] or len(raw) <= _TAG_BYTES:
        raise ValueError("sealed as something else")
    return raw[1:]


def _tag_of(kind: SealedKind, digest: bytes, key: bytes, *, tenant: str, model: str) -> bytes:
    return hmac.digest(key, pack([_VERSIONS[kind], tenant, model, digest]), "sha256")
