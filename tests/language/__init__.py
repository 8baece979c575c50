"""The language rules of this repository as a check: its input, its rules, and the number of allowed findings.

`make language` prints every finding as `file:line`; `allowed.toml` has the allowed number for each folder.
"""
