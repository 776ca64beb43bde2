"""The tenth set of faults of operations that the search for causes was not written against, all
as public threads tell them, each named with its thread; and sound kernels.

What each does wrong and the names that say where were set down before anything ran; their meaning
is benchmarks.unseen's. Every true description of a fault counts, nothing that is merely near it.
All err more than 1.5 × their sound twin on an ordinary input
(`python -m benchmarks.unseen.draw operations.tenth --check`) but those that STATED names, whose
inputs it says. Where a thread's block is larger than these sizes the kernel's is smaller.
"""

from __future__ import annotations

from benchmarks.unseen import OperationFault
from benchmarks.unseen.operations import second_kernels as kernels
from benchmarks.unseen.operations import tenth_kernels as wrong
from benchmarks.unseen.operations import tenth_sound as right
from benchmarks.unseen.operations import tenth_steps as steps
from benchmarks.unseen.operations.fifth_steps import linear
from benchmarks.unseen.operations.ninth_steps import mx
from benchmarks.unseen.registering import registering

FAULTS: list[OperationFault] = []
SOUND: list[OperationFault] = []
AGAIN = ("squares_in_half", "dx_added_in_bf16", "inverse_frequencies_in_bf16",
         "subnormals_in_sixty_fourths", "second_moment_in_half", "cut_at_every_step",
         "sixteen_partial_sums")  # fmt: skip
"""Mistakes that an earlier set has in another form: squares summed in fp16, dW summed in bf16,
angles in fp16, subnormal codes by another step, a second moment in bf16, weights to nearest at
every step, a number of blocks that is fixed.
"""
STATED = {
    "maximum_of_the_first_vector": "rows whose maxima differ by more than 88, 16 rows or more",
    "clipped": "labels whose probability is below 1e-7",
    "log_of_what_underflows": "label_smoothing, and logits more than 104 apart",
    "as_they_are_beyond_the_cache": "positions of 2048 and more",
    "fractals_of_the_tail": "more than 128 features, whose number is no multiple of 16",
    "stale_tokens_in_dw": "fp8_tensor, more than 32 tokens, whose number is no multiple of 32",
    "subnormals_in_sixty_fourths": "blocks with numbers 2¹⁴ times smaller than their largest",
    "indices_in_bf16": "a table of more than 257 rows",
}
"""Inputs on which alone a fault shows."""

fault, sound = registering(FAULTS, SOUND)


# --- norms
fault("rms_norm", "seeded_by_the_reciprocal",
      wrong.rms_norm(inverse=wrong.seeded_by_the_reciprocal), "missing overflow factor",
      "inverse_rms mean_square normalized output",
      "PTO-ISA/SuperNPUBench PR 26, review: Newton's iteration of 1 / √a begins at 1 /"
      " a")  # fmt: skip
fault("rms_norm", "twelve_bits", wrong.rms_norm(inverse=wrong.twelve_bits), "rounded",
      "inverse_rms normalized output",
      "Tencent/ncnn PR 6903: _mm_rsqrt_ps with no Newton step", "float32")  # fmt: skip
fault("rms_norm", "last_tile_not_awaited", wrong.rms_norm(squares=wrong.last_tile_not_awaited),
      "missing end", "squares mean_square inverse_rms normalized output",
      "vllm-project/vllm PR 44692: three stages miscompile the loop-carried sum of squares",
      "float16")  # fmt: skip
fault("layer_norm", "waves_of_32", wrong.layer_norm(total=wrong.waves_of_32),
      "missing neighbor", "weight bias",
      "pytorch/pytorch issue 183861, ROCm/pytorch PR 3407: blocks of 64, waves of 32")  # fmt: skip
fault("layer_norm", "empty_lanes_merged",
      wrong.layer_norm(statistics=wrong.empty_lanes_merged), "overflow missing end",
      "variance mean squares deviation normalized centered",
      "intel/torch-xpu-ops PR 1573: a boundary check that Welford's merge lacks")  # fmt: skip
fault("layer_norm", "squares_in_half", wrong.layer_norm(statistics=wrong.squares_in_half),
      "summed rounded overflow", "variance squares deviation",
      "SKaiNET-developers/SKaiNET issue 1281, microsoft/onnxruntime issue 29034: fp16 squares",
      "float16")  # fmt: skip

# --- softmax and losses
fault("softmax", "maximum_of_the_first_vector",
      wrong.softmax(maximum=wrong.maximum_of_the_first_vector), "overflow missing neighbor",
      "maximum shifted weights row_sum kept output",
      "pytorch/pytorch PR 156379: max_fvec0 is stored for the second vector too")  # fmt: skip
fault("softmax", "gradient_of_the_logarithm",
      wrong.softmax(gradient=wrong.gradient_of_the_logarithm), "missing",
      "input grad kept inner terms output",
      "oneDNN issue 616: diff_dst − (diff_dst · dst)", "float32")  # fmt: skip
fault("softmax", "from_one_over_ln_2", wrong.softmax(reciprocal=wrong.from_one_over_ln_2),
      "rounded", "row_sum reciprocal kept output weights",
      "tenstorrent/tt-metal issue 53106: the reciprocal's seed 1.442695, 9.4 bits",
      "float16")  # fmt: skip
fault("cross_entropy", "clipped", wrong.entropy(wrong.clipped), "limited missing",
      "own others loss probabilities weights",
      "keras-team/keras issue 17634: probabilities are clipped at 1e-7")  # fmt: skip
fault("cross_entropy", "log_of_what_underflows",
      wrong.entropy(lambda p: p.log(), smoothed_alone=True), "overflow",
      "others loss probabilities weights smoothing",
      "NVIDIA/Megatron-LM PR 5522: log() after exponentiation and normalization",
      "float32")  # fmt: skip
fault("linear_cross_entropy", "clamped_from_below",
      wrong.loss_of_linear(labels=wrong.clamped_from_below), "missing neighbor",
      "unit_gradient input weight probabilities logits target own",
      "flagos-ai/Megatron-LM-FL PR 99: labels out of a chunk's bounds, clamp(min=0)")  # fmt: skip
fault("linear_cross_entropy", "dx_added_in_bf16", wrong.loss_of_linear(added=kernels.bf16),
      "summed rounded", "input grad",
      "apple/ml-cross-entropy issue 14: de is added up in bf16")  # fmt: skip

# --- rope
fault("rope", "inverse_frequencies_in_bf16",
      kernels.rope(wrong.seam("frequency", kernels.bf16)), "rounded",
      "frequency exponent base angle cos sin",
      "sgl-project/sglang-jax issue 1472: frequencies are cast to the model's dtype",
      "float16")  # fmt: skip
fault("rope", "positions_in_bf16", kernels.rope(wrong.seam("positions", kernels.bf16)),
      "rounded", "positions angle cos sin",
      "huggingface/candle PR 3520, nkalyanv99/UNI-D2 PR 6: 15962 is 15936 or 15968")  # fmt: skip
fault("rope", "as_they_are_beyond_the_cache",
      kernels.rope(wrong.seam("positions", wrong.as_they_are_beyond_the_cache)),
      "limited missing end", "positions angle cos sin output",
      "microsoft/onnxruntime issue 28205: returns where position_ids are out of bounds",
      "float32")  # fmt: skip

# --- gated units
fault("swiglu", "exchanged_buffers", wrong.swiglu(exchanged=True), "exchanged missing",
      "gate up", "unslothai/unsloth issue 3314: df is stored in e, de in g")  # fmt: skip
fault("swiglu", "newton_of_infinity", wrong.swiglu(wrong.newton_of_infinity),
      "overflow missing", "sigmoid activated gate slope output",
      "Tencent/ncnn issue 1284, imazen/archmage issue 64: rcp(∞) and a Newton step",
      "float32")  # fmt: skip
fault("swiglu", "estimated_in_vectors",
      wrong.swiglu(wrong.estimated_in_vectors), "rounded",
      "sigmoid activated gate slope output",
      "wingertge/macerator PR 46: vrecpe's 8 bits in vectors, a division in the rest",
      "float16")  # fmt: skip
fault("geglu", "of_three_terms", wrong.geglu(error_function=wrong.of_three_terms),
      "missing rounded", "below erf inner activated gate slope output",
      "opencv/opencv PR 25147: one of Abramowitz and Stegun's approximations",
      "float32")  # fmt: skip
fault("geglu", "without_parentheses", wrong.geglu(tanh_slope=wrong.without_parentheses),
      "missing", "slope gate below density inner",
      "apache/tvm PR 7340: tanh's gradient is broken by missing parentheses")  # fmt: skip

# --- linear layers
fault("linear", "regions_of_m_rows", linear(steps.regions_of_m_rows), "missing neighbor end",
      "products output input weight",
      "facebookexperimental/triton PR 3401: a split's region has M rows, not whole"
      " tiles")  # fmt: skip
fault("linear", "tail_rows_not_zeroed", linear(steps.tail_rows_not_zeroed),
      "neighbor missing end", "products output input",
      "ROCm/aiter PR 2567: ⌊48 / 32⌋ of a tile's rows are set to zero", "float16")  # fmt: skip
fault("linear", "fractals_of_the_tail", linear(steps.fractals_of_the_tail), "end missing",
      "products output input weight",
      "tile-ai/tilelang-ascend issue 1341: a last tile of K that is no whole sixteens",
      "float32")  # fmt: skip
fault("quantized_linear", "scales_switched", steps.scales_switched, "scale exchanged neighbor",
      "", "NVIDIA/CUDALibrarySamples issue 248: the scales of A and B are switched")  # fmt: skip
fault("quantized_linear", "first_row_s_scale", steps.first_row_s_scale, "scale neighbor", "",
      "ROCm/aiter PR 1258: rows' scales in the mode of a scalar", "float16")  # fmt: skip
fault("quantized_linear", "e5m2_read_as_e4m3", steps.e5m2_read_as_e4m3, "codes scale factor",
      "", "NVIDIA/TransformerEngine issue 3342: E5M2's bytes are reinterpreted as"
      " E4M3")  # fmt: skip
fault("quantized_linear", "bytes_of_a_transpose", steps.bytes_of_a_transpose,
      "neighbor codes missing", "",
      "mlc-ai/pith-train PR 74: tl.trans of an FP8 tile corrupts a quarter of it")  # fmt: skip
fault("quantized_linear", "stale_tokens_in_dw", steps.stale_tokens_in_dw,
      "end neighbor missing", "",
      "NVIDIA/TransformerEngine issue 3484: dW sums over a buffer's padding too",
      "float16")  # fmt: skip

# --- quantizers
fault("quantize", "exponent_of_a_sixth", mx(scale=steps.exponent_of_a_sixth), "scale", "",
      "vllm-project/vllm PR 43557: the exponent of amax / 6")  # fmt: skip
fault("quantize", "subnormals_in_sixty_fourths", steps.subnormals_in_sixty_fourths, "codes",
      "", "PTO-ISA/SuperNPUBench PR 49, review: subnormals are divided by 2⁻⁶")  # fmt: skip
fault("quantize", "bits_not_cleared", steps.bits_not_cleared, "codes neighbor", "",
      "bitsandbytes-foundation/bitsandbytes PR 1721: the packed byte is not cleared",
      "float16")  # fmt: skip
fault("stochastic_round", "sticky_for_the_rest", steps.sticky_for_the_rest, "random", "",
      "apytypes/apytypes issue 94: the sticky bit makes the probability incorrect")  # fmt: skip

# --- routers, optimizers
fault("router", "wrapped_in_whole_eights", steps.router(listed=steps.wrapped_in_whole_eights),
      "neighbor end missing", "choice chosen shortfall weights logits",
      "ModelTC/LightLLM PR 1369, review: `% expert_num` processes experts twice")  # fmt: skip
fault("router", "first_slot_s", steps.router(written=steps.first_slot_s), "neighbor missing",
      "weights output chosen",
      "vllm-project/vllm-xpu-kernels PR 66: weights are wrong where top-k exceeds 1",
      "float32")  # fmt: skip
fault("adamw_step", "moments_already_updated", steps.moments_already_updated,
      "missing factor option", "first second mean size moved update new square beta exp_avg",
      "replikativ/raster PR 233: the update observes moments that are updated already")  # fmt: skip
fault("adamw_step", "eps_in_half", steps.eps_in_half, "option overflow missing",
      "eps size moved update",
      "google-deepmind/optax issue 1754: eps is cast to float16, 0 / 0", "float16")  # fmt: skip
fault("adamw_step", "second_moment_in_half", steps.second_moment_in_half, "rounded",
      "second exp_avg_sq square size",
      "pytorch/pytorch issue 147437: second moments that float16 does not hold",
      "float32")  # fmt: skip
fault("adamw_low", "compensation_added", steps.compensation_added, "rounded random missing", "",
      "UselessToys/Ecosystem_WebUI PR 383, review: add_ of rounded − exact")  # fmt: skip
fault("adamw_low", "cut_at_every_step", steps.cut_at_every_step, "rounded random", "",
      "tenstorrent/tt-metal PR 55678, 1bit-MONSTER/1bit-MONSTER issue 640: fp32 is"
      " cut")  # fmt: skip

# --- embedding, sum
fault("embedding", "indices_in_bf16", steps.embedding(read=steps.in_bf16),
      "neighbor rounded", "rows output input weight",
      "RosettaCommons/foundry PR 236: indices that inherit bfloat16")  # fmt: skip
fault("embedding", "last_of_the_sorted_dropped",
      steps.embedding(order=steps.last_of_the_sorted_dropped), "missing end",
      "weight rows input output grad",
      "pytorch/pytorch PR 27731: the backward kernel drops an index of the input",
      "float32")  # fmt: skip
fault("sum", "sixteen_partial_sums", kernels.sum_rows(total=steps.sixteen_partial_sums),
      "missing end", "terms output input",
      "CoffeeBeforeArch/cuda_programming issue 9: <<<1, TB_SIZE>>> for <<<1, GRID_SIZE>>>",
      "float16")  # fmt: skip
fault("sum", "second_pass_of_the_input",
      kernels.sum_rows(total=steps.second_pass_of_the_input), "missing end",
      "terms output input",
      "PacktPublishing/Learn-CUDA-Programming issue 15: the second launch reads"
      " g_inPtr")  # fmt: skip

# --- sound kernels, written otherwise
sound("rms_norm", "of_scaled_rows", right.rms_of_scaled_rows)
sound("layer_norm", "of_a_norm_in_fp64", right.layer_norm_of_a_norm_in_fp64)
sound("softmax", "of_squared_powers", right.softmax_of_squared_powers, "float16")
sound("cross_entropy", "with_labels_last", right.loss_with_labels_last)
sound("linear_cross_entropy", "of_slices_of_k", right.loss_of_slices_of_k)
sound("rope", "in_polar_coordinates", right.rope_in_polar_coordinates, "float32")
sound("swiglu", "of_the_modulus", right.swiglu_of_the_modulus, "float16")
sound("geglu", "of_what_is_lost", right.geglu_of_what_is_lost)
sound("linear", "of_compensated_blocks", right.linear_of_compensated_blocks, "float32")
sound("quantized_linear", "products_in_integers", right.products_in_integers)
sound("quantize", "fp8_by_a_magic_number", right.fp8_by_a_magic_number)
sound("router", "by_ranks", right.router_by_ranks, "float16")
