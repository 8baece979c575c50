"""The `penstock` command, one module per subcommand. It is the only package that may import all others."""
