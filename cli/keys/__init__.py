"""`penstock keys`, for the API keys of the gateways that share one Redis: its commands, and what they print."""
