"""LayerNorm, as data."""
