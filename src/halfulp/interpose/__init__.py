"""Other people's models, one torch operation at a time: each is seen with its kind and the path of
its module, and may be put into another arithmetic, forward and backward.
"""

from halfulp.interpose.another import Into, Wide, arithmetic
from halfulp.interpose.kinds import KINDS
from halfulp.interpose.named_kernels import Kernel
from halfulp.interpose.opening import Interposed, Observe, Swap, interpose
from halfulp.interpose.operation import Operation, leaves
from halfulp.interpose.standing import ITSELF, module_names

__all__ = [
    "ITSELF",
    "KINDS",
    "Interposed",
    "Into",
    "Kernel",
    "Observe",
    "Operation",
    "Swap",
    "Wide",
    "arithmetic",
    "interpose",
    "leaves",
    "module_names",
]
