"""The one door to Redis: connection, scripts, and a typed method per script; Redis errors are translated here only."""
