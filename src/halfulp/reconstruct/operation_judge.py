"""One failing call of a kernel, and the way to compute the definition that explains it: ways are
tried by themselves, several together, in regions, and held against the other calls.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from operator import itemgetter

from halfulp.operations import STOCHASTIC, Rounding
from halfulp.reconstruct.causes import CAUSES
from halfulp.reconstruct.found import FoundWay, Rival
from halfulp.reconstruct.operation_blocks import block_ways, codes_read
from halfulp.reconstruct.operation_eager import eager_ways, eager_ways_from
from halfulp.reconstruct.operation_mistakes import Region
from halfulp.reconstruct.operation_operands import overwritten
from halfulp.reconstruct.operation_others import Others
from halfulp.reconstruct.operation_places import place
from halfulp.reconstruct.operation_regions import (
    groups_of,
    hidden_regions,
    regions_of,
)
from halfulp.reconstruct.operation_rewritten import rewritten_ways
from halfulp.reconstruct.operation_stages import common_ways, rarer_ways, ways_of_results
from halfulp.reconstruct.operation_steps import RESULT, shapes_of_steps
from halfulp.reconstruct.operation_trials import Trial
from halfulp.reconstruct.operation_ways import Way

EXPLAINS = 0.5  # share of the error from which on a way is named
ALL = 0.995  # share from which on eager code is all that is looked at
DO = 0.8  # share from which on several roundings are all that is looked for
ALMOST = 0.97  # of roundings, below which formulas are tried too
WHOLLY = 0.9  # share from which on no other case is looked at, and nothing more looked for
LARGER = 4  # times as many numbers, at most, as a call that is searched for a second mistake has
FURTHER = 0.1  # share that a first way must have, or a further way must add
LITTLE = 0.05  # share at most of what is not tried beside others
TOGETHER = 3  # ways at most
TELLING = 48  # ways, those that explain most alone, of which some together are looked at
RIVALS = 0.2  # ways that explain so much less than the best are told apart from it
MOST = 16  # of them
PREDICTS = 0.3  # share of other failing calls' errors that a way which is named explains
MOSTLY = 0.7  # of them, below which a way that explains a call wholly is looked at in parts
EQUAL = 1e-3  # at most; of two ways that explain alike the one that is tried first is named
OTHERWISE = frozenset(
    {"option", "end", "neighbor", "factor", "term-missing", "exchanged", "limited", "maximum"}
)
"""Causes that are no rounding: such a way computes the kernel's own function or it does not."""
AT_TAILS = frozenset({"neighbor", "term-missing", "factor"})
"""What kernels do at ends that no whole block covers."""
LEFT = 0.08  # share of the error, beside what rounding makes, that such a way may leave
LEAVE = 0.3  # the same of what another quantizer gives
OFTEN = 0.3  # of the calls where the kernel is right, on which such a way may be grossly wrong
WRONG = -0.05  # how a way fits other calls, below which it is wrong there
GROSS = 0.1  # relative error above which the question is which function it is
SMALL = 0.5  # below which it is likelier a rounding, or a short sum
READ = 500  # ways, those whose errors are most like the kernel's, whose regions are read off
IN_REGIONS = 64  # ways, each in a region that results show, that are looked at
LIKELY = 16  # ways whose errors are most like the kernel's are tried in regions that do not show
LIKE = 0.1  # and least square of their cosine


_Tried = tuple[Rounding, float, Way]
_share = itemgetter(1)


@dataclass(frozen=True)
class Judge:
    """One call that fails, and others that tell alike ways apart."""

    trial: Trial
    others: list[Trial]
    thorough: bool  # whether to go on where no common way explains

    def found(self) -> FoundWay:
        """The best way, and up to two beside it where they explain more together."""
        operation = self.trial.calls.operation
        bases = [operation.stock, operation.floor]
        if STOCHASTIC in operation.stock.steps.values():  # its noise tells nothing of a kernel's
            bases = [Rounding("nothing is rounded")]
        elif self.trial.alike(*bases):
            del bases[0]
        start = max(self.trial.share(base, ()) for base in bases)
        floor = operation.floor
        eager = self._each(floor, eager_ways(self.trial.calls))
        # eager code from one step on is like eager code mostly
        later = eager_ways_from(self.trial.calls, lambda way: self.trial.share(floor, (way,)))
        resembled = any(self.trial.like(of, way) > LIKE for of, _, way in eager)
        if resembled:
            eager += self._each(floor, later)
        found: list[_Tried] = []
        tried: list[Way] = []
        base, share, way = max(eager, key=_share, default=(floor, 0.0, None))
        wholly = way is not None and share >= ALL and self.trial.spares(base, way)
        if not (way and wholly and self._foretells(base, way)):
            found, tried = self._alone(bases)
            if max(found, key=_share)[2].options:  # not read so, or read at another place
                elsewhere = [w for w in rewritten_ways(self.trial.calls) if w.cause == "option"]
                found += self._each(floor, elsewhere)
        found += eager
        known, told = self._known(found, tried)
        if not (resembled or told):
            found += self._each(floor, later)
            known, told = self._known(found, tried)
        explained = known >= DO
        if self.thorough and known < ALMOST and not told:
            more = self._further(bases, found, explained)
            if max(map(_share, more), default=0.0) > LITTLE:
                tried = _both([*more, *found])
            found += more
        return self._named(found, tried, explained, start)

    def _each(self, floor: Rounding, ways: Iterable[Way]) -> list[_Tried]:
        return [(floor, *self.trial.best(floor, (), way)) for way in ways]

    def _known(self, found: list[_Tried], tried: list[Way]) -> tuple[float, bool]:
        return (1.0, True) if self._sure(found) else self._by_roundings(found, tried)

    def _named(
        self, found: list[_Tried], tried: list[Way], explained: bool, start: float
    ) -> FoundWay:
        """The best of what was tried, where it holds on the other calls; else the place."""
        (base, share, way), fits, rivals = self._told_apart(found)
        predicts = self.held.predicts(base, (way,))
        if share >= WHOLLY and (fits < WRONG or predicts < MOSTLY):  # it is in a part alone
            found += self._in_parts(found)
            if predicts < MOSTLY and self.thorough and explained:  # else it was looked for
                found += self._hidden(base, found)
            (base, share, way), fits, rivals = self._told_apart(found)
        alike = self.held.alike(base, way, found)
        share, chosen = self._joined(base, share, way, tried if share > FURTHER else [])
        if len(chosen) == 1 and share >= WHOLLY and not self._alone_enough(base, way):
            chosen = self._with_others(base, share, way, found, start)
            share = self.trial.share(base, chosen)
        if len(chosen) > 1:
            fits = self.held.fit(base, chosen)
        if not self._holds(base, share, chosen, start):
            there = self.held.in_these_calls(found, WHOLLY)
            if there := [one for one in there if self._holds(*one[:2], one[2:], start)]:
                return self._named(there, [], False, start)
            return self._of_results(base) or self._unexplained(share, chosen, base)
        text = "; ".join(str(way) for way in chosen)
        alike = alike if len(chosen) == 1 else ()
        return FoundWay(chosen[0].key, text, share, fits, self._failing, rivals, alike)

    def _holds(self, base: Rounding, share: float, chosen: tuple[Way, ...], start: float) -> bool:
        """Whether ways explain enough here, and on the other calls what they are ways of."""
        held, least = self.held, PREDICTS
        otherwise = any(w.cause in OTHERWISE for w in chosen)
        most = EXPLAINS * (1 - start)
        if otherwise:
            near = LEFT if chosen[0].sketched else min(LEFT, self.trial.near)
            most = min(most, max(near, 4 * self.trial.of_rounding))
            # two come near by chance, and a condition was chosen when the calls had been seen
            least = MOSTLY if len(chosen) > 1 or chosen[0].only else PREDICTS
        if any(w.cause.startswith("block") for w in chosen):
            most = min(most, LEAVE)
        if share + min(0.0, held.fit(base, chosen)) < EXPLAINS or 1 - share > most:
            return False
        if held.predicts(base, chosen) < least:
            return False
        return not otherwise or self._is_own(base, chosen)

    def _alone_enough(self, base: Rounding, way: Way) -> bool:
        """Whether one way is all that is wrong: it explains the other calls that fail as well."""
        held = self.held
        return min(held.predicts(base, (way,)), held.follows(base, (way,))) >= MOSTLY

    def _with_others(
        self, base: Rounding, share: float, way: Way, found: list[_Tried], start: float
    ) -> tuple[Way, ...]:
        """A way that explains this call, or the rounding of one step that does so as well, and what
        explains the worst of the calls which it does not: a kernel may have several mistakes, of
        which this call shows one.
        """
        single = [one for one in found if one[0] is base and len(one[2].steps) == 1]
        simple = max((one for one in single if _rounds(one[2])), key=_share, default=None)
        more = [simple[2]] if simple and simple[1] >= share - EQUAL else []
        for one in (way, *more):
            chosen = self._with_another(base, one)
            if chosen != (one,) and self._holds(base, share, chosen, start):
                return chosen
        return (way,)

    def _with_another(self, base: Rounding, way: Way) -> tuple[Way, ...]:
        """With what explains the worst of the calls that a way does not explain."""
        most = LARGER * self.trial.numbers
        left = [t for t in self.held.as_bad if t.numbers <= most]
        rest = [t for t in left if t.share(base, (way,)) < EXPLAINS]
        worst = max(rest, key=lambda t: (not t.nonfinite, t.relative), default=None)
        if worst is None:
            return (way,)
        calls, steps = worst.calls, way.steps.keys()
        there = common_ways(calls)
        more = [w for w in there if not w.steps.keys() & steps and worst.concerns(base, w)]
        share, chosen = self._joined(base, worst.share(base, (way,)), way, more, worst)
        # what is no rounding comes near to anything where there are several
        if share >= WHOLLY and (len(chosen) == 2 or all(map(_rounds, chosen))):
            # a sum that is too long to be tried here may be all there is
            return chosen[1:] if self.trial.share(base, chosen[1:]) >= WHOLLY else chosen
        if way.eager is None:  # a mistake in eager code, which shows where that does not
            later = eager_ways_from(calls, lambda one: worst.share(base, (one,)))
            for one in chain(eager_ways(calls), later):
                if worst.share(base, (one,)) >= WHOLLY:
                    return (way, one)
        return (way,)

    def _of_results(self, base: Rounding) -> FoundWay | None:
        """What explains results where gradients, which are another function's, hide it."""
        alone = self.trial.of_results
        if alone is None or not self.thorough:
            return None
        others = [t.of_results or t for t in self.others if not t.calls.grads or t.of_results]
        judge = Judge(alone, others, thorough=False)
        found = list[_Tried]()
        for stage in ways_of_results(alone, base):
            if not judge._whole(found):
                found += [
                    (base, *alone.best(base, (), w)) for w in stage if alone.concerns(base, w)
                ]
        named = judge._named(found, [], False, 0.0) if judge._whole(found) else None
        return named if named is not None and named.share else None

    def _alone(self, bases: list[Rounding]) -> tuple[list[_Tried], list[Way]]:
        """Every way tried by itself, roundings first where errors are small, and those that tell
        most.
        """
        floor, calls = self.trial.calls.operation.floor, self.trial.calls
        other = {True: [], False: []}  # type: dict[bool, list[Way]]
        for way in common_ways(calls):
            if self.trial.concerns(floor, way):
                other[way.cause in OTHERWISE].append(way)
        found: list[_Tried] = []
        telling: list[_Tried] = []
        bases.sort(key=lambda base: -self.trial.share(base, ()))
        likelier = self.trial.relative > SMALL and not self.trial.is_noise
        for otherwise in (likelier, not likelier):
            if found and (
                self._sure(found) or self._by_roundings(telling, _both(telling))[0] >= DO
            ):
                break
            tried, most = other[otherwise], 0.0
            for base in bases:  # the other recipe where the nearer one does not do
                if most < WHOLLY:
                    blocks = () if otherwise else block_ways(calls, base)
                    here = [
                        (base, *self.trial.best(base, (), way))
                        for way in (*blocks, *tried)
                        if self.trial.concerns(base, way)
                    ]
                    telling += sorted(here, key=_share, reverse=True)[:TELLING]
                    tried = [replace(way, alone="") for _, _, way in telling]
                    found += here
                    most = max(map(_share, here), default=0.0)
        return found, _both(telling)

    def _by_roundings(self, found: list[_Tried], tried: list[Way]) -> tuple[float, bool]:
        """What up to three roundings explain together, 0 where other ways explain more; whether
        they explain the other calls as well, so that no other formula is looked for.
        """
        base, share, way = max(found, key=_share)
        if share >= DO and not self._foretells(base, way):
            return 0.0, False
        share, chosen = self._joined(base, share, way, tried if share > FURTHER else [])
        # coarse formats come near to any factor
        near = {"coarser"} if share < ALL else set()
        kinds = {"" if w.cause in near else CAUSES[w.cause].kind for w in chosen}
        if kinds != {"rounding"}:
            return 0.0, False
        held = share >= DO and bool(self.held.as_bad)
        return share, held and self.held.predicts(base, chosen) >= MOSTLY

    def _joined(
        self, base: Rounding, share: float, way: Way, tried: list[Way], trial: Trial | None = None
    ) -> tuple[float, tuple[Way, ...]]:
        """With further ways beside one, as long as each explains more of what is left, of this call
        or of another.
        """
        chosen: tuple[Way, ...] = (way,)
        trial = trial or self.trial
        while tried and share < WHOLLY and len(chosen) < TOGETHER:
            rest = trial.unexplained(base, chosen)
            steps = {name for one in chosen for name in one.steps}
            tried = [
                way
                for way in tried
                if not steps & way.steps.keys() and trial.concerns(base, way, rest)
            ]
            more = [(base, *trial.best(base, chosen, way)) for way in tried]
            if not more:
                break
            _, risen, way = max(more, key=_share)
            if risen < share + max(FURTHER, (1 - share) / 3):
                break
            share, chosen = risen, (*chosen, way)
        return share, chosen

    def _further(self, bases: list[Rounding], found: list[_Tried], explained: bool) -> list[_Tried]:
        """What is tried where no common way explains: ways in a region alone, numbers that fit;
        where roundings do, though not wholly, other formulas alone.
        """
        base, calls = bases[0], self.trial.calls
        more = [] if explained else self._in_read(found)
        for of, rarer, natural in rarer_ways(self.trial, self.others, bases, explained=explained):
            if not self._sure(more):
                more += [(of, *self.trial.best(of, (), replace(way, natural=natural)))
                         for way in rarer if self.trial.concerns(of, way)]  # fmt: skip
        if explained:
            return more
        if not self._sure(more):
            others = [(base, *self.trial.best(base, (), way)) for way in overwritten(calls)]
            more, found = more + others, found + others
        if not self._sure(more):
            more += self._in_read(more)
        if not self._sure(more):
            more += self._hidden(base, found)
        return more

    def _sure(self, found: list[_Tried]) -> bool:
        """Whether one leaves no more than rounding may make, and is wrong on no other call."""
        if not self._whole(found):
            return False
        base, _, way = max(found, key=_share)
        return self._foretells(base, way)

    def _foretells(self, base: Rounding, way: Way) -> bool:
        """Whether a way that explains this call explains the others as well."""
        held = self.held
        fits = held.fit(base, (way,)) >= WRONG and held.predicts(base, (way,)) >= PREDICTS
        return fits and (way.cause not in OTHERWISE or self._is_own(base, (way,)))

    def _is_own(self, base: Rounding, chosen: tuple[Way, ...]) -> bool:
        """Whether what is no rounding may be the kernel's own function by the other calls."""
        held, every = self.held, (base, chosen)
        fits = held.harm(*every) <= OFTEN and held.follows(*every) >= MOSTLY
        return fits and held.telling(*every)

    def _in_read(self, found: list[_Tried]) -> list[_Tried]:
        """Ways in the regions that results show for each, those first that would explain most."""
        own = [one for one in found if one[2].region is None and one[2].may_be_in_part]
        # what is made in a part is like the kernel's errors by the share of its own that lie there
        own.sort(key=lambda one: -self.trial.like(one[0], one[2]))
        read = [
            (share, base, way, region)
            for base, _, way in own[:READ]
            for share, region in regions_of(self.trial, base, way)
        ]
        read.sort(key=lambda one: -one[0])
        return [self._tried(base, way, region) for _, base, way, region in read[:IN_REGIONS]]

    def _hidden(self, base: Rounding, found: list[_Tried]) -> list[_Tried]:
        """Ways in a part that results do not show: those whose errors are like the kernel's, and at
        tails such as no sum shows where they are everywhere, a neighbor's data for one.
        """
        own = [one for one in found if one[2].region is None and one[2].may_be_in_part]
        likely = sorted(own, key=lambda one: -self.trial.like(one[0], one[2]))[:LIKELY]
        # a first or last few would show
        kinds = ("tail", "modulo", "half")
        groups = [g for g in groups_of(self.trial.calls) if g[0].kind in kinds]
        more: list[_Tried] = []
        for of, _, way in likely:
            if self.trial.like(of, way) > LIKE:
                more += [self._tried(of, way, r) for r in hidden_regions(self.trial, of, way)]
                more += self._in_groups(of, way, groups, WHOLLY)
        tails = [g for g in groups if g[0].kind == "tail"]
        often = {str(w): w for of, _, w in found if w.cause in AT_TAILS and of is base}
        if tails and not self._whole(more):
            for way in often.values():
                more += self._in_groups(base, way, tails, WHOLLY)
        return more

    def _in_parts(self, found: list[_Tried]) -> list[_Tried]:
        """Ways that explain this call, in every region that they may be in here as well."""
        most, groups = max(found, key=_share)[1], groups_of(self.trial.calls)
        whole = [one for one in found if one[1] >= most - EQUAL and one[2].region is None]
        more = [
            one
            for base, _, way in whole[:MOST]
            if way.may_be_in_part
            for one in self._in_groups(base, way, groups, most - EQUAL)
        ]
        return [one for one in more if one[1] >= most - EQUAL]

    def _in_groups(
        self, base: Rounding, way: Way, groups: list[list[Region]], least: float
    ) -> list[_Tried]:
        """A way in one of each group of regions, in all of a group where it explains enough."""
        more = []
        for first, *rest in groups:
            more.append(self._tried(base, way, first))
            if more[-1][1] >= least:
                more += [self._tried(base, way, region) for region in rest]
        return more

    def _tried(self, base: Rounding, way: Way, region: Region) -> _Tried:
        return (base, *self.trial.best(base, (), replace(way, region=region, alone="")))

    def _whole(self, found: list[_Tried]) -> bool:
        """Whether a way leaves no more than rounding may make."""
        if not found:
            return False
        base, share, way = max(found, key=_share)
        return share >= WHOLLY and self.trial.all_but_rounding(base, way)

    def _told_apart(self, found: list[_Tried]) -> tuple[_Tried, float, tuple[Rival, ...]]:
        """Of ways that explain about as much as the best the one that fits the other calls too."""
        best = max(found, key=_share)[1]
        rivals = [one for one in found if one[1] >= best - RIVALS]
        equal = min(EQUAL, 4 * self.trial.of_rounding)
        alike_to = max(equal, 1e-9)
        rivals.sort(key=lambda one: (-round(one[1] / alike_to), one[2].natural))
        del rivals[MOST:]
        if best < FURTHER:
            return rivals[0], 0.0, ()
        order = {id(way): (self._rank(way), number) for number, (_, _, way) in enumerate(found)}
        rivals.sort(key=lambda one: order[id(one[2])])
        fits, scores = list[float](), list[float]()
        most = [share + self.held.most((way,)) for _, share, way in rivals]
        for base, share, way in rivals:
            if max(scores, default=-1.0) >= max(most[len(scores) :]):
                break  # no later one does better, and of those as good an earlier one is named
            fits.append(self.held.fit(base, (way,)))
            scores.append(share + fits[-1])
        rows = list(zip(rivals, fits, scores, strict=False))
        alike = [row for row in rows if row[2] >= max(scores) - equal]
        if len(alike) > 1:  # what leaves alone what is right
            alike = [r for r in alike if self.trial.spares(r[0][0], r[0][2])] or alike
        named = min(alike, key=lambda row: order[id(row[0][2])])
        rows.sort(key=lambda row: (row is not named, -row[2]))
        told: dict[str, Rival] = {}
        for one, fit, _ in rows:
            told.setdefault(str(one[2]), Rival(str(one[2]), one[1], fit))
        return named[0], named[1], tuple(told.values())

    def _rank(self, way: Way) -> tuple[int, int, int]:
        """Everywhere before in a part, what is natural before what is not, the forward pass before
        the gradient's, early before late, results last.
        """
        names = self._steps
        places = [
            names.index(n) if n in names else len(names) * (1 + n.startswith(RESULT))
            for n in way.steps
        ]
        return (way.region is not None) + bool(way.alone), way.natural, max(places, default=0)

    @cached_property
    def held(self) -> Others:
        """This call and the others, on which ways are held against the kernel."""
        return Others(self.trial, self.others)

    @cached_property
    def _steps(self) -> list[str]:
        return list(shapes_of_steps(self.trial.calls))

    @property
    def _failing(self) -> str:
        return ", ".join(self.trial.failing)

    def _unexplained(self, share: float, chosen: tuple[Way, ...], base: Rounding) -> FoundWay:
        if read := codes_read(self.trial):
            return FoundWay(*read, 0.0, 0.0, self._failing)
        found = place(self.trial, base, self.others)
        nearest = f"; nearest is: {'; '.join(map(str, chosen))} ({100 * share:.0f} %)"
        text = found.text + (nearest if share > EXPLAINS and found.finite else "")
        other = "operation-function" if found.relative > GROSS else "operation-unexplained"
        key = "operation-place" if found.told else other
        return FoundWay(key, text, 0.0, 0.0, self._failing)


def _rounds(way: Way) -> bool:
    return CAUSES[way.cause].kind == "rounding"


def _both(telling: list[_Tried]) -> list[Way]:
    """Those that tell most, in both passes."""
    most = sorted(telling, key=_share, reverse=True)[:TELLING]
    return [replace(way, alone="") for _, _, way in most]
