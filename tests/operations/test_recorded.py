"""An evaluation that is made again from the steps on that are changed, beside one made anew; and
sums as they run.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfulp.formats import BF16, FP16, OCP_E4M3, compiled, round_to, running_sums
from halfulp.operations import (
    STOCHASTIC,
    Recorded,
    UnlikeError,
    changed,
    drawn_calls,
    in_own_dtypes,
    operation_named,
    operation_names,
)
from halfulp.reconstruct.operation_steps import shapes_of_steps

SMALL = 1 + 2**-6  # times a step: more than any format here keeps


@pytest.mark.parametrize("op", [name for name in operation_names() if name != "attention"])
def test_what_is_made_again_has_the_bits_of_what_is_made_anew(op):
    operation = operation_named(op)
    if STOCHASTIC in operation.stock.steps.values():
        pytest.skip("its numbers hang on how many were drawn")
    generator = torch.Generator().manual_seed(0)
    sizes = operation.sizes[0].with_(calls=1)
    calls = drawn_calls(operation, operation.probes[0].name, sizes, "bfloat16", generator)
    base = operation.stock.change("bfloat16")
    try:
        recorded = Recorded(calls, base, torch.float32)
    except UnlikeError:
        pytest.skip("its operations hang on numbers")
    for step in shapes_of_steps(calls):

        def change(name, exact, step=step):
            value = base(name, exact.detach())
            return value * SMALL if name == step and value.is_floating_point() else value

        again = in_own_dtypes(calls, change, recorded.again(calls, change, {step}))
        anew = changed(calls, change)
        assert again.keys() == anew.keys()
        for name, x in anew.items():
            assert torch.equal(again[name].nan_to_num(7.0), x.nan_to_num(7.0)), (step, name)


@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 999),
       st.sampled_from([BF16, FP16, OCP_E4M3]), st.booleans())  # fmt: skip
def test_sums_as_they_run_round_after_every_term(terms, sums, seed, fmt, wide):
    x = torch.randn(terms, sums, generator=torch.Generator().manual_seed(seed))
    x = (x.double() if wide else x) * 3
    total = torch.zeros_like(x[0])
    found = running_sums(x, fmt)
    for own, term in zip(found, x, strict=True):
        total = round_to(total + term, fmt)
        assert torch.equal(own, total)
    plain = compiled.running_sums(x, fmt)
    assert plain is None or torch.equal(plain, found)
