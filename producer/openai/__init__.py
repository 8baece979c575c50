"""OpenAI's shapes, the same in files and over HTTP: what a body may say, and what an answer looks like."""
