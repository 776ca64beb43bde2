"""The sixth set of faults of operations that the search for causes was not written against, all as
public threads tell them, each named with its thread; and sound kernels.

What each does wrong and the names that say where were set down before anything ran; their meaning
is benchmarks.unseen's. Every true description of a fault counts, nothing that is merely near it.
All err more than 1.5 × their sound twin on an ordinary input
(`python -m benchmarks.unseen.draw operations.sixth --check`). Where a thread's block is larger than
these sizes (256 threads, 128 rows) the kernel's is smaller.
"""

from __future__ import annotations

from benchmarks.unseen import OperationFault
from benchmarks.unseen.operations import second_kernels as kernels
from benchmarks.unseen.operations import sixth_kernels as wrong
from benchmarks.unseen.operations import sixth_sound as right
from benchmarks.unseen.operations import sixth_steps as steps
from benchmarks.unseen.operations.fifth_steps import linear, nvfp4
from benchmarks.unseen.registering import registering

FAULTS: list[OperationFault] = []
SOUND: list[OperationFault] = []
AGAIN = ("mean_of_the_last_tile", "not_shifted", "probabilities_first_in_bf16",
         "partial_warps")  # fmt: skip
"""Mistakes that an earlier set has in another form: one block of the other inner sum, a tile that
is not shifted, probabilities in bf16 in a loss of logits, a tail that is added twice.
"""

fault, sound = registering(FAULTS, SOUND)


# --- norms
fault("rms_norm", "weight_twice_in_dx", wrong.weight_twice, "missing factor",
      "input inner squares mean_square weight",
      "NVIDIA/Megatron-LM PR 6859: − w · r³ x s / D, s with the weight in it")  # fmt: skip
fault("rms_norm", "squares_not_averaged", wrong.squares_not_averaged, "factor missing",
      "mean_square squares inverse_rms normalized output",
      "tenstorrent/tt-mlir PR 8798: Σ x² where its mean is expected, √N too small",
      "float16")  # fmt: skip
fault("layer_norm", "variances_merged_as_sums",
      kernels.layer_norm(spread=wrong.variances_merged), "factor missing",
      "variance squares deviation centered normalized",
      "Oneflow-Inc/oneflow issue 7471: variances merged in the place of M2")  # fmt: skip
fault("layer_norm", "shifts_of_48_threads", wrong.layer_norm(bias_sum=wrong.tree_of_48),
      "missing", "bias",
      "karpathy/llm.c PR 439: dbias reduced by halves of a block that is no power of two",
      "float32")  # fmt: skip
fault("layer_norm", "mean_of_the_last_tile", wrong.layer_norm(first=wrong.last_tile),
      "missing end", "mean input centered",
      "tenstorrent/tt-metal PR 34760: of Σ dy · γ only the last tile contributes",
      "float16")  # fmt: skip

# --- softmax and losses
fault("softmax", "sum_of_all_rows", wrong.softmax(row_sum=lambda e: e.sum()),
      "neighbor missing factor", "row_sum terms weights",
      "uTensor/uTensor PR 171: the sum is of the whole tensor")  # fmt: skip
fault("softmax", "not_shifted", wrong.softmax(terms=lambda x: x.exp()), "overflow missing",
      "maximum shifted weights row_sum",
      "deeplearning4j/deeplearning4j-examples issue 730, dotnet/machinelearning issue 3648",
      "float32")  # fmt: skip
fault("softmax", "gradient_passed_through", wrong.softmax(gradient=wrong.passed_through),
      "missing", "inner input terms kept",
      "pjreddie/darknet PR 96: the output's gradient is copied")  # fmt: skip
fault("softmax", "strides_not_read", wrong.softmax(read=wrong.as_if_contiguous),
      "neighbor exchanged", "input stride memory transposed contiguous layout",
      "flagos-ai/Torch-FL issue 171: wrong on transposed inputs")  # fmt: skip
fault("cross_entropy", "no_gradient_of_each", wrong.entropy(wrong.none_without_gradient),
      "missing factor option", "input unit_gradient reduction",
      "microsoft/DirectML issue 740: reduction='none' gives zero gradients")  # fmt: skip
fault("cross_entropy", "divided_by_the_batch", wrong.entropy(wrong.over_the_batch), "factor",
      "input unit_gradient loss",
      "fetchai/ledger PR 1580, review: the gradient is divided by the batch once more",
      "float32")  # fmt: skip
fault("cross_entropy", "minus_100_is_a_label",
      wrong.entropy(kept_of=wrong.unless_the_default), "option missing", "ignore_index target",
      "flagos-ai/FlagGems PR 73, review: ignored only where it is not −100")  # fmt: skip
fault("linear_cross_entropy", "smoothing_not_passed",
      kernels.linear_cross_entropy(loss=wrong.without_smoothing), "option missing",
      "label_smoothing", "linkedin/Liger-Kernel issue 243", "float16")  # fmt: skip
fault("linear_cross_entropy", "probabilities_first_in_bf16",
      kernels.linear_cross_entropy(loss=wrong.probabilities_first_in_bf16), "rounded",
      "probabilities unit_gradient input weight logits",
      "fla-org/flash-linear-attention PR 1231: rounded before the label is taken off",
      "float32")  # fmt: skip

# --- rope
fault("rope", "counted_from_minus_one", kernels.rope(frequency=wrong.counted_from_minus_one),
      "factor neighbor", "frequency exponent angle",
      "bkitano/llama-from-scratch issue 8: 10000^(−2 (i − 1) / d)", "float16")  # fmt: skip
fault("rope", "halves_of_two_heads", wrong.rope(joined=wrong.halves_of_two_heads),
      "neighbor exchanged", "output input heads first second straight crossed other back",
      "hpcaitech/ColossalAI issue 6428: two of four outputs read the other tensor")  # fmt: skip
fault("rope", "table_by_halves", wrong.rope(table=wrong.table_by_halves), "exchanged neighbor",
      "cos sin angle frequency",
      "NVIDIA/ngpt issue 10: sines and cosines in turns are unpacked as halves",
      "float32")  # fmt: skip
fault("rope", "sines_of_the_padded_width", wrong.rope(table=wrong.sines_of_the_padded_width),
      "neighbor", "sin crossed back",
      "vllm-project/vllm-ascend issue 12723: sin from half of the padded width")  # fmt: skip

# --- gated units
fault("swiglu", "tanh_by_a_cut_cubic", kernels.swiglu(sigmoid=wrong.clipped_cubic),
      "limited missing rounded", "sigmoid activated gate slope",
      "1bit-MONSTER/1bit-MONSTER issue 1350: saturates from 1.74 on")  # fmt: skip
fault("swiglu", "beyond_the_threads", wrong.beyond_the_threads, "missing end",
      "activated output up gate",
      "1bit-MONSTER/1bit-MONSTER issue 562: `if (tx < n)` for a loop", "float16")  # fmt: skip
fault("swiglu", "slope_of_the_input", wrong.slope_of_the_input, "missing exchanged",
      "slope gate sigmoid",
      "BoltzmannEntropy/interviews.ai issue 15: x (1 − x) with the input for x",
      "float32")  # fmt: skip
fault("geglu", "coefficients_swapped", wrong.geglu(0.044715, 0.7978845608),
      "factor exchanged missing", "inner approximate below activated",
      "huggingface/transformers PR 11514: gelu_fast's two coefficients are swapped")  # fmt: skip
fault("geglu", "tail_without_its_denominator",
      wrong.geglu(sech=wrong.tail_without_its_denominator), "missing factor rounded",
      "slope inner below gate density approximate",
      "tenstorrent/tt-metal issue 55349: the tail drops (1 + e)²", "float32")  # fmt: skip

# --- linear layers
fault("linear", "stale_tile", linear(steps.stale_tile), "end neighbor missing",
      "products output input weight K",
      "modular/modular issue 5700, PR 5701: partial tiles keep what was there")  # fmt: skip
fault("linear", "vectors_of_the_input", linear(steps.vectors_of_the_input),
      "neighbor exchanged", "products output input",
      "Mojo-Numerics-and-Algorithms-group/NuMojo PR 382: A[m, k .. k + w] is not broadcast",
      "float32")  # fmt: skip
fault("quantized_linear", "without_identity_scales", steps.without_identity_scales,
      "scale factor missing", "",
      "ROCm/FlyDSL PR 744: block scales of 0 are 2⁻¹²⁷")  # fmt: skip
fault("quantized_linear", "scales_of_the_wave_before",
      steps.blockwise(steps.scales_of_the_wave_before), "scale factor neighbor", "",
      "NVIDIA/cutlass issue 3596: the preceding wave's scales are applied again")  # fmt: skip
fault("quantized_linear", "scales_by_launched_blocks",
      steps.blockwise(steps.scales_by_launched_blocks), "scale neighbor", "",
      "NVIDIA/cutlass PR 3394: scales by blockIdx where tiles are swizzled")  # fmt: skip
fault("quantized_linear", "clipped_to_448", steps.clipped_to_448, "codes limited scale", "",
      "flashinfer-ai/flashinfer issue 4053: E5M2 is clipped to E4M3's range")  # fmt: skip
fault("quantized_linear", "maximum_of_the_first_tile", steps.maximum_of_the_first_tile,
      "scale end limited", "",
      "AMD-AGI/Primus-Turbo PR 306: of several tiles the first one's maximum")  # fmt: skip

# --- quantizers
fault("quantize", "subnormals_by_two_steps", steps.subnormals_by_two_steps, "codes rounded", "",
      "tenstorrent/tt-metal PR 51975: subnormals round at the wrong bit")  # fmt: skip
fault("quantize", "scale_without_carry", nvfp4(steps.scale_without_carry), "scale", "",
      "intel/auto-round PR 2302: a mantissa that rounds up does not carry")  # fmt: skip
fault("quantize", "scales_not_rebiased", steps.scales_not_rebiased, "scale factor", "",
      "vllm-project/vllm PR 47315: E4M3's scales are 2¹¹² too small")  # fmt: skip
fault("stochastic_round", "seeded_anew", steps.seeded_anew, "random", "",
      "Nerogar/OneTrainer PR 804, review: a generator that is seeded with 0")  # fmt: skip

# --- routers, optimizers
fault("router", "one_expert_over_tokens", steps.one_expert_over_tokens,
      "neighbor factor missing option", "renormalize chosen_sum weights",
      "databricks/megablocks PR 87: top_k = 1 is normalized over tokens")  # fmt: skip
fault("router", "softmax_twice", steps.router(steps.softmax_twice), "missing",
      "weights powers row_sum logits",
      "huggingface/transformers issue 45120: softmax of what is one already",
      "float16")  # fmt: skip
fault("router", "bias_added_and_taken_off", steps.router(steps.bias_added_and_taken_off),
      "rounded", "weights powers chosen row_sum",
      "flashinfer-ai/flashinfer PR 3875: (score + 12) − 12", "float32")  # fmt: skip
fault("adamw_step", "corrections_multiply",
      kernels.adamw_step(correct=steps.corrections_multiply),
      "factor exchanged missing option", "beta step mean size first second moved update",
      "karpathy/convnetjs PR 70: multiplied by 1 − βᵗ", "float32")  # fmt: skip
fault("adamw_step", "corrections_without_the_step",
      kernels.adamw_step(correct=steps.corrections_without_the_step),
      "option factor missing", "step beta mean size moved update",
      "eriklindernoren/ML-From-Scratch issue 35: 1 − β for 1 − βᵗ")  # fmt: skip
fault("adamw_low", "root_in_place", steps.low_steps(root_kept=True), "missing exchanged",
      "second exp_avg_sq size",
      "UselessToys/Ecosystem_WebUI PR 383, review: exp_avg_sq.sqrt_() is the state")  # fmt: skip
fault("adamw_low", "one_taken_off_twice",
      steps.low_steps(corrected=steps.one_taken_off_twice),
      "factor missing option exchanged", "mean size move step beta stored update",
      "kozistr/pytorch_optimizer PR 308: 1 − (1 − βᵗ)")  # fmt: skip

# --- embedding, sum
fault("embedding", "stride_of_whole_tiles", steps.stride_of_whole_tiles, "neighbor",
      "rows weight output",
      "tenstorrent/tt-metal issue 44500: rows are cut by the stride of whole tiles")  # fmt: skip
fault("embedding", "last_tile_not_zeroed", kernels.embedding(total=steps.last_tile_not_zeroed),
      "missing end neighbor", "weight rows",
      "tenstorrent/tt-metal issue 54561: ⌊V / 32⌋ tiles are zeroed", "float16")  # fmt: skip
fault("sum", "last_chunk", kernels.sum_rows(total=steps.last_chunk), "missing end",
      "terms output input",
      "sonots/cumo PR 215: each chunk assigns the result")  # fmt: skip
fault("sum", "partial_warps", kernels.sum_rows(total=steps.butterfly),
      "end neighbor factor missing", "terms output input",
      "flashinfer-ai/flashinfer PR 3880: 180 ones are 192", "float32")  # fmt: skip

# --- sound kernels, written otherwise
sound("rms_norm", "by_the_largest", right.rms_by_the_largest, "float16")
sound("layer_norm", "by_a_shift", right.layer_norm_by_a_shift)
sound("softmax", "of_differences", right.softmax_of_differences, "float16")
sound("cross_entropy", "of_columns", right.loss_of_columns)
sound("linear_cross_entropy", "of_shards", right.loss_of_shards, "float16")
sound("rope", "by_matrices", right.rope_by_matrices)
sound("swiglu", "of_both_signs", right.swiglu_of_both_signs, "float16")
sound("geglu", "in_double", right.geglu_in_double, "float32")
sound("linear", "compensated", right.linear_compensated)
sound("quantized_linear", "blocks_rescaled", right.blocks_rescaled)
sound("quantize", "by_magic", right.codes_by_magic)
sound("stochastic_round", "by_comparison", right.rounded_by_comparison)
sound("router", "one_by_one", right.router_one_by_one, "float16")
sound("adamw_step", "of_torch", right.adamw_of_torch)
sound("adamw_low", "of_a_master", right.adamw_of_a_master)
sound("embedding", "of_sorted", right.embedding_of_sorted, "float16")
sound("sum", "by_ones", kernels.sum_rows(total=right.sum_by_ones))
