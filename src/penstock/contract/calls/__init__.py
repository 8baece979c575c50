"""Reading and writing of tool calls in the formats of `contract/tool_formats.py`."""
