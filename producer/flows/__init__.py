"""Flows: batches whose rows wait for other rows, and whose prompts have the texts of those rows.

This package knows rows and the marks in them, but neither a queue nor files: `stored_batches` runs a flow.
"""
