"""Flash and baseline attention on the same inputs, at every attention call of a real training run.

Golden et al. (arXiv 2405.02803, section III) compute both versions whenever the model calls
attention, so that the inputs are a training's own and equal, and compare the outputs. Here a tap
does it behind the model's attention: it looks and gives back what came, so the run keeps its bits.
The fp64 value stands beside, to say which of them is off.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from halfulp.attention import golden
from halfulp.calls import Call
from halfulp.runs.results import Figure, Progress, Series, Table, no_progress
from halfulp.runs.threads import one_thread
from halfulp.training.attention import AttentionFunction, attention_function, set_tap
from halfulp.training.config import RunConfig
from halfulp.training.distributed import world
from halfulp.training.session import Session
from halfulp.training.workload import build_workload

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
                    self._of(version, GOLDEN, layer=layer),
                    self._of(BASELINE, GOLDEN, layer=layer),
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

    @property
    def versions(self) -> list[tuple[str, str]]:
        """What was compared with what."""
        return list(dict.fromkeys((found.version, found.against) for found in self.deviations))

    def _of(self, version: str, against: str, *, layer: int | None = None) -> list[Deviation]:
        return [
            found
            for found in self.deviations
            if (found.version, found.against) == (version, against) and layer in (None, found.layer)
        ]

    def table(self) -> Table:
        """Return a line for every layer and pair: medians over steps, and the range of the largest
        difference.
        """
        rows = []
        for layer in self.layers:
            for version, against in self.versions:
                same = self._of(version, against, layer=layer)
                largest = [found.largest for found in same]
                mean, spread = (
                    statistics.median(getattr(x, name) for x in same)
                    for name in ("mean", "deviation")
                )
                rows.append(
                    (layer, f"{version} against {against}", max(largest), mean, spread, len(same))
                )
        caption = (
            "Out of every attention call on equal inputs: the largest difference of all steps;"
            " medians over steps."
        )
        columns = (
            "layer",
            "compared",
            "max difference",
            "mean difference",
            "standard deviation",
            "calls",
        )
        return Table("In-model comparison", columns, tuple(rows), caption, self.command)

    def figures(self) -> list[Figure]:
        """Return, per pair, the mean difference over steps, a line a layer."""
        caption = (
            "Mean absolute difference of out at every attention call, on the inputs that training"
            " gives it."
        )
        return [
            Figure(
                f"{version} against {against}",
                "step",
                "mean difference of out",
                tuple(self._series(version, against, layer) for layer in self.layers),
                caption,
                self.command,
                y_log=True,
            )
            for version, against in self.versions
        ]

    def _series(self, version: str, against: str, layer: int) -> Series:
        same = self._of(version, against, layer=layer)
        return Series(f"layer {layer}", tuple(x.step for x in same), tuple(x.mean for x in same))

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form, without the weights."""
        return {
            "deviations": [asdict(found) for found in self.deviations],
            "calls": self.calls,
            "loss": list(self.loss),
            "figures": [figure.as_dict() for figure in self.figures()],
            "tables": [self.table().as_dict()],
            "command": self.command,
        }


def compare_in_model(
    config: RunConfig,
    every: int = 1,
    *,
    attentions: Mapping[str, str] | None = None,
    command: str = "",
    progress: Progress | None = None,
) -> InModelResult:
    """Train, and compare several versions of attention at every call of every `every`-th step.

    Args:
        config: the run; what it trains with is its own plan, whatever is compared.
        every: steps from one comparison to the next, the first step included.
        attentions: versions by name, one of them "baseline"; `ATTENTIONS` if None.
        command: what repeats it, for the record.
        progress: called every step.

    Raises:
        ValueError: there is no baseline, a version is not known, or the configuration does not fit.
    """
    chosen = ATTENTIONS if attentions is None else attentions
    if BASELINE not in chosen or len(chosen) < 2 or every < 1:
        accepted = f"accepted are {BASELINE!r} and another version, and every ≥ 1"
        raise ValueError(f"attentions={list(chosen)}, every={every}: {accepted}")
    tap = Comparing({name: attention_function(choice) for name, choice in chosen.items()})
    losses: list[float] = []
    data_seed = config.seed if config.data_seed is None else config.data_seed
    with one_thread(), world("none", config.device) as group:
        workload = build_workload(
            config.workload,
            config.attention,
            seed=config.seed,
            data_seed=data_seed,
            device=group.device,
        )
        session = Session(config, workload, group, workload.order(config.steps, config.batch), None)
        set_tap(workload.model, tap)
        for number in range(1, config.steps + 1):
            tap.step = number if (number - 1) % every == 0 else 0
            session.step()
            losses.append(session.loss)
            (progress or no_progress)(
                number / config.steps, f"comparing in the model: step {number}"
            )
        weights = session.state().model
    return InModelResult(tuple(tap.found), tap.calls, tuple(losses), weights, command)


def same_bits(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether two sets of weights are equal bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
