"""RMSNorm, as data."""
