"""Anthropic's message batches: their bodies, split while they are stored, and their routes."""
