"""The seventh set of faults of operations that the search for causes was not written against, all
as public threads tell them, each named with its thread; and sound kernels.

What each does wrong and the names that say where were set down before anything ran; their meaning
is benchmarks.unseen's. Every true description of a fault counts, nothing that is merely near it.
All err more than 1.5 × their sound twin on an ordinary input
(`python -m benchmarks.unseen.draw operations.seventh --check`). Where a thread's block is larger
than these sizes (180 threads, blocks of 1024) the kernel's is smaller.
"""

from __future__ import annotations

from benchmarks.unseen import OperationFault
from benchmarks.unseen.operations import second_kernels as kernels
from benchmarks.unseen.operations import seventh_kernels as wrong
from benchmarks.unseen.operations import seventh_sound as right
from benchmarks.unseen.operations import seventh_steps as steps
from benchmarks.unseen.operations.fifth_steps import linear
from benchmarks.unseen.registering import registering

FAULTS: list[OperationFault] = []
SOUND: list[OperationFault] = []
AGAIN = ("means_of_chunks_added", "one_less_the_sigmoid", "tiles_beyond_the_part",
         "no_scale_of_the_tensor")  # fmt: skip
"""Mistakes that an earlier set has in another form: the mean of chunks' means, sigmoids in bf16 by
other formulas, parts of K that overlap, codes without the scale of the tensor.
"""

fault, sound = registering(FAULTS, SOUND)


# --- norms
fault("rms_norm", "another_row_s_term", wrong.another_row_s_term, "neighbor missing",
      "input inner squares mean_square inverse_rms",
      "BobMcDear/attorch issue 17: a sum a row is broadcast along columns")  # fmt: skip
fault("rms_norm", "partial_warp", wrong.partial_warp, "end missing factor",
      "squares mean_square inverse_rms",
      "flashinfer-ai/flashinfer PR 3879: 8/9 of a row, the floor of threads / 32",
      "float16")  # fmt: skip
fault("rms_norm", "by_the_deviation", wrong.by_the_deviation, "missing",
      "squares mean_square inverse_rms normalized",
      "stanford-cs336/assignment1-basics issue 93: torch.std, and √(std + eps)",
      "float32")  # fmt: skip
fault("layer_norm", "eps_beside_the_count", wrong.layer_norm(wrong.eps_beside_the_count),
      "option missing", "eps variance deviation",
      "xlite-dev/LeetCUDA PR 317: rsqrtf(variance / ((float)K + epsilon))")  # fmt: skip
fault("layer_norm", "squared_for_the_root", wrong.layer_norm(wrong.squared_for_the_root),
      "missing", "variance deviation normalized",
      "131250208/TPlinker-joint-extraction issue 37: (variance + epsilon) ** 2",
      "float16")  # fmt: skip

# --- softmax and losses
fault("softmax", "lanes_without_a_vector", wrong.softmax(wrong.lanes_of_vectors),
      "overflow", "maximum row_sum shifted weights output",
      "gabrieldemarmiesse/torch-mojo-backend PR 319: −∞ − −∞ where rows are narrow")  # fmt: skip
fault("softmax", "total_so_far", wrong.softmax(wrong.total_so_far), "missing",
      "row_sum weights", "xlite-dev/LeetCUDA issue 251: __threadfence() is no grid's barrier",
      "float32")  # fmt: skip
fault("cross_entropy", "label_not_multiplied", wrong.entropy(apart=True), "missing factor",
      "unit_gradient loss input",
      "PaddlePaddle/Paddle issue 9119: − 1 after the product with the loss's gradient")  # fmt: skip
fault("cross_entropy", "divided_by_the_mask", wrong.entropy(divided=True),
      "overflow option missing", "ignore_index lse_square_scale loss target",
      "allenai/OLMo PR 523: z-loss is divided by the mask, not multiplied",
      "float32")  # fmt: skip
fault("linear_cross_entropy", "padded_column_s_label",
      kernels.linear_cross_entropy(loss=wrong.padded_column_s_label), "overflow neighbor",
      "loss target",
      "apple/ml-cross-entropy PR 59: a shard's sentinel meets a padded column",
      "float32")  # fmt: skip
fault("linear_cross_entropy", "means_of_chunks_added", wrong.means_of_chunks_added,
      "factor option", "reduction loss count input weight unit_gradient",
      "NVIDIA-NeMo/Automodel issue 3803: reduction='mean' gives the number of chunks times it",
      "float16")  # fmt: skip

# --- rope
fault("rope", "positions_not_read", wrong.positions_not_read, "missing option",
      "position angle",
      "epfLLM/Megatron-LLM issue 23, NVIDIA/Megatron-LM issue 453", "float16")  # fmt: skip
fault("rope", "positive_exponent", kernels.rope(frequency=wrong.positive_exponent),
      "factor missing option", "frequency exponent angle base",
      "labmlai/annotated_deep_learning_paper_implementations issue 313: no minus sign")  # fmt: skip
fault("rope", "second_half_not_stored", wrong.second_half_not_stored, "missing end",
      "output other back",
      "vllm-project/vllm-ascend PR 7082: half of the results have no store")  # fmt: skip
fault("rope", "halves_of_tables_for_pairs", wrong.halves_of_tables_for_pairs,
      "neighbor option missing", "cos sin angle frequency interleaved",
      "xiangking/ark-nlp issue 47: repeat for repeat_interleave", "float32")  # fmt: skip

# --- gated units
fault("swiglu", "one_added", wrong.one_added, "missing", "up activated output",
      "triton-lang/triton PR 8460, vllm-project/vllm PR 42578, review: up + 1")  # fmt: skip
fault("swiglu", "one_less_the_sigmoid", kernels.swiglu(sigmoid=wrong.one_less_sigmoid),
      "rounded", "sigmoid activated gate slope",
      "skyzh/tiny-llm PR 164: 1 − sigmoid(−x) in bf16 is 0")  # fmt: skip
fault("swiglu", "sigmoid_with_a_floor", kernels.swiglu(sigmoid=wrong.sigmoid_with_a_floor),
      "limited", "sigmoid activated gate slope",
      "sonos/tract PR 2506, issue 2509: the gate times a sigmoid that is held above zero",
      "float16")  # fmt: skip
fault("geglu", "without_the_fourth_power", wrong.geglu(wrong.without_the_fourth_power),
      "missing", "erf below activated gate slope",
      "cnr-isti-vclab/vcglib issue 221: 1 − 1 / q where 1 − 1 / q⁴ is meant",
      "float16")  # fmt: skip
fault("geglu", "table_of_six_lines", wrong.geglu(wrong.table_of_six_lines),
      "rounded missing", "erf below activated output",
      "tenstorrent/tt-metal PR 54504: a table of six segments, gelu(0) = −1.04e-4")  # fmt: skip

# --- linear layers
fault("linear", "transposed_blocks", linear(steps.transposed_blocks), "neighbor missing",
      "products output input weight",
      "tenstorrent/tt-metal PR 53223: the even half of K is of the transposed block")  # fmt: skip
fault("linear", "cut_to_tf32", kernels.linear(steps.cut_to_tf32), "rounded",
      "inputs weights input weight grad_output",
      "tile-ai/tilelang issue 493: no cvt.rna.tf32 before the product", "float32")  # fmt: skip
fault("quantized_linear", "scaled_down_twice", steps.scaled_down_twice, "scale factor", "",
      "meta-pytorch/tritonbench PR 1145: amax / 448 multiplies x, and the product")  # fmt: skip
fault("quantized_linear", "tiles_beyond_the_part", steps.tiles_beyond_the_part,
      "neighbor factor", "",
      "ml-explore/mlx PR 3854: parts of 16 of K in tiles of 32")  # fmt: skip
fault("quantized_linear", "maximum_without_its_sign", steps.maximum_without_its_sign,
      "scale limited", "",
      "NVIDIA/TransformerEngine PR 534: torch.amax is no abs max", "float32")  # fmt: skip
fault("quantized_linear", "zeros_by_infinity", steps.zeros_by_infinity, "overflow scale", "",
      "NVIDIA/Megatron-LM PR 7523: amax = 0 of a gradient's block", "float16")  # fmt: skip

# --- quantizers
fault("quantize", "no_scale_of_the_tensor", steps.without_a_scale_of_the_tensor,
      "scale limited missing", "",
      "kekzl/imp issue 1544: block scales are clamped to UE4M3", "float32")  # fmt: skip
fault("quantize", "truncated_codes", steps.truncated_codes, "codes rounded", "",
      "tile-ai/tilelang PR 1580: FP4 conversions truncate")  # fmt: skip
fault("quantize", "odd_mantissas_cut", kernels.quantize(fp8=steps.odd_mantissas_cut),
      "codes rounded", "",
      "tenstorrent/tt-metal issue 51971: E4M3's odd mantissas are truncated",
      "float16")  # fmt: skip
fault("stochastic_round", "carry_dropped", steps.carry_dropped, "random missing", "",
      "ROCm/llvm-project PR 3275: the mantissa's carry is masked off")  # fmt: skip

# --- routers, optimizers
fault("router", "sixteen_bits_as_float32", steps.router(steps.sixteen_bits_as_float32),
      "neighbor missing", "logits weights shortfall",
      "flashinfer-ai/flashinfer PR 2889, bug B: BF16 logits are read as float32")  # fmt: skip
fault("router", "zeros_outrank", steps.router(steps.zeros_outrank), "missing limited",
      "logits choice chosen shortfall weights",
      "deepspeedai/DeepSpeed PR 7986: negative logits among zeros", "float32")  # fmt: skip
fault("adamw_step", "step_added", steps.step_added, "factor missing", "moved update",
      "pytorch/pytorch issue 11678: param + grad", "float32")  # fmt: skip
fault("adamw_step", "decay_without_the_rate", steps.decay_without_the_rate,
      "option missing factor", "decay lr",
      "modern-fortran/neural-fortran PR 150, review: − weight_decay · param")  # fmt: skip
fault("adamw_step", "betas_the_other_way", steps.betas_the_other_way, "option factor",
      "beta first second new square exp_avg",
      "mila-iqia/blocks issue 1159: β is 1 − β", "float16")  # fmt: skip
fault("adamw_low", "first_beta_to_the_step", steps.first_beta_to_the_step, "option factor",
      "beta first mean exp_avg step",
      "mila-iqia/blocks PR 1144: β₁ᵗ for β₁ in the moment")  # fmt: skip

# --- embedding, sum
fault("embedding", "gathered", kernels.embedding(total=steps.gathered), "missing neighbor",
      "weight rows",
      "ooples/AiDotNet.Tensors PR 894: the gradient is gathered, not added", "float16")  # fmt: skip
fault("embedding", "mask_made_anew", steps.mask_made_anew, "missing neighbor",
      "rows weight output",
      "awslabs/slapo PR 80: the output's mask is of inputs that are masked")  # fmt: skip
fault("sum", "four_blocks", kernels.sum_rows(total=steps.four_blocks), "end missing",
      "terms output input",
      "denizyuret/Knet.jl PR 107: more than the most blocks, and no loop")  # fmt: skip
fault("sum", "scan_for_a_sum", kernels.sum_rows(total=steps.scan_for_a_sum), "missing",
      "terms output input",
      "llvm/llvm-project PR 141825: the last steps are a scan's")  # fmt: skip

# --- sound kernels, written otherwise
sound("rms_norm", "by_newton", right.rms_by_newton)
sound("layer_norm", "by_a_tree", right.layer_norm_by_a_tree, "float32")
sound("softmax", "by_its_logarithm", right.softmax_by_its_logarithm)
sound("cross_entropy", "beside_the_best", right.loss_beside_the_best, "float32")
sound("linear_cross_entropy", "token_by_token", right.loss_token_by_token)
sound("rope", "by_half_angles", right.rope_by_half_angles, "float16")
sound("swiglu", "by_logarithms", right.swiglu_by_logarithms, "float32")
sound("linear", "by_outer_products", right.linear_by_outer_products)
sound("quantized_linear", "scales_after_the_product", right.scales_after_the_product)
sound("quantize", "nvfp4_in_a_table", right.nvfp4_in_a_table, "float16")
sound("router", "from_the_smallest", right.router_from_the_smallest, "float16")
sound("adamw_step", "of_factors", right.adamw_of_factors)
