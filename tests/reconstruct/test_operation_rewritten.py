"""Formulas that kernels get wrong, found as the definition with one thing in it otherwise."""

import math

import pytest
import torch

from halfulp import audit
from halfulp.operations import operation_named
from halfulp.reconstruct.operation_asked import reconstruct_operation


def eps_outside(input, normalized_shape, weight, eps):
    x = input.float()
    size = x.square().mean(-1, keepdim=True).sqrt() + eps
    return (x / size * weight.float()).to(input.dtype)


def width_less_two(input, positions, *, base, interleaved=False):
    half, width = input.shape[-1] // 2, input.shape[-1]
    angle = positions[:, None] * base ** (torch.arange(half) * (-2.0 / (width - 2)))
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    x = input.float()
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    pair = a * cos - b * sin, b * cos + a * sin
    found = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return found.to(input.dtype)


def of_log2(input, target, *, ignore_index=-100, reduction="none", label_smoothing=0.0,
            lse_square_scale=0.0):  # fmt: skip
    x, kept = input.float(), target != ignore_index
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    loss = torch.nn.functional.cross_entropy(x, target, reduction="none", **options)
    penalty = lse_square_scale * (x.logsumexp(-1) / math.log(2)) ** 2
    loss = loss + torch.where(kept, penalty, 0.0)
    if reduction != "none":
        loss = loss.sum() / (kept.sum() if reduction == "mean" else 1)
    return loss.to(input.dtype)


def exchanged(gate, up):
    return torch.nn.functional.silu(up) * gate


def last_part(input, weight):
    return torch.nn.functional.linear(input[:, 96:], weight[:, 96:])


def low_lse(input, target, *, ignore_index=-100, reduction="none", label_smoothing=0.0,
            lse_square_scale=0.0):  # fmt: skip
    x, kept = input.float(), target != ignore_index
    lse = input.logsumexp(-1).float()
    own = x.gather(1, torch.where(kept, target, 0)[:, None])[:, 0]
    loss = (1 - label_smoothing) * (lse - own) + label_smoothing * (lse - x.mean(-1))
    loss = torch.where(kept, loss + lse_square_scale * lse * lse, 0.0)
    if reduction != "none":
        loss = loss.sum() / (kept.sum() if reduction == "mean" else 1)
    return loss.to(input.dtype)


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize(
    ("op", "kernel", "dtype", "cause", "text"),
    [
        ("rms_norm", eps_outside, "float32", "option", "eps is added to the root mean"),
        ("rope", width_less_two, "bfloat16", "factor", "-2.0 / (rows.shape[-1] - 2) stands"),
        (
            "cross_entropy",
            of_log2,
            "float32",
            "option",
            "lse_square_scale is taken 1 / ln² 2 times",
        ),
        ("swiglu", exchanged, "bfloat16", "exchanged", "gate and up are exchanged"),
        ("cross_entropy", low_lse, "bfloat16", "step-low", "lse, log_probabilities) is rounded"),
    ],
)
def test_a_formula_is_told_as_it_is_written(op, kernel, dtype, cause, text):
    found = reconstruct_operation(kernel, op, dtype=dtype).found
    assert found.cause == cause
    assert text in found.text
    assert found.share > 0.99


@pytest.mark.thorough(keep=0)
def test_parts_of_a_sum_that_overwrite_others_are_no_factor():
    report = audit(last_part, op="linear", explain=True)
    assert report.causes[0].key == "term-missing"
    assert "but for the last block of 32, from 96 of 128" in report.evidence[0]


def test_a_recipe_that_rounds_a_step_which_the_definition_lacks_is_refused(tmp_path):
    folder = tmp_path / "root_square"
    folder.mkdir()
    (folder / "definition.py").write_text(
        '"""A root of mean squares."""\n'
        "from halfulp.operations import Operand, Output, Sizes\n"
        'SIGNATURE = "root_square(input)"\nOPERANDS = (Operand("input", "T D"),)\n'
        'RESULTS = (Output("output", "T"),)\nSIZES = (Sizes.given(T=4, D=8),)\nOPTIONS = {}\n'
        "def define(step, x, options):\n"
        '    mean = step("mean", x["input"].square().mean(-1))\n'
        '    return {"output": mean.sqrt()}\n'
        "def arguments(x, options):\n    return (x['input'],), {}\n"
    )
    (folder / "recipes.py").write_text(
        "from halfulp.operations import OPERAND, Rounding\n"
        'STOCK = Rounding("mean kept", {"meen": OPERAND})\nFLOOR = Rounding("results alone")\n'
    )
    (folder / "probes.py").write_text(
        "import torch\nfrom halfulp.operations import OperationProbe\n"
        "def draw(sizes, g):\n"
        "    return {'input': torch.randn(sizes.shape('T D'), generator=g)}\n"
        "PROBES = (OperationProbe('gaussian', 'any error', 'none', draw),)\nINDEPENDENT = ('T',)\n"
    )
    (folder / "targets.py").write_text("TARGETS = ()\n")
    with pytest.raises(ValueError, match="rounds 'meen', which is no step of define; accepted are"):
        operation_named(str(folder))
