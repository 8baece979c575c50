"""The queue: keys and scripts in Redis, the wire format, admission, scheduling policies, and the broker."""
