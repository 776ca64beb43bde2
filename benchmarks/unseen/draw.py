"""Draws the halves of unseen sets that come from a grid, and measures every fault of a set against
its sound twin: the largest ratio of their errors against fp64, over some ordinary inputs.

usage: python -m benchmarks.unseen.draw SET [--check], SET a module such as operations.second

It uses nothing of audit and reconstruct. The grid is gone through in the order of its seed; what
errs no more than 1.5 × its twin on any input is dropped. With --check every fault and sound kernel
of the set is measured instead. The second operations were drawn before the inputs of negative
gates and small logits were there: one of their thirty is another now.
"""

from __future__ import annotations

import argparse
import importlib
import math
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, get_args, get_type_hints

import torch
from benchmarks.unseen import SETS
from benchmarks.unseen.attention.fifth_kernel import Kernel, attention
from benchmarks.unseen.operations import second_kernels as kernels
from benchmarks.unseen.operations.fifth_steps import nvfp4
from torch import Tensor
from torch.nn import functional

from halfulp.formats import round_to

LATER = ("attention.sixth", "operations.third", "attention.seventh", "operations.fourth",
         "attention.eighth")  # fmt: skip
"""Sets that have more inputs, and dtypes of operations."""


def _since(first: str) -> tuple[str, ...]:
    """The sets of attention, or of operations, from one on."""
    of = first.partition(".")[0]
    return tuple(name for name in SETS[SETS.index(first) :] if name.startswith(of))


LATEST = (*_since("attention.ninth"), *_since("operations.fifth"))
"""Sets that have these and more."""
AGAIN = {"attention.seventh": ("attention.sixth", 20261209),
         "operations.fourth": ("operations.third", 20261209)}  # fmt: skip
"""Sets drawn from the grid of another by another seed, ten each, without what that set has."""
UNDRAWN = (*_since("attention.eighth"), *_since("operations.fifth"))
"""Sets that no grid has a part in: they are measured alone."""
Case = tuple[tuple[Any, ...], dict[str, Any], Tensor | None]


def attention_cases(dtype: torch.dtype, more: int) -> list[Case]:
    """Queries, keys, values, options and dO."""
    chance, found = torch.Generator().manual_seed(7), []

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=chance)

    def add(b, heads, groups, n, nk, d, times=1.0, value=0.0, key=0.0, dv=None, **options):
        q, k = normal(b, heads, n, d) * times, normal(b, groups, nk, d) + key
        v, do = normal(b, groups, nk, dv or d) + value, normal(b, heads, n, dv or d)
        options = {"scale": d**-0.5, "is_causal": False} | options
        found.append(((q.to(dtype), k.to(dtype), v.to(dtype)), options, do.to(dtype)))

    add(2, 2, 2, 128, 128, 32)
    add(2, 4, 4, 192, 192, 64, times=2, value=0.5, is_causal=True)
    add(2, 2, 2, 137, 201, 64, times=2)
    add(2, 4, 2, 201, 201, 32, times=3, is_causal=True)
    add(2, 4, 2, 128, 128, 64, times=2)
    add(1, 2, 2, 512, 512, 32, value=0.5, is_causal=True)
    add(2, 4, 2, 5, 200, 64)
    add(1, 2, 2, 100, 100, 64, dv=96, is_causal=True)
    add(2, 2, 2, 130, 130, 80)
    mask = torch.rand(2, 1, 128, 128, generator=chance) > 0.3
    mask[..., 0] = True
    add(2, 2, 2, 128, 128, 64, attn_mask=mask)
    add(2, 2, 2, 128, 130, 64, attn_mask=normal(2, 1, 128, 130).to(dtype))
    add(2, 2, 2, 200, 200, 64, is_causal=True, window=(37, 0))
    add(2, 2, 2, 137, 137, 64, times=6, softcap=5.0)
    add(2, 4, 4, 128, 128, 64, is_causal=True, sinks=normal(4))
    add(2, 2, 2, 128, 128, 64, times=8, key=0.5)
    add(2, 2, 2, 128, 128, 64, times=2, key=-1.0)
    add(2, 2, 2, 192, 192, 64, value=1, is_causal=True)
    add(2, 2, 2, 137, 137, 64, softcap=2.0)
    add(2, 2, 2, 200, 130, 64, is_causal=True)
    if not more:
        return found
    add(1, 6, 2, 96, 96, 32, times=2, is_causal=True)
    add(2, 8, 2, 100, 100, 32)
    add(1, 2, 2, 32, 640, 32)
    add(2, 2, 2, 128, 128, 64, attn_mask=mask)
    (q, k, v), *rest = found.pop()  # scores of −12800, hidden keys
    found.append(((torch.full_like(q, -40), torch.full_like(k, 40), v), *rest))
    add(2, 4, 4, 48, 48, 32, times=2)
    turned, *rest = found.pop()
    turned = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in turned)
    found.append((turned, *rest))
    if more > 1:
        add(2, 2, 2, 128, 128, 64, attn_mask=mask & (torch.arange(128)[:, None] % 9 > 0))
        add(2, 2, 2, 128, 128, 64, attn_mask=normal(2, 1, 128, 128).to(dtype), softcap=2.0)
        add(2, 4, 2, 128, 128, 64, is_causal=True, sinks=normal(4))
    return found


def exact_attention(q, k, v, *, is_causal, scale, attn_mask=None, window=None, softcap=0.0,
                    sinks=None):  # fmt: skip
    groups = q.shape[1] // k.shape[1]
    s = q @ k.repeat_interleave(groups, 1).mT * scale
    s = softcap * torch.tanh(s / softcap) if softcap else s
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None]
    keep = (j <= i) if is_causal else (j >= 0) & (i >= 0)
    keep = keep if window is None else keep & (j >= i - window[0])
    s = s.masked_fill(~keep, -math.inf)
    if attn_mask is not None:
        boolean = attn_mask.dtype == torch.bool
        s = s.masked_fill(~attn_mask, -math.inf) if boolean else s + attn_mask.double()
    if sinks is not None:
        s = torch.cat([s, sinks.double().view(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)
    p = s.softmax(-1).nan_to_num(0)
    return p[..., : k.shape[2]] @ v.repeat_interleave(groups, 1)


def operation_cases(dtype: torch.dtype, more: int) -> Iterator[tuple[str, Case]]:
    """An operation, and how it is called."""
    chance = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=chance)

    def low(*shape: int) -> Tensor:
        return normal(*shape).to(dtype)

    for t, d in ((24, 256), (33, 77), (40, 96)):
        x, w = (normal(t, d) * 2 + 0.3).to(dtype), (1 + normal(d) * 0.3).to(dtype)
        b, dy = low(d), low(t, d)
        yield "rms_norm", ((x, (d,), w, 1e-6), {}, dy)
        yield "layer_norm", ((x, (d,), w, b, 1e-5), {}, dy)
        yield "softmax", ((x, -1), {}, dy)
        yield "softmax", (((x.float() * 4 - 30).to(dtype), -1), {}, dy)
        yield "softmax", (((x.float() - 120).to(dtype), -1), {}, dy)
        labels = torch.randint(0, d, (t,), generator=chance)
        labels[::5] = 7
        for options in ({}, {"reduction": "mean", "ignore_index": 7}, {"label_smoothing": 0.1},
                        {"ignore_index": 7}, {"lse_square_scale": 1e-3}):  # fmt: skip
            each = torch.rand(t, generator=chance) + 0.5
            grad = each if "reduction" not in options else torch.tensor(1.0)
            yield "cross_entropy", ((x, labels), options, grad)
            if "lse_square_scale" not in options:
                head = (normal(d, 64) * 0.3).to(dtype)
                yield "linear_cross_entropy", ((low(t, 64), head, labels), options, grad)
        up, negative = low(t, d), (-3 - 4 * torch.rand(t, d, generator=chance)).to(dtype)
        for gate in (x, negative, (normal(t, d) * 4).to(dtype)):
            yield "swiglu", ((gate, up), {}, dy)
            yield "geglu", ((gate, up), {}, dy)
            yield "geglu", ((gate, up), {"approximate": "tanh"}, dy)
        w = low(48, d)
        yield "linear", ((x, w), {}, low(t, 48))
        yield "quantized_linear", ((x, w), {"format": "fp8_row"}, low(t, 48))
        table, index = low(20, d), torch.randint(0, 20, (t * 8,), generator=chance)
        yield "embedding", ((index, table, None), {}, (normal(t * 8, d) + 0.5).to(dtype))
        yield "embedding", ((index, table, 3), {}, low(t * 8, d))
        yield "sum", ((x, 0), {}, low(d))
        turned, where = low(t, 2, 64), torch.arange(t) * 37
        for pairs in (False, True):
            options = {"base": 1e4, "interleaved": pairs}
            yield "rope", ((turned, where), options, low(t, 2, 64))
    for spread, experts, k in ((2, 16, 2), (2, 60, 4), (2, 8, 1), (0.3, 60, 4)):
        for again in (True, False):
            z = (normal(64, experts) * spread).to(dtype)
            yield "router", ((z, k), {"renormalize": again}, low(64, k))
    rates = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
    for n, step in ((512, 1), (512, 10), (501, 10)):
        at = low(n), (normal(n) * 0.1).to(dtype), normal(n) * 0.05, (normal(n) * 0.1) ** 2
        yield "adamw_step", (at, {"step": step, "lr": 1e-2, **rates}, None)
    at = low(24, 20), low(48, 24, 20), torch.zeros(24, 20), torch.ones(24, 20)
    yield "adamw_low", (at, {"step": 100, "lr": 2e-4, **rates}, None)
    for t, d in ((16, 128), (9, 96)):
        x = (normal(t, d) * torch.exp(normal(t, 1))).to(dtype)
        for name in ("mxfp8_e4m3", "mxfp4"):
            yield "quantize", ((x,), {"format": name}, None)
    yield "stochastic_round", ((normal(64, 256),), {}, None)
    if not more:
        return
    small, w, dy = normal(24, 64) * 1e-4, 1 + normal(64) * 0.3, low(24, 64)
    yield "rms_norm", ((small.to(dtype), (64,), w.to(dtype), 1e-6), {}, dy)
    far = (normal(24, 64) + 50).to(dtype)
    yield "layer_norm", ((far, (64,), w.to(dtype), low(64), 1e-5), {}, dy)
    yield "softmax", (((normal(8, 1000) * 0.1).to(dtype), -1), {}, low(8, 1000))
    gate, up = (normal(24, 64) * 8).to(dtype), (normal(24, 64) * 6).to(dtype)
    yield "swiglu", ((gate, up), {}, dy)
    yield "geglu", ((gate, up), {"approximate": "tanh"}, dy)
    yield "router", (((normal(32, 16) * 2 + 100).to(dtype), 2), {"renormalize": True}, low(32, 2))
    labels = torch.randint(0, 96, (24,), generator=chance)
    labels[::4] = -100
    each = torch.rand(24, generator=chance) + 0.5
    for options in ({}, {"label_smoothing": 0.1}):
        yield "cross_entropy", ((low(24, 96), labels), options, each)
        at = low(24, 64), (normal(96, 64) * 0.3).to(dtype), labels
        yield "linear_cross_entropy", (at, options, each)
    yield "sum", (((normal(700, 40).abs()).to(dtype), 0), {}, low(40))
    yield "linear", ((low(24, 512), low(40, 512)), {}, low(24, 40))
    yield "linear", ((low(600, 32), low(40, 32)), {}, low(600, 40))
    at = low(512), (normal(512) * 1e-8).to(dtype), normal(512) * 1e-9, (normal(512) * 1e-8) ** 2
    yield "adamw_step", (at, {"step": 3, "lr": 1e-2, **rates}, None)
    wide = (normal(40, 96) * torch.exp(3 * normal(40, 1))).to(dtype)
    yield "quantized_linear", ((low(24, 96), wide), {"format": "fp8_row"}, low(24, 40))
    ties = torch.arange(-32, 32).view(2, 32) / 8
    yield "quantize", ((ties.to(dtype),), {"format": "mxfp4"}, None)
    if more > 1:
        yield from latest_cases(dtype)
    if more > 2:
        yield "softmax", ((normal(96, 24).to(dtype).mT, -1), {}, low(24, 96))
        yield "rope", ((low(24, 2, 40), torch.arange(24) * 37), {"base": 1e4}, low(24, 2, 40))
    if more > 4:
        yield from newest_cases(dtype)


def latest_cases(dtype: torch.dtype) -> Iterator[tuple[str, Case]]:
    """Of options and values that no earlier set asked for."""
    chance = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=chance)

    def low(*shape: int) -> Tensor:
        return normal(*shape).to(dtype)

    for pairs in (False, True):
        options = {"base": 5e5, "interleaved": pairs}
        yield "rope", ((low(24, 2, 64), torch.arange(24) * 37), options, low(24, 2, 64))
    sparse = normal(24, 64) * (torch.rand(24, 64, generator=chance) > 0.1)
    for gate in (sparse, normal(24, 64) * 60):
        yield "swiglu", ((gate.to(dtype), low(24, 64)), {}, low(24, 64))
    wide = (normal(32, 512) * torch.exp2(3 * normal(32, 4)).repeat_interleave(128, 1)).to(dtype)
    yield "quantized_linear", ((wide, low(48, 512)), {"format": "fp8_block"}, low(32, 48))
    yield "quantized_linear", ((low(32, 160), low(4, 160)), {"format": "mxfp8"}, low(32, 4))
    for spread in (1, 6):
        x = (normal(16, 128) * torch.exp(spread * normal(16, 1))).to(dtype)
        yield "quantize", ((x,), {"format": "nvfp4"}, None)
    yield "stochastic_round", ((1 + normal(64, 256).abs(),), {}, None)
    rates = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
    at = low(512), (normal(512) * 0.1).to(dtype), normal(512) * 0.05, (normal(512) * 0.1) ** 2
    yield "adamw_step", (at, {"step": 2000, "lr": 1e-2, **rates}, None)
    param, grads = (1 + normal(24, 20).abs()).to(dtype), low(48, 24, 20)
    at = param, grads, torch.zeros(24, 20), torch.ones(24, 20)
    yield "adamw_low", (at, {"step": 100, "lr": 2e-3, **rates}, None)


def newest_cases(dtype: torch.dtype) -> Iterator[tuple[str, Case]]:
    """Of small rows, options together, deep tails, dead units and negative logits."""
    chance = torch.Generator().manual_seed(11)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=chance)

    def low(*shape: int) -> Tensor:
        return normal(*shape).to(dtype)

    rows, w, dy = (normal(24, 64) * 1e-3).to(dtype), 1 + normal(64) * 0.3, low(24, 64)
    yield "layer_norm", ((rows, (64,), w.to(dtype), low(64), 1e-5), {}, dy)
    labels = torch.randint(0, 96, (24,), generator=chance)
    labels[::5] = 7
    options = {"ignore_index": 7, "lse_square_scale": 1e-3}
    yield "cross_entropy", ((low(24, 96), labels), options, torch.rand(24, generator=chance) + 0.5)
    deep = (-2 - 18 * torch.rand(24, 64, generator=chance)).to(dtype)
    yield "swiglu", ((deep, low(24, 64)), {}, dy)
    yield "geglu", ((deep, low(24, 64)), {}, dy)
    at, dead = (low(32, 160), low(48, 160)), low(32, 48)
    yield "quantized_linear", (at, {"format": "nvfp4"}, low(32, 48))
    dead[:, 3] = 0
    yield "quantized_linear", (at, {"format": "fp8_block"}, dead)
    blocks = torch.exp2(torch.randint(-9, 10, (16, 8), generator=chance).float())
    x = normal(16, 128) * blocks.repeat_interleave(16, 1)
    yield "quantize", ((x.to(dtype),), {"format": "nvfp4"}, None)
    yield "router", (((normal(32, 16) - 5).to(dtype), 2), {"renormalize": True}, low(32, 2))


def exact_rope(x, positions, *, base, interleaved=False):
    width = x.shape[-1]
    angle = positions.double()[:, None] * base ** (-torch.arange(0, width, 2).double() / width)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    pair = a * cos - b * sin, b * cos + a * sin
    return torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)


def exact_loss(x, target, *, lse_square_scale=0.0, **options):
    loss = functional.cross_entropy(x, target, **{"reduction": "none", **options})
    return loss + lse_square_scale * x.logsumexp(-1) ** 2 if lse_square_scale else loss


def exact_geglu(gate, up, *, approximate="none"):
    if approximate == "tanh":
        inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        return gate * torch.sigmoid(2 * inner) * up
    return gate * 0.5 * torch.erfc(-gate * math.sqrt(0.5)) * up


def exact_router(z, k, *, renormalize):
    p = z.softmax(-1)
    chosen = p.gather(1, z.detach().topk(k, -1).indices)
    return chosen / chosen.sum(-1, keepdim=True) if renormalize else chosen


def exact_adamw(p, g, m, v, *, step, lr, beta1, beta2, eps, weight_decay):
    p, m, v = p.double(), m.double(), v.double()
    for i, each in enumerate(g.double() if g.ndim > p.ndim else g.double()[None]):
        m, v = beta1 * m + (1 - beta1) * each, beta2 * v + (1 - beta2) * each * each
        one, two = (1 - beta ** (step + i) for beta in (beta1, beta2))
        p = p * (1 - lr * weight_decay) - lr * (m / one) / ((v / two).sqrt() + eps)
    return p, m, v


EXACT: dict[str, Callable[..., Any]] = {
    "attention": exact_attention, "rms_norm": functional.rms_norm, "rope": exact_rope,
    "layer_norm": functional.layer_norm, "softmax": torch.softmax, "geglu": exact_geglu,
    "cross_entropy": exact_loss, "swiglu": lambda g, u: functional.silu(g) * u,
    "linear_cross_entropy": lambda x, w, target, **o: exact_loss(x @ w.T, target, **o),
    "linear": functional.linear, "quantized_linear": lambda x, w, format: x @ w.T,  # noqa: ARG005
    "embedding": functional.embedding, "sum": torch.sum, "router": exact_router,
    "adamw_step": exact_adamw, "adamw_low": exact_adamw,
    "quantize": lambda x, *, format: round_to(x.float(), format).double(),
    "stochastic_round": lambda x: x.double(),
}  # fmt: skip


def results(op: str, fn: Callable[..., Any], case: Case, exact: bool) -> list[Tensor]:
    """What comes out, and the gradients, in fp64."""
    at, options, grad = case
    torch.manual_seed(0)
    if grad is None:
        if op == "stochastic_round" and not exact:
            each = torch.stack([fn(*at).double() for _ in range(16)]).mean(2)
            return [each.mean(0), each]
        found = fn(*at, **options)
        if op == "stochastic_round":
            return [found.mean(1), found.mean(1).expand(16, -1)]
        if op == "quantize":
            return [found.double()]
        change = found[0].double() - at[0].double()
        change = change.mean() if op == "adamw_low" else change
        return [change, *(x.double() for x in found[1:])]
    own, leaves = [], []
    for x in at:
        if isinstance(x, Tensor) and x.is_floating_point():
            x = (x.double() if exact else x).detach().clone().requires_grad_()
            leaves.append(x)
        own.append(x)
    out = fn(*own, **options)
    out = out[0] if isinstance(out, tuple) else out
    out.backward(grad.to(out.dtype))
    return [x.double() for x in (out.detach(), *(leaf.grad for leaf in leaves))]


def errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    """Relative to the whole and to the largest; of each head to its own size."""
    rates = []
    for a, b in zip(found, exact, strict=True):
        e = (a - b).nan_to_num(math.inf)
        rates += [e.norm() / b.norm().clamp_min(1e-30), e.abs().max() / b.abs().max()]
        if b.ndim == 4:
            heads = e.norm(dim=(-1, -2)) / b.norm(dim=(-1, -2)).clamp_min(1e-30)
            rates.append(heads.max())
    return [float(x) for x in rates]


def standard_codes(x: Tensor, *, format: str) -> Tensor:
    return (nvfp4() if format == "nvfp4" else kernels.quantize())(x, format=format)


TWINS: dict[str, Any] = {
    "attention": attention(Kernel), "sum": kernels.sum_rows(), "quantize": standard_codes,
    "stochastic_round": lambda x: kernels.stochastic_bf16(x).to(torch.bfloat16),
}  # fmt: skip


@cache
def judged(op: str, dtype: str, more: int) -> list[tuple[Case, list[Tensor], list[float]]]:
    """The cases of an operation, each with its exact results and its twin's errors."""
    kind = getattr(torch, dtype)
    own = (attention_cases(kind, more) if op == "attention"
           else [case for name, case in operation_cases(kind, more) if name == op])  # fmt: skip
    twin, found = TWINS.get(op) or getattr(kernels, op)(), []
    for case in own:
        exact = results(op, EXACT[op], case, True)
        found.append((case, exact, errors(results(op, twin, case, False), exact)))
    return found


def ratio(op: str, fn: Callable[..., Any], dtype: str = "bfloat16", more: int = 0) -> float:
    """The largest error, in units of the twin's."""
    worst, format = 0.0, get_type_hints(fn).get("format")
    for case, exact, twin in judged(op, dtype, more):
        if "format" in case[1] and case[1]["format"] not in get_args(format):
            continue
        own = errors(results(op, fn, case, False), exact)
        worst = max([worst, *(a / max(b, 1e-7) for a, b in zip(own, twin, strict=True))])
    return worst


def drawn(which: str) -> Iterator[tuple[tuple[str, ...], float]]:
    """Thirty of the grid, or ten, each with its ratio."""
    attentive = "operations" not in which
    of_set, *seed = AGAIN.get(which, (which,))
    grid: Any = importlib.import_module(f"benchmarks.unseen.{of_set}_grid")
    counts: Counter[Any] = Counter()
    seen, kept = set(), 0
    if seed:
        seen = {one[:3] if attentive else one for one in grid.DRAWN}
    for one in grid.grid(*seed):
        limits = (((one[0], 2), (one[1], 4)) if attentive
                  else ((one[:2], 2), (one[0], 4), (one[2], 4)))  # fmt: skip
        key = one[:3] if attentive else one
        if key in seen or any(counts[of] == most for of, most in limits):
            continue
        seen.add(key)
        fault = grid.fault(*one)
        rate = ratio(getattr(fault, "op", "attention"), fault.fn, fault.dtype, which in LATER)
        if rate <= 1.5:
            continue
        counts.update(of for of, _ in limits)
        kept += 1
        yield one, rate
        if kept == (10 if seed else 30):
            return


def main() -> None:
    """Draw, or measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("set", choices=("attention.fifth", "operations.second", *LATER, *LATEST))
    parser.add_argument("--check", action="store_true", help="measure every kernel of the set")
    options = parser.parse_args()
    if options.set in UNDRAWN and not options.check:
        parser.error(f"{options.set}: nothing of this set is drawn; --check measures it")
    torch.set_num_threads(1)
    if not options.check:
        for one, rate in drawn(options.set):
            print(f"{one!r},  # {rate:.3g} ×", flush=True)
        return
    found = importlib.import_module(f"benchmarks.unseen.{options.set}")
    latest = options.set in LATEST
    more = 2 + LATEST.index(options.set) if latest else int(options.set in LATER)
    for fault in (*found.FAULTS, *found.SOUND):
        op = getattr(fault, "op", "attention")
        rate = ratio(op, fault.fn, fault.dtype, more)
        print(f"{op:22} {fault.name:45} {rate:.3g} ×", flush=True)


if __name__ == "__main__":
    main()
