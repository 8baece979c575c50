"""Anthropic's messages: bodies, answers and errors, shared by HTTP and message batches."""
