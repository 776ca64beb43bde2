"""What of δ's error does the damage (D10), and the weights that no tiling changes, which leave none
of it (D11).
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfulp.attention import emulate
from halfulp.experiments.failure import run_failures
from halfulp.experiments.failure_recipes import TILES
from halfulp.papers.claim import Claim, Lab, Measured, Rule, generator
from halfulp.papers.delta_changes import CHANGES, changed_attention
from halfulp.recipes import BF16_FLASH2, BF16_HALFULP, Recipe

_DELTA_ALONE = BF16_FLASH2.with_(
    name="δ alone", row_sum_from="rounded", backward_weights="rounded", **TILES
)
_TWINS = ("as it is", "mean alone", "mean removed", "mean flipped")


def _mean_drives(lab: Lab) -> Measured:
    """D10: mean score where e is as it is, its mean alone, without its mean, with it flipped."""
    steps = 3000 if lab.full else 800
    attentions = {name: changed_attention(_DELTA_ALONE, CHANGES[name]) for name in _TWINS}
    runs = run_failures(
        list(attentions.values()), lab.seeds, steps, workers=lab.workers, progress=lab.report
    )
    count = len(lab.seeds)
    ends = {
        n: [r.mean_score[-1] for r in runs[i * count : (i + 1) * count]]
        for i, n in enumerate(attentions)
    }
    figures = {
        "as it is": min(ends["as it is"]),
        "mean alone": min(ends["mean alone"]),
        "mean removed": max(map(abs, ends["mean removed"])),
        "mean flipped": max(ends["mean flipped"]),
    }
    said = "; ".join(
        f"{name} {', '.join(f'{x:+.1f}' for x in values)}" for name, values in ends.items()
    )
    text = (
        f"mean score of the one-layer task at step {steps} by seed, in the stock recipe with"
        f" consistent weights, so that δ alone is off: {said}"
    )
    return Measured(figures, text)


def _tile_free(lab: Lab) -> Measured:
    """D11: weights bit for bit over block sizes and orders of the keys, relative to the row's last
    shift.
    """
    split = BF16_HALFULP.with_(name="split", exponential="split")
    recipes = {"split": split, "halfulp": BF16_HALFULP, "stock": BF16_FLASH2}
    counts = dict.fromkeys(recipes, 0)
    total = 0
    for seed, size in enumerate((1.0, 3.0, 3.0) * (2 if lab.full else 1)):
        q, k, v = size * torch.randn(3, 1, 4, 192, 64, generator=generator(seed))
        for name, recipe in recipes.items():
            whole = final_weights(recipe.with_(block_query=None, block_key=None), q, k, v)
            for block in (16, 48, 100):
                tiled = recipe.with_(block_query=64, block_key=block)
                for order in (
                    None,
                    torch.arange(191, -1, -1),
                    torch.randperm(192, generator=generator(seed)),
                ):
                    counts[name] += int((final_weights(tiled, q, k, v, order) != whole).sum())
                    total += whole.numel()
        lab.report((seed + 1) / 3, "weights over tilings")
    each = total // len(recipes)
    figures = {name: float(count) for name, count in counts.items()} | {"compared": float(each)}
    text = (
        f"{each:,} weights of each recipe against those of one tile, blocks of 16, 48 and 100 keys,"
        f" in order, reversed and shuffled: {counts['split']} differ with the integer shift and the"
        f" split exponent, {counts['halfulp']} without the split, {counts['stock']:,} in the stock"
        " recipe"
    )
    return Measured(figures, text)


def final_weights(
    recipe: Recipe, q: Tensor, k: Tensor, v: Tensor, order: Tensor | None = None
) -> Tensor:
    """Return P̄ as it enters P̄V `[B, H, N, N_k]`, brought to every row's last shift, the keys read
    in some order.

    q, k, v are `[B, H, N, D]`; `order` is a permutation of the keys, which the result is freed of
    again.
    """
    order = torch.arange(k.shape[2]) if order is None else order
    weights: list[Tensor] = []
    shifts: list[Tensor] = []

    def watch(name: str, _exact: Tensor, rounded: Tensor) -> None:
        if name in ("row_max", "weights_operand"):
            (shifts if name == "row_max" else weights).append(rounded.clone())

    emulate(q, k[:, :, order], v[:, :, order], recipe=recipe, observers=(watch,))
    exponential = torch.exp2 if recipe.base == "2" else torch.exp
    tiles = -(-k.shape[2] // (recipe.block_key or k.shape[2]))
    rows = []
    for start in range(0, len(weights), tiles):
        tile, m = weights[start : start + tiles], shifts[start : start + tiles]
        rows.append(
            torch.cat(
                [w * exponential(shift - m[-1]) for w, shift in zip(tile, m, strict=True)], -1
            )
        )
    found = torch.cat(rows, 2)
    restored = torch.empty_like(found)
    restored[..., order] = found
    return restored


CLAIMS = (
    Claim(
        "D10",
        "D",
        "only the mean of δ_lp − δ_hp drives the runaway",
        "",
        _mean_drives,
        Rule(
            "every seed: the mean score ends above +5 with e as it is and with its mean alone,"
            " below −5 with the mean flipped, and without it moves at most a fifth as far as with e"
            " as it is",
            lambda f: (
                min(f["as it is"], f["mean alone"]) > 5
                and f["mean flipped"] < -5
                and f["mean removed"] <= f["as it is"] / 5
            ),
        ),
        history="2026-11-22: a bound relative to the effect; before, within 3",
        seconds=20.0,
    ),
    Claim(
        "D11",
        "D",
        "an integer row maximum makes the weights independent of the tiling",
        "",
        _tile_free,
        Rule(
            "no weight differs with the split exponent, at most 1 in 10,000 without it, and over 1"
            " in 10 in the stock recipe",
            lambda f: (
                f["split"] == 0
                and f["halfulp"] <= 1e-4 * f["compared"]
                and f["stock"] > 0.1 * f["compared"]
            ),
        ),
        seconds=3.0,
    ),
)
