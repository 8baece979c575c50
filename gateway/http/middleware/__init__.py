"""Middleware of all routes, from the outermost on as `app.py` puts it around them."""
