"""Low-rank adapters (LoRA): reading them, checking them against the model, and finding them by name."""
