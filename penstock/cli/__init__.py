"""The `penstock` command, one file per command: starts everything, and is the only room that may import all others."""
