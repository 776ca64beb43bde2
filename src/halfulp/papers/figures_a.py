"""Qiu & Yao's figures 2 to 9 from this package's runs, as plain data: curves, bars and heat maps in
JSON form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from halfulp.experiments.failure import FailureRun, curves
from halfulp.papers.constructed_run import MechanismRun, Profile
from halfulp.papers.runs_a import Snapshot, Traced
from halfulp.runs.results import Figure, Series, plain_data
from halfulp.watch.directions import error_direction
from halfulp.watch.measures import delta_error

Picture = dict[str, Any]
MAP_TOKENS = 48
ACCELERATED = "Accelerated: O keeps fewer mantissa bits than bf16."


def heat_map(
    title: str, x_label: str, y_label: str, values: Tensor, caption: str, command: str
) -> Picture:
    """Return the JSON form of a heat map: values `[rows, columns]` from −1 to 1, the first row on
    top.
    """
    return {
        "kind": "heat map",
        "title": title,
        "x_label": x_label,
        "y_label": y_label,
        "values": plain_data(values.tolist()),
        "low": -1.0,
        "high": 1.0,
        "caption": caption,
        "command": command,
    }


def twin_losses(runs: Sequence[FailureRun], command: str) -> Picture:
    """Figure 2: the loss of twin runs."""
    return curves(runs, command)[0].as_dict() | {"title": "Loss of twin runs (after fig. 2)"}


def fix_losses(runs: Mapping[str, Sequence[MechanismRun]], command: str) -> Picture:
    """Figure 7: the loss with and without the published softmax fix, where the paper's mechanism
    dominates.
    """
    series = []
    for name, same in runs.items():
        columns = list(zip(*(run.loss for run in same), strict=False))
        steps = [float(step) for step in same[0].steps[: len(columns)]]
        series.append(Series.over(name, steps, columns))
    count = len(next(iter(runs.values())))
    caption = (
        f"Constructed run; mean squared error of the sound features, {count} seeds: median and"
        " range."
    )
    return Figure(
        "With and without the softmax fix (after fig. 7)",
        "step",
        "loss",
        tuple(series),
        caption,
        command,
        y_log=True,
    ).as_dict()


def head_sigmas(run: Traced, twin: Traced, onset: int, command: str) -> Picture:
    """Figure 3: σ(W_Q) of every head at a step, and at the end."""
    at, last = run.measured_steps().index(onset), run.config.steps
    shown = (
        (f"step {onset}", run.measured("sigma_query")[at]),
        (f"step {onset}, twin", twin.measured("sigma_query")[at]),
        (f"step {last}", run.measured("sigma_query")[-1]),
        (f"step {last}, twin", twin.measured("sigma_query")[-1]),
    )
    series = tuple(
        Series(name, tuple(str(h) for h in range(len(sigmas))), tuple(sigmas), style="bar")
        for name, sigmas in shown
    )
    caption = f"One seed; the twin has standard attention. {ACCELERATED}"
    title = "σ(W_Q) by head (after fig. 3)"
    return Figure(title, "head", "σ(W_Q)", series, caption, command).as_dict()


def layer_losses(runs: Mapping[str, Traced], command: str) -> Picture:
    """The loss of language runs, mean of 5 recorded steps, with low precision in some of the
    layers.
    """
    series = []
    for name, run in runs.items():
        steps, loss = run.loss()
        smooth = torch.tensor(loss, dtype=torch.float64).unfold(0, min(5, len(loss)), 1).mean(-1)
        series.append(
            Series(name, tuple(map(float, steps[-len(smooth) :])), tuple(smooth.tolist()))
        )
    title, caption = (
        "Low precision by layer",
        f"Mean of 50 steps; the other layers have standard attention. {ACCELERATED}",
    )
    return Figure(title, "step", "loss, nats a byte", tuple(series), caption, command).as_dict()


def layer_sigmas(runs: Mapping[str, Traced], command: str) -> Picture:
    """Figure 9: the largest σ(W_Q) of every layer, low precision everywhere and nowhere.

    More than four layers are too many lines: those that grew most against the twin, the range of
    all others, and that of the twin's.
    """
    low, twin = (
        {
            layer: [max(heads) for heads in runs[name].measured("sigma_query", layer)]
            for layer in range(len(runs[name].measures[0]["measure"]["sigma_query"]))
        }
        for name in ("everywhere", "nowhere")
    )
    steps = tuple(map(float, runs["everywhere"].measured_steps()))
    order = sorted(low, key=lambda layer: low[layer][-1] / twin[layer][-1], reverse=True)
    if len(low) <= 4:
        series = [Series(f"layer {n}", steps, tuple(low[n])) for n in low]
        series += [Series(f"layer {n}, twin", steps, tuple(twin[n])) for n in twin]
    else:
        series = [Series(f"layer {n}", steps, tuple(low[n])) for n in order[:3]]
        others = zip(*(low[n] for n in order[3:]), strict=True)
        series.append(Series.over("the other layers", steps, list(others)))
        twins = zip(*twin.values(), strict=True)
        series.append(Series.over("all layers, twin", steps, list(twins)))
    caption = f"Largest of a layer's heads; the twin has standard attention. {ACCELERATED}"
    caption += " The median over several layers, and their range." if len(low) > 4 else ""
    title = "σ(W_Q) by layer (after fig. 9)"
    return Figure(title, "step", "σ(W_Q)", tuple(series), caption, command, y_log=True).as_dict()


def similarity_maps(run: Traced, layer: int, head: int, command: str) -> list[Picture]:
    """Figure 4: cosines of the rank-1 terms (PK)[T]ᵀX[T] between tokens of one step and of two, and
    a control.
    """
    steps = sorted(run.calls)
    early, late = (_terms(run.calls[step][layer], head) for step in (steps[0], steps[-1]))
    generator = torch.Generator().manual_seed(0)
    control = tuple(x[:, torch.randperm(x.shape[1], generator=generator)] for x in late)
    first, last = f"token of step {steps[0]}", f"token of step {steps[-1]}"
    maps = (
        (f"Terms of step {steps[-1]}", late, last),
        (f"Steps {steps[0]} and {steps[-1]}", early, first),
        ("Shuffled features", control, "token, features shuffled"),
    )
    caption = (
        f"Cosine of (PK)[T]ᵀX[T] and another token's, layer {layer}, head {head}, one sequence. In"
        " the last map the features of PK and X are permuted on one side."
    )
    return [
        heat_map(f"{title} (after fig. 4)", last, y, cosines(a, late), caption, command)
        for title, a, y in maps
    ]


def raw_maps(run: Traced, layer: int, head: int, command: str) -> list[Picture]:
    """Figure 4 as the paper draws it: rows of PK and X at two steps, the term of one token of each,
    and R, the direction of dW_Q's error.
    """
    steps = sorted(run.calls)
    picked = {step: run.calls[step][layer] for step in (steps[0], steps[-1])}
    tokens = {steps[0]: 12, steps[-1]: 40}  # as the paper takes tokens 50 and 718
    caption = (
        f"Layer {layer}, head {head}, first sequence; each map is divided by its largest magnitude."
        f" {ACCELERATED}"
    )
    maps: list[tuple[str, str, str, Tensor]] = []
    for step, snapshot in picked.items():
        pk, x = _terms(snapshot, head)
        token = min(tokens[step], len(pk) - 1)
        maps += [
            (f"Rows of PK, step {step}", "feature of PK", "token", pk),
            (f"Rows of X, step {step}", "feature of X", "token", x),
            (
                f"(PK)[T]ᵀX[T], step {step}, token {token}",
                "feature of X",
                "feature of PK",
                torch.outer(pk[token], x[token]),
            ),
            (f"R, step {step}", "feature of X", "feature of PK", _direction(snapshot, head)),
        ]
    return [
        heat_map(f"{title} (after fig. 4)", x, y, v / v.abs().max(), caption, command)
        for title, x, y, v in maps
    ]


def _direction(snapshot: Snapshot, head: int) -> Tensor:
    """R = Σ_T (δ_lp − δ_hp)[T] (PK)[T]ᵀ X[T] of one head `[D, width]`, over all sequences."""
    exact = snapshot.exact()
    direction = error_direction(snapshot.call, exact, delta_error(snapshot.call, exact))
    return direction[head].double()


def cosines(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """Return cos(a_iᵀ x_i, b_jᵀ y_j) `[n, m]` of rank-1 matrices given by their factors `[n, D]`
    and `[n, width]`.
    """
    (u, x), (v, y) = ([t / t.norm(dim=-1, keepdim=True) for t in pair] for pair in (a, b))
    # ⟨u xᵀ, v yᵀ⟩ = (u · v)(x · y): no matrix of a token has to be made
    similar: Tensor = (u @ v.mT) * (x @ y.mT)
    return similar


def _terms(snapshot: Snapshot, head: int) -> tuple[Tensor, Tensor]:
    """PK and X of the first sequence's first tokens."""
    assert snapshot.call.inputs is not None
    pk = snapshot.exact().weights[0, head] @ snapshot.call.key[0, head].double()
    return pk[:MAP_TOKENS], snapshot.call.inputs[0, :MAP_TOKENS].double()


def cumulative_error(run: Traced, since: int, command: str) -> Picture:
    """Figure 5a: the cumulative sum of Σ(δ_lp − δ_hp), and of its two parts."""
    steps = tuple(map(float, run.measured_steps(since)))
    parts = (
        ("Σ(δ_lp − δ_hp)", "delta_error"),
        ("first order", "delta_error_first_order"),
        ("curvature", "delta_error_curvature"),
    )
    series = tuple(
        Series(label, steps, _running([h[0] for h in run.measured(n, 0, since)]))
        for label, n in parts
    )
    caption = (
        f"One-layer task, true bf16, seed {run.config.seed}, every {_every(steps)} steps from"
        f" {since} on."
    )
    title = "Cumulative error of δ (after fig. 5a)"
    return Figure(title, "step", "cumulative sum", series, caption, command).as_dict()


def constructed_error(runs: Mapping[str, MechanismRun], command: str) -> Picture:
    """Figure 5a where the paper's mechanism dominates: first order and curvature of some
    variants.
    """
    series = []
    for name, run in runs.items():
        steps = tuple(map(float, run.steps))
        series.append(Series(f"{name}: first order", steps, _running(run.first_order)))
        if name == "described":
            series.append(Series(f"{name}: curvature", steps, _running(run.curvature)))
    title = "Error of δ, constructed (after fig. 5a)"
    caption = "Sums over the recorded steps of one seed."
    return Figure(title, "step", "cumulative sum", tuple(series), caption, command).as_dict()


def feature_bars(found: Profile, command: str) -> list[Picture]:
    """Figure 5b, c: dO and the error of O by feature."""
    shown = 2 * found.guilty
    names = tuple(str(i) for i in range(shown))
    parts = (
        (
            "dO by feature (after fig. 5b)",
            "mean dO at exact O, 10⁻⁵",
            [1e5 * x for x in found.grad_out],
        ),
        (
            "Error of O by feature (after fig. 5c)",
            "mean O_lp − O_hp, 10⁻³",
            [1e3 * x for x in found.error],
        ),
    )
    caption = (
        f"Constructed run, sharp rows of step {found.step}; the guilty features are 0 to"
        f" {found.guilty - 1}."
    )
    return [
        Figure(
            title,
            "feature",
            y,
            (Series(y, names, tuple(values[:shown]), style="bar"),),
            caption,
            command,
        ).as_dict()
        for title, y, values in parts
    ]


def running_error(found: Profile, command: str) -> Picture:
    """Figure 6b, c: the error of bf16(Σ P̄V) along the tokens of one row, P̄ = 1 marked."""
    at = tuple(map(float, range(len(found.weights))))
    ones = [i for i, weight in enumerate(found.weights) if weight == 1]
    series = (
        Series("error of Ō up to token t", at, found.running_error),
        Series(
            "P̄ = 1",
            tuple(at[i] for i in ones),
            tuple(found.running_error[i] for i in ones),
            style="points",
        ),
    )
    title, caption = (
        "Error of Ō along a row (after fig. 6b, c)",
        f"Constructed run, one sharp row of step {found.step}.",
    )
    return Figure(title, "token t", "bf16(Σ P̄V) − Σ P̄V", series, caption, command).as_dict()


def value_distribution(found: Profile, command: str) -> Picture:
    """Figure 6a: the distribution of V in a guilty feature."""
    values = torch.tensor(found.all_values)
    low, high = float(values.min()), max(float(values.max()), 0.0)
    counts = torch.histc(values, 8, low, high)
    width = (high - low) / 8
    names = tuple(f"{low + (i + 0.5) * width:.1f}".replace("-", "−") for i in range(8))
    series = (
        Series("share of tokens", names, tuple((counts / counts.sum()).tolist()), style="bar"),
    )
    caption = (
        f"Constructed run, feature 0 of all tokens of step {found.step};"
        f" {float((values < 0).float().mean()):.0%} < 0."
    )
    return Figure(
        "V in a guilty feature (after fig. 6a)", "V", "share", series, caption, command
    ).as_dict()


def _running(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(torch.tensor(list(values), dtype=torch.float64).cumsum(0).tolist())


def _every(steps: Sequence[float]) -> str:
    return f"{steps[1] - steps[0]:g}" if len(steps) > 1 else "?"
