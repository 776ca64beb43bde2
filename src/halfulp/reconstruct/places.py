"""Where an error sits that no candidate explains: heads, rows, features, the factor of a row; and
on which trials.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from halfulp.reconstruct import call_kinds
from halfulp.reconstruct.call_asked import GROUPED, holds
from halfulp.reconstruct.causes import CAUSES
from halfulp.reconstruct.dataflow import SLIGHT
from halfulp.reconstruct.emulating import GRADIENTS, SHORT, Emulator, Model
from halfulp.reconstruct.evidence import HARMFUL, ONCE, SOUND, WORST, Fit, Fits, Observed
from halfulp.reconstruct.groups_read import members_counted, of_whole_heads
from halfulp.reconstruct.leftover import CONCENTRATED, few_elements, where_left
from halfulp.reconstruct.moved_read import misplaced
from halfulp.reconstruct.non_finite import not_finite
from halfulp.reconstruct.others_read import (
    of_memory,
    of_no_grad_out,
    of_no_value,
    of_other_operands,
    reads_others,
)
from halfulp.reconstruct.panel import Trial, simplicity
from halfulp.reconstruct.part_ratios import COARSEST
from halfulp.reconstruct.result_read import STRUCTURE, result_read
from halfulp.reconstruct.silent_read import below_the_maximum, silent_rows
from halfulp.reconstruct.suggested import exchanged
from halfulp.reconstruct.weight_ratios import Read
from halfulp.reconstruct.weights_read import leaves_out, over_heads

FAR = 20.0  # times the model's error: no rounding
MINOR = 2.0  # times it: what is gross elsewhere is said first
HALF = 0.5  # of an error: what is more is not explained
LARGE = 0.25  # of a result: an error that no rounding makes
ALONG = 0.999  # the cosine of a row of O with what it should be, which a factor leaves
SPREAD = 0.05  # logarithms of such factors, within a head: what all rows share is no sum of theirs

_OF_P = {"lse", "lse-other", "backward-scores", "weights-disagree"}
_OF_SCORES = {"backward-scores", "other-data"}  # which dS would have as well
IN_GRADIENTS = {"key-heads": "group-sum", "causal-mask": "backward-mask"}  # where O is right
_OTHERS = {
    "delta": "no-delta",
    "no-delta": "no-delta",
    "lse": "lse-other",
    "lse-other": "lse-other",
}
"""Numbers of a row that may be another's, and the cause that is."""
_OPTIONS = ("window", "softcap", "sinks", "mask")  # what only they show is a matter of theirs
OF_CALLS = (*_OPTIONS, "causal-mask", "key-heads", "ragged")
_FACTORS = {"scale", "grad-scale", "value-factor", "lse-other"}
FORMULAS = {"causal-mask": _FACTORS, "key-heads": _FACTORS,
            "ragged": (_FACTORS | {"rescale"}) - {"lse-other"},
            "window": {"lse-other", "scale"}, "mask": {"lse-other", "scale"},
            "softcap": {"lse-other"}}  # fmt: skip
"""What is no matter of the calls that alone have it: no mask or tail multiplies a scale, and
no size is why a sum is not rescaled."""
_ENDS = {"query-tail", "key-tail", "grad-tail"}
_ON_SIZES = ("ragged", "key-heads", "causal-mask", "other-data")
SEVERAL = 3  # calls whose ends are right, so that wrong ones are a matter of what else is asked
_LEAST = 0.2  # of the worst trial's factor: a simpler trial that errs so much shows it as well


@dataclass(frozen=True)
class Place:
    """Where the unexplained error of one result sits."""

    tensor: str
    trial: str  # the one it was looked at on
    text: str
    cause: str  # a key of CAUSES
    left: float  # share of the squared error that is not explained there
    times: float  # the kernel's error, in units of the model's
    trials_alone: bool = False  # its cause is told by nothing but the trials that show it
    was_read: bool = False  # its cause is told by the weights as they were read
    trials: frozenset[str] = frozenset()  # all that show it

    def as_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        return {
            "tensor": SHORT[self.tensor],
            "trial": self.trial,
            "text": self.text,
            "key": self.cause,
            "left": self.left,
            "times": self.times,
        }


_SOME = "rows "
"""How readings begin that are of some rows."""


def unexplained(
    emulator: Emulator,
    model: Model,
    share: float,
    common: tuple[str, str] = ("", ""),
    stock: Model | None = None,
) -> list[Place]:
    """One place for each result that keeps more than `share` of its error on some trial; `common`
    is what all of these are, and the cause that stands for it; how wrong results are is said beside
    `stock` as well.
    """
    found: list[Place] = []
    every, usual = (emulator.fits(m, frozenset(SHORT)) for m in (model, stock or model))
    more = {k: _times(f, usual[k]) for k, f in every.items()}
    order = sorted(SHORT, key=lambda name: name in ("grad_query", "grad_key"))
    for tensor in order:  # dV first: what it tells of P the others have from it
        bad = {t: fit for (t, name), fit in every.items() if name == tensor and (
            fit.left > share or _left_over(model, t, name, fit, usual[t, name]))}  # fmt: skip
        if not bad:
            continue
        much = {t: more[t, tensor] for t in bad}
        times_ = sorted(much.values())
        most = times_[-1]
        least = ONCE if sum(x > HARMFUL for x in times_) == 1 < len(times_) else HARMFUL
        if most <= least and times_[len(times_) // 2] <= SOUND:
            continue  # it rounds otherwise than was tried, and no worse
        if most > least:  # nor does it in some of these calls
            bad = {t: fit for t, fit in bad.items() if much[t] > SOUND}
        # the simplest that shows it: in others, more than the fault may be otherwise
        shows = [t for t in bad if much[t] >= min(_LEAST * most, FAR)]
        worst = min(shows, key=lambda t: (t == "small", simplicity(t)))  # there it may round to 0
        left, times = bad[worst].left, much[worst]
        gross = frozenset(t for t in bad if much[t] > min(3.0, 0.5 * times))
        right = frozenset(t for t, name in every if name == tensor and t not in bad
                          and (t, name) not in emulator.nonfinite)  # fmt: skip
        only = _only(emulator, model, tensor, (frozenset(bad), gross), right, common)
        text, cause, alone, read = _told(
            emulator,
            model,
            tensor,
            worst,
            gross,
            found,
            only if times > HARMFUL or common[0] else ("", ""),
            times > FAR or emulator.observed[worst, tensor].relative > LARGE,
        )
        if tensor == "lse" and not read and cause in ("out-unexplained", *_ON_SIZES) and (
            usual[worst, "out"].times < HARMFUL
        ) and emulator.observed[worst, tensor].relative > COARSEST:  # fmt: skip
            cause = "lse-other"  # O has the row sum right, and no format loses so much
        if cause in _ENDS and (option := _of_an_option(emulator, bad, right)):
            text, cause = f"{text}, in calls with {option} alone", option
        out = usual.get((worst, "out"))
        forward = out is not None and out.times > FAR  # told by a cause, or by a place of its own
        if tensor in GRADIENTS and not forward and not any(p.tensor == "out" for p in found):
            cause = IN_GRADIENTS.get(cause, cause)
            sound = every.get((worst, "grad_query"))
            if cause == "group-sum" and sound is not None and sound.left > share:
                cause = "other-data"  # of dQ nothing is summed over a group
        found.append(Place(tensor, worst, text, cause, left, times, alone, read, frozenset(bad)))
    if (broken := not_finite(emulator)) is not None:
        every_call = sum(name == broken[0] for _, name in emulator.observed)
        often = 2 * sum(name == broken[0] for _, name in emulator.nonfinite) > every_call
        # before what the few other calls say, where most are not finite
        found.insert(0 if often else len(found), Place(*broken, 1.0, WORST, was_read=True))
    largest = max((p.times for p in found), default=0.0)
    found = _by_what_is_explained(emulator, found, every, usual)
    return sorted(found, key=lambda p: (
        p.times < min(MINOR, largest / 3),
        # what is known of one gradient says more than what is not known of another
        p.tensor in GRADIENTS and p.cause.endswith("unexplained"),
        list(SHORT).index(p.tensor)))  # fmt: skip


def _of_an_option(emulator: Emulator, bad: Collection[str], right: Collection[str]) -> str:
    """The cause that stands for an option which all calls have that are wrong at an end, where such
    ends are right in several others; empty without one.
    """
    off = [t for t in right if emulator.trials[t].call.key.shape[2] % 16]
    return call_kinds.option_of([emulator.trials[t] for t in bad]) if len(off) >= SEVERAL else ""


def _only(
    emulator: Emulator,
    model: Model,
    tensor: str,
    bad: tuple[frozenset[str], frozenset[str]],
    right: frozenset[str],
    common: tuple[str, str],
) -> tuple[str, str]:
    """What all the calls that are wrong, or those that are so by much, are and right ones are not:
    in words, and the cause that stands for it.
    """
    only = common
    for some in bad:  # a little is off where something else is
        calls = ([emulator.trials[t] for t in sorted(ts) if not t.startswith("probe ")]
                 for ts in (some, right))  # fmt: skip
        if not only[0]:
            only = call_kinds.condition(*calls)
            only = only if holds(emulator, model, only[0], some) else ("", "")
    if only[1] == "key-heads" and _but_in_the_first(emulator, tensor, bad[0]):
        return f"{only[0]}, in sequences after the first", "other-data"
    return only


def _but_in_the_first(emulator: Emulator, tensor: str, bad: frozenset[str]) -> bool:
    """Whether the first sequence of each of these calls is right to what rounding makes, and others
    are not: no pairing of heads leaves it so.
    """
    right = []
    for name in bad:
        observed = emulator.observed[name, tensor]
        error, size = (torch.where(observed.usable, x, 0.0).square().sum((1, 2, 3)) for x in (
            observed.value - observed.exact, observed.exact))  # fmt: skip
        off = error > SLIGHT**2 * size
        right.append(bool(off.any()) and not bool(off[0]))
    return all(right)


def _left_over(model: Model, trial: str, tensor: str, fit: Fit, stock: Fit) -> bool:
    """Whether a mistake leaves more than rounding makes; what is small may round to 0."""
    twisted = any(twist.cause for twist in model.way(tensor).twists)
    return twisted and trial != "small" and not fit.within_rounding(stock)


def _times(fit: Fit, stock: Fit) -> float:
    """The kernel's error over a model's, or over stock's where the model is more exact, has a
    mistake that makes more than that, or explains next to nothing.
    """
    gross = float(fit.other.sum()) > FAR**2 * float(stock.other.sum())
    return stock.times if gross or fit.left > CONCENTRATED else min(fit.times, stock.times)


def _by_what_is_explained(
    emulator: Emulator, places: list[Place], fits: Fits, usual: Fits
) -> list[Place]:
    """What results that are explained say about those that are not, where nothing else does, and a
    rounding of which nothing is said where an error is none.
    """
    bad, offered = {p.tensor for p in places}, {name for _, name in fits}
    # which err more than stock's do, and keep half of it
    unsure = {n for (t, n), f in fits.items() if f.left > HALF and usual[t, n].times > HARMFUL}
    if "out" in bad or not bad & set(GRADIENTS) or not set(GRADIENTS) <= offered:
        return places
    gradients = bad & set(GRADIENTS)
    if gradients == {"grad_value"}:
        told = "O, dQ and dK are explained: P as it enters dV", "probabilities"
    elif gradients == {"grad_query", "grad_key"}:
        told = "O and dV are explained, so is P: dS or δ", "grad-scores"
    elif len(gradients) == 3:
        told = "O is explained: P is recomputed otherwise in the backward pass", "backward-weights"
    else:
        names = " and ".join(SHORT[g] for g in GRADIENTS if g in gradients)
        told = f"the others are explained: the sum that {names} alone is", "grad-accumulator"
    return [
        replace(p, text=f"{told[0]}; {p.text}", cause=told[1])
        if p.tensor in gradients
        and (
            CAUSES[told[1]].kind != "rounding"
            or emulator.observed[p.trial, p.tensor].relative <= LARGE
        )
        and (
            p.cause == "gradient-unexplained"
            # an input would show in the others too
            or (p.trials_alone and p.cause == "operand" and len(gradients) == 1)
            # P is right in the others
            or (
                gradients == {"grad_value"}
                and p.cause in _OF_P | _OF_SCORES
                and unsure <= gradients
            )
        )
        else p
        for p in places
    ]


def _told(
    emulator: Emulator,
    model: Model,
    tensor: str,
    worst: str,
    bad: frozenset[str],
    found: list[Place],
    only: tuple[str, str],
    gross: bool,
) -> tuple[str, str, bool, bool]:
    """The text, the cause, whether the trials alone tell it, and whether it was read."""
    trial, observed = emulator.trials[worst], emulator.observed[worst, tensor]
    for text, key in _by_numbers(emulator, trial, tensor, gross=gross):
        if key:
            # some rows, at sizes alone: it is these that are handled wrongly
            sized = (key, tensor, only[1]) == ("other-data", "out", "ragged")
            sized = sized and text.startswith(_SOME)
            return text, "ragged" if sized else key, False, True
    in_values = [Read(p.text, p.cause) for p in found if p.tensor == "grad_value" and p.was_read]
    if gross and not (tensor == "out" and _row_sums(observed)):
        others = reads_others(emulator.run, trial, tensor, observed)
        if others and tensor in GRADIENTS and not any(p.tensor == "out" for p in found):
            own = result_read(emulator, model, trial, tensor, in_values)
            if own is not None and own.cause in _OTHERS:  # which has all others do
                return f"{own.text}: {others.text}", _OTHERS[own.cause], False, True
        if others and tensor == "out" and others.beside and over_heads(emulator.run, trial):
            told = (
                "the weights of a key sum to 1 over heads, or sequences: the softmax is over these"
            )
            return told, "unnormalized", False, True
        if others and (others.told, tensor) == ("rows", "out") and leaves_out(emulator.run, trial):
            told = f"{others.text}: they tell which pairs get no weight"
            return told, "tiles-skipped", False, True
        if others:
            paired = others.told == "heads" and not others.beside and _paired(
                emulator, model, trial, tensor, bad or frozenset({worst}))  # fmt: skip
            own_head = "ragged" if only[1] == "ragged" and others.told == "rows" else "other-data"
            return others.text, "key-heads" if paired else own_head, False, True
    parts: list[str] = []
    cause = "gradient-unexplained" if tensor in GRADIENTS else "out-unexplained"
    told, special = only
    # few calls alone have it; which says more than what is off there
    option = special in (*_OPTIONS, *_ON_SIZES)
    if told:
        parts.append(told)
        cause = special or cause
    if one := few_elements(emulator, model, tensor, bad or frozenset({worst})):
        return "; ".join([*parts, one]), "elements", False, True
    read = result_read(emulator, model, trial, tensor, in_values)
    if read is not None:
        parts.append(read.text)
        if special == "row-max" and read.cause in ("causal-mask", "mask", "window"):
            read = replace(read, cause="mask-finite")
        # no option alone has its gradients' sums rounded
        summed = read.cause == "accumulator" or (option and read.cause == "grad-accumulator")
        if read.cause and not summed:
            stands = _stands(special, read, trial, tensor, gross=gross)
            return "; ".join(parts), cause if option and stands else read.cause, False, True
        # a rounded sum is no matter of an option; sizes are where kernels take another one
        sized = special in _ON_SIZES and not gross
        cause = cause if option and not sized else read.cause or cause
    place, key = where_left(emulator, model, tensor, worst)
    if place is not None:
        parts.append(place.text.removeprefix(" in "))
        # what masks and heads alone show is not a matter of rows
        if special in ("", "ragged") or key == "elements":
            cause = key
    alone = special in ("", cause) and bool(told)
    return "; ".join(parts) or "spread over all rows and heads", cause, alone, False


def _row_sums(observed: Observed) -> bool:
    """Whether rows of O are what they should be but for a factor, another in each: whatever their
    sums follow, what they are divided by is what is wrong.
    """
    got, exact = (torch.where(observed.usable, x, 0.0) for x in (observed.value, observed.exact))
    sizes = got.norm(dim=-1), exact.norm(dim=-1)
    some = (sizes[0] > 0) & (sizes[1] > 0)
    along = (got * exact).sum(-1)[some] / (sizes[0] * sizes[1])[some]
    factor = torch.where(some, sizes[0] / sizes[1].clamp_min(1e-300), 1.0).clamp_min(1e-300).log()
    alike = len(along) > 0 and float((along > ALONG).double().mean()) > CONCENTRATED
    return alike and float((factor - factor.mean(-1, keepdim=True)).square().mean()) > SPREAD**2


def _stands(special: str, read: Read, trial: Trial, tensor: str, *, gross: bool) -> bool:
    """Whether what the calls have in common that alone show something, `special`, says more of it
    than what was read.
    """
    told_more = STRUCTURE | set(() if tensor == "out" else _OTHERS)
    told_more |= FORMULAS.get(special, set())
    # a sum that has other numbers than hidden ones is no matter of what hides them
    told_more |= {"unnormalized"} if special in ("causal-mask", "ragged") else set()
    # in grouped calls alone it is heads, of course; gradients say no more of it than sizes
    if special == "key-heads" or (special == "ragged" and tensor in GRADIENTS):
        told_more = told_more - {"other-data"}
    stands = special in _OPTIONS or read.cause not in told_more
    sees = trial.call.sees
    # of a boolean mask: what the backward pass hides otherwise than the forward pass
    if read.cause == "backward-mask" and special == "mask" and sees.mask is not None:
        stands = sees.added is not None
    # matters of no other option
    if read.cause == "masked-row" or (read.cause == "lse-other" and special != "sinks"):
        stands = False
    # a rounding is what it is, wherever it shows
    return stands and (gross or CAUSES[read.cause].kind != "rounding")


def _by_numbers(
    emulator: Emulator, trial: Trial, tensor: str, *, gross: bool
) -> Iterator[tuple[str, str]]:
    """What a result's numbers are beside exact ones, and beside those of other calls: in words,
    with the cause.
    """
    observed = emulator.observed[trial.name, tensor]
    yield _silent(emulator, trial, tensor, gross=gross)
    if gross:
        yield of_no_value(emulator.run, trial, tensor, observed)
        yield of_no_grad_out(emulator.run, trial, tensor, observed)
        yield of_memory(emulator.run, trial, tensor, observed)
        yield members_counted(trial, tensor, observed)
    yield exchanged(observed)
    if gross:
        yield misplaced(observed, _exact_gradients(emulator, trial, tensor))
        yield of_other_operands(trial, tensor, observed)


def _silent(emulator: Emulator, trial: Trial, tensor: str, *, gross: bool) -> tuple[str, str]:
    """Rows that are 0, unless others have what these should."""
    observed = emulator.observed[trial.name, tensor]
    text, cause = ("", "") if trial.name == "small" else silent_rows(observed)
    rest = torch.where(observed.value != 0, observed.value - observed.exact, 0.0)
    if not cause:
        return "", ""
    if gross and float(rest.square().sum()) > (1 - CONCENTRATED) * observed.total:
        if reads_others(emulator.run, trial, tensor, observed):
            return "", ""
        moved, key = misplaced(observed, _exact_gradients(emulator, trial, tensor))
        if key:  # some of it from where there is nothing
            return f"{text}; {moved}", key
    if tensor == "out" and below_the_maximum(emulator):
        return f"{text}, which score far below what is hidden, or other rows", "maximum"
    gone = [emulator.trials[n] for (n, t), o in emulator.observed.items()
            if t == tensor and n != "small" and silent_rows(o)[1]]  # fmt: skip
    return text, call_kinds.option_of(gone) or cause  # an option alone hides what it makes 0


def _exact_gradients(emulator: Emulator, trial: Trial, tensor: str) -> dict[str, Tensor]:
    """Those beside a gradient, by name, whose numbers may stand in its place."""
    if tensor not in GRADIENTS:
        return {}
    found = {name: emulator.observed.get((trial.name, name)) for name in GRADIENTS}
    return {SHORT[n]: o.exact for n, o in found.items() if o is not None and n != tensor}


def _paired(
    emulator: Emulator, model: Model, trial: Trial, tensor: str, bad: frozenset[str]
) -> bool:
    """Whether it is which query heads share a key head that is wrong: calls without groups are
    right, and dK or dV is of whole heads.
    """
    grouped = all(emulator.trials[name].call.groups > 1 for name in bad)
    if not grouped or not holds(emulator, model, GROUPED, bad):
        return False
    if _but_in_the_first(emulator, tensor, bad):
        return False
    observed = emulator.observed[trial.name, tensor]
    return tensor not in GRADIENTS[1:] or of_whole_heads(trial, tensor, observed)
