"""What a kernel does, found in its own error: recipes and faults are emulated on the kernel's
inputs until one of them errs as it does.
"""

from halfulp.reconstruct.causes import CAUSES, Cause

__all__ = ["CAUSES", "Cause"]
