"""The jobs that a node holds: their state, their ledger, their times, and the reports of them. No Redis here."""
