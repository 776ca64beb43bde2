"""Kernels that round several values, of which one call shows a part."""

import pytest
import torch

from halfulp.reconstruct.operation_asked import reconstruct_operation


class _LogSoftmax(torch.autograd.Function):
    """The row sum and its logarithm are in the operands' format; what is kept is not."""

    @staticmethod
    def forward(ctx, x):
        wide = x.float() - x.float().amax(-1, keepdim=True)
        row_sum = wide.exp().sum(-1, keepdim=True).to(x.dtype)
        out = wide - row_sum.float().log().to(x.dtype).float()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, grad):
        (out,) = ctx.saved_tensors
        wide = grad.float()
        return (wide - out.exp() * wide.sum(-1, keepdim=True)).to(torch.bfloat16)


def of_log_softmax(input, target, *, ignore_index=-100, reduction="none", label_smoothing=0.0):
    logs = _LogSoftmax.apply(input)
    seen = target != ignore_index
    own = logs.gather(1, torch.where(seen, target, 0)[:, None])[:, 0]
    loss = -(1 - label_smoothing) * own - label_smoothing * logs.mean(-1)
    loss = torch.where(seen, loss, 0.0)
    if reduction != "none":
        loss = loss.sum() / (seen.sum() if reduction == "mean" else 1)
    return loss.to(input.dtype)


@pytest.mark.thorough(keep=0)
def test_a_sum_and_its_logarithm_are_told_though_no_call_shows_both():
    found = reconstruct_operation(of_log_softmax, "cross_entropy").found
    assert found.cause in ("statistic-low", "step-low")
    assert "log_sum is rounded to bf16" in found.text
    assert found.share > 0.99


class _LayerNorm(torch.autograd.Function):
    """Gradients of weight and bias are summed over each of several parts of the rows, in bf16."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps, parts):
        wide = x.float()
        deviation = (wide.var(-1, keepdim=True, unbiased=False) + eps).sqrt()
        normalized = (wide - wide.mean(-1, keepdim=True)) / deviation
        ctx.save_for_backward(normalized, deviation, weight)
        ctx.parts = parts
        return (normalized * weight.float() + bias.float()).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        normalized, deviation, weight = ctx.saved_tensors
        wide = grad.float()
        inner = wide * weight.float()
        mean, along = (t.mean(-1, keepdim=True) for t in (inner, inner * normalized))
        into = (inner - mean - normalized * along) / deviation
        sums = [_in_parts(x, ctx.parts, grad.dtype) for x in (wide * normalized, wide)]
        return into.to(grad.dtype), *sums, None, None


def _in_parts(rows, parts, low):
    whole = torch.zeros(rows.shape[1:])
    for part in rows.split(-(-len(rows) // parts)):
        own = torch.zeros_like(whole)
        for row in part:
            own = (own + row).to(low).float()
        whole = (whole + own).to(low).float()
    return whole.to(low)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("parts", [2, 8])
def test_sums_of_parts_that_run_beside_each_other_are_told_with_how_many(parts):
    def kernel(input, normalized_shape, weight, bias, eps):
        return _LayerNorm.apply(input, weight, bias, eps, parts)

    found = reconstruct_operation(kernel, "layer_norm").found
    assert found.cause == "grad-sum-low"
    for of in ("weights", "biases"):
        text = f"sums over {parts} parts of the gradient of {of} are rounded to bf16 after every"
        assert text in found.text
    assert found.share > 0.98
