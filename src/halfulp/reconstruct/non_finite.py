"""Results that are not finite where they should be: on which call, and what goes with it."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from halfulp.calls import EVERYTHING, Sees
from halfulp.reconstruct.emulating import GRADIENTS, SHORT, Emulator
from halfulp.reconstruct.exact import scores_of
from halfulp.reconstruct.panel import Run, Trial, simplicity

_FAR = 128.0  # of scores
_EXP_RANGE = 87.0  # exp of more is no float32


def not_finite(emulator: Emulator) -> tuple[str, str, str, str] | None:
    """The first result that is not finite where it should be, on the simplest call: the result, the
    call, in words, and the cause.
    """
    broken = emulator.nonfinite
    if not broken:
        return None
    trial, tensor = min(broken, key=lambda k: (list(SHORT).index(k[1]), simplicity(k[0])))
    scores = scores_of(emulator.trials[trial].call)
    lse = scores.logsumexp(-1)
    text, cause = f"{broken[trial, tensor]} elements are not finite", "non-finite"
    if tensor in GRADIENTS and float(lse[lse.isfinite()].abs().max()) > _EXP_RANGE:
        text, cause = f"{text}, where exp(−lse) is beyond float32", "exp-of-lse"
    elif tensor not in GRADIENTS and _hides_peaks(emulator.trials[trial], lse):
        text += ", where what is hidden scores far above what is seen: is it taken out after exp?"
    elif tensor not in GRADIENTS and float(scores[scores.isfinite()].abs().max()) > _EXP_RANGE:
        text += ", where exp of a score is beyond float32: is the row maximum subtracted?"
    elif tensor == "out" and _of_one_pair(emulator.run, emulator.trials[trial]):
        text, cause = f"{text}, by a mask that hides one key from each row as well", "mask"
    elif bool(lse.isinf().any()) and (level := _far_from_0(emulator)):
        text, cause = f"{text}, and so are some where scores lie around {level:g}", "maximum"
    elif bool(lse.isinf().any()):
        text, cause = f"{text}, in calls with rows that see nothing", "masked-row"
    return tensor, trial, text, cause


def _far_from_0(emulator: Emulator) -> float:
    """Around which scores O is not finite, of calls without rows that see nothing; 0: none."""
    some = next(iter(emulator.trials.values()))
    for level in (_FAR, -_FAR):
        query, key = (torch.zeros_like(x) for x in (some.call.query, some.call.key))
        # all scores alike
        query[..., 0], key[..., 0] = _FAR / 8, math.copysign(8 / some.call.scale, level)
        call = replace(some.call, query=query, key=key, softcap=0.0, sees=EVERYTHING)
        result = emulator.run(replace(some, name=f"scores of {level:g}", call=call))
        if result is not None and not bool(result.out.isfinite().all()):
            return level
    return 0.0


def _hides_peaks(trial: Trial, lse: Tensor) -> bool:
    """Whether what a mask hides scores so far above what is seen that its exp is no float32."""
    if trial.call.sees.mask is None or trial.call.sees.added is not None:
        return False
    every = scores_of(replace(trial.call, sees=EVERYTHING)).amax(-1)
    return bool(((every - lse)[lse.isfinite()] > _EXP_RANGE).any())


def _of_one_pair(run: Run, trial: Trial) -> bool:
    """Whether O is not finite under a boolean mask that hides one key from each row."""
    mask = trial.call.sees.mask
    if mask is None or mask.dtype != torch.bool:
        return False
    seen = torch.ones_like(mask)
    seen.scatter_(-1, torch.arange(mask.shape[-2]).view(-1, 1).expand_as(mask) % mask.shape[-1],
                  False)  # fmt: skip
    asked = replace(trial, name=f"{trial.name}/one hidden",
                    call=replace(trial.call, sees=Sees(mask=seen)))  # fmt: skip
    result = run(asked)
    return result is not None and not bool(result.out.isfinite().all())
