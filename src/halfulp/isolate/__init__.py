"""Isolation: what makes a run fail, found by training it again with one thing changed at a time."""
