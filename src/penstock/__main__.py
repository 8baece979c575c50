"""The `penstock` command, which `python -m penstock` is too."""

import os
import sys

from penstock.contract.errors import EXIT_INTERRUPTED, EXIT_WRONG_USE
from penstock.runtime.init_process import reap_orphans_if_first
from penstock.runtime.kept_sockets import KEEPER_VARIABLE


def main() -> None:
    """Runs the command. Ctrl-C is as quiet while its modules are loaded as it is later."""
    if sys.getfilesystemencoding() == "ascii" and os.environ.get("PYTHONUTF8") != "1":
        # Neither paths nor prompts could have other letters. The encoding is fixed when Python starts.
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, sys.orig_argv)
    reap_orphans_if_first()
    if os.environ.get(KEEPER_VARIABLE):
        from penstock.gateway.kept.holder import start_holder

        start_holder()
    try:
        from penstock.cli.main import app

        app()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except ModuleNotFoundError as error:
        if error.name not in ("rich", "typer"):
            raise
        sys.stderr.write(
            "penstock: the commands need packages that are not installed: pip install 'penstock-llm[cli]'\n"
        )
        sys.exit(EXIT_WRONG_USE)


if __name__ == "__main__":
    main()
