"""Requests whose choices are ranked when all of them are complete: beam search, and the best of several samples."""
