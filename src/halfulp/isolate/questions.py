"""The questions of an isolation, each answered by runs: attention, emulation, tiling, layers,
operations, heads, bits.

Searches go on one seed, the first on which the run fails; what they find is then tried on every
seed on which it does. A run that drifts counts as not saved: it may only take longer to fail.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from halfulp.isolate.climb import ORIGINAL, TWIN, BudgetSpentError, Ladder, Rung, Substitution
from halfulp.isolate.result import Bits
from halfulp.isolate.rung import RungRun
from halfulp.isolate.search import Guilty, guilty_sets, least_surviving, rescuing_set
from halfulp.isolate.substitutions import (
    EXACT,
    OPERATIONS,
    Cells,
    Operation,
    Place,
    bits_of,
    changed,
    halfulp_like,
    in_cells,
    is_recipe,
    only,
    places_text,
    suspects,
    whole_blocks,
    with_bits,
)
from halfulp.recipes import Recipe, recipe_named
from halfulp.targets import emulations
from halfulp.training.config import Language, LayerTask

Item = TypeVar("Item", bound=Hashable)
HALFULP, TILING = "halfulp", "block-N"
_FULL = 23  # mantissa bits of fp32


class Investigation:
    """What is known so far; every question reads what those before it found."""

    def __init__(self, ladder: Ladder) -> None:
        self.ladder, self.cells = ladder, ladder.cells
        self.heads_a_layer = 1 + max((head for _, head in self.cells), default=0)
        # seeds on which the original does not survive and its twin does
        self.failing: list[int] = []
        self.main: int | None = None  # the seed of the searches
        self.base: Cells | None = None  # recipes in the place of kernels
        self.base_rung = ORIGINAL
        self.layer_sets: tuple[frozenset[int], ...] = ()
        self.place_sets: tuple[frozenset[Place], ...] = ()
        self.confirmed: list[str] = []  # rungs of places that must fail …
        self.cleared: list[str] = []  # … and that must survive, if the places are right
        self.rescues: list[frozenset[Operation]] = []
        self.varied: list[Bits] = []
        self.notes: list[str] = []
        self.not_tested: list[tuple[str, str]] = []

    @property
    def not_the_cause(self) -> str:
        """What it says that the run fails with all of it in fp32, too."""
        return "Attention is not the cause: with fp32 attention"

    def begin(self, what: str, share: float) -> None:
        """The next question, and how much of the progress will be done after it."""
        self.ladder.share = (self.ladder.share[1] if self.ladder.rungs else 0.0, share)
        self.ladder.progress(self.ladder.share[0], what)

    def budget_text(self) -> str:
        """Why something was not tested."""
        s = self.ladder.settings
        timed = s.budget_seconds is not None and self.ladder.seconds >= s.budget_seconds
        if timed or s.budget_steps is None:
            return f"the budget of {s.budget_seconds or 0:g} seconds was spent"
        return f"the budget of {s.budget_steps} steps of training was spent"

    def lacking(self, question: str, found_without: str) -> None:
        """Say why a question could not be asked: the budget ended before the one it builds on, or
        that one found nothing.
        """
        spent = [why for _, why in self.not_tested if why.startswith("the budget of")]
        self.not_tested.append((question, spent[-1] if spent else found_without))

    def attention(self) -> None:
        """Is it attention at all: everything in fp32."""
        s = self.ladder.settings
        exact = dict.fromkeys(self.cells, EXACT)
        twin = Substitution(TWIN, "(a) attention", "fp32 attention everywhere", exact)
        original = Substitution(ORIGINAL, "the run", f"nothing: {s.config.attention}", self.cells)
        self._judge(twin, original, "fp32 attention")

    def _judge(self, twin: Substitution, original: Substitution, what: str) -> None:
        """Run the original and its twin; note on which seeds only the original fails."""
        s = self.ladder.settings
        self.ladder.add(original)  # it stands first in the table
        (saved,) = self.ladder.climb([twin], s.seeds)
        (failed,) = self.ladder.climb([original], s.seeds)
        bad = [seed for seed in s.seeds if not failed.runs[seed].survived]
        # a twin has none to be held against: that its scores wander says nothing
        self.failing = [seed for seed in bad if saved.runs[seed].outcome != "failed"]
        lost = [seed for seed in bad if seed not in self.failing]
        if lost and self.failing:
            self.notes.append(f"Seeds {list_text(lost)}: {what} fails too; they were left out.")
        if bad and len(bad) < len(s.seeds):
            sound = [seed for seed in s.seeds if seed not in bad]
            self.notes.append(
                f"Seeds {list_text(sound)}: the run itself survives; they were left out."
            )
        if self.failing:
            # one that fails is clearer to search on than one that only drifts
            self.main = next(
                (seed for seed in self.failing if failed.runs[seed].outcome == "failed"),
                self.failing[0],
            )

    def emulation(self) -> None:
        """Does a recipe fail as the kernel does: only in a recipe can operations be replaced."""
        choices = dict.fromkeys(self.cells[place] for place in suspects(self.cells))
        kernels = [choice for choice in choices if not is_recipe(choice)]
        if not kernels:
            self.base = self.cells
            return
        device = self.ladder.settings.config.device
        options = {kernel: emulations(kernel, device) for kernel in kernels}
        tried: list[tuple[Substitution, bool]] = []
        for i in range(max(map(len, options.values()))):
            chosen = {kernel: names[min(i, len(names) - 1)] for kernel, names in options.items()}
            names = ", ".join(f"{recipe} for {kernel}" for kernel, recipe in chosen.items())
            cells = {place: chosen.get(choice, choice) for place, choice in self.cells.items()}
            stiff = any(recipe_named(recipe).algorithm == "torch_cpu" for recipe in chosen.values())
            tried.append((Substitution(f"emulation-{i + 1}", "emulation", names, cells), stiff))
        runs = self._screen([one for one, _ in tried])
        # of those that fail alike, one in which every operation can be replaced
        alike = [i for i, run in enumerate(runs) if not run.survived]
        for i in sorted(alike, key=lambda i: tried[i][1])[:1]:
            self.base, self.base_rung = tried[i][0].cells, tried[i][0].name
            self._say_emulation(tried[i][0], runs[i])
        if not alike:
            self.notes.append(
                f"No recipe that emulates {', '.join(kernels)} fails alike, so no operation in it"
                " could be replaced."
            )

    def tiling(self) -> None:
        """Is it the tiling: one tile for everything."""
        if self.base is None:
            self.lacking("(b) tiling", "no emulation fails alike")
            return
        tokens = self._tokens()
        cells = in_cells(self.base, partial(_untiled, tokens=tokens))
        if cells is None:
            many = f"all {tokens} tokens" if tokens else "all tokens"
            self.notes.append(f"Tiling is not the cause: one tile holds {many}.")
            return
        whole = Substitution(TILING, "(b) tiling", "block = N", cells)
        if self._screen([whole])[0].survived:
            self.ladder.climb([whole], self.failing)

    def layers(self) -> None:
        """Which layers: the kernel in some of them alone, fp32 in the others; halves first."""
        members = sorted({layer for layer, _ in suspects(self.cells)})
        found = self._guilty(members, self._only_layers)
        self.layer_sets = found.sets
        self._say_spread(found, "layer")
        inside = frozenset(p for p in suspects(self.cells) if p[0] in found.all)
        self._confirm(self._only_layers(found.all), inside, "(c) layers")

    def operations(self) -> None:
        """Which operation: each replaced alone, then sets of them; and halfulp's recipe."""
        if self.base is None:
            self.lacking("(d) operations", "no emulation fails alike")
            return
        options = [one for one in OPERATIONS if self._with_replaced([one]) is not None]
        try:
            # on the seed of the searches alone; `_keep` tries what saves it there on the others
            runs = self._scores([frozenset({one}) for one in options])
        except BudgetSpentError:  # what is known is kept
            known = {one: self._alone(one) for one in options}
            self.rescues += [frozenset({one}) for one, run in known.items() if run and run.survived]
            raise
        saving = [
            one for one, run in zip(options, runs, strict=True) if run is not None and run.survived
        ]
        self._keep([frozenset({one}) for one in saving])
        fixed = in_cells(self.base, halfulp_like)
        if fixed is not None:
            names = Substitution(HALFULP, "fix", "halfulp's recipe, BF16_HALFULP", fixed)
            self.ladder.climb([names], self.failing)
        repairs = [one for one in options if one.repair]
        if not saving:
            self._search(options)
        # what saves the run may cost a kernel too much: then also a set that one can afford
        if not any(one.repair for one in saving):
            self._search(repairs)

    def heads(self) -> None:
        """Which heads of the guilty layers: the kernel in some of them alone; halves first."""
        every = {layer for layer, _ in suspects(self.cells)}
        layers = frozenset[int]().union(*self.layer_sets or (every,))
        members = sorted(place for place in suspects(self.cells) if place[0] in layers)
        found = self._guilty(members, self._only_places)
        self.place_sets = found.sets
        if len(members) > 1:  # one alone is the layer that was found
            self._say_spread(found, "head")
            self._confirm(self._only_places(found.all), found.all, "(e) heads")

    def bits(self) -> None:
        """How many mantissa bits the guilty tensor needs: bisection upwards, two steps down."""
        step = next(
            (one.tensor for chosen in self.rescues for one in _ordered(chosen) if one.tensor), None
        )
        if self.base is None or step is None:
            self.lacking("(f) bits", "no operation was found whose bits could be varied")
            return
        own = bits_of(self.base, step)
        if own is None:
            self.not_tested.append(("(f) bits", f"{step} is not rounded in the failing recipe"))
            return
        self.varied.append(Bits(step, own, self.base_rung))

        def survives(numbers: Sequence[int]) -> list[bool]:
            self.varied += [Bits(step, n, f"{step}-m{n}") for n in numbers]
            return [
                run.survived for run in self._screen([self._with_bits(step, n) for n in numbers])
            ]

        enough = least_surviving(own + 1, _FULL, survives)
        said = (
            f"{enough} suffice"
            if enough
            else "no number of them suffices while all else stays as it is"
        )
        self.notes.append(
            f"Mantissa bits of {step}: {own} are too few, {said}; more bits were taken never to"
            " hurt."
        )
        survives([n for n in (own - 1, own - 2) if n >= 0])

    def rescue_rung(self, operations: Iterable[Operation]) -> Rung:
        """The rung of a set of operations."""
        return self.ladder.rungs[_set_name(operations)]

    def _screen(self, substitutions: Sequence[Substitution]) -> list[RungRun]:
        """Run on the seed of the searches."""
        assert self.main is not None
        return [rung.runs[self.main] for rung in self.ladder.climb(substitutions, [self.main])]

    def _guilty(
        self, members: Sequence[Item], only: Callable[[Iterable[Item]], Substitution]
    ) -> Guilty[Item]:
        """Which members carry the failure: as they are in some alone, fp32 in the others."""
        if len(members) < 2:
            return Guilty((frozenset(members),))

        def ask(sets: Sequence[frozenset[Item]]) -> list[bool]:
            return [not run.survived for run in self._screen([only(one) for one in sets])]

        return guilty_sets(members, ask)

    def _say_emulation(self, chosen: Substitution, run: RungRun) -> None:
        assert self.main is not None
        kernel = self.ladder.rungs[ORIGINAL].runs[self.main]
        self.notes.append(
            f"Operations were replaced inside {chosen.change}, which fails alike: seed {self.main}"
            f" at step {run.failed_at or '–'}, the kernel itself at step {kernel.failed_at or '–'}."
        )

    def _tokens(self) -> int | None:
        match self.ladder.settings.config.workload:
            case LayerTask(tokens=tokens):
                return tokens
            case Language(context=tokens):
                return tokens
            case _:
                return None

    def _only_layers(self, layers: Iterable[int]) -> Substitution:
        chosen = sorted(layers)
        kept = [place for place in suspects(self.cells) if place[0] in chosen]
        name = short_name("only-layer-" + ".".join(map(str, chosen)))
        whole = [(layer, head) for layer in chosen for head in range(self.heads_a_layer)]
        text = f"low precision in {places_text(whole, self.heads_a_layer)} alone"
        return Substitution(name, "(c) layers", text, only(self.cells, kept))

    def _only_places(self, chosen: Iterable[Place]) -> Substitution:
        kept = sorted(chosen)
        name = short_name("only-head-" + "_".join(f"{layer}.{head}" for layer, head in kept))
        text = f"low precision in {places_text(kept, self.heads_a_layer)} alone"
        return Substitution(name, "(e) heads", text, only(self.cells, kept))

    def _confirm(self, alone: Substitution, inside: frozenset[Place], question: str) -> None:
        """Try what was found on all seeds: low precision there alone, and everywhere but there."""
        if inside == suspects(self.cells):
            return  # the run itself and its twin
        where = places_text(inside, self.heads_a_layer)
        rest = only(self.cells, suspects(self.cells) - inside)
        without = Substitution(f"not-{alone.name}", question, f"fp32 in {where} alone", rest)
        self.ladder.climb([alone, without], self.failing)
        self.confirmed.append(alone.name)
        self.cleared.append(without.name)

    def _say_spread(self, found: Guilty[Any], word: str) -> None:
        if any(len(one) > 1 for one in found.sets):
            self.notes.append(
                f"No single {word} carries the failure alone in: {_sets_text(found)}."
            )
        if len(found.sets) > 1:
            self.notes.append(
                f"Each of these {word}s or sets of {word}s fails alone: {_sets_text(found)}."
            )

    def _with_replaced(self, operations: Iterable[Operation]) -> Substitution | None:
        """The run with operations replaced; None where they do not go together."""
        assert self.base is not None
        chosen = _ordered(operations)
        kinds = [one.kind for one in chosen if one.kind]
        if len(set(kinds)) < len(kinds):
            return None
        cells = in_cells(self.base, lambda recipe: changed(recipe, chosen))
        if cells is None:
            return None
        change = "; ".join(one.change for one in chosen)
        return Substitution(_set_name(chosen), "(d) operations", change, cells)

    def _scores(self, sets: Sequence[frozenset[Operation]]) -> list[RungRun | None]:
        """How far the run gets with sets of operations replaced; None: not together."""
        asked = [self._with_replaced(chosen) for chosen in sets]
        runs = iter(self._screen([one for one in asked if one is not None]))
        return [None if one is None else next(runs) for one in asked]

    def tried_alone(self) -> list[Operation]:
        """The operations whose replacement alone was run on the seed of the searches."""
        return [one for one in OPERATIONS if self._alone(one) is not None]

    def _alone(self, operation: Operation) -> RungRun | None:
        """The run with it alone replaced, on the seed of the searches; None where there is none."""
        rung = self.ladder.rungs.get(_set_name([operation]))
        return None if rung is None or self.main is None else rung.runs.get(self.main)

    def _search(self, options: Sequence[Operation]) -> None:
        found = rescuing_set(options, self._scores)
        if found is not None and found not in self.rescues:
            self._keep([found])

    def _keep(self, sets: Sequence[frozenset[Operation]]) -> None:
        """Try sets that saved the run on the seed of the searches on the other seeds."""
        self.rescues += sets
        for chosen in sets:
            replaced = self._with_replaced(chosen)
            assert replaced is not None
            self.ladder.climb([replaced], self.failing)

    def _with_bits(self, step: str, bits: int) -> Substitution:
        assert self.base is not None
        cells = in_cells(self.base, lambda recipe: with_bits(recipe, step, bits))
        assert cells is not None
        return Substitution(
            f"{step}-m{bits}", "(f) bits", f"{step} with {bits} mantissa bits", cells
        )


def _untiled(recipe: Recipe, tokens: int | None) -> Recipe | None:
    """One tile, where there are several now."""
    blocks = [block for block in (recipe.block_query, recipe.block_key) if block is not None]
    if tokens is not None and all(block >= tokens for block in blocks):
        return None
    return whole_blocks(recipe)


def _ordered(operations: Iterable[Operation]) -> list[Operation]:
    chosen = set(operations)
    return [one for one in OPERATIONS if one in chosen]


def _set_name(operations: Iterable[Operation]) -> str:
    return short_name("+".join(one.name for one in _ordered(operations)))


def short_name(name: str) -> str:
    """A name that a file system takes."""
    if len(name) <= 100:
        return name
    return f"{name[:80]}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"


def _sets_text(found: Guilty[Any]) -> str:
    def one(item: int | Place) -> str:
        return f"layer {item[0]} head {item[1]}" if isinstance(item, tuple) else str(item)

    return "; ".join(" with ".join(one(item) for item in sorted(chosen)) for chosen in found.sets)


def list_text(numbers: Sequence[int]) -> str:
    """Return "1, 2, 3"."""
    return ", ".join(map(str, numbers))
