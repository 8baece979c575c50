"""The OpenAI HTTP API: routes, errors, and answers as JSON or as streams. It uses no Redis, model or tokenizer."""
