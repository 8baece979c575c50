"""Studies of one question each: formats, adapters, memory, speculation, loading. Each module is a command."""
