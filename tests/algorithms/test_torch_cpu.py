"""TORCH_CPU_FLASH has the bits of the kernel that it is named after, and a wrong idea of any step
is seen in them.

Bits are asserted where the recipe claims them (torch 2.13, AVX-512). Elsewhere vectors have another
width, sums another order and some bits differ; there the same tests ask that both compute the same
thing.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import math
from dataclasses import dataclass, replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from halfulp import Recipe, calls, emulate, golden
from halfulp.algorithms import Problem, torch_cpu, torch_cpu_math
from halfulp.calls import Result
from halfulp.formats import BF16, FP32, Format, is_representable
from halfulp.papers.kernel_match import bits_expected, compare, torch_cpu_flash
from halfulp.recipes import TORCH_CPU_FLASH, Matmul, Shift, Step
from halfulp.testing import Inputs, gaussian, relative_error

GRADIENTS = ("grad_query", "grad_key", "grad_value")
FORWARD_STEPS = {
    "query",
    "key",
    "value",
    "product",
    "scores",
    "row_max",
    "shifted_scores",
    "weights",
    "weights_operand",
    "block_sum",
    "max_change",
    "rescale",
    "rescaled",
    "row_sum",
    "block_out",
    "accumulator",
    "out",
    "log_row_sum",
    "lse",
}
BACKWARD_STEPS = {
    "grad_out",
    "delta_products",
    "delta",
    "scores",
    "shifted_scores",
    "probabilities",
    "probabilities_operand",
    "grad_probabilities",
    "grad_centered",
    "grad_scores",
    "grad_block",
    "grad_accumulator",
    "grad_query",
    "grad_key",
    "grad_value",
}


@dataclass(frozen=True)
class Call:
    """One attention call as both sides take it."""

    inputs: Inputs
    causal: bool = False
    mask: Tensor | None = None
    scale: float | None = None

    def real(self) -> Result:
        """The kernel, given masks as `scaled_dot_product_attention` gives them to it."""
        mask = self.mask
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, dtype=torch.bfloat16).masked_fill(~mask, -math.inf)
        return torch_cpu_flash(*self.inputs, self.causal, attn_mask=mask, scale=self.scale)

    def emulated(self, recipe: Recipe = TORCH_CPU_FLASH, observers=()) -> Result:
        leaves = [x.clone().requires_grad_() for x in self.inputs.operands]
        options = {
            "is_causal": self.causal,
            "scale": self.scale,
            "enable_gqa": True,
            "recipe": recipe,
        }
        out, lse = emulate(*leaves, self.mask, observers=observers, return_lse=True, **options)
        gradients = torch.autograd.grad(out, leaves, self.inputs.grad_out)
        return Result(out.detach(), lse.detach(), *gradients)

    def sizes(self) -> dict[str, Tensor]:
        """The sizes of the terms that every result sums, fp64: what rounding is relative to, where
        the sum itself may cancel (dP − δ is nothing but rounding where a row sees one key).
        """
        q, k, v, do = (x.double() for x in self.inputs)
        groups = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale
        scores = q @ k.mT * scale
        if self.causal:
            future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(future, -math.inf)
        if self.mask is not None and self.mask.dtype == torch.bool:
            scores = scores.masked_fill(~self.mask, -math.inf)
        elif self.mask is not None:
            scores = scores + self.mask
        p = scores.softmax(-1).nan_to_num(0.0)
        dp = do.abs() @ v.abs().mT
        ds = p * (dp + (dp * p).sum(-1, keepdim=True)) * scale
        # an error of a score is one of its weight, as large as the score
        lean = 1 + (q.abs() @ k.abs().mT * scale).amax(-1, keepdim=True) * 2**-10
        sizes = {"out": (p * lean) @ v.abs(), "lse": lean.squeeze(-1)}
        sizes |= {"grad_query": (ds * lean) @ k.abs(), "grad_key": (ds * lean).mT @ q.abs()}
        sizes["grad_value"] = (p * lean).mT @ do.abs()
        for name in ("grad_key", "grad_value"):
            sizes[name] = sizes[name].unflatten(1, (-1, groups)).sum(2)
        return sizes


def bf16(seed: int = 0, **sizes: int) -> Inputs:
    return gaussian(seed, dtype=torch.bfloat16, **sizes)


def assert_same(call: Call, ours: Result | None = None, real: Result | None = None) -> None:
    """Bit for bit where that is claimed; elsewhere (a processor with matrix units) most elements of
    what does not cancel, and no more than bf16 rounding between the rest.
    """
    real, ours = real or call.real(), ours or call.emulated()
    # The kernel stores 0 where a row is fully masked.
    masked = ours.lse == -math.inf
    assert bool((real.lse[masked] == 0).all())
    ours = replace(ours, lse=ours.lse.masked_fill(masked, 0.0))
    sizes = {} if bits_expected() else call.sizes()
    for match in compare(real, ours):
        if bits_expected():
            assert match.identical == match.elements, match
            continue
        a, b = (getattr(result, match.tensor).double() for result in (real, ours))
        assert match.fraction > 0.4 or match.tensor not in ("out", "grad_value"), match
        assert (a - b).norm() <= 2**-7 * sizes[match.tensor].norm(), match


def identical(real: Result, ours: Result) -> dict[str, float]:
    return {match.tensor: match.fraction for match in compare(real, ours)}


@pytest.mark.parametrize(
    (
        "length",
        "dims",
    ),  # every pair of a length's kind (below, at, above the tiles) and a dimension
    [
        *((n, (16, 48, 80)) for n in (1, 77, 192, 768, 1100)),
        *((n, (32, 64, 128)) for n in (31, 129, 333, 768, 1000)),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_bits_over_lengths_and_head_dimensions(length, dims, causal):
    for dim in dims:
        call = Call(bf16(dim, heads=2 if length < 768 else 1, length=length, dim=dim), causal)
        assert_same(call)


@pytest.mark.parametrize(
    ("batch", "heads", "key_heads", "length", "key_length", "dim"),
    [
        (2, 3, 3, 200, 200, 64),
        # groups add up in the key head's gradient, one query head after the other
        (2, 4, 2, 130, 130, 64),
        (1, 6, 1, 300, 77, 80),
        (2, 4, 1, 33, 600, 32),  # a query block of one row: the matrix-vector products
        (1, 2, 2, 1, 1100, 128),
        (1, 2, 2, 800, 1, 64),
        (1, 2, 2, 770, 513, 256),
    ],
)
def test_bits_over_batches_groups_and_unequal_lengths(
    batch, heads, key_heads, length, key_length, dim
):
    sizes = {
        "batch": batch,
        "heads": heads,
        "key_heads": key_heads,
        "length": length,
        "key_length": key_length,
    }
    for causal in (False, True):
        call = Call(bf16(1, **sizes, dim=dim), causal)
        assert_same(call)


def masks(n_q: int, n_k: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(n_q + n_k)
    bool_mask = torch.rand(n_q, n_k, generator=generator) < 0.6
    some_rows = bool_mask.clone()
    some_rows[::3] = False
    return {
        "bool": bool_mask,
        "fully masked rows": some_rows,
        "padded keys": (torch.arange(n_k) < n_k // 2 + 1).expand(2, 1, 1, n_k),
        "bf16": torch.randn(2, 4, n_q, n_k, generator=generator).bfloat16(),
        "fp32": 3 * torch.randn(n_q, n_k, generator=generator),
        "fp32 per head": torch.randn(1, 4, 1, n_k, generator=generator),
        "fp32 with a block of hidden keys": (
            torch.randn(n_q, n_k, generator=generator).index_fill_(
                1, torch.arange(min(512, n_k - 1)), -math.inf
            )
        ),
    }


@pytest.mark.parametrize("kind", list(masks(2, 2)))
@pytest.mark.parametrize(("length", "key_length"), [(31, 50), (129, 600), (200, 130)])
def test_bits_with_masks(kind, length, key_length):
    inputs = bf16(3, batch=2, heads=4, key_heads=2, length=length, key_length=key_length, dim=48)
    call = Call(inputs, mask=masks(length, key_length)[kind])
    assert_same(call)


@pytest.mark.parametrize("scale", [0.37, 5.3])
@pytest.mark.parametrize("length", [1, 97, 545])
def test_bits_with_another_scale(scale, length):
    call = Call(bf16(4, heads=3, length=length, key_length=length + 2, dim=80), scale=scale)
    assert_same(call)


@pytest.mark.parametrize("size", [1e-20, 1e-3, 1e3, 1e10])
def test_bits_with_tiny_and_huge_inputs(size):
    inputs = bf16(5, length=70, dim=64)
    for name in ("query", "value", "grad_out"):
        call = Call(
            replace(inputs, **{name: (getattr(inputs, name).float() * size).bfloat16()}),
            causal=True,
        )
        assert_same(call)


@pytest.mark.parametrize(
    ("name", "value"), [("query", math.nan), ("key", math.inf), ("value", -math.inf)]
)
def test_what_is_not_finite_spreads_as_in_the_kernel(name, value):
    inputs = bf16(6, length=77, dim=32)
    getattr(inputs, name)[0, 0, 5, 3] = value
    real, ours = Call(inputs).real(), Call(inputs).emulated()
    for match in compare(real, ours):
        a, b = getattr(real, match.tensor), getattr(ours, match.tensor)
        assert bool((a.isfinite() == b.isfinite()).all()), match.tensor
        assert match.identical == match.elements or not bits_expected(), match


@settings(max_examples=40)
@given(
    st.integers(1, 70),
    st.integers(1, 70),
    st.integers(1, 24),
    st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)]),
    st.integers(1, 2),
    st.booleans(),
    st.integers(0, 2**20),
)
def test_bits_of_drawn_shapes(length, key_length, fours, heads, batch, causal, seed):
    sizes = {
        "batch": batch,
        "heads": heads[0],
        "key_heads": heads[1],
        "length": length,
        "key_length": key_length,
    }
    call = Call(bf16(seed, **sizes, dim=4 * fours), causal)
    assert_same(call)


def test_bits_of_the_public_function():
    inputs = bf16(7, heads=2, length=300)
    leaves = [x.clone().requires_grad_() for x in inputs.operands]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
    call = Call(inputs, causal=True)
    ours = call.emulated()
    real = Result(out.detach(), ours.lse, *torch.autograd.grad(out, leaves, inputs.grad_out))
    assert_same(call, ours, real)


@pytest.mark.parametrize("length", [77, 333, 800])
def test_bits_do_not_depend_on_the_callers_threads(length):
    call = Call(bf16(8, heads=2, length=length, dim=80))
    alone = call.emulated()
    torch.set_num_threads(2)
    ours = call.emulated()
    assert torch.get_num_threads() == 2
    assert all(share == 1 for share in identical(alone, ours).values())
    assert_same(call, ours)


def test_the_callers_threads_come_back_after_an_error():
    def fails(x: Tensor) -> Tensor:
        raise ZeroDivisionError

    torch.set_num_threads(2)
    step, inputs = Step(TORCH_CPU_FLASH), bf16(length=8)
    problem = Problem.read(calls.Call(*inputs.operands, scale=0.125), step)
    with pytest.raises(ZeroDivisionError):
        torch_cpu.forward(problem, exponential=fails)
    assert torch.get_num_threads() == 2


def test_observers_see_every_step_and_change_none():
    call = Call(bf16(9, heads=4, key_heads=2, length=40, key_length=600, dim=32))
    seen: list[tuple[str, Tensor, Tensor]] = []
    watched = call.emulated(
        observers=[lambda name, exact, rounded: seen.append((name, exact.clone(), rounded))]
    )
    assert all(share == 1 for share in identical(call.emulated(), watched).values())
    names = [name for name, *_ in seen]
    border = names.index("grad_out")
    assert set(names[:border]) == FORWARD_STEPS
    assert set(names[border:]) == BACKWARD_STEPS
    shown = dict.fromkeys(names, 0) | {name: names.count(name) for name in set(names)}
    # two query blocks by two key blocks, twice for the heads of a group in the backward pass
    assert (shown["weights"], shown["rescale"], shown["probabilities"], shown["grad_block"]) == (
        4,
        2,
        8,
        24,
    )
    for name, exact, rounded in seen:
        fmt = getattr(TORCH_CPU_FLASH, name)
        assert isinstance(fmt, Format)
        assert bool(is_representable(rounded, fmt).all()) or not Step(TORCH_CPU_FLASH).rounds(
            name
        ), name
        if not Step(TORCH_CPU_FLASH).rounds(name):
            assert torch.equal(exact, rounded), name
    (out,) = (rounded for name, _, rounded in seen if name == "out")
    assert torch.equal(out, watched.out.float())


def test_one_format_replaced_changes_that_step_alone():
    call = Call(bf16(10, heads=2, length=1024))
    exact = golden(*call.inputs)
    stock, fp32 = call.emulated(), call.emulated(TORCH_CPU_FLASH.with_(grad_accumulator=FP32))
    blocks: list[Tensor] = []

    def collect(name: str, exact: Tensor, rounded: Tensor) -> None:
        if name == "grad_block" and rounded.shape[-2] == 512:
            blocks.append(rounded)

    call.emulated(TORCH_CPU_FLASH.with_(grad_accumulator=FP32), observers=[collect])
    assert torch.equal(stock.out, fp32.out)
    assert torch.equal(stock.lse, fp32.lse)
    # dV and dK of the two key blocks by turns, over four query blocks
    summed = torch.cat([sum(blocks[1 + 2 * key :: 4]) for key in (0, 1)], dim=2)
    assert torch.equal(summed.bfloat16(), fp32.grad_key)
    for name in GRADIENTS:
        errors = [relative_error(getattr(run, name), getattr(exact, name)) for run in (stock, fp32)]
        assert errors[1] < 0.9 * errors[0], (name, errors)


@pytest.mark.parametrize(
    ("changes", "tensor", "low", "high"),
    [
        ({"block_key": 128}, "out", 0.68, 0.75),
        ({"weights_operand": FP32}, "out", 0.56, 0.63),
        ({"rescaled": BF16}, "out", 0.64, 0.74),
        ({"row_sum_from": "rounded"}, "out", 0.98, 0.995),
        ({"grad_accumulator": FP32}, "grad_query", 0.70, 0.77),
        ({"grad_accumulator": FP32}, "grad_key", 0.56, 0.63),
        ({"grad_accumulator": FP32}, "grad_value", 0.56, 0.63),
        ({"block_query": 128}, "grad_key", 0.48, 0.55),
        ({"algorithm": "flash2"}, "out", 0.79, 0.87),
    ],
)
def test_a_planted_fault_is_seen_in_the_bits(changes, tensor, low, high):
    call = Call(bf16(11, heads=2, length=1024))
    share = identical(call.real(), call.emulated(TORCH_CPU_FLASH.with_(**changes)))[tensor]
    if bits_expected():
        assert low < share < high
    assert share < 0.999


def test_another_exponential_is_seen_in_the_bits():
    call, step = Call(bf16(12, heads=2, length=1024)), Step(TORCH_CPU_FLASH)
    problem = Problem.read(calls.Call(*call.inputs.operands, scale=0.125), step)
    real, shares = call.real(), []
    for exponential in (torch_cpu_math.weights_exp, torch.exp):
        saved = torch_cpu.forward(problem, exponential=exponential)
        shares.append(identical(real, Result(saved.out.bfloat16()))["out"])
    assert shares[0] == 1 or not bits_expected()
    assert 0.79 < shares[1] < 0.87 or not bits_expected()
    assert shares[1] < shares[0]


REFUSED = [
    {"compute": "float64", "matmul": Matmul(FP32, "sequential")},
    {"base": "2"},
    {"shift": Shift("offset", offset=1.0)},
    {"backward_weights": "maximum"},
    {"delta_from": "probabilities"},
    {"residual_bits": 8},
    {"weights_scale": 2.0},
    {"row_sum_floor": 1e-10},
    {"lse_from": "exact"},
    {"gradient_scale_at": "scores"},
    {"grad_value_from": "lse"},
]


@pytest.mark.parametrize("changes", REFUSED, ids=str)
def test_another_structure_is_refused_in_one_line(changes):
    name = next(iter(changes))
    with pytest.raises(ValueError, match=f"^{name}=.*accepted (is|are) .*torch_cpu'$"):
        emulate(*bf16(length=8).operands, recipe=TORCH_CPU_FLASH.with_(**changes))


def test_another_value_dimension_is_refused_as_in_the_kernel():
    inputs = bf16(length=8, dim=16, value_dim=8)
    with pytest.raises(ValueError, match=r"^value of head dimension 8: accepted is query's, 16$"):
        emulate(*inputs.operands, recipe=TORCH_CPU_FLASH)
    with pytest.raises(RuntimeError):
        torch_cpu_flash(*inputs, False)


@pytest.mark.parametrize("order", ["sequential", "blocked"])
def test_another_sum_is_the_recipes(order):
    call = Call(bf16(13, length=40, dim=16))
    coarse = call.emulated(TORCH_CPU_FLASH.with_(matmul=Matmul(BF16, order, block=4)))
    fine = call.emulated(TORCH_CPU_FLASH.with_(matmul=Matmul(FP32, order), grad_accumulator=FP32))
    exact = golden(*call.inputs)
    for name in ("out", "lse", *GRADIENTS):
        coarse_error, fine_error = (
            relative_error(getattr(run, name), getattr(exact, name)) for run in (coarse, fine)
        )
        assert fine_error < 0.5 * coarse_error < 0.05, name


def test_the_gradient_of_lse_joins_delta():
    inputs = bf16(14, length=40, dim=32)
    leaves = [x.clone().requires_grad_() for x in inputs.operands]
    _, lse = emulate(*leaves, recipe=TORCH_CPU_FLASH, return_lse=True)
    twins = [x.double().requires_grad_() for x in inputs.operands]
    exact = torch.logsumexp(twins[0] @ twins[1].mT / math.sqrt(32), -1)
    ours, expected = (
        torch.autograd.grad(x.sum(), y[:2]) for x, y in ((lse, leaves), (exact, twins))
    )
    for a, b in zip(ours, expected, strict=True):
        assert relative_error(a, b) < 0.01


def test_no_fraction_meets_double_rounding_in_the_fast_exponential():
    coefficients = [getattr(torch_cpu_math, name) for name in ("_C3", "_C2", "_C1", "_C0")]
    for start in range(0, 2**24, 2**20):
        # every fraction that s − ⌊s⌋ can be
        f = (torch.arange(start, start + 2**20 + 1) / 2**24).float()
        plain = exact = torch.full_like(f, coefficients[0])
        for coefficient in coefficients[1:]:
            plain = (plain.double() * f.double() + coefficient).float()
            exact = torch_cpu_math.fused_multiply_add(exact, f, torch.full_like(f, coefficient))
        assert torch.equal(plain, exact)


def test_the_fast_exponential_is_as_exact_as_its_name_says():
    x = -torch.rand(100_000, generator=torch.Generator().manual_seed(0)) * 87
    assert float((torch_cpu_math.fast_exp(x) / x.double().exp() - 1).abs().max()) < 2e-4
    assert torch_cpu_math.fast_exp(torch.tensor([-math.inf, -87.4])).tolist() == [0.0, 0.0]


@given(*[st.floats(width=32, min_value=-(2.0**40), max_value=2.0**40)] * 3, st.integers(-30, 30))
def test_fused_multiply_add_rounds_once(a, b, c, power):
    c = math.ldexp(c, power)
    ours = torch_cpu_math.fused_multiply_add(
        *(torch.tensor([x], dtype=torch.float32) for x in (a, b, c))
    ).item()
    exact = Fraction(a) * Fraction(b) + Fraction(torch.tensor(c, dtype=torch.float32).item())
    rounded = torch.tensor(ours, dtype=torch.float32)
    below, above = (torch.nextafter(rounded, torch.tensor(x)).item() for x in (-math.inf, math.inf))
    distance = abs(Fraction(ours) - exact)
    for neighbor in (below, above):
        other = abs(Fraction(neighbor) - exact)
        assert distance < other or (distance == other and int(rounded.view(torch.int32)) % 2 == 0)


@pytest.mark.parametrize(
    ("a", "b", "c"), [(1 + 2**-12, 1 + 2**-12, 2**-60), (1 + 2**-12, -1 - 2**-12, -(2**-60))]
)
def test_fused_multiply_add_breaks_a_tie_that_float64_cannot_see(a, b, c):
    # a · b = 1 + 2⁻¹¹ + 2⁻²⁴ lies midway between two float32 numbers; c is lost in a float64 sum
    ours = torch_cpu_math.fused_multiply_add(
        *(torch.tensor([x], dtype=torch.float32) for x in (a, b, c))
    ).item()
    assert abs(ours) == 1 + 2**-11 + 2**-23
    assert abs(float(torch.tensor(a * b + c, dtype=torch.float32))) == 1 + 2**-11


@pytest.mark.skipif(
    ctypes.util.find_library("m") is None, reason="no C library's libm to compare with"
)
def test_scalar_functions_are_the_c_librarys():
    libm = ctypes.CDLL(ctypes.util.find_library("m"))
    x = torch.cat([torch.linspace(-104, 0, 20_000), torch.tensor([-math.inf])])
    y = torch.linspace(1e-3, 2000, 20_000)
    for ours, function, argument in (
        (torch_cpu_math.scalar_exp, libm.expf, x),
        (torch_cpu_math.scalar_log, libm.logf, y),
    ):
        function.restype, function.argtypes = ctypes.c_float, [ctypes.c_float]
        assert ours(argument).tolist() == [function(value) for value in argument.tolist()]


def test_the_vector_exponential_is_log_softmaxs():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(50, 77, generator=generator) * 30
    # whole vectors, and a column for a one-hot gradient
    padded = torch.cat([x, torch.zeros(50, 19)], -1)
    gradient = torch.zeros_like(padded)
    gradient[:, -1] = 1
    expected = -torch.ops.aten._log_softmax_backward_data(gradient, padded, -1, torch.float32)[
        :, :77
    ]
    assert torch.equal(torch_cpu_math.vector_exp(x), expected)


def test_sums_agree_with_exact_sums_whatever_their_order():
    for width in (1, 15, 16, 17, 31, 32, 33, 48, 100, 512):
        x = (
            torch.randn(64, width, generator=torch.Generator().manual_seed(width))
            .bfloat16()
            .float()
        )
        exact = x.double().sum(-1, keepdim=True)
        for total in (torch_cpu_math.lane_sum(x), torch_cpu_math.reduced_sum(x)):
            torch.testing.assert_close(
                total.double(), exact, rtol=0, atol=float(x.abs().sum(-1).max()) * 2**-22
            )
        right = (
            torch.randn(width, 8, generator=torch.Generator().manual_seed(width)).bfloat16().float()
        )
        start = torch.ones(1, 8)
        row = torch_cpu_math.row_product(x[:1], right, start)
        torch.testing.assert_close(row, start + x[:1] @ right, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(
            torch_cpu_math.vector_product(x[:1], right), x[:1] @ right, rtol=1e-5, atol=1e-4
        )
