"""The fourteenth set of faults of operations that the search for causes was not written against,
all as public threads tell them, each named with its thread; and sound kernels. The threads are
mostly of projects that no earlier set names: for training and inference, on all kinds of devices.

What each does wrong and the names that say where were set down before anything ran; their meaning
is benchmarks.unseen's. Every true description of a fault counts, nothing that is merely near it.
All err more than 1.5 × their sound twin on an ordinary input
(`python -m benchmarks.unseen.draw operations.fourteenth --check`) but those that STATED names,
whose inputs it says. Where a thread's block is larger than these sizes the kernel's is smaller.
"""

from __future__ import annotations

from benchmarks.unseen import OperationFault
from benchmarks.unseen.operations import fourteenth_kernels as wrong
from benchmarks.unseen.operations import fourteenth_sound as right
from benchmarks.unseen.operations import fourteenth_steps as steps
from benchmarks.unseen.operations import second_kernels as kernels
from benchmarks.unseen.operations.eighth_steps import loop_of_steps
from benchmarks.unseen.operations.eleventh_kernels import geglu
from benchmarks.unseen.operations.fifth_steps import linear
from benchmarks.unseen.operations.ninth_steps import mx
from benchmarks.unseen.operations.tenth_kernels import layer_norm
from benchmarks.unseen.registering import registering

FAULTS: list[OperationFault] = []
SOUND: list[OperationFault] = []
AGAIN = ("columns_one_apart", "mean_under_the_next_sum", "unshifted_in_backward",
         "columns_of_padding", "coefficients_in_fp16", "slope_of_one_plus_erf",
         "subnormals_with_a_leading_one", "powers_by_32_threads")  # fmt: skip
"""Mistakes that an earlier set has in another form, dtype or operation: without_its_stride,
mean_after_its_reset, not_shifted, padded_with_zeros, tanh_beyond_one, half_of_one_and_tanh,
subnormal_as_normal, counted_by_parameters.
"""
STATED = {
    "columns_one_apart": "a gradient whose columns are not one apart, as of a transposed matrix",
    "subnormals_with_a_leading_one": "blocks with numbers 2¹⁴ times less than the largest, or 0",
    "maximum_rounded_first": "fp32 blocks whose largest number is just below a power of two",
}
"""Inputs on which alone a fault shows."""

fault, sound = registering(FAULTS, SOUND)


# --- norms
fault("rms_norm", "first_tile_of_a_split_row", wrong.first_tile_of_a_split_row,
      "missing end", "squares mean_square inverse_rms normalized output",
      "PTO-ISA/SuperNPUBench PR 113, review: the first tile of a row alone is loaded and"
      " written")  # fmt: skip
fault("rms_norm", "columns_one_apart", kernels.rms_norm(wrong.columns_one_apart),
      "neighbor missing exchanged", "grad output input weight normalized",
      "unslothai/unsloth PR 10617: a gradient's own strides aren't passed")  # fmt: skip
fault("layer_norm", "divided_by_the_padded_length",
      layer_norm(statistics=wrong.divided_by_the_padded_length), "factor",
      "mean variance squares centered deviation normalized",
      "ROCm/composable_kernel PR 315, review: reduce_length is that of the padded row",
      "float16")  # fmt: skip
fault("layer_norm", "mean_under_the_next_sum",
      wrong.layer_norm(recomputed=wrong.mean_under_the_next_sum),
      "missing exchanged neighbor", "mean centered normalized inner grad",
      "ROCm/rocm-libraries PR 9500, review: shared memory is used again without a"
      " barrier")  # fmt: skip
fault("layer_norm", "normalized_from_the_output",
      wrong.layer_norm(read=wrong.normalized_from_the_output), "rounded",
      "normalized centered weighted output inner",
      "NVIDIA/apex PR 1715: the backward pass has the output, for the input")  # fmt: skip

# --- softmax and losses
fault("softmax", "unshifted_in_backward", wrong.unshifted_in_backward, "overflow limited",
      "maximum shifted weights row_sum kept inner",
      "FluxML/NNlib.jl issue 68: the gradient has powers without the maximum")  # fmt: skip
fault("softmax", "threads_beyond_the_columns", wrong.threads_beyond_the_columns, "missing",
      "weights row_sum kept output maximum",
      "karpathy/llm.c issue 776: threads whose number is C or more return")  # fmt: skip
fault("softmax", "down_the_columns", wrong.down_the_columns, "exchanged neighbor missing",
      "maximum row_sum weights kept output",
      "ARM-software/ComputeLibrary issue 993: softmax is taken along another axis",
      "float16")  # fmt: skip
fault("cross_entropy", "every_class_counts_whole",
      wrong.cross_entropy(every=wrong.every_class_counts_whole), "factor missing option",
      "label_smoothing others own loss smoothing",
      "AlexeyAB/darknet issue 5207: error = t ? −log p : 0", "float32")  # fmt: skip
fault("cross_entropy", "probabilities_unweighted",
      wrong.cross_entropy(gradient=wrong.probabilities_unweighted), "missing factor",
      "probabilities unit_gradient grad",
      "mlpack/mlpack issue 2360: g = exp(output) + gy")  # fmt: skip
fault("cross_entropy", "dot_for_the_sum", wrong.cross_entropy(gradient=wrong.dot_for_the_sum),
      "missing exchanged", "probabilities unit_gradient grad",
      "uxlfoundation/oneDNN issue 616: logsoftmax's gradient by the product with its"
      " output")  # fmt: skip
fault("linear_cross_entropy", "softmax_down_the_tokens",
      wrong.linear_cross_entropy(probabilities=wrong.softmax_down_the_tokens),
      "exchanged neighbor missing", "probabilities row_sum lse unit_gradient logits weights",
      "deeplearning4j/deeplearning4j issue 345: softmax along dimension 0 in the"
      " gradient")  # fmt: skip
fault("linear_cross_entropy", "columns_of_padding",
      wrong.linear_cross_entropy(normalizer=wrong.columns_of_padding), "end missing",
      "row_sum lse loss probabilities weights logits",
      "verl-project/verl issue 2899: a vocabulary that no whole number of blocks is",
      "float16")  # fmt: skip

# --- rope
fault("rope", "cosines_of_cosines", wrong.cosines_of_cosines, "missing exchanged neighbor",
      "cos sin angle",
      "NVIDIA/Megatron-LM PR 7465: cosines and sines are taken for angles")  # fmt: skip
fault("rope", "table_in_bf16", kernels.rope(wrong.table_in_bf16), "rounded", "cos sin",
      "sgl-project/sgl-kernel-xpu PR 287: a cache of cosines and sines in bf16",
      "float16")  # fmt: skip

# --- gated units
fault("swiglu", "half_beyond_88", kernels.swiglu(sigmoid=wrong.half_beyond_88),
      "overflow limited missing", "sigmoid activated gate slope output",
      "clab/dynet issue 1525: pmin and pmax are exchanged, the sigmoid is ½ beyond"
      " 88")  # fmt: skip
fault("geglu", "keyword_not_read", kernels.geglu(always="none"), "option exchanged missing",
      "approximate activated below tanh erf inner",
      "apple/coremltools PR 2863: approximate as a keyword isn't read", "float32")  # fmt: skip
fault("geglu", "coefficients_in_fp16", geglu(tanh_below=wrong.coefficients_in_fp16),
      "rounded missing", "tanh below activated gate output",
      "Tencent/ncnn PR 6979: the coefficients of tanh underflow in fp16", "float16")  # fmt: skip
fault("geglu", "slope_of_one_plus_erf", wrong.slope_of_one_plus_erf, "rounded missing",
      "erf below slope grad gate",
      "tenstorrent/tt-metal issue 35971: 1 + erf cancels in the backward pass",
      "float32")  # fmt: skip

# --- linear layers
fault("linear", "dw_of_the_first_microbatch", steps.linear(steps.dw_of_the_first_microbatch),
      "missing", "products weight grad input",
      "AMD-AGI/Primus PR 1046: later microbatches don't reach main_grad")  # fmt: skip
fault("linear", "lanes_that_load_nothing",
      linear(steps.lanes_that_load_nothing, steps.lanes_that_load_nothing), "missing end",
      "products output input weight",
      "JuliaGPU/GPUArrays.jl PR 590: lanes beyond the edge don't load their share")  # fmt: skip
fault("linear", "first_fragment_alone", linear(steps.first_fragment_alone), "missing",
      "products output input weight",
      "tile-ai/tilelang PR 2142, review: no loop over the fragments of K", "float16")  # fmt: skip
fault("linear", "views_read_by_rows", steps.linear(steps.views_read_by_rows),
      "neighbor exchanged missing", "products weight grad input output",
      "modular/modular issue 6932: the layout of a column-major view is ignored")  # fmt: skip
fault("quantized_linear", "order_of_the_shuffle", steps.order_of_the_shuffle,
      "neighbor exchanged codes", "",
      "ROCm/TransformerEngine issue 665: columns' data are shuffled for the reader"
      " alone")  # fmt: skip
fault("quantized_linear", "columns_never_requantized", steps.columns_never_requantized,
      "missing codes", "",
      "modelscope/mcore-bridge issue 125: the columns' FP8 data stay zero")  # fmt: skip
fault("quantized_linear", "rows_scale_steps", steps.rows_scale_steps,
      "scale neighbor exchanged", "",
      "ROCm/composable_kernel PR 3765: scale_m is read at m + n2", "float16")  # fmt: skip

# --- quantizers
fault("quantize", "negatives_clipped", mx(codes=steps.negatives_clipped), "codes limited", "",
      "1bit-MONSTER/1bit-MONSTER issue 704: negative numbers become 0")  # fmt: skip
fault("quantize", "subnormals_with_a_leading_one",
      kernels.quantize(fp8=steps.subnormals_with_a_leading_one), "codes", "",
      "1bit-MONSTER/1bit-MONSTER issue 300: E4M3's subnormals are decoded as normal")  # fmt: skip
fault("quantize", "maximum_rounded_first",
      kernels.quantize(scale=steps.maximum_rounded_first), "scale", "",
      "PTO-ISA/SuperNPUBench PR 111, review: the maximum is narrowed before its exponent is"
      " taken", "float32")  # fmt: skip
fault("stochastic_round", "sum_in_bf16", steps.sum_in_bf16, "random rounded", "",
      "Comfy-Org/comfy-kitchen PR 60, review: number and noise are added in 16 bits")  # fmt: skip
fault("stochastic_round", "one_lcg_step", steps.one_lcg_step, "random", "",
      "kekzl/imp PR 1143: one step of an LCG from consecutive seeds")  # fmt: skip

# --- routers, optimizers
fault("router", "least_positive_first", kernels.router(choose=steps.least_positive_first),
      "exchanged neighbor missing", "choice shortfall chosen weights logits indices",
      "m4rs-mt/ILGPU issue 642: descending radix sort of floats")  # fmt: skip
fault("router", "gradient_of_local_experts", steps.gradient_of_local_experts, "missing",
      "weights chosen logits grad",
      "huggingface/transformers PR 48205: ranks' gradients of scores aren't added"
      " up")  # fmt: skip
fault("adamw_step", "power_of_beta_in_bf16",
      kernels.adamw_step(correct=steps.power_of_beta_in_bf16), "rounded factor",
      "mean size moved second",
      "tenstorrent/tt-metal PR 52953: β₂ᵗ is 1 in bf16", "float32")  # fmt: skip
fault("adamw_step", "decay_dropped", steps.decay_dropped, "missing option",
      "weight_decay decay decayed param moved",
      "tinygrad/tinygrad PR 17709: the decayed weight is used for a cast alone",
      "float32")  # fmt: skip
fault("adamw_low", "powers_by_32_threads", loop_of_steps(counted=steps.powers_by_32_threads),
      "factor missing", "",
      "PaddlePaddle/Paddle PR 48297: 32 threads update Beta1Pow and Beta2Pow")  # fmt: skip

# --- embedding, sum
fault("embedding", "bits_added_as_integers",
      kernels.embedding(total=steps.bits_added_as_integers), "summed missing overflow",
      "weight rows grad input",
      "mni-ml/framework PR 29, review: bits of floats are added as integers",
      "float32")  # fmt: skip
fault("embedding", "padding_row_of_every_shard", steps.padding_row_of_every_shard,
      "missing option neighbor", "padding weight rows grad input",
      "pytorch/torchtitan PR 4637: a global padding_idx in every shard")  # fmt: skip
fault("sum", "stride_of_the_whole_block",
      kernels.sum_rows(total=steps.stride_of_the_whole_block), "missing",
      "terms output input",
      "cupy/cupy PR 874: the j-stride is block_size, for block_size / block_stride",
      "float16")  # fmt: skip
fault("sum", "rows_for_columns", steps.rows_for_columns, "exchanged neighbor",
      "terms grad input output",
      "chrischoy/pytorch-custom-cuda-tutorial issue 1: row and column are exchanged in the"
      " broadcast")  # fmt: skip

# --- sound kernels, written otherwise
sound("rms_norm", "of_interleaved_sums", right.rms_of_interleaved_sums)
sound("layer_norm", "about_the_first", right.layer_norm_about_the_first)
sound("softmax", "by_one_logarithm", right.softmax_by_one_logarithm, "float16")
sound("cross_entropy", "of_log_probabilities", right.loss_of_log_probabilities, "float16")
sound("linear_cross_entropy", "of_five_tokens", right.loss_of_five_tokens)
sound("rope", "of_complex_numbers", right.rope_of_complex_numbers)
sound("swiglu", "by_sign", right.swiglu_by_sign)
sound("geglu", "of_two_quotients", right.geglu_of_two_quotients)
sound("linear", "of_even_and_odd", right.linear_of_even_and_odd)
sound("quantized_linear", "scaled_behind_the_products", right.fp8_scaled_behind_the_products)
sound("quantize", "mxfp4_from_a_table", right.mxfp4_from_a_table)
sound("router", "of_the_chosen", right.router_of_the_chosen, "float16")
