"""Checkpoints: finding, downloading and reading the files of a model. Nothing here imports torch."""
