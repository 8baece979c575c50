"""The engine of encoders: steps of whole texts, without a KV cache, scheduler or sampler."""
