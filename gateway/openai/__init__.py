"""The OpenAI HTTP API: routes, refusals, and answers in one piece or as streams. No Redis, no model, no tokenizer."""
