"""Routers and optimizer steps with one planted fault each, and some without one that are written
differently.
"""

import torch

from tests.operations.hand_written import OperationKernel, low


def router(fault=""):
    """A router with one fault."""

    def kernel(logits, k, *, renormalize):
        rows = logits.float()
        if fault == "logits_fp8":
            rows = rows.to(torch.float8_e4m3fn).float()
        if fault == "logits_cut":
            rows = (rows * 4).trunc() / 4
        if fault == "no_shift":
            powers = rows.exp()
        elif fault == "shared_maximum":
            powers = (rows - rows.detach().amax()).exp()
        elif fault == "maximum_from_zero":
            powers = (rows - rows.detach().amax(-1, keepdim=True).clamp_min(0)).exp()
        else:
            powers = (rows - rows.detach().amax(-1, keepdim=True)).exp()
        weights = powers / powers.sum(-1, keepdim=True)
        if fault == "choice_low":
            weights = weights.bfloat16().float()
        if fault == "sigmoid":
            weights = torch.sigmoid(rows)
        if fault == "one_expert_left_out":
            weights = torch.cat([weights[:, :-1], 0 * weights[:, -1:]], -1)
        weights, indices = weights.topk(k, -1)
        if fault == "same_expert_twice":
            indices, weights = indices[:, :1].expand(-1, k), weights[:, :1].expand(-1, k)
        if fault == "weights_of_other_experts":
            weights = weights.flip(-1)
        over_tokens = fault == "one_over_tokens" and k == 1
        total = weights.sum(0 if over_tokens else -1, keepdim=True)
        if fault == "sum_detached":
            total = total.detach()
        if (renormalize or fault == "always_renormalized") and fault != "never_renormalized":
            weights = weights / total
        if fault == "last_token_stale" and len(rows) > 1:
            weights = torch.cat([weights[:-1], weights[-2:-1]])
            indices = torch.cat([indices[:-1], indices[-2:-1]])
        return weights.to(logits.dtype), indices

    return kernel


def router_sorted(logits, k, *, renormalize):
    """By a full sort, in fp64."""
    found, indices = torch.softmax(logits.double(), -1).sort(dim=-1, descending=True)
    found, indices = found[:, :k], indices[:, :k]
    return ((found / found.sum(-1, keepdim=True)) if renormalize else found).float(), indices


def router_backwards(logits, k, *, renormalize):
    """The least of the chosen first, indices of int32."""
    found, indices = torch.softmax(logits.float(), -1).topk(k, -1)
    found = found / found.sum(-1, keepdim=True) if renormalize else found
    return found.flip(-1).to(logits.dtype), indices.flip(-1).int()


def adamw(fault=""):
    """A step of AdamW with one fault."""

    def kernel(param, grad, exp_avg, exp_avg_sq, *, step, lr, beta1, beta2, eps, weight_decay):
        wide = grad.float()
        if fault == "constants":
            beta1, beta2 = 0.9, 0.999
        if fault == "beta_low":
            beta2 = float(torch.tensor(beta2).bfloat16())
        if fault == "decay_in_gradient":
            wide = wide + weight_decay * param
        first = beta1 * exp_avg + (1 - beta1) * wide
        square = low(wide * wide) if fault == "square_low" else wide * wide
        if fault == "square_fp16":
            square = (wide * wide).half().float()
        second = beta2 * exp_avg_sq + (1 - beta2) * square
        first = low(first) if fault == "first_low" else first
        second = low(second) if fault == "second_low" else second
        count = step - 1 if fault == "counts_from_zero" else step
        mean, size = first / (1 - beta1**count or 1), second / (1 - beta2**count or 1)
        if fault == "no_correction":
            mean, size = first, second
        size = (size + eps).sqrt() if fault == "eps_inside" else size.sqrt() + eps
        move = lr * mean / size
        keep = 1 - lr * weight_decay
        if fault in ("no_decay", "decay_in_gradient"):
            keep = 1.0
        if fault == "decay_without_rate":
            keep = 1 - weight_decay
        moved = param * keep - move
        if fault == "param_low":
            moved = low(low(param) * keep - move)
        if fault == "not_applied":
            moved = torch.where(move.abs() < param.abs() * 2**-9, param * keep, moved)
        if fault == "tail_dropped":
            whole = len(param) // 4 * 4
            moved = torch.cat([moved[:whole], param[whole:]])
        return moved, first, second

    return kernel


def adamw_in_double(param, grad, exp_avg, exp_avg_sq, *, step, lr, beta1, beta2, eps, weight_decay):
    """In fp64."""
    g, m, v = grad.double(), exp_avg.double(), exp_avg_sq.double()
    m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
    size = (v / (1 - beta2**step)).sqrt() + eps
    p = param.double() * (1 - lr * weight_decay) - lr * m / (1 - beta1**step) / size
    return p.float(), m.float(), v.float()


def adamw_fused(param, grad, exp_avg, exp_avg_sq, *, step, lr, beta1, beta2, eps, weight_decay):
    """As torch's fused kernel: lerp, addcmul, addcdiv."""
    wide = grad.float()
    m = exp_avg.lerp(wide, 1 - beta1)
    v = (exp_avg_sq * beta2).addcmul(wide, wide, value=1 - beta2)
    size = v.sqrt() / (1 - beta2**step) ** 0.5 + eps
    p = (param * (1 - lr * weight_decay)).addcdiv(m, size, value=-lr / (1 - beta1**step))
    return p, m, v


ROUTER_FAULTS = (
    "logits_fp8",
    "logits_cut",
    "no_shift",
    "maximum_from_zero",
    "shared_maximum",
    "choice_low",
    "sigmoid",
    "one_expert_left_out",
    "same_expert_twice",
    "weights_of_other_experts",
    "sum_detached",
    "always_renormalized",
    "never_renormalized",
    "last_token_stale",
    "one_over_tokens",
)
ADAMW_FAULTS = (
    "constants",
    "beta_low",
    "decay_in_gradient",
    "square_low",
    "square_fp16",
    "first_low",
    "second_low",
    "counts_from_zero",
    "no_correction",
    "eps_inside",
    "no_decay",
    "decay_without_rate",
    "param_low",
    "not_applied",
    "tail_dropped",
)
STEPS = (
    *(OperationKernel("router", fault, router(fault)) for fault in ROUTER_FAULTS),
    *(OperationKernel("adamw_step", fault, adamw(fault)) for fault in ADAMW_FAULTS),
    OperationKernel("router", "plain", router(), faulty=False),
    OperationKernel("router", "sorted", router_sorted, faulty=False),
    OperationKernel("router", "backwards", router_backwards, faulty=False),
    OperationKernel("adamw_step", "plain", adamw(), faulty=False),
    OperationKernel("adamw_step", "in_double", adamw_in_double, faulty=False),
    OperationKernel("adamw_step", "fused", adamw_fused, faulty=False),
)


def stored_cut(x):
    """fp32 to bf16 toward zero."""
    return (x.contiguous().view(torch.int32) & -65536).view(torch.float32)


def stored_at_random(x, noise):
    """fp32 to bf16 by 16 random bits below the last that is kept."""
    return ((x.contiguous().view(torch.int32) + noise) & -65536).view(torch.float32)


def adamw_low(fault=""):
    """Steps of AdamW on bf16 weights, rounded stochastically, with one fault."""

    def kernel(param, grads, exp_avg, exp_avg_sq, *, step, weight_decay, **options):
        one = adamw(fault if fault in ADAMW_FAULTS else "")
        x, first, second = param.float(), exp_avg, exp_avg_sq
        seed = torch.randint(2**16, x.shape, dtype=torch.int32)
        for number, grad in enumerate(grads, 1 if fault == "step_stands_still" else step):
            number = step if fault == "step_stands_still" else number
            decay = 0.0 if fault == "decay_first" else weight_decay
            start = low(x * (1 - options["lr"] * weight_decay)) if fault == "decay_first" else x
            moved, first, second = one(
                start, grad, first, second, step=number, weight_decay=decay, **options
            )
            noise = torch.randint(2**16, x.shape, dtype=torch.int32)
            if fault == "same_seed_every_step":
                noise = seed
            if fault == "one_number_for_all":
                noise = noise[:1, :1].expand_as(noise)
            if fault == "few_bits":
                noise = noise & 0b1110_0000_0000_0000
            if fault == "noise_of_half":
                noise = noise // 2
            if fault == "nearest":
                moved = low(moved)
            elif fault == "cut":
                moved = stored_cut(moved)
            elif fault == "update_rounded":
                moved = low(start + low(moved - start))
            else:
                moved = stored_at_random(moved, noise)
            if fault == "every_other_step" and number % 2:
                moved = x
            x = moved
        return x.bfloat16(), first, second

    return kernel


def adamw_low_master(param, grads, exp_avg, exp_avg_sq, *, step, **options):
    """A master in fp64."""
    x, m, v = param.double(), exp_avg.double(), exp_avg_sq.double()
    lr, beta1, beta2 = options["lr"], options["beta1"], options["beta2"]
    for number, grad in enumerate(grads.double(), step):
        m, v = beta1 * m + (1 - beta1) * grad, beta2 * v + (1 - beta2) * grad * grad
        size = (v / (1 - beta2**number)).sqrt() + options["eps"]
        x = x * (1 - lr * options["weight_decay"]) - lr * m / (1 - beta1**number) / size
    return x.bfloat16(), m.float(), v.float()


def adamw_low_kahan(param, grads, exp_avg, exp_avg_sq, *, step, **options):
    """Bf16 weights and what each step lost, in bf16 too (arXiv 2010.06192)."""
    x, lost, first, second = param.float(), torch.zeros(param.shape), exp_avg, exp_avg_sq
    for number, grad in enumerate(grads, step):
        moved, first, second = adamw()(x, grad, first, second, step=number, **options)
        due = moved - x + lost
        risen = low(x + due)
        lost, x = low(due - (risen - x)), risen
    return x.bfloat16(), first, second


ADAMW_LOW_FAULTS = (
    "nearest",
    "cut",
    "same_seed_every_step",
    "one_number_for_all",
    "few_bits",
    "noise_of_half",
    "update_rounded",
    "decay_first",
    "every_other_step",
    "step_stands_still",
    "constants",
    "first_low",
    "second_low",
    "counts_from_zero",
    "no_correction",
    "eps_inside",
    "no_decay",
    "tail_dropped",
)
STEPS_LOW = (
    *(OperationKernel("adamw_low", fault, adamw_low(fault)) for fault in ADAMW_LOW_FAULTS),
    OperationKernel("adamw_low", "at_random", adamw_low(), faulty=False),
    OperationKernel("adamw_low", "master_in_double", adamw_low_master, faulty=False),
    OperationKernel("adamw_low", "kahan", adamw_low_kahan, faulty=False),
)
