"""Routes of other servers that this gateway does not have, and what it has instead. A 404 says it."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.routing import BaseRoute, Match
from starlette.types import Scope

MOVING = "docs/howto/moving.md"
_CHAT = "POST /v1/chat/completions"
_TEXT = "POST /v1/completions"
_EMBED = "POST /v1/embeddings"
_MODELS = "GET /v1/models"
_ONE_MODEL = (
    "nothing: a node has one model for its life, and `penstock serve MODEL` or `penstock node MODEL` starts one"
)
_HEALTH = "GET /health, or /ready"
_ADAPTERS = "GET /v1/models; --lora and --lora-dir of `penstock node` give adapters"

INSTEAD: dict[str, dict[str, str]] = {
    "Ollama": {
        "/api/chat": _CHAT,
        "/api/generate": _TEXT,
        "/api/tags": _MODELS,
        "/api/ps": f"{_MODELS}, or /health/nodes",
        "/api/show": f"{_MODELS}/NAME",
        "/api/embed": _EMBED,
        "/api/embeddings": _EMBED,
        "/api/version": "GET /version",
        **dict.fromkeys(
            ("/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete", "/api/blobs"), _ONE_MODEL
        ),
    },
    "llama-server": {
        "/completion": _TEXT,
        "/infill": f"{_TEXT}, with the model's own tokens for a gap in the prompt",
        "/props": f"{_MODELS}, or /health/nodes",
        "/slots": "GET /v1/jobs, or /health/nodes",
        "/apply-template": "POST /tokenize with `messages` and `return_token_strs`",
        "/embedding": _EMBED,
        "/reranking": "POST /v1/rerank",
        "/v1/reranking": "POST /v1/rerank",
        "/lora-adapters": _ADAPTERS,
        "/models/load": _ONE_MODEL,
        "/models/unload": _ONE_MODEL,
    },
    "TGI": {
        "/generate": _TEXT,
        "/generate_stream": f'{_TEXT} with `"stream": true`',
        "/chat_tokenize": "POST /tokenize with `messages`",
        "/invocations": _CHAT,
    },
    "vLLM": {
        "/ping": _HEALTH,
        "/load": "GET /metrics",
        "/server_info": "GET /version",
        "/v1/load_lora_adapter": _ADAPTERS,
        "/v1/unload_lora_adapter": _ADAPTERS,
        "/v1/audio": "nothing: texts only are served",
    },
    "SGLang": {
        "/health_generate": _HEALTH,
        "/get_model_info": _MODELS,
        "/model_info": _MODELS,
        "/get_server_info": "GET /version",
        "/flush_cache": "nothing: the cache of prefixes evicts by itself",
    },
}
"""Server → its route, with all below it → what a caller uses here."""


def hint(scope: Scope, routes: Iterable[BaseRoute]) -> str:
    """Return what a 404 says of another server's path, and of one that lacks its `/v1` or has it twice."""
    path: str = scope["path"].rstrip("/")
    for server, instead in INSTEAD.items():
        for theirs, ours in instead.items():
            if path == theirs or path.startswith(f"{theirs}/"):
                return f"; this route is of {server}, and here it is {ours} ({MOVING})"
    meant, remedy = f"/v1{path}", "the client's base URL must end in /v1"
    if path.startswith("/v1/v1/"):
        meant, remedy = path.removeprefix("/v1"), "the client adds /v1 itself, so its base URL must not end in /v1"
    is_ours = any(route.matches({**scope, "path": meant})[0] is Match.FULL for route in routes)
    return f"; did you mean {meant}? If so, {remedy}" if is_ours else ""
