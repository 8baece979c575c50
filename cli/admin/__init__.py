"""Commands that show and repair what is in Redis: pools, jobs, dead letters, the audit, and the check of a machine."""
