"""Stochastic rounding, as data."""
