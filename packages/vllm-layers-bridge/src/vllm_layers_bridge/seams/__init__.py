"""Where a transformers model meets the engine's state on every step."""
