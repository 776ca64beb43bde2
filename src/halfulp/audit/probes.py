"""Probe inputs: each family of inputs is built to expose one failure that tolerance tests on
Gaussian inputs do not see.

Every (batch, head) pair is drawn independently, so that a figure taken per head has a standard
error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal

from halfulp.audit import draws
from halfulp.audit.draws import Draw, Shape
from halfulp.audit.size_array import CAUSAL, PREFIX, draw_of, levels_of, options_of
from halfulp.targets.manner import PLAIN

__all__ = ["PROBES", "Draw", "Probe", "Shape", "Trait", "probe_named", "probes_with"]


Trait = Literal["level", "ragged", "plain", "few keys"]
"""level: scores far from 0; ragged: sizes off the block, or unlike each other; plain: nothing but
noise; few keys: some that carry every row.
"""


def _traits(*names: Trait) -> frozenset[Trait]:
    return frozenset(names)


def _nothing_else(_: Shape) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Probe:
    """A named family of inputs."""

    name: str
    exposes: str  # the failure it is built for
    source: str  # the paper or public bug it comes from
    draw: Draw
    is_causal: bool = False
    scale: float | None = None  # None: 1/√D
    # feature 0 of every key holds this constant: dQ's feature 0 then reads Σ_j dS_ij, δ's error,
    # row by row
    shared_feature: float = 0.0
    change_shape: Callable[[Shape], Shape] | None = None
    judged_by: str | None = None  # the one figure that counts; None: all
    elements_only: bool = False  # too few heads for a test of means
    manner: str = PLAIN  # how the kernel is called: `targets.manner`
    # times the usual slack of that figure, where the floor is free of error by cancellation
    slack: float = 1.0
    # what its inputs are like, where a rule that names causes asks
    traits: frozenset[Trait] = frozenset()
    # what else the call asks for at that size: window, causal_offset, softcap, dropout_p; sinks and
    # masks are drawn
    options: Callable[[Shape], dict[str, Any]] = _nothing_else


_PAPER = "Qiu & Yao, arXiv 2510.04212"
_ONE_SIGN = draws.values(lambda v: v.abs() + 0.25)
_OFFSET = draws.values(lambda v: v + 8.0)

PROBES: tuple[Probe, ...] = (
    Probe(
        "gaussian",
        "errors that any input shows",
        "Golden et al., arXiv 2405.02803, section IV",
        draws.gaussian,
        traits=_traits("plain"),
    ),
    Probe(
        "gaussian_causal",
        "faults of causal masking",
        "Golden et al., arXiv 2405.02803",
        draws.gaussian,
        is_causal=True,
        traits=_traits("plain"),
    ),
    Probe(
        "diffuse",
        "small weights lost from the numerator only",
        "flashinfer PR 5020 (fp8 weights without pre-scale)",
        draws.scaled(q=0.1),
        traits=_traits("plain"),
    ),
    Probe(
        "hot_token", "rounding of the one large weight", _PAPER + ", section 3.3.2", draws.hot_token
    ),
    Probe(
        "ties_two",
        "biased rounding where two weights are 1",
        _PAPER + ", section 3.3.2",
        draws.ties(2, 6.0),
        traits=_traits("few keys"),
    ),
    Probe(
        "ties_three",
        "biased rounding where three weights are 1",
        _PAPER + ", section 3.3.2",
        draws.ties(3, 6.0),
        traits=_traits("few keys"),
    ),
    Probe(
        "ties_many",
        "underflow of the published fix at a large repeated maximum",
        _PAPER + ", Algorithm 1 (D2)",
        draws.ties(24, 50.0),
        traits=_traits("few keys"),
    ),
    Probe(
        "ties_negative",
        "underflow of the published fix at a negative repeated maximum",
        _PAPER + ", Algorithm 1 (D1)",
        draws.ties(2, -200.0),
        traits=_traits("level", "few keys"),
    ),
    Probe(
        "ties_zero",
        "a repeated maximum of exactly 0",
        _PAPER + ", Algorithm 1 (D3)",
        draws.ties(2, 0.0),
    ),
    Probe(
        "ties_apart",
        "equal maxima in different tiles",
        _PAPER + ", Algorithm 1 (D4)",
        draws.ties(2, 6.0, apart=True),
        traits=_traits("few keys"),
    ),
    Probe(
        "sink",
        "δ's error where one token takes the mass",
        _PAPER + ", discussion of attention sinks",
        draws.sink,
        is_causal=True,
        traits=_traits("few keys"),
    ),
    Probe(
        "value_one_sign",
        "signed error of O",
        _PAPER + ", section 3.3.2",
        draws.shared_keys(_ONE_SIGN, 4.0),
        shared_feature=4.0,
    ),
    Probe(
        "value_offset",
        "cancellation of dP and δ",
        "jax PR 40128 (rounded before a cancelling sum)",
        draws.shared_keys(_OFFSET, 4.0),
        shared_feature=4.0,
    ),
    Probe(
        "value_constant",
        "weights and row sum that disagree",
        "flash-attention PR 2721",
        draws.constant_values,
    ),
    Probe(
        "keys_common",
        "δ's error, amplified by what all keys share",
        "flash-attention PR 2893",
        draws.shared_keys(draws.scaled(q=0.5), 32.0),
        shared_feature=32.0,
    ),
    Probe(
        "repeated_tokens", "equal tokens in runs", _PAPER + ", section 3.3.2", draws.repeated_tokens
    ),
    Probe(
        "all_negative",
        "a row maximum stuck at 0",
        "flash-attention issue 2082",
        draws.level(-30.0),
        traits=_traits("level"),
    ),
    Probe(
        "deep_negative",
        "scores recomputed too coarsely, finite −inf",
        "cudnn-frontend 744, flashinfer 4267",
        draws.level(-600.0),
        traits=_traits("level"),
    ),
    Probe(
        "rows_apart",
        "one maximum for several rows",
        "FlashDecoding++, arXiv 2311.01282 (one maximum for all rows)",
        draws.rows_apart,
        traits=_traits("level"),
    ),
    Probe(
        "lse_below_88",
        "exp(−lse) overflowing in the backward pass",
        "pytorch issue 196678",
        # e^(−lse) is beyond fp32 from lse < −88.7 on
        draws.level(-120.0),
        is_causal=True,
        traits=_traits("level"),
    ),
    Probe(
        "very_large",
        "overflow of unshifted weights",
        "flash-attention issue 2082",
        draws.level(400.0),
        traits=_traits("level"),
    ),
    Probe(
        "sharp",
        "scores of trained size, where their rounding counts",
        "FastVideo PR 1730 (key pre-scaled in bf16)",
        draws.scaled(q=3.0, k=2.0),
    ),
    Probe(
        "odd_scale",
        "the scale folded into a rounded operand",
        "FastVideo PR 1730 (key pre-scaled in bf16)",
        draws.scaled(q=2.0, k=2.0),
        # no power of two, so that multiplying it into query or key rounds
        scale=0.173,
    ),
    Probe(
        "rising",
        "rescaling when the maximum changes late",
        "FlashAttention-2, Algorithm 1",
        draws.rising,
    ),
    Probe(
        "two_live_keys",
        "weights that differ between the two passes",
        "exact arithmetic: a row of dS sums to 0",
        draws.shared_keys(draws.two_live_keys, 4.0),
        shared_feature=4.0,
        judged_by="row sums of dS (δ's error)",
        slack=8.0,
    ),
    Probe(
        "outlier_features",
        "features far larger than the others",
        _PAPER + ", fig. 5",
        draws.outlier_features,
    ),
    Probe(
        "tiny",
        "small and subnormal values lost",
        "triton PR 3408 (row sums too coarse)",
        draws.scaled(k=1e-3, v=1e-30),
    ),
    Probe(
        "odd_lengths",
        "N and d that are no multiples of the block",
        "flash-attention, ragged tiles",
        draws.gaussian,
        change_shape=draws.lengths,
        traits=_traits("ragged", "plain"),
    ),
    Probe(
        "odd_lengths_causal",
        "ragged tiles on the diagonal",
        "flash-attention, ragged tiles",
        draws.gaussian,
        is_causal=True,
        change_shape=draws.lengths,
        traits=_traits("ragged", "plain"),
    ),
    Probe(
        "cross",
        "different numbers of queries and keys",
        "cross-attention",
        draws.gaussian,
        change_shape=draws.cross,
        traits=_traits("ragged", "plain"),
    ),
    Probe(
        "wider_values",
        "value heads wider than query heads",
        "multi-head latent attention",
        draws.gaussian,
        change_shape=draws.wider_values,
        traits=_traits("ragged"),
    ),
    Probe(
        "gqa",
        "query heads sharing a key head",
        "grouped-query attention",
        draws.gaussian,
        is_causal=True,
        change_shape=draws.grouped,
    ),
    Probe(
        "free_feature", "relations between calls that break", "exact arithmetic", draws.free_feature
    ),
    Probe(
        "free_feature_causal",
        "relations between causal calls that break",
        "exact arithmetic",
        draws.free_feature,
        is_causal=True,
    ),
    Probe(
        "masked_rows",
        "rows that may attend to nothing, masks whose rows end inside a tile",
        "pytorch, fully masked rows",
        draws.masked_rows,
        change_shape=draws.lengths,
    ),
    Probe(
        "additive_mask",
        "a bias added to the scores, read as if its rows were as long as padded keys",
        "ALiBi position bias; onnxruntime PR 29247",
        draws.additive_mask,
        change_shape=draws.lengths,
    ),
    Probe(
        "window",
        "windows that end inside a tile",
        "sliding-window attention",
        draws.gaussian,
        # neither edge at a multiple of any tile's width
        options=lambda _: {"window": (37, 5)},
    ),
    Probe(
        "window_causal",
        "a causal window's two edges",
        "sliding-window attention",
        draws.gaussian,
        is_causal=True,
        change_shape=draws.lengths,
        options=lambda _: {"window": (45, -1)},
    ),
    Probe(
        "causal_offset",
        "a diagonal that starts elsewhere than at the top left",
        "FlashAttention, causal at the bottom right",
        draws.gaussian,
        is_causal=True,
        change_shape=draws.cross,
        options=lambda shape: {"causal_offset": shape.n_key - shape.n_query},
    ),
    Probe(
        "softcap",
        "a softcap, its slope in the backward pass, keys of padding that it makes finite",
        "Gemma 2, arXiv 2408.00118; llama.cpp PR 29034",
        draws.scaled(q=1.5, k=2.0),
        change_shape=draws.lengths,
        # scores have a standard deviation of 3 here, so that a cap of 2 bends most of them
        options=lambda _: {"softcap": 2.0},
    ),
    Probe(
        "learned_sinks",
        "sinks left out of the row sum, or of δ",
        "attention sinks, arXiv 2309.17453",
        draws.learned_sinks,
        change_shape=draws.lengths,
    ),
    Probe(
        "dropout",
        "a backward pass that drops other weights, or forgets their scale",
        "flash-attention, dropout",
        draws.gaussian,
        # 1 / (1 − p) is 4/3, which no format holds: where the scale is applied shows
        options=lambda _: {"dropout_p": 0.25},
    ),
)


def probes_with(trait: Trait) -> set[str]:
    """The names of the probes that have a trait."""
    return {probe.name for probe in PROBES if trait in probe.traits}


def probe_named(name: str) -> Probe:
    """The built-in probe of that name, or the one that a case of the array of sizes is named by;
    raises ValueError with the accepted names.
    """
    if name.startswith(f"{PREFIX}/"):
        return _of_sizes(name)
    for probe in PROBES:
        if probe.name == name:
            return probe
    raise ValueError(f"probe={name!r}: accepted are {', '.join(p.name for p in PROBES)}")


@lru_cache(maxsize=1024)
def _of_sizes(name: str) -> Probe:
    levels = levels_of(name)
    return Probe(
        name,
        "sizes, strides and ways to be called that a kernel branches on",
        "a covering array (halfulp.audit.size_array)",
        draw_of(levels),
        is_causal=levels["sees"] in CAUSAL,
        scale=1.0 if levels["scores"] == "abyss" else None,
        elements_only=True,
        manner="/".join(levels[part] for part in ("memory", "grad_memory", "calls")),
        options=partial(options_of, levels),
    )
