"""Reading and writing of tool calls in the formats of `contract/tool_formats.py`, one module for each way to write arguments."""
