"""The thirty-fifth set of faults of attention: a sample of what public threads report, as they
come, and sound kernels.

Nothing was chosen. Twenty searches, all in the corpus of issues and pull requests, were fixed
before any result was seen: «vllm attention backend incorrect output root cause fix», «sglang
attention kernel wrong results accuracy fix», «flashinfer attention numerical mismatch wrong output
fix», «flash-attention incorrect gradients or output bug fix», «xformers memory_efficient_attention
wrong result fix», «pytorch scaled_dot_product_attention incorrect result on backend fix»,
«flex_attention wrong output or gradient fix», «TransformerEngine fused attention wrong result fix»,
«TensorRT-LLM attention kernel accuracy wrong output fix», «llama.cpp ggml flash attention wrong
output perplexity fix», «mlx scaled_dot_product_attention incorrect result fix», «jax pallas flash
attention numerical error incorrect fix», «onnxruntime attention GroupQueryAttention wrong output
fix», «huggingface transformers eager sdpa attention mismatch incorrect mask fix», «ROCm aiter
composable_kernel attention incorrect result fix», «triton attention kernel wrong result precision
fix», «tinygrad attention wrong output fix», «candle or mistral.rs attention incorrect output fix»,
«Megatron-LM or DeepSpeed attention loss mismatch incorrect fix», «oneDNN or OpenVINO sdpa accuracy
wrong result fix». The first result of every search was looked at, then the second of every one, and
so on, to the end of all: 227 results (one more of the fifth search was not given). They gave the 24
threads that are here, fewer than the 28 that were wanted. Clipped threads were looked up by further
searches, which gave few causes.

Left: 112 that are about something else, or are features, refactorings, build errors, exceptions and
questions; 65 that tell no cause, many of them without any text; 12 that an earlier set names
(10102, 1396, 1995, 71, 34273, 27224, 146377, 848 and 236 of their repositories, mlx 2835 and its
pull request 2836, llama.cpp 7903 of the thirty-sixth); 10 met before in another search; 4 that no
kernel of this signature can have: TGI 2361 gives back lse in O's place, of another shape; pytorch
141128 errs on NaN alone, where NaN is right; tvm 16551 and mlc-llm 1759 are of how a compiler keeps
registers. Users' own mistakes were taken where the thread tells them as wrong results.

What is right was set down before anything ran. `AGAIN` names the faults whose mistake an earlier
set has in some form, 22 of 24. Masks, windows, scales and sinks are here; layouts, memory,
precision and what is not finite in thirtyfifth_scores.py. Two need inputs that `draw` has not,
`STATED`; the others err more than 1.5 × their sound twin on an ordinary one
(`python -m benchmarks.unseen.draw attention.thirtyfifth --check`).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

from typing import Any

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import thirtyfifth_kernel as ways
from benchmarks.unseen.attention import thirtyfifth_scores
from benchmarks.unseen.attention.eighth_kernel import fault, logits, visible
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel, attention
from benchmarks.unseen.attention.thirtyfifth_kernel import EveryBlock, ScoresTimes
from torch.nn import functional

AGAIN = (
    "mask_rows_past_an_overflowing_offset",  # twelfth: offsets_of_scores_wrap
    "ten_thousand_less_for_padding_and_for_later_keys",  # sixth, fourteenth: scores of −10000
    "causal_lost_where_weights_are_asked_for",  # seventeenth: causal_lost_without_a_mask; others
    "encoder_made_causal_as_well",  # eleventh: always_causal_and_not_scaled
    "future_mask_where_true_means_seen",  # thirteenth: mask_the_other_way_round; thirty-first
    "lowest_numbers_cast_to_true",  # thirty-first: causal_the_other_way_round
    "mask_of_one_query_read_row_by_row",  # seventeenth: singleton_mask_by_heads
    "window_size_passed_on_to_flash_attention",  # fifth and others: a window of one key more
    "scores_not_divided_by_the_layers_number",  # twentieth: layer_number_not_multiplied_back
    "scaled_after_projection_and_by_cudnn",  # sixteenth: scaled_in_the_projection_and_again
    "scale_lost_with_the_cached_model",  # eleventh: always_causal_and_not_scaled
    "sinks_ignored_where_the_operator_is_taken_apart",  # eighth: sinks_not_used
    "heads_first_where_tokens_are_to_be",  # twelfth: layout_told_by_divisibility
    "tokens_first_where_heads_are_to_be",  # as above
    "definition_over_the_axis_of_heads",  # as above
    "keys_and_values_by_heads_given_by_tokens",  # as above
    "sequences_first_where_tokens_are_to_be",  # eighteenth: sequences_and_tokens_exchanged
    "tiles_used_before_the_copies_are_waited_for",  # fifteenth: keys_decoded_before_they_arrive
    "page_lists_begin_a_page_too_early",  # twenty-first: pages_begin_where_the_sequence_does
    "everything_between_in_the_operands_type",  # fifth: einsum_in_bf16; others
    "number_of_keys_cast_to_a_short_integer",  # twelfth wraps; thirteenth: first_keys_all_hidden
    "backward_visits_blocks_of_a_longer_mask",  # thirty-first: query_blocks_counted_by_a_longer_…
)
STATED: dict[str, str] = {
    "mask_of_one_query_read_row_by_row": "a mask [B, 1, 1, N], of keys, that all queries share",
    "scale_lost_with_the_cached_model": "a scale that is not 1/√d",
}
"""Faults that no input of `draw` shows, and the input that does."""
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


# --- masks
@fault(FAULTS, "mask backward-mask")
class mask_rows_past_an_overflowing_offset(Kernel):
    """pytorch/pytorch issue 162588: the forward pass multiplies a block's first query by the mask's
    stride in 32 bits, and past 2³² reads the rows of an earlier place; the backward pass does not.
    Here it has 13 bits.
    """

    def hide(self, s, rows, cols, back):
        self.memory["back"] = back
        return super().hide(s, rows, cols, back)

    def given_mask(self, rows, cols):
        mask, n, nk = self.at.mask, self.at.n, self.at.nk
        begin = rows.start * nk
        if self.memory["back"] or mask.shape[-2] == 1 or begin < 1 << 13:
            return super().given_mask(rows, cols)
        flat = mask.expand(*mask.shape[:-1], nk).flatten(-2)
        row = torch.arange(min(rows.stop, n) - rows.start)[:, None]
        col = torch.arange(cols.start, min(cols.stop, nk))
        found = flat[..., (begin % (1 << 13) + row * nk + col).clamp_max(n * nk - 1)]
        missing = (0, cols.stop - cols.start - found.shape[-1],
                   0, rows.stop - rows.start - found.shape[-2])  # fmt: skip
        return functional.pad(found, missing, value=False if mask.dtype == torch.bool else 0.0)


@fault(FAULTS, "mask-finite mask", "float32")
class ten_thousand_less_for_padding_and_for_later_keys(EveryBlock):
    """microsoft/onnxruntime issue 14363: later keys score −10000, and what the mask hides gets as
    much less than it has: a row of hidden keys alone is a softmax of these.
    """

    def hide(self, s, rows, cols, back):
        causal, mask = self.at.causal, self.at.mask
        self.at.causal = False
        seen = self.seen(rows, cols, back)
        self.at.causal = causal
        if causal:
            i = torch.arange(rows.start, rows.stop)[:, None]
            j = torch.arange(cols.start, cols.stop)[None]
            s = torch.where(j > i, -1e4 * LOG2_E, s)
        if mask is not None:
            given = self.given_mask(rows, cols)
            boolean = mask.dtype == torch.bool
            s = s - (~given).float() * 1e4 * LOG2_E if boolean else self.bias(s, given, back)
        return s.masked_fill(~seen, -INF)


@fault(FAULTS, "causal-mask mask")
class causal_lost_where_weights_are_asked_for(Kernel):
    """huggingface/transformers PR 30652: where nothing is padded there is no mask, for the fused
    function is told to be causal; the eager one, which is called in its place where the weights are
    to be given back, is not.
    """

    def __init__(self, **at: Any) -> None:
        super().__init__(**at)
        self.at.causal = at["causal"] and at["mask"] is not None


@fault(FAULTS, "causal-mask mask", "float16")
class encoder_made_causal_as_well(Kernel):
    """facebookresearch/xformers issue 687: by accident the encoder's attention is causal too."""

    rows, cols = 64, 48

    def __init__(self, **at: Any) -> None:
        super().__init__(**at)
        self.at.causal = True


def future_mask_where_true_means_seen(
    query, key, value, *, is_causal, scale, attn_mask=None, window=None, softcap=0.0, sinks=None
):
    """rasbt/LLMs-from-scratch PR 1063 (the same as PR 1062): the mask is true for later keys, and
    the function it is given to sees what is true.
    """
    (b, heads, n, _), nk = query.shape, key.shape[2]
    k, v = (x.float().repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    keep = visible(n, nk, False, window)
    if is_causal:
        keep = keep & (torch.arange(nk)[None] > torch.arange(n)[:, None])
    s = logits(query, k, keep, attn_mask, scale, softcap)
    if sinks is not None:
        s = torch.cat([s, sinks.float().view(1, -1, 1, 1).expand(b, heads, n, 1)], -1)
    nothing = (s == -INF).all(-1, keepdim=True)
    p = s.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)
    return (p[..., :nk] @ v).to(query.dtype)


FAULTS.append(
    Fault("future_mask_where_true_means_seen", frozenset({"causal-mask", "mask"}),
          future_mask_where_true_means_seen, "float32", frozenset({"elements"}))
)  # fmt: skip


@fault(FAULTS, "causal-mask mask")
class lowest_numbers_cast_to_true(EveryBlock):
    """huggingface/transformers PR 38094 (Llama 4): the causal mask, 0 for what is seen and the
    lowest number for what is not, is cast to booleans: it is turned.
    """

    rows, cols = 48, 48

    def causal(self, i, j, back):
        return j > i


@fault(FAULTS, "mask", "float16")
class mask_of_one_query_read_row_by_row(Kernel):
    """openvinotoolkit/openvino PR 30758: a mask with one row, for all queries, is loaded as if it
    had as many as there are: a later query reads what lies as many rows further on.
    """

    def given_mask(self, rows, cols):
        mask, nk = self.at.mask, self.at.nk
        if mask.shape[-2] != 1 or self.at.n == 1 or mask.shape[-1] != nk:
            return super().given_mask(rows, cols)
        flat, lead = mask.flatten(), mask.shape[:-2]
        first = torch.arange(lead.numel()).view(*lead, 1, 1) * nk
        at = torch.arange(rows.start, rows.stop)[:, None] * nk
        return flat[(first + at + torch.arange(cols.start, cols.stop)).clamp_max(len(flat) - 1)]


@fault(FAULTS, "window", "float16")
class window_size_passed_on_to_flash_attention(Kernel):
    """allenai/OLMo-core PR 323: the function's window is of keys before the query, and is given how
    many there are with the query's own: one too many.
    """

    rows, cols = 128, 64

    def window(self, i, j, back):
        left, right = self.at.window
        keep = j >= i - left - 1
        return keep & (j <= i + right) if right >= 0 else keep


# --- scales and sinks
@fault(FAULTS, "scale")
class scores_not_divided_by_the_layers_number(ScoresTimes):
    """TransformerLensOrg/TransformerLens PR 27: Mistral's scores are divided by the layer's number
    besides √d, and these are not; here it is the second layer.
    """

    def times(self):
        return 2.0


@fault(FAULTS, "scale", "float16")
class scaled_after_projection_and_by_cudnn(ScoresTimes):
    """AI-Hypercomputer/maxtext issue 3138: MLA scales its queries after the projection, and the
    call of cuDNN has the scale of 1/√d written into it.
    """

    rows, cols = 64, 32

    def times(self):
        return float(self.at.q.shape[-1] ** -0.5)


@fault(FAULTS, "scale")
class scale_lost_with_the_cached_model(Kernel):
    """openvinotoolkit/openvino PR 31365: the scale is not put into the cache of compiled models,
    and a kernel that comes from there takes the default, 1/√d.
    """

    def forward(self):
        self.at.scale = float(self.at.q.shape[-1] ** -0.5)
        return super().forward()


@fault(FAULTS, "sinks")
class sinks_ignored_where_the_operator_is_taken_apart(Kernel):
    """openvinotoolkit/openvino PR 33416: the pass that takes the operator apart ignores sinks."""

    cols = 32

    def begin(self, q, first=True):
        return super().begin(q, False)


FAULTS += thirtyfifth_scores.FAULTS


# --- sound kernels
for kind, dtype in (
    (ways.EvenBlocksFirst, "bfloat16"), (ways.TwoAccumulators, "float16"),
    (ways.HalvesOfTheOutput, "bfloat16"),
):  # fmt: skip
    SOUND.append(Fault(f"{kind.__name__}_{dtype}", frozenset(), attention(kind), dtype))
SOUND += [
    Fault("values_less_their_mean", frozenset(), ways.values_less_their_mean, "bfloat16"),
    Fault("keys_less_their_mean", frozenset(), ways.keys_less_their_mean, "float16"),
]
