"""The architecture of a decoder as data: its spec, and one file per model family."""
