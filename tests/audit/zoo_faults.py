"""Faulty kernels: the textbook's flash attention with exactly one step replaced. Many pass the
usual tolerance test.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from tests.audit import zoo_inputs as on
from tests.audit.zoo_kernel import (
    INF,
    TEXTBOOK_PLAN,
    Low,
    ZooKernel,
    delta_from_out,
    finite,
    keep_bits,
    kernel,
)

# Forward pass: weights, row sum, accumulator.


def fp8_weights(p: Tensor, low: Low) -> Tensor:
    return p.to(torch.float8_e4m3fn).float()


def linear_exponential(x: Tensor) -> Tensor:
    """2ⁿ(1 + f) for 2^(n + f): Schraudolph's, up to 6 % off."""
    y = x * math.log2(math.e)
    n = y.floor()
    return torch.where(y == -INF, torch.zeros_like(y), torch.ldexp(1 + (y - n), n.clamp_min(-126)))


def low_row_sum(l: Tensor, rescale: Tensor, p: Tensor, tied: Tensor, low: Low) -> Tensor:
    return low(l * rescale + p.sum(-1, keepdim=True))


def double_row_sum(l: Tensor, rescale: Tensor, p: Tensor, tied: Tensor, low: Low) -> Tensor:
    return l * rescale + p.sum(-1, keepdim=True) + tied


def low_accumulator(acc: Tensor, rescale: Tensor, pv: Tensor, jump: Tensor, low: Low) -> Tensor:
    return low(acc * rescale + pv)


def clamped_rescale(acc: Tensor, rescale: Tensor, pv: Tensor, jump: Tensor, low: Low) -> Tensor:
    return acc * rescale.clamp_min(torch.where(rescale > 0, math.exp(-5), 0.0)) + pv


def lazy_rescale(acc: Tensor, rescale: Tensor, pv: Tensor, jump: Tensor, low: Low) -> Tensor:
    return torch.where(jump < 2**-5, acc, acc * rescale) + pv


def low_reciprocal(acc: Tensor, l: Tensor, low: Low) -> Tensor:
    return acc * low(1 / torch.where(l == 0, torch.ones_like(l), l))


def bare_division(acc: Tensor, l: Tensor, low: Low) -> Tensor:
    return acc / l


def tile_maximum(s: Tensor, m: Tensor) -> Tensor:
    return torch.maximum(m, s.amax((-2, -1), keepdim=True))


def integer_maximum(s: Tensor, m: Tensor) -> Tensor:
    """The next integer in base 2."""
    log2_e = math.log2(math.e)
    return torch.maximum(m, torch.ceil(s.amax(-1, keepdim=True) * log2_e) / log2_e)


def published_maximum(s: Tensor, m: Tensor) -> Tensor:
    """Qiu & Yao, Algorithm 1: β = 7 for a positive repeated maximum, 0 for a negative one."""
    top = s.amax(-1, keepdim=True)
    repeated = (s == top).sum(-1, keepdim=True) > 1
    shifted = torch.where(top > 0, 7 * top, torch.zeros_like(top))
    return torch.maximum(m, torch.where(repeated & (top > -INF), shifted, top))


def far_below(top: Tensor, m: Tensor) -> Tensor:
    return top < m - 8


# Scores and masks.


def low_scores(q: Tensor, k: Tensor, alpha: float, low: Low) -> Tensor:
    return low(q @ k.mT * alpha)


def half_scores(q: Tensor, k: Tensor, alpha: float, low: Low) -> Tensor:
    return (q @ k.mT * alpha).half().float()


def scaled_query(q: Tensor, k: Tensor, alpha: float, low: Low) -> Tensor:
    return low(q * alpha) @ k.mT


def scaled_key(q: Tensor, k: Tensor, alpha: float, low: Low) -> Tensor:
    return q @ low(k * alpha).mT


def sees_next_tile(i: Tensor, j: Tensor) -> Tensor:
    return j <= i + (i % 64 == 63)


def whole_tiles(n: int, block: int) -> int:
    return n if n < block else n // block * block


def low_alpha(alpha: float, width: int, low: Low) -> float:
    return low(torch.tensor(alpha)).item()


def padded_alpha(alpha: float, width: int, low: Low) -> float:
    return alpha * math.sqrt(width / 2 ** math.ceil(math.log2(width)))


# Backward pass.


def low_products(do: Tensor, out: Tensor, exact: Tensor, low: Low) -> Tensor:
    terms = low(do * out)
    while terms.shape[-1] > 1:
        if terms.shape[-1] % 2:
            terms = torch.cat((terms, torch.zeros_like(terms[..., :1])), -1)
        terms = low(terms[..., ::2] + terms[..., 1::2])
    return terms


def delta_of_cut_out(do: Tensor, out: Tensor, exact: Tensor, low: Low) -> Tensor:
    return delta_from_out(do, low.cut(exact), exact, low)


def rounded_delta(do: Tensor, out: Tensor, exact: Tensor, low: Low) -> Tensor:
    return low(delta_from_out(do, out, exact, low))


def large_delta_only(do: Tensor, out: Tensor, exact: Tensor, low: Low) -> Tensor:
    delta = delta_from_out(do, out, exact, low)
    return torch.where(delta.abs() < 0.25, torch.zeros_like(delta), delta)


def separate_exponentials(s: Tensor, lse: Tensor) -> Tensor:
    return torch.exp(s) * torch.exp(-finite(lse))


def low_grad_scores(p: Tensor, dp: Tensor, delta: Tensor, low: Low) -> Tensor:
    return low(low(p) * low(low(dp) - low(delta)))


def low_dp(p: Tensor, dp: Tensor, delta: Tensor, low: Low) -> Tensor:
    return low(p * (low(dp) - delta))


def split_sum(p: Tensor, dp: Tensor, delta: Tensor, low: Low) -> Tensor:
    return low(low(p * dp) - low(p * delta))


def cut_grad_scores(p: Tensor, dp: Tensor, delta: Tensor, low: Low) -> Tensor:
    return low.cut(p * (dp - delta))


def half_grad_scores(p: Tensor, dp: Tensor, delta: Tensor, low: Low) -> Tensor:
    return (p * (dp - delta)).half().float()


def low_sums_of(*names: str):
    def add(name: str, total: Tensor, block: Tensor, low: Low) -> Tensor:
        return low(total + block) if name in names else total + block

    return add


def losing_updates():
    """Every 61st addition to dQ is lost, counted over calls: a race, made repeatable."""
    count = 0

    def add(name: str, total: Tensor, block: Tensor, low: Low) -> Tensor:
        nonlocal count
        count += name == "dq"
        return total if name == "dq" and count % 61 == 0 else total + block

    return add


def faulty(name, direction, fault, resembles, allclose, shows_on, **steps) -> ZooKernel:
    plan = replace(TEXTBOOK_PLAN, **steps)
    return ZooKernel(
        name, kernel(name, plan), fault, direction, resembles, allclose, shows_on, plan=plan
    )


_FLASH2 = "Dao 2023, Algorithm 1"
_PAPER = "Qiu & Yao, arXiv 2510.04212"

FAULTY: tuple[ZooKernel, ...] = (
    faulty(
        "weights_4_bits",
        "forward",
        "The weights are rounded to 4 mantissa bits for the product with V only.",
        "flash-attention PR 2721",
        True,
        on.constant_values,
        weights_operand=lambda p, low: keep_bits(p, 4),
    ),
    faulty(
        "weights_cut",
        "forward",
        "The weights are truncated instead of rounded for the product with V.",
        "aiter 5151",
        True,
        on.positive_values,
        weights_operand=lambda p, low: low.cut(p),
    ),
    faulty(
        "weights_fp8",
        "forward",
        "Weights in e4m3 without a pre-scale: small ones vanish from the numerator only.",
        "flashinfer PR 5020",
        False,
        on.sink,
        weights_operand=fp8_weights,
    ),
    faulty(
        "exp_linear",
        "forward",
        "Forward, exp is one line per binade; backward, it is exact.",
        "software exponentials of too low a degree",
        False,
        on.value_offset,
        exponential=linear_exponential,
    ),
    faulty(
        "row_sum_low",
        "forward",
        "The row sum is kept in the input's dtype.",
        "triton 3408",
        True,
        on.constant_values,
        row_sum=low_row_sum,
    ),
    faulty(
        "tie_counted_twice",
        "forward",
        "A maximum that a later tile repeats is added to the row sum once more.",
        _FLASH2,
        True,
        on.ties_across_tiles,
        row_sum=double_row_sum,
    ),
    faulty(
        "accumulator_low",
        "forward",
        "The accumulator is rounded to the input's dtype after every tile.",
        _PAPER + ", official code",
        True,
        on.long_positive,
        accumulate=low_accumulator,
    ),
    faulty(
        "rescale_clamped",
        "forward",
        "The accumulator's rescale factor is kept above e⁻⁵ when the maximum jumps.",
        _FLASH2,
        True,
        on.rising,
        accumulate=clamped_rescale,
    ),
    faulty(
        "rescale_skipped",
        "forward",
        "Where the maximum grows by less than 1/32, only the row sum is rescaled.",
        "conditional rescaling as in FlashAttention-4",
        True,
        on.creeping,
        accumulate=lazy_rescale,
    ),
    faulty(
        "reciprocal_low",
        "forward",
        "O is multiplied by 1/l in the input's dtype instead of divided by l.",
        "triton 3408",
        True,
        on.constant_values,
        divide=low_reciprocal,
    ),
    faulty(
        "out_cut",
        "forward",
        "O is truncated instead of rounded.",
        "aiter 5151",
        True,
        on.positive_values,
        store=lambda out, low: low.cut(out),
    ),
    faulty(
        "max_from_zero",
        "forward",
        "The row maximum starts at 0 instead of −inf.",
        "flash-attention issue 2082",
        True,
        on.all_negative,
        first_max=0.0,
    ),
    faulty(
        "max_per_tile",
        "forward",
        "One maximum serves a whole query tile: low rows underflow, NaN spreads.",
        "flash-attention issue 2082",
        True,
        on.mixed_levels,
        row_max=tile_maximum,
    ),
    faulty(
        "max_integer",
        "forward",
        "The shift is an integer but l sums unrounded weights: one alone rounds in O only.",
        "flash-attention PR 2721",
        True,
        on.lone_key,
        row_max=integer_maximum,
    ),
    faulty(
        "published_fix",
        "forward",
        "A repeated maximum far below zero is shifted by 0, and all weights underflow.",
        _PAPER + ", Algorithm 1",
        True,
        on.ties_below_zero,
        row_max=published_maximum,
        divide=bare_division,
    ),
    faulty(
        "tiles_skipped",
        "forward",
        "A key tile 8 below the running maximum is skipped, however wide it is.",
        "skip-softmax kernels",
        True,
        on.sink,
        skips_tile=far_below,
    ),
    faulty(
        "padding_leaks",
        "forward",
        "The zeros that pad the last key tile keep their weight exp(0 − m) in the row sum.",
        "flash-attention, ragged tiles",
        True,
        on.short_and_ragged,
        pads_keys=True,
    ),
    faulty(
        "masked_row_nan",
        "forward",
        "A row that may attend to nothing is 0/0.",
        "pytorch, fully masked rows",
        True,
        on.masked_rows,
        divide=bare_division,
    ),
    faulty(
        "value_through_fp16",
        "both",
        "V passes through fp16, so that small values vanish.",
        "fp16 products in bf16 kernels",
        True,
        on.tiny_values,
        read_value=lambda v: v.half().float(),
    ),
    faulty(
        "scores_low",
        "both",
        "The scores are rounded to the input's dtype.",
        _PAPER + ", official code",
        True,
        on.sharp,
        scores=low_scores,
    ),
    faulty(
        "query_prescaled",
        "both",
        "The query is multiplied by the scale and rounded before the product.",
        "FastVideo PR 1730",
        True,
        on.odd_scale,
        scores=scaled_query,
    ),
    faulty(
        "scale_low",
        "both",
        "The scale is kept in the input's dtype: exact for d = 16, 64, 256 only.",
        "FastVideo PR 1730",
        True,
        on.odd_width,
        alpha=low_alpha,
    ),
    faulty(
        "scale_of_padded_width",
        "both",
        "The scale is that of d padded to a power of two.",
        "head dimensions padded in kernels",
        True,
        on.odd_width,
        alpha=padded_alpha,
    ),
    faulty(
        "mask_finite",
        "both",
        "Hidden pairs get −10,000 instead of −inf, which rows far below zero exceed.",
        "flashinfer 4267",
        True,
        on.far_below_zero,
        hidden=-1e4,
    ),
    faulty(
        "mask_first_head",
        "both",
        "Every head uses the mask of head 0.",
        "mask strides in kernels",
        True,
        on.per_head_bias,
        mask_head=lambda mask: mask[:, :1],
    ),
    faulty(
        "causal_sees_next",
        "both",
        "The last query of every tile sees the first key of the next tile.",
        "causal masks at block edges",
        True,
        on.causal,
        visible=sees_next_tile,
    ),
    faulty(
        "tail_dropped",
        "both",
        "The last key tile is dropped where N is no multiple of the block.",
        "flash-attention, ragged tiles",
        True,
        on.ragged,
        keys_visited=whole_tiles,
    ),
    faulty(
        "last_key_ignored",
        "both",
        "The last key is never visited.",
        "off-by-one loop bounds",
        False,
        on.gaussian,
        keys_visited=lambda n, block: max(1, n - 1),
    ),
    faulty(
        "gqa_wrong_head",
        "both",
        "Query head h uses key head h mod H_k instead of h·H_k/H.",
        "grouped-query attention",
        True,
        on.grouped,
        repeat_heads="tile",
    ),
    faulty(
        "backward_scores_fp16",
        "backward",
        "The backward pass recomputes the scores in fp16.",
        "cudnn-frontend 744",
        True,
        on.deep_negative,
        scores_again=half_scores,
    ),
    faulty(
        "backward_scores_low",
        "backward",
        "The backward pass recomputes the scores in the input's dtype.",
        "cudnn-frontend 744",
        True,
        on.sharp,
        scores_again=low_scores,
    ),
    faulty(
        "backward_key_prescaled",
        "backward",
        "Backward, the key is scaled and rounded before the product.",
        "FastVideo PR 1730",
        True,
        on.odd_scale,
        scores_again=scaled_key,
    ),
    faulty(
        "lse_low",
        "backward",
        "lse is kept for the backward pass in the input's dtype.",
        "triton 3408",
        True,
        on.all_negative,
        lse=lambda m, l, low: low(m + torch.log(l)),
    ),
    faulty(
        "exp_minus_lse",
        "backward",
        "P is exp(S)·exp(−lse): infinite times zero where lse < −88.7.",
        "pytorch issue 196678",
        True,
        on.all_negative,
        probabilities=separate_exponentials,
    ),
    faulty(
        "delta_sum_low",
        "backward",
        "δ is summed in the input's dtype.",
        "flash-attention PR 2893",
        True,
        on.value_offset,
        delta=low_products,
    ),
    faulty(
        "delta_of_cut_out",
        "backward",
        "δ is computed from a truncated O, though O itself is rounded.",
        "aiter 5151",
        True,
        on.common_keys,
        delta=delta_of_cut_out,
    ),
    faulty(
        "delta_low",
        "backward",
        "δ is stored in the input's dtype.",
        "flash-attention PR 2893",
        True,
        on.constant_feature,
        delta=rounded_delta,
    ),
    faulty(
        "delta_dropped",
        "backward",
        "δ is left out where it is smaller than 1/4.",
        "early exits on small corrections",
        False,
        on.common_keys,
        delta=large_delta_only,
    ),
    faulty(
        "grad_scores_low",
        "backward",
        "dP, δ, their difference and P are all rounded before dS is formed.",
        "flash-attention PR 2893",
        True,
        on.constant_feature,
        grad_scores=low_grad_scores,
    ),
    faulty(
        "dp_rounded",
        "backward",
        "dP is rounded before δ is subtracted.",
        "jax PR 40128",
        True,
        on.constant_feature,
        grad_scores=low_dp,
    ),
    faulty(
        "cancelling_sum",
        "backward",
        "P∘dP and P∘δ are rounded before their difference.",
        "jax PR 40128",
        True,
        on.constant_feature,
        grad_scores=split_sum,
    ),
    faulty(
        "grad_scores_cut",
        "backward",
        "dS is truncated instead of rounded.",
        "aiter 5151",
        True,
        on.gaussian,
        grad_scores=cut_grad_scores,
    ),
    faulty(
        "grad_scores_fp16",
        "backward",
        "dS is cast to fp16, so that small gradients vanish.",
        "fp16 products in bf16 kernels",
        True,
        on.tiny_gradients,
        grad_scores=half_grad_scores,
    ),
    faulty(
        "dv_weights_fp8",
        "backward",
        "P enters dV in e4m3 without a pre-scale: weights below 2⁻¹⁰ vanish.",
        "flashinfer PR 5020",
        False,
        on.long_positive,
        probabilities_operand=fp8_weights,
    ),
    faulty(
        "dk_dv_sums_low",
        "backward",
        "dK and dV are summed over query tiles in the input's dtype.",
        "PyTorch's CPU flash kernel",
        True,
        on.long,
        add_grad=low_sums_of("dk", "dv"),
    ),
    faulty(
        "dq_sums_low",
        "backward",
        "dQ is summed over key tiles in the input's dtype.",
        "PyTorch's CPU flash kernel",
        True,
        on.long,
        add_grad=low_sums_of("dq"),
    ),
    faulty(
        "dkdv_tail_dropped",
        "backward",
        "dK and dV leave out the last query tile where N is no multiple of the block.",
        "flash-attention, ragged tiles",
        True,
        on.ragged,
        queries_visited=whole_tiles,
    ),
    faulty(
        "update_lost",
        "backward",
        "Now and then one tile's contribution to dQ is lost: two calls differ.",
        "races between atomic additions",
        False,
        on.gaussian,
        add_grad=losing_updates(),
    ),
)
