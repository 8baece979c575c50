"""The Anthropic Messages API: routes, schemas, errors, and answers as JSON or as streams. It uses no Redis or model."""
