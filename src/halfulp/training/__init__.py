"""The training lab: small, readable trainings that repeat bit for bit, with attention passed in
head by head.

`halfulp.training.loop.train` trains a `RunConfig`; `halfulp.training.presets` has those worth
repeating.
"""
