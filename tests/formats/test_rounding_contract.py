"""What callers of the rounding functions may rely on, besides the values."""

import ast
import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from format_oracle import DETERMINISTIC, FORMATS, differing, expected, magnitudes, trying_inputs

import halfulp.formats
from halfulp.formats import (
    BF16,
    E2M1,
    E8M0,
    FP16,
    FP32,
    FP64,
    MXFP4,
    NVFP4,
    OCP_E4M3,
    TF32,
    Format,
    Rounding,
    custom,
    general,
    is_representable,
    round_to,
    ulp,
)

MODES: tuple[Rounding, ...] = (*DETERMINISTIC, "stochastic")
KINDS = (BF16, BF16.with_(overflow="saturate"), FP16, TF32, OCP_E4M3, custom(5, 0), custom(10, 5))


@pytest.mark.parametrize("rounding", MODES)
@pytest.mark.parametrize("fmt", KINDS, ids=str)
def test_layout_and_size_do_not_matter(fmt: Format, rounding: Rounding) -> None:
    x = torch.randn(70, 1001, generator=torch.Generator().manual_seed(0)) * 3
    kept = x.clone()
    y = round_to(x, fmt, rounding=rounding)
    assert torch.equal(x, kept)
    assert y.shape == x.shape
    assert y.dtype == x.dtype
    assert torch.equal(round_to(x.mT.contiguous().mT, fmt, rounding=rounding), y)
    assert torch.equal(round_to(torch.stack([x, x], -1)[..., 0], fmt, rounding=rounding), y)
    assert torch.equal(round_to(x.double(), fmt, rounding=rounding).float(), y)
    assert torch.equal(round_to(x[:1], fmt, rounding=rounding), y[:1])
    assert torch.equal(round_to(x[0, 0], fmt, rounding=rounding), y[0, 0])
    if rounding != "stochastic":
        assert torch.equal(round_to(x.mT, fmt, rounding=rounding), y.mT)
        assert torch.equal(round_to(x[3:, ::7], fmt, rounding=rounding), y[3:, ::7])
        assert torch.equal(
            round_to(x[0, 0].expand(4, 5), fmt, rounding=rounding), y[0, 0].expand(4, 5)
        )
        assert torch.equal(round_to(y, fmt, rounding=rounding), y)


@pytest.mark.parametrize("rounding", MODES)
@pytest.mark.parametrize("shape", [(0,), (3, 0, 2)])
def test_empty(shape: tuple[int, ...], rounding: Rounding) -> None:
    for fmt in (*KINDS, MXFP4, NVFP4):
        assert round_to(torch.empty(shape), fmt, rounding=rounding).shape == shape


def test_identity_returns_its_argument() -> None:
    x = torch.randn(4, requires_grad=True)
    assert round_to(x, FP32) is x
    assert round_to(x, FP64, rounding="stochastic") is x
    wide = x.detach().double()
    assert round_to(wide, FP64) is wide
    assert round_to(wide, FP32) is not wide


def test_rounding_of_the_format_and_of_the_call() -> None:
    x = torch.tensor([1.0 + 2.0**-9])
    upward = BF16.with_(rounding="up")
    assert round_to(x, BF16).item() == 1.0
    assert round_to(x, upward).item() == 1.0 + 2.0**-7
    assert round_to(x, upward, rounding="down").item() == 1.0


def test_a_format_goes_by_its_name_too() -> None:
    x = torch.randn(50, generator=torch.Generator().manual_seed(0))
    for name in ("BF16", "bfloat16", torch.bfloat16):
        assert torch.equal(round_to(x, name), round_to(x, BF16))
    assert torch.equal(round_to(x, "mxfp4"), round_to(x, MXFP4))
    assert torch.equal(ulp(x, "e5m10"), ulp(x, FP16))
    assert is_representable(round_to(x, "ocp_e4m3"), "ocp_e4m3").all()


@pytest.mark.parametrize("asked", [round_to, ulp, is_representable])
def test_a_format_that_is_none_is_refused_in_one_line(asked) -> None:
    x = torch.ones(3)
    with pytest.raises(ValueError, match=r"^format='e4m3' is two formats: .*ocp_e4m3.*ieee_e4m3"):
        asked(x, "e4m3")
    with pytest.raises(ValueError, match=r"accepted: .*; did you mean 'bf16'\?$"):
        asked(x, "bflot16")
    with pytest.raises(ValueError, match=r"^format=torch\.int8 is not known"):
        asked(x, torch.int8)
    with pytest.raises(ValueError, match=r"^fmt=16 is not accepted"):
        asked(x, 16)
    if asked is not round_to:
        with pytest.raises(ValueError, match=r"^fmt='mxfp4' is a block format; accepted: a scalar"):
            asked(x, "mxfp4")


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^x=\[1.0\] is not accepted; accepted: a tensor$"):
        round_to([1.0], FP16)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"^x.dtype=torch.bfloat16 is not accepted; accepted: torch.float32 or"
    ):
        round_to(torch.zeros(1, dtype=torch.bfloat16), FP16)
    with pytest.raises(ValueError, match=r"^x.dtype=torch.int64 is not accepted"):
        ulp(torch.zeros(1, dtype=torch.int64), FP16)
    with pytest.raises(
        ValueError, match=r"^rounding='even' is not accepted; accepted: nearest_even, "
    ):
        round_to(torch.zeros(1), FP16, rounding="even")
    with pytest.raises(ValueError, match=r"^x.requires_grad=True is not accepted"):
        round_to(torch.zeros(1, requires_grad=True), FP16)
    with torch.no_grad():
        assert round_to(torch.zeros(1, requires_grad=True), FP16).item() == 0.0


def test_autocast_and_global_state_do_not_reach_in() -> None:
    x = torch.randn(100, generator=torch.Generator().manual_seed(0))
    before = torch.get_rng_state(), torch.get_num_threads(), torch.get_default_dtype()
    y = round_to(x, OCP_E4M3, rounding="stochastic")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(round_to(x, OCP_E4M3, rounding="stochastic"), y)
        assert round_to(x, TF32).dtype is torch.float32
    after = torch.get_rng_state(), torch.get_num_threads(), torch.get_default_dtype()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: f"{fmt.name}-{fmt.specials}-{fmt.bias}")
def test_ulp_is_the_distance_to_the_next_number(fmt: Format) -> None:
    numbers = magnitudes(fmt)
    x = torch.from_numpy(numbers[:-1])
    assert np.array_equal(ulp(x, fmt).numpy(), np.diff(numbers))
    inside = torch.from_numpy((numbers[:-1] + numbers[1:]) / 2)
    assert torch.equal(ulp(-inside, fmt), ulp(x, fmt))
    single = x.float()
    held = single.double() == x
    assert torch.equal(ulp(single, fmt)[held], ulp(x, fmt).float()[held])


def test_ulp_at_the_ends() -> None:
    x = torch.tensor([0.0, 1e-30, 1e30, torch.inf, -torch.inf, torch.nan])
    assert ulp(x, FP16).tolist()[:3] == [FP16.min_subnormal, FP16.min_subnormal, 32.0]
    assert ulp(x, FP16)[3:].isnan().all()
    assert ulp(torch.tensor(1.0), FP64).item() == 2.0**-52
    assert ulp(torch.tensor(1.0), FP32).item() == 2.0**-23
    assert ulp(torch.tensor(3.0, dtype=torch.float64), BF16).dtype is torch.float64
    assert ulp(torch.randn(3, 4).mT, BF16).shape == (4, 3)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: f"{fmt.name}-{fmt.specials}-{fmt.bias}")
def test_is_representable(fmt: Format) -> None:
    x = trying_inputs(fmt, np.float64)
    x = x[np.isfinite(x)]
    for variant in (fmt, fmt.with_(subnormals=False)):
        held = np.isin(np.abs(x), magnitudes(fmt)[:-1])
        if not variant.subnormals:
            held &= (x == 0) | (np.abs(x) >= fmt.min_normal)
        assert np.array_equal(is_representable(torch.from_numpy(x), variant).numpy(), held)


def test_is_representable_special_values() -> None:
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0])
    assert is_representable(x, FP16).tolist() == [True, True, True, True]
    assert is_representable(x, FP16.with_(overflow="saturate")).tolist() == [True, True, True, True]
    assert is_representable(x, OCP_E4M3).tolist() == [False, False, True, True]
    assert is_representable(x, E2M1).tolist() == [False, False, False, True]
    assert is_representable(x, custom(5, 0)).tolist() == [True, True, False, True]
    assert is_representable(x, E8M0).tolist() == [False, False, True, True]


def test_one_thread_and_two_agree() -> None:
    x = torch.from_numpy(trying_inputs(BF16, np.float32).astype(np.float32))
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(
                [round_to(x, fmt, rounding=mode) for fmt, mode in itertools.product(KINDS, MODES)]
            )
    finally:
        torch.set_num_threads(threads)
    for one, two in zip(*results, strict=True):
        assert differing(one.numpy(), two.double().numpy()) == 0


@pytest.mark.parametrize("piece", [7, 10**9], ids=["short_pieces", "whole"])
def test_the_size_of_the_pieces_does_not_matter(
    piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On other devices a tensor is worked on whole."""
    x = trying_inputs(OCP_E4M3, np.float32)
    given = torch.from_numpy(x.astype(np.float32)).repeat(4)
    by_chance = round_to(given, OCP_E4M3, rounding="stochastic")
    monkeypatch.setattr(general, "CHUNK", piece)
    again = round_to(given, OCP_E4M3, rounding="stochastic")
    assert differing(again.numpy(), by_chance.double().numpy()) == 0
    for rounding in DETERMINISTIC:
        want = np.tile(expected(x, OCP_E4M3, rounding), 4)
        assert differing(round_to(given, OCP_E4M3, rounding=rounding).numpy(), want) == 0


def test_imports_nothing_but_torch() -> None:
    folder = Path(halfulp.formats.__file__).parent
    for file in folder.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for top in {name.split(".")[0] for name in names}:
                assert top in {"torch", "halfulp"} or top in sys.stdlib_module_names, (
                    f"{file.name} imports {top}"
                )
