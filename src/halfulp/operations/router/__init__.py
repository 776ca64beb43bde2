"""A router of experts, as data."""
