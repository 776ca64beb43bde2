"""Claims that nothing here measures yet: they are listed so that the ledger is whole, and carry no figure."""

from __future__ import annotations

from halfulp.experiments.claims_model import Claim

_TEXTS: tuple[tuple[str, str, str], ...] = (
    (
        "A1",
        "bf16 flash attention explodes; the same run with high-precision flash attention does not",
        "GPT-2: the loss explodes at about 6.6k to 10k steps",
    ),
    ("A2", "tiling is not the cause: a block as long as the sequence fails too", "fails in the same way"),
    (
        "A3",
        "one layer suffices: flash only in layer 2 fails; standard attention only in layer 2 is stable",
        "layer 2 of 12",
    ),
    ("A4", "δ = rowsum(dP ∘ P) restores stability", "stable"),
    ("A5", "O recomputed as PV in fp32 for δ restores stability; so does O kept in fp32", "both stable"),
    (
        "A6",
        "a few heads carry the failure: their σ(W_Q) are outliers, and fp32 O for them alone restores stability",
        "fig. 3: heads 1, 7, 8, 9, 11, 12",
    ),
    ("A9", "the rank-1 terms (PK)[T]ᵀX[T] are alike across tokens and steps", "fig. 4"),
    ("A10", "Σ_T (δ_lp − δ_hp)[T] is positive step after step; its cumulative sum grows", "fig. 5a"),
    ("A11", "in the guilty features dO and O_lp − O_hp have the same sign", "fig. 5b, c: features 20 and 29"),
    ("A19", "σ(W_Q) of the failing layer grows before the loss does; activations grow", "fig. 9"),
    ("A20", "attention sinks make P̄ = 1 likely", "discussion, no figure"),
    ("D9", "the sum of δ_lp − δ_hp is positive because of curvature, not because rounding leans", ""),
    ("D10", "only the mean of δ_lp − δ_hp drives the runaway", ""),
    ("D11", "an integer row maximum makes the weights independent of the tiling", ""),
)


def _pending(identifier: str, statement: str, paper: str) -> Claim:
    groups = {"A": "A", "B": "B", "C": "C", "D": "D"}
    return Claim(identifier, groups[identifier[0]], statement, paper)  # type: ignore[arg-type]


CLAIMS = tuple(_pending(*row) for row in _TEXTS)
