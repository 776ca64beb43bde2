"""Experiments: what the papers claim and what halfulp finds, measured anew on any machine.

Nothing is imported here; ask for the experiment by its file, such as `halfulp.experiments.failure`.
"""
