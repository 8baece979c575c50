"""The OpenAI HTTP API: routes, bodies, and answers as JSON or as streams. It uses no Redis, model or tokenizer."""
