"""Sums over rows, as data."""
