"""What a kernel does, found in its own error: recipes and faults are emulated on the kernel's
inputs until one of them errs as it does.
"""

from halfulp.reconstruct.causes import CAUSES, Cause
from halfulp.reconstruct.found import FoundWay, Reconstruction
from halfulp.reconstruct.naming import Named
from halfulp.reconstruct.operation_asked import OperationReconstruction, reconstruct_operation
from halfulp.reconstruct.operation_called import Failure
from halfulp.reconstruct.operation_reconstruction import of_operation
from halfulp.reconstruct.panel import Trial
from halfulp.reconstruct.reconstruction import of_kernel, reconstruct

__all__ = [
    "CAUSES",
    "Cause",
    "Failure",
    "FoundWay",
    "Named",
    "OperationReconstruction",
    "Reconstruction",
    "Trial",
    "of_kernel",
    "of_operation",
    "reconstruct",
    "reconstruct_operation",
]
