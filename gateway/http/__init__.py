"""The HTTP server around the routes: limits of requests, HEAD, and the access log."""
