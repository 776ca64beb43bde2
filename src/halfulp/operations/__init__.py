"""Operations as data: a folder for each, with the same four files.

`operation_named("rms_norm")` reads one of the folders here, `operation_named("./softplus")` one of
the user's own.
"""

from halfulp.operations.operation_calls import (
    DTYPES,
    OperationCalls,
    OperationResult,
    calls_at,
    changed,
    defined,
    drawn_calls,
    emulated,
    first_calls,
    in_own_dtypes,
    sizes_of,
)
from halfulp.operations.operation_data import (
    BuiltIn,
    Define,
    Operand,
    Operation,
    OperationProbe,
    Output,
    Sizes,
    Tensors,
)
from halfulp.operations.operation_sizes import probe_of, size_rows
from halfulp.operations.reading import ATTENTION, operation_named, operation_names
from halfulp.operations.recorded import Recorded, Slope, UnlikeError
from halfulp.operations.seam import (
    OF_DTYPE,
    OPERAND,
    PLACE,
    STOCHASTIC,
    Change,
    Rounding,
    Steps,
    disturbed,
    exactly,
)

__all__ = [
    "ATTENTION",
    "DTYPES",
    "OF_DTYPE",
    "OPERAND",
    "PLACE",
    "STOCHASTIC",
    "BuiltIn",
    "Change",
    "Define",
    "Operand",
    "Operation",
    "OperationCalls",
    "OperationProbe",
    "OperationResult",
    "Output",
    "Recorded",
    "Rounding",
    "Sizes",
    "Slope",
    "Steps",
    "Tensors",
    "UnlikeError",
    "calls_at",
    "changed",
    "defined",
    "disturbed",
    "drawn_calls",
    "emulated",
    "exactly",
    "first_calls",
    "in_own_dtypes",
    "operation_named",
    "operation_names",
    "probe_of",
    "size_rows",
    "sizes_of",
]
