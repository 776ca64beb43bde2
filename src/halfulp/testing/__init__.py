"""For tests of kernels, other people's and ours: is one sound, and does a result keep its recipe's
error budget.

    assert_sound(my_attention, like="stock")

    inputs = value_offset(gaussian(length=256), 8.0)
    assert_within_budget(attend(my_kernel, inputs), inputs, BF16_FLASH2)

With pytest the fixture `assert_sound` does the same, tries the input that failed last time first,
and writes the figures into JUnit's properties.
"""

from halfulp.attention import golden
from halfulp.audit.inputs import Inputs
from halfulp.testing.budgets import (
    assert_within_budget,
    attend,
    attention_sink,
    budget,
    common_key,
    errors,
    from_scores,
    gaussian,
    relative_error,
    value_offset,
)
from halfulp.testing.soundness import Failing, SoundnessError, assert_sound, replay

__all__ = [
    "Failing",
    "Inputs",
    "SoundnessError",
    "assert_sound",
    "assert_within_budget",
    "attend",
    "attention_sink",
    "budget",
    "common_key",
    "errors",
    "from_scores",
    "gaussian",
    "golden",
    "relative_error",
    "replay",
    "value_offset",
]
