"""The eighth set of faults of operations that the search for causes was not written against, all
as public threads tell them, each named with its thread; and sound kernels.

What each does wrong and the names that say where were set down before anything ran; their meaning
is benchmarks.unseen's. Every true description of a fault counts, nothing that is merely near it.
All err more than 1.5 × their sound twin on an ordinary input
(`python -m benchmarks.unseen.draw operations.eighth --check`). Where a thread's block is larger
than these sizes (2³¹ numbers, 768 tokens, 1024 columns) the kernel's is smaller.
"""

from __future__ import annotations

from benchmarks.unseen import OperationFault
from benchmarks.unseen.operations import eighth_kernels as wrong
from benchmarks.unseen.operations import eighth_sound as right
from benchmarks.unseen.operations import eighth_steps as steps
from benchmarks.unseen.operations import second_kernels as kernels
from benchmarks.unseen.operations.fifth_steps import linear
from benchmarks.unseen.registering import registering

FAULTS: list[OperationFault] = []
SOUND: list[OperationFault] = []
AGAIN = ("inverse_of_the_inverse", "one_for_the_smoothing", "erf_s_slope_of_tanh", "overwritten",
         "padding_of_the_small_kernel")  # fmt: skip
"""Mistakes that an earlier set has in another form: the variance saved for its inverse, another
mass of other classes, tanh's slope of erf, to nearest in a loop of steps, a padding row that is
always given its gradient.
"""

fault, sound = registering(FAULTS, SOUND)


# --- norms
fault("rms_norm", "shifted_on_store", wrong.shifted_on_store, "rounded", "output",
      "ROCm/aiter issue 5151: fp32 to bf16 is z >> 16, which never cancels")  # fmt: skip
fault("rms_norm", "gamma_not_written", wrong.gamma_not_written, "missing", "weight",
      "paiml/trueno PR 178: grad_gamma_ptr is declared and never written", "float16")  # fmt: skip
fault("rms_norm", "partials_not_zeroed", wrong.partials_not_zeroed, "missing neighbor",
      "weight",
      "flagos-ai/FlagGems PR 1084: partial_buffer = torch.empty(...)")  # fmt: skip
fault("layer_norm", "squares_cut", wrong.layer_norm(spread=wrong.squares_cut), "rounded",
      "squares variance",
      "tenstorrent/tt-metal issue 57408: squares of variances are truncated to bf16",
      "float32")  # fmt: skip
fault("layer_norm", "inverse_of_the_inverse",
      wrong.layer_norm(kept=wrong.inverse_of_the_inverse), "missing",
      "variance deviation normalized",
      "ooples/AiDotNet.Tensors PR 784: 1 / √(saved + eps) of a saved 1 / √")  # fmt: skip

# --- softmax and losses
fault("softmax", "sums_of_other_maxima", wrong.sums_of_other_maxima, "missing",
      "row_sum maximum weights shifted",
      "KarhouTam/cuda-kernels issue 3: lanes' sums of different maxima are added")  # fmt: skip
fault("softmax", "whole_tiles_of_gradients", wrong.whole_tiles_of_gradients, "end missing",
      "input grad",
      "tenstorrent/tt-metal issue 53208, bug 1: height / tile_height is floored",
      "float16")  # fmt: skip
fault("cross_entropy", "one_for_the_smoothing", wrong.entropy(even=wrong.one_for_the_smoothing),
      "option factor", "smoothing",
      "TimDettmers/ConvE issue 55: 1 / C in the place of ε / C", "float32")  # fmt: skip
fault("cross_entropy", "maximum_and_sum", wrong.entropy(penalized=wrong.maximum_and_sum),
      "missing", "lse_square lse log_sum row_sum",
      "linkedin/Liger-Kernel PR 234, description: log e^m Σ = m + d", "float16")  # fmt: skip
fault("linear_cross_entropy", "counts_over_sums",
      wrong.loss_of_linear(total=wrong.counts_over_sums), "missing neighbor",
      "loss reduction mean count",
      "pytorch/pytorch PR 5276, review: partial_sums is reused without a barrier",
      "float32")  # fmt: skip
fault("linear_cross_entropy", "one_of_two_dots", wrong.loss_of_linear(dx=wrong.one_of_two_dots),
      "missing", "input",
      "linkedin/Liger-Kernel PR 1435: two dots interleaved into one accumulator")  # fmt: skip

# --- rope
fault("rope", "position_and_head", wrong.rotary(at=wrong.position_and_head),
      "missing neighbor", "position angle cos sin",
      "elixir-nx/emlx issue 121: the angle is of position + head_index")  # fmt: skip
fault("rope", "first_head_alone", wrong.rotary(store=wrong.first_head_alone), "missing end",
      "output input",
      "paiml/aprender PR 2079: heads 1 .. N − 1 stay 0.0", "float16")  # fmt: skip
fault("rope", "downward", wrong.rotary(store=wrong.downward), "rounded", "output input",
      "amd/IRON issue 180: kernels inherit floor for a rounding mode")  # fmt: skip

# --- gated units
fault("swiglu", "without_the_minus", wrong.without_the_minus, "missing factor",
      "sigmoid activated gate slope",
      "pytorch/torcharrow PR 523: the sigmoid has no minus")  # fmt: skip
fault("swiglu", "recomputed_before_the_gate", wrong.recomputed_before_the_gate, "missing",
      "up activated sigmoid",
      "fla-org/flash-linear-attention PR 1071: the output is recomputed without its gate",
      "float16")  # fmt: skip
fault("geglu", "offsets_too_narrow", wrong.geglu(reach=1 << 12), "missing end",
      "output gate up",
      "unslothai/unsloth PR 3614: offsets beyond 2**31 elements")  # fmt: skip
fault("geglu", "erf_s_slope_of_tanh", wrong.geglu(of_the_other=True), "option missing",
      "approximate gate slope",
      "kulinseth/pytorch PR 284: tanh has no backward pass of its own", "float32")  # fmt: skip

# --- linear layers
fault("linear", "accumulator_not_cleared", linear(steps.accumulator_not_cleared),
      "missing neighbor", "products output",
      "tile-ai/tilelang issue 2936: T.gemm accumulates into what C held")  # fmt: skip
fault("linear", "eight_of_sixteen", linear(steps.eight_of_sixteen), "missing",
      "products output",
      "1bit-MONSTER/1bit-MONSTER issue 678: 16 rows a block, 8 of them computed",
      "float16")  # fmt: skip
fault("linear", "beyond_k", linear(steps.beyond_k), "missing neighbor end",
      "products output input weight",
      "NVIDIA/cutlass issue 3568: tiles beyond gemm_k are accumulated")  # fmt: skip
fault("quantized_linear", "scale_not_advanced", steps.scale_not_advanced,
      "scale neighbor factor", "",
      "sgl-project/sglang PR 20819: scale_step_k is 0 where BLOCK_SIZE_K < group_k")  # fmt: skip
fault("quantized_linear", "first_tile_again", steps.first_tile_again, "neighbor missing", "",
      "1bit-MONSTER/1bit-MONSTER issue 1273: x_tile is filled once for all tiles of K")  # fmt: skip
fault("quantized_linear", "scales_of_even_sixteens", steps.scales_of_even_sixteens,
      "scale neighbor", "",
      "ROCm/FlyDSL PR 932: opsel_a selects row group 0 for odd blocks of 16",
      "float16")  # fmt: skip
fault("quantized_linear", "cast_before_the_scale", steps.cast_before_the_scale, "overflow", "",
      "vllm-project/vllm PR 37135: float2num before global_scale multiplies",
      "float16")  # fmt: skip
fault("quantized_linear", "tail_behind_the_counter", steps.tail_behind_the_counter,
      "end missing", "",
      "NVIDIA/cutlass issue 3536: the guard of the tail reads an inflated counter")  # fmt: skip
fault("quantized_linear", "one_scale_a_warp_tile", steps.one_scale_a_warp_tile,
      "scale neighbor factor", "",
      "ROCm/composable_kernel issue 3771: a single scale across the 16 columns of a tile",
      "float32")  # fmt: skip

# --- quantizers
fault("quantize", "codes_by_the_exact_scale", steps.codes_by_the_exact_scale, "scale", "",
      "kekzl/imp PR 250: inv_sc is exact, the stored scale a power of two")  # fmt: skip
fault("quantize", "halves_read_in_pairs", steps.halves_read_in_pairs, "neighbor missing", "",
      "kekzl/imp PR 567: type 39's nibbles are split, not linear", "float16")  # fmt: skip
fault("quantize", "read_as_fnuz", steps.read_as_fnuz, "codes factor overflow", "",
      "sgl-project/sglang PR 39628: q is written in E4M3FN and read in E4M3FNUZ")  # fmt: skip
fault("stochastic_round", "overwritten", steps.overwritten, "random rounded", "",
      "Nerogar/OneTrainer issue 994: copy_stochastic_, then copy_")  # fmt: skip

# --- routers, optimizers
fault("router", "ties_retired_together", steps.ties_retired_together, "missing neighbor",
      "logits choice chosen shortfall weights",
      "ROCm/aiter PR 4965: tied lanes each retire their own expert")  # fmt: skip
fault("router", "another_branch_at_one_size", steps.another_branch_at_one_size, "missing",
      "weights powers",
      "MetaX-MACA/vLLM-metax issue 270: another activation at one tile of experts and k",
      "float32")  # fmt: skip
fault("adamw_step", "eps_beside_the_inverse_root", steps.eps_beside_the_inverse_root,
      "option missing overflow", "eps size moved update",
      "kozistr/pytorch_optimizer issue 480: rsqrt().add_(eps)")  # fmt: skip
fault("adamw_step", "corrected_in_place", steps.corrected_in_place, "factor missing",
      "exp_avg first",
      "frgfm/holocron issue 1: bias correction is made in place", "float32")  # fmt: skip
fault("adamw_step", "decayed_by_the_step_size", steps.decayed_by_the_step_size,
      "option factor", "decay lr",
      "egg-west/AdamW-pytorch issue 1: w is multiplied by step_size", "float16")  # fmt: skip
fault("adamw_low", "one_noise_for_all_steps", steps.loop_of_steps(noise=steps.one_noise),
      "random", "",
      "karpathy/llm.c PR 432, comment: the seed is the same either way")  # fmt: skip
fault("adamw_low", "counted_by_parameters",
      steps.loop_of_steps(counted=steps.counted_by_parameters),
      "option factor", "step beta mean size first second move update",
      "flashlight/flashlight issue 143: count_++ for each parameter")  # fmt: skip

# --- embedding, sum
fault("embedding", "padding_of_the_small_kernel", steps.padding_of_the_small_kernel, "option",
      "padding_idx",
      "pytorch/pytorch issue 28716: beyond 768 indices the padding row has a gradient",
      "float32")  # fmt: skip
fault("embedding", "rows_beyond_the_launch", steps.lookup(steps.rows_beyond_the_launch),
      "missing end", "output rows",
      "meta-pytorch/torchrec issue 3673: zeros at the end of embeddings over 1024")  # fmt: skip
fault("embedding", "vectors_of_four", steps.lookup(steps.vectors_of_four), "end missing",
      "output rows",
      "NVIDIA-Merlin/HugeCTR issue 391: lookups by vectors of 4 numbers", "float16")  # fmt: skip
fault("sum", "added_by_every_replica", kernels.sum_rows(total=steps.added_by_every_replica),
      "factor", "terms output input",
      "tile-ai/tilelang issue 2408: floor(threads / block_N) × the sum")  # fmt: skip
fault("sum", "columns_of_the_first_tile",
      kernels.sum_rows(total=steps.columns_of_the_first_tile), "neighbor missing",
      "terms output input",
      "tenstorrent/tt-lang issue 381: the first tile's result is duplicated",
      "float32")  # fmt: skip
fault("sum", "strides_of_sixteen", kernels.sum_rows(total=steps.strides_of_sixteen),
      "neighbor missing", "terms output input",
      "tile-ai/tilelang-ascend issue 1683: srcRepStride counts in 32 bytes", "float16")  # fmt: skip

# --- sound kernels, written otherwise
sound("rms_norm", "of_programs", right.rms_of_programs)
sound("layer_norm", "by_projection", right.layer_norm_by_projection, "float32")
sound("softmax", "of_merged_lanes", right.softmax_of_merged_lanes)
sound("cross_entropy", "in_base_two", right.loss_in_base_two)
sound("linear_cross_entropy", "recomputed_by_chunks", right.loss_recomputed_by_chunks, "float16")
sound("rope", "of_complex_numbers", right.rope_of_complex_numbers)
sound("swiglu", "in_base_two", right.swiglu_in_base_two, "float16")
sound("geglu", "of_the_normal_s_tail", right.geglu_of_the_normal_s_tail)
sound("linear", "in_tiles", right.linear_in_tiles, "float32")
sound("quantized_linear", "scaled_in_the_epilogue", right.scaled_in_the_epilogue, "float16")
sound("quantize", "fp4_by_thresholds", right.fp4_by_thresholds)
sound("stochastic_round", "two_halves_of_one_number", right.two_halves_of_one_number)
