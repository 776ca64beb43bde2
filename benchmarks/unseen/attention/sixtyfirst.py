"""The sixty-first set of faults of attention: a sample of what public threads on training and the
backward pass report, as the searches return them, and sound kernels.

Twenty searches were fixed by the task before any result was seen, all in the corpus of issues and
pull requests: «attention backward wrong gradient dq fix», «attention backward dk dv wrong grouped
query», «attention backward delta preprocess wrong», «attention backward lse mismatch log2»,
«attention backward causal mask not applied», «attention backward sliding window gradient wrong»,
«attention backward softcap gradient», «attention sink gradient wrong», «attention bias gradient
wrong», «ring attention backward wrong gradient», «context parallel attention gradient incorrect»,
«ulysses sequence parallel attention wrong result», «packed sequences attention cross contamination
training», «cu_seqlens wrong training loss attention», «gradient checkpointing attention wrong
result», «attention autocast dtype wrong precision», «attention dropout backward mask mismatch»,
«fp8 attention backward scale», «flex attention backward wrong gradients», «attention accumulate
gradient bf16 precision loss».

Of these the first result of every search was gone through, then the second of every one, and so on,
until there were none left: 230 results, of which each search gives twelve at most. 9 are faults
here; most of what the searches bring on gradients is in earlier sets. What was left: 153 are about
something else, features, speed, builds, crashes, questions, other operations or a result that had
come before; 22 tell no cause, many of them no text at all; 39 are threads of earlier sets, and
triton issue 4174 is about the very defect of two of theirs (4541 and 5660); picotron issue 37 tells
no mistake: the sum of dO ∘ O that it is about is of the O of all steps of the ring, and is what it
asks for; 5 cannot be written so that this function errs: gradients of sinks (flash-attention issue
1973, jax PR 40140), dropout (nki-samples PR 81, flash-attention issue 1251), and keys all of which
come equally many times, which changes no softmax (vllm-omni PR 1233).

Where a thread tells the cause in a line, how it comes about was read in the public history of its
repository: axolotl PR 2495, whose placeholder makes one sequence of what a rank holds, MatchZoo-py
PR 81, whose mask is made of the scores, and audiolm-pytorch PR 69. pytorch issue 181645 has its
cause in the pull request that closes it, 181824. prime-rl PR 2828 is taken for what its review says
of windows; the number of gradients that does not fit fails there. aiter PR 3742 gives windows to a
backward pass that had been called with them before, as its table of times has it. Of a thread with
several defects one is taken. Numbers that no thread tells were chosen.

What is right was set down before anything was measured. `AGAIN` names every fault whose mistake an
earlier set has in some form. Masks and windows are here; lse and the cap in sixtyfirst_scores.py.
All err more than 1.5 × their sound twin on an ordinary input (`python -m benchmarks.unseen.draw
attention.sixtyfirst --check`).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import sixtyfirst_kernel as ways
from benchmarks.unseen.attention import sixtyfirst_scores
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, attention
from benchmarks.unseen.attention.thirtyeighth_kernel import WholeRows
from benchmarks.unseen.attention.thirtysixth_kernel import EveryBlock

AGAIN = (
    "sequences_end_where_ranks_do",  # thirtieth: keys_of_other_ranks_never_come_round
    "windowed_forward_pass_and_full_backward_pass",  # twenty-third:
    # window_ignored_on_the_way_back; others too
    "whatever_mask_replaced_by_is_causal",  # thirty-sixth: custom_mask_replaced_by_the_causal_one
    "forgetful_mask_made_behind_the_call",  # fifty-first: mask_taken_and_not_used; others too
    "padding_found_where_scores_are_zero",  # as before, by another way
    "window_looked_for_under_a_new_name",  # fortieth: window_never_consulted; others too
    "natural_lse_times_ln_2_once_more",  # ninth: merged_lse_in_nats, for the way back
    "lse_of_shards_in_base_2_merged_as_natural",  # tenth: merged_by_e_of_a_base_2_lse; others too
    "capped_behind_the_mask",  # ninth: capped_after_the_mask
)
STATED: dict[str, str] = {}
"""Inputs on which alone a fault shows."""
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


# --- windows
@fault(FAULTS, "backward-mask")
class windowed_forward_pass_and_full_backward_pass(EveryBlock):
    """ROCm/aiter PR 3742: the forward pass in Triton has windows, the backward pass has none: it
    makes weights of the windowed lse for every key below the diagonal.
    """

    rows, cols = 128, 64

    def window(self, i, j, back):
        return super().window(i, j, back) | torch.tensor(back)


@fault(FAULTS, "window")
class window_looked_for_under_a_new_name(Kernel):
    """PrimeIntellect-ai/prime-rl PR 2828, review: what stands in for attention in context parallel
    runs reads `window_size_left` alone, and some layers have `sliding_window`: they are wholly
    causal, on the way there and back.
    """

    rows, cols = 64, 128

    def window(self, i, j, back):
        return (i >= 0) & (j >= 0)


# --- masks
@fault(FAULTS, "mask causal-mask", "float16")
class sequences_end_where_ranks_do(EveryBlock):
    """axolotl-ai-cloud/axolotl PR 2495: `cu_seqlens` is a placeholder, whose first sequence is what
    one rank holds, and whose second is the rest: of two ranks the queries of the second see none of
    the first one's keys, and the sequences that are packed into a row, here a boolean mask, are not
    told apart.
    """

    rows, cols = 64, 64

    def halved(self):
        """A causal row, or one with a mask of sequences."""
        at = self.at
        packed = at.mask is not None and at.mask.dtype == torch.bool
        return at.n == at.nk and (at.causal or packed)

    def seen(self, rows, cols, back):
        keep = super().seen(rows, cols, back)
        if not self.halved():
            return keep
        i, half = torch.arange(rows.start, rows.stop)[:, None], -(-self.at.n // 2)
        return keep & ((i < half) == (torch.arange(cols.start, cols.stop)[None] < half))

    def hide(self, s, rows, cols, back):
        at = self.at
        if not self.halved() or at.mask is None or at.mask.dtype != torch.bool:
            return super().hide(s, rows, cols, back)
        return s.masked_fill(~self.seen(rows, cols, back), -INF)


@fault(FAULTS, "mask window causal-mask")
class whatever_mask_replaced_by_is_causal(Kernel):
    """huggingface/accelerate PR 4177: for context parallelism a hook throws the layer's mask away
    and says `is_causal=True`, and does not look whether it was a causal one: windows, which come as
    a mask there, and chunks become the whole triangle.
    """

    rows, cols = 96, 64

    def forward(self):
        at = self.at
        if at.mask is not None or at.window is not None:
            at.mask, at.window, at.causal = None, None, True
        return super().forward()


@fault(FAULTS, "mask", "float32")
class forgetful_mask_made_behind_the_call(Kernel):
    """lucidrains/audiolm-pytorch PR 69: the keys that are to be forgotten are taken out of the mask
    behind the call of the transformer, which has had the mask of padding alone; here that is what
    no query of a boolean mask sees.
    """

    rows, cols = 48, 64

    def forward(self):
        mask = self.at.mask
        if mask is not None and mask.dtype == torch.bool:
            self.at.mask = mask.any(-2, keepdim=True)
        return super().forward()


@fault(FAULTS, "mask", "float32")
class padding_found_where_scores_are_zero(WholeRows):
    """NTMC-Community/MatchZoo-py PR 81: attention is not given a mask; it makes one of its scores,
    and hides those that are 0, which padding had been before the projection's weights.
    """

    rows = 64

    def hide(self, s, rows, cols, back):
        mask = self.at.mask
        if mask is None or mask.dtype != torch.bool:
            return super().hide(s, rows, cols, back)
        return s.masked_fill(~self.seen(rows, cols, back) | (s == 0), -INF)


FAULTS += sixtyfirst_scores.FAULTS


# --- sound kernels
for kind, dtype in (
    (ways.OutMadeAgain, "bfloat16"), (ways.LostBitsCarried, "float16"),
    (ways.QueriesInTwoHalves, "bfloat16"),
):  # fmt: skip
    SOUND.append(Fault(kind.__name__, frozenset(), attention(kind), dtype))
SOUND.append(Fault("by_the_formula", frozenset(), ways.by_the_formula, "bfloat16"))
SOUND.append(Fault("ring_by_autograd", frozenset(), ways.ring_by_autograd, "float16"))
