"""Faults of operations that the search for causes was not written against, and sound kernels:
norms, softmax and losses here, the others in more.py.

What each does wrong (`what`) and the names that say where (`where`) were set down before any run;
their meaning is benchmarks.unseen's.
"""

# ruff: noqa: ARG001, ARG005 - kernels have their operation's signature

from __future__ import annotations

import torch
from benchmarks.unseen.operations.more import (
    FAULTS_MORE,
    SOUND_MORE,
    added_low,
    bf16,
    fault,
    fp16,
    passes,
    sound,
)
from torch.nn import functional


# --- rms_norm
def rms(mean=None, inverse=None, back=None, parts=None, row=None, grad=None, weigh=None):
    """Both passes of Liger's kind, with steps that may be replaced."""

    def kernel(input, normalized_shape, weight, eps):
        def forward(x, w):
            rows = x.float()
            r = torch.rsqrt((mean or _mean_square)(rows) + eps)
            r = inverse(rows, eps) if inverse else r
            weights = weigh(w.float()) if weigh else w.float()
            return (weights * (row or _same)(rows * r)).to(x.dtype), (rows, w, r)

        def backward(saved, dy):
            rows, w, r = saved
            r = back(r) if back else r
            dy, normal = dy.float(), rows * r
            terms = dy * (weigh(w.float()) if weigh else w.float())
            dx = r * (terms - normal * (terms * normal).mean(-1, keepdim=True))
            dw = (parts or _total)(dy * normal)
            return (grad(dx) if grad else dx).to(w.dtype), dw.to(w.dtype)

        return passes(forward, backward, input, weight)

    return kernel


def _mean_square(rows):
    return rows.square().mean(-1, keepdim=True)


def _same(x):
    return x


def _total(x):
    return x.sum(0)


def low_parts(width, rounding=bf16):
    """Partial sums of `width` rows, each stored before the last sum."""
    return lambda x: torch.stack([rounding(p.sum(0)) for p in x.split(width)]).sum(0)


def by_pairs(r):
    return r[torch.arange(len(r)) // 2 * 2]


def whole_vectors(dx):
    return dx * (torch.arange(dx.shape[-1]) < dx.shape[-1] // 8 * 8)


def all_low(input, normalized_shape, weight, eps):
    """Liger's casting mode "none": nothing is cast up."""
    variance = (input * input).mean(-1, keepdim=True)
    return weight * (input * torch.rsqrt(variance + eps))


fault("rms_norm", "squares_fp16_sum", rms(mean=lambda x: fp16(
    added_low(x.square(), fp16, 16)) / x.shape[-1]),
    "summed rounded overflow limited", "square mean")  # fmt: skip
fault("rms_norm", "nothing_cast_up", all_low, "rounded summed",
      "square mean inverse normalized")  # fmt: skip
fault("rms_norm", "dw_partials_bf16", rms(parts=low_parts(4)), "summed rounded", "weight")
fault("rms_norm", "inverse_stored_bf16", rms(back=bf16), "rounded", "inverse grad input weight")
fault("rms_norm", "eps_before_mean", rms(inverse=lambda x, eps: (
    (x.square().sum(-1, keepdim=True) + eps) / x.shape[-1]).rsqrt()), "option", "eps")  # fmt: skip
fault("rms_norm", "one_plus_weight", rms(weigh=lambda w: 1 + w), "factor missing option", "weight")
fault("rms_norm", "inverse_by_pairs_in_backward", rms(back=by_pairs), "neighbor",
      "inverse input weight row")  # fmt: skip
fault("rms_norm", "dx_vectors_of_8", rms(grad=whole_vectors), "end", "input D")
sound("rms_norm", "liger_passes", rms(parts=low_parts(8, _same)))


# --- layer_norm
def layer(center=None, stats=None, dw=None, db=None, dx=None, swap=False, out=None):
    def kernel(input, normalized_shape, weight, bias, eps):
        def forward(x, w, b):
            rows = x.float()
            mean, variance = (stats or _stats)(rows)
            centered = center(rows - mean) if center else rows - mean
            normal = centered * torch.rsqrt(variance + eps)
            y = (out(rows, mean, variance, eps) if out else normal) * w.float() + b.float()
            return y.to(x.dtype), (normal, torch.rsqrt(variance + eps), w)

        def backward(saved, dy):
            normal, r, w = saved
            dy = dy.float()
            terms = dy * w.float()
            grad = (dx or _layer_dx)(terms, normal, r)
            grads = (dw or _total)(dy * normal).to(w.dtype), (db or _total)(dy).to(w.dtype)
            return grad.to(w.dtype), *(reversed(grads) if swap else grads)

        return passes(forward, backward, input, weight, bias)

    return kernel


def _stats(rows):
    return rows.mean(-1, keepdim=True), rows.var(-1, keepdim=True, unbiased=False)


def _layer_dx(terms, normal, r):
    means = terms.mean(-1, keepdim=True), (terms * normal).mean(-1, keepdim=True)
    return r * (terms - means[0] - normal * means[1])


def welford_low(rows):
    """Chan's merge of blocks of 16, its running mean and M2 in bf16."""
    count, mean, m2 = 0, 0.0, 0.0
    for part in rows.split(16, -1):
        n, own = part.shape[-1], part.mean(-1, keepdim=True)
        away = own - mean
        mean = bf16(mean + away * n / (count + n))
        m2 = bf16(m2 + (part - own).square().sum(-1, keepdim=True)
                  + away.square() * count * n / (count + n))  # fmt: skip
        count += n
    return mean, m2 / count


fault("layer_norm", "welford_bf16", layer(stats=welford_low), "summed rounded",
      "mean variance centered")  # fmt: skip
fault("layer_norm", "centered_bf16", layer(center=bf16), "rounded", "centered normalized")
fault("layer_norm", "db_partials_bf16", layer(db=low_parts(4)), "summed rounded", "bias")
fault("layer_norm", "no_second_mean", layer(dx=lambda terms, normal, r: r * (
    terms - terms.mean(-1, keepdim=True))), "missing", "input normalized variance")  # fmt: skip
fault("layer_norm", "mean_not_subtracted", layer(out=lambda rows, mean, variance, eps: rows
      * torch.rsqrt(variance + eps)), "missing", "mean centered")  # fmt: skip
fault("layer_norm", "dw_db_exchanged", layer(swap=True), "exchanged", "weight bias")
sound("layer_norm", "two_passes", layer())


# --- softmax
def online(rounding=_same, rescale=True, width=64):
    """The row's maximum and sum, block by block."""

    def sums(x):
        m, l = x.new_full((len(x), 1), -torch.inf), 0.0
        for part in x.split(width, -1):
            new = torch.maximum(m, part.amax(-1, keepdim=True))
            safe = torch.where(new == -torch.inf, 0.0, new)
            l = (l * torch.exp(m - safe) if rescale else l) + torch.exp(part - safe).sum(
                -1, keepdim=True)  # fmt: skip
            m, l = new, rounding(l)
        return m, l

    return sums


def soft(power=None, sums=None, inner=None):
    def kernel(input, dim):
        def forward(x):
            rows = x.float()
            m = rows.amax(-1, keepdim=True)
            p = power(rows, m) if power else torch.exp(rows - m)
            m, l = sums(rows) if sums else (m, p.sum(-1, keepdim=True))
            y = (p / l).to(x.dtype)
            return y, y.float()

        def backward(y, dy):
            terms = dy.float() * y
            return ((terms - y * (inner or _inner)(terms)).to(dy.dtype),)

        assert dim in (-1, input.ndim - 1)
        return passes(forward, backward, input)

    return kernel


def _inner(terms):
    return terms.sum(-1, keepdim=True)


def sum_of_whole_blocks(x):
    m, whole = x.amax(-1, keepdim=True), max(x.shape[-1] // 32 * 32, min(32, x.shape[-1]))
    return m, torch.exp(x[..., :whole] - m).sum(-1, keepdim=True)


LOG2_E = 1.4426950408889634
fault("softmax", "exp2_of_bf16", soft(power=lambda x, m: torch.exp2(bf16((x - m) * LOG2_E))),
      "rounded", "shifted weights input")  # fmt: skip
fault("softmax", "exponent_not_below_10", soft(power=lambda x, m: torch.exp(
    (x - m).clamp_min(-10))), "limited", "shifted weights input")  # fmt: skip
fault("softmax", "row_sum_fp16_blocks", soft(sums=online(fp16, width=16)), "summed rounded",
      "row_sum summed weights")  # fmt: skip
fault("softmax", "inner_bf16", soft(inner=lambda t: bf16(_inner(t))), "rounded summed",
      "inner input grad")  # fmt: skip
fault("softmax", "sum_of_whole_blocks", soft(sums=sum_of_whole_blocks), "end", "sum V input")
fault("softmax", "sum_not_rescaled", soft(sums=online(rescale=False)), "missing factor",
      "sum input weights")  # fmt: skip
sound("softmax", "online_blocks", soft(sums=online()))


# --- cross_entropy
def entropy(lse=None, kept=None, unit=None, spread=None, by=None, grad=None):
    """A loss with its gradient made in the forward pass, as Liger's."""

    def kernel(input, target, *, ignore_index=-100, reduction="none", label_smoothing=0.0,
               lse_square_scale=0.0):  # fmt: skip
        def forward(x):
            rows, v = x.float(), x.shape[-1]
            seen = target != ignore_index
            right = torch.where(seen, target, 0)[:, None]
            z = (lse or _lse)(rows)
            s = label_smoothing
            loss = (1 - s) * (z - rows.gather(1, right)) + s * (z - rows).mean(-1, keepdim=True)
            loss = (loss + lse_square_scale * z * z)[:, 0].masked_fill(~seen, 0.0)
            p = torch.exp(rows - z)
            p = kept(p) if kept else p
            even = spread(s, v) if spread else s / v
            wanted = torch.full_like(rows, even).scatter(1, right, 1 - s + even)
            g = p - wanted + (grad if grad is not None else 2) * lse_square_scale * z * p
            g = unit(g, seen) if unit else g.masked_fill(~seen[:, None], 0.0)
            count = seen.sum().clamp_min(1)
            if reduction == "mean":
                return loss.sum() / count, (g / (by(seen) if by else count), x.dtype)
            return (loss.sum() if reduction == "sum" else loss), (g, x.dtype)

        def backward(saved, dy):
            g, dtype = saved
            return ((g * (dy[:, None] if dy.ndim else dy)).to(dtype),)

        return passes(forward, backward, input)

    return kernel


def _lse(rows):
    return rows.logsumexp(-1, keepdim=True)


def lse_of_chunks(rows):
    return torch.stack([bf16(_lse(part)) for part in rows.split(64, -1)]).logsumexp(0)


def ignores_factor(input, target, *, ignore_index=-100, reduction="none"):
    """A gradient made in the forward pass that what arrives does not multiply."""

    def forward(x):
        rows = x.float().detach().requires_grad_()
        with torch.enable_grad():
            loss = functional.cross_entropy(
                rows, target, ignore_index=ignore_index, reduction=reduction)  # fmt: skip
            (g,) = torch.autograd.grad(loss.sum(), rows)
        return loss.detach(), g.to(x.dtype)

    return passes(forward, lambda g, dy: (g,), input)


fault("cross_entropy", "lse_of_chunks_bf16", entropy(lse=lse_of_chunks), "rounded", "lse sum")
fault("cross_entropy", "gradient_of_mean_over_all", entropy(by=len), "option factor",
      "ignore reduction mean input count")  # fmt: skip
fault("cross_entropy", "smoothing_over_others", entropy(spread=lambda s, v: s / (v - 1)),
      "option factor", "smoothing")  # fmt: skip
fault("cross_entropy", "ignored_keep_gradient", entropy(unit=lambda g, seen: g), "option missing",
      "ignore target")  # fmt: skip
fault("cross_entropy", "probabilities_bf16", entropy(kept=bf16), "rounded",
      "probabilities unit_gradient weights input")  # fmt: skip
fault("cross_entropy", "z_gradient_halved", entropy(grad=1), "factor missing option",
      "lse_square lse z")  # fmt: skip
fault("cross_entropy", "gradient_not_multiplied", ignores_factor, "missing factor", "loss input")
fault("cross_entropy", "shards_lse_fp16", entropy(lse=lambda rows: fp16(_lse(rows))), "rounded",
      "lse")  # fmt: skip
sound("cross_entropy", "liger_way", entropy())


# --- linear_cross_entropy
def chunked(total=None, mean_of_means=False, logits=None, width=8):
    """Chunks of tokens, their gradients kept, as Liger's fused loss."""

    def kernel(input, weight, target, *, ignore_index=-100, reduction="none"):
        def forward(x, w):
            losses, dxs, dw, w32 = [], [], 0.0, w.float()
            count = (target != ignore_index).sum().clamp_min(1)
            for part, right in zip(x.split(width), target.split(width), strict=True):
                z = part.float() @ w32.mT
                z = logits(z) if logits else z
                seen = right != ignore_index
                safe = torch.where(seen, right, 0)[:, None]
                loss = (_lse(z) - z.gather(1, safe))[:, 0].masked_fill(~seen, 0.0)
                g = torch.softmax(z, -1).scatter_add(1, safe, torch.full_like(z[:, :1], -1.0))
                g = g.masked_fill(~seen[:, None], 0.0)
                if reduction == "mean":
                    share = (
                        seen.sum().clamp_min(1) * -(-len(x) // width) if mean_of_means else count
                    )
                    g, loss = g / share, loss / share
                losses.append(loss)
                dxs.append(g @ w32)
                dw = (total or _same)(dw + g.mT @ part.float())
            loss = torch.cat(losses)
            return loss.sum(), (torch.cat(dxs), dw, x.dtype)

        def backward(saved, dy):
            dx, dw, dtype = saved
            return (dx * dy).to(dtype), (dw * dy).to(dtype)

        if reduction == "none":
            rows = input.float() @ weight.float().mT
            return functional.cross_entropy(
                rows, target, ignore_index=ignore_index, reduction="none"
            )
        return passes(forward, backward, input, weight)

    return kernel


fault("linear_cross_entropy", "dw_summed_bf16", chunked(total=bf16), "summed rounded", "weight")
fault("linear_cross_entropy", "mean_of_chunk_means", chunked(mean_of_means=True), "option factor",
      "ignore reduction mean")  # fmt: skip
fault("linear_cross_entropy", "logits_of_8_bits", chunked(
    logits=lambda z: z.to(torch.float8_e5m2).float()), "rounded", "logits")  # fmt: skip
sound("linear_cross_entropy", "chunks", chunked())

FAULTS = tuple(FAULTS_MORE)
SOUND = tuple(SOUND_MORE)
