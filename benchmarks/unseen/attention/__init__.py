"""Faults of attention, set by set: NAME.py holds the set, NAME_*.py what it is written with."""
