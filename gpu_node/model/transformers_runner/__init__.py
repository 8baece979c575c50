"""The runner of models that transformers builds and no family describes: its modules, our KV blocks and sampler."""
