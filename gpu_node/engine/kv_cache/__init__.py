"""The KV cache: blocks on the device and on the host, the index of cached prefixes, and eviction."""
