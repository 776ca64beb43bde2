"""Sequences of different lengths packed one after the other, in the layout that FlashAttention's
users know.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from halfulp import ops
from halfulp.attention.attend import attention
from halfulp.calls import check, check_given
from halfulp.recipes import kernel_recipe


def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    recipe: str = "halfulp",
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention inside each of several packed sequences, on CPUs in one call of the native library.

    Args:
        query: `[T, H, D]`, the sequences one after the other.
        key: `[T_k, H_k, D]`, H_k a divisor of H.
        value: `[T_k, H_k, D_v]`.
        cu_seqlens_q: int32 or int64 `[S + 1]`, from 0 to T: where each of S sequences starts and
            the last ends.
        cu_seqlens_k: the same of key and value; as the queries if None.
        dropout_p: as `attention`, and so all below.
        is_causal: aligned at the bottom right, as FlashAttention does: the last query sees the last
            key.
        scale: softmax scale; 1/√D if None.
        window: (left, right), aligned the same way.
        softcap: c > 0: scores become c·tanh(S / c).
        sinks: `[H]`.
        recipe: the arithmetic.
        return_lse: also return lse `[H, T]`, differentiable.
        backend: "cpu", "triton" or "torch"; None takes the first that fits.

    Returns:
        out `[T, H, D_v]`.

    Raises:
        ValueError: for what does not fit, in one line.
    """
    q_ends, k_ends = _boundaries(query, key, value, cu_seqlens_q, cu_seqlens_k)
    # no sequence is computed as one without tokens, whose results have a gradient too
    if len(q_ends) == 1:
        q_ends = k_ends = [0, 0]
    given = (dropout_p, is_causal, scale, True, window, softcap, sinks)
    # one by one the backward pass is quadratic in the number of sequences: 89.8 s for 2000 of them,
    # where it takes 0.13 s together (docs/log.md)
    together = _together((query, key, value), (q_ends, k_ends), recipe, backend, given)
    if together is not None:
        return together if return_lse else together[0]
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    options: dict[str, Any] = {"softcap": softcap, "sinks": sinks}
    options |= {"recipe": recipe, "backend": backend}
    for i in range(len(q_ends) - 1):
        q, k, v = (
            x[ends[i] : ends[i + 1]].transpose(0, 1).unsqueeze(0)
            for x, ends in ((query, q_ends), (key, k_ends), (value, k_ends))
        )
        out, lse = attention(
            q, k, v, None, dropout_p, is_causal, scale, True,
            return_lse=True, window=window, causal_offset=k.shape[2] - q.shape[2], **options,
        )  # fmt: skip
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    out = torch.cat(outs)
    return (out, torch.cat(lses, 1)) if return_lse else out


def _together(
    given: tuple[Tensor, Tensor, Tensor],
    ends: tuple[list[int], list[int]],
    recipe: str,
    backend: str | None,
    options: tuple[Any, ...],
) -> tuple[Tensor, Tensor] | None:
    """Out and lse of all sequences in one call; None where each must be a call of its own."""
    if len(ends[0]) < 3 or not all(x.is_cpu for x in given):  # one sequence is an ordinary call
        return None
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in given)
    said: list[Any] = [q, k, v, None, *options, 0, 0 if options[0] else None]
    call = check(*said)
    name = kernel_recipe(recipe, q.dtype)
    if not ops.packed.takes(call, name, backend):
        return None
    seeds = None
    if call.dropout is not None:  # the numbers that as many calls would draw
        seeds = torch.randint(-(2**63), 2**63 - 1, (len(ends[0]) - 1,), device="cpu")
    out, lse = ops.packed.attend(call, name, torch.tensor(ends[0]), torch.tensor(ends[1]), seeds)
    return out[0].transpose(0, 1), lse[0]


def _boundaries(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None
) -> tuple[list[int], list[int]]:
    """Where the sequences of queries and of keys begin and end."""
    check_given(query=query, key=key, value=value, cu_seqlens_q=cu_seqlens_q)
    if cu_seqlens_k is not None:
        check_given(cu_seqlens_k=cu_seqlens_k)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim != 3:
            raise ValueError(
                f"{name} of shape {tuple(x.shape)}: accepted are 3 dimensions [T, H, D]"
            )
    q_ends = _ends("cu_seqlens_q", cu_seqlens_q, query.shape[0])
    k_ends = q_ends if cu_seqlens_k is None else _ends("cu_seqlens_k", cu_seqlens_k, key.shape[0])
    if len(k_ends) != len(q_ends) or k_ends[-1] != key.shape[0]:
        given, accepted = (
            f"{len(k_ends)} entries to {k_ends[-1]}",
            f"{len(q_ends)} entries to {key.shape[0]}",
        )
        raise ValueError(
            f"cu_seqlens_k of {given}: accepted are cu_seqlens_q's {accepted}, key's length"
        )
    if value.shape[0] != key.shape[0]:
        raise ValueError(f"value of length {value.shape[0]}: accepted is key's, {key.shape[0]}")
    return q_ends, k_ends


def _ends(name: str, cu_seqlens: Tensor, total: int) -> list[int]:
    """The boundaries as Python numbers, which is where a GPU is waited for."""
    if (
        cu_seqlens.ndim != 1
        or cu_seqlens.dtype not in (torch.int32, torch.int64)
        or cu_seqlens.shape[0] < 1
    ):
        given = f"{name} of shape {tuple(cu_seqlens.shape)} and {cu_seqlens.dtype}"
        raise ValueError(f"{given}: accepted is one dimension of int32 or int64")
    ends: list[int] = cu_seqlens.tolist()
    if ends[0] != 0 or ends[-1] != total or any(a > b for a, b in pairwise(ends)):
        raise ValueError(f"{name}={ends}: accepted are numbers that rise from 0 to {total}")
    return ends
