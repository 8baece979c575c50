"""Scheduling: which sequences compute how many tokens in the next step, and which blocks they hold for it."""
