"""`python -m penstock.gateway`: one gateway, with its settings from the environment."""

from __future__ import annotations

import sys

from penstock.contract.errors import PenstockError
from penstock.gateway.app import run
from penstock.gateway.settings import GatewaySettings

if __name__ == "__main__":
    try:
        run(GatewaySettings.load())
    except PenstockError as error:
        sys.exit(f"penstock gateway: {error.message}")
