"""A node among others: its heartbeat, its health and its seat."""
