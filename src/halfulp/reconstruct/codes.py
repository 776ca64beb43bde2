"""The codes that causes go by in pull requests and in their pages, docs/causes/CODE.md.

A code means one thing for good: one whose cause is gone stays here, among the retired, and is never
given again. HU1 is rounding, HU2 another function than the one asked for, HU3 what is not finite or
not the same twice, HU4 what is not explained.
"""

from __future__ import annotations

CODES: dict[str, str] = {
    "weights": "HU101",
    "weights-row-sum": "HU102",
    "weights-disagree": "HU103",
    "row-sum": "HU104",
    "exponential": "HU105",
    "row-max": "HU106",
    "accumulator": "HU107",
    "products": "HU108",
    "reciprocal": "HU109",
    "out": "HU110",
    "scores": "HU111",
    "operand": "HU112",
    "prescaled": "HU113",
    "lse": "HU114",
    "backward-scores": "HU115",
    "backward-weights": "HU116",
    "probabilities": "HU117",
    "delta": "HU118",
    "delta-from-out": "HU119",
    "grad-scores": "HU120",
    "grad-accumulator": "HU121",
    "grad-stored": "HU122",
    "stock": "HU123",
    "weights-normalized": "HU124",
    "causal-mask": "HU201",
    "mask": "HU202",
    "mask-finite": "HU203",
    "backward-mask": "HU204",
    "scale": "HU205",
    "key-tail": "HU206",
    "query-tail": "HU207",
    "padding": "HU208",
    "ragged": "HU209",
    "key-heads": "HU210",
    "other-data": "HU211",
    "layout": "HU212",
    "unwritten": "HU213",
    "unnormalized": "HU214",
    "rescale": "HU215",
    "tiles-skipped": "HU216",
    "split-merge": "HU217",
    "lse-other": "HU218",
    "no-delta": "HU219",
    "grad-scale": "HU220",
    "group-sum": "HU221",
    "grad-tail": "HU222",
    "window": "HU223",
    "softcap": "HU224",
    "sinks": "HU225",
    "underflow": "HU301",
    "exp-of-lse": "HU302",
    "masked-row": "HU303",
    "maximum": "HU304",
    "nan-escapes": "HU305",
    "non-finite": "HU306",
    "unstable": "HU307",
    "elements": "HU401",
    "out-unexplained": "HU402",
    "gradient-unexplained": "HU403",
}
"""By the key of the cause in `causes.CAUSES`."""

RETIRED: frozenset[str] = frozenset()
"""Codes of causes that are gone."""
