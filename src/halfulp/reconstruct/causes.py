"""What a kernel can be found to do wrong: the one table of causes, each with a stable key, the
public bug it resembles, and what it does to training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["rounding", "function", "non-finite", "unstable", "unexplained"]


@dataclass(frozen=True)
class Cause:
    """One thing that a kernel does, as a reader is told it."""

    key: str  # stable: reports, codes and pages go by it
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
FORWARD = "activations carry an error that the next layers and the gradient inherit in every step"
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
    ("weights", "the weights are too coarse in P̄ V", "flash-attention PR 2721; flashinfer PR 5020"
     " (fp8 weights without pre-scale)", "diffuse attention fades: heads that average over many"
     " tokens go silent"),
    ("weights-row-sum", "l is summed from the weights before rounding, P̄ V from those after",
     _EVERYONE, DELTA),
    ("weights-normalized", "P is rounded after its division by the row sum, so that rows do not sum"
     " to 1", "softmax(…).to(bf16) @ v, as transformers' eager attention has it", FORWARD),
    ("weights-disagree", "weights and row sum disagree",
     "flash-attention PR 2721 (l and P̄ disagree)", FORWARD),
    ("row-sum", "the row sum l is too coarse",
     "triton PR 3408 (row sums too coarse for reuse in backward)", FORWARD),
    ("exponential", "the exponential is too coarse",
     "software exponentials of too low a degree (FlashAttention-4 has one of degree 3)", FORWARD),
    ("row-max", "the row maximum, or the scores less it, are too coarse", _OFFICIAL, FORWARD),
    ("accumulator", "O is accumulated in low precision across key blocks",
     "Qiu & Yao's official code", FORWARD),
    ("products", "matrix products are summed in low precision",
     "DeepSeek-V3, 3.3.2 (fp8 tensor cores keep 14 bits)", FORWARD),
    ("reciprocal", "O is multiplied by a reciprocal of l that is too coarse",
     "triton PR 3408", FORWARD),
    ("out", "O is truncated, or coarser than its format",
     "aiter PR 5151 (truncation for nearest-even: within 1 ulp, always the same sign)", LEAN),
    ("scores", "scores are rounded to a coarse format", _OFFICIAL, FORWARD),
    ("operand", "an input passes through a coarser format",
     "fp16 products in bf16 kernels; TF32 by default", FORWARD),
    ("prescaled", "the scale is folded into an operand, which is rounded again",
     "FastVideo PR 1730 (key pre-scaled in bf16)", FORWARD),
    ("lse", "lse is kept too coarse for the backward pass", "triton PR 3408", GRADIENT),
    ("backward-scores", "scores are recomputed more coarsely in the backward pass",
     "cudnn-frontend 744 (scores recomputed in fp16), FastVideo PR 1730 (key pre-scaled in bf16)",
     GRADIENT),
    ("backward-weights", "the backward pass takes other weights than the forward pass (P from lse,"
     " or rescaled by no power of two)", "FlashAttention-2, whose backward pass takes P from lse",
     DELTA),
    ("probabilities", "P is too coarse in dV = Pᵀ dO",
     "triton PR 3408 (row sums too coarse for reuse in backward)", GRADIENT),
    ("delta", "δ, or the difference dP − δ, is too coarse", "flash-attention PR 2893 (dS product"
     " in bf16), jax PR 40128 (rounded before a cancelling sum)", DELTA),
    ("delta-from-out", "δ = rowsum(dO ∘ O) from the rounded O", _EVERYONE, DELTA),
    ("grad-scores", "dS is too coarse", "flash-attention PR 2893 (dS product in bf16)", GRADIENT),
    ("grad-accumulator", "gradients are accumulated in low precision across blocks",
     "PyTorch's CPU flash kernel (dQ, dK, dV summed in bf16)", LONG),
    ("grad-stored", "gradients are truncated, or coarser than their format",
     "aiter PR 5151 (truncation for nearest-even)", LEAN),
)  # fmt: skip

_FUNCTION = (
    ("causal-mask", "the causal mask is wrong", "off by one on the diagonal", LEAK),
    ("mask", "masks are applied wrongly", "mask strides in kernels", WRONG),
    ("mask-finite", "hidden pairs get a finite number, which rows far below zero exceed",
     "flashinfer PR 4267 (finite −inf)", LEAK),
    ("backward-mask", "the backward pass hides other pairs than the forward pass",
     "fused backward passes whose mask was changed on one side", LOST),
    ("scale", "the scale of the scores is wrong", "head dimensions padded in kernels", WRONG),
    ("key-tail", "keys at an end of the sequence are left out", _BLOCKS, WRONG),
    ("query-tail", "queries at an end of the sequence are left out", _BLOCKS, NOISE),
    ("padding", "zeros that pad the last key block keep their weight",
     "flash-attention, ragged tiles", WRONG),
    ("ragged", "sizes off the block (N or d) are handled wrongly", _BLOCKS, FORWARD),
    ("key-heads", "query heads are paired with the wrong key heads", "grouped-query attention",
     WRONG),
    ("other-data", "heads or sequences are computed from another's data",
     "strides and indices of persistent kernels", NOISE),
    ("layout", "the operands are read in another layout", "[B, N, H, D] taken for [B, H, N, D]",
     WRONG),
    ("unwritten", "some results are never written", "grids that end before the last tile", NOISE),
    ("unnormalized", "O is divided by another row sum than its own",
     "split-K merges without rescale", WRONG),
    ("rescale", "sums are not rescaled as they must be where the maximum grows",
     "conditional rescaling as in FlashAttention-4", WRONG),
    ("tiles-skipped", "keys of small weight are skipped", "skip-softmax kernels", WRONG),
    ("split-merge", "parts of the keys are merged without their weights",
     "flash-decoding's second pass", WRONG),
    ("lse-other", "lse is something else than the natural log of the row sum",
     "lse in base 2, or without the maximum", LOST),
    ("no-delta", "δ is left out of dS, or enters it wrongly", "hand-written backward passes", LOST),
    ("grad-scale", "the scale is missing from a gradient, or enters it twice",
     "hand-written backward passes", LOST),
    ("group-sum", "gradients of shared key heads are not summed over their group",
     "grouped-query attention, backward", LOST),
    ("window", "the window of visible keys is wrong", "transformers issue 39408 (one key too"
     " many)", WRONG),
    ("softcap", "the cap of the scores is wrong, or missing from dS", "flash-attention issue"
     " 1065 (no softcap in the backward pass)", WRONG),
    ("sinks", "attention sinks are left out, or enter wrongly", "rocm-libraries issue 12227 (the"
     " sink counted twice)", WRONG),
    ("lse-gradient", "the gradient of lse is left out, or enters δ wrongly", "FlashAttention-2's"
     " own lse, whose gradient is ignored (\"for testing only\")", LOST),
    ("cache", "new rows are written to the wrong place of the cache, or not at all",
     "flash-attention issue 772 (another sequence's cache is written)", WRONG),
    ("grad-tail", "gradients leave out a part of the sequence", _BLOCKS, LOST),
)  # fmt: skip

_OTHER: tuple[tuple[str, Kind, str, str, str], ...] = (
    ("underflow", "non-finite", "a shifted row underflows where its maximum is repeated: l = 0",
     "the published stabilized softmax", NAN),
    ("exp-of-lse", "non-finite", "exp(−lse) overflows in the backward pass",
     "pytorch issue 196678 (NaN dQ where LSE < −88.7)", NAN),
    ("masked-row", "non-finite", "rows that may attend to nothing become NaN",
     "softmax of a row of −inf", NAN),
    ("maximum", "non-finite", "the row maximum is not tracked: weights overflow or vanish",
     "flash-attention issue 2082", NAN),
    ("nan-escapes", "non-finite", "NaN or Inf escapes from its row or head",
     "flashinfer PR 4267 (finite −inf)", NAN),
    ("non-finite", "non-finite", "results are not finite where exact ones are", _NONE, NAN),
    ("unstable", "unstable", "results differ from call to call by more than rounding",
     "a race between thread blocks", MANY),
    ("elements", "unexplained", "some elements are wrong by more than rounding can do, while the"
     " mean over heads is not", "heads, tiles or rows that are never written, or computed from"
     " another's data", NOISE),
    ("out-unexplained", "unexplained", "O has an error that nothing tried explains", _NONE,
     FORWARD),
    ("gradient-unexplained", "unexplained",
     "gradients have an error that nothing tried explains", _NONE, GRADIENT),
    ("stock", "rounding", "δ, l or the backward pass's weights are coarser than they need be",
     _EVERYONE, DELTA),
)  # fmt: skip

_KEPT = "Liger-Kernel PR 950 (dW of a norm reduced in bf16)"

_OPERATION: tuple[tuple[str, Kind, str, str, str], ...] = (
    ("step-low", "rounding", "a value between two steps is rounded to the operands' format",
     "missing upcasts of eager code", FORWARD),
    ("statistic-low", "rounding", "a number that a whole row shares is rounded",
     "helion PR 2273 (inv_rms)", FORWARD),
    ("sum-low", "rounding", "a sum is kept in low precision as it runs",
     "triton PR 3408 in Meta's fork (row sums too coarse)", LONG),
    ("grad-step-low", "rounding", "a value of the backward pass is rounded before it is used up",
     "jax PR 40128 (rounded before a cancelling sum)", GRADIENT),
    ("grad-sum-low", "rounding", "a gradient is summed in low precision", _KEPT, GRADIENT),
    ("result-cut", "rounding", "a result is truncated instead of rounded",
     "aiter PR 5151 (truncation for nearest-even)", LEAN),
    ("result-low", "rounding", "a result that is float32 has passed through fewer digits",
     "moments and masters of optimizers in bf16", LOST),
    ("coarser", "rounding", "values pass through a coarser format than their own",
     "products in fp8 or fp16 by default", NOISE),
    ("option", "function", "an option is not read, or enters elsewhere",
     "eps inside and outside of roots; OneTrainer 996 (\"no weight decay is applied\")", WRONG),
    ("end", "function", "an end that no whole block covers is left out", _BLOCKS, WRONG),
    ("neighbor", "function", "a row is computed from its neighbor's data", "pytorch issue 190828",
     NOISE),
    ("factor", "function", "a value is a constant times what it should be",
     "means over another count", WRONG),
    ("term-missing", "function", "a term is left out, or another is taken in its place",
     "Liger-Kernel PR 1432 (gradients 4 to 23 % off)",
     "what is computed, or its gradient, is of something else than what is written down"),
    ("exchanged", "function", "two gradients are exchanged", "hand-written backward passes", LOST),
    ("limited", "function", "a value is held within limits that the operation does not have",
     "clamps against overflow", WRONG),
    ("random", "rounding", "random numbers of stochastic rounding are shared, biased or missing",
     "Primus-Turbo PR 365 (a zero seed defeats stochastic rounding)", LEAN),
    ("block-scale", "function", "numbers are quantized by another scale than their block's",
     "DeepGEMM 189 (10 × the error by the layout of scales)", NOISE),
    ("block-codes", "function", "numbers are quantized to other codes than the format's",
     "OCP Microscaling Formats 1.0 (subnormal codes, ties, saturation)", NOISE),
    ("operation-function", "unexplained", "another function is computed than the one asked for",
     _NONE, WRONG),
    ("operation-unexplained", "unexplained", "an error that nothing tried explains", _NONE,
     FORWARD),
    ("operation-place", "unexplained", "an error that nothing tried explains begins at a known"
     " step, or sits at a known place", _NONE, FORWARD),
)  # fmt: skip

CAUSES: dict[str, Cause] = {
    cause.key: cause
    for cause in (
        *(Cause(key, "rounding", *rest) for key, *rest in _ROUNDING),
        *(Cause(key, "function", *rest) for key, *rest in _FUNCTION),
        *(Cause(*row) for row in (*_OTHER, *_OPERATION)),
    )
}
