"""The thirteenth set of faults of operations that the search for causes was not written against,
all as public threads of training and framework projects tell them, each named with its thread; and
sound kernels.

What each does wrong and the names that say where were set down before anything ran; their meaning
is benchmarks.unseen's. Every true description of a fault counts, nothing that is merely near it.
All err more than 1.5 × their sound twin on an ordinary input
(`python -m benchmarks.unseen.draw operations.thirteenth --check`) but those that STATED names,
whose inputs it says. Where a thread's block or number of ranks is larger than these sizes allow the
kernel's is smaller.
"""

from __future__ import annotations

from benchmarks.unseen import OperationFault
from benchmarks.unseen.operations import second_kernels as kernels
from benchmarks.unseen.operations import thirteenth_kernels as wrong
from benchmarks.unseen.operations import thirteenth_sound as right
from benchmarks.unseen.operations import thirteenth_steps as steps
from benchmarks.unseen.operations.fifth_steps import fp16
from benchmarks.unseen.operations.tenth_kernels import loss_of_linear
from benchmarks.unseen.registering import registering

FAULTS: list[OperationFault] = []
SOUND: list[OperationFault] = []
AGAIN = ("pairs_as_float32", "owner_s_classes", "shrunk_by_the_tokens", "dx_added_in_fp16",
         "weight_by_the_first_loss", "rows_of_the_heads", "one_less_in_bf16", "one_added_in_bf16",
         "gelu_of_the_other_half", "loads_without_a_mask", "without_its_state",
         "seed_without_the_step", "two_groups_of_threads")  # fmt: skip
"""Mistakes that an earlier set has in another form, pass, dtype or operation:
sixteen_bits_as_float32, shards_without_the_target, divided_by_the_batch, dx_added_in_bf16,
first_token_s_gradient, position_and_head, slope_of_low_sigmoid, steps_bf16, silu_of_up, beyond_k,
overwritten, one_noise_for_all_steps and added_by_every_replica.
"""
STATED = {
    "codes_of_the_scale_before": "a scale for each tensor, of which the check has no input",
    "over_tokens_of_one": "routers that choose one expert",
}
"""Inputs on which alone a fault shows."""

fault, sound = registering(FAULTS, SOUND)


# --- norms
fault("layer_norm", "gamma_of_the_row", wrong.gamma_of_the_row, "neighbor missing exchanged",
      "weight bias normalized grad",
      "deepspeedai/DeepSpeed PR 692: betta[pos] and gamma[pos], pos of threadIdx.y")  # fmt: skip
fault("layer_norm", "averaged_over_ranks", wrong.layer_norm(total=wrong.averaged_over_ranks),
      "factor missing", "weight bias",
      "EleutherAI/gpt-neox PR 1259: LayerNorm gradients are averaged over the sequence's"
      " shards", "float16")  # fmt: skip
fault("layer_norm", "lock_released_early", wrong.layer_norm(total=wrong.lock_released_early),
      "missing", "weight bias",
      "meta-pytorch/tritonbench PR 1266: no barrier before the dw/db lock is released")  # fmt: skip
fault("layer_norm", "pairs_as_float32", wrong.layer_norm(parameters=wrong.pairs_as_float32),
      "neighbor missing exchanged end", "weight bias weighted output",
      "openxla/xla PR 10875: oneDNN takes bf16 scale and bias for float32")  # fmt: skip
fault("layer_norm", "first_row_s_alone", wrong.layer_norm(kept=wrong.first_row_s_alone),
      "missing", "inverse deviation normalized input weight grad",
      "tenstorrent/tt-metal issue 48606: of moreh layer_norm's rstd all but the first value is"
      " zero", "float32")  # fmt: skip

fault("rms_norm", "rows_of_a_block", wrong.rms_norm(sums=wrong.rows_of_a_block),
      "neighbor factor missing", "mean_square squares inverse_rms normalized",
      "ml-explore/mlx PR 3792: rows of a block mix their partial reductions")  # fmt: skip
fault("rms_norm", "columns_of_a_rank", wrong.rms_norm(sums=wrong.columns_of_a_rank), "missing",
      "mean_square squares inverse_rms normalized",
      "axonn-ai/yalis PR 36: no all-reduce in a norm whose columns are sharded",
      "float16")  # fmt: skip
fault("rms_norm", "in_the_tile_s_first_row", wrong.rms_norm(gamma=wrong.in_the_tile_s_first_row),
      "missing", "input weight grad",
      "tenstorrent/tt-metal PR 28803: rmsnorm_bw does not broadcast gamma along rows")  # fmt: skip

# --- softmax and losses
fault("softmax", "tails_by_alignment", wrong.tails_by_alignment, "end missing",
      "output kept weights input",
      "pytorch/pytorch PR 36485 and its revert: a row's last numbers are wrong, as many as its"
      " start is beyond an aligned address")  # fmt: skip
fault("softmax", "remainder_of_eight", wrong.softmax(gradient=wrong.remainder_of_eight),
      "end missing", "input grad inner terms kept",
      "deepspeedai/DeepSpeed PR 2709, review: seq_length % 8 != 0 of the kernel for arbitrary"
      " lengths", "float16")  # fmt: skip
fault("softmax", "maximum_overwritten", wrong.softmax(powers=wrong.maximum_overwritten),
      "missing neighbor overflow", "maximum shifted weights row_sum kept output",
      "csarofeen/pytorch issue 71: back-to-back block reductions share their memory")  # fmt: skip
fault("cross_entropy", "owner_s_classes", wrong.entropy(seen=wrong.owner_s_classes), "missing",
      "input grad probabilities",
      "modelscope/ms-swift PR 9947: shards without the target get no gradient")  # fmt: skip
fault("cross_entropy", "next_token_s", wrong.entropy(labels=wrong.next_token_s),
      "neighbor missing", "target own loss",
      "huggingface/transformers issue 47394, PR 37830: labels are shifted twice",
      "float16")  # fmt: skip
fault("cross_entropy", "shrunk_by_the_tokens", wrong.entropy(divided=True), "factor",
      "input grad unit",
      "ROCm/TransformerEngine PR 336: without reduce_loss gradients are 1/N as large",
      "float32")  # fmt: skip
fault("linear_cross_entropy", "dx_added_in_fp16", loss_of_linear(added=fp16),
      "summed rounded", "input logits grad",
      "NVIDIA/Megatron-LM PR 2739: d_hidden is accumulated in 16 bits", "float16")  # fmt: skip
fault("linear_cross_entropy", "weight_by_the_first_loss", wrong.weight_by_the_first_loss,
      "factor neighbor missing", "weight loss",
      "linkedin/Liger-Kernel PR 1298: grad_weight is multiplied by grad_output[0]")  # fmt: skip

# --- rope
fault("rope", "as_if_heads_came_first", wrong.rope(placed=wrong.as_if_heads_came_first),
      "neighbor missing exchanged", "positions angle cos sin",
      "deepspeedai/DeepSpeed PR 2782: seq_id as if query and key were not transposed")  # fmt: skip
fault("rope", "rows_of_the_heads", wrong.rope(placed=wrong.rows_of_the_heads),
      "neighbor missing exchanged", "positions angle cos sin",
      "deepspeedai/DeepSpeed PR 8052, review: orig_shape[-2] is taken for the sequence, and is"
      " the heads'", "float16")  # fmt: skip

# --- gated units
fault("swiglu", "one_less_in_bf16", wrong.swiglu_slope(wrong.one_less_in_bf16), "rounded",
      "slope sigmoid gate",
      "tenstorrent/tt-metal PR 55727: s · (1 − s) in bf16 is 0 from 6.25 on")  # fmt: skip
fault("geglu", "one_added_in_bf16", wrong.geglu(below=wrong.one_added_in_bf16), "rounded",
      "below slope erf gate up tanh",
      "tenstorrent/tt-metal issue 38643: gelu_bw composes 1 + erf of bf16 steps")  # fmt: skip
fault("geglu", "gelu_of_the_other_half", wrong.geglu(exchanged=True), "exchanged missing",
      "gate up activated output",
      "ooples/AiDotNet.Tensors PR 46, review: geglu_forward activates the value",
      "float16")  # fmt: skip

# --- linear layers
fault("linear", "gathered_after_the_product", steps.linear(dx=steps.gathered_after_the_product),
      "neighbor missing exchanged", "input weight grad",
      "huggingface/nanotron issue 46, PR 172: grad_input is gathered, and the same on every"
      " rank")  # fmt: skip
fault("linear", "never_called", steps.linear(dw=steps.never_called), "missing", "weight",
      "NVIDIA/TransformerEngine PR 1488: by its indent wgrad is not called", "float16")  # fmt: skip
fault("linear", "a_slice_of_own_parts", steps.linear(dx=steps.a_slice_of_own_parts), "missing",
      "input grad",
      "NVIDIA-NeMo/Automodel PR 1260: the all-gather's backward pass is a slice, without a"
      " reduce-scatter", "float32")  # fmt: skip
fault("linear", "loads_without_a_mask", steps.linear(product=steps.loads_without_a_mask),
      "neighbor end missing", "products output input weight",
      "stanford-futuredata/stk PR 12: loads of SDD where K % BLOCK_K != 0")  # fmt: skip
fault("quantized_linear", "transposed_codes_of_zeros",
      steps.blocks_of_128(steps.transposed_codes_of_zeros), "missing codes", "input weight",
      "modelscope/mcore-bridge issue 125: _columnwise_data is still of zeros")  # fmt: skip
fault("quantized_linear", "scales_by_rows_of_four",
      steps.blocks_of_128(steps.scales_by_rows_of_four), "scale neighbor missing end", "",
      "pytorch/ao PR 4229: scales of 128x128 are not padded to a multiple of 4",
      "float16")  # fmt: skip
fault("quantized_linear", "padding_of_scale_one", steps.padding_of_scale_one,
      "scale neighbor end missing", "",
      "AMD-AGI/Primus-Turbo PR 383: padded scales are 2⁰ and weigh what lies there")  # fmt: skip
fault("quantized_linear", "gradients_without_the_instruction",
      steps.gradients_without_the_instruction, "missing codes", "input weight grad",
      "NVIDIA/TransformerEngine PR 3281: stochastic rounding gives zeros without"
      " cvt.rs")  # fmt: skip
fault("quantized_linear", "codes_of_the_scale_before", steps.codes_of_the_scale_before,
      "scale factor", "",
      "NVIDIA/TransformerEngine issue 1047: the cached weight's scale is"
      " updated")  # fmt: skip

# --- quantizers
fault("quantize", "signed_exponents", steps.signed_exponents, "scale missing", "",
      "pytorch/FBGEMM PR 5706: biased exponents of 128 and more are negative")  # fmt: skip
fault("stochastic_round", "without_its_state", steps.without_its_state, "random rounded", "",
      "pytorch/FBGEMM PR 3908: a null state, and nearest_rounding_vector")  # fmt: skip

# --- routers, optimizers
fault("router", "local_experts", steps.router(heard=steps.local_experts), "missing",
      "weights logits grad chosen powers",
      "huggingface/transformers PR 48205: a rank's score gradient covers its local experts"
      " only")  # fmt: skip
fault("router", "paired_by_their_order", steps.router(stored=steps.paired_by_their_order),
      "neighbor missing exchanged", "weights output chosen",
      "huggingface/transformers PR 45473: flattened scores of all experts beside indices of"
      " slots", "float16")  # fmt: skip
fault("router", "over_tokens_of_one", steps.router(total_of=steps.over_tokens_of_one),
      "missing neighbor factor option", "chosen_sum weights renormalize output chosen",
      "databricks/megablocks PR 87: scores.max(dim=-1), normalized along tokens",
      "float32")  # fmt: skip
fault("adamw_step", "decay_forgotten", steps.decay_forgotten, "option missing",
      "weight_decay decayed update param",
      "PaddlePaddle/Paddle PR 30130: weight_decay is not applied under AMP", "float16")  # fmt: skip
fault("adamw_step", "rate_of_the_rate_before", steps.rate_of_the_rate_before,
      "factor option missing", "step lr moved update mean size beta",
      "PennyLaneAI/pennylane PR 1929, review: the step size is defined recursively")  # fmt: skip
fault("adamw_low", "seed_without_the_step", steps.seed_without_the_step, "random", "",
      "Nerogar/OneTrainer PR 804, review: the seed does not depend on the step")  # fmt: skip

# --- embedding, sum
fault("embedding", "shards_taken_for_halves", steps.shards_taken_for_halves,
      "neighbor missing", "rows output input weight",
      "tensorflow/tensorflow issue 19265: \"div\" of shards of 4 and 2 rows")  # fmt: skip
fault("sum", "two_groups_of_threads", kernels.sum_rows(total=steps.two_groups_of_threads),
      "factor", "terms output input",
      "pytorch/pytorch issue 170360: compiled sums are twice as large on MPS")  # fmt: skip

# --- sound kernels, written otherwise
sound("rms_norm", "of_tiles", right.rms_of_tiles)
sound("layer_norm", "merged", right.layer_norm_merged, "float16")
sound("softmax", "in_powers_of_two", right.softmax_in_powers_of_two)
sound("cross_entropy", "of_the_others", right.loss_of_the_others, "float32")
sound("linear_cross_entropy", "of_blocks_of_classes", right.loss_of_blocks_of_classes)
sound("rope", "by_half_angles", right.rope_by_half_angles, "float16")
sound("swiglu", "by_logarithms", right.swiglu_by_logarithms)
sound("linear", "of_outer_products", right.linear_of_outer_products, "float16")
sound("quantized_linear", "mxfp8_by_added_exponents", right.mxfp8_by_added_exponents)
sound("quantize", "mxfp8_mantissas_by_hand", right.mxfp8_mantissas_by_hand)
sound("router", "of_logarithms", right.router_of_logarithms)
sound("adamw_step", "by_interpolation", right.adamw_by_interpolation, "float32")
