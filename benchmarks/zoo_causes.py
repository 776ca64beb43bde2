"""What is wrong in every planted fault of the zoo of operations, and where: written before the
search for causes was tuned to it.
"""

from __future__ import annotations

from benchmarks.unseen import OperationFault
from tests.operations.zoo_operations import KERNELS

RIGHT = """
rms_norm squares_low: summed rounded @ squares mean_square
rms_norm tail_dropped: end @ squares mean_square
rms_norm eps_outside: option @ eps mean_square inverse_rms
rms_norm eps_fixed: option @ eps
rms_norm inverse_low: rounded @ inverse_rms
rms_norm neighbors_inverse: neighbor @ inverse_rms
rms_norm weight_low: rounded @ normalized weight
rms_norm out_cut: rounded @ output
rms_norm backward_inverse_low: rounded @ inverse_rms
rms_norm no_inner: missing @ squares mean_square inverse_rms
rms_norm inner_without_weight: missing option factor @ squares mean_square inverse_rms weight
rms_norm weight_grad_low: summed @ weight
rms_norm weight_grad_one_block: end @ weight
rms_norm weight_grad_whole_tiles: end @ weight
layer_norm mean_low: rounded @ mean
layer_norm one_pass_low: rounded summed @ squares variance
layer_norm unbiased: factor @ variance squares
layer_norm tail_dropped: end @ squares variance
layer_norm eps_fixed: option @ eps
layer_norm inverse_low: rounded @ inverse_deviation
layer_norm out_cut: rounded @ output
layer_norm no_mean_term: missing @ mean
layer_norm weight_grad_low: summed @ weight
layer_norm bias_grad_low: summed @ bias
layer_norm bias_grad_parts_low: summed rounded @ bias
softmax no_shift: missing overflow @ maximum largest shifted input
softmax maximum_from_zero: limited overflow @ maximum largest shifted input
softmax shared_maximum: missing overflow @ maximum largest shifted input
softmax first_block_maximum: end overflow @ maximum largest shifted input
softmax shifted_low: rounded @ shifted
softmax sum_low: summed @ row_sum summed weights
softmax tail_dropped: end @ row_sum summed weights
softmax reciprocal_low: rounded @ reciprocal
softmax out_cut: rounded @ output kept
softmax inner_low: rounded @ inner
softmax inner_sum_low: summed rounded @ inner terms
softmax no_inner: missing @ inner
cross_entropy no_shift: missing overflow @ maximum largest shifted input
cross_entropy maximum_from_zero: limited overflow @ maximum largest shifted input
cross_entropy shared_maximum: missing overflow @ maximum largest shifted input
cross_entropy sum_low: summed @ row_sum summed weights
cross_entropy tail_dropped: end @ row_sum summed weights
cross_entropy lse_low: rounded @ lse
cross_entropy log_probabilities_low: rounded @ log_probabilities
cross_entropy probabilities_low: rounded @ probabilities
cross_entropy smoothing_forward_only: option missing @ label_smoothing smoothing
cross_entropy smoothing_of_others: option factor @ label_smoothing smoothing
cross_entropy no_z_gradient: option missing @ lse_square_scale z_loss
cross_entropy mean_of_all: factor option @ count reduction times loss
cross_entropy ignored_gradient: option missing @ ignore_index seen
cross_entropy wrong_target_at_the_end: neighbor @ T
cross_entropy loss_cut: rounded @ loss
swiglu tail_lost: rounded @ sigmoid
swiglu tail_dropped: end @ D activated
swiglu clamped: limited @ activated
swiglu out_cut: rounded @ output
swiglu slope_positive: limited @ slope
swiglu activation_as_slope: missing factor @ slope
swiglu saved_low: rounded @ activated
swiglu swapped_gradients: exchanged @ grad_gate
swiglu sigmoid_low: rounded @ sigmoid
swiglu exp_overflows: overflow missing @ exponential sigmoid gate
geglu tail_lost: rounded @ below
geglu tail_dropped: end @ D activated
geglu clamped: limited @ activated
geglu out_cut: rounded @ output
geglu slope_positive: limited @ slope
geglu activation_as_slope: missing factor @ slope
geglu saved_low: rounded @ activated
geglu swapped_gradients: exchanged @ grad_gate
geglu tanh_always: option @ approximate
geglu erf_always: option @ approximate
geglu inner_low: rounded @ inner
geglu sigmoid_form: factor option @ below approximate activated
rope base_fixed: option @ base
rope halves_always: option @ interleaved
rope half_exponent: factor option @ frequency base power exponent
rope frequencies_low: rounded @ frequency
rope positions_low: rounded @ positions
rope positions_ignored: option missing neighbor @ positions
rope angles_low: rounded @ angle
rope tail_dropped: end @ D
rope out_cut: rounded @ output
rope same_turn_back: missing factor @ gradient grad_input
linear sum_low: summed @ products output grad_
linear sum_low_in_dx: summed @ input
linear sum_low_in_dw: summed @ weight
linear split_sum_low: summed rounded @ products output
linear products_low: rounded @ products
linear tail_dropped: end @ products K
linear fp8_in_dw: rounded @ weight
linear out_cut: rounded @ output
linear last_row_stale: neighbor @ T
linear small_gradients_lost: limited missing @ grad_output gradient
embedding rows_low: rounded @ rows output
embedding indices_low: rounded neighbor @ rows output input weight
embedding next_row: neighbor end @ T
embedding last_wins: missing summed neighbor @ weight rows
embedding added_low: summed @ rows weight
embedding blocks_added_low: summed @ rows weight
embedding mean: factor @ weight rows
embedding last_token_lost: end @ T rows
embedding tail_dropped: end @ D rows
embedding padding_counted: option @ padding_idx
embedding padding_counted_of_many: option @ padding_idx
embedding gradient_cut: rounded @ grad_weight
sum running_low: summed @ terms output
sum blocks_low: summed @ terms output
sum ranks_low: summed @ terms output
sum tail_dropped: end @ T terms
sum mean: factor @ output
sum terms_cut: rounded @ terms
sum running_fp16: summed @ terms output
sum last_column_stale: neighbor @ D
sum out_cut: rounded @ output
sum gradient_of_mean: factor @ grad_input
router logits_fp8: rounded @ logits
router logits_cut: rounded @ logits
router no_shift: missing overflow @ maximum largest logits
router maximum_from_zero: limited overflow @ maximum largest logits
router shared_maximum: missing overflow @ maximum largest logits
router choice_low: rounded @ weights shortfall
router sigmoid: missing option factor @ weights row_sum
router one_expert_left_out: end @ E weights logits
router same_expert_twice: neighbor exchanged end @ K weights
router weights_of_other_experts: neighbor exchanged @ K weights
router sum_detached: missing @ chosen_sum
router always_renormalized: option @ renormalize
router never_renormalized: option @ renormalize
router last_token_stale: neighbor @ T
router one_over_tokens: neighbor missing factor @ chosen_sum weights
adamw_step constants: option @ beta
adamw_step beta_low: option rounded @ beta2
adamw_step decay_in_gradient: option @ weight_decay decayed
adamw_step square_low: rounded @ square
adamw_step square_fp16: rounded @ square
adamw_step first_low: rounded @ first exp_avg
adamw_step second_low: rounded @ second exp_avg_sq
adamw_step counts_from_zero: option @ step
adamw_step no_correction: option factor @ step mean size corrected update
adamw_step eps_inside: option @ eps size
adamw_step no_decay: option @ weight_decay
adamw_step decay_without_rate: option factor @ weight_decay decayed
adamw_step param_low: rounded @ param stored decayed
adamw_step not_applied: limited missing @ moved
adamw_step tail_dropped: end @ N
adamw_low nearest: random rounded @ stored param
adamw_low cut: random rounded @ stored param
adamw_low same_seed_every_step: random @ step
adamw_low one_number_for_all: random @ element row column
adamw_low few_bits: random
adamw_low noise_of_half: random
adamw_low update_rounded: rounded random @ move stored update
adamw_low decay_first: rounded random @ decayed stored param
adamw_low every_other_step: missing option @ step stored
adamw_low step_stands_still: option @ step
adamw_low constants: option @ beta
adamw_low first_low: rounded @ first exp_avg
adamw_low second_low: rounded @ second exp_avg_sq
adamw_low counts_from_zero: option @ step
adamw_low no_correction: option factor @ step mean size corrected
adamw_low eps_inside: option @ eps size
adamw_low no_decay: option @ weight_decay
adamw_low tail_dropped: end @ C
linear_cross_entropy weight_grad_low: summed @ weight
linear_cross_entropy input_grad_low: summed @ input
linear_cross_entropy logits_fp8: rounded @ logits
linear_cross_entropy no_shift: missing overflow @ maximum largest shifted
linear_cross_entropy maximum_from_zero: limited overflow @ maximum largest shifted
linear_cross_entropy shared_maximum: missing overflow @ maximum largest shifted
linear_cross_entropy sum_low: summed @ row_sum summed weights
linear_cross_entropy tail_of_vocabulary: end @ row_sum summed weights V
linear_cross_entropy lse_low: rounded @ lse
linear_cross_entropy probabilities_low: rounded @ probabilities
linear_cross_entropy smoothing_forward_only: option missing @ label_smoothing smoothing
cross_entropy smoothing_of_others: option factor @ label_smoothing smoothing
linear_cross_entropy ignored_gradient: option missing @ ignore_index seen
linear_cross_entropy mean_of_all: factor option @ count reduction times loss
linear_cross_entropy means_of_chunks: factor @ count loss
linear_cross_entropy last_chunk_left_out: end @ T unit_gradient
linear_cross_entropy gradient_taken_as_1: missing factor option @ grad_loss gradient
quantize other_element: codes
quantize blocks_of_16: scale
quantize scale_of_row: scale
quantize scale_of_neighbor: scale
quantize no_tensor_scale: scale
quantize scale_up: scale
quantize scale_down: scale
quantize no_subnormals: codes
quantize zero_blocks_nan: scale codes overflow
quantize ties_up: codes
quantize cut: codes
stochastic_round a_number_a_row: random
stochastic_round a_number_a_column: random
stochastic_round one_number: random
stochastic_round zero_seed: random rounded
stochastic_round half_the_range: random
stochastic_round two_bits: random
stochastic_round three_bits: random
stochastic_round nearest: random rounded
stochastic_round sum_of_two: random
stochastic_round after_nearest: random rounded
stochastic_round up_by_sign: random
stochastic_round positions_repeat: random
stochastic_round same_every_call: random
stochastic_round four_bits: random
"""

_QUANTIZED = {
    "cut": "codes",
    "tail_dropped": "end",
    "accumulated": "summed rounded",
    "weight_gradient": "rounded",
    "gradient_not": "scale",
    "no_subnormals": "codes",
    "stale": "scale",
    "fixed": "scale",
    "scale": "scale",
    "no_tensor": "scale",
    "saturates": "codes limited",
    "fnuz": "scale codes factor",
    "zero_groups": "scale codes overflow",
}
"""Of quantized linear layers, by how their names begin."""


def _faults() -> tuple[OperationFault, ...]:
    right = {}
    for line in RIGHT.strip().splitlines():
        name, _, rest = line.partition(": ")
        what, _, where = rest.partition("@")
        right[tuple(name.split())] = (frozenset(what.split()), tuple(where.split()))
    found = []
    for kernel in KERNELS:
        if not kernel.faulty:
            continue
        known = right.get((kernel.op, kernel.name))
        if known is None:
            (words,) = [w for start, w in _QUANTIZED.items() if kernel.name.startswith(start)]
            known = (frozenset(words.split()), ())
        found.append(OperationFault(kernel.op, kernel.name, kernel.fn, *known))
    return tuple(found)


FAULTS = _faults()
"""As `operation_causes` takes them."""
