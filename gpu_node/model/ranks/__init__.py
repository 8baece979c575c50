"""Ranks that compute one model together: their shared memory, their messages, and how they start and end.

A group of ranks is one node. Rank 0 is in the process of the engine, which schedules and samples. Each further rank
has a runner and nothing else: it waits for messages, computes its part of each step, and ends with rank 0. Nothing here
knows how a runner divides its work.
"""
