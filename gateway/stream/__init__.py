"""From token chunks to an open HTTP response: merging jobs, server-sent events, hang-ups. Knows no OpenAI shapes."""
