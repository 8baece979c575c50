"""API keys, and the deletion of all that Redis holds of a tenant."""
