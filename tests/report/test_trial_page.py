"""The page and the terminal table of an isolation or a prescription: what was found stands first,
and nothing needs a network.
"""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from halfulp.report.trial_page import print_trial, trial_page, trial_sections
from tests.report.markup import problems


def isolation(**changes: Any) -> dict[str, Any]:
    runs = [{"rung": "original", "seed": 0, "outcome": "failed"}]
    table = {
        "title": "Substitution ladder",
        "columns": ["question", "what is changed", "outcome", "failed at step", "decided by"],
        "rows": [
            [
                "the run",
                "nothing: torch:flash",
                "failed",
                "1450",
                "loss 0.00019, 3.6 times its best",
            ],
            ["(d) operations", "δ = rowsum(dP ∘ P)", "survived", "–", "loss <3e-05>"],
            ["(d) operations", "δ from O", "1 failed, 1 survived", "90", "loss 1"],
        ],
        "caption": "4000 steps.",
        "command": "halfulp isolate run",
    }
    line = {
        "label": "as it is",
        "x": [1, 2],
        "y": [0.1, 0.2],
        "low": None,
        "high": None,
        "style": "line",
    }
    figure = {
        "title": "Loss",
        "x_label": "step",
        "y_label": "loss",
        "x_log": False,
        "y_log": True,
        "series": [line],
    }
    plain = {
        "run": "runs/<bad>",
        "config": {"attention": ["torch:flash", "layer 1: BF16_FLASH2"]},
        "rule": "failed: a number is not finite",
        "seeds": [0, 1],
        "failing": [0, 1],
        "status": "done",
        "exit_code": 0,
        "verdict": (
            "δ from the rounded O; 2 of 2 seeds, so at least 22 % of all seeds at 95 % confidence."
        ),
        "confidence": {"held": 2, "tried": 2, "bound": 0.2236, "confidence": 0.95},
        "fix": "δ from O and its residual: survives on 2 of 2 seeds.",
        "notes": ["Tiling is not the cause: one tile holds all 32 tokens."],
        "rungs": [{"runs": runs}, {"runs": runs * 2}],
        "tables": [table],
        "figures": [figure | {"caption": "Seed 0.", "command": "halfulp isolate run"}],
        "steps": 9000,
        "seconds": 219.0,
        "command": "halfulp isolate run",
    }
    return plain | changes


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"status": "interrupted", "fix": "", "notes": [], "figures": []},
        {
            "failing": [],
            "confidence": {"held": 0, "tried": 0, "bound": None, "confidence": 0.95},
            "tables": [],
        },
    ],
)
def test_the_page_is_whole_whatever_is_missing(changes: dict[str, Any]) -> None:
    page = trial_page(isolation(**changes))
    assert problems(page) == []
    assert "<bad>" not in page
    assert isolation()["verdict"] in page


def test_the_verdict_comes_first_and_says_how_sure_it_is() -> None:
    verdict, ladder = trial_sections(isolation())
    assert verdict["finding"] == isolation()["verdict"]
    facts = dict(next(block for block in verdict["blocks"] if block["kind"] == "facts")["pairs"])
    assert (
        facts["confidence"]
        == "2 of 2 seeds; of all seeds at least 22 % at 95 % confidence (Clopper–Pearson,"
        " one-sided)"
    )
    assert facts["runs"] == "3 runs, 9000 steps of training"
    assert facts["attention"] == "torch:flash; layer 1: BF16_FLASH2"
    assert ladder["blocks"][0]["title"] == "Substitution ladder"


def test_an_interrupted_one_says_how_to_go_on() -> None:
    verdict, _ = trial_sections(isolation(status="interrupted"))
    assert verdict["finding"].startswith(
        "This isolation is interrupted; the same command goes on. δ from"
    )
    assert "the same command goes on" in printed(isolation(status="running"))


def printed(plain: dict[str, Any]) -> str:
    out = io.StringIO()
    print_trial(plain, Console(file=out, width=100, highlight=False))
    return out.getvalue()


def test_the_terminal_has_a_sign_beside_every_outcome() -> None:
    text = printed(isolation())
    assert "✗ failed" in text
    assert "✓ survived" in text
    assert "● 1 failed" in text
    assert max(map(len, text.splitlines())) <= 100
    said = " ".join(text.split())
    assert "verdict δ from the rounded O; 2 of 2 seeds" in said
    assert "fix δ from O and its residual" in said
    assert "3 runs, 9000 steps of training, 3 min 39 s" in said
    assert "loss <3e-05>" in said
