"""Webhooks: the routes of endpoints, and the deliveries that a gateway makes."""
