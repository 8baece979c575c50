"""The HTTP server around the routes: limits of requests, API keys, HEAD, the access log, and what an API registers."""
