"""Cross-entropy, as data."""
