"""Responses of OpenAI's API, as bodies over HTTP and as rows of batches: their fields, and their objects."""
