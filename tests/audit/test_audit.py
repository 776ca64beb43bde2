"""The verdict on kernels whose arithmetic is known: our own recipes, and PyTorch's kernels where
they run.
"""

import dataclasses
import functools
import json
import runpy
import subprocess
import sys

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from halfulp.attention import emulate
from halfulp.audit import Case, Shape, audit
from halfulp.audit.probes import PROBES
from halfulp.formats import BF16, TF32, Format
from halfulp.recipes import BF16_HALFULP, Recipe, recipe_named
from halfulp.runs.threads import one_thread
from halfulp.targets import Target, resolve

SMALL = (Shape(4, 4, 96, 96, 32),)  # the zoo's: what they are held against is computed once
SOME = ("gaussian", "gqa", "hot_token", "ties_two", "value_constant", "relations")


def target(recipe: Recipe, name: str) -> Target:
    def call(query, key, value, **options):
        return emulate(query, key, value, recipe=recipe, return_lse=True, **options)

    return Target(name, call, frozenset({"attn_mask", "enable_gqa"}), name)


def quick(recipe: Recipe | str, **options):
    chosen = recipe_named(recipe) if isinstance(recipe, str) else recipe
    return audit(target(chosen, chosen.name), shapes=SMALL, explain=False, **options)


@pytest.mark.thorough(keep=4)
@pytest.mark.parametrize(
    ("recipe", "verdict"),
    [
        ("BF16_FLOOR", "sound"),
        ("BF16_HALFULP", "sound"),
        ("BF16_FLASH2", "stock"),
        ("BF16_FLASH1", "stock"),
        ("BF16_STANDARD", "defect"),
        ("BF16_AUTHORS", "defect"),
        ("BF16_PAPER_STABILIZED", "defect"),
        ("FP8_FLASH", "defect"),
    ],
)
def test_verdicts_on_recipes(recipe, verdict):
    report = quick(recipe)
    assert report.verdict == verdict, report.reason
    assert report.exit_code == (verdict == "defect")


@pytest.mark.thorough(keep=1)
@pytest.mark.usefixtures("no_lengths")
@pytest.mark.parametrize(
    "changes", [{"delta_from": "out"}, {"row_sum_from": "exact"}, {"residual_bits": 2}]
)
def test_one_ingredient_of_the_halfulp_recipe_less_is_no_longer_sound(changes):
    assert quick(BF16_HALFULP.with_(**changes)).verdict != "sound"


@pytest.mark.thorough(keep=1)
@pytest.mark.usefixtures("no_lengths")
@pytest.mark.parametrize(("dtype", "recipe"), [("float16", "FP16_FLOOR"), ("float32", "FP32")])
def test_other_dtypes(dtype, recipe):
    assert quick(recipe, dtype=dtype).verdict == "sound"


@pytest.mark.thorough(keep=1)
@pytest.mark.usefixtures("no_lengths")
@pytest.mark.parametrize("name", ["sdpa:math", "halfulp:torch", "halfulp"])
def test_kernels_that_sum_in_another_order_are_sound_in_float32(name):
    report = audit(name, dtype="float32", shapes=SMALL, explain=False)
    assert report.verdict == "sound", report.reason


@pytest.mark.thorough(keep=2)
@pytest.mark.usefixtures("no_lengths")
@pytest.mark.parametrize(
    "changes",
    [
        {"query": TF32, "key": TF32},
        {"weights_operand": TF32},
        {"out": BF16},
        {"grad_scores": TF32},
        {"accumulator": Format("e8m14", 8, 14)},
    ],
)
def test_a_digit_that_is_lost_in_float32_is_a_defect(changes):
    assert (
        quick(recipe_named("FP32").with_(block_key=32, **changes), dtype="float32").verdict
        == "defect"
    )


def flash(query, key, value, *, is_causal, scale):
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=is_causal, scale=scale
        )


def test_every_case_is_reported_and_refusals_are_no_alarm_and_not_sound():
    def causal_only(query, key, value, *, is_causal, scale):
        if not is_causal:
            raise NotImplementedError("causal only")
        return emulate(query, key, value, is_causal=True, scale=scale, recipe="BF16_HALFULP")

    report = audit(causal_only, shapes=SMALL, explain=False)
    assert len(report.cases) == len(PROBES) + 1  # one growing length is short enough
    refused = [case for case in report.cases if case.status == "refused"]
    assert refused
    assert all(case.reason for case in refused)
    assert any(case.status == "ok" for case in report.cases)
    assert (report.verdict, report.exit_code) == ("incomplete", 2)
    assert report.reason.startswith("refuses: NotImplementedError: causal only in ")


def test_a_target_that_always_raises_is_an_error_not_a_traceback():
    def broken(query, key, value, *, is_causal, scale):
        raise RuntimeError("no such kernel image")

    report = audit(broken, shapes=SMALL)
    assert (report.verdict, report.exit_code) == ("error", 2)
    assert "no such kernel image" in report.reason


def test_forward_only_kernels_are_audited_on_their_output():
    def forward_only(query, key, value, *, is_causal, scale):
        with torch.no_grad():
            return emulate(
                query, key, value, is_causal=is_causal, scale=scale, recipe="BF16_HALFULP"
            )

    report = audit(forward_only, shapes=SMALL)
    assert report.verdict == "forward sound"
    assert not report.differentiable
    assert {e.tensor for e in report.fingerprint.explained} == {"out"}


def test_missing_and_unknown_targets_are_refused_in_one_line():
    with pytest.raises(ValueError, match="target='sdpaa': accepted is") as error:
        audit("sdpaa")
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="depth='slow': accepted are 'quick' and 'full'"):
        audit("sdpa:math", depth="slow")


@functools.cache
def explained():
    """A defect with its cause, smallest input and script, for whoever looks at one."""
    return audit("recipe:BF16_AUTHORS", shapes=SMALL, only=SOME)


def test_a_dtype_and_a_device_are_taken_as_torch_has_them():
    named = functools.partial(audit, "recipe:BF16_FLASH2", shapes=SMALL, only=["gaussian"])
    one = named(dtype="bfloat16", device="cpu").as_dict()
    other = named(dtype=torch.bfloat16, device=torch.device("cpu")).as_dict()
    one["seconds"] = other["seconds"] = 0
    assert json.dumps(one) == json.dumps(other)


def test_the_report_is_json_and_repeats_bit_for_bit():
    first, second = explained().as_dict(), explained.__wrapped__().as_dict()
    first["seconds"] = second["seconds"] = 0
    assert json.dumps(first, allow_nan=False) == json.dumps(second, allow_nan=False)


def test_the_smallest_input_is_small_and_its_script_runs(tmp_path):
    report = explained()
    assert isinstance(report.smallest, Case)
    assert report.smallest.shape.batch * report.smallest.shape.heads == 1
    assert report.smallest.shape.n_key < 128
    file = tmp_path / "smallest.py"
    file.write_text(report.script)
    ran = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, check=False)
    assert ran.returncode == 1, ran.stderr
    assert "× the limit of a defect" in ran.stdout
    file.write_text(report.script.replace("'recipe:BF16_AUTHORS'", "'recipe:BF16_FLASH2'"))
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(file))
    assert left.value.code == 0


def test_an_audit_in_two_processes_is_that_of_one(probes_alone):
    some = {"shapes": [Shape(1, 2, 16, 16, 8)], "explain": False, "only": SOME}
    with one_thread():
        one, two = (audit("sdpa:flash", jobs=jobs, **some).as_dict() for jobs in (1, 2))
        late = audit("sdpa:flash", jobs=2, seconds=1e-9, **some)
    assert one.pop("seconds") != two.pop("seconds")
    assert one == two
    assert len(one["relations"]) > 10
    assert "out of time after 1 of " in late.reason
    assert not late.relations


def test_a_function_without_a_name_is_audited_in_one_process():
    for other in (flash, dataclasses.replace(resolve("sdpa:flash"), call=flash)):
        with pytest.raises(ValueError, match="jobs=2: a function cannot be handed to other proc"):
            audit(other, jobs=2)
