"""Checkpoints: find, download and read the files of a model. No module imports torch at module level."""
