"""How often each query head is counted in the gradients of a key head, of its group and of others,
read off them: they are linear in what each head adds, which is known.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from halfulp.reconstruct.dataflow import grad_scores_of
from halfulp.reconstruct.emulating import GRADIENTS, SHORT
from halfulp.reconstruct.evidence import Observed
from halfulp.reconstruct.exact import scores_of, weights_of
from halfulp.reconstruct.panel import Trial

LEFT = 0.05  # share of an error that other numbers of heads may leave
OTHERWISE = 0.1  # than once: what is less is rounding's


def members_counted(trial: Trial, tensor: str, observed: Observed) -> tuple[str, str]:
    """In words how often each head of a group counts in dK or dV, with the cause, where some count
    otherwise than others and that is what is wrong.
    """
    groups = trial.call.groups
    if groups == 1 or tensor not in GRADIENTS[1:]:
        return "", ""
    b, key_heads = observed.value.shape[:2]
    each = _added(trial, tensor).reshape(b, key_heads, groups, -1)
    times, rest = _solved(observed, each)
    off = ((times - 1).abs() > OTHERWISE).any(-1)
    if rest > LEFT * observed.total or not bool(off.any()):
        return "", ""
    mean = times[off].mean(0)
    apart, spread = (float(x.max() - x.min()) for x in (mean, (times[off] - mean).flatten()))
    if apart < OTHERWISE or spread > OTHERWISE:
        return "", ""
    counts = ", ".join(f"{float(x):.2g}" for x in mean.masked_fill(mean.abs() < OTHERWISE, 0.0))
    whose = "each group" if bool(off.all()) else "some groups"
    return f"in {SHORT[tensor]} the heads of {whose} count {counts} ×", "group-sum"


def of_whole_heads(trial: Trial, tensor: str, observed: Observed) -> bool:
    """Whether dK or dV is a sum of what whole query heads of its sequence add, with their own key
    head or with this one, as it is where heads are paired otherwise, and is not where they overlap
    in memory.
    """
    call, own = trial.call, _added(trial, tensor)
    every = []
    for h in range(call.key.shape[1]):
        key, value = (x[:, h : h + 1] for x in call.operands[1:])
        with_it = replace(trial, call=replace(call, key=key, value=value, shape=None))
        every.append(torch.cat([own, _added(with_it, tensor)], 1).flatten(2))
    return _solved(observed, torch.stack(every, 1))[1] <= LEFT * observed.total


def _added(trial: Trial, tensor: str) -> Tensor:
    """What each query head adds to dK or dV, `[B, H, N_k, D]`."""
    call = trial.call
    if tensor == "grad_value":
        return weights_of(call, scores_of(call)).mT @ trial.grad_out.double()
    return grad_scores_of(trial).mT @ call.query.double() * call.scale


def _solved(observed: Observed, each: Tensor) -> tuple[Tensor, float]:
    """How often each of these counts, `[B, H_k, heads]`, and the squares that this leaves."""
    got = observed.value.flatten(2).unsqueeze(-1)
    each = each * observed.usable.flatten(2).unsqueeze(2)  # [B, H_k, heads, N_k D]
    times = torch.linalg.lstsq(each.mT, got, driver="gelsd").solution  # heads may be there twice
    return times.squeeze(-1), float((got - each.mT @ times).square().sum())
