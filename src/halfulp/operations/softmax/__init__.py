"""Softmax, as data."""
