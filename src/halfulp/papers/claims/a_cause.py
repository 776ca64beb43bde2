"""Qiu & Yao's search for the cause, claims A1 to A6: which precision, tiling, layer, operation and
heads.

Each is measured where it can be: in true bf16 on the one-layer task, and where layers or heads are
asked for, or the one-layer task disagrees, on the language model, which is accelerated. The paper's
own test of each is a GPT-2 of 124M parameters over 10,000 steps of 524,288 tokens, on GPUs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from halfulp.papers.claim import Claim, Lab, Measured, Rule
from halfulp.papers.claims.fixes import describe, survivors
from halfulp.papers.figures_a import head_sigmas, layer_losses, twin_losses
from halfulp.papers.runs_a import Plan, Traced, language_attention, trace_all

WHOLE = "BF16_FLASH2[block_query=none,block_key=none]"
STANDARD = "BF16_STANDARD"
INTERVAL = 50  # steps between two measurements of a language run
RECOMPUTED = "O = PV in the backward pass"
# The one criterion of A3 to A6, set on 2026-11-22 before any of them was run under it.
EXCESS, GROWTH = 0.3, 3.0
CALM_EXCESS, CALM_GROWTH = 0.1, 1.5
CRITERION = (
    f"a language run fails if its loss ends more than {EXCESS:g} nats above the twin's (means over"
    f" the last fifth) and its largest σ(W_Q) above {GROWTH:g} times the twin's; it is stable if"
    f" its loss ends at most {CALM_EXCESS:g} nats above and its σ(W_Q) at most {CALM_GROWTH:g}"
    " times"
)
ONE_CRITERION = (
    "2026-11-22: one criterion of stability for A3 to A6; before, each had thresholds of its own,"
    " A3's taken after a first look, and a run between them counted as stable"
)


@dataclass(frozen=True)
class Scale:
    """How large the language runs are."""

    bits: int
    steps: int
    seeds: tuple[int, ...]

    @property
    def text(self) -> str:
        """The acceleration and the sample, for a reader."""
        plural = "s" * (len(self.seeds) > 1)
        return (
            f"accelerated: O with {self.bits} mantissa bit{'s' * (self.bits > 1)}; {self.steps}"
            " steps, " + f"{len(self.seeds)} seed{plural}"
        )


def scale_of(lab: Lab) -> Scale:
    """Three seeds, O with one mantissa bit or with two."""
    return Scale(2, 1500, (0, 1, 2)) if lab.full else Scale(1, 500, (0, 1, 2))


def attentions(bits: int) -> dict[str, tuple[str, ...]]:
    """The language model's plans by name; layers and heads count from 0."""
    low = language_attention(bits)
    return {
        "everywhere": (low,),
        "nowhere": (STANDARD,),
        "only layer 0": (STANDARD, f"layer 0: {low}"),
        "only layer 1": (STANDARD, f"layer 1: {low}"),
        "δ from dP∘P": (language_attention(bits, delta_from="probabilities"),),
        "O = PV in the backward pass": (language_attention(bits, delta_from="recomputed"),),
        "fp32 O for δ": (language_attention(bits, delta_from="exact_out"),),
        "fp32 O": (language_attention(None),),
    }


def language(lab: Lab, names: Sequence[str]) -> dict[str, list[Traced]]:
    """Return the two-layer language model's runs by the names of `attentions`, every seed of
    each.
    """
    scale = scale_of(lab)
    known = attentions(scale.bits)
    kept = (scale.steps - 50, scale.steps)
    plans = {
        (n, s): Plan(
            known[n], s, scale.steps, 2, 2, INTERVAL, kept if n in ("everywhere", "nowhere") else ()
        )
        for n in names
        for s in scale.seeds
    }
    found = traced(lab, list(plans.values()))
    return {name: [found[plans[name, seed]] for seed in scale.seeds] for name in names}


def traced(lab: Lab, plans: Sequence[Plan]) -> dict[Plan, Traced]:
    """Return traced runs, those made that the lab has not kept yet."""
    missing = [plan for plan in dict.fromkeys(plans) if repr(plan) not in lab.kept]
    made = trace_all(missing, workers=lab.workers, progress=lab.report)
    lab.kept |= {repr(plan): run for plan, run in zip(missing, made, strict=True)}
    return {plan: lab.kept[repr(plan)] for plan in plans}


def repeat(lab: Lab, identifier: str) -> str:
    """Return the command that draws a claim's pictures again."""
    return f"halfulp claims {identifier}{' --all' if lab.full else ''}"


def excess(run: Traced, twin: Traced) -> float:
    """How far a run's loss ends above its twin's, nats, means over the last fifth."""
    mine, other = run.loss()[1], twin.loss()[1]
    last = -max(1, len(mine) // 5)
    return statistics.mean(mine[last:]) - statistics.mean(other[last:])


def sigma(run: Traced) -> float:
    """The largest σ(W_Q) of any head at the end."""
    heads: list[list[float]] = run.measures[-1]["measure"]["sigma_query"]
    return max(map(max, heads))


def failed_share(runs: Sequence[Traced], twins: Sequence[Traced]) -> float:
    """The share of runs that fail by `CRITERION`."""
    pairs = list(zip(runs, twins, strict=True))
    return sum(excess(a, b) > EXCESS and sigma(a) > GROWTH * sigma(b) for a, b in pairs) / len(
        pairs
    )


def stable_share(runs: Sequence[Traced], twins: Sequence[Traced]) -> float:
    """The share of runs that are stable by `CRITERION`."""
    pairs = list(zip(runs, twins, strict=True))
    calm = (excess(a, b) <= CALM_EXCESS and sigma(a) <= CALM_GROWTH * sigma(b) for a, b in pairs)
    return sum(calm) / len(pairs)


def _said(runs: Sequence[Traced], twins: Sequence[Traced]) -> str:
    over = [excess(a, b) for a, b in zip(runs, twins, strict=True)]
    sigmas = [sigma(run) for run in runs]
    return f"loss {_range(over, '{:+.2f}')} nats, σ(W_Q) {_range(sigmas, '{:.0f}')}"


def _range(values: Sequence[float], form: str) -> str:
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} to {high}"


def _twins(lab: Lab) -> Measured:
    """A1: PyTorch's own bf16 flash kernel against its fp32 attention, on the one-layer task."""
    runs = lab.trained(("torch:flash", "torch:fp32"))
    pictures = (twin_losses([run for same in runs.values() for run in same], repeat(lab, "A1")),)
    text = (
        f"one-layer task, true bf16: {describe(runs)}. The paper's own test is the preset gpt2,"
        " 10,000 steps of 524,288 tokens, on GPUs"
    )
    return Measured(survivors(runs), text, pictures)


def _tiling(lab: Lab) -> Measured:
    """A2: one block as long as the sequence against two tiles of keys."""
    runs = lab.trained(("stock", WHOLE))
    renamed = {"two tiles": runs["stock"], "block = N": runs[WHOLE]}
    return Measured(survivors(renamed), describe(renamed))


def _layers(lab: Lab) -> Measured:
    """A3: low precision in one of two layers, standard attention in the other."""
    names = ("nowhere", "everywhere", "only layer 0", "only layer 1")
    runs = language(lab, names)
    twins = runs["nowhere"]
    alone = [failed_share(runs[f"only layer {n}"], twins) for n in (0, 1)]
    guilty = max((0, 1), key=alone.__getitem__)
    figures = {
        "everywhere": failed_share(runs["everywhere"], twins),
        "guilty layer alone": alone[guilty],
        "stable without it": stable_share(runs[f"only layer {1 - guilty}"], twins),
    }
    said = "; ".join(f"low precision {name}: {_said(runs[name], twins)}" for name in names[1:])
    text = (
        f"two-layer byte GPT ({scale_of(lab).text}), above the twin: {said}; the guilty layer is"
        f" {guilty} (from 0)"
    )
    pictures = (layer_losses({name: runs[name][0] for name in names}, repeat(lab, "A3")),)
    return Measured(figures, text, pictures)


def _substitution(task: Sequence[str], language_names: Sequence[str]) -> Callable[[Lab], Measured]:
    """A4, A5: substitutions in the one-layer task and the language model; the recipe they are
    made in fails.
    """

    def measure(lab: Lab) -> Measured:
        layer = lab.trained(("stock", *task))
        runs = language(lab, ("nowhere", "everywhere", *language_names))
        twins = runs["nowhere"]
        figures = {
            f"task, {name}": share for name, share in survivors(layer).items() if name != "seeds"
        }
        figures["language failed"] = failed_share(runs["everywhere"], twins)
        figures |= {
            f"language, {name} stable": stable_share(runs[name], twins) for name in language_names
        }
        said = "; ".join(
            f"{name}: {_said(runs[name], twins)}" for name in ("everywhere", *language_names)
        )
        drifting = [name for name in task if any(run.outcome == "drifting" for run in layer[name])]
        figures["task drifts"] = float(len(drifting))
        walks = (
            f" ({', '.join(drifting)}: scores walk off without a failure of the loss)"
            if drifting
            else ""
        )
        text = (
            f"one-layer task in bf16: {describe(layer)}{walks}; byte GPT ({scale_of(lab).text}):"
            f" {said}"
        )
        return Measured(figures, text)

    return measure


def _heads(lab: Lab) -> Measured:
    """A6: σ(W_Q) of four heads, fp32 O for the half with the largest, and for the other half."""
    scale = scale_of(lab)
    low, high = language_attention(scale.bits), language_attention(None)
    plan = Plan((low,), 0, scale.steps, 1, 4, INTERVAL)
    twin = Plan((STANDARD,), 0, scale.steps, 1, 4, INTERVAL)
    first = traced(lab, [plan, twin])
    run, sound = first[plan], first[twin]
    sigmas = run.measured("sigma_query")[-1]
    order = sorted(range(4), key=sigmas.__getitem__, reverse=True)
    halves = {"largest": sorted(order[:2]), "others": sorted(order[2:])}
    plans = {
        name: Plan(
            (low, f"head {','.join(map(str, heads))}: {high}"), 0, scale.steps, 1, 4, INTERVAL
        )
        for name, heads in halves.items()
    }
    found = traced(lab, list(plans.values()))
    swapped = {name: found[p] for name, p in plans.items()}
    sound_sigma = max(sound.measured("sigma_query")[-1])
    spared = max(
        swapped[name].measured("sigma_query")[-1][head] for name in halves for head in halves[name]
    )
    over = {name: excess(one, sound) for name, one in swapped.items()}
    figures = {
        "outliers": max(sigmas) / sound_sigma,
        "all heads failed": failed_share([run], [sound]),
        "largest in fp32 stable": stable_share([swapped["largest"]], [sound]),
        "largest in fp32 excess": over["largest"],
        "others in fp32 excess": over["others"],
        "spared": spared / sound_sigma,
    }
    shown = ", ".join(f"{x:.0f}" for x in sigmas)
    low_heads = [
        swapped[a].measured("sigma_query")[-1][head]
        for a, b in _OTHER.items()
        for head in halves[b]
    ]
    text = (
        f"one-layer byte GPT of 4 heads ({Scale(scale.bits, scale.steps, (0,)).text}): σ(W_Q)"
        f" {shown} from head 0, in the twin at most {sound_sigma:.1f}; loss above the twin"
        f" {excess(run, sound):+.2f} nats, with fp32 O for heads {_names(halves['largest'])}"
        f" {over['largest']:+.2f}, for heads {_names(halves['others'])} {over['others']:+.2f}; in"
        f" these two runs σ(W_Q) of heads with fp32 O is at most {spared:.1f}, of the others at"
        f" least {min(low_heads):.1f}"
    )
    return Measured(figures, text, (head_sigmas(run, sound, repeat(lab, "A6")),))


_OTHER = {"largest": "others", "others": "largest"}


def _names(heads: Sequence[int]) -> str:
    return " and ".join(map(str, heads))


CLAIMS = (
    Claim(
        "A1",
        "A",
        "bf16 flash attention explodes; the same run with high-precision flash attention does not",
        "GPT-2: the loss explodes at about 6.6k to 10k steps",
        _twins,
        Rule(
            "at least 3 seeds of the one-layer task: every run fails with PyTorch's bf16 flash"
            " kernel, none in fp32",
            lambda f: (
                f["seeds"] >= 3 and f["torch:flash failed"] == 1 and f["torch:fp32 failed"] == 0
            ),
        ),
        setup="reduced",
        seconds=25.0,
    ),
    Claim(
        "A2",
        "A",
        "tiling is not the cause: a block as long as the sequence fails too",
        "fails in the same way",
        _tiling,
        Rule(
            "at least 3 seeds: every run fails with two tiles of keys and with one",
            lambda f: f["seeds"] >= 3 and f["two tiles failed"] == 1 and f["block = N failed"] == 1,
        ),
        setup="reduced",
        seconds=25.0,
    ),
    Claim(
        "A3",
        "A",
        "one layer suffices: flash only in layer 2 fails; standard attention only in layer 2 is"
        " stable",
        "layer 2 of 12",
        _layers,
        Rule(
            "every run with low precision everywhere or in the guilty layer alone fails; with"
            f" standard attention in that layer every one is stable; {CRITERION}",
            lambda f: f["everywhere"] == f["guilty layer alone"] == f["stable without it"] == 1,
        ),
        setup="altered",
        history=ONE_CRITERION,
        seconds=30.0,
    ),
    Claim(
        "A4",
        "A",
        "δ = rowsum(dP ∘ P) restores stability",
        "stable",
        _substitution(("dP∘P",), ("δ from dP∘P",)),
        Rule(
            "in the one-layer task and the byte GPT the run fails without the substitution; with it"
            f" the task neither fails nor drifts and the GPT is stable; {CRITERION}",
            lambda f: (
                min(f["task, stock failed"], f["language failed"]) == 1
                and max(f["task, dP∘P failed"], f["task drifts"]) == 0
                and f["language, δ from dP∘P stable"] == 1
            ),
        ),
        setup="altered",
        history=ONE_CRITERION,
        seconds=25.0,
    ),
    Claim(
        "A5a",
        "A",
        "O recomputed as PV in fp32 in the backward pass, for δ, restores stability",
        "stable",
        _substitution((RECOMPUTED,), (RECOMPUTED,)),
        Rule(
            "in the one-layer task and the byte GPT the run fails without the substitution; with it"
            f" the task neither fails nor drifts and the GPT is stable; {CRITERION}",
            lambda f: (
                min(f["task, stock failed"], f["language failed"]) == 1
                and max(f[f"task, {RECOMPUTED} failed"], f["task drifts"]) == 0
                and f[f"language, {RECOMPUTED} stable"] == 1
            ),
        ),
        setup="altered",
        history=ONE_CRITERION,
        seconds=40.0,
    ),
    Claim(
        "A5b",
        "A",
        "O kept in fp32 from the forward pass, for δ or altogether, restores stability",
        "stable",
        _substitution(("fp32 O for δ", "fp32 O"), ("fp32 O for δ", "fp32 O")),
        Rule(
            "in the one-layer task and the byte GPT the run fails without the substitutions; with"
            f" either the task neither fails nor drifts and the GPT is stable; {CRITERION}",
            lambda f: (
                min(f["task, stock failed"], f["language failed"]) == 1
                and max(f["task, fp32 O for δ failed"], f["task, fp32 O failed"], f["task drifts"])
                == 0
                and min(f["language, fp32 O for δ stable"], f["language, fp32 O stable"]) == 1
            ),
        ),
        setup="altered",
        history=ONE_CRITERION,
        seconds=40.0,
    ),
    Claim(
        "A6",
        "A",
        "a few heads carry the failure: their σ(W_Q) are outliers, and fp32 O for them alone"
        " restores stability",
        "fig. 3: heads 1, 7, 8, 9, 11, 12",
        _heads,
        Rule(
            f"all heads in low precision fail, their largest σ(W_Q) is over {GROWTH:g} times the"
            " twin's, and with fp32 O for the half with the largest σ(W_Q) the run is stable;"
            f" {CRITERION}",
            lambda f: (
                f["all heads failed"] == 1
                and f["outliers"] > GROWTH
                and f["largest in fp32 stable"] == 1
            ),
        ),
        setup="altered",
        history=ONE_CRITERION,
        seconds=25.0,
    ),
)
