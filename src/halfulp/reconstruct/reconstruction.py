"""`reconstruct`: ask a kernel for a few small results, and find the arithmetic that errs as it
does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from halfulp.algorithms import golden
from halfulp.calls import Result
from halfulp.formats import dtype_named
from halfulp.operations import DTYPES
from halfulp.recipes.kernels import recipe_of
from halfulp.reconstruct import space
from halfulp.reconstruct.causes import CAUSES
from halfulp.reconstruct.drawn_calls import drawn
from halfulp.reconstruct.emulating import FORWARD, TENSORS, Emulator, Model, Twist
from halfulp.reconstruct.evidence import HARMFUL, UNEXPLAINED, Cosine, Fit
from halfulp.reconstruct.first_said import called_twice, first_said
from halfulp.reconstruct.found import Explained, Reconstruction
from halfulp.reconstruct.naming import (
    Difference,
    Named,
    combined,
    differences,
    named,
    reads_forward,
)
from halfulp.reconstruct.order_read import Order, key_order, query_order
from halfulp.reconstruct.panel import Run, Trial, panel, some_heads
from halfulp.reconstruct.places import FAR, Place, unexplained
from halfulp.reconstruct.regions import Region, calls_of, region_of, restricted, rows_of
from halfulp.reconstruct.slips import Tiles, of_others, of_rows
from halfulp.reconstruct.stages import Stages
from halfulp.reconstruct.upheld import MILD, upheld
from halfulp.runs.threads import own_thread
from halfulp.targets import BHND, Target, device_named, in_its_form, run_target, target_of

EFFORT = 2500  # emulations
HEADS = 2  # of a trial that is handed in
BESIDE = 16  # drawn calls that are right, beside those that are not


@own_thread()
def reconstruct(
    target: str | Target | Callable[..., Any],
    *,
    dtype: str | torch.dtype = "bfloat16",
    device: str | torch.device = "cpu",
    form: str | None = None,
    effort: int = EFFORT,
    seed: int = 0,
) -> Reconstruction:
    """Find which arithmetic explains an attention kernel's errors: its recipe, or what it does
    otherwise than attention's definition.

    error = kernel − exact result, on about a dozen small inputs; candidates are emulated on the
    same inputs, and the one whose error points where the kernel's does (a cosine of 1) is what the
    kernel does. What none explains is said to be unexplained, with where it sits.

    Args:
        target: a name (`halfulp ls targets`), "file.py:function", or a function as
            `halfulp.audit` takes it.
        dtype: bfloat16, float16 or float32, by name or as torch has it.
        device: where the target runs; candidates are emulated on the CPU.
        form: how a function takes its tensors, in a line such as "qkv[B,N,3,H,D]" (docs/forms.md);
            without it what its parameters are called, and its first result, say it.
        effort: emulations after which the most expensive parts of the search are left out; a
            thousand take one or two seconds.
        seed: of the inputs.

    Raises:
        ValueError: for an unknown target, dtype or device, an effort below 1, or a kernel that
            gives no result on any of the inputs.
    """
    dtype, device = dtype_named(dtype, DTYPES), device_named(device)
    if effort < 1:
        raise ValueError(f"effort={effort}: accepted is an integer of at least 1")
    chosen = target_of(target, form=form)
    first = panel(DTYPES[dtype], seed)[0]
    chosen, outcome = in_its_form(
        chosen,
        lambda t: _called(t, first, device),
        lambda: golden(first.call).out,
        _called(chosen, first, device),
    )
    found = of_kernel(runner(chosen, device), chosen.name, dtype, effort=effort, seed=seed)
    if found is None:
        raise ValueError(
            f"target={chosen.name!r}: gives no result on any of the inputs"
            f" ({outcome.refusal or 'no reason given'}); accepted is an attention function"
        )
    return found if chosen.form in (None, BHND) else replace(found, form=str(chosen.form))


def runner(target: Target, device: str = "cpu") -> Run:
    """A function that calls the target on a trial; None where it refuses or fails."""
    return lambda trial: _called(target, trial, device).result


def _called(target: Target, trial: Trial, device: str) -> Any:
    call = trial.call
    query, key, value, do = (
        x.to(device) for x in (call.query, call.key, call.value, trial.grad_out)
    )
    options: dict[str, Any] = {
        name: x.to(device) if isinstance(x, torch.Tensor) else x
        for name, x in call.options().items()
    }
    outcome = run_target(target, query, key, value, do, manner=trial.manner, **options)
    if outcome.result is None or device == "cpu":
        return outcome
    return replace(outcome, result=outcome.result.map(torch.Tensor.cpu))


def of_kernel(
    run: Run,
    name: str,
    dtype: str = "bfloat16",
    *,
    extra: Sequence[Trial] = (),
    effort: int = EFFORT,
    seed: int = 0,
    rarer: bool = True,
) -> Reconstruction | None:
    """The same of a kernel that `run` calls, with trials of the caller's own beside the panel; with
    `rarer`, where these show nothing, on rarer calls as well, and then on drawn ones. None where it
    gives nothing.
    """
    began = time.perf_counter()
    low = DTYPES[dtype]
    asked = [*panel(low, seed), *(some_heads(t, HEADS) for t in extra)]
    observed = _asked(run, asked)
    if not observed:
        return None
    moved = called_twice(run, observed)
    over_keys, over_queries = key_order(run, low), query_order(run, low)
    # one by one is how a product is summed, not how keys are tiled
    width = over_keys.block if over_keys is not None else None
    blocks = (width,) if width is not None and width > 1 else ()
    tiles = Tiles(_tile(over_queries), _tile(over_keys))

    def searched(observed: dict[Trial, Result]) -> Stages:
        return Stages(Emulator(observed, run), low, effort, blocks, tiles)

    more, stages = (
        _widened(searched, observed, run, low, seed) if rarer else ((), searched(observed))
    )
    asked += more
    emulator = stages.emulator
    whole = asked_all = emulator
    given: tuple[Twist, ...] = ()
    region = region_of(emulator, stages.start)
    if region is not None:
        exchanged = of_others(emulator, region, tiles)
        if exchanged is None:
            whole = emulator = restricted(emulator, region)
        else:
            given = (exchanged,)
    elif _shown(stages) and (narrow := rows_of(emulator, stages.start)):
        ruled = of_rows(emulator, narrow[1], tiles, stages.start)
        if ruled is None or not _mostly(emulator, stages.start, ruled):
            whole, region = narrow
            emulator = whole
        else:
            given = (ruled,)
            wrong, region = calls_of(emulator, stages.start)
            emulator = emulator.only(wrong)
    else:
        wrong, region = calls_of(emulator, stages.start)
        emulator = emulator.only(wrong)
    if region is not None or given or emulator is not whole:
        stages = Stages(emulator, low, effort, blocks, tiles, given, stages.start)
    model = stages.run()
    if emulator is not whole and not _harms(whole, stages.start, model):
        emulator, region = whole, None  # what explains the calls that are wrong goes for all
    refused = tuple(t.name for t in asked if t.name not in asked_all.trials)
    found = _found(name, dtype, emulator, stages, model, refused, bool(moved), began, region)
    found = first_said(found, asked_all, moved)
    orders = {"O over keys": over_keys, "dV over queries": over_queries}
    return replace(found, sums={what: o.text for what, o in orders.items() if o is not None})


def _widened(
    search: Callable[[dict[Trial, Result]], Stages],
    observed: dict[Trial, Result],
    run: Run,
    low: torch.dtype,
    seed: int,
) -> tuple[tuple[Trial, ...], Stages]:
    """Calls beside those that were observed, and a search with what they show: rarer ones where
    these show little, drawn ones where nothing is shown yet.
    """
    asked: tuple[Trial, ...] = ()
    stages = search(observed)
    if (most := _most(stages.emulator, stages)) < MILD:
        more = panel(low, seed, rarer=True)
        wider = search(with_them := observed | _asked(run, more))
        # what only rarer calls show may stand beside what all have
        if not _shown(stages) or _most(wider.emulator, stages) > MILD * most:
            asked, observed, stages = more, with_them, wider
    if not _shown(stages):
        given = _asked(run, drawn(low, seed))
        emulator = Emulator(given, run)
        # of small calls one may err by a few times another's rounding
        wrong = {name for (name, _), fit in _at_the_start(emulator, stages) if fit.times > FAR}
        wrong |= {name for name, _ in emulator.nonfinite}
        right = [t.name for t in given if t.name not in wrong][:BESIDE]
        if wrong:
            told = {t: x for t, x in given.items() if t.name in {*wrong, *right}}
            stages = search(observed | told)
    return asked, stages


def _asked(run: Run, trials: Sequence[Trial]) -> dict[Trial, Result]:
    results = ((trial, run(trial)) for trial in trials)
    return {trial: result for trial, result in results if result is not None}


def _shown(stages: Stages) -> bool:
    """Whether something is wrong on any of the trials."""
    fits = [fit for _, fit in _at_the_start(stages.emulator, stages)]
    return bool(stages.emulator.nonfinite) or any(
        f.left > UNEXPLAINED and f.times > HARMFUL for f in fits
    )


def _most(emulator: Emulator, stages: Stages) -> float:
    """The kernel's error over a model's, where that is largest."""
    times = [fit.times for _, fit in _at_the_start(emulator, stages)]
    return math.inf if emulator.nonfinite else max(times, default=1.0)


def _at_the_start(emulator: Emulator, stages: Stages) -> list[tuple[tuple[str, str], Fit]]:
    """How the recipe that a search starts from fits each result of each call, and stock where that
    has no such calls.
    """
    offered, start = frozenset(TENSORS), stages.start
    stock = emulator.fits(stages.stock, offered)
    return [(key, stock[key] if emulator.made(emulator.trials[key[0]], start, key[1]) is None
             else fit) for key, fit in emulator.fits(start, offered).items()]  # fmt: skip


def _mostly(emulator: Emulator, model: Model, twist: Twist) -> bool:
    """Whether a twist explains half of what is wrong."""
    changed = space.twisted(twist, space.EVERY)(model)
    old, new = (emulator.fits(m, frozenset(TENSORS)) for m in (model, changed or model))
    bad = [key for key, fit in old.items() if fit.left > UNEXPLAINED and fit.times > HARMFUL]
    return 2 * sum(new[key].left < UNEXPLAINED for key in bad) > len(bad)


def _harms(emulator: Emulator, start: Model, model: Model) -> bool:
    """Whether a model leaves some of what another explains."""
    old, new = (emulator.fits(m, frozenset(TENSORS)) for m in (start, model))
    return any(new[key].left > UNEXPLAINED >= fit.left for key, fit in old.items())


def _tile(order: Order | None) -> int:
    """The width of blocks that an order reveals, or the usual one."""
    return 64 if order is None or order.block is None or order.block < 16 else order.block


def _found(
    name: str,
    dtype: str,
    emulator: Emulator,
    stages: Stages,
    model: Model,
    refused: tuple[str, ...],
    unsteady: bool,
    began: float,
    region: Region | None,
) -> Reconstruction:
    stock, halfulp = space.STOCK[DTYPES[dtype]], recipe_of("halfulp", DTYPES[dtype])
    causes, harmless = named(emulator, model, stock)
    common = ("", "") if region is None else (region.text.removeprefix("in "), region.cause)
    located = unexplained(emulator, model, UNEXPLAINED, common, stages.stock)
    places = [_with_field(p, harmless) for p in located]
    causes = upheld(causes, places, emulator, stages.start, model, stock, dtype, region)
    return Reconstruction(
        target=name,
        dtype=dtype,
        model=model,
        stock=stock,
        recipe=combined(model, stock),
        explained=_explained(emulator, model, Model.of(stock), Model.of(halfulp)),
        beside=tuple(dict.fromkeys(d.text for d in differences(model, halfulp))),
        causes=tuple(causes),
        ingredients=ingredients(model),
        harmless=tuple(harmless),
        places=tuple(places),
        steps=tuple(stages.search.steps),
        nonfinite={f"{trial} {t}": n for (trial, t), n in emulator.nonfinite.items()},
        refused=refused,
        unsteady=unsteady,
        tried=stages.search.tried,
        seconds=time.perf_counter() - began,
        complete=not stages.late,
        region="" if region is None else region.text,
    )


def _with_field(place: Place, harmless: Sequence[Difference]) -> Place:
    """A place that trials alone tell, or nothing, with the cause of what the same result is known
    to round otherwise.
    """
    forward = place.tensor in FORWARD
    own = [d for d in harmless if d.cause and place.tensor in d.tensors and (
        d.field is None or (d.field in reads_forward()) == forward)]  # fmt: skip
    if not place.cause.endswith("unexplained") or not own:
        return place
    return replace(place, cause=own[0].cause, text=f"{place.text}, where {own[0].text} is not all")


def _explained(
    emulator: Emulator, model: Model, stock: Model, halfulp: Model
) -> tuple[Explained, ...]:
    found = []
    for tensor in TENSORS:
        own, theirs, ours = (
            list(emulator.fits(m, frozenset({tensor})).values()) for m in (model, stock, halfulp)
        )
        # lse in fp32 errs by the order of sums alone, which is nothing to explain
        counted = [i for i, fit in enumerate(own) if float(fit.energy.sum()) > 4 * fit.floor]
        if counted:
            found.append(
                Explained(
                    tensor,
                    Cosine.of([own[i] for i in counted]),
                    Cosine.of([theirs[i] for i in counted]),
                    _times([theirs[i] for i in counted]),
                    _times([ours[i] for i in counted]),
                )
            )
    return tuple(found)


def _times(fits: Sequence[Fit]) -> float:
    """The kernel's error over a recipe's, the median of all trials."""
    ratios = [math.sqrt(float(f.energy.sum()) / max(float(f.other.sum()), 1e-300)) for f in fits]
    return median(ratios)


def ingredients(model: Model) -> tuple[Named, ...]:
    """What of the model rounds more than operands and results demand, as FlashAttention-2 does, the
    worst for training first.
    """
    keys = []
    forward, query = model.forward.recipe, model.gradients[0].recipe
    if query.delta_from == "out" and query.algorithm != "standard":
        keys.append(("delta-from-out", "delta_from=out", "grad_query"))
    rounds = "weights_operand" in forward.rounded_steps
    if rounds and forward.algorithm == "standard":
        keys.append(("weights-normalized", "algorithm=standard", "out"))
    elif rounds and forward.row_sum_from == "exact":
        keys.append(("weights-row-sum", "row_sum_from=exact", "out"))
    disagree = query.backward_weights != "rounded" or query.shift.kind != "integer"
    if rounds and disagree:
        text = f"backward_weights={query.backward_weights}"
        keys.append(("backward-weights", text, "grad_query"))
    return tuple(Named(CAUSES[key], text, 1.0, tensor, "", 0.0) for key, text, tensor in keys)


__all__ = ["of_kernel", "reconstruct", "runner"]
