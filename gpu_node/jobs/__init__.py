"""The jobs that a node holds: their state, their ledger and their times. No Redis here."""
