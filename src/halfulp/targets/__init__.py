"""Kernels by name: PyTorch's, other people's, the user's and our own, under one
signature.
"""

from halfulp.targets.builtin import builtin_targets
from halfulp.targets.calling import device_named, one_line, run_target
from halfulp.targets.dialect import (
    canonical,
    is_code,
    operation_targets,
    recipe_in,
    resolve,
    target_of,
)
from halfulp.targets.emulation import emulations
from halfulp.targets.form import BHND, FORMS, Form
from halfulp.targets.in_form import in_its_form
from halfulp.targets.isolated import CallLimits, isolated
from halfulp.targets.operation_calling import operation_target, run_operation
from halfulp.targets.target import SEEDED, Outcome, Target, UnsupportedError, name_of_function

__all__ = [
    "BHND",
    "FORMS",
    "SEEDED",
    "CallLimits",
    "Form",
    "Outcome",
    "Target",
    "UnsupportedError",
    "builtin_targets",
    "canonical",
    "device_named",
    "emulations",
    "in_its_form",
    "is_code",
    "isolated",
    "name_of_function",
    "one_line",
    "operation_target",
    "operation_targets",
    "recipe_in",
    "resolve",
    "run_operation",
    "run_target",
    "target_of",
]
