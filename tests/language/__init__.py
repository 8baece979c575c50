"""The language rules of this repository as a check: its input and its rules.

`make language` prints every finding as `file:line`.
"""
