"""Norms with one planted fault each, and norms without one that are written differently."""

import torch

from tests.operations.hand_written import OperationKernel, by_hand, cut, low, summed_low


def rms(fault=""):
    """RMSNorm whose two passes are written out."""

    def kernel(input, normalized_shape, weight, eps):
        def forward(x, w):
            rows, d = x.float(), x.shape[-1]
            mean = rows.square().mean(-1, keepdim=True)
            if fault == "squares_low":
                mean = summed_low(low(rows.square()), -1)[..., None] / d
            if fault == "tail_dropped":
                mean = rows[..., : d // 32 * 32].square().mean(-1, keepdim=True)
            if fault == "eps_outside":
                inverse = 1 / (mean.sqrt() + eps)
            elif fault == "eps_fixed":
                inverse = torch.rsqrt(mean + 1e-6)
            else:
                inverse = torch.rsqrt(mean + eps)
            if fault == "inverse_low":
                inverse = low(inverse)
            if fault == "neighbors_inverse":
                inverse = torch.cat([inverse[:-1], inverse[-2:-1]]) if len(rows) > 1 else inverse
            out = rows * inverse
            if fault == "weight_low":
                out = low(out)
                out = low(out * low(w.float() - 1)) + out
            else:
                out = out * w.float()
            out = cut(out) if fault == "out_cut" else out.to(x.dtype)
            return out, (x, w, inverse)

        def backward(saved, grad):
            x, w, inverse = saved
            rows, dy = x.float(), grad.float()
            if fault == "backward_inverse_low":
                inverse = low(inverse)
            normalized, dw = rows * inverse, dy * w.float()
            inner = (dw * normalized).mean(-1, keepdim=True)
            if fault == "no_inner":
                inner = 0 * inner
            if fault == "inner_without_weight":
                inner = (dy * normalized).mean(-1, keepdim=True)
            grad_rows = inverse * (dw - normalized * inner)
            terms = dy * normalized
            if fault == "weight_grad_low":
                grad_weight = summed_low(terms)
            elif fault == "weight_grad_one_block":
                grad_weight = terms[: max(1, len(terms) - 1)].sum(0)
            elif fault == "weight_grad_whole_tiles":
                grad_weight = terms[: max(1, len(terms) // 8 * 8)].sum(0)
            else:
                grad_weight = terms.sum(0)
            return grad_rows.to(x.dtype), grad_weight.to(w.dtype)

        return by_hand(forward, backward, input, weight)

    return kernel


def rms_in_blocks(input, normalized_shape, weight, eps):
    """dW in blocks of 16 rows, the mean as a dot product."""

    def forward(x, w):
        rows = x.float()
        mean = torch.einsum("td,td->t", rows, rows)[:, None] / x.shape[-1]
        inverse = (mean + eps).pow(-0.5)
        return (w.float() * (rows * inverse)).to(x.dtype), (x, w, inverse)

    def backward(saved, grad):
        x, w, inverse = saved
        normalized, dy = x.float() * inverse, grad.float()
        parts = torch.stack([part.sum(0) for part in (dy * normalized).split(16)])
        inner = torch.einsum("td,d,td->t", dy, w.float(), normalized)[:, None] / x.shape[-1]
        return (inverse * (dy * w.float() - normalized * inner)).to(x.dtype), parts.sum(0).to(
            w.dtype
        )

    return by_hand(forward, backward, input, weight)


def rms_double(input, normalized_shape, weight, eps):
    """In fp64 throughout."""
    rows = input.double()
    inverse = torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
    return (rows * inverse * weight.double()).to(input.dtype)


def rms_scaled(input, normalized_shape, weight, eps):
    """Divided by the norm instead of multiplied by its inverse."""
    rows = input.float()
    size = torch.linalg.vector_norm(rows, dim=-1, keepdim=True) / rows.shape[-1] ** 0.5
    return (rows / (size * size + eps).sqrt() * weight.float()).to(input.dtype)


def layer(fault=""):
    """LayerNorm whose two passes are written out."""

    def kernel(input, normalized_shape, weight, bias, eps):
        def forward(x, w, b):
            rows, d = x.float(), x.shape[-1]
            mean = rows.mean(-1, keepdim=True)
            if fault == "mean_low":
                mean = low(mean)
            variance = (rows - mean).square().mean(-1, keepdim=True)
            if fault == "one_pass_low":
                variance = low(low(rows).square()).mean(-1, keepdim=True) - mean.square()
                variance = variance.clamp_min(0)
            if fault == "unbiased":
                variance = variance * d / max(1, d - 1)
            if fault == "tail_dropped":
                variance = (rows - mean)[..., : d // 32 * 32].square().mean(-1, keepdim=True)
            inverse = torch.rsqrt(variance + (1e-5 if fault == "eps_fixed" else eps))
            if fault == "inverse_low":
                inverse = low(inverse)
            normalized = (rows - mean) * inverse
            out = normalized * w.float() + b.float()
            return (cut(out) if fault == "out_cut" else out.to(x.dtype)), (x, w, mean, inverse)

        def backward(saved, grad):
            x, w, mean, inverse = saved
            dy, normalized = grad.float(), (x.float() - mean) * inverse
            dw = dy * w.float()
            first, second = dw.mean(-1, keepdim=True), (dw * normalized).mean(-1, keepdim=True)
            if fault == "no_mean_term":
                first = 0 * first
            grad_rows = inverse * (dw - first - normalized * second)
            terms = dy * normalized
            low_weight, low_bias = fault == "weight_grad_low", fault == "bias_grad_low"
            grad_weight = summed_low(terms) if low_weight else terms.sum(0)
            grad_bias = summed_low(dy) if low_bias else dy.sum(0)
            if fault == "bias_grad_parts_low":
                grad_bias = torch.stack([low(part.sum(0)) for part in dy.split(64)]).sum(0)
            return grad_rows.to(x.dtype), grad_weight.to(w.dtype), grad_bias.to(w.dtype)

        return by_hand(forward, backward, input, weight, bias)

    return kernel


def layer_double(input, normalized_shape, weight, bias, eps):
    """In fp64 throughout."""
    rows = input.double()
    rows = rows - rows.mean(-1, keepdim=True)
    inverse = torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
    return (rows * inverse * weight.double() + bias.double()).to(input.dtype)


def layer_var_mean(input, normalized_shape, weight, bias, eps):
    """By torch.var_mean, with a fused multiply and add."""
    rows = input.float()
    variance, mean = torch.var_mean(rows, -1, correction=0, keepdim=True)
    scale = weight.float() * torch.rsqrt(variance + eps)
    return torch.addcmul(bias.float(), rows - mean, scale).to(input.dtype)


RMS_FAULTS = (
    "squares_low",
    "tail_dropped",
    "eps_outside",
    "eps_fixed",
    "inverse_low",
    "neighbors_inverse",
    "weight_low",
    "out_cut",
    "backward_inverse_low",
    "no_inner",
    "inner_without_weight",
    "weight_grad_low",
    "weight_grad_one_block",
    "weight_grad_whole_tiles",
)
LAYER_FAULTS = (
    "mean_low",
    "one_pass_low",
    "unbiased",
    "tail_dropped",
    "eps_fixed",
    "inverse_low",
    "out_cut",
    "no_mean_term",
    "weight_grad_low",
    "bias_grad_low",
    "bias_grad_parts_low",
)
NORMS = (
    *(OperationKernel("rms_norm", fault, rms(fault)) for fault in RMS_FAULTS),
    *(OperationKernel("layer_norm", fault, layer(fault)) for fault in LAYER_FAULTS),
    OperationKernel("rms_norm", "by_hand", rms(), faulty=False),
    OperationKernel("rms_norm", "in_blocks", rms_in_blocks, faulty=False),
    OperationKernel("rms_norm", "in_double", rms_double, faulty=False),
    OperationKernel("rms_norm", "divided_by_norm", rms_scaled, faulty=False),
    OperationKernel("layer_norm", "by_hand", layer(), faulty=False),
    OperationKernel("layer_norm", "in_double", layer_double, faulty=False),
    OperationKernel("layer_norm", "var_mean", layer_var_mean, faulty=False),
)
