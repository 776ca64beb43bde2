"""Embeddings, as data."""
