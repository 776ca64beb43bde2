"""Softmax and cross-entropy with one planted fault each, and some without one that are written
differently.
"""

import torch

from tests.operations.hand_written import OperationKernel, by_hand, cut, low, summed_low


def softmax(fault=""):
    """Softmax whose two passes are written out."""

    def kernel(input, dim):
        def forward(x):
            rows = x.float()
            largest = rows.amax(dim, keepdim=True)
            if fault == "no_shift":
                largest = 0 * largest
            if fault == "maximum_from_zero":
                largest = largest.clamp_min(0)
            if fault == "first_block_maximum":
                largest = rows[:, : min(64, rows.shape[1])].amax(dim, keepdim=True)
            shifted = rows - largest
            if fault == "shifted_low":
                shifted = low(shifted)
            weights = shifted.exp()
            total = weights.sum(dim, keepdim=True)
            if fault == "weights_low":
                weights = low(weights)
            if fault == "sum_low":
                total = summed_low(weights, 1)[:, None]
            if fault == "tail_dropped":
                total = weights[:, : weights.shape[1] // 32 * 32].sum(dim, keepdim=True)
            out = weights * low(1 / total) if fault == "reciprocal_low" else weights / total
            out = cut(out) if fault == "out_cut" else out.to(x.dtype)
            return out, out

        def backward(out, grad):
            y, dy = out.float(), grad.float()
            inner = (y * dy).sum(dim, keepdim=True)
            if fault == "inner_low":
                inner = low(inner)
            if fault == "inner_sum_low":
                inner = summed_low(low(y * dy), 1)[:, None]
            if fault == "no_inner":
                inner = 0 * inner
            return ((y * (dy - inner)).to(grad.dtype),)

        return by_hand(forward, backward, input)

    return kernel


def online(input, dim):
    """One pass over blocks of 48 scores, rescaled as the maximum rises."""
    rows = input.float()
    largest = torch.full_like(rows[:, :1], -torch.inf)
    total = torch.zeros_like(largest)
    for part in rows.split(48, dim):
        risen = torch.maximum(largest, part.detach().amax(dim, keepdim=True))
        total = total * (largest - risen).exp() + (part - risen).exp().sum(dim, keepdim=True)
        largest = risen
    return ((rows - largest).exp() / total).to(input.dtype)


def in_base_two(input, dim):
    """By exp2."""
    rows = input.float() * 1.4426950408889634
    weights = torch.exp2(rows - rows.detach().amax(dim, keepdim=True))
    return (weights / weights.sum(dim, keepdim=True)).to(input.dtype)


def cross_entropy(fault=""):
    """Cross-entropy whose two passes are written out, its gradient kept from the forward pass."""

    def kernel(input, target, *, ignore_index, reduction, label_smoothing, lse_square_scale):
        def forward(x):
            rows, tokens = x.float(), torch.arange(len(target))
            right = target.clamp_min(0)
            largest = rows.amax(1, keepdim=True)
            if fault == "no_shift":
                largest = 0 * largest
            if fault == "maximum_from_zero":
                largest = largest.clamp_min(0)
            weights = (rows - largest).exp()
            total = weights.sum(1, keepdim=True)
            if fault == "sum_low":
                total = summed_low(weights, 1)[:, None]
            if fault == "tail_dropped":
                total = weights[:, : x.shape[1] // 32 * 32].sum(1, keepdim=True)
            lse = largest + total.log()
            lse = low(lse) if fault == "lse_low" else lse
            loss = (1 - label_smoothing) * (lse[:, 0] - rows[tokens, right])
            loss = loss + label_smoothing * (lse - rows).mean(1) + lse_square_scale * lse[:, 0] ** 2
            p = (low(rows - lse) if fault == "log_probabilities_low" else rows - lse).exp()
            p = low(p) if fault == "probabilities_low" else p
            smoothing = 0.0 if fault == "smoothing_forward_only" else label_smoothing
            unit = p - smoothing / x.shape[1]
            unit[tokens, right] -= 1 - smoothing
            if fault != "no_z_gradient":
                unit = unit + 2 * lse_square_scale * lse * p
            seen = target != ignore_index
            count = 1
            if reduction == "mean":
                count = len(target) if fault == "mean_of_all" else int(seen.sum())
            if fault != "ignored_gradient":
                unit = torch.where(seen[:, None], unit, 0.0)
            loss = torch.where(seen, loss, 0.0) / count
            if fault == "wrong_target_at_the_end":
                unit[-1], loss[-1] = unit[-2], loss[-2]
            loss = loss if reduction == "none" else loss.sum()
            loss = cut(loss.reshape(-1)).reshape(loss.shape) if fault == "loss_cut" else loss
            return loss.to(x.dtype), (unit / count).to(x.dtype)

        def backward(unit, grad):
            scale = grad.float()[:, None] if grad.ndim else grad.float()
            return ((unit.float() * scale).to(input.dtype),)

        return by_hand(forward, backward, input)

    return kernel


def upcast_in_double(input, target, *, ignore_index, reduction, label_smoothing, lse_square_scale):
    """In fp64, z-loss added."""
    logits = input.double()
    own = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    loss = torch.nn.functional.cross_entropy(logits, target, reduction=reduction, **own)
    if lse_square_scale:
        loss = loss + lse_square_scale * logits.logsumexp(-1).square()
    return loss.float()


def in_chunks(input, target, *, ignore_index, reduction, label_smoothing):
    """Eight tokens at a time, in fp32."""
    own = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    own["reduction"] = "none" if reduction == "none" else "sum"
    losses = [
        torch.nn.functional.cross_entropy(x.float(), t, **own)
        for x, t in zip(input.split(8), target.split(8), strict=True)
    ]
    if reduction == "none":
        return torch.cat(losses)
    return torch.stack(losses).sum() / (target != ignore_index).sum()


SOFTMAX_FAULTS = (
    "no_shift",
    "maximum_from_zero",
    "first_block_maximum",
    "shifted_low",
    "sum_low",
    "tail_dropped",
    "reciprocal_low",
    "out_cut",
    "inner_low",
    "inner_sum_low",
    "no_inner",
)
CROSS_ENTROPY_FAULTS = (
    "no_shift",
    "maximum_from_zero",
    "sum_low",
    "tail_dropped",
    "lse_low",
    "log_probabilities_low",
    "probabilities_low",
    "smoothing_forward_only",
    "no_z_gradient",
    "mean_of_all",
    "ignored_gradient",
    "wrong_target_at_the_end",
    "loss_cut",
)
LOSSES = (
    *(OperationKernel("softmax", fault, softmax(fault)) for fault in SOFTMAX_FAULTS),
    *(
        OperationKernel("cross_entropy", fault, cross_entropy(fault))
        for fault in CROSS_ENTROPY_FAULTS
    ),
    OperationKernel("softmax", "by_hand", softmax(), faulty=False),
    OperationKernel("softmax", "online", online, faulty=False),
    OperationKernel("softmax", "in_base_two", in_base_two, faulty=False),
    OperationKernel("cross_entropy", "by_hand", cross_entropy(), faulty=False),
    OperationKernel("cross_entropy", "in_chunks", in_chunks, faulty=False),
    OperationKernel("cross_entropy", "upcast_in_double", upcast_in_double, faulty=False),
)
