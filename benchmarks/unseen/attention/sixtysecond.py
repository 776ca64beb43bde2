"""The sixty-second set of faults of attention: a sample of what public threads report, as the
searches return them, and sound kernels.

Twenty searches were fixed by the task before any result was seen, all in the corpus of issues and
pull requests: «fp8 kv cache wrong output attention scale», «int8 kv cache attention dequantize
wrong», «int4 kv cache attention accuracy bug», «kv cache quantization scale zero point wrong
attention», «per head kv scale attention wrong», «fp8 attention p quantization overflow», «q_scale
k_scale not applied attention», «v_scale applied twice attention», «fp8 e5m2 e4m3 mismatch attention
cache», «sage attention wrong output quantization», «attention bf16 accumulate precision bug»,
«attention fp16 accumulator overflow», «softmax in half precision attention accuracy», «attention
scores float32 upcast missing», «attention tf32 precision wrong», «attention exp2 log2e scale bug»,
«attention rounding intermediate bf16 mismatch», «qk norm attention precision bug», «flash attention
half2 precision kq», «turboquant kv cache attention wrong».

Of these the first result of every search was gone through, then the second of every one, and so on,
until there were none left: 222 results, of which each search gives twelve at most. 18 are faults
here. What was left: 127 are about something else, features, speed, builds, crashes, questions or
other operations, or had come before; 22 tell no cause, many of them no text at all; 49 are threads
of earlier sets, one was taken by another of the sets that are written at the same time (ViT issue
1), and perceiver-io issue 9 is the one that a pull request of theirs fixes; 4 cannot be written so
that this function errs: a feature map of linear attention (flash-linear-attention issue 1261), a
cache of an indexer (ATOM PR 1473), the type of a result whose numbers are right (tinygrad PR 5100)
and a scale whose name does not exist, which is an error (denoising-diffusion-pytorch PR 314).

Where a thread tells the cause in a line, how it comes about was read in the public code of its
repository: ik_llama.cpp PRs 1521 and 1592, invariant-point-attention PR 3 and lag-llama issue 81.
vllm PR 4869 says that the type of the cache is not handed on; what follows for the memory was
worked out. SageAttention issue 164 finds the call that gives NaN and what its token is like, and
not why. Where a fault is of a scale or of places, codes are not rounded, so that it alone is wrong.
What memory holds is chosen where it is not told, as numbers are that no thread tells.

What is right was set down before anything was measured. `AGAIN` names every fault whose mistake an
earlier set has in some form. Caches and their codes are here; products, softmaxes, scales, splits
and what is not finite in sixtysecond_scores.py. All err more than 1.5 × their sound twin on an
ordinary input (`python -m benchmarks.unseen.draw attention.sixtysecond --check`) but those that
STATED names, which need the inputs that it says.
"""

# ruff: noqa: D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import sixtysecond_kernel as ways
from benchmarks.unseen.attention import sixtysecond_scores
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import attention, fp16
from benchmarks.unseen.attention.thirtysixth_kernel import OtherOperands
from torch import Tensor

AGAIN = (
    "fp8_that_still_needs_scaling",  # nineteenth: operands_cast_to_e4m3_at_scale_one
    "latent_attention_without_its_scales",  # as before
    "type_of_the_cache_not_handed_on",  # forty-fourth: numbers_taken_for_bytes, another way
    "bytes_of_a_token_by_half_a_scale",  # thirty-fourth: cache_of_eight_bits_by_one_scale_and_zero
    "e4m3_written_and_e5m2_read",  # tenth: codes_of_the_other_e4m3, another format
    "ragged_wrapper_without_the_scales",  # fortieth: cache_of_codes_without_its_scales
    "cache_of_the_sequence_before",  # thirty-ninth: cache_of_the_beams_of_before, another way
    "one_heads_scale_for_every_head",  # twentieth: cache_scaled_by_its_first_token, of heads
    "keys_for_the_values_of_wide_layers",  # fifty-fourth: states_weighed_by_what_scores_them
    "tf32_since_a_nightly",  # sixth: tf32_everywhere; others too
    "reference_of_the_decoding_in_tf32",  # as before
    "points_aggregated_in_tf32",  # fourth: single_values_tf32
    "bf16_of_xpu_not_to_the_nearest",  # seventeenth: bf16_by_cutting; others too
    "chameleons_weights_not_upcast",  # fifteenth: softmax_in_the_inputs_type; others too
    "packed_width_over_the_query_heads",  # thirty-seventh: scale_of_the_models_width; others too
    "statistics_of_later_queries_over_the_first_ones",  # twentieth: statistics_of_sequences_overlap
    "token_of_equal_values_is_nan",  # forty-first: codes_by_the_scale_of_nothing, of values
)
STATED = {
    "token_of_equal_values_is_nan": "a row of V that is the same number in every feature",
}
"""Inputs on which alone a fault shows."""
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


# --- codes
@fault(FAULTS, "operand")
class fp8_that_still_needs_scaling(ways.Unscaled):
    """guoqingbao/attention.rs PR 3: an FP8 cache to which no scaling is applied yet: the stream of
    tokens is nonsense.
    """

    rows, cols = 64, 32


@fault(FAULTS, "operand", "float16")
class latent_attention_without_its_scales(ways.Unscaled):
    """vllm-project/vllm PR 27490: the setting up of the cache's scales was left behind as MLA
    became a layer of its own: they are 1, whatever the checkpoint says.
    """

    rows, cols = 16, 64


@fault(FAULTS, "operand", "float16")
class bytes_of_a_token_by_half_a_scale(OtherOperands):
    """openvinotoolkit/openvino PR 34105: a token's bytes have a scale that is computed in half, and
    where its numbers are all the same the scale is 0, and they are lost.
    """

    rows, cols = 32, 16

    def read(self, k, v):
        return self.coded(k), self.coded(v)

    @staticmethod
    def coded(x: Tensor) -> Tensor:
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        wide = fp16(high - low)
        none = wide == 0
        scale = fp16(255 / torch.where(none, 1.0, wide))
        zero = fp16(fp16(-low) * scale)
        codes = (x * scale + zero).round().clamp(0, 255)
        return fp16((codes - zero) / scale).masked_fill(none, 0.0)


@fault(FAULTS, "operand layout")
class e4m3_written_and_e5m2_read(OtherOperands):
    """vllm-project/vllm PR 54341: a cache in fp8_e5m2 is written as E4M3 by the kernel that stores,
    and its bytes are read as E5M2: 1 becomes 1/2.
    """

    rows, cols = 64, 64

    def read(self, k, v):
        return self.reread(k), self.reread(v)

    @staticmethod
    def reread(x: Tensor) -> Tensor:
        codes = x.clamp(-448, 448).to(torch.float8_e4m3fn)
        return codes.view(torch.uint8).view(torch.float8_e5m2).float()


# --- scales of codes
@fault(FAULTS, "scale value-factor", "float16")
class ragged_wrapper_without_the_scales(OtherOperands):
    """flashinfer-ai/flashinfer issue 4979: the wrapper for ragged sequences applies `k_scale` and
    `v_scale`, 1/4 and 1/2 as there, only to caches in NVFP4: of FP8 the codes are taken as they
    are. They are not rounded here.
    """

    rows, cols = 128, 64

    def read(self, k, v):
        return k / 0.25, v / 0.5


@fault(FAULTS, "operand")
class one_heads_scale_for_every_head(OtherOperands):
    """sgl-project/sglang PR 26436, review: of a checkpoint's scales for every head a layer with one
    scale takes a single one, here the first: other heads' largest numbers are cut off.
    """

    rows, cols = 32, 128

    def read(self, k, v):
        return self.by_the_first(k), self.by_the_first(v)

    @staticmethod
    def by_the_first(x: Tensor) -> Tensor:
        return ways.saturated(x, x[:, :1].abs().amax().clamp_min(1e-30) / 448)


# --- which numbers are read
@fault(FAULTS, "cache layout other-data")
class type_of_the_cache_not_handed_on(OtherOperands):
    """vllm-project/vllm PR 4869: backends are not told that the cache is in FP8, and put numbers of
    16 bits where there is room for bytes: what a page holds reaches twice as far, and keys of the
    pool's upper half are written over the values of the lower one. Pages have 16 rows, the batch
    fills the pool, which is read where there are fewer queries than keys.
    """

    rows, cols, page = 16, 64, 16

    def read(self, k, v):
        (b, h, nk, d), each = k.shape, -(-k.shape[2] // self.page)
        half = b * each // 2
        if self.at.n >= nk or v.shape != k.shape:
            return k, v
        keys, values = (self.pages(x, each) for x in (k, v))
        values[:half] = keys[b * each - half :]
        back = values.unflatten(0, (b, each)).transpose(1, 2).reshape(b, h, -1, d)
        return k, back[:, :, :nk]

    def pages(self, x: Tensor, each: int) -> Tensor:
        room = x.new_zeros(*x.shape[:2], each * self.page, x.shape[3])
        room[:, :, : x.shape[2]] = x
        return room.unflatten(2, (each, self.page)).transpose(1, 2).flatten(0, 1)


@fault(FAULTS, "cache other-data", "float32")
class cache_of_the_sequence_before(OtherOperands):
    """time-series-foundation-models/lag-llama issue 81: the cache is not reset, and the first step
    with a new sequence takes it for its own: it is the one of the sequence before, moved on by the
    last token. Here sequences are those of the batch, and prompts have as many queries as keys.
    """

    rows, cols = 64, 48

    def read(self, k, v):
        if self.at.n != k.shape[2]:
            return k, v
        return self.moved_on(k), self.moved_on(v)

    @staticmethod
    def moved_on(x: Tensor) -> Tensor:
        later = torch.cat([x[:-1, :, 1:], x[1:, :, -1:]], 2)
        return torch.cat([x[:1], later])


@fault(FAULTS, "other-data layout", "float16")
class keys_for_the_values_of_wide_layers(OtherOperands):
    """ikawrakow/ik_llama.cpp PR 1592: with a quantized cache Gemma 4's layers without a window come
    to the path of latent attention, whose values are the keys: the K cache is used for V.
    """

    rows, cols = 32, 64

    def read(self, k, v):
        wide = self.at.window is None and k.shape == v.shape
        return k, k if wide else v


@fault(FAULTS, "nan-escapes non-finite", "float16")
class token_of_equal_values_is_nan(OtherOperands):
    """thu-ml/SageAttention issue 164: the kernel that takes the mean off V and quantizes it gives
    NaN for a token whose numbers are all the same, and all of O becomes NaN.
    """

    rows, cols = 128, 64

    def read(self, k, v):
        same = v.amax(-1, keepdim=True) == v.amin(-1, keepdim=True)
        return k, v.masked_fill(same, torch.nan)


FAULTS += sixtysecond_scores.FAULTS


# --- sound kernels
for kind, dtype in (
    (ways.TwoLevels, "float16"), (ways.WithRemainders, "float16"),
    (ways.LanesOfKeys, "bfloat16"),
):  # fmt: skip
    SOUND.append(Fault(kind.__name__, frozenset(), attention(kind), dtype))
SOUND.append(Fault("every_fourth_query", frozenset(), ways.every_fourth_query, "float16"))
SOUND.append(Fault("values_in_chunks_by_lse", frozenset(), ways.values_in_chunks_by_lse))
