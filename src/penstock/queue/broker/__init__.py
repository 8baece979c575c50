"""All access to Redis: connections, scripts, and a typed method per script. Redis errors are translated only here."""
