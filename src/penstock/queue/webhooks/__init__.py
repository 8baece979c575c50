"""Webhooks in Redis: endpoints with their secrets, and the deliveries to them."""
