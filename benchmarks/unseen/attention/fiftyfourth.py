"""The fifty-fourth set of faults of attention: a sample of what public threads report, as the
searches return them, and sound kernels.

Twenty searches were fixed by the task before any result was seen, all in the corpus of issues and
pull requests: «eager and sdpa attention outputs differ», «flash attention and eager results differ
padding», «attention output differs between batch and single», «training and inference attention
mismatch», «prefill and decode logits differ attention», «converted checkpoint attention output
differs original», «PyTorch and TensorFlow attention outputs mismatch», «GPU and CPU attention
results differ», «attention differs with and without cache», «left padding generation wrong output
attention», «attention results change with sequence length padding», «attention output differs after
torch.compile», «attention output wrong after export ONNX», «attention heads permuted weights
loading wrong», «loss differs flash attention vs naive», «gradient check attention fails»,
«attention test fails tolerance causal», «attention weights do not sum to one», «attention dropout
applied at inference», «attention mask inverted true false convention bug».

Of these the first result of every search was gone through, then the second of every one, and so on,
until there were none left: 229 results, of which each search gives twelve at most. 10 are faults
here. What was left: 148 are about something else, features, speed, builds, crashes, questions,
other operations or a result that had come before; 48 tell no cause, many of them no text at all; 15
are threads of earlier sets; 8 cannot be written so that this function errs: features of queries and
keys that are permuted alike, which rotations before attention alone tell apart (torchchat PR 1097,
LLMs-from-scratch PR 747, transformers PR 31788), attention without a softmax (recsys-examples issue
260, flash-linear-attention issue 52), dropout that is missing in training (mead-baseline PR 376,
Informer2020 issue 97), and weights that are returned without the last key's (sockeye issue 637).

Where a snippet told too little the thread was searched for once more (flash-attention issue 907,
esm issue 251, pytorch issues 158226, 135161 and 136651, transformers issue 2401, mistral.rs PR
811): none of them told a cause. Numbers that no thread tells were chosen: how many queries a block
has, how likely a weight is dropped, and to how many keys a sequence is padded. Of a thread with
several defects one is taken.

What is right was set down before anything was measured by halfulp. `AGAIN` names every fault whose
mistake an earlier set has in some form. All err more than 1.5 × their sound twin on an ordinary
input (`python -m benchmarks.unseen.draw attention.fiftyfourth --check`) but the one that STATED
names, which needs the input that it says.
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import fiftyfourth_kernel as ways
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import Kernel, attention
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtyeighth_kernel import WholeRows
from torch.nn import functional

AGAIN = (
    "padding_of_the_encoder_in_the_sum",  # forty-second: energies_of_padding_not_filled; others too
    "words_past_the_questions_length",  # as before
    "masks_ignored_while_tokens_are_made",  # fifty-first: mask_of_ones_while_speech_is_made
    "no_mask_where_padding_is_the_end",  # forty-second: left_padding_never_told
    "mask_of_what_may_be_attended_to",  # thirteenth: mask_the_other_way_round; others too
    "padded_for_the_ranks_and_not_hidden",  # fifth: zeros_have_weight, by tiles
    "drop_rate_of_training_in_sdpa",  # forty-fifth: flash_attention_drops_in_evaluation; others
    "heads_first_for_a_function_of_tokens_first",  # thirty-fifth:
    # heads_first_where_tokens_are_to_be
    "states_weighed_by_what_scores_them",  # forty-seventh: values_projected_as_keys
)
STATED = {
    "no_mask_where_padding_is_the_end": "a mask that hides the first keys from every query",
}
"""Inputs on which alone a fault shows."""
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


# --- masks
@fault(FAULTS, "mask", "float32")
class padding_of_the_encoder_in_the_sum(ways.BooleansNotRead):
    """mead-ml/mead-baseline PR 20 (seq2seq): attention has no mask of the encoder's padding, and
    the weighted sum includes it; it is so in training as well. Attention of a decoder to what it
    has made itself, which is causal, is another.
    """

    rows, cols = 32, 48

    def lost(self):
        return not self.at.causal


@fault(FAULTS, "mask", "float32")
class words_past_the_questions_length(WholeRows, ways.BooleansNotRead):
    """rosinality/mac-network-pytorch issue 7: the control unit, which attends to the words of a
    question, is not given its length, and padding is among the words.
    """

    rows = 16


@fault(FAULTS, "mask")
class masks_ignored_while_tokens_are_made(ForwardAlone, ways.BooleansNotRead):
    """huggingface/optimum-neuron PR 264: masks are ignored during generation, and slots whose
    inputs are padded attend to the padding.
    """

    rows, cols = 128, 128


@fault(FAULTS, "mask", "float16")
class no_mask_where_padding_is_the_end(ForwardAlone):
    """huggingface/transformers PR 17426, review (GPT-2): a mask is inferred from the tokens only
    where padding is another token than the end's, and GPT-2's is the same: what a batch is padded
    with on its left is attended to.
    """

    rows, cols = 64, 32

    def given_mask(self, rows, cols):
        found, at = super().given_mask(rows, cols), self.at
        if found.dtype != torch.bool:
            return found
        read = at.mask.expand(*at.mask.shape[:-2], at.n, at.nk).any(-2, keepdim=True)
        left = functional.pad(read.cumsum(-1) == 0, (0, self.cols))[..., cols]
        return found | left


@fault(FAULTS, "mask")
class mask_of_what_may_be_attended_to(Kernel):
    """cnzzx/GeMap issue 1: true is what may be attended to in the mask that is made, and what may
    not in the module that gets it.
    """

    rows, cols = 48, 64

    def given_mask(self, rows, cols):
        found = super().given_mask(rows, cols)
        return ~found if found.dtype == torch.bool else found


@fault(FAULTS, "mask")
class state_sees_what_actions_see(ForwardAlone):
    """dreamzero0/dreamzero issue 61: in training a block's state token, which is one, attends to
    its own block; in inference it is put among the action tokens, and attends to what they do. Here
    a block has sixteen queries, of which the state is the last.
    """

    rows, cols, block = 64, 96, 16

    def given_mask(self, rows, cols):
        found = super().given_mask(rows, cols)
        if found.dtype != torch.bool:
            return found
        row = torch.arange(self.rows)
        return found[..., row - (row % self.block == self.block - 1).long(), :]


# --- padding
@fault(FAULTS, "padding ragged")
class padded_for_the_ranks_and_not_hidden(Kernel):
    """ByteDance-Seed/VeOmni PR 1139, review (Wan): the sequence is padded to a multiple of the
    ranks' number, and the padding's keys are masked in none of the backends, eager, FlashAttention
    and SageAttention: they have weights, and change gradients. Here there are eight ranks, and
    padding's keys and values are zeros.
    """

    rows, cols, ranks = 64, 64, 8

    def inside(self, j, back):
        return j < -(-self.at.nk // self.ranks) * self.ranks


# --- dropout
@fault(FAULTS, "dropout unstable", "float32")
class drop_rate_of_training_in_sdpa(ForwardAlone):
    """OHDSI/DeepPatientLevelPrediction PR 153: scaled_dot_product_attention is given the rate of
    dropout in inference as well, here 0.15.
    """

    rows, cols, rate = 64, 128, 0.15

    def add_values(self, acc, a, p, v):
        return acc * a + functional.dropout(self.at.low(p), self.rate, True) @ v


# --- layouts and operands
def heads_first_for_a_function_of_tokens_first(query, key, value, *, is_causal, scale,
                                               attn_mask=None, window=None, softcap=0.0,
                                               sinks=None):  # fmt: skip
    """nshepperd/flash_attn_jax issue 3: flash_mha takes [B, tokens, heads, D], and is given heads
    before tokens: at every token heads attend to heads, the earlier ones alone where it is causal.
    Masks, windows and sinks it doesn't know.
    """
    options = {"is_causal": is_causal, "scale": scale, "softcap": softcap}
    unknown = any(x is not None for x in (attn_mask, window, sinks))
    if unknown or query.shape[2] != key.shape[2]:
        return ways.sound(query, key, value, attn_mask=attn_mask, window=window, sinks=sinks,
                          **options)  # fmt: skip
    return ways.sound(*(x.transpose(1, 2) for x in (query, key, value)), **options).transpose(1, 2)


def states_weighed_by_what_scores_them(query, key, value, *, is_causal, scale, attn_mask=None,
                                       window=None, softcap=0.0, sinks=None):  # fmt: skip
    """minqi/hnatt issue 5: what is weighed and added up is the hidden representation that scores
    are made of, and not the states: the keys, in place of the values.
    """
    read = key + 0 * value if key.shape == value.shape else value
    return ways.sound(query, key, read, is_causal=is_causal, scale=scale, attn_mask=attn_mask,
                      window=window, softcap=softcap, sinks=sinks)  # fmt: skip


FAULTS += [
    Fault("heads_first_for_a_function_of_tokens_first", frozenset({"layout", "other-data"}),
          heads_first_for_a_function_of_tokens_first, "float16", frozenset({"elements"})),
    Fault("states_weighed_by_what_scores_them", frozenset({"layout", "other-data"}),
          states_weighed_by_what_scores_them, "float32",
          frozenset({"elements", "out-unexplained"})),
]  # fmt: skip


# --- sound kernels
for kind, dtype in (
    (ways.KeysOutside, "bfloat16"), (ways.BlocksOfBlocks, "float16"),
    (ways.FromTheMiddle, "bfloat16"),
):  # fmt: skip
    SOUND.append(Fault(kind.__name__, frozenset(), attention(kind), dtype))
SOUND.append(Fault("heads_in_groups", frozenset(), ways.heads_in_groups, "float16"))
SOUND.append(Fault("by_the_log_of_the_sum", frozenset(), ways.by_the_log_of_the_sum, "bfloat16"))
