"""The figures of both papers, and which picture of the ledger stands for each: with what the
paper's shows, and what is otherwise in the set-up here.

A figure that shows no measurement, or one that nothing here can measure, is named with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Paper = Literal["A", "B"]
PAPERS: dict[Paper, str] = {
    "A": "Qiu & Yao, Why Low-Precision Transformer Training Fails (arXiv 2510.04212)",
    "B": "Golden et al., Is Flash Attention Stable? (arXiv 2405.02803)",
}


@dataclass(frozen=True)
class PaperFigure:
    """One figure of a paper."""

    paper: Paper
    number: str  # as the paper has it: "5a"
    shows: str  # in the paper, with its figures
    claim: str = ""  # whose pictures stand for it; "" where there are none
    picks: tuple[str, ...] = ()  # what their titles contain; of several, any
    differs: str = ""  # from the paper's set-up; or why there is none

    @property
    def name(self) -> str:
        """Of files."""
        return f"{self.paper.lower()}-fig-{self.number}"

    def pictures(self, verdict: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """The pictures of a claim's verdict that stand for it."""
        return [
            picture
            for picture in verdict["pictures"]
            if any(part in str(picture["title"]) for part in self.picks)
        ]


_TASK = (
    "a layer of 4,096 weights, mean squared error against a random teacher, one fixed batch, Adam"
    " at 1e-3, true bf16; the paper's GPT-2 has 124M weights and 524,288 fresh tokens a step"
)
_BYTES = (
    "a byte GPT of width 64 to 96, 1,024 tokens a step, AdamW at 1e-2, O with 1 or 2 mantissa bits"
    " where bf16 has 7; the paper's GPT-2 has 12 layers, width 768 and 524,288 tokens a step"
)
_BUILT = (
    "a layer built so that the paper's conditions all hold (ties, V of one sign, Ō rounded to"
    " bf16); in the paper they arise by themselves in layer 2 of GPT-2"
)
_SWEEP = (
    "emulated for several recipes, since the paper's text names neither its inputs nor its sizes"
    " nor the precision of its running sums"
)
_TWINS = (
    "a diffusion transformer of 2 layers that draws 16 shapes of 16 × 16 pixels, 5 seeds; the"
    " paper's text-to-image model trains on a cluster of A100s"
)

FIGURES: tuple[PaperFigure, ...] = (
    PaperFigure("A", "1", "the causal chain from rounding to failure", differs="a diagram"),
    PaperFigure(
        "A",
        "2",
        "the loss explodes after about 10,000 steps, with high-precision attention it does not",
        "A1",
        ("(after fig. 2)",),
        _TASK,
    ),
    PaperFigure(
        "A",
        "3",
        "σ(W_Q) of the heads of layer 2: 1, 7, 8, 9, 11 and 12 stand out, 8 most",
        "A6",
        ("(after fig. 3)",),
        f"one layer of 12 heads; {_BYTES}",
    ),
    PaperFigure(
        "A",
        "4",
        "PK, X and (PK)[T]ᵀX[T] of tokens 50 and 718 at steps 6610 and 6619 look alike",
        "A9",
        ("(after fig. 4)",),
        f"tokens 12 and 40 of 64, with their cosines and R beside; {_BYTES}",
    ),
    PaperFigure(
        "A",
        "5a",
        "the cumulative sum of Σ(δ_lp − δ_hp) rises over steps 6580 to 6680",
        "A10",
        ("(after fig. 5a)",),
        f"with its first-order and curvature parts; {_TASK}",
    ),
    PaperFigure(
        "A",
        "5b-c",
        "dO and O_lp − O_hp of token 718 are both negative in features 20 and 29",
        "A11",
        ("(after fig. 5b)", "(after fig. 5c)"),
        f"means over sharp rows; {_BUILT}",
    ),
    PaperFigure(
        "A",
        "6",
        "V is negative in feature 20, and the error of Ō steps down where P̄ = 1",
        "A11",
        ("(after fig. 6",),
        _BUILT,
    ),
    PaperFigure(
        "A",
        "7",
        "with the softmax fix, β = 7, the loss does not explode",
        "A11",
        ("(after fig. 7)",),
        _BUILT,
    ),
    PaperFigure(
        "A",
        "8",
        "losses that exploded in other people's GPT-2 runs",
        differs="needs a GPU: the preset gpt2 repeats the set-up, `halfulp train gpt2`",
    ),
    PaperFigure(
        "A",
        "9",
        "σ(W_Q) by layer: layer 2 alone runs away",
        "A26",
        ("(after fig. 9)",),
        f"12 layers of 2 heads; {_BYTES}",
    ),
    PaperFigure("B", "1", "tiling in flash attention", differs="a diagram"),
    PaperFigure("B", "2", "the micro-benchmark", differs="a diagram"),
    PaperFigure(
        "B",
        "3",
        "max difference of flash from baseline falls from bf16 over fp16 and fp32 to fp64",
        "B2",
        ("(after fig. 3)",),
        _SWEEP,
    ),
    PaperFigure(
        "B",
        "4",
        "against fp64, bf16 flash deviates about 10 times more than the baseline",
        "B3",
        ("(after fig. 4)",),
        _SWEEP,
    ),
    PaperFigure(
        "B",
        "5",
        "max, mean and standard deviation of the difference rise with the sequence length",
        "B4",
        ("(after fig. 5)",),
        _SWEEP,
    ),
    PaperFigure(
        "B",
        "6a-b",
        "exchanging the block dimensions raises the difference, square blocks do not change it",
        "B5",
        ("(after fig. 6a, b)",),
        f"square blocks both of the same area and with B_c kept; {_SWEEP}",
    ),
    PaperFigure(
        "B",
        "6c",
        "larger blocks lower the difference",
        "B5",
        ("(after fig. 6c)",),
        _SWEEP,
    ),
    PaperFigure(
        "B",
        "7",
        "max difference and Wasserstein distance of the weights grow with the steps",
        "B7",
        ("Largest difference", "Wasserstein distance"),
        _TWINS,
    ),
    PaperFigure(
        "B",
        "8",
        "flash drifts like another initialization or less, 2 to 5 times less than low precision",
        "B8a",
        ("Wasserstein distance",),
        _TWINS,
    ),
    PaperFigure(
        "B",
        "future-work",
        "the weights' deviation at the point of a loss spike (no figure)",
        "B11",
        ("at a loss spike",),
        _BYTES,
    ),
)
"""In the papers' order."""


def claims_of(paper: Paper) -> list[str]:
    """Return the claims whose pictures a paper's figures take, in order, each once."""
    return list(dict.fromkeys(f.claim for f in FIGURES if f.paper == paper and f.claim))


def drawn_figures(
    paper: Paper, verdicts: Sequence[Mapping[str, Any]]
) -> tuple[list[dict[str, Any]], list[PaperFigure]]:
    """Return a paper's figures that have pictures, with what stands beside them, and the others.

    Args:
        paper: which.
        verdicts: of the claims in `claims_of`, in their JSON form.

    Raises:
        ValueError: a claim is missing, or has no picture for its figure.
    """
    by_id = {str(verdict["id"]): verdict for verdict in verdicts}
    drawn: list[dict[str, Any]] = []
    left = []
    for figure in (one for one in FIGURES if one.paper == paper):
        if not figure.claim:
            left.append(figure)
            continue
        if figure.claim not in by_id:
            raise ValueError(
                f"verdicts of {', '.join(by_id) or 'no claim'}: accepted are those of"
                f" {', '.join(claims_of(paper))}; {figure.claim} is missing"
            )
        verdict = by_id[figure.claim]
        pictures = figure.pictures(verdict)
        if not pictures:
            raise ValueError(
                f"the verdict of {figure.claim} has no picture for figure {figure.number}; accepted"
                " is what halfulp claims --json writes"
            )
        drawn.append(
            {
                "name": figure.name,
                "number": figure.number,
                "paper": figure.shows,
                "differs": figure.differs,
                "claim": figure.claim,
                "pictures": pictures,
            }
            | {key: verdict[key] for key in ("verdict", "measured", "estimates", "command")}
        )
    return drawn, left
