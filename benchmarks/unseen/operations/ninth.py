"""The ninth set of faults of operations that the search for causes was not written against, all
as public threads tell them, each named with its thread; and sound kernels.

What each does wrong and the names that say where were set down before anything ran; their meaning
is benchmarks.unseen's. Every true description of a fault counts, nothing that is merely near it.
All err more than 1.5 × their sound twin on an ordinary input
(`python -m benchmarks.unseen.draw operations.ninth --check`). Where a thread's block is larger
than these sizes the kernel's is smaller.
"""

from __future__ import annotations

from benchmarks.unseen import OperationFault
from benchmarks.unseen.operations import ninth_kernels as wrong
from benchmarks.unseen.operations import ninth_sound as right
from benchmarks.unseen.operations import ninth_steps as steps
from benchmarks.unseen.operations import second_kernels as kernels
from benchmarks.unseen.operations.fifth_steps import linear
from benchmarks.unseen.registering import registering

FAULTS: list[OperationFault] = []
SOUND: list[OperationFault] = []
AGAIN = ("half_a_step_on", "half_added_last", "every_mantissa_up", "one_seed_for_four_sections",
         "multiplied_by_the_size")  # fmt: skip
"""Mistakes that an earlier set has in another form: frequencies of another index, a sigmoid by
tanh, scales rounded up, random numbers that rows share, a correction that multiplies.
"""

fault, sound = registering(FAULTS, SOUND)


# --- norms
fault("rms_norm", "vectors_beyond_the_row", wrong.rms_norm(store=wrong.vectors_beyond_the_row),
      "neighbor end missing", "output weight normalized",
      "ROCm/aiter issue 5044, PR 5290: the next row's column 0 is written")  # fmt: skip
fault("rms_norm", "shuffled_down", wrong.rms_norm(squares=wrong.shuffled_down), "missing",
      "squares mean_square inverse_rms normalized output",
      "CFD-GO/TCLB PR 287: __shfl_down has the sum in lane 0, and all lanes use theirs",
      "float16")  # fmt: skip
fault("rms_norm", "gradient_read_for_rows", wrong.rms_norm(read=wrong.gradient_read_for_rows),
      "missing exchanged", "input inner squares mean_square normalized inverse_rms",
      "ggml-org/ggml issue 1491: an aliased buffer for one of dz and x", "float32")  # fmt: skip
fault("layer_norm", "blocks_of_the_floor", wrong.layer_norm(sums=wrong.blocks_of_the_floor),
      "end missing", "weight bias",
      "BobMcDear/attorch issue 18: the last block of rows is dropped")  # fmt: skip
fault("layer_norm", "eps_of_zero", wrong.layer_norm(eps_of=wrong.zero), "option missing",
      "eps variance deviation",
      "VeriSilicon/TIM-VX PR 589: eps of layernorm is always 0", "float16")  # fmt: skip
fault("layer_norm", "variance_in_fp16", wrong.layer_norm(spread=wrong.as_fp16),
      "rounded overflow", "variance deviation",
      "deepspeedai/DeepSpeed issue 581: variance + eps is converted to float16",
      "float32")  # fmt: skip

# --- softmax and losses
fault("softmax", "padded_with_zeros", wrong.softmax(fill=0.0), "end missing overflow",
      "row_sum maximum weights shifted kept output",
      "iree-org/iree PR 21433, issue 21468: tensors are padded with 0s, not with −∞")  # fmt: skip
fault("softmax", "multiplied_again", wrong.softmax(gradient=wrong.multiplied_again), "missing",
      "input grad kept inner terms",
      "pocketpy/cTensor PR 31: the whole product with the Jacobian is multiplied again",
      "float16")  # fmt: skip
fault("softmax", "twice", wrong.softmax(gradient=wrong.twice), "factor",
      "input grad kept inner terms",
      "markroxor/fromscratchtoml issue 65: the gradient is off by a factor of two",
      "float32")  # fmt: skip
fault("cross_entropy", "own_after_the_gradient",
      wrong.entropy(own_of=wrong.own_after_the_gradient), "neighbor missing", "own loss",
      "linkedin/Liger-Kernel PR 1206: gradients in place, ordered by a barrier")  # fmt: skip
fault("cross_entropy", "inverted_where_smoothed",
      wrong.entropy(masked=wrong.inverted_where_smoothed), "option missing",
      "smoothing ignore_index target loss input",
      "awslabs/sockeye issue 200: where(ignore, label_dist, 0) for 1 − ignore",
      "float16")  # fmt: skip
fault("linear_cross_entropy", "target_not_initialized",
      wrong.loss_of_linear(ignored=wrong.of_the_token_before), "option missing",
      "ignore_index loss target",
      "PrimeIntellect-ai/prime-rl PR 1525, review: target_logits = torch.empty")  # fmt: skip
fault("linear_cross_entropy", "small_ones_filtered",
      wrong.loss_of_linear(slope=wrong.small_ones_filtered), "missing limited rounded",
      "probabilities unit_gradient input weight logits",
      "apple/ml-cross-entropy issue 14: the classifier's gradients are filtered",
      "float32")  # fmt: skip

# --- rope
fault("rope", "rotated_in_place", wrong.rotary(in_place=True), "missing neighbor",
      "output back first second other input",
      "vllm-project/vllm PR 48872: an in-place rotation reads what has been written")  # fmt: skip
fault("rope", "ones_beyond_the_table", wrong.rotary(tables=wrong.ones_beyond_the_table),
      "end missing", "cos sin",
      "vllm-project/vllm issue 55204: sin is padded with 1", "float16")  # fmt: skip
fault("rope", "half_a_step_on", wrong.rotary(frequency=wrong.half_a_step_on),
      "factor missing option", "frequency exponent angle base",
      "stanford-cs336/assignment1-basics issue 22: (2 k − 1) / d for 2 (k − 1) / d")  # fmt: skip
fault("rope", "fast_sines", wrong.rotary(tables=wrong.fast_sines), "rounded", "cos sin angle",
      "kekzl/imp PR 1325: __sinf of angles that are not reduced", "float32")  # fmt: skip

# --- gated units
fault("swiglu", "half_added_last", wrong.swiglu(sigmoid=wrong.half_added_last), "rounded",
      "sigmoid activated gate slope",
      "sonos/tract PR 2620: p / q + 0.5 cancels on the tails", "float32")  # fmt: skip
fault("swiglu", "difference_for_the_product",
      wrong.swiglu(slope=wrong.difference_for_the_product), "missing", "slope gate sigmoid",
      "sausheong/gonn issue 8: σ − (1 − σ) for σ (1 − σ)", "float16")  # fmt: skip
fault("swiglu", "pairs_of_both_halves", wrong.pairs_of_both_halves, "neighbor exchanged",
      "gate up activated output sigmoid",
      "vllm-project/vllm PR 29273: halves where gates and ups lie in turns")  # fmt: skip
fault("geglu", "without_the_input", wrong.geglu(tanh_act=wrong.without_the_input), "missing",
      "approximate gate activated below output",
      "tensorflow/tfjs PR 8224, review: `* x` is missing from gelu_new", "float16")  # fmt: skip
fault("geglu", "slope_of_the_activated", wrong.geglu(slope_at=wrong.the_activated), "missing",
      "slope gate below",
      "ooples/AiDotNet.Tensors PR 106, review: derivatives of the post-activation")  # fmt: skip

# --- linear layers
fault("linear", "zeroed_by_the_first_part", linear(steps.zeroed_by_the_first_part), "missing",
      "products output input weight",
      "tile-ai/tilelang issue 350: blockIdx.z = 0 writes zeros, and all add")  # fmt: skip
fault("linear", "offset_by_k", linear(steps.offset_by_k), "neighbor missing",
      "products output input weight",
      "openvinotoolkit/openvino PR 36105: input1_offset1 is TILE_K × K, not TILE_K × N",
      "float16")  # fmt: skip
fault("linear", "rows_in_whole_sixteens", linear(steps.rows_in_whole_sixteens), "end missing",
      "products output",
      "NVIDIA/Fuser issue 3963: wrong where M is no multiple of 16", "float32")  # fmt: skip
fault("quantized_linear", "trailing_scale_not_applied",
      steps.blocks_of_128(steps.trailing_scale_not_applied), "scale end missing", "",
      "pytorch/FBGEMM issue 6159: the trailing block's scale is never applied")  # fmt: skip
fault("quantized_linear", "scales_by_the_tile", steps.blocks_of_128(steps.scales_by_the_tile),
      "scale neighbor", "",
      "tile-ai/TileOPs PR 1666, review: scale_a[m, kk] where block_k is not 128",
      "float16")  # fmt: skip
fault("quantized_linear", "divisor_for_the_multiplier", steps.divisor_for_the_multiplier,
      "scale factor", "",
      "modular/modular issue 6600: the global scale is stored as a divisor")  # fmt: skip
fault("quantized_linear", "scales_read_linearly", steps.scales_read_linearly,
      "scale neighbor", "",
      "vllm-project/vllm issue 50084: 4 × 4 swizzled scales, a linear consumer",
      "float32")  # fmt: skip

# --- quantizers
fault("quantize", "every_mantissa_up", steps.mx(scale=steps.every_mantissa_up), "scale", "",
      "tile-ai/tilelang-metax PR 101, review: any mantissa increments E8M0's exponent")  # fmt: skip
fault("quantize", "last_group_s", steps.mx(codes=steps.last_group_s), "neighbor missing codes",
      "", "1bit-MONSTER/1bit-MONSTER issue 153: the index lacks the group, the last one survives",
      "float16")  # fmt: skip
fault("stochastic_round", "one_stream_shifted", steps.one_stream_shifted, "random", "",
      "AMReX-Codes/amrex PR 5662: engines are one stream, shifted by one for each")  # fmt: skip

# --- routers, optimizers
fault("router", "both_rows_of_a_group", steps.router(chosen=steps.both_rows_of_a_group),
      "neighbor missing", "choice chosen shortfall weights logits",
      "sgl-project/sgl-kernel-xpu PR 295: a wrong index where expert_num = 16")  # fmt: skip
fault("router", "next_slot_s", steps.router(written=steps.next_slot_s), "neighbor",
      "weights output chosen",
      "vllm-project/vllm issue 48895: routing weights of a neighbor's slot", "float32")  # fmt: skip
fault("adamw_step", "inverse_of_beta2", steps.adamw(second=steps.inverse_of_beta2),
      "factor option", "second beta2 exp_avg_sq",
      "LiyuanLucasLiu/RAdam issues 55 and 69: 1 / β₂ v", "float32")  # fmt: skip
fault("adamw_step", "root_of_the_correction",
      steps.adamw(size_of=steps.root_of_the_correction), "factor missing option",
      "size step beta2 moved update",
      "pytorch/pytorch PR 23737, review: the correction has a root of its own")  # fmt: skip
fault("adamw_step", "multiplied_by_the_size",
      steps.adamw(apply=steps.multiplied_by_the_size), "missing", "size moved update",
      "oracle/tribuo PR 401: multiplies by the squared gradients' accumulator",
      "float16")  # fmt: skip
fault("adamw_low", "rows_for_numbers", steps.rows_for_numbers, "end missing", "",
      "hpcaitech/ColossalAI PR 633: params.size(0) for params.numel()")  # fmt: skip
fault("adamw_low", "remainder_without_a_borrow", steps.remainder_without_a_borrow,
      "rounded random missing", "",
      "NVIDIA/apex issue 1842: bf16 and its lower 16 bits are put together again")  # fmt: skip
fault("adamw_low", "one_seed_for_four_sections", steps.one_seed_for_four_sections, "random", "",
      "karpathy/llm.c PR 597: the same seed for all sections of the parameters")  # fmt: skip

# --- embedding, sum
fault("embedding", "same_face_again", steps.embedding(read=steps.same_face_again), "neighbor",
      "rows output input",
      "tenstorrent/tt-metal issue 51233: the offset goes back to the face before")  # fmt: skip
fault("embedding", "ones_for_the_padding", steps.embedding(padded=1.0), "option",
      "padding_idx", "PaddlePaddle/Paddle PR 35346, review: 1.0 where 0.0 is meant",
      "float32")  # fmt: skip
fault("sum", "first_32_of_48", kernels.sum_rows(total=steps.first_32_of_48), "missing",
      "terms output input",
      "tile-ai/tilelang issue 2542: 16 of 48 lanes are dropped", "float16")  # fmt: skip
fault("sum", "without_barriers", kernels.sum_rows(total=steps.without_barriers), "missing",
      "terms output input",
      "Mantevo/miniFE issue 13: no __syncthreads() in the last warp")  # fmt: skip

# --- sound kernels, written otherwise
sound("rms_norm", "of_merged_blocks", right.rms_of_merged_blocks)
sound("layer_norm", "of_a_corrected_mean", right.layer_norm_of_a_corrected_mean)
sound("softmax", "from_the_end", right.softmax_from_the_end, "float16")
sound("cross_entropy", "of_the_others", right.loss_of_the_others)
sound("rope", "of_two_tables", right.rope_of_two_tables, "float32")
sound("swiglu", "by_one_quotient", right.swiglu_by_one_quotient)
sound("geglu", "of_two_branches", right.geglu_of_two_branches, "float16")
sound("linear", "of_stripes", right.linear_of_stripes)
sound("quantized_linear", "products_of_codes", right.products_of_codes)
sound("quantize", "fp8_by_steps", right.fp8_by_steps)
sound("router", "by_sorting", right.router_by_sorting, "float16")
sound("adamw_step", "by_lerp", right.adamw_by_lerp)
