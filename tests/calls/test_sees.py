"""What a query sees: one rule, held to the definition, for any integers."""

import itertools
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import halfulp
from halfulp.calls import Sees, sees_of

N, N_K = 9, 13
NUMBERS = st.one_of(
    st.integers(-25, 25), st.sampled_from([2**31, 2**62, sys.maxsize, 2**64, 10**30])
)
SIDES = st.one_of(st.integers(-1, 25), st.sampled_from([2**31, sys.maxsize, 10**30]))


def seen(sees: Sees) -> torch.Tensor:
    """Who sees whom, by the words of the fields and Python's own integers."""
    left, right = sees.window or (-1, -1)

    def visible(i: int, j: int) -> bool:
        place = i + sees.offset
        return (
            (not sees.causal or j <= place)
            and (left < 0 or j >= place - left)
            and (right < 0 or j <= place + right)
        )

    return torch.tensor([[visible(i, j) for j in range(N_K)] for i in range(N)])


@given(st.booleans(), st.none() | st.tuples(SIDES, SIDES), NUMBERS)
def test_bounds_tiles_and_near_numbers_are_the_definition(causal, window, offset):
    sees = Sees(causal, window, offset)
    expected = seen(sees)
    for same in (sees, sees.within(N, N_K)):
        least, greatest = same.bounds(N, N_K)
        assert all(x is None or -N <= x <= N_K for x in (least, greatest))
        assert torch.equal(seen(same), expected)
    for rows, cols in itertools.product((slice(0, 4), slice(4, 9)), (slice(0, 5), slice(5, 13))):
        tile = expected[rows, cols]
        assert torch.equal(sees.apply(torch.zeros(tile.shape), rows, cols, 1.0) == 0, tile)
        assert not (sees.hides(rows, cols) and tile.any())
        # bounds that leave a whole tile dark say so: nothing is computed for it
        assert sees.hides(rows, cols) or tile.any() or sees.window is not None


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize(
    ("far", "near"),
    [
        ({"window": (2, sys.maxsize)}, {"window": (2, -1)}),
        ({"window": (10**30, 1)}, {"window": (-1, 1)}),
        ({"window": (10**30 + 2, -1), "causal_offset": 10**30}, {"window": (2, -1)}),
        ({"is_causal": True, "causal_offset": 2**63}, {}),
        ({"is_causal": True, "causal_offset": -(2**63)}, {"attn_mask": torch.zeros(9, 9) > 0}),
    ],
)
def test_numbers_beyond_any_length_mean_what_they_say(backend, far, near):
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 9, 8, generator=draw).requires_grad_() for _ in range(3))
    functions = (
        lambda **more: halfulp.attention(q, k, v, backend=backend, **more),
        lambda **more: halfulp.emulate(q, k, v, **more),
        lambda **more: halfulp.golden(q, k, v, **more).out,
    )
    for function in functions:
        assert torch.equal(function(**far), function(**near))


def test_integers_of_other_libraries_are_integers_and_nothing_else_is():
    sees = sees_of(None, True, (np.int64(3), np.int32(1)), np.int8(-2), (5, 5))
    assert (sees.window, sees.offset) == ((3, 1), -2)
    assert all(type(x) is int for x in (*sees.window, sees.offset))
    for name, bad in {
        "window": [(1.0, 2), (True, 2), (-2, 0), (1, 2, 3), "12", (None, 1), 5],
        "causal_offset": [1.0, True, "1", None, torch.tensor(1)],
    }.items():
        for value in bad:
            given_ = {"window": None, "causal_offset": 0} | {name: value}
            if value is None and name == "window":
                continue
            with pytest.raises(ValueError, match=f"{name}=.*: accepted is"):
                sees_of(None, False, lengths=(5, 5), **given_)
