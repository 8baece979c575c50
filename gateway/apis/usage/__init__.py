"""What API keys used, and the caller's key, over HTTP."""
