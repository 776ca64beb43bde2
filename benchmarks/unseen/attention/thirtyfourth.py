"""The thirty-fourth set of faults of attention, each as a public thread reports it, and sound
kernels.

What is right was set down before anything ran: every cause that describes the fault truly, none
that merely lies beside it. `AGAIN` names the faults whose mistake an earlier set had in another
kernel. Masks, tiles, scales and lanes are here; precision and the backward pass in
thirtyfourth_scores.py. All err more than 1.5 × their sound twin on an ordinary input
(`python -m benchmarks.unseen.draw attention.thirtyfourth --check`).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import thirtyfourth_kernel as ways
from benchmarks.unseen.attention import thirtyfourth_scores
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, attention, e4m3, load
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone

AGAIN = (
    "window_off_by_one_row_for_many_tokens",  # others: window_of_one_key_more
    "cast_to_half_before_the_softmax",  # others: softmax_in_the_inputs_type
    "dk_and_dv_in_half_where_memory_was",  # others: gradients_added_up_in_half
    "delta_of_a_do_half_written",  # fifth: delta_before_do_is_there
    "quantized_forward_pass_differentiated_as_if_exact",  # others: fp8_on_the_way_there_alone
)
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


# --- masks
@fault(FAULTS, "mask non-finite nan-escapes")
class mask_of_minus_infinity_behind_the_softmax(ForwardAlone):
    """huggingface/pytorch-image-models PR 2236 (EVA): the mask is applied to the weights, after the
    softmax, in place of the scores.
    """

    def hide(self, s, rows, cols, back):
        mask = self.at.mask
        if mask is None or mask.dtype != torch.bool:
            return super().hide(s, rows, cols, back)
        self.memory["hidden"] = ~self.given_mask(rows, cols) & self.seen(rows, cols, back)
        return s.masked_fill(~self.seen(rows, cols, back), -INF)

    def add_values(self, acc, a, p, v):
        hidden = self.memory.get("hidden")
        p = p if hidden is None else p.masked_fill(hidden, -INF)
        return super().add_values(acc, a, p, v)


@fault(FAULTS, "mask causal-mask scores", "float16")
class visible_pairs_a_billion_below_zero(ForwardAlone):
    """harvard-edge/cs249r_book PR 1785: the mask is 0 where a pair is visible, and is read as one
    that is 1 there: visible scores get −10⁹, which leaves nothing of them in 32 bits; later keys
    get −∞ as they should.
    """

    def hide(self, s, rows, cols, back):
        hidden = super().hide(s, rows, cols, back)
        return (s / LOG2_E - 1e9 + (hidden - s)) * LOG2_E if self.at.causal else hidden


@fault(FAULTS, "window", "float16")
class window_off_by_one_row_for_many_tokens(ForwardAlone):
    """openvinotoolkit/openvino PR 30714: the window of several tokens at once is off by one row."""

    def window(self, i, j, back):
        return super().window(i + 1, j, back)


# --- tiles
@fault(FAULTS, "maximum non-finite nan-escapes masked-row rescale")
class maximum_so_far_not_asked(ForwardAlone):
    """sgl-project/sglang PR 20220 (AVX-512): a block's maximum is taken without the one before it,
    `m_prime`: where a block has nothing for a row, it is −∞.
    """

    rows, cols = 64, 32

    def online(self, m, l, acc, s, v, rows, cols):
        new = s.amax(-1, keepdim=True)
        p, a = torch.exp2(s - new), torch.exp2(m - new)
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)


@fault(FAULTS, "split-merge unnormalized")
class lanes_outputs_shuffled_to_themselves(ForwardAlone):
    """ggml-org/llama.cpp PR 19921: a shuffle of four halves is broken on old AMD drivers: maxima
    and sums of the lanes, each of which has every fourth key, are put together well, but to its own
    output every lane adds what it has itself.
    """

    def add_values(self, acc, a, p, v):
        return acc * a + 4 * (self.at.low(p)[..., ::4] @ v[:, :, ::4])


@fault(FAULTS, "split-merge tiles-skipped mask", "float16")
class lanes_that_keep_to_their_own_keys(ForwardAlone):
    """ggml-org/llama.cpp PR 23218 (MoltenVK): every reduction over the lanes, each of which has
    every fourth key, is by a shuffle that gives a lane its own value back: maxima, sums and outputs
    stay its own, and what is stored is the first one's.
    """

    def online(self, m, l, acc, s, v, rows, cols):
        return super().online(m, l, acc, s[..., ::4], v[:, :, ::4], rows, cols)


# --- scales and lanes
@fault(FAULTS, "scale", "float16")
class scale_by_the_number_of_heads(ForwardAlone):
    """huggingface/pytorch-image-models issue 2385: the scale of `Attention2d` is
    `num_heads ** -0.5` where it should be that of a head's width.
    """

    def scaled(self, s, rows, cols, back):
        return s * (s.shape[1] ** -0.5 * LOG2_E)


@fault(FAULTS, "layout other-data operand", "float16")
class scales_by_page_read_by_head(ForwardAlone):
    """ROCm/aiter PR 3896: E4M3 codes have a scale for each page and head; they lie page by page,
    and are read as if head by head.
    """

    def load_key(self, name, x, part):
        found = super().load_key(name, x, part)
        b, heads, _, d = x.shape
        pages = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[2] % 16)).unflatten(2, (-1, 16))
        scales = pages.abs().amax((-1, -2)).clamp_min(2.0**-20) / 448
        wrong = scales.mT.reshape(b, heads, -1)
        codes = e4m3((pages / scales[..., None, None]).clamp(-448, 448))
        return load((codes * wrong[..., None, None]).flatten(2, 3), part).view(*found.shape[:3], d)


@fault(FAULTS, "layout other-data")
class scores_in_the_lanes_of_other_keys(ForwardAlone):
    """vllm-project/vllm PR 34741 (gfx12): the product of E4M3 codes has its rows in other lanes
    than the softmax and the product with V take them from: of sixteen keys halves are exchanged.
    """

    def scores(self, q, k, rows, cols, back):
        found = super().scores(q, k, rows, cols, back)
        here = torch.arange(cols.stop - cols.start)
        other = here ^ 8
        whole = (cols.start + (here | 15) < self.at.nk) & (here | 15 < len(here))
        turned = self.hide(self.raw(q, k, rows, cols)[..., other], rows, cols, back)
        return torch.where(whole, turned, found)

    def raw(self, q, k, rows, cols):
        return self.cap(self.scaled(self.product(q, k, False), rows, cols, False), False)


FAULTS += thirtyfourth_scores.FAULTS


# --- sound kernels
for kind, dtype in (
    (ways.FromTheMiddle, "bfloat16"), (ways.SevenParts, "float16"), (ways.WideQueries, "bfloat16"),
    (ways.NaturalBase, "float16"), (ways.MaximumFirst, "bfloat16"), (ways.PiecesOfDot, "float16"),
):  # fmt: skip
    SOUND.append(Fault(f"{kind.__name__}_{dtype}", frozenset(), attention(kind), dtype))
SOUND += [
    Fault("by_log_weights", frozenset(), ways.by_log_weights, "bfloat16"),
    Fault("queries_by_elevens", frozenset(), ways.queries_by_elevens, "float16"),
]
