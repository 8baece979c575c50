"""The jobs that a node holds: their state, their times, and the reports of them. No Redis here."""
