"""Records that every process shares: jobs, chunks, results, API keys, tenant limits, and the tree of errors.

This package imports no torch, no HTTP framework, no Redis client and no other package of penstock.
"""
