"""Products, sums and scattered sums with one planted fault each, and some without one that are
written differently.
"""

import torch

from tests.operations.hand_written import OperationKernel, by_hand, cut, low, summed_low


def _product(a, b, fault):
    """a bᵀ of fp32 matrices, with the fault of its sum."""
    if fault == "sum_low":
        return summed_low(a[:, None, :] * b[None], 2)
    if fault == "split_sum_low":
        parts = [low(x @ y.mT) for x, y in zip(a.split(16, 1), b.split(16, 1), strict=True)]
        return summed_low(torch.stack(parts))
    if fault == "products_low":
        return low(a[:, None, :] * b[None]).sum(-1)
    if fault == "tail_dropped":
        whole = max(1, a.shape[1] // 16 * 16)
        return a[:, :whole] @ b[:, :whole].mT
    if fault == "fp8":
        return a.to(torch.float8_e4m3fn).float() @ b.to(torch.float8_e4m3fn).float().mT
    return a @ b.mT


def linear(fault="", where="yxw"):
    """A linear layer whose three products are written out; the fault is in those of `where`."""

    def kernel(input, weight):
        def product(name, a, b):
            return _product(a, b, fault if name in where else "").to(input.dtype)

        def forward(x, w):
            if fault == "out_cut":
                return cut(x.float() @ w.float().mT), (x, w)
            out = product("y", x.float(), w.float())
            if fault == "last_row_stale" and len(out) > 1:
                out = torch.cat([out[:-1], out[-2:-1]])
            return out, (x, w)

        def backward(saved, grad):
            x, w = (t.float() for t in saved)
            dy = grad.float()
            if fault == "small_gradients_lost":
                dy = torch.where(dy.abs() < 2.0**-9, 0.0, dy)
            return product("x", dy, w.mT), product("w", dy.mT, x.mT)

        return by_hand(forward, backward, input, weight)

    return kernel


def linear_in_chunks(input, weight):
    """32 terms at a time, in fp32."""
    parts = zip(input.float().split(32, -1), weight.float().split(32, -1), strict=True)
    return torch.stack([x @ w.mT for x, w in parts]).sum(0).to(input.dtype)


def linear_in_double(input, weight):
    """In fp64."""
    return (input.double() @ weight.double().mT).to(input.dtype)


def sequential(input, weight):
    """One fused multiply and add after the other, in fp32."""

    def product(a, b):
        total = torch.zeros(len(a), len(b))
        for x, y in zip(a.mT, b.mT, strict=True):
            total = torch.addcmul(total, x[:, None], y[None])
        return total.to(input.dtype)

    def forward(x, w):
        return product(x.float(), w.float()), (x.float(), w.float())

    def backward(saved, grad):
        x, w = saved
        return product(grad.float(), w.mT), product(grad.float().mT, x.mT)

    return by_hand(forward, backward, input, weight)


def embedding(fault=""):
    """An embedding whose gradient is written out."""

    def kernel(input, weight, padding_idx=None):
        def forward(w):
            out = w[input]
            if fault == "rows_low":
                out = out.to(torch.float8_e5m2).to(w.dtype)
            if fault == "indices_low":
                out = w[low(input.float()).long().clamp_max(len(w) - 1)]
            if fault == "next_row":
                out = w[(input + (torch.arange(len(input)) == len(input) - 1)) % len(w)]
            return out.clone(), None

        def backward(_, grad):
            dy, found = grad.float(), torch.zeros(weight.shape)
            if fault == "last_wins":
                found[input] = dy
            elif fault == "added_low":
                for token, row in zip(input.tolist(), dy, strict=True):
                    found[token] = low(found[token] + row)
            elif fault == "blocks_added_low":
                for tokens, rows in zip(input.split(16), dy.split(16), strict=True):
                    found = low(found + torch.zeros(weight.shape).index_add(0, tokens, rows))
            elif fault == "mean":
                count = torch.bincount(input, minlength=len(weight)).clamp_min(1)
                found = found.index_add(0, input, dy) / count[:, None]
            elif fault == "last_token_lost":
                found = found.index_add(0, input[:-1], dy[:-1])
            elif fault == "tail_dropped":
                whole = weight.shape[1] // 16 * 16
                found[:, :whole] = found[:, :whole].index_add(0, input, dy[:, :whole])
            else:
                found = found.index_add(0, input, dy)
            lost = fault == "padding_counted_of_many" and len(input) > 768
            if padding_idx is not None and fault != "padding_counted" and not lost:
                found[padding_idx] = 0
            return ((cut(found) if fault == "gradient_cut" else found.to(weight.dtype)),)

        return by_hand(forward, backward, weight)

    return kernel


def embedding_one_hot(input, weight, padding_idx=None):
    """As a product with one-hot rows, in fp32."""
    one_hot = torch.nn.functional.one_hot(input, len(weight)).float()
    table = weight.float()
    if padding_idx is not None:
        padded = (torch.arange(len(weight)) == padding_idx)[:, None]
        table = torch.where(padded, table.detach(), table)
    return (one_hot @ table).to(weight.dtype)


def embedding_gathered(input, weight, padding_idx=None):
    """By index_select of the table in fp64."""
    table = weight.double()
    if padding_idx is not None:
        padded = (torch.arange(len(weight)) == padding_idx)[:, None]
        table = torch.where(padded, table.detach(), table)
    return table.index_select(0, input).to(weight.dtype)


def total(fault=""):
    """A sum over rows, written out."""

    def kernel(input, dim):
        def forward(x):
            rows = x.float()
            if fault == "running_low":
                out = summed_low(rows)
            elif fault == "blocks_low":
                out = summed_low(torch.stack([part.sum(0) for part in rows.split(8)]))
            elif fault == "ranks_low":
                out = summed_low(torch.stack([low(part.sum(0)) for part in rows.split(2)]))
            elif fault == "tail_dropped":
                out = rows[: max(1, len(rows) // 16 * 16)].sum(0)
            elif fault == "mean":
                out = rows.mean(0)
            elif fault == "terms_cut":
                out = (rows / 8).to(torch.float8_e4m3fn).float().sum(0) * 8
            elif fault == "running_fp16":
                out = torch.zeros(rows.shape[1])
                for row in rows:
                    out = (out + row).half().float()
            elif fault == "last_column_stale":
                out = rows.sum(0)
                out[-1] = out[-2]
            else:
                out = rows.sum(0)
            return (cut(out) if fault == "out_cut" else out.to(x.dtype)), x.shape

        def backward(shape, grad):
            if fault == "gradient_of_mean":
                grad = grad / shape[0]
            return (grad.to(input.dtype).expand(shape).contiguous(),)

        return by_hand(forward, backward, input)

    return kernel


def compensated(input, dim):
    """Kahan's sum, in fp32."""
    rows = input.float()
    found = rows[0] * 0
    error = found
    for row in rows:
        term = row - error
        risen = found + term
        error = (risen - found).detach() - term.detach()
        found = risen
    return found


def pairwise(input, dim):
    """In halves, in fp32."""
    rows = input.float()
    while len(rows) > 1:
        half = (len(rows) + 1) // 2
        rest = torch.nn.functional.pad(rows[half:], (0, 0, 0, 2 * half - len(rows)))
        rows = rows[:half] + rest
    return rows[0].to(input.dtype)


LINEAR = {
    "sum_low": ("sum_low", "yxw"),
    "sum_low_in_dx": ("sum_low", "x"),
    "sum_low_in_dw": ("sum_low", "w"),
    "split_sum_low": ("split_sum_low", "y"),
    "products_low": ("products_low", "yxw"),
    "tail_dropped": ("tail_dropped", "y"),
    "fp8_in_dw": ("fp8", "w"),
    "out_cut": ("out_cut", "y"),
    "last_row_stale": ("last_row_stale", "y"),
    "small_gradients_lost": ("small_gradients_lost", "y"),
}
EMBEDDING_FAULTS = (
    "rows_low",
    "indices_low",
    "next_row",
    "last_wins",
    "added_low",
    "blocks_added_low",
    "mean",
    "last_token_lost",
    "tail_dropped",
    "padding_counted",
    "padding_counted_of_many",
    "gradient_cut",
)
SUM_FAULTS = (
    "running_low",
    "blocks_low",
    "ranks_low",
    "tail_dropped",
    "mean",
    "terms_cut",
    "running_fp16",
    "last_column_stale",
    "out_cut",
    "gradient_of_mean",
)
SUMS = (
    *(OperationKernel("linear", name, linear(*fault)) for name, fault in LINEAR.items()),
    *(OperationKernel("embedding", fault, embedding(fault)) for fault in EMBEDDING_FAULTS),
    *(OperationKernel("sum", fault, total(fault)) for fault in SUM_FAULTS),
    OperationKernel("linear", "by_hand", linear(), faulty=False),
    OperationKernel("linear", "in_chunks", linear_in_chunks, faulty=False),
    OperationKernel("linear", "in_double", linear_in_double, faulty=False),
    OperationKernel("linear", "sequential", sequential, faulty=False),
    OperationKernel("embedding", "by_hand", embedding(), faulty=False),
    OperationKernel("embedding", "one_hot", embedding_one_hot, faulty=False),
    OperationKernel("embedding", "gathered", embedding_gathered, faulty=False),
    OperationKernel("sum", "by_hand", total(), faulty=False),
    OperationKernel("sum", "compensated", compensated, faulty=False),
    OperationKernel("sum", "pairwise", pairwise, faulty=False),
)
