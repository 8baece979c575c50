"""The architecture of a decoder as data: its spec, and one file for each family of models."""
