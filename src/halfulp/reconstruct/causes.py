"""What a kernel can be found to do wrong: the one table of causes, each with its code, a stable
key, the public bug it resembles, and what it does to training.

A code means one thing for good, and that of a cause which is gone is never given again. HU1 is
rounding, HU2 another function than the one asked for, HU3 what is not finite or not the same twice,
HU4 what is not explained, HU5 operations other than attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["rounding", "function", "non-finite", "unstable", "unexplained"]


@dataclass(frozen=True)
class Cause:
    """One thing that a kernel does, as a reader is told it."""

    code: str  # of its page, docs/causes/CODE.md, and in pull requests
    key: str  # stable: reports go by it
    kind: Kind  # function: it computes something else, whatever the precision
    name: str  # what the kernel does, in one clause
    resembles: str  # the public case
    effect: str  # on training


NAN = "one such row turns every weight of the model into NaN within a step"
DELTA = (
    "the gradient of W_Q carries an error along the direction that all keys share; it adds up step"
    " after step until the scores run away"
)
GRADIENT = (
    "the gradient is noisier than the format requires, and where inputs repeat the error does not"
    " average out"
)
FORWARD = "its results carry an error that all that is computed of them inherits in every step"
LEAN = (
    "every layer shrinks its signal in the same direction, and over a deep model that adds up to"
    " percents"
)
LONG = (
    "the longer the context, the larger the gradient's error: long sequences train on noise that"
    " short ones do not show"
)
WRONG = "the model learns another function than the one that is written down"
LEAK = "tokens see the future or miss the present: the loss looks too good, or learning stalls"
NOISE = "the heads or tokens concerned learn from noise"
LOST = "the weights concerned get a gradient of something else, and learn slowly or wrongly"
MANY = "two runs of the same job part ways, and no failure can be replayed"

_EVERYONE = "FlashAttention-2 as everyone ships it (Qiu & Yao, arXiv 2510.04212)"
_OFFICIAL = "eager attention in bf16; Qiu & Yao's official code"
_BLOCKS = "kernels tested at multiples of the block only"
_NONE = "no public case known"

_ROUNDING = (
    ("HU101", "weights", "the weights are too coarse in P̄ V",
     "flash-attention PR 2721; flashinfer PR 5020 (fp8 weights without pre-scale)",
     "diffuse attention fades: heads that average over many tokens go silent"),
    ("HU102", "weights-row-sum",
     "l is summed from the weights before rounding, P̄ V from those after", _EVERYONE, DELTA),
    ("HU124", "weights-normalized",
     "P is rounded after its division by the row sum, so that rows do not sum to 1",
     "softmax(…).to(bf16) @ v, as transformers' eager attention has it", FORWARD),
    ("HU103", "weights-disagree", "weights and row sum disagree",
     "flash-attention PR 2721 (l and P̄ disagree)", FORWARD),
    ("HU104", "row-sum", "the row sum l is too coarse",
     "triton PR 3408 (row sums too coarse for reuse in backward)", FORWARD),
    ("HU105", "exponential", "the exponential is too coarse",
     "software exponentials of too low a degree (FlashAttention-4 has one of degree 3)", FORWARD),
    ("HU106", "row-max", "the row maximum, or the scores less it, are too coarse", _OFFICIAL,
     FORWARD),
    ("HU107", "accumulator", "O is accumulated in low precision across key blocks",
     "Qiu & Yao's official code", FORWARD),
    ("HU108", "products", "matrix products are summed in low precision",
     "DeepSeek-V3, 3.3.2 (fp8 tensor cores keep 14 bits)", FORWARD),
    ("HU109", "reciprocal", "O is multiplied by a reciprocal of l that is too coarse",
     "triton PR 3408", FORWARD),
    ("HU110", "out", "O is truncated, or coarser than its format",
     "aiter PR 5151 (truncation for nearest-even: within 1 ulp, always the same sign)", LEAN),
    ("HU111", "scores", "scores are rounded to a coarse format", _OFFICIAL, FORWARD),
    ("HU112", "operand", "an input passes through a coarser format",
     "fp16 products in bf16 kernels; TF32 by default", FORWARD),
    ("HU113", "prescaled", "the scale is folded into an operand, which is rounded again",
     "FastVideo PR 1730 (key pre-scaled in bf16)", FORWARD),
    ("HU114", "lse", "lse is kept too coarse for the backward pass", "triton PR 3408", GRADIENT),
    ("HU115", "backward-scores", "scores are recomputed more coarsely in the backward pass",
     "cudnn-frontend 744 (scores recomputed in fp16), FastVideo PR 1730 (key pre-scaled in bf16)",
     GRADIENT),
    ("HU116", "backward-weights", "the backward pass takes other weights than the forward pass (P"
     " from lse, or rescaled by no power of two)",
     "FlashAttention-2, whose backward pass takes P from lse", DELTA),
    ("HU117", "probabilities", "P is too coarse in dV = Pᵀ dO",
     "triton PR 3408 (row sums too coarse for reuse in backward)", GRADIENT),
    ("HU118", "delta", "δ, or the difference dP − δ, is too coarse",
     "flash-attention PR 2893 (dS product in bf16), jax PR 40128 (rounded before a cancelling sum)",
     DELTA),
    ("HU119", "delta-from-out", "δ = rowsum(dO ∘ O) from the rounded O", _EVERYONE, DELTA),
    ("HU120", "grad-scores", "dS is too coarse", "flash-attention PR 2893 (dS product in bf16)",
     GRADIENT),
    ("HU121", "grad-accumulator", "gradients are accumulated in low precision across blocks",
     "PyTorch's CPU flash kernel (dQ, dK, dV summed in bf16)", LONG),
    ("HU122", "grad-stored", "gradients are truncated, or coarser than their format",
     "aiter PR 5151 (truncation for nearest-even)", LEAN),
)  # fmt: skip

_FUNCTION = (
    ("HU201", "causal-mask", "the causal mask is wrong",
     "off by one on the diagonal, or aligned at the other end", LEAK),
    ("HU202", "mask", "masks are applied wrongly", "mask strides in kernels", WRONG),
    ("HU203", "mask-finite", "hidden pairs get a finite number, which rows far below zero exceed",
     "flashinfer PR 4267 (finite −inf)", LEAK),
    ("HU204", "backward-mask", "the backward pass hides other pairs than the forward pass",
     "fused backward passes whose mask was changed on one side", LOST),
    ("HU205", "scale", "the scale of the scores is wrong", "head dimensions padded in kernels",
     WRONG),
    ("HU206", "key-tail", "keys at an end of the sequence are left out", _BLOCKS, WRONG),
    ("HU207", "query-tail", "queries at an end of the sequence are left out", _BLOCKS, NOISE),
    ("HU208", "padding", "zeros that pad the last key block keep their weight",
     "flash-attention, ragged tiles", WRONG),
    ("HU209", "ragged", "sizes off the block (N or d) are handled wrongly", _BLOCKS, FORWARD),
    ("HU210", "key-heads", "query heads are paired with the wrong key heads",
     "grouped-query attention", WRONG),
    ("HU211", "other-data", "heads or sequences are computed from another's data",
     "strides and indices of persistent kernels", NOISE),
    ("HU212", "layout", "the operands are read in another layout",
     "[B, N, H, D] taken for [B, H, N, D]", WRONG),
    ("HU213", "unwritten", "some results are never written", "grids that end before the last tile",
     NOISE),
    ("HU214", "unnormalized", "O is divided by another row sum than its own",
     "split-K merges without rescale", WRONG),
    ("HU215", "rescale", "sums are not rescaled as they must be where the maximum grows",
     "conditional rescaling as in FlashAttention-4", WRONG),
    ("HU216", "tiles-skipped", "keys of small weight are skipped", "skip-softmax kernels", WRONG),
    ("HU217", "split-merge", "parts of the keys are merged without their weights",
     "flash-decoding's second pass", WRONG),
    ("HU218", "lse-other", "lse is something else than the natural log of the row sum",
     "lse in base 2, or without the maximum", LOST),
    ("HU219", "no-delta", "δ is left out of dS, or enters it wrongly",
     "hand-written backward passes", LOST),
    ("HU220", "grad-scale", "the scale is missing from a gradient, or enters it twice",
     "hand-written backward passes", LOST),
    ("HU221", "group-sum", "gradients of shared key heads are not summed over their group",
     "grouped-query attention, backward", LOST),
    ("HU223", "window", "the window of visible keys is wrong",
     "transformers issue 39408 (one key too many)", WRONG),
    ("HU224", "softcap", "the cap of the scores is wrong, or missing from dS",
     "flash-attention issue 1065 (no softcap in the backward pass)", WRONG),
    ("HU225", "sinks", "attention sinks are left out, or enter wrongly",
     "rocm-libraries issue 12227 (the sink counted twice)", WRONG),
    ("HU226", "lse-gradient", "the gradient of lse is left out, or enters δ wrongly",
     "FlashAttention-2's own lse, whose gradient is ignored (\"for testing only\")", LOST),
    ("HU227", "cache", "new rows are written to the wrong place of the cache, or not at all",
     "flash-attention issue 772 (another sequence's cache is written)", WRONG),
    ("HU228", "dropout", "weights are dropped at random where no dropout was asked for",
     "transformers PR 33844 (dropout in evaluation)", WRONG),
    ("HU229", "value-factor", "V, the weights or O are multiplied by a number",
     "sglang PR 26852 (the scale of K's codes taken for V's)", WRONG),
    ("HU230", "max-gradient",
     "gradients go through the row maximum, on which exact results do not depend",
     "memory-efficient attention in JAX, whose authors stop them there (arXiv 2112.05682)",
     GRADIENT),
    ("HU222", "grad-tail", "gradients leave out a part of the sequence", _BLOCKS, LOST),
)  # fmt: skip

_OTHER: tuple[tuple[str, str, Kind, str, str, str], ...] = (
    ("HU301", "underflow", "non-finite",
     "a shifted row underflows where its maximum is repeated: l = 0",
     "the published stabilized softmax", NAN),
    ("HU302", "exp-of-lse", "non-finite", "exp(−lse) overflows in the backward pass",
     "pytorch issue 196678 (NaN dQ where LSE < −88.7)", NAN),
    ("HU303", "masked-row", "non-finite", "rows that may attend to nothing become NaN",
     "softmax of a row of −inf", NAN),
    ("HU304", "maximum", "non-finite", "the row maximum is not tracked: weights overflow or vanish",
     "flash-attention issue 2082", NAN),
    ("HU305", "nan-escapes", "non-finite", "NaN or Inf escapes from its row or head",
     "flashinfer PR 4267 (finite −inf)", NAN),
    ("HU306", "non-finite", "non-finite", "results are not finite where exact ones are", _NONE,
     NAN),
    ("HU307", "unstable", "unstable", "results differ from call to call by more than rounding",
     "a race between thread blocks", MANY),
    ("HU401", "elements", "unexplained",
     "some elements are wrong by more than rounding can do, while the mean over heads is not",
     "heads, tiles or rows that are never written, or computed from another's data", NOISE),
    ("HU402", "out-unexplained", "unexplained", "O has an error that nothing tried explains", _NONE,
     FORWARD),
    ("HU403", "gradient-unexplained", "unexplained",
     "gradients have an error that nothing tried explains", _NONE, GRADIENT),
    ("HU123", "stock", "rounding",
     "δ, l or the backward pass's weights are coarser than they need be", _EVERYONE, DELTA),
)  # fmt: skip

_KEPT = "Liger-Kernel PR 950 (dW of a norm reduced in bf16)"

_OPERATION: tuple[tuple[str, str, Kind, str, str, str], ...] = (
    ("HU501", "step-low", "rounding",
     "a value between two steps is rounded to the operands' format",
     "missing upcasts of eager code", FORWARD),
    ("HU502", "statistic-low", "rounding", "a number that a whole row shares is rounded",
     "helion PR 2273 (inv_rms)", FORWARD),
    ("HU503", "sum-low", "rounding", "a sum is kept in low precision as it runs",
     "triton PR 3408 in Meta's fork (row sums too coarse)", LONG),
    ("HU504", "grad-step-low", "rounding",
     "a value of the backward pass is rounded before it is used up",
     "jax PR 40128 (rounded before a cancelling sum)", GRADIENT),
    ("HU505", "grad-sum-low", "rounding", "a gradient is summed in low precision", _KEPT, GRADIENT),
    ("HU506", "result-cut", "rounding", "a result is truncated instead of rounded",
     "aiter PR 5151 (truncation for nearest-even)", LEAN),
    ("HU507", "result-low", "rounding", "a result that is float32 has passed through fewer digits",
     "moments and masters of optimizers in bf16", LOST),
    ("HU508", "coarser", "rounding", "values pass through a coarser format than their own",
     "products in fp8 or fp16 by default", NOISE),
    ("HU521", "option", "function", "an option is not read, or enters elsewhere",
     "eps inside and outside of roots; OneTrainer 996 (\"no weight decay is applied\")", WRONG),
    ("HU522", "end", "function", "an end that no whole block covers is left out", _BLOCKS, WRONG),
    ("HU523", "neighbor", "function", "a row is computed from its neighbor's data",
     "pytorch issue 190828", NOISE),
    ("HU524", "factor", "function", "a value is a constant times what it should be",
     "means over another count", WRONG),
    ("HU525", "term-missing", "function", "a term is left out, or another is taken in its place",
     "Liger-Kernel PR 1432 (gradients 4 to 23 % off)",
     "what is computed, or its gradient, is of something else than what is written down"),
    ("HU526", "exchanged", "function", "two gradients are exchanged",
     "hand-written backward passes", LOST),
    ("HU527", "limited", "function",
     "a value is held within limits that the operation does not have", "clamps against overflow",
     WRONG),
    ("HU528", "random", "rounding",
     "random numbers of stochastic rounding are shared, biased or missing",
     "Primus-Turbo PR 365 (a zero seed defeats stochastic rounding)", LEAN),
    ("HU529", "block-scale", "function",
     "numbers are quantized by another scale than their block's",
     "DeepGEMM 189 (10 × the error by the layout of scales)", NOISE),
    ("HU530", "block-codes", "function", "numbers are quantized to other codes than the format's",
     "OCP Microscaling Formats 1.0 (subnormal codes, ties, saturation)", NOISE),
    ("HU541", "operation-function", "unexplained",
     "another function is computed than the one asked for", _NONE, WRONG),
    ("HU542", "operation-unexplained", "unexplained", "an error that nothing tried explains", _NONE,
     FORWARD),
    ("HU543", "operation-place", "unexplained",
     "an error that nothing tried explains begins at a known step, or sits at a known place", _NONE,
     FORWARD),
)  # fmt: skip

CAUSES: dict[str, Cause] = {
    cause.key: cause
    for cause in (
        *(Cause(code, key, "rounding", *rest) for code, key, *rest in _ROUNDING),
        *(Cause(code, key, "function", *rest) for code, key, *rest in _FUNCTION),
        *(Cause(*row) for row in (*_OTHER, *_OPERATION)),
    )
}


def page_of(code: str) -> str:
    """The page of a cause, Markdown: what it is, how it was seen in public, how to mend it.

    Raises ValueError for a code that no cause has.
    """
    known = [cause.code for cause in CAUSES.values()]
    if code not in known:
        raise ValueError(
            f"values={code!r}: is no cause's code; accepted are those of `halfulp ls causes`"
        )
    package = Path(__file__).parents[1]
    # in the package where it is installed, in the repository where its sources are used
    folders = [folder / "docs" / "causes" for folder in (package, package.parents[1])]
    page = next(folder / f"{code}.md" for folder in folders if folder.is_dir())
    return page.read_text(encoding="utf-8")
