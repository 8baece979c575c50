"""OpenAI's request bodies and answers, shared by batch files and HTTP."""
