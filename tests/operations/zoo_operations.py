"""Every kernel of the zoo of operations."""

from tests.operations.zoo_elementwise import ELEMENTWISE
from tests.operations.zoo_losses import FUSED_LOSSES, LOSSES
from tests.operations.zoo_norms import NORMS
from tests.operations.zoo_quantized import QUANTIZED
from tests.operations.zoo_quantizers import QUANTIZERS
from tests.operations.zoo_steps import STEPS, STEPS_LOW
from tests.operations.zoo_sums import SUMS

KERNELS = (
    *NORMS,
    *LOSSES,
    *ELEMENTWISE,
    *SUMS,
    *STEPS,
    *QUANTIZERS,
    *QUANTIZED,
    *FUSED_LOSSES,
    *STEPS_LOW,
)

EXPECTED_DEFECTS = frozenset(
    {
        ("layer_norm", "torch"),
        ("cross_entropy", "torch"),
        ("embedding", "torch"),
        ("adamw_low", "torch"),
    }
)
"""Built-in targets that are defects, and known to be (docs/operations.md)."""
