"""The failing task's recipes by short names: the stock one, some with isolation's substitutions,
and the paper's own.

The order tells the story: the stock recipe computes δ from the rounded O, sums l from the unrounded
weights and recomputes the weights in another precision than it used; δ alone is the largest part,
and only all of them together leave nothing that pushes the scores.
"""

from __future__ import annotations

from halfulp.isolate.substitutions import OPERATIONS, replaced
from halfulp.recipes import BF16_AUTHORS, BF16_FLASH2, BF16_HALFULP, BF16_PAPER_STABILIZED, Recipe

# Two tiles of keys for the task's 32 tokens, so that the online softmax rescales; all queries at
# once, for speed.
TILES: dict[str, int | None] = {"block_query": None, "block_key": 16}

_STOCK = BF16_FLASH2.with_(name="stock", **TILES)
_BY_NAME = {operation.name: operation for operation in OPERATIONS}


def _replaced(name: str, *operations: str) -> Recipe:
    """The stock recipe with operations of `halfulp.isolate` replaced."""
    return _replaced_in(_STOCK, name, *operations)


def _replaced_in(base: Recipe, name: str, *operations: str) -> Recipe:
    """A recipe with operations of `halfulp.isolate` replaced, in the task's tiles."""
    recipe = replaced(base.with_(**TILES), [_BY_NAME[operation] for operation in operations])
    assert recipe is not None
    return recipe.with_(name=name)


RUNGS: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        _STOCK,
        _replaced("dP∘P", "delta-dP.P"),
        _replaced("O = PV in the backward pass", "delta-recomputed-O"),
        _replaced("fp32 O for δ", "delta-exact-O"),
        _replaced("fp32 O", "O-fp32"),
        _replaced("residual", "residual"),
        _replaced("residual+row_sum", "residual", "row-sum"),
        _replaced("residual+row_sum+weights", "residual", "row-sum", "weights"),
        BF16_HALFULP.with_(name="halfulp", **TILES),
        BF16_AUTHORS.with_(name="authors", **TILES),
        BF16_AUTHORS.with_(name="authors+O=PV", delta_from="recomputed", **TILES),
        _replaced_in(BF16_AUTHORS, "authors+Ō fp32", "accumulator-fp32"),
        BF16_PAPER_STABILIZED.with_(name="authors+softmax", **TILES),
        _replaced("stock+softmax", "softmax"),
    )
}
"""By name, from the stock recipe to halfulp's, then the paper's own with and without its softmax
fix (β = 7).
"""
