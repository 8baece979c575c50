"""The description of the HTTP API: the OpenAPI document, the page `/docs`, the index and the version."""
