"""Rotary position embedding, as data."""
