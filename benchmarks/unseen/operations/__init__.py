"""Faults of the other operations, set by set: NAME.py holds the set, NAME_*.py its parts."""
