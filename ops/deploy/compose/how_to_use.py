"""Prints how to use docker-compose.yml's gateway, once it serves a model; then stays, because `up --wait` waits for it.

    python how_to_use.py KEY_FILE       GATEWAY_BIND, GATEWAY_PORT: where the host publishes the gateway

The key is never printed, only the command that shows it.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.request
from pathlib import Path

_GATEWAY = "http://gateway:8000"
_POLL_S = 1.0
_DONE = Path("/tmp/ready")
"""For the healthcheck."""
SHOW_KEY = "docker compose run --rm --no-deps admin cat /keys/first-key"


def served_models(key: str, gateway: str = _GATEWAY) -> list[str]:
    """Return the models that the gateway serves now; none if it does not answer."""
    # A proxy of the surroundings does not reach this network.
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(f"{gateway}/v1/models", headers={"Authorization": f"Bearer {key}"})
    try:
        with direct.open(request, timeout=10) as answer:
            return [model["id"] for model in json.load(answer)["data"]]
    except OSError:
        return []


def usage(url: str, models: list[str]) -> str:
    """Return what a user needs for a first request."""
    body = {"model": models[0], "messages": [{"role": "user", "content": "Name three rivers."}]}
    return f"""
penstock is ready.

  URL        {url}/v1        for any client of OpenAI; a page for the browser: {url}/
  model      {", ".join(models)}
  API key    in the volume first-key. This command shows it:
             {SHOW_KEY}

  KEY=$({SHOW_KEY})
  curl {url}/v1/chat/completions -H "Authorization: Bearer $KEY" \\
    -H 'Content-Type: application/json' -d '{json.dumps(body)}'

docs/howto/compose.md: other models, GPUs, settings, Redis for Python clients and subscribers.
"""


def published(bind: str, port: str) -> str:
    """Return the URL of the published gateway: of the first one if `port` is a range."""
    host = "localhost" if bind in ("0.0.0.0", "::", "[::]") else bind
    return f"http://{host}:{port.partition('-')[0]}"


def main() -> None:
    """Wait for a model, print, and wait for the end."""
    key = Path(sys.argv[1]).read_text().strip()
    while not (models := served_models(key)):
        time.sleep(_POLL_S)
    print(usage(published(os.environ["GATEWAY_BIND"], os.environ["GATEWAY_PORT"]), models), flush=True)
    _DONE.touch()
    # Without an interpreter, waiting takes no memory.
    os.execvp("sleep", ["sleep", "infinity"])


if __name__ == "__main__":
    main()
