"""`penstock profile`, for a node that runs anywhere: its command, and what it prints."""
