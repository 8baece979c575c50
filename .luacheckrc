-- The scripts run inside Redis: Lua 5.1 with its globals, and nothing of theirs may be global.
std = "lua51"
read_globals = {"redis", "cjson", "cmsgpack", "struct", "bit", "KEYS", "ARGV"}
max_line_length = 130
-- Not refused yet: an unused argument, and names that hide others.
ignore = {"212", "421", "431"}
