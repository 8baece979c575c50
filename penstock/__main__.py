"""`python -m penstock`: the same as the `penstock` command."""

from penstock.cli.main import app

app()
