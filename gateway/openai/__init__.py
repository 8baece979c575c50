"""The OpenAI HTTP API: request schemas, routes, error shape and rendering. No Redis, no model, no tokenizer."""
