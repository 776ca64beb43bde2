"""Softmax and cross-entropy with one planted fault each, and some without one that are written
differently.
"""

import torch

from tests.operations.hand_written import OperationKernel, by_hand, cut, low, summed_low


def subtracted(rows, dim, fault):
    """What is taken off the scores before their exponentials: with no fault, the row's maximum."""
    largest = rows.amax(dim, keepdim=True)
    if fault == "no_shift":
        return 0 * largest
    if fault == "maximum_from_zero":
        return largest.clamp_min(0)
    if fault == "shared_maximum":
        return largest.amax().expand_as(largest)
    return largest


def softmax(fault=""):
    """Softmax whose two passes are written out."""

    def kernel(input, dim):
        def forward(x):
            rows = x.float()
            largest = subtracted(rows, dim, fault)
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
            largest = subtracted(rows, 1, fault)
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
            others = x.shape[1] - (fault == "smoothing_of_others")
            unit = p - smoothing / others
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
    """In fp64, z-loss added where a token counts."""
    logits = input.double()
    own = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    loss = torch.nn.functional.cross_entropy(logits, target, reduction=reduction, **own)
    if lse_square_scale:
        counts = target != ignore_index
        loss = loss + lse_square_scale * logits.logsumexp(-1).square() * counts
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
    "shared_maximum",
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
    "shared_maximum",
    "sum_low",
    "tail_dropped",
    "lse_low",
    "log_probabilities_low",
    "probabilities_low",
    "smoothing_forward_only",
    "smoothing_of_others",
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


def fused(fault="", chunk=16):
    """Cross-entropy fused with its linear layer, in chunks of tokens, gradients kept from the
    forward pass.
    """

    def of_chunk(x, w, right, seen, smoothing):
        logits = x @ w.mT
        logits = low(logits) if fault == "logits_low" else logits
        logits = logits.to(torch.float8_e5m2).float() if fault == "logits_fp8" else logits
        largest = subtracted(logits, 1, fault)
        weights = (logits - largest).exp()
        total = weights.sum(1, keepdim=True)
        if fault == "sum_low":
            total = summed_low(weights, 1)[:, None]
        if fault == "tail_of_vocabulary":
            total = weights[:, : w.shape[0] // 32 * 32].sum(1, keepdim=True)
        lse = largest + total.log()
        lse = low(lse) if fault == "lse_low" else lse
        own = lse[:, 0] - logits.gather(1, right[:, None])[:, 0]
        loss = (1 - smoothing) * own + smoothing * (lse - logits).mean(1)
        p = (logits - lse).exp()
        p = low(p) if fault == "probabilities_low" else p
        p = p - (0 if fault == "smoothing_forward_only" else smoothing) / w.shape[0]
        p[torch.arange(len(right)), right] -= 1 - smoothing
        if fault != "ignored_gradient":
            p = torch.where(seen[:, None], p, 0.0)
        return torch.where(seen, loss, 0.0), p

    def kernel(input, weight, target, *, ignore_index, reduction, label_smoothing):
        seen, count = target != ignore_index, 1
        right = torch.where(seen, target, 0)
        if reduction == "mean":
            count = len(target) if fault == "mean_of_all" else int(seen.sum())

        def forward(x, w):
            x, w = x.float(), w.float()
            parts = zip(x.split(chunk), right.split(chunk), seen.split(chunk), strict=True)
            found = [of_chunk(a, w, r, s, label_smoothing) for a, r, s in parts]
            losses, units = (torch.cat(t) for t in zip(*found, strict=True))
            if fault == "means_of_chunks" and reduction == "mean":
                means = [
                    f[0].sum() / s.sum() for f, s in zip(found, seen.split(chunk), strict=True)
                ]
                losses = torch.stack(means).mean().expand(len(target)) * count / len(target)
            if fault == "last_chunk_left_out":
                units[len(units) // chunk * chunk :] = 0
            losses, units = losses / count, units / count
            losses = losses if reduction == "none" else losses.sum()
            return losses, (x, w, units)

        def backward(saved, grad):
            x, w, units = saved
            scale = grad.float()[:, None] if grad.ndim else grad.float()
            units = units * (1 if fault == "gradient_taken_as_1" else scale)
            terms = zip(units.split(chunk), x.split(chunk), strict=True)
            shares = torch.stack([u.mT @ a for u, a in terms])
            grad_weight = summed_low(shares) if fault == "weight_grad_low" else shares.sum(0)
            grad_input = units @ w
            if fault == "input_grad_low":
                pairs = zip(units.split(32, 1), w.split(32), strict=True)
                grad_input = summed_low(torch.stack([u @ b for u, b in pairs]))
            return grad_input.to(input.dtype), grad_weight.to(weight.dtype)

        return by_hand(forward, backward, input, weight)

    return kernel


def fused_in_double(input, weight, target, **options):
    """In fp64."""
    logits = input.double() @ weight.double().mT
    return torch.nn.functional.cross_entropy(logits, target, **options).float()


def one_token_at_a_time(input, weight, target, *, ignore_index, reduction, label_smoothing):
    """In fp32, a row of logits after the other."""
    own = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": "sum"}
    wide = weight.float()
    losses = [
        torch.nn.functional.cross_entropy(x.float() @ wide.mT, t, **own)
        for x, t in zip(input, target, strict=True)
    ]
    losses = torch.stack(losses)
    if reduction == "none":
        return losses
    return losses.sum() / ((target != ignore_index).sum() if reduction == "mean" else 1)


FUSED_FAULTS = (
    "weight_grad_low",
    "input_grad_low",
    "logits_fp8",
    "no_shift",
    "maximum_from_zero",
    "shared_maximum",
    "sum_low",
    "tail_of_vocabulary",
    "lse_low",
    "probabilities_low",
    "smoothing_forward_only",
    "ignored_gradient",
    "mean_of_all",
    "means_of_chunks",
    "last_chunk_left_out",
    "gradient_taken_as_1",
)
FUSED_LOSSES = (
    *(OperationKernel("linear_cross_entropy", fault, fused(fault)) for fault in FUSED_FAULTS),
    OperationKernel("linear_cross_entropy", "by_hand", fused(), faulty=False),
    OperationKernel("linear_cross_entropy", "logits_low", fused("logits_low"), faulty=False),
    OperationKernel("linear_cross_entropy", "in_double", fused_in_double, faulty=False),
    OperationKernel("linear_cross_entropy", "a_token_a_time", one_token_at_a_time, faulty=False),
)
