"""Faults that need a size, a stride, a group or a second call to show: how many the audit catches
that it was not written against, and whether it cries wolf.

usage: python -m benchmarks.size_faults [--seeds 1] [--only NAME] [--json FILE]

Each kernel is an fp32 attention with one branch that goes wrong where kernels branch: tails, head
dimensions, odd heads, groups, batches, few queries, more tiles than a persistent grid has, strides,
offsets of storage, dO's strides, second calls and second backward passes, late maxima. They were
written after the covering array (halfulp.audit.size_array), and the array was not changed for them.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfulp.audit import audit

Kernel = Callable[..., Tensor]
INF = math.inf


def scores_of(q: Tensor, k: Tensor, is_causal: bool, scale: float, offset: int = 0) -> Tensor:
    s = q @ k.mT * scale
    if is_causal:
        keep = torch.ones(s.shape[-2:], dtype=torch.bool).tril(offset)
        s = s.masked_fill(~keep, -INF)
    return s


def base(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, offset: int = 0) -> Tensor:
    return scores_of(q, k, is_causal, scale, offset).softmax(-1) @ v


def kernel(change: Callable[..., Tensor]) -> Kernel:
    """`change(base, q, k, v, is_causal, scale)` on fp32 tensors as a function to audit; key heads
    are repeated before, and their gradients summed, in fp32.
    """

    def attention(query, key, value, *, is_causal=False, scale=None, enable_gqa=False):  # noqa: ARG001
        groups = query.shape[1] // key.shape[1]
        k, v = (x.float().repeat_interleave(groups, 1) for x in (key, value))
        alpha = query.shape[-1] ** -0.5 if scale is None else scale
        return change(query.float(), k, v, is_causal, alpha).to(query.dtype)

    attention.__qualname__ = attention.__name__ = getattr(change, "__name__", "kernel")
    return attention


class Backward(torch.autograd.Function):
    """Identity whose gradient is changed by a function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        """As it is."""
        ctx.change = change
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Changed."""
        return ctx.change(grad), None


def on_grad(x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    return Backward.apply(x, change)


def but(x: Tensor, where: Any, value: Tensor | float) -> Tensor:
    """x with a part replaced, differentiable."""
    mask = torch.zeros(x.shape, dtype=torch.bool)
    mask[where] = True
    other = value if isinstance(value, Tensor) else torch.full_like(x, value)
    return torch.where(mask, other, x)


FAULTS: dict[str, Kernel] = {}


def fault(change: Callable[..., Tensor]) -> Callable[..., Tensor]:
    FAULTS[change.__name__] = kernel(change)
    return change


@fault
def tail_of_less_than_16_keys_lost(q, k, v, causal, scale):
    n = k.shape[2]
    keep = n - n % 16 if n > 64 and n % 16 else n
    return base(q, k[:, :, :keep], v[:, :, :keep], causal, scale)


@fault
def last_key_lost_after_a_whole_tile(q, k, v, causal, scale):
    n = k.shape[2] - (k.shape[2] % 64 == 1 and k.shape[2] > 1)
    return base(q, k[:, :, :n], v[:, :, :n], causal, scale)


@fault
def causal_sees_one_more_beyond_256(q, k, v, causal, scale):
    out = base(q, k, v, causal, scale)
    if causal and q.shape[2] > 256:
        out = torch.cat([out[:, :, :256], base(q, k, v, True, scale, 1)[:, :, 256:]], 2)
    return out


@fault
def causal_from_the_end(q, k, v, causal, scale):
    return base(q, k, v, causal, scale, max(0, k.shape[2] - q.shape[2]))


@fault
def features_beyond_64_left_out_of_scores(q, k, v, causal, scale):
    return base(q[..., :64], k[..., :64], v, causal, scale)


@fault
def columns_beyond_64_not_written(q, k, v, causal, scale):
    out = base(q, k, v, causal, scale)
    return but(out, (..., slice(64, None)), 0.0) if out.shape[-1] > 64 else out


@fault
def value_columns_repeat_where_wider_than_keys(q, k, v, causal, scale):
    d = q.shape[-1]
    extra = v.shape[-1] - d
    if extra > 0:
        v = torch.cat([v[..., :d], v[..., :extra]], -1)
    return base(q, k, v, causal, scale)


@fault
def last_of_odd_heads_takes_its_neighbors_keys(q, k, v, causal, scale):
    h = k.shape[1]
    if h % 2 and h > 1:
        k = torch.cat([k[:, :-1], k[:, -2:-1]], 1)
    return base(q, k, v, causal, scale)


@fault
def last_of_three_sequences_takes_the_first_values(q, k, v, causal, scale):
    if v.shape[0] > 2:
        v = torch.cat([v[:-1], v[:1]], 0)
    return base(q, k, v, causal, scale)


@fault
def tiles_beyond_132_not_written(q, k, v, causal, scale):
    out = base(q, k, v, causal, scale)
    tiles = math.ceil(out.shape[2] / 128)
    flat = out.flatten(0, 1)
    first = 132 // tiles
    return but(flat, slice(first, None), 0.0).view_as(out)


@fault
def decode_merges_two_splits_by_their_mean(q, k, v, causal, scale):
    if q.shape[2] > 16 or k.shape[2] < 64 or causal:
        return base(q, k, v, causal, scale)
    n = k.shape[2] // 2
    one, two = (
        base(q, k[:, :, :n], v[:, :, :n], False, scale),
        base(q, k[:, :, n:], v[:, :, n:], False, scale),
    )
    return (one + two) / 2


@fault
def single_query_skips_the_first_key(q, k, v, causal, scale):
    if q.shape[2] == 1 and k.shape[2] > 1 and not causal:
        k, v = k[:, :, 1:], v[:, :, 1:]
    return base(q, k, v, causal, scale)


@fault
def no_rescale_after_a_first_tile_far_below(q, k, v, causal, scale):
    s = scores_of(q, k, causal, scale)
    n = min(64, k.shape[2] // 2)
    if n == 0:
        return s.softmax(-1) @ v
    first, rest = s[..., :n], s[..., n:]
    m1, m = first.amax(-1, keepdim=True), s.amax(-1, keepdim=True)
    rescale = torch.where(m - m1 > 87, torch.ones_like(m), (m1 - m).exp()).nan_to_num(0.0)
    w1, w2 = (first - m1).exp().nan_to_num(0.0), (rest - m).exp()
    l = w1.sum(-1, keepdim=True) * rescale + w2.sum(-1, keepdim=True)
    return (w1 @ v[:, :, :n] * rescale + w2 @ v[:, :, n:]) / l


@fault
def maximum_taken_before_the_causal_mask(q, k, v, causal, scale):
    s = q @ k.mT * scale
    p = (s - s.amax(-1, keepdim=True)).clamp_min(-40).exp()
    if causal:
        p = p * torch.ones(s.shape[-2:]).tril()
        p = torch.where(p < 1e-7, torch.zeros_like(p), p)
    return p @ v / (p.sum(-1, keepdim=True) + 1e-20)


@fault
def keys_beyond_4096_left_out(q, k, v, causal, scale):
    return base(q, k[:, :, :4096], v[:, :, :4096], causal, scale)


@fault
def queries_beyond_4096_not_written(q, k, v, causal, scale):
    out = base(q, k, v, causal, scale)
    return but(out, (slice(None), slice(None), slice(4096, None)), 0.0)


@fault
def rows_beyond_the_keys_see_the_last_only(q, k, v, causal, scale):
    out = base(q, k, v, causal, scale)
    n = k.shape[2]
    if causal and q.shape[2] > n:
        last = v[:, :, -1:].expand(-1, -1, q.shape[2] - n, -1)
        out = torch.cat([out[:, :, :n], last], 2)
    return out


@fault
def scale_of_the_padded_width(q, k, v, causal, scale):
    d = q.shape[-1]
    return base(q, k, v, causal, scale * math.sqrt(d / 2 ** math.ceil(math.log2(d))))


@fault
def padding_keeps_its_weight_below_16_keys(q, k, v, causal, scale):
    if k.shape[2] < 16 and not causal:
        pad = (0, 0, 0, 16 - k.shape[2])
        k, v = (torch.nn.functional.pad(x, pad) for x in (k, v))
    return base(q, k, v, causal, scale)


@fault
def grad_value_lost_for_a_single_key(q, k, v, causal, scale):
    return base(q, k, on_grad(v, lambda g: g * (g.shape[2] > 1)), causal, scale)


@fault
def grad_key_lost_beyond_128_features(q, k, v, causal, scale):
    return base(q, on_grad(k, lambda g: but(g, (..., slice(128, None)), 0.0)), v, causal, scale)


@fault
def grad_query_of_the_last_of_five_heads_lost(q, k, v, causal, scale):
    def change(g: Tensor) -> Tensor:
        return but(g, (slice(None), slice(4, 5)), 0.0)

    return base(on_grad(q, change) if q.shape[1] == 5 else q, k, v, causal, scale)


@fault
def rows_beyond_4_not_written_below_16_queries(q, k, v, causal, scale):
    out = base(q, k, v, causal, scale)
    return but(out, (slice(None), slice(None), slice(4, None)), 0.0) if q.shape[2] <= 16 else out


@fault
def one_row_wrong_after_a_ragged_query_tile(q, k, v, causal, scale):
    out = base(q, k, v, causal, scale)
    tail = out.shape[2] % 64
    return but(out, (slice(None), slice(None), slice(-1, None)), 1.0) if tail > 48 else out


@fault
def grad_query_in_another_scale_where_values_are_narrow(q, k, v, causal, scale):
    narrow = v.shape[-1] < q.shape[-1]
    return base(on_grad(q, lambda g: g * 1.2) if narrow else q, k, v, causal, scale)


@fault
def noisy_in_the_last_head_of_eight(q, k, v, causal, scale):
    out = base(q, k, v, causal, scale)
    if q.shape[1] == 8:
        out = out * (1 + 0.3 * (torch.arange(8) == 7)[:, None, None])
    return out


@fault
def diagonal_left_out_in_later_tiles(q, k, v, causal, scale):
    if not causal or q.shape[2] <= 64:
        return base(q, k, v, causal, scale)
    late = base(q, k, v, True, scale, -1)
    return torch.cat([base(q, k, v, True, scale)[:, :, :64], late[:, :, 64:]], 2)


@fault
def row_sum_lacks_the_tail_beyond_256(q, k, v, causal, scale):
    s = scores_of(q, k, causal, scale)
    p = s.softmax(-1)
    whole = s.shape[-1] - s.shape[-1] % 128
    if s.shape[-1] > 256 and whole < s.shape[-1]:
        p = p / p[..., :whole].sum(-1, keepdim=True).clamp_min(1e-6)
    return p @ v


# What needs the tensors as they are given, or what was before.


def strided(read: Callable[[Tensor], Tensor], of_grad: bool = False) -> Kernel:
    def attention(query, key, value, *, is_causal=False, scale=None):
        if of_grad:
            out = base(query.float(), key.float(), value.float(), is_causal, scale)
            return on_grad(out.to(query.dtype), read)
        q, k, v = (read(x).float() for x in (query, key, value))
        return base(q, k, v, is_causal, scale).to(query.dtype)

    return attention


def as_contiguous(x: Tensor) -> Tensor:
    """The elements that a kernel reads which takes the strides of a dense tensor."""
    if x.is_contiguous():
        return x
    dense = torch.empty(x.shape).stride()
    reach = x.storage_offset() + sum((n - 1) * s for n, s in zip(x.shape, dense, strict=True)) + 1
    if reach > x.untyped_storage().nbytes() // x.element_size():
        return torch.zeros_like(x) + x.flatten()[0]
    return x.as_strided(x.shape, dense)


def without_offset(x: Tensor) -> Tensor:
    return x.as_strided(x.shape, x.stride(), 0) if x.storage_offset() else x


FAULTS["inputs_read_as_if_contiguous"] = strided(as_contiguous)
FAULTS["offset_of_storage_ignored"] = strided(without_offset)
FAULTS["grad_out_read_as_if_contiguous"] = strided(as_contiguous, of_grad=True)
FAULTS["expanded_grad_out_read_once"] = strided(
    lambda g: but(g, (slice(None), slice(None), slice(1, None)), 0.0) if 0 in g.stride() else g,
    of_grad=True,
)
FAULTS["last_query_stride_of_transposed_keys"] = strided(
    lambda x: x if x.is_contiguous() else but(x, (slice(None), slice(None), slice(-1, None)), 0.0)
)


class Accumulating(torch.autograd.Function):
    """A buffer of dQ that nobody zeroes before a second backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """As it is."""
        ctx.buffer = torch.zeros_like(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """What came so far."""
        ctx.buffer += grad
        return ctx.buffer.clone()


def second_backward_adds_to_the_first(query, key, value, *, is_causal=False, scale=None):
    q = Accumulating.apply(query.float())
    return base(q, key.float(), value.float(), is_causal, scale).to(query.dtype)


def stale_row_maximum() -> Kernel:
    """A workspace kept by size, which the second call of that size finds filled."""
    seen: dict[tuple[int, ...], int] = {}

    def attention(query, key, value, *, is_causal=False, scale=None):
        size = (*query.shape, key.shape[2])
        seen[size] = seen.get(size, 0) + 1
        out = base(query.float(), key.float(), value.float(), is_causal, scale)
        return (out * (1 if seen[size] == 1 else 1.5)).to(query.dtype)

    return attention


def grouped(change: Callable[[Tensor, int], Tensor], forward: bool = False) -> Kernel:
    def attention(query, key, value, *, is_causal=False, scale=None, enable_gqa=False):  # noqa: ARG001
        groups = query.shape[1] // key.shape[1]
        k, v = (x.float() for x in (key, value))
        if forward and groups > 2:
            k, v = (x.repeat(1, groups, 1, 1) for x in (k, v))
        else:
            k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
            if groups > 2:
                k, v = (on_grad(x, lambda g: change(g, groups)) for x in (k, v))
        return base(query.float(), k, v, is_causal, scale).to(query.dtype)

    return attention


FAULTS["second_backward_adds_to_the_first"] = second_backward_adds_to_the_first
FAULTS["second_call_of_a_size_is_off"] = stale_row_maximum()
FAULTS["groups_beyond_two_take_other_key_heads"] = grouped(lambda g, _: g, forward=True)
FAULTS["gradients_of_groups_beyond_two_averaged"] = grouped(lambda g, groups: g / groups)
FAULTS["last_head_of_a_group_left_out_of_gradients"] = grouped(
    lambda g, groups: g * (torch.arange(g.shape[1]) % groups < groups - 1)[:, None, None]
)


def tf32(query, key, value, *, is_causal=False, scale=None):
    """fp32 inputs multiplied in TF32: 10 bits of mantissa."""

    def cut(x: Tensor) -> Tensor:
        bits = x.detach().contiguous().view(torch.int32)
        near = (((bits + 0xFFF + ((bits >> 13) & 1)) >> 13) << 13).view(torch.float32)
        return x + (near - x.detach())

    return base(cut(query.float()), cut(key.float()), cut(value.float()), is_causal, scale).to(
        query.dtype
    )


def tiled(block: int) -> Kernel:
    """A sound kernel in tiles, in fp32."""

    def change(q, k, v, causal, scale):
        s = scores_of(q, k, causal, scale)
        m = torch.full((*s.shape[:3], 1), -INF)
        l, acc = torch.zeros_like(m), torch.zeros(*s.shape[:3], v.shape[3])
        for at in range(0, s.shape[3], block):
            part = s[..., at : at + block]
            new = torch.maximum(m, part.amax(-1, keepdim=True)).detach()
            safe = torch.where(new == -INF, torch.zeros_like(new), new)
            p, rescale = (part - safe).exp(), (m - safe).exp()
            l, acc = (
                l * rescale + p.sum(-1, keepdim=True),
                acc * rescale + p @ v[:, :, at : at + block],
            )
            m = new
        return acc / l

    return kernel(change)


SOUND = {"fp32": kernel(base), "tiles of 16": tiled(16), "tiles of 128": tiled(128)}
SOUND |= {
    name: name for name in ("halfulp", "sdpa:math", "recipe:BF16_FLASH2", "recipe:BF16_FLASH1")
}


def main() -> None:
    """Audit, count, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=1, help="seeds of the inputs")
    parser.add_argument("--only", help="one kernel's name")
    parser.add_argument("--json", type=Path, help="also write every verdict to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, start = [], time.perf_counter()
    todo: list[tuple[str, Any, bool, str]] = [(n, f, True, "bfloat16") for n, f in FAULTS.items()]
    todo.append(("tf32", tf32, True, "float32"))
    todo += [(name, found, False, "bfloat16") for name, found in SOUND.items()]
    for name, found, faulty, dtype in todo:
        for seed in range(options.seeds):
            if options.only not in (None, name):
                continue
            report = audit(found, seed=seed, dtype=dtype, explain=False)
            by_array = any(
                f.case is not None and f.case.probe.startswith("sizes/") for f in report.findings
            )
            by_probes = any(
                f.grade == "defect" and not (f.case and f.case.probe.startswith("sizes/"))
                for f in report.findings
            )
            rows.append(
                {"kernel": name, "faulty": faulty, "seed": seed, "verdict": report.verdict}
                | {"array": by_array, "probes": by_probes, "reason": report.reason}
            )
            mark = "" if (report.verdict == "defect") == faulty else "  <-- WRONG"
            print(
                f"{name:52} {report.verdict:10} array {by_array!s:5} probes {by_probes}{mark}",
                flush=True,
            )
    for faulty, what in ((True, "faults caught"), (False, "false alarms on sound kernels")):
        own = [row for row in rows if row["faulty"] is faulty]
        alarms = sum(row["verdict"] == "defect" for row in own)
        before = sum(bool(row["probes"]) for row in own)
        print(f"{what}: {alarms} of {len(own)}; by the probes alone {before}")
    print(f"{time.perf_counter() - start:.0f} s")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
