"""Linear layers of quantized operands, as data."""
