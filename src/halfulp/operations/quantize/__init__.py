"""Quantizers, as data."""
