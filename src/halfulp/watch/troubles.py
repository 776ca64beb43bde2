"""What else than rounding in attention breaks a training, as data: each cause with the rule that
tells it, what it says, and what to do.

A rule reads the steps and measurements so far and returns what it found, with the figures that it
rests on. Rules are asked in order, and one that answered for a step explains what follows from it:
a loss that rises after a bad batch is no second cause. How often they are right, wrong and silent
is measured by `benchmarks/watch_causes.py`.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

from halfulp.watch.calls import HIDDEN
from halfulp.watch.health import BEFORE, LEAST, SHARE, Step, jumps, rises
from halfulp.watch.nonfinite import Place

JUMP = 8.0  # robust standard deviations: a loss or a gradient that jumps
CALM = 4.0  # and what does not jump
AFTER = 3  # steps that must be calm again where the one before was not
RATIO = 0.1  # of a matrix that a step changes: far beyond what trains (1e-4 to 3e-2)
DISTINCT, REPEATED = 16, 8  # batches that differed before, and then came again one after the other
SKIPS = 4  # steps in 32 that a GradScaler leaves out, after its first 32
GROWN = 3.0  # times that a matrix grows while the others do not
COLLAPSED = 100.0  # largest score, natural units: a softmax is an argmax far below


@dataclass(frozen=True)
class Seen:
    """What a rule looks at."""

    steps: Sequence[Step]  # in order
    new: int  # how many of them have not been looked at
    rows: Sequence[Mapping[str, Any]]  # measurements: {"step", "measure", "weights"}
    layers: Sequence[str]
    model: str  # name of its class
    leaning: Collection[str]  # layers of which a head leans: `halfulp.watch.alarms`
    # steps at which a cause was found that explains a rising loss
    explained: Collection[int] = ()
    unseen: Mapping[str, str] = field(default_factory=dict)  # why a layer is not measured
    known: Collection[str] = ()  # kinds of causes that were found before
    not_finite: Place | None = None  # where a number first was
    skipped_at: Place | None = None  # the same of a step that a GradScaler left out
    first_loss: float = math.nan  # that the run began at

    @property
    def losses(self) -> list[float]:
        """By step."""
        return [step.loss for step in self.steps]


@dataclass(frozen=True)
class Finding:
    """One cause, found: since when, where, and by which figures."""

    kind: str  # of CAUSES
    step: int  # at which it was found
    since: int  # the first step that shows it
    layer: str = ""  # path of a module or a parameter, where there is one
    evidence: dict[str, float] = field(default_factory=dict)
    detail: str = ""
    head: None = None  # it is none of one head
    attention: str = ""  # what is known of attention's rounding meanwhile

    @property
    def where(self) -> str:
        """Step, place and figures."""
        place = f", {self.layer}" if self.layer else ""
        figures = ", ".join(f"{name} {value:.3g}" for name, value in self.evidence.items())
        said = "; ".join(filter(None, (self.detail, figures)))
        return f"step {self.step}{place}: {CAUSES[self.kind].name} ({said})"

    def as_dict(self) -> dict[str, Any]:
        """Plain data, with its text."""
        return {**vars(self), "where": self.where, "text": str(self)}

    def __str__(self) -> str:
        cause = CAUSES[self.kind]
        other = f" {self.attention}" if self.attention else ""
        return f"{self.where}. {cause.says}. Fix: {cause.fix}.{other}"


@dataclass(frozen=True)
class Cause:
    """A cause that can be told."""

    name: str
    says: str
    rule: str  # in words, with its thresholds
    fix: str
    find: Callable[[Seen], list[Finding]]
    explains_loss: bool = True  # a loss that rises soon after is its doing


def find(seen: Seen) -> list[Finding]:
    """Everything that is found now, each cause at most once a place."""
    found: list[Finding] = []
    explained = set(seen.explained)
    for cause in CAUSES.values():
        # in the order of CAUSES: a rule knows what those before it found, and holds back where that
        # explains what it would have told
        given = replace(seen, explained=explained, known={*seen.known, *(x.kind for x in found)})
        new = cause.find(given)
        found += new
        if cause.explains_loss:
            explained |= {one.since for one in new}
    return found


def _not_finite(seen: Seen) -> list[Finding]:
    bad = [
        step
        for step in seen.steps[-seen.new :]
        if step.number and (math.isinf(step.loss) or math.isinf(step.grad_norm))
    ]
    if seen.not_finite is None:
        return []
    since = bad[0].number if bad else seen.steps[-1].number
    place = seen.not_finite
    return [Finding(place.cause, seen.steps[-1].number, since, detail=str(place))]


def _fp16_overflow(seen: Seen) -> list[Finding]:
    last = list(seen.steps)[-32:]
    skipped = [step.number for step in last if step.skipped]
    first = seen.steps[0].number
    # a scaler finds its scale by leaving out steps; a training that has settled needs none of it
    late = last[-1].number - first >= 64 and len(skipped) > SKIPS
    never = len(last) >= 24 and len(skipped) == len(last)
    small = 0 < last[-1].scale < 1.0
    if not (late or never or small):
        return []
    evidence = {"steps skipped of the last 32": len(skipped), "scale": last[-1].scale}
    return [
        Finding(
            "fp16_overflow",
            last[-1].number,
            (skipped or [last[-1].number])[0],
            evidence=evidence,
            detail="" if seen.skipped_at is None else str(seen.skipped_at),
        )
    ]


def _bad_batch(seen: Seen) -> list[Finding]:
    losses, norms = seen.losses, [step.grad_norm for step in seen.steps]
    found: list[Finding] = []
    if {"rate_too_high", "broken_mask"} & {*seen.known}:
        return found
    # the AFTER steps before the new ones once more: only now are the losses after them known
    for at in range(max(LEAST, len(losses) - seen.new - AFTER), len(losses)):
        step = seen.steps[at]
        loss, norm = jumps(losses, at), jumps(norms, at)
        middle = statistics.median(losses[max(0, at - BEFORE) : at])
        by_loss = loss > JUMP and losses[at] - middle > 2 * SHARE * abs(middle)
        by_norm = math.isnan(step.loss) and norm > 2 * JUMP
        if not (by_loss or by_norm):
            continue
        # the weights of this step are the doing of the steps before, and of their learning rate
        before = [x for x in (jumps(norms, i) for i in range(at - 3, at)) if math.isfinite(x)]
        earlier = [x for x in (jumps(losses, i) for i in range(at - 3, at)) if math.isfinite(x)]
        rates = [x.learning_rate for x in list(seen.steps)[max(0, at - BEFORE) : at]]
        # of the last three, a rise itself would be part of what is usual
        usual = statistics.median(rates[:-3] or rates)
        restless = max(before, default=0.0)
        if restless > CALM:  # the weights may be to blame, unless the next batches are as before
            after = [jumps(losses, i) for i in range(at + 1, min(at + 1 + AFTER, len(losses)))]
            if restless > norm or len(after) < AFTER or not max(after) <= CALM:
                continue
        elif at < len(losses) - seen.new:
            continue
        if any(x > max(CALM, loss / 3) for x in earlier) or max(rates) > 1.5 * usual > 0:
            continue
        evidence = {"loss": step.loss, "median before": middle, "loss's jump": loss}
        evidence["gradient norm's jump"] = norm
        known = {name: value for name, value in evidence.items() if math.isfinite(value)}
        found.append(Finding("bad_batch", step.number, step.number, evidence=known))
    return found


def _data_repeat(seen: Seen) -> list[Finding]:
    marks = [step.batch for step in seen.steps]
    first: dict[float, int] = {}
    run = 0
    lag = 0
    for at, mark in enumerate(marks):
        if math.isnan(mark):
            run = 0
            continue
        before = first.setdefault(mark, at)
        again = before != at and before >= 0
        # one after the other: as in an epoch that begins again, or one batch that stays
        same = again and run and (at - before == lag or before == at - run - 1)
        run = run + 1 if same else int(again)
        lag = at - before if again else 0
        # a training on one batch repeats itself and means to: others must have come before
        distinct = len({m for m in marks[: at - run + 1] if not math.isnan(m)})
        if run >= REPEATED and distinct >= DISTINCT and at >= len(marks) - seen.new:
            since, source = seen.steps[at - run + 1].number, seen.steps[before - run + 1].number
            if since in seen.explained:
                return []
            detail = (
                f"the last {run} batches are those from step {source} on again"
                if lag >= REPEATED
                else f"the last {run} batches are one of {len(set(marks[at - run + 1 : at + 1]))}"
            )
            return [Finding("data_repeat", seen.steps[at].number, since, detail=detail)]
    return []


def _broken_mask(seen: Seen) -> list[Finding]:
    if not seen.rows:
        return []
    last = seen.rows[-1]
    now = _by_layer(last, "sees_future", seen.layers)
    blind = _by_layer(last, "blind_rows", seen.layers)
    added = _by_layer(last, "mask_is_0_and_1", seen.layers)
    blind |= {layer: 1.0 for layer, why in seen.unseen.items() if why == HIDDEN}
    broken = partial(Finding, "broken_mask", last["step"], last["step"])
    found = [
        broken(layer, {"share of queries that see no key": share})
        for layer, share in blind.items()
        if share > 0.5
    ]
    said = "its mask adds 0 and 1 to the scores: a boolean one that became numbers"
    found += [broken(layer, detail=said) for layer, yes in added.items() if yes > 0]
    # held against its own past
    for row in seen.rows[:-1]:
        before = _by_layer(row, "sees_future", seen.layers)
        for layer in now.keys() & before.keys():
            other = (now[layer] > 0.5) != (before[layer] > 0.5)
            if other and abs(now[layer] - before[layer]) > 0.4:
                evidence = {"share of later keys seen": now[layer], "before": before[layer]}
                found.append(broken(layer, evidence))
    # held against its like in other layers: the odd ones are the fewer or, of two halves, those
    # that see what comes later
    groups: dict[str, dict[str, float]] = {}
    for layer, share in now.items():
        groups.setdefault(_pattern(layer), {})[layer] = share
    for alike in groups.values():
        sighted = [layer for layer, share in alike.items() if share > 0.4]
        others = [layer for layer, share in alike.items() if share < 0.1]
        fewer, more = sorted((sighted, others), key=len)
        if fewer and len(fewer) + len(more) == len(alike) and (len(fewer) < len(more) or sighted):
            odd = sighted if len(sighted) == len(others) else fewer
            evidence = {"share of later keys seen": alike[odd[0]]}
            evidence["in its like"] = alike[(others if odd is sighted else sighted)[0]]
            found.append(broken(odd[0], evidence))
    # where all layers agree only the model's name says that it was meant otherwise
    if now and min(now.values()) > 0.4 and re.search(r"causal|gpt|lmhead", seen.model.lower()):
        said = f"all attention of {seen.model} sees later keys"
        found.append(broken(detail=said))
    return list({(one.layer, one.kind): one for one in reversed(found)}.values())


def _exploding(seen: Seen) -> list[Finding]:
    rows = [row for row in seen.rows if row.get("weights")][-10:]
    if len(rows) < 4 or "broken_mask" in seen.known:
        return []
    growths = {}
    for name in rows[-1]["weights"]:
        sizes = [row["weights"].get(name, {}).get("rms") or math.nan for row in rows]
        if all(math.isfinite(x) and x > 0 for x in sizes):
            growths[name] = sizes
    if len(growths) < 3:
        return []
    total = {name: sizes[-1] / sizes[0] for name, sizes in growths.items()}
    level = statistics.median(sizes[-1] for sizes in growths.values())
    spans = [b["step"] - a["step"] for a, b in pairwise(rows)]
    for worst in sorted(total, key=total.__getitem__, reverse=True):
        # its like in other layers may have reason to grow as it does, of all matrices half
        like = [
            x for name, x in total.items() if name != worst and _pattern(name) == _pattern(worst)
        ]
        usual = max(statistics.median(x) for x in (list(total.values()), like) if x)
        sizes = growths[worst]
        # growth alone is no fault: BERT's query weights grow five-fold from 0.02 while attention
        # forms, which gave 6 of 7 wrong alarms (docs/log.md)
        if total[worst] < GROWN * max(1.0, usual) or sizes[-1] < 3 * level:
            continue
        slopes = [math.log(b / a) / n for a, b, n in zip(sizes, sizes[1:], spans, strict=False)]
        # what grows from a small start slows down; what explodes does not
        if min(slopes[-2:]) > max(0.8 * statistics.mean(slopes), 0.1 / max(spans)) > 0:
            evidence = {"rms": sizes[-1], "grown by": total[worst], "others by": usual}
            return [Finding("exploding_layer", rows[-1]["step"], rows[0]["step"], worst, evidence)]
    return []


def _pattern(name: str) -> str:
    """What names of the same part of every layer have in common."""
    return re.sub(r"\d+", "*", name)


def _collapsed(seen: Seen) -> list[Finding]:
    rows = seen.rows[-10:]
    if len(rows) < 4 or "rate_too_high" in seen.known:
        return []
    found = []
    for number, layer in enumerate(seen.layers):
        # rounding is the cause then, and the alarm of the head says so
        if layer in seen.leaning:
            continue
        sizes = [_largest(row, "max_score", number) for row in rows]
        known = [x for x in sizes if math.isfinite(x)]
        if len(known) >= 4 and known[-1] > COLLAPSED and known[-1] > 2 * known[0]:
            evidence = {"largest score": known[-1], "it was": known[0]}
            entropies = [_largest(row, "entropy", number) for row in (rows[0], rows[-1])]
            evidence |= {"entropy": entropies[1], "entropy was": entropies[0]}
            found.append(
                Finding("scores_run_away", rows[-1]["step"], rows[0]["step"], layer, evidence)
            )
    return found


def _rate(seen: Seen) -> list[Finding]:
    rows = [row for row in seen.rows if row.get("weights")]
    by_row = [
        [x["update"] for x in row["weights"].values() if x["update"] and math.isfinite(x["update"])]
        for row in rows
    ]
    ratios = [statistics.median(known) for known in by_row if known]
    risen = rises(seen.steps, seen.first_loss)
    if not ratios or len(seen.steps) < LEAST // 2 or _is_explained(seen, risen):
        return []
    # the most of all, since only the first steps tell: 3 against 0.1 in a sound run, and 0.005 once
    # the weights have grown (docs/log.md)
    now, most = statistics.median(ratios[-3:]), max(ratios)
    known = [step.loss for step in seen.steps if math.isfinite(step.loss)]
    last = statistics.median(known[-8:]) if len(known) >= LEAST else math.nan
    learns_not = last > (1.0 if len(known) < 30 else 0.95) * seen.first_loss
    enough = len(ratios) >= 2
    # later the weights have grown by it, and a step changes less of them
    if not (
        most > 3 * RATIO
        or (enough and now > RATIO and (learns_not or risen is not None))
        or (enough and now > RATIO / 5 and risen is not None)
    ):
        return []
    since = risen[0] if risen is not None else seen.steps[0].number
    ratio = most if most > 3 * RATIO else now
    evidence = {"a step changed a matrix by": ratio, "learning rate": seen.steps[-1].learning_rate}
    if math.isfinite(last):
        evidence |= {"loss": last, "first": seen.first_loss}
    return [Finding("rate_too_high", seen.steps[-1].number, since, evidence=evidence)]


def _unexplained(seen: Seen) -> list[Finding]:
    risen = rises(seen.steps, seen.first_loss)
    if risen is None or _is_explained(seen, risen) or seen.leaning:
        return []
    evidence = {"loss": risen[2], "lowest": risen[1]}
    return [Finding("unexplained", seen.steps[-1].number, risen[0], evidence=evidence)]


def _is_explained(seen: Seen, risen: tuple[int, float, float] | None) -> bool:
    """Whether a cause was found shortly before the loss began to rise, or while it rose."""
    return risen is not None and any(step >= risen[0] - BEFORE for step in seen.explained)


def _by_layer(row: Mapping[str, Any], name: str, layers: Sequence[str]) -> dict[str, float]:
    measured = row["measure"].get(name, ())
    return {
        layer: float(heads[0])
        for layer, heads in zip(layers, measured, strict=False)
        if heads and heads[0] is not None and math.isfinite(heads[0])
    }


def _largest(row: Mapping[str, Any], name: str, layer: int) -> float:
    heads = row["measure"].get(name, ())
    known = [x for x in (heads[layer] if layer < len(heads) else ()) if x is not None]
    return max(known, default=math.nan)


CAUSES: dict[str, Cause] = {
    "not_finite": Cause(
        "not finite",
        "A number that is not finite spoils every weight at the next update",
        "the loss or a gradient is infinite or NaN; the place is where it first was",
        "look at what that module is given; watch(snapshots=...) keeps the step before it",
        _not_finite,
    ),
    "fp16_overflow": Cause(
        "fp16 overflow",
        "Numbers beyond 65,504 do not fit fp16",
        f"numbers that are not finite come first in fp16; or a GradScaler leaves out more than"
        f" {SKIPS} of 32 steps after the first 64, all of 24, or its scale falls below 1",
        "train in bf16, or keep that module in fp32",
        _fp16_overflow,
    ),
    "broken_mask": Cause(
        "broken mask",
        "Attention sees what its mask should hide, or nothing at all",
        "a layer sees later keys where most of its like do not, or the other way round, or did not"
        " before; more than half"
        " of its queries see none; its mask adds 0 and 1; or a model that is named causal sees"
        " them in all layers",
        "look at attn_mask and is_causal in the module that is named",
        _broken_mask,
        explains_loss=False,
    ),
    "bad_batch": Cause(
        "bad batch",
        "The loss jumps in a step whose weights came from ordinary updates: it is what was fed",
        f"a loss more than {JUMP:g} robust standard deviations and {2 * SHARE:.0%} above the"
        f" {BEFORE} before it (a gradient norm {2 * JUMP:g} above, where no loss is shown), while"
        f" no gradient norm of the 3 steps before is beyond {CALM:g} (or none beyond its own, and"
        f" the {AFTER} losses after it are as before), nor a loss beyond a third of that jump, and"
        " the learning rate has not risen",
        "look at the data of that step; clip gradients, or leave out steps like it",
        _bad_batch,
    ),
    "data_repeat": Cause(
        "data repeat",
        "The training is fed what it was fed before, bit by bit",
        f"{REPEATED} batches after each other came before, after {DISTINCT} that did not",
        "look at the sampler's seed and place after a restart; an epoch in the same order looks"
        " the same and may be meant",
        _data_repeat,
    ),
    "exploding_layer": Cause(
        "exploding layer",
        "One matrix grows without the others, and does not slow down",
        f"over at most 10 measurements a matrix has grown to {GROWN:g} times its size, and by as"
        " much more than the median matrix and the median of its like in other layers; it is three"
        " times as large as the median matrix, and grows on; and no mask is broken",
        "look at its initialization, its learning rate and its weight decay; normalize its output",
        _exploding,
    ),
    "rate_too_high": Cause(
        "learning rate too high",
        "Every step changes the weights by more than training can follow",
        f"the median matrix is changed by more than {3 * RATIO:g} of its size in a measured step,"
        f" or by {RATIO:g} while the loss rises, or is above its first or, after 30 steps, not 5 %"
        f" below it; or by {RATIO / 5:g} while it rises and nothing else explains that",
        "lower the learning rate, warm it up for longer, or raise Adam's β₂",
        _rate,
    ),
    "scores_run_away": Cause(
        "scores run away without rounding",
        "Attention becomes an argmax: W_Q and W_K grow, and no head of this layer leans",
        f"the largest score is beyond {COLLAPSED:g} and twice what it was 10 measurements ago, and"
        " no head of the layer leans, nor is the learning rate too high",
        "normalize queries and keys (QK-norm), clip W_Q and W_K, or lower their learning rate",
        _collapsed,
    ),
    "unexplained": Cause(
        "the loss rises, and none of the causes above is found",
        "What is measured does not explain it",
        f"the median loss of 8 steps is {SHARE:.0%} and 4 robust standard deviations above its"
        f" lowest, and by {SHARE:.0%} of what it had fallen since the first, and rises; no cause"
        " above was found, and no head leans",
        "compare with a run in fp32, and `halfulp diff` the two",
        _unexplained,
    ),
}
"""Every cause beside attention's rounding, in the order in which they are asked."""
