"""The queue in Redis: its keys, Lua scripts and wire format, costs of jobs, scheduling policies, and the broker."""
