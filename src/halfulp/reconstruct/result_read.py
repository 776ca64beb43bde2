"""What is wrong with one result, as the readings of it say: from the weights to what is summed with
them, and to the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from halfulp.calls import Result
from halfulp.reconstruct import space
from halfulp.reconstruct.columns_read import LOST, of_columns
from halfulp.reconstruct.dataflow import OTHER, grad_scores
from halfulp.reconstruct.emulating import Emulator, Model
from halfulp.reconstruct.evidence import HARMFUL, UNEXPLAINED
from halfulp.reconstruct.exact import scores_of, weights_of
from halfulp.reconstruct.exponential_read import cap_of, exponential_of
from halfulp.reconstruct.panel import Run, Trial
from halfulp.reconstruct.scores_read import unit_scores
from halfulp.reconstruct.sums_read import (
    few_values,
    from_terms,
    normalized,
    of_division,
    one_term,
    signed_sums,
    spread,
    value_error,
    value_rows,
)
from halfulp.reconstruct.unlike import Unlike, unlike
from halfulp.reconstruct.weight_ratios import NOISE, Read
from halfulp.reconstruct.weights_read import (
    backward_weights,
    compared,
    forward_weights,
    over_queries,
    weighed,
)

LARGE = 0.25  # of weights: no rounding makes such an error of them
TWICE = 0.02  # of weights, that those which are counted twice may be off by: roundings make less
LEFT = 1e-3  # of the largest value, that O may be of values that are 0
READ = 0.5  # of an error that weights as they were read may leave
OTHER_BITS = 0.05  # share of weights that differ from a recipe's: from there on it is another
_UPSTREAM = {
    "exponential",
    "lse",
    "lse-other",
    "backward-scores",
    "backward-weights",
    "backward-mask",
    "operand",
    "grad-tail",
}
"""Causes that weights as dV shows them tell, and that dS then has as well."""
_DIVIDES = {"row-sum", "unnormalized", "weights-disagree"}
_HIDDEN = {"window", "mask"}  # pairs that get no weight, which rows at an end have more of
_BY_ROWS = {"row-sum", "unnormalized", "weights-disagree", "lse", "lse-other"}
_WEIGHTS = {False: "weights", True: "probabilities"}

_AS_RAGGED = {
    # tiles of 64 are thirds of 192 keys as well, and no third of 157
    "rescale": "split-merge",
    "backward-weights": "split-merge",
    # keys that are all read as often as others count once, but for the last
    "split-merge": "other-data",
}
"""What a cause is another by that a ragged call tells."""

STRUCTURE = {
    "key-tail",
    "query-tail",
    "grad-tail",
    "causal-mask",
    "backward-mask",
    "other-data",
    "layout",
    "unwritten",
    "padding",
    "tiles-skipped",
    "split-merge",
    "elements",
}
"""Readings that say more than which calls are wrong."""


def result_read(
    emulator: Emulator, model: Model, trial: Trial, tensor: str, in_values: Sequence[Read] = ()
) -> Read | None:
    """What the readings say, from the weights to the gradient, where they can be read and explain
    the result; `in_values` is what dV said.
    """
    if tensor in ("grad_query", "grad_key"):
        return _of_grad_scores(emulator, model, trial, tensor, in_values)
    if tensor not in ("out", "grad_value"):
        return None
    observed = emulator.observed[trial.name, tensor]
    backward = tensor == "grad_value"
    weights = (backward_weights if backward else forward_weights)(emulator.run, trial)
    if weights is None:
        return None
    made = weighed(trial, weights, backward)
    exact = weights_of(trial.call, scores_of(trial.call))
    how = _off(weights, exact, trial)
    read = compared(trial, _in_place(weights, exact, how), backward=backward)
    other = emulator.trials.get("ragged")
    if (instead := _AS_RAGGED.get(read.cause, "")) and other not in (None, trial):
        again = (backward_weights if backward else forward_weights)(emulator.run, other)
        parts = None if again is None else compared(other, again, backward=backward)
        read = parts if parts is not None and parts.cause == instead else read
    if read.by_size and not backward:
        told = _of_function(emulator.run, trial)
        if told is None and read.cause == "weights":
            told = unit_scores(emulator.run, trial)
        read = told or read
    if backward and read.by_size and read.cause == "probabilities" and observed.relative < OTHER:
        told = unit_scores(emulator.run, trial, backward=True)  # P, or what it is made of
        read = told if told is not None and told.cause == "backward-scores" else read
    if how.where and read.cause and read.cause not in STRUCTURE:
        read = replace(read, text=f"{read.text},{how.where}")
    if not read.cause and how.right:
        return _after_weights(emulator, model, trial, weights, tensor)
    elsewhere = _elsewhere(emulator, model, (trial.name, tensor), made)
    divides = not (backward or elsewhere) and read.cause in _DIVIDES
    if divides and of_division(emulator.run, trial):
        return Read(f"{read.text}; of weights that are 1, and as many as a small number, O is off"
                    " as well: it is the division", "reciprocal")  # fmt: skip
    # as much as rounding a sum of so many terms may be off by
    most = min(LARGE, exact.shape[-1] * torch.finfo(trial.call.query.dtype).eps / 2)
    summed = read.cause == "unnormalized" and observed.relative < most and not over_queries(
        weights, exact)  # fmt: skip
    if not backward and summed and (
        terms := from_terms(emulator.run, trial, tensor)):  # fmt: skip
        return Read(f"{read.text}; where all weights are alike O is off too, more so from {terms}"
                    " keys on: sums are rounded as they run", "row-sum")  # fmt: skip
    if (elsewhere or read.cause in LOST) and observed.relative > LARGE:
        # keys that get no weight may be those that are read through columns which are 0
        own = of_columns(emulator.run, trial, observed.total, backward=backward)
        if own is not None:
            return own
    if elsewhere:
        said = _after_weights(emulator, model, trial, None, tensor)
        return said if backward or said.cause else _of_nothing(emulator.run, trial) or said
    if backward and how.kind in ("tail", "rows") and _twice(weights, exact, how):
        return Read(f"P is twice what it should be{how.where}, which are counted twice", "")
    if how.kind == "tail" and read.cause in _BY_ROWS:
        return Read(f"P {how.text}", "grad-tail" if backward else "query-tail")
    if how.kind == "tail" and read.cause not in STRUCTURE | _HIDDEN and _gross(weights, exact, how):
        return Read(f"P {how.text}", "grad-tail" if backward else "query-tail")
    if how.kind == "rows" and read.cause in _BY_ROWS:
        right = not backward and emulator.fits(
            model, frozenset({"grad_value"}), frozenset({trial.name})
        )
        if right and all(fit.left < UNEXPLAINED for fit in right.values()):  # l, as lse has it
            return Read(f"P {how.text}, and that of the backward pass is right", "unnormalized")
        return Read(f"P {how.text}", read.cause)
    return read if read.cause else Read(f"P {how.text}", _WEIGHTS[backward])


def _of_grad_scores(
    emulator: Emulator, model: Model, trial: Trial, tensor: str, in_values: Sequence[Read]
) -> Read | None:
    """What dQ or dK says of dS, or has from what dV said."""
    first = next(iter(in_values), None)
    if first is not None and (first.cause in _UPSTREAM or _of_other_keys(first)):
        return Read(f"as in dV: {first.text}", first.cause)
    if not emulator.offered(("grad_value",)) and (own := _own_weights(emulator.run, trial)):
        return own
    said = grad_scores(emulator.run, trial, tensor)
    if said is None:
        return None
    if first is not None and (first.cause, said.cause) == ("other-data", "backward-mask"):
        return Read(f"{said.text}; as in dV: {first.text}", first.cause)  # which says whose
    both = {"grad-scores": "backward-weights", "grad-stored": "backward-scores"}
    if (
        first is not None
        and first.cause == "probabilities"
        and said.cause in both
        and not said.cut
        and (not _right(emulator, model, "grad_query", trial))
    ):  # P of which is that of dK
        return Read(f"{said.text}, and P is off in dV", both[said.cause])
    return Read(said.text, said.cause)


def _right(emulator: Emulator, model: Model, tensor: str, trial: Trial) -> bool:
    """Whether a model makes all of a result's error on a trial, or what it has more is little."""
    fits = emulator.fits(model, frozenset({tensor}), frozenset({trial.name})).values()
    return all(fit.left < UNEXPLAINED or fit.times < HARMFUL for fit in fits) and bool(fits)


def _of_function(run: Run, trial: Trial) -> Read | None:
    """Whether weights are another function of S − m, or of scores that are capped."""
    cap, dtype = trial.call.softcap, trial.call.query.dtype
    return (cap_of(run, dtype, cap) if cap else None) or exponential_of(run, dtype)


def _elsewhere(emulator: Emulator, model: Model, key: tuple[str, str], made: Tensor) -> bool:
    """Whether what weights make of a result leaves more of its error than what they lack does, the
    rounding of the result.
    """
    observed, (trial, tensor) = emulator.observed[key], key
    rest = torch.where(observed.usable, observed.value - made, 0.0)
    usual = emulator.fits(model, frozenset({tensor}), frozenset({trial})).values()
    rounding, most = sum(float(fit.other.sum()) for fit in usual), READ * observed.total
    return float(rest.square().sum()) > most + min(rounding, most)


def _of_other_keys(read: Read) -> bool:
    """Whether rows of dV are those of other keys, whose weights dS then has as well."""
    return read.cause in ("layout", "other-data") and read.text.startswith("rows ")


def _own_weights(run: Run, trial: Trial) -> Read | None:
    """What is wrong with P of the backward pass, where dV itself, a sum over rows, does not say."""
    weights = backward_weights(run, trial)
    if weights is None:
        return None
    exact = weights_of(trial.call, scores_of(trial.call))
    how = _off(weights, exact, trial)
    if how.right:
        return None
    read = compared(trial, _in_place(weights, exact, how), backward=True)
    cause = "backward-weights" if read.cause in ("", "probabilities") else read.cause
    return Read(f"P as dV shows it {how.text}; {read.text}", cause)


def _off(weights: Tensor, exact: Tensor, trial: Trial) -> Unlike:
    dtype = trial.call.query.dtype
    least = exact.clamp_min(torch.finfo(dtype).smallest_normal) * (exact > 0)
    return unlike(weights, exact, 2 * spread(dtype) * least, dtype)


def _twice(weights: Tensor, exact: Tensor, how: Unlike) -> bool:
    """Whether weights that are off in some rows are twice what they should be there."""
    if how.inside is None:
        return False
    rest, size = ((x * how.inside).square().sum() for x in (weights - 2 * exact, exact))
    return bool(rest < TWICE**2 * size)


def _gross(weights: Tensor, exact: Tensor, how: Unlike) -> bool:
    """Whether weights that are off in one place are so by more than rounding makes."""
    if how.inside is None:
        return False
    rest, size = ((x * how.inside).square().sum() for x in (weights - exact, exact))
    return bool(rest > LARGE**2 * size)


def _in_place(weights: Tensor, exact: Tensor, how: Unlike) -> Tensor:
    """Weights that are off where they are off, and right elsewhere: what is wrong in one place is
    not hidden by what is right in others.
    """
    return weights if how.inside is None else torch.where(how.inside, weights, exact)


def _after_weights(emulator: Emulator, model: Model, trial: Trial, weights: Tensor | None,
                   tensor: str) -> Read:  # fmt: skip
    """What is wrong where the weights are right to what they are read to: bit for bit beside those
    of recipes they tell another rounding; one term alone tells operands and the store from sums.
    None for weights that are off and do not make the error.
    """
    noise = NOISE[trial.call.query.dtype]
    told = f"the weights are right to {100 * noise:.1g} %"
    if weights is None:
        told = "the weights, as they are read, do not make the error"
    where = one_term(emulator.run, trial, tensor)
    if where != "sum" and tensor == "out" and weights is None and normalized(emulator.run, trial):
        return Read(f"{told}; O is the same where V is larger: V is normalized", "value-factor")
    if where is None:
        return Read(f"{told}: what differs is a sum over them, an operand or the store", "")
    term, result = ("key", "O") if tensor == "out" else ("query", "dV")
    if where != "sum" and (values := few_values(emulator.observed[trial.name, tensor].value)):
        told = f"{told}; {result} takes {values} numbers alone, as codes do"
        return Read(told, "out" if tensor == "out" else "grad-stored")
    if where == "sum":
        if emulator.observed[trial.name, tensor].relative > OTHER:  # no sum is so coarse
            how = value_rows(emulator.run, trial) if tensor == "out" else ("", "")
            return Read("; ".join(filter(None, (told, how[0]))), how[1])
        if weights is None and tensor == "out" and _weights_err(emulator, trial):
            said = _of_function(emulator.run, trial) or unit_scores(emulator.run, trial)
            return said or Read(f"{told}, and yet what errs is weights", "")
        other = (0.0 if weights is None else
                 _other_bits(emulator, model, trial, weights, tensor))  # fmt: skip
        for t in (trial, emulator.trials.get("plain", trial)):  # a few keys a row show less
            if tensor == "out" and other > OTHER_BITS and (by_signs := _by_signs(emulator, t)):
                return Read(f"{told}; {by_signs.text}", by_signs.cause)
        terms = from_terms(emulator.run, trial, tensor) if other > OTHER_BITS else 0
        if terms and tensor == "out":  # of weights that are 1, which every format holds
            return Read(f"{told}; where all weights are alike O is off too, more so from {terms}"
                        " keys on: it is the sum", "accumulator")  # fmt: skip
        by_scores = unit_scores(emulator.run, trial, backward=tensor == "grad_value") if (
            other > OTHER_BITS) else None  # fmt: skip
        if by_scores is not None and by_scores.cause in ("operand", "backward-scores"):
            return Read(f"{told}; {by_scores.text}", by_scores.cause)
        if other > OTHER_BITS:
            told += f"; {100 * other:.2g} % of them are other than any recipe's: they are rounded"
            return Read(f"{told} otherwise", _WEIGHTS[tensor == "grad_value"])
        cause = "accumulator" if tensor == "out" else "grad-accumulator"
        told = f"{told}; of one {term} alone {result} is exact, so it is the sum"
        if tensor == "out" and weights is not None and _weights_err(emulator, trial):
            return Read(f"{told}: its terms are rounded before they are added up", "products")
        return Read(told, cause)
    other = emulator.observed[trial.name, tensor].relative > OTHER and where != "sum"
    # V may be coarse, and O off by what the weights are as well
    if other and not (tensor == "out" and 0 < value_error(emulator.run, trial) < OTHER):
        if tensor == "out" and (how := value_rows(emulator.run, trial))[1] == "value-factor":
            return Read(f"{told}; {how[0]}", how[1])
        what = "what they weigh are" if where == "operand" else f"what is given for {result} are"
        return Read(f"{told}; {what} other numbers", "other-data")
    if where == "operand":
        return Read(f"{told}; what they weigh is off before it is summed", "operand")
    if terms := from_terms(emulator.run, trial, tensor):
        cause = "accumulator" if tensor == "out" else "grad-accumulator"
        return Read(f"{told}; {result} is off, more so from {terms} terms on", cause)
    cause = "out" if tensor == "out" else "grad-stored"
    return Read(f"{told}; {result} is off after it is summed", cause)


def _of_nothing(run: Run, trial: Trial) -> Read | None:
    """Whether O is finite and not 0 where all values are."""
    call = replace(trial.call, value=torch.zeros_like(trial.call.value))
    result = run(replace(trial, name=f"{trial.name}/V 0", call=call))
    if result is None or not bool(result.out.isfinite().all()):
        return None
    if result.out.abs().amax() < LEFT * trial.call.value.double().abs().amax():
        return None
    told = "the weights, as they are read, do not make the error"
    return Read(f"{told}; O of values that are 0 is not 0: it has others", "other-data")


def _signs(emulator: Emulator, trial: Trial) -> list[float]:
    """O's errors on values whose signs change often, once, never, in stock's."""
    stock = Model.of(space.STOCK[trial.call.query.dtype])

    def run(asked: Trial) -> Result | None:
        got = emulator.tensors(asked, stock.forward, None)
        return Result(got["out"].to(asked.call.query.dtype)) if got else None

    errors = zip(signed_sums(emulator.run, trial), signed_sums(run, trial), strict=True)
    return [a / max(b, 1e-300) for a, b in errors]


def _weights_err(emulator: Emulator, trial: Trial) -> bool:
    """Whether O's error is as large where values change their sign often as where they do so once,
    and smaller where they have one: it is made before the sum, whose own grows with what it holds.
    """
    each, middle, never = _signs(emulator, trial)
    return each > HARMFUL and middle < HARMFUL * each and never * HARMFUL < each


def _by_signs(emulator: Emulator, trial: Trial) -> Read | None:
    """Whether O's error is that of its sum as it runs, or of what comes after, beside stock's."""
    each, middle, never = _signs(emulator, trial)
    if each < 2 and middle > HARMFUL * max(each, HARMFUL):
        text = f"values whose sign changes once err {middle:.2g} × stock"
        return Read(f"{text}: the sum as it runs is rounded", "accumulator")
    if each < 2 and never > max(HARMFUL, 0.9 * each, 0.9 * middle):
        return Read(f"values of one sign err {never:.2g} × stock: it is off after its sum", "out")
    return None


def _other_bits(emulator: Emulator, model: Model, trial: Trial, weights: Tensor,
                tensor: str) -> float:  # fmt: skip
    """The share of weights that are read otherwise than any likely recipe would have them read."""
    backward = tensor == "grad_value"
    if trial.call.query.dtype == torch.float32:  # whose bits are those of the order of sums
        return 0.0

    def made(candidate: Model) -> float:
        def run(asked: Trial) -> Result | None:
            way = candidate.way(tensor) if backward else None
            got = emulator.tensors(asked, candidate.forward, way)
            if not got:
                return None
            dtype, call = asked.call.query.dtype, asked.call
            out = got.get("out", torch.zeros_like(asked.grad_out)).to(dtype)
            if not backward:
                return Result(out)
            return Result(out, grad_query=call.query, grad_key=call.key,
                          grad_value=got["grad_value"].to(dtype))  # fmt: skip

        read = (backward_weights if backward else forward_weights)(run, trial)
        if read is None or read.shape != weights.shape:
            return 1.0
        # another order of sums moves a number by an ulp of its own, here and there
        return float((read != weights)[weights != 0].double().mean())

    stock = space.STOCK[trial.call.query.dtype]
    blocks = [Model.of(stock.with_(block_key=w)) for w in (None, 16, 32, 64)]
    return min(made(m) for m in (model, *space.starts(trial.call.query.dtype), *blocks))
