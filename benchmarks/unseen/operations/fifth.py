"""The fifth set of faults of operations that the search for causes was not written against, all as
public threads tell them, each named with its thread; and sound kernels.

What each does wrong and the names that say where were set down before anything ran; their meaning
is benchmarks.unseen's. Every true description of a fault counts, nothing that is merely near it.
All err more than 1.5 × their sound twin on an ordinary input
(`python -m benchmarks.unseen.draw operations.fifth --check`).
"""

from __future__ import annotations

from benchmarks.unseen import OperationFault
from benchmarks.unseen.operations import fifth_kernels as wrong
from benchmarks.unseen.operations import fifth_sound as right
from benchmarks.unseen.operations import fifth_steps as steps
from benchmarks.unseen.operations import second_kernels as kernels
from benchmarks.unseen.registering import registering

FAULTS: list[OperationFault] = []
SOUND: list[OperationFault] = []
AGAIN = ("eps_of_the_dtype", "accumulated_in_fp16", "blocks_of_32_beyond_the_first",
         "state_replayed", "away_from_zero_by_4_bits", "stored_by_one_seed")  # fmt: skip
"""Mistakes that an earlier set has in another form: eps of at least 1e-4, sums in bf16, blocks of
64, random numbers that a row shares (twice), and random numbers of 3 bits.
"""

fault, sound = registering(FAULTS, SOUND)


# --- norms
fault("rms_norm", "eps_of_the_dtype", wrong.eps_of_the_dtype, "option factor",
      "eps mean_square inverse_rms",
      "pytorch/pytorch issue 189581: rows of small variance, eps = finfo(bf16).eps")  # fmt: skip
fault("rms_norm", "weight_before_the_norm", wrong.weight_first, "missing exchanged factor option",
      "squares mean_square inverse_rms weight normalized scaled",
      "vllm-project/tpu-inference PR 3040, review: y = (x·w) · rsqrt(mean((x·w)²))")  # fmt: skip
fault("rms_norm", "gradient_without_the_one", wrong.gradient_without_the_one,
      "missing factor option", "weight grad_normalized grad_input",
      "NVIDIA/TransformerEngine PR 67, review: backward kernels take γ for 1 + γ",
      "float16")  # fmt: skip
fault("layer_norm", "padding_in_the_variance",
      kernels.layer_norm(spread=wrong.padded_variance), "end missing factor",
      "variance squares deviation centered",
      "triton-lang/triton issue 9838, linkedin/Liger-Kernel issue 518: padding")  # fmt: skip
fault("layer_norm", "another_column_s_gamma", wrong.another_column_s_gamma,
      "neighbor exchanged missing", "weight normalized bias",
      "deepspeedai/DeepSpeed PR 692: γ and β by threadIdx.y where x is meant",
      "float32")  # fmt: skip
fault("layer_norm", "half_of_gamma", wrong.half_of_gamma, "missing end factor",
      "weight bias output",
      "tenstorrent/tt-metal issue 49902: of float32 γ and β half a tile is never written",
      "float32")  # fmt: skip

# --- softmax and losses
fault("softmax", "last_tile_unshifted", wrong.softmax(row_sum=wrong.last_tile_unshifted),
      "missing factor end overflow", "row_sum terms weights shifted maximum",
      "tenstorrent/tt-metal issue 51278, items 12 and 13, PR 56074")  # fmt: skip
fault("softmax", "diagonal_of_the_jacobian", wrong.softmax(gradient=wrong.diagonal_only),
      "missing", "inner input terms kept",
      "deeplearning4j/libnd4j issue 440: dy · y (1 − y), the terms i ≠ j are missing")  # fmt: skip
fault("softmax", "exponential_by_its_bits", wrong.softmax(exponential=wrong.schraudolph),
      "rounded", "weights shifted row_sum terms",
      "sonos/tract PR 2677: Schraudolph's exp, 5.9 % off")  # fmt: skip
fault("cross_entropy", "row_sum_of_two_ranks", wrong.entropy(sums=lambda total: 2 * total),
      "factor missing", "row_sum lse weights probabilities loss",
      "NVIDIA/Megatron-LM issue 7452, 2: gathered logits summed again, + log TP")  # fmt: skip
fault("cross_entropy", "smoothing_of_one_shard",
      wrong.entropy(others=wrong.of_the_first_shard, even=2), "option factor end missing",
      "label_smoothing others smooth loss unit_gradient input",
      "NVIDIA/Megatron-LM issue 7464: the mean of one rank's log probabilities",
      "float32")  # fmt: skip
fault("cross_entropy", "shards_without_the_target", wrong.entropy(seen=wrong.in_the_target_s_shard),
      "missing end", "probabilities unit_gradient input lse",
      "modelscope/ms-swift PR 9947: other shards of the vocabulary get no gradient",
      "float16")  # fmt: skip
fault("linear_cross_entropy", "dx_of_one_shard", wrong.dx_of_one_shard, "missing end",
      "input logits weight",
      "apple/ml-cross-entropy PR 42: each rank returns its own part of dX")  # fmt: skip
fault("linear_cross_entropy", "z_loss_unasked",
      kernels.linear_cross_entropy(loss=wrong.z_loss_unasked), "missing option factor",
      "lse loss logits row_sum", "allenai/OLMo-core PR 702: 1e-4 · lse² with z-loss off",
      "float32")  # fmt: skip

# --- rope
fault("rope", "halves_for_pairs", wrong.halves_for_pairs, "option exchanged neighbor",
      "interleaved output",
      "nntile/nntile PR 382, review: rotated pairs are concatenated, not interleaved")  # fmt: skip
fault("rope", "turned_backwards", wrong.turned_backwards, "factor missing exchanged",
      "sin angle position frequency crossed back",
      "trymirai/lalamo PR 268, review: x · cos − rotate_half(x) · sin", "float16")  # fmt: skip
fault("rope", "base_not_passed", wrong.base_not_passed, "option factor",
      "base frequency exponent angle", "meta-pytorch/torchtune issue 1341", "float32")  # fmt: skip

# --- gated units
fault("swiglu", "rows_to_row_0", wrong.rows_to_row_0, "neighbor missing end",
      "gate up",
      "ByteDance-Seed/Triton-distributed issue 180: output pointers without the row")  # fmt: skip
fault("swiglu", "silu_of_up", wrong.silu_of_up, "exchanged missing",
      "gate up activated sigmoid", "ml-explore/mlx-lm PR 767: silu(x) · gate")  # fmt: skip
fault("swiglu", "slope_through_a_quotient", wrong.slope_through_a_quotient, "overflow missing",
      "gate sigmoid slope", "huggingface/candle issue 2082: silu(x) / x at 0",
      "float32")  # fmt: skip
fault("swiglu", "slope_of_infinities", wrong.sigmoid_of_steps, "overflow", "gate sigmoid slope",
      "Lightning-AI/lightning-thunder PR 2624, huggingface/candle PR 1722: exp = ∞")  # fmt: skip
fault("geglu", "gelu_of_both", wrong.gelu_of_both, "missing",
      "up activated output", "kakaobrain/trident PR 101: GELU over state and gate")  # fmt: skip
fault("geglu", "tanh_beyond_one", wrong.geglu(wrong.tanh_beyond_one), "rounded factor limited",
      "inner below activated approximate slope gate output",
      "Tencent/ncnn issue 6978: fp32's coefficients in fp16, tanh(9) = 1.04",
      "float16")  # fmt: skip
fault("geglu", "tanh_of_infinities", wrong.geglu(wrong.tanh_of_exponentials), "overflow",
      "inner below activated approximate slope gate output",
      "pytorch/executorch issue 22323: ∞ / ∞ for gates below −13")  # fmt: skip

# --- linear layers
fault("linear", "parts_of_k_overlap", steps.linear(steps.parts_that_overlap),
      "neighbor end factor missing", "products output input weight",
      "ROCm/aiter issue 5286: parts of K that are no whole blocks are read twice")  # fmt: skip
fault("linear", "accumulated_in_fp16",
      steps.linear(steps.accumulated_in_fp16, steps.accumulated_in_fp16),
      "summed overflow", "products output input weight",
      "PaddlePaddle/Paddle PR 42851: cuBLAS's compute type is fp16", "float16")  # fmt: skip
fault("quantized_linear", "scales_of_the_first_slice", steps.scales_of_the_first_slice,
      "scale neighbor factor", "",
      "NVIDIA/cutlass PR 3615: blocks counted from the slice's own start")  # fmt: skip
fault("quantized_linear", "beyond_e5m2", steps.beyond_e5m2, "scale codes overflow", "",
      "kohya-ss/musubi-tuner issue 192: E5M2's largest number taken for 98304")  # fmt: skip
fault("quantized_linear", "raw_scale_bytes", steps.raw_scale_bytes, "scale factor", "",
      "ml-explore/mlx issue 3762: fewer than 8 outputs, scales' bytes not decoded")  # fmt: skip

# --- quantizers
fault("quantize", "maximum_onto_one", kernels.quantize(scale=steps.maximum_onto_one), "scale", "",
      "vllm-project/vllm PR 53110: 2^floor(log2 amax), small elements are lost")  # fmt: skip
fault("quantize", "blocks_of_32_beyond_the_first", steps.nvfp4(steps.of_32_beyond_the_first),
      "scale neighbor", "",
      "ml-explore/mlx issue 3557: NVFP4's scales over 32 beyond the first simdgroup")  # fmt: skip
fault("quantize", "subnormal_scales_as_normal",
      steps.nvfp4(divisor=steps.subnormal_as_normal), "scale", "",
      "local-inference-lab/b12x PR 388: E4M3's subnormal scales are decoded as normal")  # fmt: skip
fault("quantize", "tensor_s_scale_left_out",
      steps.nvfp4(divisor=steps.without_the_tensor_s_scale), "scale factor missing", "",
      "jax-ml/jax PR 30467: the global scale is not applied to the input")  # fmt: skip
fault("stochastic_round", "state_replayed", steps.state_replayed, "random", "",
      "intel/torch-xpu-ops PR 5128, review: rand_init inside the strided loop")  # fmt: skip
fault("stochastic_round", "away_from_zero_by_4_bits", steps.away_from_zero, "random rounded", "",
      "graphcore-research/gfloat PR 36: on average farther from zero")  # fmt: skip

# --- routers, optimizers
fault("router", "experts_beyond_the_warp", kernels.router(choose=steps.below_32),
      "end limited missing", "shortfall chosen weights logits indices",
      "kekzl/imp PR 2056: one expert a thread")  # fmt: skip
fault("router", "never_renormalized", steps.never_renormalized, "option missing factor",
      "renormalize chosen_sum weights", "pytorch/torchtitan issue 1448")  # fmt: skip
fault("adamw_step", "decay_after_the_step", steps.decay_after_the_step,
      "exchanged missing option factor", "decay param moved update lr",
      "bitsandbytes-foundation/bitsandbytes issue 2010, PR 2040: (p − step) · (1 − lr · wd)",
      "float32")  # fmt: skip
fault("adamw_step", "betas_cut_to_bf16", steps.betas_cut_to_bf16, "option factor rounded",
      "beta first second exp_avg new square",
      "tenstorrent/tt-metal issue 55935: 0.999 is 0.9961")  # fmt: skip
fault("adamw_step", "counter_in_bf16", steps.counter_in_bf16, "option factor limited rounded",
      "step beta size mean first second moved update",
      "pytorch/ao PR 4915, deepspeedai/DeepSpeed PR 8496: 256 + 1 is 256", "float32")  # fmt: skip
fault("adamw_low", "decay_in_bf16", steps.low_loop(kernels.bf16), "option rounded missing",
      "decay", "Nerogar/OneTrainer issue 996: no weight decay is applied")  # fmt: skip

# --- embedding, sum
fault("embedding", "mean_of_the_tokens", kernels.embedding(total=steps.mean_of_the_tokens),
      "factor missing", "weight rows",
      "flagos-ai/FlagGems PR 3900, review: the sum's gradient is divided by the count")  # fmt: skip
fault("embedding", "stored_by_one_seed", kernels.embedding(total=steps.stored_by_one_seed),
      "random rounded", "weight",
      "karpathy/llm.c PR 601: dW is rounded stochastically, its seeds are shared")  # fmt: skip
fault("sum", "tail_counted_twice", kernels.sum_rows(total=steps.tail_counted_twice),
      "end neighbor factor missing", "terms output input",
      "pytorch/pytorch issue 83149: 432 for 390, elements are added twice", "float32")  # fmt: skip
fault("sum", "first_face_unwritten", kernels.sum_rows(total=steps.first_face_unwritten),
      "missing end factor", "output terms",
      "tenstorrent/tt-metal issue 17551: the first 16 sums are 0")  # fmt: skip

# --- sound kernels, written otherwise
sound("rms_norm", "of_lanes", right.rms_of_lanes, "float16")
sound("layer_norm", "by_welford", right.layer_norm_by_welford)
sound("softmax", "in_base_two", right.softmax_in_base_two, "float16")
sound("cross_entropy", "recomputed", right.loss_recomputed, "float16")
sound("linear_cross_entropy", "in_tiles", right.loss_in_tiles)
sound("rope", "by_tables", right.rope_by_tables, "float16")
sound("geglu", "by_logarithms", right.geglu_by_logarithms)
sound("linear", "in_uneven_parts", right.linear_in_uneven_parts, "float32")
sound("quantized_linear", "mx_tiles", right.mx_tiles)
sound("quantize", "nearest_in_a_table", right.nearest_in_a_table)
sound("stochastic_round", "by_fractions", right.rounded_by_fractions)
sound("router", "of_the_chosen", right.router_of_the_chosen, "float32")
sound("adamw_low", "compensated", right.adamw_compensated)
sound("embedding", "by_products", right.embedding_by_products)
sound("sum", "with_remainders", kernels.sum_rows(total=right.sum_with_remainders))
