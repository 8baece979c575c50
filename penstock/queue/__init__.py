"""The queue in Redis: its keys, Lua scripts and wire format, admission, scheduling policies, and the broker."""
