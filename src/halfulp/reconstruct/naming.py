"""From a model to causes: what differs from the stock recipe, grouped by what it means, with how
much worse it makes the results.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from halfulp.recipes import Recipe
from halfulp.reconstruct.causes import CAUSES, Cause
from halfulp.reconstruct.emulating import FORWARD, GRADIENTS, SHORT, Emulator, Model, Way
from halfulp.reconstruct.evidence import HARMFUL, ONCE
from halfulp.reconstruct.space import field_text

GROSS = (
    20.0  # times the error without it: from there on a rounding is named only where it is proven
)
PROVEN = 0.9  # share of an error that is "explains it"
LIKELY = 0.5  # share of an error that a cause must explain to be named at all

_FORWARD_CAUSES = {
    "operand": ("query", "key", "value"),
    "scores": ("product", "scores"),
    "prescaled": ("scale_into", "scaled_operand"),
    "row-max": ("row_max", "tie_threshold", "shifted_scores"),
    "weights": ("weights", "weights_operand", "weights_scale"),
    "row-sum": ("block_sum", "row_sum", "row_sum_floor"),
    "rescale": ("max_change", "rescale", "rescale_of"),
    "accumulator": ("rescaled", "block_out", "accumulator", "renormalized"),
    "reciprocal": ("division", "reciprocal"),
    "out": ("out",),
    "lse": ("log_row_sum", "lse", "lse_from"),
    "exponential": ("exp_degree",),
    "products": ("matmul",),
    "weights-disagree": ("shift", "exponential", "row_sum_from"),
}  # fmt: skip
_BACKWARD_CAUSES = {
    "backward-scores": ("query", "key", "product", "scores", "scale_into",
                        "scaled_operand", "shifted_scores"),
    "exponential": ("exp_degree",),
    "operand": ("grad_out", "value"),
    "delta": ("delta_products", "delta", "delta_from", "residual", "residual_bits",
              "grad_probabilities", "grad_centered"),
    "probabilities": ("probabilities", "probabilities_operand", "weights", "weights_operand"),
    "grad-scores": ("grad_scores", "scaled_probabilities", "scaled_grad_scores",
                    "gradient_scale_at"),
    "grad-accumulator": ("grad_block", "grad_accumulator"),
    "grad-stored": ("grad_query", "grad_key", "grad_value"),
    "backward-weights": ("backward_weights", "divisor_from", "grad_value_from"),
    "products": ("matmul",),
}  # fmt: skip
SHARED = {
    "query", "key", "value", "product", "scores", "shifted_scores", "exp_degree", "scale_into",
    "scaled_operand", "base", "shift", "block_key", "algorithm",
}  # fmt: skip
"""Fields that both passes read."""
_STATISTICS = {"block_sum", "row_max"}  # beside which a coarse row sum is one of them
_EXACT = ("=exact", " in fp64")  # what is not rounded is no cause
# how a twist of the backward pass alone is called
_BACKWARD_TWISTS = {
    "causal-mask": "backward-mask",
    "mask": "backward-mask",
    "window": "backward-mask",
    "mask-finite": "backward-mask",
    "key-tail": "grad-tail",
    "query-tail": "grad-tail",
    "key-heads": "group-sum",
}


@dataclass(frozen=True)
class Difference:
    """One thing that a way does otherwise than the stock recipe."""

    cause: str  # a key of CAUSES; empty: no fault, as a width of blocks
    text: str
    tensors: frozenset[str]
    field: str | None = None
    twist: str | None = None


@dataclass(frozen=True)
class Named:
    """A cause with its evidence."""

    cause: Cause
    text: str  # what exactly: "accumulator=bf16"
    harm: float  # times the error without it, on the result that shows it most
    tensor: str
    trial: str
    explained: float  # share of that result's squared error that the model explains
    located: bool = False  # only where it sits is known, not what it is
    function: bool = False  # no rounding, whatever the cause is at other times
    twists: tuple[str, ...] = ()  # keys of what does it

    def as_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        return {
            "key": self.cause.key,
            "name": self.cause.name,
            "text": self.text,
            "harm": self.harm,
            "tensor": SHORT[self.tensor],
            "trial": self.trial,
            "explained": self.explained,
            "located": self.located,
        }


def differences(model: Model, stock: Recipe) -> list[Difference]:
    """All of them, each once, with the results that it concerns."""
    found: list[Difference] = []
    forward = dict(_own(model.forward, stock))
    gradients = [dict(_own(way, stock)) for way in model.gradients]
    for key, text in forward.items():
        shared = [g for g, own in zip(GRADIENTS, gradients, strict=True) if key in own]
        cause = _forward_cause(model.forward, key)
        alone = model.apart and not _STATISTICS & {name for _, name in forward}
        if key[1] == "row_sum" and alone:  # l is as it should be in lse: its inverse is not
            cause = "reciprocal"
        found.append(_difference(cause, text, frozenset((*FORWARD, *shared)), key))
    for key in dict.fromkeys(key for own in gradients for key in own if key not in forward):
        mine = frozenset(g for g, own in zip(GRADIENTS, gradients, strict=True) if key in own)
        way = next(model.way(g) for g in GRADIENTS if g in mine)
        text = next(own[key] for own in gradients if key in own)
        found.append(_difference(_backward_cause(way, key, mine), text, mine, key))
    # what the forward pass does and the backward pass does not is the forward pass's alone
    return found


def _difference(cause: str, text: str, tensors: frozenset[str], key: tuple[str, str]) -> Difference:
    kind, name = key
    return Difference(cause, text, tensors, **{kind: name})


def _own(way: Way, stock: Recipe) -> Iterator[tuple[tuple[str, str], str]]:
    for f in fields(stock):
        value = getattr(way.recipe, f.name)
        if f.name != "name" and value != getattr(stock, f.name):
            yield ("field", f.name), field_text(f.name, value)
    for twist in way.twists:
        yield ("twist", twist.key), twist.text


def _twist_cause(way: Way, key: str) -> str:
    return next(twist.cause for twist in way.twists if twist.key == key)


def _forward_cause(way: Way, key: tuple[str, str]) -> str:
    kind, name = key
    if kind == "twist":
        return _twist_cause(way, name)
    if name == "shift" and way.recipe.shift.kind == "integer":
        return ""  # weights whose maximum is rounded up are as good
    if name == "algorithm" and way.recipe.algorithm == "standard":
        return "weights-normalized"
    every = {n: cause for cause, names in _FORWARD_CAUSES.items() for n in names}
    return every.get(name) or _backward_field(name)


def _backward_cause(way: Way, key: tuple[str, str], tensors: frozenset[str]) -> str:
    kind, name = key
    if kind == "twist":
        cause = _twist_cause(way, name)
        if cause == "key-heads" and GRADIENTS[0] in tensors:
            return cause  # of dQ nothing is summed over a group
        return _BACKWARD_TWISTS.get(cause, cause)
    blocks = {way.recipe.block_key if g == GRADIENTS[0] else way.recipe.block_query
              for g in tensors}  # fmt: skip
    if name == "grad_accumulator" and blocks == {None}:
        return "grad-stored"  # of one block there is no sum as it runs: it is cast before its scale
    return _backward_field(name)


def _backward_field(name: str) -> str:
    every = {n: cause for cause, names in _BACKWARD_CAUSES.items() for n in names}
    return every.get(name, "")


def reverted(model: Model, stock: Recipe, group: list[Difference]) -> Model:
    """The model without some of its differences."""
    names = {d.field for d in group if d.field is not None}
    if "scaled_operand" in names:
        names.add("scale_into")
    twists = {d.twist for d in group if d.twist is not None}

    def put_back(way: Way) -> Way | None:
        changes = {name: getattr(stock, name) for name in names}
        try:
            recipe = way.recipe.with_(**changes)
        except ValueError:
            return None
        return Way(recipe, tuple(t for t in way.twists if t.key not in twists))

    for tensors in (frozenset(FORWARD), frozenset(GRADIENTS)):
        model = model.with_ways(tensors, put_back)
    return model


def named(emulator: Emulator, model: Model, stock: Recipe) -> tuple[list[Named], list[Difference]]:
    """The causes, the most harmful first, and the differences that harm nothing."""
    groups: dict[str, list[Difference]] = {}
    harmless = []
    for difference in differences(model, stock):
        if difference.cause and not difference.text.endswith(_EXACT):
            groups.setdefault(difference.cause, []).append(difference)
        else:
            harmless.append(difference)
    found = []
    every = frozenset((*FORWARD, *GRADIENTS))
    with_it = emulator.fits(model, every)
    for key, group in groups.items():
        whose = frozenset[str]().union(*(d.tensors for d in group))
        slipped = any((d.twist or "").startswith("slip") for d in group)
        alone = any((d.twist or "").startswith(GRADIENTS) for d in group)
        if key == "grad-scale" and whose >= frozenset(GRADIENTS) and not (slipped or alone):
            key = "backward-weights"  # what all three gradients have, P has
        # a factor that is rounded is a rounding, though one that is wrong is none
        fields_alone = key == "rescale" and all(d.field for d in group)
        function = slipped or (CAUSES[key].kind == "function" and not fields_alone)
        without = emulator.fits(reverted(model, stock, group), every)
        most, place, calls = (False, False, False, 0.0), None, set[str]()
        for where, fit in with_it.items():
            before = float(without[where].other.sum()) + fit.floor
            own = float(fit.other.sum()) + fit.floor
            explains = min(1.0, without[where].left) - min(1.0, fit.left)
            harm = math.sqrt(own / before) if before else 1.0
            # above 20 times no rounding that leaves a tenth unexplained is what does it
            gross = not function and harm >= GROSS
            proven = 1 - min(1.0, fit.left) >= (PROVEN if gross else LIKELY)
            # what the forward pass does is told there, though a gradient may show it more
            clear = harm > HARMFUL and fit.left <= 1 - PROVEN
            # and what is small may round to 0
            first = (clear, clear and where[1] in whose & set(FORWARD),
                     clear and where[0] != "small", harm)  # fmt: skip
            if explains > 0.05 and proven:
                calls |= {where[0]} if harm > HARMFUL else set()
                most, place = max((most, place), (first, where), key=lambda found: found[0])
        share = 0.0 if place is None else 1 - min(1.0, with_it[place].left)
        once = len(calls) == 1 < len(emulator.trials) and share < PROVEN
        least = HARMFUL if function or not once else ONCE
        # one algorithm is as good as another
        if place is None or most[-1] < least or key == "weights-normalized":
            harmless += group
            continue
        if key == "backward-mask" and all(emulator.trials[n].call.sees.added is not None
                                          for n in calls):  # fmt: skip
            key = "mask"  # of which nothing is hidden
        text = "; ".join(dict.fromkeys(_told(d) for d in group))
        # of a backward pass that is apart nothing else is known to be another's
        text += ", in what is returned alone" * (model.apart and whose == set(FORWARD))
        found.append(
            Named(CAUSES[key], text, most[-1], place[1], place[0], share, function=function,
                  twists=tuple(d.twist for d in group if d.twist is not None))
        )  # fmt: skip
    # what computes another O is the cause of other gradients, however large their errors are
    found.sort(key=lambda n: (
        not (n.function and n.tensor in FORWARD and n.harm > GROSS and n.explained > PROVEN),
        -n.harm))  # fmt: skip
    return found, harmless


def _told(difference: Difference) -> str:
    missing = [g for g in GRADIENTS if g not in difference.tensors]
    if set(difference.tensors) >= set(FORWARD) or not missing:
        return difference.text
    names = ", ".join(SHORT[t] for t in GRADIENTS if t in difference.tensors)
    return f"{difference.text} ({names})"


def combined(model: Model, stock: Recipe) -> Recipe | None:
    """The one recipe that does all of it; None where the passes, or the gradients, differ."""
    if model.forward.twists or any(way.twists for way in model.gradients):
        return None
    merged = model.forward.recipe
    for way in model.gradients:
        for f in fields(stock):
            own, base = getattr(way.recipe, f.name), getattr(stock, f.name)
            held = getattr(merged, f.name)
            if f.name == "name" or own == held:
                continue
            shared = f.name in reads_forward()
            if shared or held != base:
                return None
            try:
                merged = replace(merged, **{f.name: own})
            except ValueError:  # no recipe has both
                return None
    return merged


def reads_forward() -> set[str]:
    """Fields that the forward pass reads as well."""
    return {n for names in _FORWARD_CAUSES.values() for n in names} | {
        "base",
        "block_key",
        "algorithm",
    }


def merged(model: Model) -> Model:
    """One recipe throughout that has what any way has, the forward pass's word first, and all
    twists of the forward pass.
    """
    own, changes = model.forward.recipe, dict[str, Any]()
    for way in model.gradients:
        for name, value in differs(way.recipe, own).items():
            if name not in SHARED:
                changes.setdefault(name, value)
    for way in model.gradients:  # what only one gradient does otherwise than the others
        for name, value in differs(way.recipe, own.with_(**changes)).items():
            if name not in SHARED and getattr(own, name) == changes.get(name):
                changes[name] = value
    try:
        whole = Way(own.with_(**changes), model.forward.twists)
    except ValueError:
        return model
    return Model(whole, (whole, whole, whole))


def differs(recipe: Recipe, from_: Recipe) -> dict[str, object]:
    """Fields of one recipe that another has otherwise."""
    return {
        f.name: getattr(recipe, f.name)
        for f in fields(recipe)
        if f.name != "name" and getattr(recipe, f.name) != getattr(from_, f.name)
    }
