"""Steps of AdamW on weights of 16 bits, as data."""
