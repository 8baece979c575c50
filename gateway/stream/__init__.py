"""Streaming of token chunks to an HTTP response: merging of jobs, server-sent events, disconnects. No OpenAI shapes."""
