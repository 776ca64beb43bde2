"""The questions of an isolation in a user's model: everything in fp32, then which modules, which
kinds of operation in them, which heads, and what inside a recipe where one runs there.

Halving goes by module path, in the order in which modules are called, so that the first halves are
the first and the last layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from halfulp.isolate.climb import ORIGINAL, TWIN, Ladder, Substitution
from halfulp.isolate.questions import Investigation, short_name
from halfulp.isolate.sites import (
    FP32,
    OPTIMIZER_STEP,
    Layout,
    Site,
    attention_of,
    only_sites,
    without_sites,
)
from halfulp.isolate.substitutions import EXACT, Place, is_recipe, place_text, places_text, suspects
from halfulp.training.operations import OWN, Assigned, OperationPlan
from halfulp.training.optimizer_arithmetic import OPTIMIZER

STEP, MODULES, KINDS, HEADS = "(b) optimizer", "(c) modules", "(d) operations", "(e) heads"


class UserInvestigation(Investigation):
    """What is known so far of a user's model."""

    def __init__(self, ladder: Ladder) -> None:
        super().__init__(ladder)
        assert ladder.settings.layout is not None
        self.layout: Layout = ladder.settings.layout
        self.sites: tuple[Site, ...] = self.layout.sites  # that carry the failure
        self.told_apart = False  # whether they are fewer than all

    @property
    def not_the_cause(self) -> str:
        """What it says that the run fails with all of it in fp32, too."""
        unseen = " (see the notes)" if self.layout.unseen else ""
        return (
            f"Rounding in the operations that are seen{unseen} is not the cause: with everything in"
            " fp32"
        )

    def everything(self) -> None:
        """Is it rounding in anything that is seen: everything in fp32."""
        s = self.ladder.settings
        own = dict.fromkeys(self.cells, OWN)
        twin = Substitution(
            TWIN, "(a) arithmetic", "fp32 everywhere", own, only_sites(s.config, ())
        )
        said = "; ".join(filter(None, (str(s.config.attention), str(s.config.operations))))
        original = Substitution(ORIGINAL, "the run", f"nothing: {said}", self.cells)
        self.ladder.add(original)
        self._judge(twin, original, "fp32 everywhere")
        for path, why in self.layout.unseen.items():
            self.notes.append(f"Not seen, so never changed: {path}, {why}.")

    def step(self) -> None:
        """Is it the optimizer's step, which no module computes, or what the model computes."""
        steps = self.layout.steps
        rest = tuple(site for site in self.layout.sites if site not in steps)
        if not steps or not rest:
            return
        parts = {"optimizer": steps, "model": rest}

        def only(chosen: Iterable[str]) -> Substitution:
            kept = [site for name in parts if name in set(chosen) for site in parts[name]]
            return self._only(kept, "only-" + ".".join(sorted(chosen)), STEP)

        found = self._guilty(tuple(parts), only)
        if len(found.all) == 1:
            (name,) = found.all
            self.sites = parts[name]
            self._confirm_sites(only(found.all))
        elif len(found.sets) == 1:
            self.notes.append(
                "Neither the optimizer's step nor what the model computes fails alone."
            )
        else:
            self.notes.append("The optimizer's step and what the model computes each fail alone.")

    def modules(self) -> None:
        """Which modules: as they are in some of them alone, fp32 in the others; halves first."""
        paths = tuple(dict.fromkeys(path for path, _ in self.sites))
        if self.sites == self.layout.steps and not self._in_a_half(paths):
            self.notes.append(f"No half of the modules carries the failure of {OPTIMIZER_STEP}.")
            return
        found = self._guilty(paths, self._only_paths)
        self._say_spread(found, "module")
        among = self.sites
        alone = self._only_paths(found.all)
        self.sites = tuple(site for site in among if site[0] in found.all)
        if len(self.sites) < len(among):
            self._confirm_sites(alone)

    def _in_a_half(self, paths: Sequence[str]) -> bool:
        """Whether the first or the second half of some modules fails alone: small updates are lost
        everywhere, and a search for where would ask about every module.
        """
        middle = len(paths) // 2
        halves = [half for half in (paths[:middle], paths[middle:]) if half]
        runs = self._screen([self._only_paths(half) for half in halves])
        return not all(run.survived for run in runs)

    def kinds(self) -> None:
        """Which kinds of operation in those modules."""
        kinds = tuple(dict.fromkeys(kind for _, kind in self.sites))
        inside = self.sites

        def only(chosen: Iterable[str]) -> Substitution:
            kept = [site for site in inside if site[1] in set(chosen)]
            name = "only-kind-" + ".".join(sorted(chosen))
            return self._only(kept, name, KINDS)

        found = self._guilty(kinds, only)
        self._say_spread(found, "kind of operation")
        if len(found.all) < len(kinds):
            self.sites = tuple(site for site in inside if site[1] in found.all)
            self._confirm_sites(only(found.all))

    def user_heads(self) -> None:
        """Which heads, where attention carries it; then what in the recipe that runs there."""
        layers = self.layout.layers_of(self.sites)
        if not layers:
            return
        members = sorted(place for place in suspects(self.cells) if place[0] in layers)
        found = self._guilty(members, self._only_places)
        self._say_spread(found, "head")
        self.place_sets = found.sets
        if found.all != frozenset(members):
            without = {p: EXACT if p in found.all else c for p, c in self.cells.items()}
            where = places_text(found.all, self.heads_a_layer)
            alone = self._only_places(found.all)
            rest = Substitution(f"not-{alone.name}", HEADS, f"fp32 in {where} alone", without)
            self._tried_on_all(alone, rest)
        if all(is_recipe(self.cells[place]) for place in found.all):
            self.base = self.cells
            self.operations()
            self.bits()

    def where(self) -> str:
        """What carries the failure, in words."""
        named = self.layout.named(self.sites)
        if self.place_sets:
            found = frozenset[Place]().union(*self.place_sets)
            return f"{places_text(found, self.heads_a_layer)}, {named}"
        return named

    def line(self) -> str:
        """The options of `halfulp train` that put what carries the failure into fp32."""
        if self.place_sets:
            found = frozenset[Place]().union(*self.place_sets)
            by_layer: dict[int, list[int]] = {}
            for layer, head in sorted(found):
                by_layer.setdefault(layer, []).append(head)
            return " ".join(
                f"--attention '{place_text([layer], heads)}: {EXACT}'"
                for layer, heads in by_layer.items()
            )
        return f"--set 'operations={self._saving()}'"

    def _saving(self) -> OperationPlan:
        """The run's plan with fp32 in what carries the failure."""
        config = self.ladder.settings.config
        if self.sites == self.layout.steps:
            return config.operations.with_(Assigned(FP32, (OPTIMIZER,)))
        return without_sites(config, self.sites)

    def _only_paths(self, paths: Iterable[str]) -> Substitution:
        chosen = set(paths)
        kept = [site for site in self.sites if site[0] in chosen]
        ordered = dict.fromkeys(path for path, _ in kept)
        step = "step-" if self.sites == self.layout.steps else ""
        name = f"only-{step}" + "_".join(path or "outside" for path in ordered)
        return self._only(kept, name, MODULES)

    def _only(self, kept: Sequence[Site], name: str, question: str) -> Substitution:
        config = self.ladder.settings.config
        with_attention = [path for path, kind in kept if kind == "attention"]
        named = self.layout.named(kept)
        brief = named if len(named) < 200 else f"{len({path for path, _ in kept})} modules"
        return Substitution(
            short_name(name),
            question,
            f"as it is: {brief} alone",
            attention_of(self.cells, self.layout, with_attention),
            only_sites(config, kept),
        )

    def _only_places(self, chosen: Iterable[Place]) -> Substitution:
        kept = sorted(chosen)
        name = short_name("only-head-" + "_".join(f"{layer}.{head}" for layer, head in kept))
        layers = {layer for layer, _ in kept}
        cells = {
            place: choice if place in set(kept) else EXACT if place[0] in layers else OWN
            for place, choice in self.cells.items()
        }
        text = f"as it is: {places_text(kept, self.heads_a_layer)} alone"
        return Substitution(name, HEADS, text, cells, only_sites(self.ladder.settings.config, ()))

    def _confirm_sites(self, alone: Substitution) -> None:
        """Try what was found on all seeds: as it is there alone, and everywhere but there."""
        if set(self.sites) == set(self.layout.sites):
            return
        self.told_apart = True
        paths = {path for path, kind in self.sites if kind == "attention"}
        cells = {
            place: OWN if self.layout.attention[place[0]][0] in paths else choice
            for place, choice in self.cells.items()
        }
        rest = Substitution(
            f"not-{alone.name}",
            alone.question,
            f"{FP32} in {self.layout.named(self.sites)} alone",
            cells,
            self._saving(),
        )
        self._tried_on_all(alone, rest)

    def _tried_on_all(self, alone: Substitution, rest: Substitution) -> None:
        self.ladder.climb([alone, rest], self.failing)
        # the narrowest answer is the one that the verdict rests on
        self.confirmed, self.cleared = [alone.name], [rest.name]
