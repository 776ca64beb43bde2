"""Probe inputs: repeatable, of the promised shape, and each shows what it is built for."""

import math

import pytest
import torch
from safetensors.torch import save_file

from halfulp.audit.inputs import CAPTURED, Case, case_of, read_captured, shape_of
from halfulp.audit.probes import PROBES, Shape, probe_named
from halfulp.audit.references import references

SMALL = Shape(2, 2, 64, 64, 32)


@pytest.mark.parametrize("probe", PROBES, ids=lambda p: p.name)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_probes_repeat_bit_for_bit_and_are_finite(probe, dtype):
    case = case_of(probe, SMALL, 3, dtype)
    first, second = case.inputs(), case.inputs()
    other = case_of(probe, SMALL, 4, dtype).inputs()
    for name in ("query", "key", "value", "grad_out"):
        a = getattr(first, name)
        assert torch.equal(a, getattr(second, name))
        assert a.isfinite().all()
        assert str(a.dtype) == f"torch.{dtype}"
    assert not torch.equal(first.grad_out, other.grad_out)
    assert first.query.shape == (
        case.shape.batch,
        case.shape.heads,
        case.shape.n_query,
        case.shape.head_dim,
    )
    assert first.key.shape == (
        case.shape.batch,
        case.shape.key_heads,
        case.shape.n_key,
        case.shape.head_dim,
    )


@pytest.mark.parametrize("probe", PROBES, ids=lambda p: p.name)
def test_golden_and_references_are_finite(probe):
    reference = references(case_of(probe, SMALL, 0, "bfloat16"))
    assert reference.truth.out.isfinite().all()
    assert not reference.stock.nonfinite
    assert not reference.floor.nonfinite


def scores(name: str) -> torch.Tensor:
    x = case_of(probe_named(name), SMALL, 0, "bfloat16").inputs()
    return x.query.double() @ x.key.double().mT * x.scale


@pytest.mark.parametrize(
    ("name", "count"),
    [("ties_two", 2), ("ties_three", 3), ("ties_many", 24), ("ties_negative", 2), ("ties_zero", 2)],
)
def test_ties_hold_every_rows_maximum(name, count):
    s = scores(name)
    top = s.amax(-1, keepdim=True)
    repeated = (s == top).sum(-1)
    assert (repeated == count).double().mean() > 0.99
    sign = {"ties_negative": -1, "ties_zero": 0}.get(name, 1)
    assert (top.sign() == sign).double().mean() > 0.99


def test_levels_lie_where_they_are_built_to_lie():
    assert scores("deep_negative").amax() < -500
    assert scores("all_negative").amax() < 0
    assert scores("very_large").amin() > 300
    x = case_of(probe_named("lse_below_88"), SMALL, 0, "bfloat16").inputs()
    assert (
        torch.ops.aten.logsumexp(x.query.double() @ x.key.double().mT * x.scale, [-1]).amax()
        < -88.8
    )


def test_shared_features_cannot_be_seen_by_softmax_and_golden_dq_vanishes_there():
    for name in ("value_one_sign", "value_offset", "keys_common"):
        reference = references(case_of(probe_named(name), SMALL, 0, "bfloat16"))
        assert (reference.inputs.key[..., 0] == probe_named(name).shared_feature).all()
        assert (
            reference.truth.grad_query[..., 0].abs().max()
            < 1e-10 * reference.truth.grad_query.abs().max()
        )


def test_masked_rows_are_fully_masked():
    reference = references(case_of(probe_named("masked_rows"), SMALL, 0, "bfloat16"))
    dead = ~reference.inputs.sees.mask.any(-1)
    assert dead.any()
    out = reference.truth.out
    assert (out.masked_select(dead.expand(out.shape[:3]).unsqueeze(-1)) == 0).all()


def test_sink_and_hot_token_take_the_mass():
    weights = scores("hot_token").softmax(-1)
    assert weights[..., 32].mean() > 0.95
    assert scores("sink").softmax(-1)[..., 0].mean() > 0.9


def test_unknown_names_are_refused_in_one_line():
    with pytest.raises(ValueError, match="probe='gausian': accepted are gaussian") as error:
        Case("gausian").inputs()
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="dtype='bf61': accepted are bfloat16"):
        Case("gaussian", dtype="bf61").inputs()


@pytest.mark.parametrize("short", [False, True])
def test_captured_tensors(tmp_path, short):
    names = ("q", "k", "v", "do") if short else ("query", "key", "value", "grad_out")
    tensors = {name: torch.randn(1, 4, 20, 8) for name in names}
    file = str(tmp_path / f"captured-{short}.safetensors")
    save_file(tensors, file, {"is_causal": "true", "scale": "0.5"})
    size = shape_of(read_captured(file))
    x = Case(CAPTURED, size, 0, "bfloat16", file).inputs()
    assert torch.equal(x.query, tensors[names[0]].bfloat16())
    assert (x.sees.causal, x.scale) == (True, 0.5)
    cut = Case(CAPTURED, Shape(1, 1, 5, 5, 8), 0, "bfloat16", file).inputs()
    assert torch.equal(cut.value, tensors[names[2]][:, :1, :5].bfloat16())


def test_captured_files_that_cannot_be_read_are_refused_in_one_line(tmp_path):
    torn = tmp_path / "torn.safetensors"
    torn.write_bytes(b"\x10\x00")
    with pytest.raises(ValueError, match="accepted is a safetensors file"):
        read_captured(str(torn))
    lacking = str(tmp_path / "lacking.safetensors")
    save_file({"q": torch.zeros(1, 1, 2, 2)}, lacking)
    with pytest.raises(ValueError, match="no tensor 'key' or 'k'"):
        read_captured(lacking)


def test_scale_of_a_probe():
    assert case_of(probe_named("odd_scale"), SMALL, 0, "bfloat16").inputs().scale == 0.173
    assert case_of(probe_named("gaussian"), SMALL, 0, "bfloat16").inputs().scale == 1 / math.sqrt(
        32
    )
