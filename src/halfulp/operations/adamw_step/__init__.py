"""A step of AdamW, as data."""
