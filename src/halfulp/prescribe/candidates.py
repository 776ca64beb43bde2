"""The remedies as data: which small change, what it touches, the line that makes it, when it
applies, and what in the evidence speaks for it.

Two groups, which the verdict keeps apart. Those of rounding change in which arithmetic something is
computed and nothing else; one that helps shows that rounding there is the cause. Those of
optimization change the training itself; one that helps shows no such thing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

from halfulp.isolate.climb import TWIN, Settings, Substitution
from halfulp.isolate.questions import short_name
from halfulp.isolate.sites import FP32, Layout, attention_of, only_sites
from halfulp.isolate.substitutions import EXACT, Cells, plan_of, suspects
from halfulp.prescribe.symptoms import ROUNDING, Symptoms
from halfulp.training.config import Language
from halfulp.training.operations import OUTSIDE, OWN, Assigned, OperationPlan
from halfulp.training.optimizer_arithmetic import OPTIMIZER
from halfulp.training.score_clip import MOST

Group: TypeAlias = Literal["rounding", "optimization"]
Touches: TypeAlias = Literal["a hyperparameter", "an operation", "the model"]
TOUCHES: tuple[Touches, ...] = ("a hyperparameter", "an operation", "the model")
"""What a remedy touches, the least first."""
QUESTION = "remedy"
AGAIN = "again"
"""The run as it is once more, its weights moved by an ulp: how far chaos alone takes it."""
RATE_KINDS = ("rate_too_high", "exploding_layer", "scores_run_away", "unexplained")


@dataclass(frozen=True)
class Remedy:
    """One small change."""

    substitution: Substitution
    group: Group
    touches: Touches
    line: str  # that makes it, in the user's loop; of halfulp's own models the option
    option: str  # of `halfulp train`
    speaks: str = ""  # what in the evidence speaks for it

    @property
    def name(self) -> str:
        """As `only` takes it, and of a folder."""
        return self.substitution.name

    @property
    def change(self) -> str:
        """In words."""
        return self.substitution.change

    def as_dict(self) -> dict[str, str]:
        """Return the JSON form."""
        plain = {"name": self.name, "group": self.group, "change": self.change}
        plain |= {"touches": self.touches, "line": self.line, "option": self.option}
        return plain | {"speaks": self.speaks}


@dataclass(frozen=True)
class Untried:
    """What was not tried, and why."""

    name: str
    why: str


@dataclass(frozen=True)
class Facts:
    """What the optimizer of the run is like."""

    beta2: float | None  # None: it has none
    eps: float | None
    usual_norm: float | None  # of the gradient, in the run as it is, at its beginning
    clip: float | None
    steps: int  # that are made


@dataclass(frozen=True)
class Case:
    """What remedies are made for."""

    settings: Settings
    cells: Cells
    symptoms: Symptoms
    facts: Facts

    @property
    def layout(self) -> Layout | None:
        """Of a user's model."""
        return self.settings.layout


def twin(case: Case) -> Remedy | Untried:
    """Everything in fp32 that can be: the one that tells whether rounding is the cause at all."""
    layout, config = case.layout, case.settings.config
    said = "everything in fp32" if layout else "attention in fp32"
    if layout is None:
        if not suspects(case.cells):
            return Untried(said, "it is in fp32 already")
        return _remedy(case, TWIN, said, dict.fromkeys(case.cells, EXACT))
    if not layout.sites:
        return Untried(said, "every operation that is seen is in fp32 or more already")
    own, plan = dict.fromkeys(case.cells, OWN), only_sites(config, ())
    return _remedy(case, TWIN, said, own, plan, touches="the model")


def candidates(case: Case) -> list[Remedy | Untried]:
    """The other remedies, what the evidence speaks for first, and those that do not apply."""
    if case.layout is None:
        rounding = [*_own_attention(case)]
    else:
        rounding = [*_attention(case, case.layout), *_places(case, case.layout)]
        rounding += _kinds(case, case.layout)
    found = [*rounding, *_formats(case), *_scores(case), *_hyperparameters(case)]
    return sorted(found, key=lambda one: not (isinstance(one, Remedy) and one.speaks))


def in_modules(case: Case, paths: Sequence[str], speaks: str) -> Remedy:
    """Some modules of a user's model in fp32."""
    assert case.layout is not None
    named = tuple(path or OUTSIDE for path in paths)
    plan = case.settings.config.operations.with_(
        Assigned(FP32, (), tuple(f"={path}" for path in named))
    )
    cells = attention_of(case.cells, case.layout, set(case.layout.paths) - set(paths))
    name = short_name("fp32-" + "_".join(named))
    classes = [case.layout.classes.get(path, "") for path in paths]
    texts = [f"{p} ({c})" if c else p for p, c in zip(named, classes, strict=True)]
    said = f"{', '.join(texts[:3])}{f' and {len(texts) - 3} more' * (len(texts) > 3)} in fp32"
    return _remedy(case, name, said, cells, plan, speaks=speaks)


def _remedy(
    case: Case,
    name: str,
    said: str,
    cells: Cells | None = None,
    operations: OperationPlan | None = None,
    settings: tuple[str, ...] = (),
    *,
    group: Group = "rounding",
    touches: Touches = "an operation",
    line: str = "",
    speaks: str = "",
) -> Remedy:
    """Another attention, arithmetic or setting, with the option that makes it; and in a user's loop
    a line, the usual one of its kind unless another is given.
    """
    cells = case.cells if cells is None else cells
    if settings:
        option = usual = " ".join(f"--set {one}" for one in settings)
    elif operations is not None:
        option, usual = f'--set operations="{operations}"', _planned(case, operations)
    else:
        option = " ".join(_attention_options(cells))
        usual = f'with halfulp.planned(model, attention="{plan_of(cells)}"):'
    line = option if case.layout is None else line or usual
    change = Substitution(name, QUESTION, said, cells, operations, settings)
    return Remedy(change, group, touches, line, option, speaks)


def _planned(case: Case, plan: OperationPlan) -> str:
    """The line that makes another arithmetic in a user's model."""
    steps = () if case.layout is None else case.layout.steps
    also = any(plan.choice(path, OPTIMIZER) != OWN for path, _ in steps)
    return f'with halfulp.planned(model, "{plan}"{", optimizer=optimizer" * also}):'


def _attention(case: Case, layout: Layout) -> Iterator[Remedy | Untried]:
    """halfulp's attention and fp32's, everywhere and where it leans, in a user's model."""
    said, places = "halfulp's attention", [path for path, _ in layout.attention]
    called = [i for i, path in enumerate(places) if path not in layout.by_hand]
    speaks = case.symptoms.spoken_for(ROUNDING)
    leaning = [i for i, path in enumerate(places) if _plain(path) in _paths(case.symptoms)]
    if not called:
        yield Untried(said, "no call of PyTorch's scaled_dot_product_attention is seen")
    else:
        cells = {p: "halfulp" if p[0] in called else c for p, c in case.cells.items()}
        yield _remedy(case, "halfulp", said, cells, line="with halfulp.patch():", speaks=speaks)
    some = [i for i in leaning if i in called]
    if some and len(some) < len(places):
        yield _heads(case, "halfulp", said, some, speaks)
        yield _fp32_kind(case, "attention", tuple(places[i] for i in some), speaks)
    if layout.by_hand:
        yield _heads(case, EXACT, "attention in fp32", range(len(places)), speaks)
    elif any(kind == "attention" for _, kind in layout.sites):
        yield _fp32_kind(case, "attention", (), speaks)


def _heads(case: Case, choice: str, said: str, layers: Iterable[int], speaks: str) -> Remedy:
    """Some layers of a user's model with another attention."""
    assert case.layout is not None
    chosen = set(layers)
    cells = {p: choice if p[0] in chosen else c for p, c in case.cells.items()}
    where = ", ".join(case.layout.attention[i][0] for i in sorted(chosen))
    everywhere = len(chosen) == len(case.layout.attention)
    text = said if everywhere else f"{said} in {where}"
    name = short_name("-".join([choice.replace(":", "-"), *map(str, sorted(chosen))]))
    return _remedy(case, name, text, cells, speaks=speaks)


def _attention_options(cells: Cells) -> list[str]:
    """A plan of attention as options of `halfulp train`."""
    parts = str(plan_of(cells)).split("; ")
    return [f'--attention "{part}"' if " " in part else f"--attention {part}" for part in parts]


def _plain(path: str) -> str:
    """A module's path as `halfulp.watch` has it, which numbers several calls of one module."""
    return path.partition(" (")[0]


def _paths(symptoms: Symptoms) -> set[str]:
    return {_plain(path) for path in symptoms.layers}


def _fp32_kind(case: Case, kind: str, paths: tuple[str, ...], speaks: str) -> Remedy:
    """One kind of operation in fp32, everywhere or in some modules."""
    where = f" in {', '.join(paths)}" if paths else ""
    said = f"{kind}{where} in fp32"
    plan = case.settings.config.operations.with_(
        Assigned(FP32, (kind,), tuple(f"={path}" for path in paths))
    )
    name = short_name("-".join(("fp32", kind, *paths)))
    cells = case.cells
    if kind == "attention" and case.layout is not None:
        kept = [path for path, _ in case.layout.attention if paths and path not in paths]
        cells = attention_of(cells, case.layout, kept)
    return _remedy(case, name, said, cells, plan, speaks=speaks)


def _kinds(case: Case, layout: Layout) -> Iterator[Remedy | Untried]:
    """One kind of operation in fp32 wherever it is."""
    found = dict.fromkeys(kind for _, kind in layout.sites)
    sited = {site.partition(" in ")[0] for site in case.symptoms.sites}
    for kind in (kind for kind in found if kind != "attention"):
        said = "halfulp isolate names such an operation" if kind in sited else ""
        if len(found) == 1:
            yield Untried(f"{kind} in fp32", "it is all that is rounded: the same as everything")
        else:
            yield _fp32_kind(case, kind, (), said)


def _places(case: Case, layout: Layout) -> Iterator[Remedy | Untried]:
    """One module in fp32, of those that evidence names."""
    known = layout.paths
    named = [site.partition(" in ")[2] for site in case.symptoms.sites]
    paths = [path for path in dict.fromkeys(named) if path in known]
    if paths:
        yield in_modules(case, paths, "halfulp isolate names it")
    for module in case.symptoms.modules:
        inside = [p for p in known if p == module or p.startswith(f"{module}.")]
        if inside and inside != paths and len(inside) < len(known):
            yield in_modules(case, inside, "numbers were first not finite there")


def _own_attention(case: Case) -> Iterator[Remedy | Untried]:
    """halfulp's attention in halfulp's own models, everywhere and in the guilty layers."""
    speaks = case.symptoms.spoken_for(ROUNDING)
    everywhere = dict.fromkeys(case.cells, "halfulp")
    yield _remedy(case, "halfulp", "halfulp's attention", everywhere, speaks=speaks)
    of_isolation = {layer for layer, _ in case.symptoms.places}
    leaning = of_isolation or {int(x) for x in case.symptoms.layers if x.isdigit()}
    if leaning and len(leaning) < len({layer for layer, _ in case.cells}):
        said = "layer " + ",".join(map(str, sorted(leaning)))
        speaks = "halfulp isolate names them" if of_isolation else speaks
        for choice, what in (("halfulp", "halfulp's attention"), (EXACT, "attention in fp32")):
            cells = {p: choice if p[0] in leaning else c for p, c in case.cells.items()}
            name = f"{choice.replace(':', '-')}-{said.replace(' ', '-').replace(',', '.')}"
            yield _remedy(case, name, f"{what} in {said}", cells, speaks=speaks)


def _formats(case: Case) -> Iterator[Remedy | Untried]:
    """Another autocast; and why no other loss scale."""
    config = case.settings.config
    if config.autocast == "none":
        return
    if config.autocast == "fp16":
        speaks = case.symptoms.spoken_for(("fp16_overflow", "not_finite"))
        line = f'with torch.autocast("{config.device}", torch.bfloat16):'
        said, settings = "autocast in bf16, without a loss scale", ("autocast=bf16",)
        yield _remedy(
            case, "bf16", said, settings=settings, touches="the model", line=line, speaks=speaks
        )
        yield Untried(
            "another loss scale",
            "a GradScaler halves it at every overflow by itself, and it does nothing for what"
            " overflows in the forward pass",
        )
    if case.layout is None:
        settings = ("autocast=none",)
        yield _remedy(case, "no-autocast", "no autocast", settings=settings, touches="the model")


def _scores(case: Case) -> Iterator[Remedy | Untried]:
    """QK-norm and QK-clip."""
    speaks = case.symptoms.spoken_for(("scores_run_away", *ROUNDING))
    config, workload = case.settings.config, case.settings.config.workload
    norm = partial(
        _remedy, case, "qk-norm", "QK-norm", group="optimization", touches="the model",
        speaks=speaks,
    )  # fmt: skip
    if case.layout is not None and case.layout.attention:
        plan = config.operations.with_(Assigned("qk-norm", ("attention",)))
        yield norm(dict.fromkeys(case.cells, OWN), plan)
    elif isinstance(workload, Language) and not case.settings.start:
        if workload.query_key_norm:
            yield Untried("QK-norm", "the run has it")
        else:
            yield norm(settings=("workload.query_key_norm=true",))
    elif isinstance(workload, Language):
        yield Untried("QK-norm", "its weights are not in the checkpoint")
    else:
        yield Untried("QK-norm", "no place for it is seen in this model")
    yield _clip_of_scores(case, speaks)


def _clip_of_scores(case: Case, speaks: str) -> Remedy | Untried:
    """QK-clip."""
    layout, workload = case.layout, case.settings.config.workload
    why = "" if layout is None else layout.unclipped
    if isinstance(workload, Language) and workload.query_key_norm:
        why = "queries and keys are normalized, whatever W_Q and W_K are"
    if why:
        return Untried("QK-clip", why)
    line = f"with halfulp.planned(model, optimizer=optimizer, most_score={MOST:g}):"
    return _remedy(
        case, "qk-clip", f"QK-clip at {MOST:g}", settings=(f"adjusted.most_score={MOST:g}",),
        group="optimization", touches="the model", line=line, speaks=speaks,
    )  # fmt: skip


def _hyperparameters(case: Case) -> Iterator[Remedy | Untried]:
    """The optimizer's numbers."""
    facts, start, warm = case.facts, case.settings.start, max(1, case.facts.steps // 4)
    speaks = case.symptoms.spoken_for(RATE_KINDS)
    yield _adjusted(case, "rate-half", "half the learning rate", speaks, rate=0.5)
    yield _adjusted(case, "rate-tenth", "a tenth of the learning rate", speaks, rate=0.1)
    said = f"a warm-up of {warm} steps{' from here' if start else ''}"
    speaks = case.symptoms.spoken_for(("rate_too_high",))
    yield _adjusted(case, "warm-up", said, speaks, warm_up=warm)
    less = next((x for x in (0.95, 0.9) if facts.beta2 is not None and facts.beta2 > x), None)
    if less is None:
        has = "the optimizer has none" if facts.beta2 is None else f"it is {facts.beta2:g} already"
        yield Untried("a smaller β₂", has)
    else:
        said = f"β₂ {less:g} instead of {facts.beta2:g}"
        yield _adjusted(case, "beta2", said, speaks, beta2=less)
    if facts.eps is None:
        yield Untried("a larger ε", "the optimizer has none")
    else:
        more = float(f"{1000 * facts.eps:.2g}")
        yield _adjusted(case, "eps", f"ε {more:g} instead of {facts.eps:g}", "", eps=more)
    norm = None if facts.usual_norm is None else float(f"{facts.usual_norm:.2g}")
    if not norm:
        yield Untried("gradient clipping", "the run has no usual gradient norm to clip at")
    elif facts.clip is not None and facts.clip <= norm:
        yield Untried("gradient clipping", f"the run clips at {facts.clip:g} already")
    else:
        line = f"torch.nn.utils.clip_grad_norm_(model.parameters(), {norm:g})"
        speaks = case.symptoms.spoken_for(("bad_batch", "not_finite", "exploding_layer"))
        said = f"gradients clipped at {norm:g}"
        yield _hyperparameter(case, "clip", said, (f"optimizer.clip={norm:g}",), line, speaks)


def _adjusted(case: Case, name: str, said: str, speaks: str, **numbers: float) -> Remedy:
    """A number of the optimizer, from here on."""
    settings = [f"adjusted.{field}={value!r}" for field, value in numbers.items()]
    if "warm_up" in numbers and case.settings.start:
        settings.append(f"adjusted.since={case.settings.start}")
    given = ", ".join(f"{field}={value!r}" for field, value in numbers.items())
    line = f"halfulp.adjust(optimizer, {given})"
    return _hyperparameter(case, name, said, tuple(settings), line, speaks)


def _hyperparameter(
    case: Case, name: str, said: str, settings: tuple[str, ...], line: str, speaks: str
) -> Remedy:
    return _remedy(
        case, name, said, settings=settings, group="optimization", touches="a hyperparameter",
        line=line, speaks=speaks,
    )  # fmt: skip


def alone(case: Case, paths: Sequence[str]) -> Substitution:
    """The run with everything in fp32 but some modules."""
    assert case.layout is not None
    kept = [site for site in case.layout.sites if site[0] in set(paths)]
    name = short_name("only-" + "_".join(path or "outside" for path in paths))
    cells = attention_of(case.cells, case.layout, paths)
    plan: OperationPlan = only_sites(case.settings.config, kept)
    return Substitution(name, "which modules", f"as it is: {len(paths)} modules alone", cells, plan)
