"""Install the engines that penstock is compared with, and make their weights: `python -m bench.install [NAME…]`."""

from __future__ import annotations

import subprocess
import sys

from bench import peers, weights


def main() -> int:
    """Install the named peers, or all, and make the weights. Return how many steps failed."""
    failed = []
    for peer in sys.argv[1:] or peers.PEERS:
        try:
            peers.install(peer)
        except (OSError, subprocess.CalledProcessError) as error:
            failed.append(f"{peer}: {error}")
    failed += weights.make_all()
    print("\n".join(["", *(f"not installed: {line}" for line in failed)]), file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
