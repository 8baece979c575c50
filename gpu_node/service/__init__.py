"""A node among others: its heartbeat, its health, its seat and its threads."""
