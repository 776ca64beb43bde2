"""The order of the search for attention: where to start, the forward pass, the gradients together,
each gradient alone, pairs, and what can be put back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property, partial

import torch

from halfulp.recipes import recipe_text
from halfulp.reconstruct import call_kinds, call_options, slips, space, suggested
from halfulp.reconstruct.changed import (
    Neighbors,
    as_forward,
    based,
    both,
    in_recipe,
    neighbors_of,
    open_among,
    simpler,
    twists_of,
    with_own_forward,
    with_shared_twists,
)
from halfulp.reconstruct.descent import Search
from halfulp.reconstruct.emulating import FORWARD, GRADIENTS, Emulator, Model, Twist, Way
from halfulp.reconstruct.evidence import SOUND, UNEXPLAINED
from halfulp.reconstruct.naming import merged
from halfulp.reconstruct.panel import Trial, simplicity
from halfulp.reconstruct.space import BACKWARD, EVERY, Change

GROSS = 2.0  # times the stock recipe's error: from there on other functions are tried first
CLEARLY = 0.35  # of the loss of each result: a named recipe to start from instead of stock
ALIKE = 0.1  # of the loss of each result: one recipe for all is preferred where it costs no more
FORWARD_SHARE = 0.6  # of the effort
SLIPPED = 2  # trials on which slips are looked for
FAR = 20.0  # times a recipe's error: no two roundings make so much
WHOLLY = 1e-3  # share that a recipe may leave which is the kernel's own
NEARLY = 0.02  # share that arithmetic alone may leave
EXACTLY = 0.1  # share that a slip may leave there
MOST = 0.8  # of the results that are wrong, which a slip must explain to come first
HALF = 0.5  # share that a slip may leave on one trial
PARTLY = 1.0  # of the loss on one trial: gained by a fault that only some calls have


class Stages:
    """One search over the models of a kernel."""

    def __init__(
        self,
        emulator: Emulator,
        dtype: torch.dtype,
        effort: int,
        blocks: tuple[int, ...] = (),
        tiles: slips.Tiles = slips.USUAL,
        given: tuple[Twist, ...] = (),
        like: Model | None = None,
    ) -> None:
        self.emulator, self.dtype, self.tiles, self.given = emulator, dtype, tiles, given
        self.like = like  # what fits the parts that are right, where only wrong ones are asked
        self.blocks = blocks  # of keys, as they were revealed
        self.stock = Model.of(space.STOCK[dtype])
        self.effort = effort
        self.share = FORWARD_SHARE
        self._slips: dict[tuple[str, frozenset[str], bool], list[slips.Held]] = {}
        self.search = Search[Model](emulator.fits, frozenset({"long"}), spent=lambda: self.late)
        self.forward = emulator.offered(FORWARD)
        self.gradients = emulator.offered(GRADIENTS)
        self.search.also = self.forward | self.gradients
        self.hints, self.operands = suggested.hints(emulator), tuple(call_options.operands(dtype))
        self.twists = (*twists_of(emulator), *self.hints)

    @property
    def late(self) -> bool:
        """Whether the effort, or the forward pass's share of it, is spent."""
        return self.emulator.emulations > self.effort * self.share

    def run(self) -> Model:
        """The model that explains most."""
        if not self._unexplained(self.start, self.forward | self.gradients, WHOLLY):
            return self.start
        model = self.start
        if self.gradients and self._unexplained(model, self.forward):
            model = with_own_forward(self.search, model, self.gradients, self.blocks)
        model = self._forward(model)
        self.share = 1.0
        if self.gradients:
            model = self._backward(model)
            for name in sorted(self.gradients):
                model = self._alone(model, name)
            model = self._together(model)
        whole = self._whole(model, space.named(self.dtype))
        if whole is not None:
            return whole
        model = self._unified(self._prune(model))
        return self._whole(model, [merged(model), *with_shared_twists(model)]) or model

    def _whole(self, model: Model, recipes: Iterable[Model]) -> Model | None:
        """The first that is one recipe throughout and fits no worse than the model."""
        offered = self.forward | self.gradients
        most = self.search.loss(model, offered) + ALIKE * len(self.emulator.fits(model, offered))
        trials = self.search.screen(model, offered, 2)
        part = self.search.loss(model, offered, frozenset(trials))
        for candidate in recipes:
            self.search.tried += 1
            if self.search.loss(candidate, offered, frozenset(trials)) < part + 2.0 and (
                self.search.loss(candidate, offered) < most
            ):
                return candidate
        return None

    @cached_property
    def start(self) -> Model:
        """The named recipe that fits best; the stock one unless another is clearly nearer."""
        offered = self.forward | self.gradients
        trials = frozenset({"plain", "sharp"} & self.emulator.trials.keys()) or None
        best, least = self.stock, self.search.loss(self.stock, offered, trials)
        clearly = CLEARLY * len(self.emulator.fits(self.stock, offered, trials))
        for model in space.named(self.dtype)[1:]:
            loss = self.search.loss(model, offered, trials)
            self.search.tried += 1
            if loss < least - clearly:
                best, least = model, loss
        if self._gross(offered):
            best = self._rebased(self.like or best, offered, EVERY)
        if best != self.stock:
            text = f"starts from {recipe_text(best.forward.recipe)}"
            self.search.note("start", text, self.stock, best, offered, float("nan"))
        some = frozenset(self.search.screen(best, self.forward, 4))
        here = self.search.loss(best, self.forward, some) + ALIKE
        for width in self.blocks:  # what is rounded at every tile only shows in the tiles there are
            tiled = space.setting(EVERY, block_key=width)(best)
            if tiled not in (None, best) and self.search.loss(tiled, self.forward, some) < here:
                text = f"block_key={width}, as its sums show"
                self.search.note("start", text, best, tiled, offered, float("nan"))
                return tiled
        return best

    def _rebased(self, model: Model, tensors: frozenset[str], scope: frozenset[str]) -> Model:
        """The model with the named recipe that fits best where the error is not gross: rows and
        calls that a mistake leaves alone tell what it was made in, and so does all that is left
        once the mistake is in the model.
        """
        trials = frozenset(self.emulator.trials.keys() - self.search.costly)

        def loss(candidate: Model) -> float:
            fits = self.emulator.fits(candidate, tensors, trials).values()
            return sum(fit.piecewise for fit in fits) / max(1, len(fits))

        spent = self.emulator.emulations
        best, least = model, loss(model) - CLEARLY
        for named in space.starts(self.dtype):
            recipe = named.forward.recipe
            own = model.with_ways(scope, partial(in_recipe, recipe))
            self.search.tried += 1
            if own != model and (here := loss(own)) < least:
                best, least = own, here
        self.emulator.emulations = spent  # a few recipes on all calls, which is no search
        return best

    @cached_property
    def own_tiles(self) -> slips.Tiles:
        """With δ as the named recipe has it."""
        recipe = self.start.gradients[0].recipe
        return self.tiles._replace(from_weights=recipe.delta_from == "probabilities")

    def _forward(self, model: Model) -> Model:
        search, tensors = self.search, self.forward
        hints = (*self.hints, *self._factor(model, "out"))
        widths = self.blocks or (model.forward.recipe.block_key or 128,)
        arithmetic = neighbors_of(
            lambda: (*space.forward_changes(self.dtype), *space.reversed_changes(self.blocks),
                     *space.tiled_changes(self.dtype, widths),
                     *space.twist_changes(self.operands, EVERY),
                     *space.twist_changes(hints, EVERY),
                     *space.twist_changes(hints, frozenset(FORWARD)),
                     *(space.recipes_of(self.dtype) if model.apart else ()))
        )  # fmt: skip
        gross = self._gross(tensors)
        twisted = neighbors_of(lambda: space.twist_changes(self.twists, EVERY))
        if gross:
            model = self._slip_or_twist("forward", model, twisted, tensors, frozenset(FORWARD))
            gross = self._unexplained(model, tensors, 0.1)
        if gross:
            model = search.descend("forward", model, both(twisted, arithmetic), tensors)
            model = self._partly("forward", model, tensors, EVERY)
        else:
            model = search.descend("forward", model, arithmetic, tensors)
        if self._unexplained(model, tensors):
            model = self._slipped("forward", model, tensors, tensors, everywhere=False)
        model = self._refined("forward", model, tensors)
        model = self._factored("forward", model, "out", EVERY)
        if self._rounded(model, tensors):
            singles = list(space.forward_changes(self.dtype))
            model = search.pairs("forward, two at once", model, singles, tensors)
        if self._unexplained(model, tensors) and not self.late:
            slow = neighbors_of(lambda: space.product_changes(self.dtype, EVERY))
            slow = both(slow, twisted)
            model = search.descend("forward", model, slow, tensors, screened=2, most=2)
            model = search.descend("forward", model, arithmetic, tensors, most=3)
        return model

    def _slipped(
        self,
        stage: str,
        model: Model,
        tensors: frozenset[str],
        scope: frozenset[str],
        *,
        everywhere: bool,
    ) -> Model:
        """One step of the dataflow done wrongly: what explains a simple trial, and, `everywhere`,
        most of the others that are wrong.
        """
        fits = self.emulator.fits(model, tensors)
        more = GROSS if everywhere else SOUND
        bad = {k: f.times for k, f in fits.items() if f.left > UNEXPLAINED and f.times > more}
        told = {k: much for k, much in bad.items() if k[0] != "small"}  # it may round to 0
        told = told if any(model.way(name).twists for name in tensors) else told or bad
        least = min(FAR, 0.2 * max(told.values(), default=0))
        some = dict.fromkeys(t for (t, _), much in told.items() if much > least)
        order = sorted((t for t in some if slips.tells(self.emulator.trials[t])), key=simplicity)
        twists = list(self.given)
        for name in order[: 0 if self.given and everywhere else SLIPPED]:
            key = name, tensors, everywhere
            if key not in self._slips:
                self._slips[key] = slips.likeliest(
                    self.emulator, self.emulator.trials[name], tensors, self.own_tiles, model,
                    gross=everywhere or (name, tensors, True) not in self._slips,
                    coarse=not everywhere)  # fmt: skip
            found = self._slips[key]
            twists += [
                slips.as_twist(h.slip, h.tiles._replace(filled=filled))
                for h in found[:4] if h.left < HALF for filled in (True, False)
            ]  # fmt: skip
            if found and found[0].left < slips.DONE:
                break
        twists = list(dict.fromkeys(twists))
        changes = [(t.text, changed) for t in twists
                   if (changed := space.twisted(t, scope)(model)) is not None]  # fmt: skip
        if not everywhere:
            changes += [c for t in twists for c in self._on_some(model, t, tensors, scope)]
        # what explains a simple trial alike is told apart by all the others
        losses = [self.search.loss(changed, tensors) for _, changed in changes]
        near = min(losses, default=0.0) + ALIKE * len(fits)
        best = [c for c, loss in zip(changes, losses, strict=True) if loss <= near][:1]
        if everywhere and best:
            new = self.emulator.fits(best[0][1], tensors)
            if sum(new[k].left < EXACTLY for k in bad) < MOST * len(bad):
                return model
        return self.search.best(f"{stage}, a slip", model, best, tensors, 4) or model

    def _slip_or_twist(self, stage: str, model: Model, twisted: Neighbors, tensors: frozenset[str],
                       scope: frozenset[str]) -> Model:  # fmt: skip
        """A slip that explains most calls; a fault of structure where that explains them better."""
        wide = EVERY if "out" in scope else scope
        found = self._slipped(stage, model, tensors, scope, everywhere=True)
        slipped = self._settled(found, tensors, wide)
        # fitted limits explain rows that see nothing as masks of finite numbers do
        twists = (t for name in tensors for t in slipped.way(name).twists)
        limited = any(" is held within " in t.text for t in twists)
        if slipped == model or not (limited or self._leaves(slipped, tensors)):
            return slipped
        near = ALIKE * len(self.emulator.fits(slipped, tensors)) if limited else 0.0
        step = self.search.steps.pop()
        if (other := self.search.best(stage, model, twisted(model), tensors, 4)) is not None:
            other = self._settled(other, tensors, wide)
            if self.search.loss(other, tensors) < self.search.loss(slipped, tensors) + near:
                return other
            self.search.steps.pop()
        self.search.steps.append(step)
        return slipped

    def _settled(self, model: Model, tensors: frozenset[str], scope: frozenset[str]) -> Model:
        """A model that has its mistake, with the arithmetic that this was made in."""
        wrong = any(model.way(name).twists for name in tensors)
        open_ = wrong and self._unexplained(model, tensors, NEARLY)
        return self._rebased(model, tensors, scope) if open_ else model

    def _partly(
        self, stage: str, model: Model, tensors: frozenset[str], scope: frozenset[str]
    ) -> Model:
        """A fault of structure that only some calls have: on the trial that is explained worst the
        best few, each kept on the trials where it explains more.
        """
        search = self.search
        for _ in range(2):
            if self.late or not self._unexplained(model, tensors):
                return model
            changes = []
            for twist in {t for name in tensors for t in model.way(name).twists}:
                less = space.untwisted(twist, scope)(model)
                changes += self._on_some(less, twist, tensors, scope)
            worst = frozenset(search.screen(model, tensors, 1))
            here = search.loss(model, tensors, worst)
            ranked = sorted(
                ((search.loss(changed, tensors, worst), i, twist)
                 for i, twist in enumerate(self.twists)
                 for changed in (space.twisted(twist, scope)(model),) if changed is not None),
                key=lambda entry: entry[:2],
            )  # fmt: skip
            for loss, _, twist in ranked[:4]:
                if here - loss > PARTLY:
                    changes += self._on_some(model, twist, tensors, scope)
            better = search.best(f"{stage}, on some calls", model, changes, tensors, 2)
            if better is None:
                return model
            model = better
        return model

    def _on_some(self, model: Model, twist: Twist, tensors: frozenset[str],
                 scope: frozenset[str]) -> list[tuple[str, Model]]:  # fmt: skip
        """The twist on the trials where it explains more, if on others it explains less."""
        changed = space.twisted(twist, scope)(model)
        if changed is None:
            return []
        old, new = (self.emulator.fits(m, tensors) for m in (model, changed))
        gain: dict[str, float] = {}
        for (trial, tensor), fit in old.items():
            gain[trial] = gain.get(trial, 0.0) + fit.loss - new[trial, tensor].loss
        some = frozenset(trial for trial, gained in gain.items() if gained > 0.5)
        others = frozenset(trial for trial, gained in gain.items() if gained < -0.5)
        if not some or not others or some == {"small"}:  # what is small may round to 0
            return []
        trials = self.emulator.trials
        both = ([trials[t] for t in group] for group in (sorted(some), sorted(others)))
        text = f"{twist.text}, {call_kinds.where(*both)}"
        name = f"{twist.key} on {'-'.join(sorted(some))}"

        def turn(trial: Trial) -> Trial | None:
            return None if trial.name in others else twist.turn(trial)

        cause = call_kinds.option_of([trials[t] for t in some]) or twist.cause
        kept = replace(twist, key=name, text=text, cause=cause, turn=turn)
        whole = space.twisted(kept, scope)(model)
        return [] if whole is None else [(text, whole)]

    def _factored(self, stage: str, model: Model, name: str, scope: frozenset[str]) -> Model:
        """A factor on one result, where one explains what is left."""
        own = frozenset({name})
        changes = [(twist.text, changed) for twist in self._factor(model, name)
                   if (changed := space.twisted(twist, scope)(model)) is not None]  # fmt: skip
        return self.search.best(f"{stage}, a factor", model, changes, own, 4) or model

    def _factor(self, model: Model, name: str) -> list[Twist]:
        """The factor on what a model gives that fits one result best, where there is one."""
        open_ = name in self.forward | self.gradients and self._unexplained(
            model, frozenset({name}), 0.05)  # fmt: skip
        return suggested.factors_on(self.emulator, model, name) if open_ else []

    def _backward(self, model: Model) -> Model:
        """From the forward pass's way or the stock one, whichever fits the gradients better."""
        search, tensors = self.search, self.gradients
        way = Way(based(self.stock.forward.recipe, model.forward.recipe))
        plain = replace(model, gradients=(way, way, way))
        # an lse of rows that see nothing but finite masks holds no sum beside them
        kept = space.setting(BACKWARD, backward_weights="maximum")(model) or model
        carried = min(search.loss(one, tensors) for one in (model, kept))
        if plain != model and search.loss(plain, tensors) < carried - 0.5:
            search.note("backward", "the backward pass does not share it", model, plain, tensors,
                         float("nan"))  # fmt: skip
            model = plain
        tensors = open_among(self.emulator.fits(model, tensors)) or tensors
        scope = tensors if tensors != self.gradients else BACKWARD
        others = [t for t in self.twists if t.cause == "lse-other"]
        own = (*call_options.stored(self.dtype, scope), *call_options.grad_outs(self.dtype))
        arithmetic = neighbors_of(
            lambda: (*self._backward_changes(scope),
                     *space.twist_changes(others, frozenset(FORWARD)),
                     *space.twist_changes(own, scope),
                     # where a gradient is right, so are the operands that it shares
                     *space.twist_changes(self.operands, EVERY if scope == BACKWARD else scope))
        )  # fmt: skip
        twisted = neighbors_of(lambda: space.twist_changes(self.twists, scope))
        every = both(twisted, arithmetic)
        gross = self._gross(tensors)
        known = not self._unexplained(model, self.forward)  # else what is wrong there is first
        if gross and known and self._unexplained(model, tensors):
            model = self._slip_or_twist("backward", model, twisted, tensors, scope)
        model = self._settled(model, tensors, scope)
        model = search.descend("backward", model, every if gross else arithmetic, tensors)
        if gross:
            model = self._partly("backward", model, tensors, scope)
        if known and self._unexplained(model, tensors):
            model = self._slipped("backward", model, tensors, scope, everywhere=False)
        return self._refined("backward", model, tensors)

    def _alone(self, model: Model, name: str) -> Model:
        """One gradient in a way of its own."""
        own = frozenset({name})
        summed = () if name == "grad_query" else tuple(call_options.groups())
        summed += (*call_options.stored(self.dtype, own), *call_options.prescaled(self.dtype))
        arithmetic = neighbors_of(lambda: (*space.backward_changes(self.dtype, own),
                                           *space.twist_changes(summed, own)))  # fmt: skip
        twisted = neighbors_of(lambda: space.twist_changes(self.twists, own))
        if not self._unexplained(model, own, 0.1):
            return model
        far = self._unexplained(model, own) and not self.late
        model = self._factored(name, model, name, own)
        every = both(twisted, arithmetic) if far else arithmetic
        model = self.search.descend(name, model, every, own)
        return self._refined(name, model, own)

    def _together(self, model: Model) -> Model:
        """Two changes at once, of all gradients and of each, and products of low precision."""
        search, tensors = self.search, self.gradients
        if self._rounded(model, tensors):
            singles = list(self._backward_changes(BACKWARD))
            model = search.pairs("backward, two at once", model, singles, tensors)
        for name in sorted(tensors):
            own = frozenset({name})
            if self._rounded(model, own):
                singles = list(space.backward_changes(self.dtype, own))
                model = search.pairs(f"{name}, two at once", model, singles, own)
                slow = neighbors_of(partial(space.product_changes, self.dtype, own))
                model = search.descend(name, model, slow, own, screened=2, most=1)
        return model

    def _backward_changes(self, tensors: frozenset[str]) -> Iterator[tuple[str, Change]]:
        yield from space.backward_changes(self.dtype, tensors)
        if "lse" not in self.forward:
            yield from space.hidden_changes(self.dtype)

    def _refined(self, stage: str, model: Model, tensors: frozenset[str]) -> Model:
        """Nearer formats where a step rounds otherwise than stock."""
        stock = self.stock.forward.recipe

        def finer(m: Model) -> Iterator[tuple[str, Model]]:
            for text, change in space.refined(m, stock, self.dtype, tensors):
                changed = change(m)
                if changed is not None:
                    yield text, changed

        return self.search.descend(f"{stage}, finer", model, finer, tensors, most=3)

    def _gross(self, tensors: frozenset[str]) -> bool:
        """Whether any error is beyond what the stock recipe makes."""
        fits = self.emulator.fits(self.stock, tensors)
        return any(
            float(f.energy.sum()) > GROSS**2 * float(f.other.sum()) > 0 for f in fits.values()
        )

    def _unexplained(
        self, model: Model, tensors: frozenset[str], share: float = UNEXPLAINED
    ) -> bool:
        return any(f.left > share for f in self.emulator.fits(model, tensors).values())

    def _leaves(self, model: Model, tensors: frozenset[str]) -> bool:
        """Whether a mistake leaves more than a little, or than roundings make, of what is not small
        and may round to 0.
        """
        usual = self.emulator.fits(self.stock, tensors)
        fits = self.emulator.fits(model, tensors).items()
        return any(f.left > NEARLY or (k[0] != "small" and not f.within_rounding(usual[k]))
                   for k, f in fits)  # fmt: skip

    def _rounded(self, model: Model, tensors: frozenset[str]) -> bool:
        """Whether something is left that two roundings at once may make."""
        fits = self.emulator.fits(model, tensors).values()
        left = [f.times for f in fits if f.left > UNEXPLAINED]
        return bool(left) and not self.late and sorted(left)[len(left) // 2] < FAR

    def _prune(self, model: Model) -> Model:
        offered = self.forward | self.gradients
        return self.search.pruned(model, lambda m: simpler(m, self.stock), offered)

    def _unified(self, model: Model) -> Model:
        """The gradients in the forward pass's way wherever that fits no worse."""
        return self.search.pruned(model, as_forward, self.forward | self.gradients)
