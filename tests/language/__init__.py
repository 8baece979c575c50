"""The language rules of this repository as a check: what is read, what is wrong in it, and how much of it is left.

`make language` prints every finding as `file:line`; `allowed.toml` holds how many each folder still has.
"""
