"""Benchmarks of penstock and other engines. README.md in this folder describes how to run and read them.

They are not tests: nothing here passes or fails.
"""
