"""LoRA adapters: read them, check them against the model, and find them by name."""
