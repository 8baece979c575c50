"""Answers: merging of jobs, server-sent events, bodies in pieces, disconnects. Only the default error has a shape."""
