"""The `penstock` command, which `python -m penstock` is too."""

import sys

from penstock.contract.errors import EXIT_INTERRUPTED


def main() -> None:
    """Runs the command. Ctrl-C is as quiet while its modules are loaded as it is later."""
    try:
        from penstock.cli.main import app

        app()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
