"""The fifty-second set of faults of attention: a sample of what public threads report, as the
searches return them, and sound kernels.

Twenty searches were fixed by the task before any result was seen, all in the corpus of issues and
pull requests: «attention NaN only in bf16 fix», «attention inf minus inf NaN masked row fix»,
«softmax overflow attention fp16 subtract max fix», «attention accumulate in float32 precision
fix», «attention output dtype cast precision loss fix», «logsumexp attention wrong base natural log2
fix», «fp8 attention scale descale wrong fix», «int8 quantized attention accuracy dequantization
wrong», «attention scale applied twice fix», «attention probabilities underflow zero fix»,
«attention gradient NaN backward fix», «dq dk dv mismatch reference tolerance fix», «attention
deterministic backward mismatch race atomic», «numerical error grows with sequence length
attention», «head dim not multiple of 8 padding attention wrong», «sequence length not divisible by
block size attention wrong», «large sequence length int32 overflow attention offset», «batch size
greater than one attention wrong», «GQA number of kv heads wrong mapping attention fix», «non
contiguous stride attention wrong result fix».

Of these the first result of every search was gone through, then the second of every one, and so on,
until there were 28 faults, which was at the last of all 232 results; searches give twelve at most.
What was left: 132 are about something else, features, speed, builds, crashes, questions, other
operations or a result that had come before; 42 are threads of earlier sets or of another sampler;
26 tell no cause, many of them no text at all (AITemplate PR 632 does not say that it is attention's
accumulation); 2 are on the very defect of one that was taken, here or earlier (iree PR 24178,
SageAttention PR 387); 2 cannot be written so that this function errs (parts that are divided by
their own sums in fp32, flash-attention issue 949; ALiBi slopes through bf16, its PR 846).

Where a thread tells the cause in a line, how it comes about was read in the public history of its
repository: pytorch-image-models PR 2387 speaks of "the number of queries" in its scale, and its
code before has the root of the number of heads; iree issue 21857 and TensorRT-LLM PR 1076. Inferred
are: where the arithmetic of transformers PR 31303 overflows, how an integer that is too small wraps
(numbers of bits were chosen, as all numbers were that no thread tells), and who reads the lse of
flashinfer-bench PR 390. That PR's review may be mistaken about what its kernel gives; it is taken
at its word. Of a thread with several defects one is taken.

What is right was set down before anything was measured. `AGAIN` names every fault whose mistake an
earlier set has in some form: all of them. Masks, rows that see nothing, offsets and layouts are
here; formats, overflow, logarithms and merges in fiftysecond_scores.py. All err more than 1.5 ×
their sound twin on an ordinary input (`python -m benchmarks.unseen.draw attention.fiftysecond
--check`) but those that STATED names, which need the inputs that it says.
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import fiftysecond_kernel as ways
from benchmarks.unseen.attention import fiftysecond_scores
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel, attention, fp16
from benchmarks.unseen.attention.fortyfirst_kernel import ScaleOfItsOwn
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtyeighth_kernel import repeated
from benchmarks.unseen.attention.thirtysixth_kernel import OtherOperands

AGAIN = (
    "bias_that_half_makes_infinite",  # thirty-ninth: mask_value_past_the_largest_half
    "hidden_rows_divided_0_by_0",  # twenty-seventh: rows_of_nothing_divided_by_nothing; others too
    "exponentials_times_a_mask_of_zeros",  # as before
    "adder_at_the_edge_of_half",  # thirty-eighth: least_half_added_to_the_scores
    "least_half_and_scores_below_minus_16",  # as before
    "least_bf16_in_base_2",  # thirteenth: first_keys_all_hidden
    "least_number_added_twice",  # forty-second: two_least_numbers_added
    "softmax_of_infinities_alone",  # thirty-ninth: bias_of_minus_infinity_and_softmax; others too
    "scale_of_the_number_of_heads",  # forty-seventh: root_of_the_features_of_all_heads, which is
    # another root
    "weights_of_heads_at_offsets_that_wrap",  # twelfth: offsets_of_scores_wrap
    "bias_added_to_scores_at_a_wrapped_index",  # twenty-second: offsets_of_the_bias_wrap
    "tokens_multiplied_in_24_bits",  # forty-fourth: offsets_into_pages_wrap
    "delta_of_programs_that_wrap",  # eleventh: offsets_of_delta_wrap
    "gradients_of_out_read_as_if_contiguous",  # eighth: do_by_the_strides_of_out
    "values_not_made_contiguous",  # sixth: read_as_dense, which is all operands
    "both_accumulators_of_a_metal_kernel_in_half",  # nineteenth: both_products_added_up_in_half
    "dots_that_keep_the_type_of_their_operands",  # fortieth: products_before_their_scale_in_half
    "half_written_down_for_the_models_type",  # twenty-first: half_whatever_precision_was_asked
    "shift_of_the_codes_before_the_maximum",  # tenth: weights_in_e4m3_from_0_to_1
    "shader_without_a_maximum",  # thirty-seventh: exponentials_of_the_scores_themselves
    "exponentials_of_raw_scores",  # as before
    "sentinel_that_products_fall_below",  # seventeenth: smallest_maximum_is_finite
    "weights_of_zero_times_what_is_no_number",  # thirty-seventh: rows_past_the_allocation
    "prefill_stores_what_exp2_left",  # tenth: merged_by_e_of_a_base_2_lse
    "ranks_corrected_by_e_instead_of_2",  # as before
    "shards_weighed_by_powers_of_2",  # seventh: lse_in_nats_read_in_base_2, on the way back
    "lse_divided_by_ln_2_on_the_way_out",  # twenty-seventh: lse_given_back_in_base_2
    "one_that_is_not_shifted",  # fourteenth: one_beside_shifted_exponentials
)
STATED = {
    "half_written_down_for_the_models_type": "values, queries or keys of more than 65504",
    "gradients_of_out_read_as_if_contiguous": "a gradient of O that is not contiguous",
}
"""Inputs on which alone a fault shows."""
FAULTS: list[Fault] = []
SOUND: list[Fault] = []
NOTHING = "masked-row non-finite nan-escapes"
"""What is right of a row that sees nothing and is NaN."""


# --- what hides, and rows that see nothing
@fault(FAULTS, NOTHING, "float16")
class bias_that_half_makes_infinite(ways.EagerRows):
    """google/flax issue 982: a mask is a bias of −10¹⁰ in the type of the queries, which is −∞ in
    fp16 alone: a row that is hidden throughout is NaN there, forwards and backwards.
    """

    rows, cols = 48, 64

    def number(self):
        return float(self.at.low(torch.tensor(-1e10)))


@fault(FAULTS, NOTHING, "float16")
class hidden_rows_divided_0_by_0(ForwardAlone):
    """iree-org/iree PR 24447: the maximum begins at the least finite number, so that weights of a
    row that is hidden throughout are 0, and O is 0 times the reciprocal of their sum.
    """

    rows, cols = 64, 128

    def begin(self, q, first=True):
        m, l, acc = super().begin(q, first)
        return m.clamp_min(torch.finfo(torch.float32).min), l, acc

    def finish(self, m, l, acc, rows):
        return self.at.low(acc * (1 / l)), m + l.log2()


def exponentials_times_a_mask_of_zeros(query, key, value, **options):
    """mila-iqia/blocks PR 581: exponentials are multiplied by the mask, behind the maximum of all
    keys, and divided by their sum, which is 0 where the mask is all zeros.
    """
    s, keep, own = ways.eager(query, key, **options)
    s = ways.with_sinks(s, options.get("sinks"))
    seen = torch.ones(s.shape, dtype=torch.bool)
    seen[..., : key.shape[2]] = keep & own
    p = torch.exp(s - s.amax(-1, keepdim=True)) * seen
    p = (p / p.sum(-1, keepdim=True))[..., : key.shape[2]]
    return (p @ repeated(value, query.shape[1])).to(query.dtype)


FAULTS.append(
    Fault("exponentials_times_a_mask_of_zeros", frozenset(NOTHING.split()),
          exponentials_times_a_mask_of_zeros, "float32", frozenset({"elements"}))
)  # fmt: skip


@fault(FAULTS, "mask-finite mask " + NOTHING, "float16")
class adder_at_the_edge_of_half(ways.EagerRows):
    """tensorflow/tensorflow PR 59657: what is added to hidden scores of fp16 is the least number of
    that: below −16 the sum is −∞, above it is that number, whose weights are all alike where a row
    has nothing else.
    """

    rows, cols = 40, 80

    def hidden(self, s, keep):
        own = fp16(fp16(s / LOG2_E) + torch.finfo(torch.float16).min) * LOG2_E
        return torch.where(keep, s, own)


def softmax_of(s, query, value, options):
    """Weights of scores that are all there is, and O."""
    p = ways.with_sinks(s, options.get("sinks")).softmax(-1)[..., : value.shape[2]]
    return (p @ repeated(value, query.shape[1])).to(query.dtype)


def least_half_and_scores_below_minus_16(query, key, value, **options):
    """huggingface/transformers PR 17306: causal mask and padding together hide a row, by the least
    number of fp16, and with scores below −16 it is −∞ throughout, and NaN behind the softmax.
    """
    s, keep, own = ways.eager(query, key, **options)
    low = (s.half() + torch.finfo(torch.float16).min).float()
    return softmax_of(torch.where(keep & own, s, low), query, value, options)


FAULTS.append(
    Fault("least_half_and_scores_below_minus_16", frozenset(f"mask-finite mask {NOTHING}".split()),
          least_half_and_scores_below_minus_16, "float16", frozenset({"elements"}))
)  # fmt: skip


@fault(FAULTS, NOTHING)
class least_bf16_in_base_2(ways.EagerRows):
    """huggingface/transformers PR 31303: a mask is the least number of bf16, with which the fused
    kernel's arithmetic overflows (here, as it multiplies by log₂ e): a row of it is NaN.
    """

    rows, cols = 64, 64

    def number(self):
        return torch.finfo(torch.bfloat16).min


def least_number_added_twice(query, key, value, **options):
    """huggingface/transformers PR 26421: the causal mask is the least number and that of padding
    is: what both hide is −∞, and a row that sees nothing attends to what one of them hides.
    """
    s, keep, own = ways.eager(query, key, **options)
    least = torch.finfo(query.dtype).min
    mask, more = (torch.where(x, 0.0, least).to(query.dtype) for x in (keep, own))
    return softmax_of(s + (mask + more).float(), query, value, options)


FAULTS.append(
    Fault("least_number_added_twice", frozenset({"mask-finite", "mask", "masked-row"}),
          least_number_added_twice, "bfloat16", frozenset({"elements"}))
)  # fmt: skip


def softmax_of_infinities_alone(query, key, value, **options):
    """patrick-kidger/equinox PR 274: hidden scores are −∞, and a query that may attend to nothing
    is NaN.
    """
    s, keep, own = ways.eager(query, key, **options)
    return softmax_of(s.masked_fill(~(keep & own), -INF), query, value, options)


FAULTS.append(
    Fault("softmax_of_infinities_alone", frozenset(NOTHING.split()), softmax_of_infinities_alone,
          "float32", frozenset({"elements"}))
)  # fmt: skip


# --- a scale
@fault(FAULTS, "scale")
class scale_of_the_number_of_heads(ScaleOfItsOwn):
    """huggingface/pytorch-image-models PR 2387 (Attention2d): where attention is not fused its
    scale is one over the root of how many heads there are.
    """

    rows, cols = 96, 48

    def own(self):
        return float(self.at.q.shape[1] ** -0.5)


# --- offsets
@fault(FAULTS, "other-data", "float32")
class weights_of_heads_at_offsets_that_wrap(ways.InOneBuffer):
    """microsoft/onnxruntime PR 20921 (CPU): the offset of a head's weights in the buffer of all is
    an `int`, which sequences that are long enough overflow; here it has 16 bits, and heads lie over
    each other.
    """

    def stored(self, p):
        every = p.flatten(0, 1).flatten(1)
        size = every.shape[1]
        room = every.new_zeros(2**16 + size)
        places = [i * size % 2**16 for i in range(len(every))]
        for at, own in zip(places, every, strict=True):
            room[at : at + size] = own
        return torch.stack([room[at : at + size] for at in places]).view(p.shape)


@fault(FAULTS, "mask other-data", "float16")
class bias_added_to_scores_at_a_wrapped_index(ForwardAlone):
    """NVIDIA/TensorRT-LLM PR 1076: the index of the score to which the kernel for unaligned sizes
    adds its bias is an `int`, which 32k tokens overflow, here 15 bits: later scores have none, and
    earlier ones those as well.
    """

    rows, cols = 64, 64

    def forward(self):
        at = self.at
        if at.mask is None or at.mask.dtype == torch.bool:
            return super().forward()
        kept, full = at.mask, at.mask.expand(*at.q.shape[:2], at.n, at.nk).float()
        where = torch.arange(full.numel()) % 2**15
        at.mask = torch.zeros(full.numel()).index_add(0, where, full.flatten()).view(full.shape)
        found = super().forward()
        at.mask = kept
        return found


@fault(FAULTS, "other-data layout")
class tokens_multiplied_in_24_bits(OtherOperands):
    """ROCm/aiter issue 4126: the causal kernel for prefill in assembly multiplies the number of a
    token in 24 bits, here seven: keys and values of later ones are those of earlier ones.
    """

    rows, cols = 128, 64

    def read(self, k, v):
        if not self.at.causal:
            return k, v
        at = torch.arange(k.shape[2]) % 2**7
        return k[:, :, at], v[:, :, at]


@fault(FAULTS, "no-delta other-data")
class delta_of_programs_that_wrap(Kernel):
    """fla-org/flash-linear-attention PR 965: what comes before the backward pass finds its row, of
    tokens before heads, by the program's number times the width, in 32 bits, here 15: δ of later
    tokens is that of earlier ones.
    """

    rows, cols = 64, 32

    def delta(self, do, o):
        right, wide = super().delta(do, o).transpose(1, 2), o.shape[-1]
        at = torch.arange(right.numel()) * wide % 2**15 // wide
        return right.flatten()[at].view(right.shape).transpose(1, 2)


# --- layouts
@fault(FAULTS, "layout other-data", "float16")
class gradients_of_out_read_as_if_contiguous(Kernel):
    """Dao-AILab/flash-attention issue 355: dO that is not contiguous is read as if it were."""

    rows, cols = 128, 64

    def backward(self):
        self.at.do = ways.memory_of(self.at.do)
        return super().backward()


@fault(FAULTS, "layout other-data", "float16")
class values_not_made_contiguous(ForwardAlone):
    """vllm-project/vllm-ascend PR 95: V is not made contiguous, and the operator takes it to be."""

    rows, cols = 96, 64

    def spread(self, x):
        self.memory["last"] = x
        return super().spread(x)

    def forward(self):
        at, kept = self.at, self.at.v
        at.v = super().spread(ways.memory_of(self.memory["last"]))
        found = super().forward()
        at.v = kept
        return found


FAULTS += fiftysecond_scores.FAULTS


# --- sound kernels
for kind, dtype in (
    (ways.HalvesOfHalves, "float32"), (ways.OwnBlockFirst, "float16"),
    (ways.QueriesInTwoTerms, "bfloat16"),
):  # fmt: skip
    SOUND.append(Fault(kind.__name__, frozenset(), attention(kind), dtype))
SOUND.append(Fault("groups_by_einsum", frozenset(), ways.groups_by_einsum, "float16"))
SOUND.append(Fault("ratio_by_logarithms", frozenset(), ways.ratio_by_logarithms, "bfloat16"))
