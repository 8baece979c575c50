"""Batches of stored files: one process at a time runs each, and any other one can go on."""
