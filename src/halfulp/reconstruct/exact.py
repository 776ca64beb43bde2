"""The exact scores and weights of a call, in float64, and ratios of others to them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from halfulp.calls import Call

CLEAR = 2.0**-12  # weights whose ratio to the exact ones is looked at


def scores_of(call: Call) -> Tensor:
    """`[B, H, N, N_k]`, float64, hidden pairs at −inf."""
    key = call.key.double().repeat_interleave(call.groups, 1)
    scores = call.query.double() @ key.mT * call.scale
    if call.softcap:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    whole = slice(0, scores.shape[2]), slice(0, scores.shape[3])
    return call.sees.apply(scores, *whole, 1.0)


def weights_of(call: Call, scores: Tensor) -> Tensor:
    """P of such scores, sinks counted; 0 in rows that see nothing."""
    if call.sinks is None:
        return scores.softmax(-1).nan_to_num(0.0)
    sinks = call.sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]


def row_maximum(call: Call) -> Tensor:
    """`[B, H, N]`, float64."""
    return scores_of(call).amax(-1)


def logarithms(read: Tensor, exact: Tensor) -> tuple[Tensor, Tensor]:
    """Of the ratios of read and exact weights, 0 where they are not clear; and 1 where they are."""
    clear = (read > 0) & (exact > CLEAR)
    log = (read.clamp_min(1e-300) / exact.clamp_min(1e-300)).log()
    return torch.where(clear, log, 0.0), clear.double()


def rms(x: Tensor, weight: Tensor) -> float:
    """Root of the mean square, weighted."""
    return math.sqrt(float((x.square() * weight).sum() / weight.sum().clamp_min(1)))


def centered(x: Tensor, weight: Tensor) -> Tensor:
    """Less each row's mean."""
    count = weight.sum(-1, keepdim=True).clamp_min(1)
    return (x - (x * weight).sum(-1, keepdim=True) / count) * weight
