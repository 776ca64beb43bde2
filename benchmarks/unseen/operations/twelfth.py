"""The twelfth set of faults of operations that the search for causes was not written against, all
as public threads tell them, each named with its thread; and sound kernels. The threads are mostly
of projects for inference and quantizing.

What each does wrong and the names that say where were set down before anything ran; their meaning
is benchmarks.unseen's. Every true description of a fault counts, nothing that is merely near it.
All err more than 1.5 × their sound twin on an ordinary input
(`python -m benchmarks.unseen.draw operations.twelfth --check`) but those that STATED names, whose
inputs it says. Where a thread's block is larger than these sizes the kernel's is smaller.
"""

from __future__ import annotations

from benchmarks.unseen import OperationFault
from benchmarks.unseen.operations import second_kernels as kernels
from benchmarks.unseen.operations import twelfth_kernels as wrong
from benchmarks.unseen.operations import twelfth_sound as right
from benchmarks.unseen.operations import twelfth_steps as steps
from benchmarks.unseen.operations.eleventh_kernels import geglu, rms_norm, softmax
from benchmarks.unseen.operations.fifth_steps import linear, nvfp4
from benchmarks.unseen.operations.ninth_steps import blocks_of_128, mx
from benchmarks.unseen.operations.tenth_kernels import layer_norm, seam
from benchmarks.unseen.registering import registering

FAULTS: list[OperationFault] = []
SOUND: list[OperationFault] = []
AGAIN = ("added_in_bf16", "activated_in_place", "half_of_one_and_tanh",
         "whole_tiles_of_scales", "nearest_power_of_the_quotient", "one_bit_lower",
         "each_lane_s_own", "whole_fours_of_columns")  # fmt: skip
"""Mistakes that an earlier set has in another form, dtype or operation: in_fp16_by_sixteens,
slope_of_the_activated, one_plus_tanh, tiles_of_the_floor, scale_to_nearest,
random_bits_misaligned, shuffled_down, vectors_of_four.
"""
STATED = {
    "merged_as_moments": "rows with numbers of 5e9 and more",
    "divided_over_tokens": "one expert a token, and renormalize",
    "rows_as_if_contiguous": "a table whose columns are not one apart, as of a transposed matrix",
}
"""Inputs on which alone a fault shows."""

fault, sound = registering(FAULTS, SOUND)


# --- norms
fault("rms_norm", "leftovers_not_squared", rms_norm(inverse=wrong.leftovers_not_squared),
      "missing end", "squares mean_square inverse_rms normalized",
      "ggml-org/llama.cpp PR 28027: the scalar loop behind the vectors doesn't square",
      "float16")  # fmt: skip
fault("rms_norm", "sum_of_the_next_token", kernels.rms_norm(own=wrong.sum_of_the_next_token),
      "neighbor missing", "squares mean_square inverse_rms normalized output",
      "gittensor-ai-lab/sparkinfer PR 705: a lagging warp reads the next token's partial"
      " sum")  # fmt: skip
fault("rms_norm", "merged_as_moments", rms_norm(inverse=wrong.merged_as_moments),
      "overflow", "squares mean_square inverse_rms normalized output",
      "huggingface/candle PR 3477: Welford's correction in the merge of two sums of"
      " squares", "float32")  # fmt: skip
fault("layer_norm", "mean_after_its_reset", layer_norm(statistics=wrong.mean_after_its_reset),
      "missing", "mean centered normalized squares variance",
      "ggml-org/llama.cpp PR 3057: a missing barrier after computing mean")  # fmt: skip
fault("layer_norm", "butterfly_of_six", layer_norm(statistics=wrong.butterfly_of_six),
      "missing", "mean squares variance centered deviation",
      "xlite-dev/LeetCUDA issue 357: warp_reduce_sum<NUM_WARPS>, no power of two",
      "float16")  # fmt: skip

# --- softmax and losses
fault("softmax", "raw_leftovers", wrong.raw_leftovers, "missing end",
      "weights shifted row_sum kept output maximum",
      "openvinotoolkit/openvino PR 2050, review: the leftovers' power isn't stored"
      " anywhere")  # fmt: skip
fault("softmax", "counter_of_the_loop_before",
      kernels.softmax(seam("weights", wrong.counter_of_the_loop_before)), "missing neighbor",
      "weights kept output",
      "openvinotoolkit/openvino PR 36305: i for output_idx where results are written",
      "float16")  # fmt: skip
fault("softmax", "five_powers", softmax(power=wrong.five_powers), "rounded missing",
      "weights shifted row_sum kept output",
      "alibaba/MNN issue 1912: a series up to t⁵ / 120, of t as large as ln 2",
      "float32")  # fmt: skip
fault("cross_entropy", "all_but_the_smoothing",
      wrong.cross_entropy(rest=wrong.all_but_the_smoothing), "factor option missing",
      "label_smoothing smoothing others loss unit_gradient",
      "paiml/aprender PR 2199: (1 − eps) / C off-target mass for eps / C")  # fmt: skip
fault("cross_entropy", "scaled_above_eps", wrong.cross_entropy(logarithm=wrong.scaled_above_eps),
      "limited missing", "probabilities lse own loss others",
      "ggml-org/ggml PR 929: the softmax is scaled from [0, 1] to [eps, 1]",
      "float32")  # fmt: skip
fault("cross_entropy", "kept_in_bf16", wrong.cross_entropy(logarithm=wrong.kept_in_bf16),
      "rounded", "probabilities lse own loss others",
      "genlm/genlm-backend PR 66: log-probabilities of bf16 logits are bf16")  # fmt: skip
fault("linear_cross_entropy", "labels_from_one",
      kernels.linear_cross_entropy(loss=wrong.labels_from_one), "neighbor exchanged",
      "target own loss probabilities logits unit_gradient",
      "mlverse/torch PR 681: labels one away, from 0 and from 1")  # fmt: skip
fault("linear_cross_entropy", "added_in_bf16",
      kernels.linear_cross_entropy(loss=kernels.cross_entropy(row_sum=wrong.added_in_bf16)),
      "summed rounded", "row_sum lse probabilities weights loss",
      "billy-enrizky/openbrowser-ai PR 63, review: log_softmax in bf16 over the"
      " vocabulary")  # fmt: skip

# --- rope
fault("rope", "one_back", kernels.rope(seam("positions", wrong.one_back)),
      "neighbor missing", "positions angle cos sin",
      "ml-explore/mlx-swift-examples PR 371: rope(q, offset: cache.offset − 1)",
      "float16")  # fmt: skip
fault("rope", "vectors_across_the_halves", wrong.vectors_across_the_halves,
      "neighbor exchanged missing end", "input output first second cos sin crossed back",
      "flashinfer-ai/flashinfer PR 2470, review: vectors straddle the half"
      " boundary")  # fmt: skip

# --- gated units
fault("swiglu", "zero_from_minus_11", kernels.swiglu(sigmoid=wrong.zero_from_minus_11),
      "limited missing", "sigmoid activated gate slope output",
      "tenstorrent/tt-metal issue 26211: sigmoid of −11.125 is zero", "float32")  # fmt: skip
fault("swiglu", "activated_in_place", wrong.activated_in_place, "exchanged missing",
      "slope gate sigmoid activated",
      "zhongkaifu/Seq2SeqSharp PR 71: bugs in SiLU when inplace is enabled")  # fmt: skip
fault("geglu", "table_of_halves", wrong.table_of_halves, "rounded",
      "gate activated below tanh inner output",
      "ggml-org/llama.cpp issue 29252: the f32 GELU is a table of fp16", "float32")  # fmt: skip
fault("geglu", "half_of_one_and_tanh", geglu(tanh_below=wrong.half_of_one_and_tanh),
      "rounded missing", "tanh below activated gate slope output",
      "tenstorrent/tt-metal issue 56517: 1 + tanh(u) destroys the tail", "float32")  # fmt: skip

# --- linear layers
fault("linear", "last_slice_alone", linear(steps.last_slice_alone), "missing",
      "products output input weight",
      "tile-ai/tilelang issue 2627: the accumulator is cleared inside the K-loop")  # fmt: skip
fault("linear", "first_part_alone", linear(steps.first_part_alone), "missing end",
      "products output input weight",
      "NVIDIA/TensorRT-LLM PR 18369, review: the grid isn't expanded by the split of K",
      "float16")  # fmt: skip
fault("linear", "tiles_by_the_other_grid", linear(steps.tiles_by_the_other_grid), "missing",
      "products output input weight",
      "meta-pytorch/applied-ai issue 25: pid % grid_n and pid // grid_m")  # fmt: skip
fault("quantized_linear", "scales_of_both_waves", blocks_of_128(steps.scales_of_both_waves),
      "scale factor", "",
      "NVIDIA/cutlass issue 3596: modified B scales are used again in the next M"
      " wave")  # fmt: skip
fault("quantized_linear", "scales_down_the_columns",
      blocks_of_128(steps.scales_down_the_columns), "scale neighbor exchanged", "",
      "vllm-project/vllm issue 53338: the stride of column-major scales is ignored",
      "float16")  # fmt: skip
fault("quantized_linear", "row_by_the_column", steps.row_by_the_column,
      "neighbor exchanged", "",
      "microsoft/onnxruntime PR 31155, review: activation-row and output-column indexing"
      " are mixed")  # fmt: skip
fault("quantized_linear", "whole_tiles_of_scales", steps.whole_tiles_of_scales,
      "missing end", "",
      "NVIDIA/TensorRT-LLM PR 12835, review: sf_tile_count rounds down")  # fmt: skip

# --- quantizers
fault("quantize", "zero_decoded_as_a_half", mx(codes=steps.zero_decoded_as_a_half),
      "codes", "", "tile-ai/tilelang issue 2704: E2M1's zero and subnormal codes")  # fmt: skip
fault("quantize", "minus_zero_by_value", steps.minus_zero_by_value, "codes overflow", "",
      "ROCm/rocm-systems PR 11290: E2M1's negative zero becomes 32768")  # fmt: skip
fault("quantize", "nearest_power_of_the_quotient",
      kernels.quantize(scale=steps.nearest_power_of_the_quotient), "scale", "",
      "ml-explore/mlx PR 4353: MX scales are rounded to nearest, and blocks"
      " saturate")  # fmt: skip
fault("quantize", "scales_cut", nvfp4(steps.scales_cut), "scale", "",
      "radixark/miles PR 1054: a quantizer without rn for its E4M3 scales",
      "float16")  # fmt: skip
fault("stochastic_round", "one_stream_for_all_tiles", steps.one_stream_for_all_tiles,
      "random", "",
      "tenstorrent/tt-metal PR 52030: all cores have the same seed and stream")  # fmt: skip
fault("stochastic_round", "one_bit_lower", steps.one_bit_lower, "random rounded", "",
      "AMD-AGI/Primus-Turbo PR 430: the intrinsic takes the seed one bit lower")  # fmt: skip

# --- routers, optimizers
fault("router", "divided_over_tokens", steps.divided_over_tokens,
      "neighbor missing", "renormalize weights chosen_sum output chosen",
      "databricks/megablocks PR 87: with top_k=1 a weight has no dimension of its"
      " own")  # fmt: skip
fault("adamw_step", "decay_by_a_constant", steps.decay_by_a_constant,
      "missing option", "weight_decay decay decayed param moved",
      "e-sensing/torchopt PR 14: decay isn't multiplied by the parameter",
      "float32")  # fmt: skip
fault("adamw_step", "first_moment_of_eight_bits", steps.first_moment_of_eight_bits,
      "rounded codes", "first exp_avg mean",
      "unslothai/unsloth-zoo PR 962: affine 8-bit moments don't land on zero",
      "float32")  # fmt: skip
fault("adamw_low", "register_of_ones", kernels.adamw_low(steps.register_of_ones),
      "random rounded", "",
      "tenstorrent/tt-metal issue 52014: the all-ones seed locks the LFSR")  # fmt: skip

# --- embedding, sum
fault("embedding", "bits_as_a_number", kernels.embedding(total=steps.bits_as_a_number),
      "missing summed", "weight rows grad input",
      "pytorch/pytorch PR 104592: bfloat16(addr->x) is made of a number, not of"
      " bits")  # fmt: skip
fault("embedding", "rows_as_if_contiguous", steps.rows_as_if_contiguous,
      "neighbor missing exchanged", "rows output weight input",
      "huggingface/candle PR 1909, review: src_i stands for strided_src_i")  # fmt: skip
fault("sum", "each_lane_s_own", kernels.sum_rows(total=steps.each_lane_s_own),
      "missing neighbor", "terms output input",
      "CFD-GO/TCLB PR 287: __shfl_down, and all threads use the sum")  # fmt: skip
fault("sum", "whole_fours_of_columns", kernels.sum_rows(total=steps.whole_fours_of_columns),
      "missing end", "terms output input",
      "stew675/llama-cpp-rdna-boosts issue 19: the last n % 4 columns are dropped",
      "float16")  # fmt: skip

# --- sound kernels, written otherwise
sound("rms_norm", "of_halves", right.rms_of_halves)
sound("layer_norm", "of_tiles", right.layer_norm_of_tiles, "float16")
sound("softmax", "in_base_two", right.softmax_in_base_two)
sound("cross_entropy", "of_folded_logarithms", right.loss_of_folded_logarithms)
sound("linear_cross_entropy", "of_vocabulary_parts", right.loss_of_vocabulary_parts)
sound("rope", "of_two_angles", right.rope_of_two_angles, "float32")
sound("swiglu", "of_powers_of_two", right.swiglu_of_powers_of_two)
sound("geglu", "of_logarithms", right.geglu_of_logarithms)
sound("linear", "with_what_was_lost", right.linear_with_what_was_lost, "float16")
sound("quantized_linear", "mxfp8_by_exponents", right.mxfp8_by_exponents)
sound("quantize", "mxfp8_by_steps", right.mxfp8_by_steps)
sound("adamw_step", "of_one_rate", right.adamw_of_one_rate, "float32")
