"""The seventy-eighth set of faults of attention: a sample of what public threads report, as the
searches return them, and sound kernels.

Twenty searches were fixed by the task before any result was seen, all in the corpus of issues and
pull requests: «kv cache off by one position attention», «kv cache wrong slot mapping», «kv cache
not updated attention wrong», «kv cache shared between requests wrong output», «kv cache sliding
window eviction bug», «kv cache dtype mismatch attention», «kv cache scale wrong fp8», «kv cache
reshape wrong heads», «kv cache prefix reuse garbage», «kv cache offload wrong output», «page table
wrong index attention», «block size mismatch paged attention», «continuous batching attention mask
wrong», «batched inference different output padding attention», «speculative decoding wrong
attention kv rollback», «chunked prefill mask wrong», «context parallel decode attention wrong»,
«tensor parallel kv heads replicated wrong», «multi query decode kernel wrong», «encoder cache cross
attention wrong».

Of these the first result of every search was gone through, then the second of every one, and so on,
until there were none left: 225 results, of which each search gives twelve at most. 17 are faults
here. What was left: 164 are about something else, features, speed, builds, crashes, questions or
other operations; 27 tell no cause, many of them no text at all; 12 are threads of earlier sets, and
5 tell of a defect that another thread has, of theirs (transformers issue 41184, which PR 41228
fixes, sglang issue 18818, which PR 18882 does, and unsloth PR 4083) or of these (mlx-vlm PR 2113,
VeloxQuant-MLX PR 388).

Looked up further: the first lines of transformers PR 48694, for what issue 48693 drops, and sglang
PR 18882; vllm issue 41623, Megatron-LM issue 1464, musubi-tuner PR 413 and flashinfer issue 4347
tell no cause there either. What memory holds is chosen where it is not told, as numbers are that no
thread tells.

What is right was set down before anything was measured. `AGAIN` names every fault whose mistake an
earlier set has in some form. Masks, the diagonal, windows and lengths are here; what a cache holds
is in seventyeighth_scores.py. All err more than 1.5 × their sound twin on an ordinary input
(`python -m benchmarks.unseen.draw attention.seventyeighth --check`).
"""

# ruff: noqa: ARG001, ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import seventyeighth_kernel as ways
from benchmarks.unseen.attention import seventyeighth_scores
from benchmarks.unseen.attention.eighth_kernel import fault, logits, visible
from benchmarks.unseen.attention.fifth_kernel import INF, attention
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtyeighth_kernel import repeated, softmax_of
from benchmarks.unseen.attention.thirtysixth_kernel import EveryBlock

AGAIN = (
    "cache_reset_for_the_verification",  # thirty-sixth: cached_prefix_not_attended
    "window_that_evicts_nothing",  # fiftieth: window_not_implemented; others too
    "padding_that_no_input_tells_of",  # fifty-eighth: padding_attended_to_in_translation
    "mask_of_a_chunk_discarded",  # forty-second: no_mask_made_behind_a_cache, partly
    "prompt_of_a_cached_call_not_causal",  # forty-seventh: causal_mask_without_a_cache_alone
    "chunks_evicted_within_the_window",  # fiftieth: cache_cut_to_the_last_window
    "mask_of_the_encoder_dropped",  # forty-seventh: encoder_not_given_the_mask
    "rejected_tail_set_to_zero",  # thirty-second: key_of_zeros_that_no_mask_hides
    "cache_that_nobody_begins",  # thirty-sixth: cached_prefix_not_attended
    "one_cache_for_all_methods",  # thirty-ninth: hypotheses_with_the_cache_of_others
    "drafts_past_the_block_not_written",  # thirty-ninth: new_tokens_at_one_place_of_the_cache
)
STATED: dict[str, str] = {}
"""Inputs on which alone a fault shows."""
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


@fault(FAULTS, "key-tail cache")
class cache_reset_for_the_verification(ForwardAlone):
    """paiml/aprender PR 2014 (PMAT-752): before drafts are verified all lengths of the cache are
    set to zero, where they should go back to those before the drafts: the prompt is not attended
    to any more. What is verified are the queries of a call that has more keys.
    """

    rows, cols = 64, 32

    def inside(self, j, back):
        return super().inside(j, back) & (j >= self.at.nk - self.at.n)


@fault(FAULTS, "window", "float32")
class window_that_evicts_nothing(ForwardAlone):
    """rajveer43/VeloxQuant-MLX issue 274: what evicts is done only where a cache has an attribute
    that none has; attention goes to all that was ever cached, and the window is a length that is
    told and no more.
    """

    rows, cols = 32, 48

    def window(self, i, j, back):
        return (j >= 0) & (i >= 0)


@fault(FAULTS, "mask", "float16")
class padding_that_no_input_tells_of(ForwardAlone):
    """triton-inference-server/fastertransformer_backend issue 53 (GPT-J): a batch is padded, and
    there is no input by which the padding could be told: it is attended to.
    """

    rows, cols = 128, 128

    def hide(self, s, rows, cols, back):
        at = self.at
        if at.mask is None or at.mask.dtype != torch.bool or at.q.shape[0] == 1:
            return super().hide(s, rows, cols, back)
        return s.masked_fill(~self.seen(rows, cols, back), -INF)


@fault(FAULTS, "mask causal-mask window")
class mask_of_a_chunk_discarded(EveryBlock, ForwardAlone):
    """lablup/mlxcel PR 891 (Gemma 4): the mask of a later chunk is made for its own tokens, as if
    nothing was cached, does not fit the keys that the cache gives, and is discarded, and with it
    the diagonal and the window.
    """

    rows, cols = 80, 64

    def hide(self, s, rows, cols, back):
        if self.at.n >= self.at.nk:
            return super().hide(s, rows, cols, back)
        j = torch.arange(cols.start, cols.stop)
        return s.masked_fill(~self.inside(j, back), -INF)


@fault(FAULTS, "causal-mask", "float32")
class prompt_of_a_cached_call_not_causal(EveryBlock, ForwardAlone):
    """time-series-foundation-models/lag-llama PR 84, the second of its three: with a cache
    attention is not causal, in the first step neither, which computes all tokens.
    """

    rows, cols = 64, 80

    def causal(self, i, j, back):
        return (j >= 0) & (i >= 0) if self.at.n == self.at.nk else j <= i


@fault(FAULTS, "window", "float16")
class chunks_evicted_within_the_window(ForwardAlone):
    """sgl-project/sglang issue 8649: the cache evicts by the size of chunks, without a look at the
    window: what lies before a query's chunk is gone though the window reaches it. Chunks have 32
    tokens here.
    """

    rows, cols, chunk = 32, 64, 32

    def window(self, i, j, back):
        return super().window(i, j, back) & (j >= i // self.chunk * self.chunk)


def mask_of_the_encoder_dropped(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                                softcap=0.0, sinks=None, enable_gqa=False):  # fmt: skip
    """huggingface/transformers issue 48693 (ImageGPT), the second of its four: cross-attention,
    which is what is not causal here, discards the encoder's mask.
    """
    (_, heads, n, _), nk = query.shape, key.shape[2]
    keep, mask = visible(n, nk, is_causal, window), attn_mask
    if mask is not None and mask.dtype == torch.bool and not is_causal:
        mask = None
    s = logits(query, repeated(key, heads), keep, mask, scale, softcap)
    p = softmax_of(s, sinks).to(value.dtype).float()
    return (p @ repeated(value, heads)).to(query.dtype)


FAULTS.append(
    Fault("mask_of_the_encoder_dropped", frozenset({"mask"}), mask_of_the_encoder_dropped,
          "bfloat16", frozenset({"elements"}))
)  # fmt: skip
FAULTS += seventyeighth_scores.FAULTS


# --- sound kernels
for kind, dtype in ((ways.RotatedBlocks, "float16"), (ways.EvenAndOddFeatures, "float16")):
    SOUND.append(Fault(kind.__name__, frozenset(), attention(kind), dtype))
for fn, dtype in (
    (ways.weights_from_logsumexp, "bfloat16"), (ways.halved_by_recursion, "float16"),
    (ways.keys_in_a_drawn_order, "float16"),
):  # fmt: skip
    SOUND.append(Fault(fn.__name__, frozenset(), fn, dtype))
