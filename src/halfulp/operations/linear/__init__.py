"""Linear layers, as data."""
