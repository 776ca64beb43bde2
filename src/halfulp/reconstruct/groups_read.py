"""How often each of the query heads that share a key head is counted in its gradients, read off
them: they are linear in what each head adds, which is known.
"""

from __future__ import annotations

import torch

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
    call, groups = trial.call, trial.call.groups
    if groups == 1 or tensor not in GRADIENTS[1:]:
        return "", ""
    if tensor == "grad_value":
        each = weights_of(call, scores_of(call)).mT @ trial.grad_out.double()
    else:
        each = grad_scores_of(trial).mT @ call.query.double() * call.scale
    each = torch.where(observed.usable.repeat_interleave(groups, 1), each, 0.0)
    got = observed.value.flatten(2).unsqueeze(-1)
    each = each.reshape(*got.shape[:2], groups, -1)  # [B, H_k, groups, N_k D]
    times = torch.linalg.lstsq(each.mT, got).solution
    rest = float((got - each.mT @ times).square().sum())
    times = times.squeeze(-1)
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
