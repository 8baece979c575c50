"""OpenAI's batches over stored files."""
