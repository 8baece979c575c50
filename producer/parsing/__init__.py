"""Parsing of generated text into reasoning, content and tool calls, below the client and below the forms of APIs."""
