"""The eleventh set of faults of operations that the search for causes was not written against, all
as public threads tell them, each named with its thread; and sound kernels.

What each does wrong and the names that say where were set down before anything ran; their meaning
is benchmarks.unseen's. Every true description of a fault counts, nothing that is merely near it.
All err more than 1.5 × their sound twin on an ordinary input
(`python -m benchmarks.unseen.draw operations.eleventh --check`) but those that STATED names, whose
inputs it says. Where a thread's block is larger than these sizes the kernel's is smaller.
"""

from __future__ import annotations

from benchmarks.unseen import OperationFault
from benchmarks.unseen.operations import eleventh_kernels as wrong
from benchmarks.unseen.operations import eleventh_sound as right
from benchmarks.unseen.operations import eleventh_steps as steps
from benchmarks.unseen.operations import second_kernels as kernels
from benchmarks.unseen.operations.eighth_steps import lookup
from benchmarks.unseen.operations.fifth_steps import linear
from benchmarks.unseen.operations.ninth_steps import mx
from benchmarks.unseen.operations.tenth_kernels import seam
from benchmarks.unseen.registering import registering

FAULTS: list[OperationFault] = []
SOUND: list[OperationFault] = []
AGAIN = ("difference_in_tiles", "by_a_line", "normalizers_in_bf16",
         "all_in_bf16", "tanh_of_one_exponential", "grid_of_the_floor", "parts_in_the_output",
         "read_past_k", "ceiling_of_the_logarithm", "top_binade_saturates",
         "one_less_the_correction", "beta1_to_the_step", "moments_in_bf16",
         "token_by_token_in_fp16", "grows_in_bf16")  # fmt: skip
"""Mistakes that an earlier set has in another form, dtype or operation: a variance by difference
in wide rows alone, a power by a line and not by its bits, all of a rotary cache in bf16, tiles of
the floor both ways, reads past K of codes, exponents of E4M3's top binade, both moments in bf16.
"""
STATED = {
    "without_its_stride": "an input whose columns are not one apart, as of a transposed matrix",
    "first_of_the_row": "rows whose largest number is more than 88 above their first",
    "partners_by_xor": "heads whose width is no power of two",
    "small_scales_vanish": "weights with blocks 2⁻¹⁵ times as large as their largest",
    "nan_at_128": "blocks whose largest number is in [512, 1024)",
}
"""Inputs on which alone a fault shows."""

fault, sound = registering(FAULTS, SOUND)


# --- norms
fault("rms_norm", "eps_of_scaled_rows", wrong.rms_norm(inverse=wrong.eps_of_scaled_rows),
      "option missing factor", "eps mean_square inverse_rms normalized",
      "apple/coremltools issue 2821: eps is added after rows are divided by their largest",
      "float16")  # fmt: skip
fault("rms_norm", "eps_in_the_sum", wrong.rms_norm(inverse=wrong.eps_in_the_sum),
      "option factor missing", "eps mean_square inverse_rms squares",
      "ml-explore/mlx-lm PR 1624: eps of Σ x² and of its mean, a factor of D apart",
      "float32")  # fmt: skip
fault("rms_norm", "without_its_stride", wrong.rms_norm(read=wrong.without_its_stride),
      "neighbor missing exchanged", "input normalized output",
      "ModelTC/LightLLM issue 1467: the normalize pass drops x_stride1")  # fmt: skip
fault("rms_norm", "rows_beyond_the_cores",
      kernels.rms_norm(seam("output", wrong.rows_beyond_the_cores)), "missing end",
      "input normalized output",
      "vllm-project/vllm-ascend PR 5012, review: a grid of 48, and a row a program")  # fmt: skip
fault("layer_norm", "small_ones_to_zero",
      kernels.layer_norm(seam("variance", wrong.small_ones_to_zero)), "limited missing",
      "variance squares deviation eps",
      "pytorch/pytorch issue 190491: variances below 1e-6 are zero")  # fmt: skip
fault("layer_norm", "difference_in_tiles",
      kernels.layer_norm(spread=wrong.difference_in_tiles), "rounded summed missing",
      "variance squares mean deviation centered",
      "XPU-Forces/mojo_opset PR 340, review: E[x²] − E[x]² in the multi-tile path",
      "float32")  # fmt: skip

# --- softmax and losses
fault("softmax", "first_of_the_row", kernels.softmax(maximum=wrong.first_of_the_row),
      "overflow missing neighbor", "maximum shifted weights row_sum kept output",
      "ROCm/AMDMIGraphX PR 1290, review: exp(x − c), c a row's first number")  # fmt: skip
fault("softmax", "by_a_line", wrong.softmax(power=wrong.by_a_line), "rounded missing",
      "weights shifted row_sum kept output",
      "openvinotoolkit/openvino PR 37857: a polynomial of degree one, 3 %")  # fmt: skip
fault("softmax", "nothing_beyond_13", wrong.softmax(power=wrong.nothing_beyond_13),
      "limited missing", "weights shifted kept output row_sum",
      "torch/nn issue 804: an approximate exponential that is 0 from −13 on",
      "float32")  # fmt: skip
fault("softmax", "twice_the_gradient", wrong.softmax(gradient=2.0), "factor missing",
      "input grad kept inner terms",
      "markroxor/fromscratchtoml issue 65: the gradient is off by a factor of two",
      "float16")  # fmt: skip
fault("cross_entropy", "normalizers_in_bf16", kernels.cross_entropy(seam("lse", kernels.bf16)),
      "rounded", "lse probabilities loss row_sum others",
      "google-deepmind/optax issue 1020: log_normalizers are quantized")  # fmt: skip
fault("linear_cross_entropy", "narrow_logits_forward", wrong.narrow_logits_forward, "rounded",
      "logits lse probabilities loss own",
      "marin-community/marin PR 8217: the forward pass emits bf16 logits")  # fmt: skip
fault("linear_cross_entropy", "in_fp16_by_sixteens",
      kernels.linear_cross_entropy(
          loss=kernels.cross_entropy(row_sum=wrong.in_fp16_by_sixteens)),
      "summed rounded overflow", "row_sum lse probabilities weights loss",
      "pytorch/pytorch PR 187053: an fp16 softmax_denom", "float16")  # fmt: skip

# --- rope
fault("rope", "all_in_bf16", kernels.rope(wrong.all_in_bf16), "rounded",
      "frequency exponent base positions angle cos sin",
      "huggingface/transformers issue 25681: the cache is built in the model's"
      " dtype")  # fmt: skip
fault("rope", "partners_by_xor", wrong.partners_by_xor, "neighbor exchanged missing",
      "input output first second cos sin",
      "ROCm/FlyDSL PR 1113: XOR pairs no halves of 12 lanes", "float16")  # fmt: skip

# --- gated units
fault("swiglu", "slope_without_parentheses", wrong.slope_without_parentheses, "missing factor",
      "slope gate sigmoid", "chelsea0x3b/dfdx PR 915, review: missing parentheses")  # fmt: skip
fault("swiglu", "three_lines", kernels.swiglu(sigmoid=wrong.three_lines),
      "rounded missing limited", "sigmoid activated gate slope output",
      "tenstorrent/tt-metal issue 53258: a LUT of three lines, 0.12 at |x| = 2",
      "float32")  # fmt: skip
fault("swiglu", "times_the_input", kernels.swiglu(sigmoid=wrong.times_the_input),
      "missing factor", "sigmoid activated gate slope output",
      "joaopauloschuler/neural-api issue 21: Sigmoid is x / (1 + Exp(−x))",
      "float16")  # fmt: skip
fault("geglu", "tanh_of_one_exponential",
      wrong.geglu(tanh_below=wrong.tanh_of_one_exponential), "overflow missing rounded",
      "tanh below inner activated gate slope output",
      "intel/llm-scaler PR 484: (exp(2z) − 1) / (exp(2z) + 1)")  # fmt: skip
fault("geglu", "cube_in_fp16", wrong.geglu(tanh_below=wrong.cube_in_fp16),
      "rounded overflow", "inner tanh below activated gate slope output",
      "facebookresearch/fairseq issue 2235: x³ in fp16", "float16")  # fmt: skip
fault("geglu", "sigmoid_of_1702", wrong.geglu(below=wrong.sigmoid_of_1702),
      "missing rounded option", "below erf inner activated gate slope output density approximate",
      "ROCm/AMDMIGraphX issue 2542, davisking/dlib PR 2204: x σ(1.702 x)",
      "float32")  # fmt: skip

# --- linear layers
fault("linear", "grid_of_the_floor", linear(steps.grid_of_the_floor), "missing end",
      "products output input weight",
      "NVIDIA/cuda-samples issue 411: dimsB.x / threads.x blocks")  # fmt: skip
fault("linear", "packed_additions", linear(steps.packed_additions), "missing neighbor",
      "products output input weight",
      "ROCm/rocm-libraries PR 10913: packed fp16 atomic additions of split K",
      "float16")  # fmt: skip
fault("linear", "parts_in_the_output", linear(steps.parts_in_the_output), "summed rounded",
      "products output input weight",
      "flagos-ai/FlagGems PR 5876: split-K adds into the BF16 output")  # fmt: skip
fault("quantized_linear", "columns_into_the_next_row", steps.columns_into_the_next_row,
      "missing end neighbor", "",
      "huggingface/kernels-community issue 1153: a store with row_mask and without"
      " offs_bn < N")  # fmt: skip
fault("quantized_linear", "blocks_across_rows", steps.blocks_across_rows,
      "scale neighbor codes", "",
      "DeepWok/mase PR 321: blocks straddle rows", "float16")  # fmt: skip
fault("quantized_linear", "small_scales_vanish", steps.small_scales_vanish,
      "scale missing", "",
      "vllm-project/vllm PR 34577: small scales underflow to zero in S0E5M3")  # fmt: skip
fault("quantized_linear", "read_past_k", steps.read_past_k, "neighbor end missing", "",
      "huggingface/kernels-community issue 1153: tiles are loaded with no K bound",
      "float16")  # fmt: skip

# --- quantizers
fault("quantize", "ceiling_of_the_logarithm", mx(scale=steps.ceiling_of_the_logarithm),
      "scale", "", "DeepWok/mase PR 321: ceil(log2(block_max))")  # fmt: skip
fault("quantize", "top_binade_saturates", kernels.quantize(fp8=steps.top_binade_saturates),
      "codes limited", "",
      "tile-ai/tilelang-metax PR 140, review: 256 becomes 448")  # fmt: skip
fault("quantize", "nan_at_128", mx(scale=steps.nan_at_128), "scale overflow", "",
      "sgl-project/sglang PR 25519: scales of 128 are taken for NaN", "float16")  # fmt: skip
fault("stochastic_round", "three_bits_below", steps.three_bits_below, "random", "",
      "graphcore-research/unit-scaling PR 56: few random bits, modified to avoid"
      " bias")  # fmt: skip

# --- routers, optimizers
fault("router", "total_without_the_last", steps.total_without_the_last,
      "missing neighbor end", "chosen_sum weights output chosen",
      "flagos-ai/FlagGems issue 5123: weights are stored and loaded again for their"
      " sum")  # fmt: skip
fault("router", "always_renormalized", kernels.router(always=True), "option missing factor",
      "renormalize weights chosen_sum output chosen",
      "lablup/mlxcel PR 391, flashinfer-ai/flashinfer PR 2889: norm_topk_prob is always true",
      "float16")  # fmt: skip
fault("adamw_step", "eps_taken_off", steps.adamw(step_of=steps.eps_taken_off),
      "option missing factor exchanged", "eps size moved update",
      "tensorflow/tensorflow issue 61407: sqrt(v) − epsilon", "float32")  # fmt: skip
fault("adamw_step", "one_less_the_correction",
      steps.adamw(step_of=steps.one_less_the_correction), "missing factor option",
      "beta2 size second moved update step correction",
      "kozistr/AdaBound-tensorflow issue 3: sqrt(1 − bias_correction2)")  # fmt: skip
fault("adamw_step", "beta1_to_the_step", steps.adamw(first=steps.beta1_to_the_step),
      "option factor missing", "beta1 first exp_avg mean step",
      "mila-iqia/blocks PR 1144: the first moment is updated with β₁ᵗ", "float16")  # fmt: skip
fault("adamw_low", "moments_in_bf16", steps.moments_in_bf16, "rounded summed", "",
      "Nerogar/OneTrainer issue 1005: optimizer state stays in bf16")  # fmt: skip
fault("adamw_low", "carry_by_or", kernels.adamw_low(steps.carry_by_or),
      "rounded random missing", "",
      "Nehanth/swarmllm issue 28: the rounding's carry is lost to |")  # fmt: skip

# --- embedding, sum
fault("embedding", "padding_reads_zeros", steps.padding_reads_zeros,
      "option missing limited", "padding_idx rows output weight",
      "pytorch/pytorch issue 53368: the vector at padding_idx is set to zero")  # fmt: skip
fault("embedding", "tiles_of_the_floor", lookup(steps.tiles_of_the_floor), "missing end",
      "rows output input weight",
      "tenstorrent/tt-metal issue 51233: floor for ceil tiles", "float32")  # fmt: skip
fault("embedding", "token_by_token_in_fp16",
      kernels.embedding(total=steps.token_by_token_in_fp16), "summed rounded",
      "weight rows grad input",
      "apache/mxnet issue 17703: gradients are accumulated in fp16", "float16")  # fmt: skip
fault("sum", "first_tile_of_rows", kernels.sum_rows(total=steps.first_tile_of_rows),
      "missing end", "terms output input",
      "tenstorrent/tt-lang issue 381: dims=[0] reduces the first tile-row alone",
      "float16")  # fmt: skip
fault("sum", "grows_in_bf16",
      kernels.sum_rows(total=kernels.added(kernels.bf16, 1)), "summed rounded",
      "terms output input",
      "huggingface/candle PR 3718: bf16 sums stall")  # fmt: skip

# --- sound kernels, written otherwise
sound("rms_norm", "by_a_logarithm", right.rms_by_a_logarithm, "float16")
sound("layer_norm", "of_moments", right.layer_norm_of_moments)
sound("softmax", "of_running_logarithms", right.softmax_of_running_logarithms)
sound("cross_entropy", "down_columns", right.loss_down_columns, "float32")
sound("linear_cross_entropy", "of_five_tokens", right.loss_of_five_tokens)
sound("rope", "by_powers_of_a_unit", right.rope_by_powers_of_a_unit)
sound("swiglu", "by_two_quotients", right.swiglu_by_two_quotients)
sound("geglu", "of_scaled_tails", right.geglu_of_scaled_tails, "float16")
sound("linear", "from_the_last_feature", right.linear_from_the_last_feature)
sound("quantized_linear", "nvfp4_products_in_fp64", right.nvfp4_products_in_fp64)
sound("quantize", "fp4_by_a_search", right.fp4_by_a_search)
sound("router", "of_differences", right.router_of_differences, "float32")
