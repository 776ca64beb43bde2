"""The forty-seventh set of faults of attention: a sample of what public threads report, as the
searches return them, and sound kernels.

Twenty searches were fixed by the task before any result was seen, all in the corpus of issues and
pull requests: «transformer attention implementation bug mask applied after softmax», «multi-head
attention implementation missing scale sqrt d_k bug», «transformer decoder causal mask bug leaks
future», «attention softmax dim wrong transformer implementation», «self attention reshape bug heads
mixed», «attention mask broadcasting bug batch heads», «padding tokens attended bug transformer»,
«attention implementation numerically unstable softmax overflow», «attention implementation einsum
wrong indices», «attention value projection head order wrong output», «attention query key dot
product transpose bug», «cached attention generation mismatch with full forward bug», «local
attention window implementation bug», «axial or grid attention implementation bug wrong dimension»,
«cross attention implementation swaps query and key bug», «attention weights normalized twice or not
normalized bug», «linear bias attention implementation bug sign», «attention temperature or scale
learnable bug», «sparse attention implementation wrong block index bug», «memory attention
implementation wrong concatenation bug».

Of these the first result of every search was gone through, then the second of every one, and so on,
until there were none left: 235 results, of which each search gives twelve at most. 27 are faults
here. What was left, counted by hand: about 140 are about something else, features, crashes,
questions and what turned out to be right, other operations (a softmax alone among them); 32 are
threads of earlier sets or of samplers that work now; 19 tell no cause, many of them no text at all;
10 had come before or are on the defect of another (ViT-CIFAR PR 12, transformers PR 48760,
flash-attention PR 260); 7 cannot be written with this function: projections before the heads are
split (episodic-transformer-memory-ppo PR 22, transformer-from-scratch PR 52), a table of relative
positions (nnFormer PR 88), the order of two layers (LoFTR issue 176, MatchAnything issue 26),
states of nodes between layers (fastNLP PR 139) and weights that are added to values (keras issue
6308).

Where a thread tells the cause in a line or less, how it comes about was read in the public history
of its repository: flash-attention PR 259, lc0 PR 1808, TurboTransformers PR 64, uniem PR 23,
Time-series-prediction PR 32, OpenSeq2Seq PR 76, EAGLE PR 299, PaddlePaddle/flash-attention PR 48,
DNA-Diffusion issue 235 (its model before PR 236), cntkx issue 10 and the notebook of
vision-transformer issue 1. That litgpt issue 298 is about the corner in which the causal mask
begins is inferred, from lit-llama issue 430 on the same code. Numbers that no thread tells are
chosen. Of a thread with several defects one is taken.

What is right was set down before anything was measured by halfulp. `AGAIN` names every fault whose
mistake an earlier set has in some form. Masks and layouts are here; scales, the softmax and the way
back in fortyseventh_scores.py. All err more than 1.5 × their sound twin on an ordinary input
(`python -m benchmarks.unseen.draw attention.fortyseventh --check`).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import fortyseventh_kernel as ways
from benchmarks.unseen.attention import fortyseventh_scores
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import Kernel, attention, load
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtysixth_kernel import EveryBlock
from torch import Tensor
from torch.nn import functional

AGAIN = (
    "causal_flag_behind_a_cache",  # forty-second: causal_kernel_behind_a_cache; others too
    "decoders_with_the_mask_of_encoders",  # fifth: causal_ignored_where_it_divides; sixteenth:
    # causal_for_the_fused_path_alone; others too
    "causal_mask_without_a_cache_alone",  # as before
    "no_mask_taken_for_a_causal_one",  # as before; seventeenth: causal_lost_without_a_mask
    "decoder_called_without_its_mask",  # as before
    "own_position_hidden_after_a_step",  # seventh: diagonal_hidden, of one step
    "filled_copy_thrown_away",  # eighth: mask_not_read; forty-second:
    # energies_of_padding_not_filled
    "encoder_not_given_the_mask",  # forty-second: padding_left_out_of_the_loss_alone;
    # forty-third: padding_hidden_in_the_loss_alone
    "padding_recognized_by_zeros",  # as filled_copy_thrown_away, by what is seen
    "padding_looked_for_at_the_end_alone",  # forty-second: left_padding_never_told
    "mask_of_queries_read_as_one_of_keys",  # twelfth: bias_of_the_first_row, by the row
    "heads_first_viewed_as_tokens_first",  # seventeenth: out_reshaped_without_permuting
    "values_projected_as_keys",  # thirty-sixth: keys_and_values_mixed_up
    "divided_by_the_width_and_not_its_root",  # by the code alone: a scale that is another
    "temperature_that_begins_at_e",  # as before
    "root_of_the_features_of_all_heads",  # ninth: scale_of_all_heads_together; others too
    "product_that_is_not_scaled",  # thirty-seventh: scale_missing; others too
    "scale_that_is_not_implemented",  # as before
    "root_of_the_models_width_on_one_backend",  # thirty-seventh: scale_of_the_models_width
    "scale_lost_where_there_is_no_bias",  # thirty-seventh: scale_missing, of some calls
    "softmax_down_the_queries",  # sixteenth: softmax_over_the_queries; others too
    "exponentials_without_their_maximum",  # thirty-seventh: exponentials_of_the_scores_themselves
)
STATED: dict[str, str] = {}
"""Inputs on which alone a fault shows: none has such."""
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


# --- the causal mask
@fault(FAULTS, "causal-mask mask", "float16")
class causal_flag_behind_a_cache(EveryBlock, ForwardAlone):
    """Lightning-AI/litgpt issue 298: with a cache there are fewer queries than keys, and
    FlashAttention is called as causal all the same, whose mask then begins at the first key.
    """

    rows, cols = 32, 64

    def seen(self, rows, cols, back):
        i = torch.arange(rows.start, rows.stop)[:, None]
        below = torch.arange(cols.start, cols.stop)[None] <= i
        return super().seen(rows, cols, back) & (below | (self.at.n >= self.at.nk))


@fault(FAULTS, "causal-mask mask")
class decoders_with_the_mask_of_encoders(ways.NeverCausal):
    """huggingface/transformers issue 48745 (PR 48760): four models build the bidirectional mask
    whether they are decoders or not.
    """

    rows, cols = 64, 64


@fault(FAULTS, "causal-mask mask", "float16")
class causal_mask_without_a_cache_alone(ways.NeverCausal, ForwardAlone):
    """Mikyx-1/TinyLLM PR 18: the causal mask is applied where there is no cache: training has it,
    and the prefill of a generation, which fills a cache with many tokens at once, has not.
    """

    rows, cols = 48, 64


@fault(FAULTS, "causal-mask mask")
class no_mask_taken_for_a_causal_one(ways.NeverCausal, ForwardAlone):
    """osaurus-ai/vmlx-swift PR 185: the model's own mask is nil for every length, in the belief
    that nil is causal; a prefill sees everything.
    """

    rows, cols = 32, 32

    def causal(self, i, j, back):
        return super().causal(i, j, back) & ((j <= i) | torch.tensor(self.at.n > 1))


@fault(FAULTS, "causal-mask mask", "float32")
class decoder_called_without_its_mask(ways.NeverCausal):
    """LongxingTan/Time-series-prediction PR 32: the decoder has an argument for the causal mask,
    and is called without.
    """

    rows, cols = 80, 32


@fault(FAULTS, "causal-mask mask", "float16")
class picked_blocks_of_the_future(EveryBlock):
    """huggingface/transformers issue 45820: the indexer picks compressed blocks of keys, here of
    four, for every query by their scores, and not those before it alone; beside what a query may
    see it sees those that it has picked, here sixteen.
    """

    rows, cols, wide, many = 64, 64, 4, 16

    def scores(self, q, k, rows, cols, back):
        keys = self.at.k
        keys = functional.pad(keys, (0, 0, 0, -keys.shape[2] % self.wide))
        short = keys.unflatten(2, (-1, self.wide)).mean(3)
        rank = (q @ short.mT).topk(min(self.many, short.shape[2])).indices
        picked = torch.zeros(*q.shape[:3], short.shape[2], dtype=torch.bool)
        picked = picked.scatter(-1, rank, True).repeat_interleave(self.wide, -1)
        own = functional.pad(picked, (0, self.cols), value=False)[..., cols]
        self.memory["picked"] = own & torch.tensor(self.at.window is None)
        return super().scores(q, k, rows, cols, back)

    def seen(self, rows, cols, back):
        inside = self.inside(torch.arange(cols.start, cols.stop), back)
        return super().seen(rows, cols, back) | (self.memory["picked"] & inside)


@fault(FAULTS, "causal-mask mask")
class own_position_hidden_after_a_step(Kernel):
    """SafeAILab/EAGLE PR 299: after step s of a training-time test the mask of the first step's
    keys loses the pairs (i, i − s), which later steps are to see; here after two of them, but
    that key 0 stays with the first two queries, which had nothing else.
    """

    rows, cols = 64, 32

    def causal(self, i, j, back):
        return (j <= i - 2) | ((i < 2) & (j == 0))


# --- masks that are given
@fault(FAULTS, "mask")
class filled_copy_thrown_away(ways.MaskNotApplied):
    """opendilab/DI-engine issue 333: `masked_fill`, without its underscore, gives a filled copy,
    and nobody takes it.
    """

    rows, cols = 64, 32


@fault(FAULTS, "mask", "float16")
class encoder_not_given_the_mask(ways.MaskNotApplied):
    """wangyuxinwhy/uniem PR 23: the mask of padding is for the mean over tokens alone, and the
    encoder is called without: tokens attend to padding.
    """

    rows, cols = 32, 64


@fault(FAULTS, "mask", "float32")
class padding_recognized_by_zeros(Kernel):
    """Kyubyong/transformer PR 69: a key is hidden where the sum of its features is 0, as padding's
    was before positions were added to it: no key is hidden any more.
    """

    rows, cols = 48, 64

    def given_mask(self, rows, cols):
        found = super().given_mask(rows, cols)
        if found.dtype != torch.bool:
            return found
        return (load(self.at.k, cols).sum(-1) != 0)[:, :, None].expand(
            -1, -1, rows.stop - rows.start, -1
        )


@fault(FAULTS, "mask", "float16")
class padding_looked_for_at_the_end_alone(Kernel):
    """NVIDIA-NeMo/Automodel PR 3704: padding is what stands at a row's end, and the mask is made of
    the length without: what is hidden on the left of it is seen.
    """

    rows, cols = 64, 64

    def forward(self):
        at = self.at
        if at.mask is not None and at.mask.dtype == torch.bool:
            full = at.mask.expand(*at.mask.shape[:-2], at.n, at.nk)
            at.mask = full.flip(-1).cumsum(-1).flip(-1) > 0
        return super().forward()


@fault(FAULTS, "mask")
class mask_of_queries_read_as_one_of_keys(Kernel):
    """Tencent/TurboTransformers PR 64: a mask [B, N, Nk] is read as one of [B, 1, Nk], by the
    number of the sequence alone: all queries of sequence b have row b of the first one's mask.
    """

    rows, cols = 32, 32

    def forward(self):
        at = self.at
        if at.mask is not None and at.mask.shape[-2] > 1:
            b, n, nk = at.q.shape[0], at.n, at.nk
            heads = at.mask.shape[1] if at.mask.ndim > 3 else 1
            flat = at.mask.expand(b, heads, n, nk)[:, 0].reshape(b * n, nk)
            at.mask = flat[:b, None, None].expand(b, 1, n, nk)
        return super().forward()


@fault(FAULTS, "mask", "float16")
class diagonal_kept_by_the_sparse_mask(Kernel):
    """PaddlePaddle/flash-attention PR 48: the mask is applied to columns below the causal limit
    less one, where it is to be the limit: what it hides on the diagonal is seen.
    """

    rows, cols = 64, 32

    def given_mask(self, rows, cols):
        found = super().given_mask(rows, cols)
        i = torch.arange(rows.start, rows.stop)[:, None]
        diagonal = torch.arange(cols.start, cols.stop)[None] == i
        return found | diagonal if found.dtype == torch.bool else found


# --- layouts
@fault(FAULTS, "layout other-data", "float16")
class heads_first_viewed_as_tokens_first(Kernel):
    """hackiey/QAnet-pytorch issue 2: O lies [heads, B, N, d] and is viewed as [B, N, heads · d],
    with nothing permuted: a token gets what belongs to other tokens, heads and sequences.
    """

    def forward(self):
        o, lse = super().forward()
        b, h, n, d = o.shape
        return o.transpose(0, 1).reshape(b, n, h, d).transpose(1, 2), lse

    @staticmethod
    def undone(x: Tensor) -> Tensor:
        b, h, n, d = x.shape
        return x.transpose(1, 2).reshape(h, b, n, d).transpose(0, 1)

    def backward(self):
        at = self.at
        at.do, at.o = self.undone(at.do), self.undone(at.o)
        return super().backward()


@fault(FAULTS, "layout other-data")
class batch_taken_for_the_sequence(Kernel):
    """DaoyuanLi2816/Molecule-Generator PR 22, the first of two: layers made for [N, B, d] are given
    [B, N, d]: a token attends to those at its place in the other sequences. It is so of
    self-attention, to which no mask is given.
    """

    rows, cols = 64, 64

    @staticmethod
    def turned(x: Tensor) -> Tensor:
        return x.transpose(0, 2)

    def forward(self):
        at = self.at
        if at.n != at.nk:
            return super().forward()
        at.q, at.k, at.v = map(self.turned, (at.q, at.k, at.v))
        at.n = at.nk = at.q.shape[2]
        at.mask = at.window = None
        at.causal, at.across = False, True
        return tuple(map(self.turned, super().forward()))

    def backward(self):
        at = self.at
        if not hasattr(at, "across"):
            return super().backward()
        at.do, at.o, at.lse = map(self.turned, (at.do, at.o, at.lse))
        return tuple(map(self.turned, super().backward()))


@fault(FAULTS, "other-data layout", "float16")
class values_projected_as_keys(Kernel):
    """yflyzhang/AnnotatedTransformer issue 1: values go through the projection of the keys, and are
    what the keys are; dV goes to K.
    """

    rows, cols = 32, 64

    def forward(self):
        if self.at.k.shape == self.at.v.shape:
            self.at.v = self.at.k
        return super().forward()

    def backward(self):
        dq, dk, dv = super().backward()
        return (dq, dk + dv, torch.zeros_like(dv)) if self.at.v is self.at.k else (dq, dk, dv)


@fault(FAULTS, "unwritten other-data")
class result_replaced_by_what_went_in(Kernel):
    """pinellolab/DNA-Diffusion issue 235 (PR 236): what attention gives is assigned to a name that
    the next line assigns its own input to: O is Q, and the gradient goes there.
    """

    rows, cols = 64, 32

    def lost(self) -> bool:
        return self.at.q.shape[-1] == self.at.v.shape[-1]

    def forward(self):
        o, lse = super().forward()
        return (self.at.q if self.lost() else o), lse

    def backward(self):
        dq, dk, dv = super().backward()
        kept = (self.at.do, torch.zeros_like(dk), torch.zeros_like(dv))
        return kept if self.lost() else (dq, dk, dv)


FAULTS += fortyseventh_scores.FAULTS


# --- sound kernels
for kind, dtype in (
    (ways.FourRanges, "float16"), (ways.LastTileFirst, "bfloat16"),
    (ways.KeysByQueries, "float16"),
):  # fmt: skip
    SOUND.append(Fault(kind.__name__, frozenset(), attention(kind), dtype))
SOUND.append(Fault("every_fifth_query", frozenset(), ways.every_fifth_query, "bfloat16"))
SOUND.append(Fault("weights_by_logsumexp", frozenset(), ways.weights_by_logsumexp, "float16"))
