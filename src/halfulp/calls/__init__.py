"""One attention call as a value: what is asked, what each query sees, what comes back.

Everything that computes, measures or audits attention takes a `Call`; `check` makes one of what a
caller of PyTorch's function may hand over, and is the only place that judges arguments.
"""

from halfulp.calls.call import TENSORS, Call, Flat
from halfulp.calls.check import check, check_given, is_causal_bias, scale_of, sees_of
from halfulp.calls.dropout import Dropout, draw_seed
from halfulp.calls.returned import Gradients, Result, Saved, gradients_of
from halfulp.calls.sees import EVERYTHING, Sees

__all__ = [
    "EVERYTHING",
    "TENSORS",
    "Call",
    "Dropout",
    "Flat",
    "Gradients",
    "Result",
    "Saved",
    "Sees",
    "check",
    "check_given",
    "draw_seed",
    "gradients_of",
    "is_causal_bias",
    "scale_of",
    "sees_of",
]
