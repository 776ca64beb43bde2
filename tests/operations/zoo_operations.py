"""Every kernel of the zoo of operations."""

from tests.operations.zoo_losses import LOSSES
from tests.operations.zoo_norms import NORMS

KERNELS = (*NORMS, *LOSSES)

EXPECTED_DEFECTS = frozenset({("layer_norm", "torch"), ("cross_entropy", "torch")})
"""Built-in targets that are defects, and known to be (docs/operations.md)."""
