"""The seventy-sixth set of faults of attention: a sample of what public threads report, as the
searches return them, and sound kernels.

Twenty searches were fixed by the task before any result was seen, all in the corpus of issues and
pull requests: «online softmax rescale bug», «running maximum initialization attention», «row sum
accumulation attention bug», «log sum exp attention bug», «attention delta rowsum bug», «attention
output normalization missing», «attention tile boundary bug», «attention block size not divisible
bug», «attention epilogue store bug», «attention tma descriptor wrong stride», «attention swizzle
layout wrong», «attention mma fragment layout wrong», «attention warp reduction bug», «attention
pipeline stage race», «attention split merge weights bug», «attention scheduler tile order wrong»,
«attention head index mapping bug», «attention batch stride bug», «attention predicate out of bounds
bug», «attention exp2 scale bug».

Of these the first result of every search was gone through, then the second of every one, and so on,
until there were none left: 239 results, of which each search gives twelve at most. Two are faults
here. What was left: 194 are about something else, features, speed, builds, crashes, questions,
reports that are mistaken (Megatron-LM issue 151, DeepTab issue 230), mistakes that a review thinks
possible and nothing reaches (cudnn-frontend PR 894, pytorch PR 194309), other operations (a softmax
or its logarithm alone among them, dynet issue 454, jax issue 5370) or a result that had come
before; 26 tell no cause, most of them no text at all; 12 are threads of earlier sets; 5 cannot
be written so that this function errs: norms of what attention is given (ml-cvnets PR 82,
recurrent-interface-network-pytorch issue 6), what is added behind it (hearai PR 58), the weights of
the step before (30stomercury/Automatic-Speech-Recognition issue 18), and weights that are only
shown (DIFFormer issue 9). tensor_parallel PR 103 cuts a head in two, of which its issue 99 shows a
crash alone; vllm PR 68 says no more than that a change of precision brought its mistake.

Further were read the change that mends whittle issue 235, its PR 244, those of hearai PR 58 and
tensor_parallel PR 103, and what else was found of the reviews named above; some searches for these
also returned threads of others, which were not taken. What the larger network's other queries are
was chosen, and how many it has.

What is right was set down before anything was measured. `AGAIN` names every fault whose mistake an
earlier set has in some form. All err more than 1.5 × their sound twin on an ordinary input
(`python -m benchmarks.unseen.draw attention.seventysixth --check`).
"""

# ruff: noqa: ARG001, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import seventysixth_kernel as ways
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import Kernel, attention
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone

AGAIN = (
    "weights_of_two_rows_exchanged",  # forty-first: fragment_of_another_layout; others too
    "heads_of_a_part_of_the_groups_in_a_row",  # forty-ninth: fused_projection_split_as_one_tensor
)
STATED: dict[str, str] = {}
"""Inputs on which alone a fault shows."""
FAULTS: list[Fault] = []
SOUND: list[Fault] = []
sound = attention(Kernel)


@fault(FAULTS, "layout other-data", "float16")
class weights_of_two_rows_exchanged(ForwardAlone):
    """kekzl/imp PR 352: what a lane has of 16 × 16 weights is packed for the product with V by rows
    first, where `m16n8k16` takes it by keys first: row r's weights of the later eight keys are used
    for row r + 8 and the earlier eight, and these for those. The row sum is of the right ones.
    """

    rows, cols = 64, 128

    def add_values(self, acc, a, p, v):
        quarters = p.unflatten(-2, (-1, 2, 8)).unflatten(-1, (-1, 2, 8))
        packed = quarters.transpose(-5, -2).flatten(-3).flatten(-4, -2)
        return acc * a + self.at.low(packed) @ v


def heads_of_a_part_of_the_groups_in_a_row(query, key, value, *, is_causal, scale, attn_mask=None,
                                           enable_gqa=False, window=None, softcap=0.0,
                                           sinks=None):  # fmt: skip
    """whittle-org/whittle issue 235: a smaller network is a part of a larger one, whose projection
    has every group's queries, key and value side by side; as many rows as the smaller one has heads
    are taken from the first on and seen as its groups, where each group's own are to be picked. The
    larger one has twice as many queries a group here; with a key for every query all is right.
    """
    options = {"is_causal": is_causal, "scale": scale, "window": window, "softcap": softcap}
    (heads, groups), share = (query.shape[1], key.shape[1]), query.shape[1] // key.shape[1]
    if share > 1 and query.shape[2:] == key.shape[2:] == value.shape[2:]:
        own = query.unflatten(1, (groups, share))
        larger = own, own.detach().flip(-1), key.unsqueeze(2), value.unsqueeze(2)
        rows = torch.cat(larger, 2).flatten(1, 2)[:, : heads + 2 * groups]
        q, k, v = rows.unflatten(1, (groups, -1)).split((share, 1, 1), 2)
        query, key, value = q.flatten(1, 2), k.flatten(1, 2), v.flatten(1, 2)
    return sound(query, key, value, attn_mask=attn_mask, sinks=sinks, **options)


FAULTS.append(
    Fault("heads_of_a_part_of_the_groups_in_a_row", frozenset({"layout", "other-data"}),
          heads_of_a_part_of_the_groups_in_a_row, "bfloat16", frozenset({"elements"}))
)  # fmt: skip


# --- sound kernels
for kind, dtype in (
    (ways.ValuesABlockLater, "float16"), (ways.MaximumThatLags, "float16"),
    (ways.QueryGradientsByParts, "float16"),
):  # fmt: skip
    SOUND.append(Fault(kind.__name__, frozenset(), attention(kind), dtype))
SOUND.append(Fault("strided_keys", frozenset(), ways.strided_keys, "bfloat16"))
SOUND.append(Fault("mapped_over_heads", frozenset(), ways.mapped_over_heads, "float16"))
