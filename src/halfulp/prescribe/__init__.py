"""What to do about a run that fails: the smallest changes that the evidence supports, each tried
from where the run stood, next to the run as it is.
"""
