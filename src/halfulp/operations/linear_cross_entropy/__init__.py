"""Cross-entropy fused with its linear layer, as data."""
