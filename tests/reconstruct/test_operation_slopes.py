"""What a rounding explains at most, by slopes: a search leaves out what explains next to nothing,
and must leave out no rounding that is all that a kernel does.
"""

import pytest
import torch

from halfulp.operations import (
    Recorded,
    UnlikeError,
    defined,
    drawn_calls,
    exactly,
    operation_named,
    operation_names,
)
from halfulp.reconstruct.operation_slopes import Slopes
from halfulp.reconstruct.operation_stages import common_ways
from halfulp.reconstruct.operation_steps import shapes_of_steps
from halfulp.reconstruct.operation_trials import FIRST_ORDER, SLIGHT, power, square
from halfulp.reconstruct.operation_ways import FAILS, computed

SMOOTH = [n for n in operation_names() if n not in ("adamw_low", "quantize", "router",
                                                    "stochastic_round")]  # fmt: skip
BY = 1e-6  # of its size


def calls_of(op, probe=0, **sizes):
    operation = operation_named(op)
    own = operation.sizes[0].with_(calls=1)
    fewer = {s: min(n, sizes[s]) for s, n in own.of if s in sizes}
    generator = torch.Generator().manual_seed(0)
    name = operation.probes[probe].name
    return drawn_calls(operation, name, own.with_(**fewer), "bfloat16", generator)


@pytest.mark.parametrize("op", SMOOTH)
def test_slopes_foretell_what_a_small_change_of_a_step_makes(op):
    calls = calls_of(op, T=6, R=6, N=8, K=16)
    recorded = Recorded(calls, exactly, torch.float64)
    generator = torch.Generator().manual_seed(1)
    along = {n: torch.randn(x.shape, generator=generator, dtype=x.dtype)
             for n, x in recorded.found.items() if x.is_floating_point()}  # fmt: skip
    slopes = recorded.slopes([along])
    told = 0
    for step in shapes_of_steps(calls):

        def grown(name, exact, step=step):
            return exact.detach() * (1 + BY) if name == step else exact.detach()

        moved = recorded.again(calls, grown, {step})
        found = sum(float(((moved[n] - recorded.found[n]) * x).sum()) for n, x in along.items())
        of = [s for s in slopes if s.name == step and not s.given]
        due = sum(BY * float((s.after * s.along[0]).sum()) for s in of if s.along[0] is not None)
        sizes = [BY * float((s.after * s.along[0]).norm()) for s in of if s.along[0] is not None]
        assert abs(found - due) <= 1e-3 * sum(sizes) + 1e-13, step
        told += bool(due)
    assert told


@pytest.mark.parametrize("op", SMOOTH)
def test_what_hangs_on_a_step_is_reached_from_it(op):
    calls = calls_of(op, T=6, R=6, N=8, K=16)
    recorded = Recorded(calls, exactly, torch.float64)
    reached = {}
    for step in shapes_of_steps(calls):

        def grown(name, exact, step=step):
            return exact.detach() * 1.25 + 0.125 if name == step else exact.detach()

        moved = recorded.again(calls, grown, {step})
        reached[step] = recorded.reached(step, given=False)
        changed = {n for n, x in moved.items() if not torch.equal(x, recorded.found[n])}
        assert changed <= reached[step], step
    if calls.grads:  # a gradient's own steps are of no result
        assert any(not {*recorded.found} <= names for names in reached.values())


@pytest.mark.parametrize("op", SMOOTH)
def test_no_rounding_that_is_all_a_kernel_does_is_left_out(op):
    calls = calls_of(op, T=6, R=6, N=8, K=64)
    operation = calls.operation
    try:
        recorded = Recorded(calls, operation.floor.change("bfloat16"), torch.float32)
    except UnlikeError:
        pytest.skip("its operations hang on numbers")
    exact, start = defined(calls), computed(calls, operation.floor, ())
    tried = 0
    for way in common_ways(calls):
        if len(way.steps) != 1:
            continue
        try:
            kernel = computed(calls, operation.floor, (way,))
        except FAILS:
            continue
        errors = {n: power(x.double(), exact[n], exact[n]) for n, x in kernel.items()}
        left = {
            n: x.double() - start[n].double()
            for n, x in kernel.items()
            # more than twice what the recipe errs by, and not another function
            if errors[n] > 4 * power(start[n].double(), exact[n], exact[n])
            and errors[n] < FIRST_ORDER**2 * square(exact[n])
        }
        if not left or any(e >= FIRST_ORDER**2 * square(exact[n]) for n, e in errors.items()):
            continue
        tried += 1
        assert Slopes(recorded, operation.floor, left, errors).gain(way) > 2 * SLIGHT, way
    assert tried >= 4


def test_roundings_that_have_nothing_to_do_with_an_error_are_left_out():
    calls = calls_of("layer_norm", probe=0)
    operation = calls.operation
    ways = [w for w in common_ways(calls) if len(w.steps) == 1]
    (of_bias,) = (w for w in ways if str(w) == "the sum over the gradient of biases is rounded to"
                  " bf16 after every term")  # fmt: skip
    exact, start = defined(calls), computed(calls, operation.floor, ())
    kernel = computed(calls, operation.floor, (of_bias,))["grad_bias"].double()
    recorded = Recorded(calls, operation.floor.change("bfloat16"), torch.float32)
    errors = {"grad_bias": power(kernel, exact["grad_bias"], exact["grad_bias"])}
    left = {"grad_bias": kernel - start["grad_bias"].double()}
    slopes = Slopes(recorded, operation.floor, left, errors)
    gains = {str(w): slopes.gain(w) for w in ways}
    assert gains[str(of_bias)] == max(gains[n] for n in gains if "grad_bias" not in n)
    of_weights = [g for n, g in gains.items() if "gradient of weights" in n and "rounded" in n]
    assert of_weights
    assert max(of_weights) < SLIGHT
