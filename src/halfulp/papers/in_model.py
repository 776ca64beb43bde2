"""Flash and baseline attention on the same inputs, at every attention call of a real training run.

Golden et al. (arXiv 2405.02803, section III) compute both versions whenever the model calls
attention, so that the inputs are a training's own and equal, and compare the outputs. Here a tap
does it behind the model's attention: it looks and gives back what came, so the run keeps its bits.
The fp64 value stands beside, to say which of them is off.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from halfulp.attention import golden
from halfulp.calls import Call
from halfulp.runs.results import Figure, Series
from halfulp.runs.threads import one_thread
from halfulp.training.attention import AttentionFunction, attention_function, set_tap
from halfulp.training.config import RunConfig
from halfulp.training.loop import in_memory

BASELINE, GOLDEN = "baseline", "fp64"
ATTENTIONS = {
    BASELINE: "torch:math",
    "flash": "torch:flash",
    "flash, emulated": "BF16_FLASH2[block_query=16,block_key=16]",
}
"""What is compared by default: PyTorch's math backend, its flash kernel, and flash emulated in
tiles of 16.
"""


@dataclass(frozen=True)
class Deviation:
    """How far two versions of one call are apart, over all elements of out."""

    step: int
    layer: int
    version: str
    against: str
    largest: float
    mean: float  # of the absolute difference
    deviation: float  # standard deviation of the absolute difference


@dataclass
class Comparing:
    """A tap that runs every attention on what the model's own was fed, in bf16 as the kernels read
    it.
    """

    attentions: Mapping[str, AttentionFunction]
    step: int = 0  # of the run; 0: do not look
    calls: int = 0
    found: list[Deviation] = field(default_factory=list)

    def __call__(self, layer: int, call: Call, out: Tensor) -> Tensor:
        """Compare, and give back out as it came."""
        if self.step:
            self.calls += 1
            # autocast would choose other formats than the versions have
            with torch.no_grad(), torch.autocast(out.device.type, enabled=False):
                self._compare(layer, call)
        return out

    def _compare(self, layer: int, call: Call) -> None:
        read = [x.detach().bfloat16() for x in call.operands]
        outs = {
            name: function(*read, **call.options()).double()
            for name, function in self.attentions.items()
        }
        outs[GOLDEN] = golden(*read, **call.options()).out
        pairs = [(name, BASELINE) for name in self.attentions if name != BASELINE]
        pairs += [(name, GOLDEN) for name in self.attentions]
        for version, against in pairs:
            apart = (outs[version] - outs[against]).abs()
            largest, mean, deviation = (float(x) for x in (apart.max(), apart.mean(), apart.std()))
            self.found.append(
                Deviation(self.step, layer, version, against, largest, mean, deviation)
            )


@dataclass(frozen=True)
class InModelResult:
    """Every comparison of a run, and the weights that it ended in."""

    deviations: tuple[Deviation, ...]
    calls: int  # attention calls that were compared
    loss: tuple[float, ...]  # every step
    weights: Mapping[str, Tensor]
    command: str

    def mean_ratio(self, version: str) -> dict[int, float]:
        """Per layer, the median over steps of a version's mean error against fp64, over that of the
        baseline.
        """
        return {
            layer: statistics.median(
                a.mean / b.mean
                for a, b in zip(
                    self._of(version, GOLDEN, layer),
                    self._of(BASELINE, GOLDEN, layer),
                    strict=True,
                )
                if b.mean
            )
            for layer in self.layers
        }

    @property
    def layers(self) -> list[int]:
        """The layers that were compared."""
        return sorted({found.layer for found in self.deviations})

    def _of(self, version: str, against: str, layer: int) -> list[Deviation]:
        wanted = (version, against, layer)
        return [x for x in self.deviations if (x.version, x.against, x.layer) == wanted]

    def figure(self, version: str, against: str) -> Figure:
        """Return the mean difference of a pair over steps, a line a layer."""
        caption = (
            "Mean absolute difference of out at every attention call, on the inputs that training"
            " gives it."
        )
        series = []
        for layer in self.layers:
            same = self._of(version, against, layer)
            x, y = tuple(one.step for one in same), tuple(one.mean for one in same)
            series.append(Series(f"layer {layer}", x, y))
        title, y_label = f"{version} against {against}", "mean difference of out"
        return Figure(title, "step", y_label, tuple(series), caption, self.command, y_log=True)


def compare_in_model(
    config: RunConfig,
    every: int = 1,
    *,
    attentions: Mapping[str, str] = ATTENTIONS,
    command: str = "",
) -> InModelResult:
    """Train, and compare several versions of attention at every call of every `every`-th step.

    Args:
        config: the run; what it trains with is its own plan, whatever is compared.
        every: steps from one comparison to the next, the first step included.
        attentions: versions by name, one of them "baseline".
        command: what repeats it, for the record.

    Raises:
        ValueError: there is no baseline, a version is not known, or the configuration does not fit.
    """
    if BASELINE not in attentions or len(attentions) < 2 or every < 1:
        accepted = f"accepted are {BASELINE!r} and another version, and every ≥ 1"
        raise ValueError(f"attentions={list(attentions)}, every={every}: {accepted}")
    tap = Comparing({name: attention_function(choice) for name, choice in attentions.items()})
    losses: list[float] = []
    with one_thread(), in_memory(config) as session:
        set_tap(session.workload.model, tap)
        for number in range(1, config.steps + 1):
            tap.step = number if (number - 1) % every == 0 else 0
            session.step()
            losses.append(session.loss)
        weights = session.state().model
    return InModelResult(tuple(tap.found), tap.calls, tuple(losses), weights, command)


def same_bits(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether two sets of weights are equal bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
