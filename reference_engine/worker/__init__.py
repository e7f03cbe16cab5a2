"""The process that owns the engine's state."""
