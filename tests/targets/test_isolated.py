"""A kernel in a process of its own: whatever it does is one line, and its results are data."""

import json
import subprocess
import sys

import pytest
import torch
from torch.nn import functional

from halfulp.audit import audit
from halfulp.targets import CallLimits, Outcome, isolated, resolve, run_target
from halfulp.targets.messages import outcome_of
from tests.targets import hostile
from tests.targets.calls import tensors

LIMITS = CallLimits(seconds=30, gigabytes=4)


def call(target, is_causal, dtype=torch.float32):
    return run_target(target, *tensors(dtype), is_causal=is_causal, scale=None)


@pytest.mark.skipif(sys.platform == "win32", reason="signals and limits of Unix")
def test_what_a_kernel_does_is_one_line_and_the_next_call_is_made(capfd):
    """In one process, started again for whatever ends it."""
    mine, here = functional.scaled_dot_product_attention, call(resolve("sdpa"), False)
    refusals = {
        "exits": "raises SystemExit: 0",
        "interrupts": "raises KeyboardInterrupt",
        "takes 20 GB": "than --call-gigabytes 4 allows: raises RuntimeError",
        "exits hard": "ends its process (exit code 0)",
        "segfaults": "crashes: segmentation fault (SIGSEGV)",
    }
    notes = {
        "prints": ("prints: �[31mhello",),  # nothing that a terminal obeys
        "poisons": ("leaves changed (put back): torch.nn.functional.scaled_dot_product_attention",),
    }
    assert {*refusals, *notes} == {*hostile.DEEDS}
    with isolated(f"{hostile.__file__}:deed", limits=LIMITS) as target:
        for number, name in enumerate(hostile.DEEDS):
            if name == "takes 20 GB" and sys.platform != "linux":  # which bounds memory
                continue
            outcome = run_target(target, *tensors(), is_causal=True, scale=float(number))
            assert outcome.kind == ("ok" if name == "prints" else "error"), name
            assert refusals.get(name, "") in (outcome.refusal or ""), name
            assert "\n" not in (outcome.refusal or "")
            assert outcome.notes == notes.get(name, ()), name
            again = call(target, False)
            assert again.kind == "ok", (name, again.refusal)
            assert again.notes == ()
            for tensor in ("out", "grad_query", "grad_key", "grad_value"):
                got, expected = (getattr(o.result, tensor) for o in (again, here))
                assert torch.equal(got, expected), (name, tensor)
    assert functional.scaled_dot_product_attention is mine
    assert capfd.readouterr() == ("", "")


def test_a_hang_ends_and_is_not_waited_for_again():
    limits = CallLimits(seconds=1)
    with isolated(f"{hostile.__file__}:hangs", limits=limits) as target:
        assert call(target, True).refusal == "takes longer than 1 s"
        assert call(target, False).refusal == "is not called any more: it takes longer than 1 s"


_COPIED = """
import sys, torch
from halfulp.targets import CallLimits, isolated, run_target
from tests.targets import hostile
from tests.targets.calls import tensors
limits = CallLimits(seconds=30, copied=True)
for name, used in (("segfaults", False), ("exits_hard", True)):
    if used:
        torch.ones(1, requires_grad=True).sum().backward()
    with isolated(f"{hostile.__file__}:{name}", limits=limits) as target:
        for causal in (False, True, False):
            outcome = run_target(target, *tensors(torch.float32), is_causal=causal, scale=None)
            print(outcome.kind, outcome.refusal)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="copies are made on Linux alone")
def test_a_copy_of_this_process_is_as_good_as_a_new_one():
    # once whole, once where torch refuses gradients in a copy, so that it begins anew
    done = subprocess.run([sys.executable, "-c", _COPIED], capture_output=True, text=True)
    ends = ("crashes: segmentation fault (SIGSEGV)", "ends its process (exit code 0)")
    told = [line for end in ends for line in ("ok None", f"error {end}", "ok None")]
    assert (done.stdout.splitlines(), done.stderr) == (told, "")


def test_a_built_in_target_has_the_same_bits_there():
    mask = torch.rand(21, 21, generator=torch.Generator().manual_seed(0)) < 0.7
    x = tensors(torch.bfloat16)
    with isolated("recipe:BF16_HALFULP", limits=LIMITS) as target:
        here = resolve("recipe:BF16_HALFULP")
        for field in ("name", "accepts", "missing", "forward_only", "same_dropout"):
            assert getattr(target, field) == getattr(here, field)
        options = {"is_causal": False, "scale": 0.3, "attn_mask": mask}
        there = run_target(target, *x, **options).result
        mine = run_target(here, *x, **options).result
        for tensor in ("out", "lse", "grad_query", "grad_key", "grad_value"):
            assert torch.equal(getattr(there, tensor), getattr(mine, tensor))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nowhere.py:f", "there is no file nowhere.py"),
        ("sdap", "did you mean 'sdpa'"),
        (f"{hostile.__file__}:nothing", "has no 'nothing'"),
    ],
)
def test_what_cannot_be_loaded_is_refused_as_it_is_here(name, says):
    with pytest.raises(ValueError, match=says), isolated(name):
        pass


def test_a_file_that_ends_its_process_is_an_error_of_the_target(tmp_path):
    file = tmp_path / "ending.py"
    file.write_text("import os\nos._exit(0)\n")
    with isolated(f"{file}:f") as target:
        outcome = call(target, False)
    assert outcome.kind == "error"
    assert "ends its process (exit code 0) while it is loaded" in outcome.refusal


def test_a_function_is_audited_here_alone():
    with pytest.raises(ValueError, match="a function cannot be handed to another process"):
        audit(hostile.good, isolate=True)
    for limits in (CallLimits(seconds=0), CallLimits(gigabytes=-1)):
        with pytest.raises(ValueError, match="accepted is a positive number"):
            audit("sdpa", isolate=limits)


# What a process answers is held to what a call can give.

QUERY, KEY, VALUE = (torch.zeros(1, 2, n, 4) for n in (3, 5, 5))
GIVEN = {"query": QUERY, "key": KEY, "value": VALUE}
TOLD = {"kind": "ok", "refusal": None, "notes": []}


@pytest.mark.parametrize(
    ("told", "results"),
    [
        (TOLD, {}),
        (TOLD, {"out": KEY}),
        (TOLD, {"out": QUERY.double()}),
        (TOLD, {"out": QUERY, "lse": QUERY}),
        (TOLD, {"out": QUERY, "lse": torch.zeros(1, 2, 3, dtype=torch.int64)}),
        (TOLD, {"out": QUERY, "grad_key": QUERY}),
        (TOLD, {"out": QUERY, "more": QUERY}),
        (TOLD | {"kind": "sound"}, {"out": QUERY}),
        (TOLD | {"notes": [1]}, {"out": QUERY}),
        (TOLD | {"notes": "all is well"}, {"out": QUERY}),
        ({}, {"out": QUERY}),
    ],
)
def test_an_answer_that_no_call_can_give_is_refused(told, results):
    with pytest.raises(ValueError, match=r"."):
        outcome_of(json.loads(json.dumps(told)), results, GIVEN)


def test_an_answer_that_a_call_can_give_is_taken():
    found = outcome_of(TOLD, {"out": QUERY, "lse": torch.zeros(1, 2, 3), "grad_key": KEY}, GIVEN)
    assert isinstance(found, Outcome)
    assert found.result.grad_query is None


def test_the_callers_random_numbers_reach_the_kernel():
    x = tensors()
    options = {"is_causal": False, "scale": None, "dropout_p": 0.5}
    with isolated("sdpa", limits=LIMITS) as target:
        outs = []
        for kernel in (target, resolve("sdpa")):
            torch.manual_seed(7)
            outcome = run_target(kernel, *x, **options)
            assert outcome.notes == ()
            outs.append(outcome.result.out)
    assert torch.equal(*outs)
    torch.manual_seed(8)
    assert not torch.equal(outs[0], run_target(resolve("sdpa"), *x, **options).result.out)
