"""The search for a natural failure: what is taught, what is kept, and who is called failed."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import natural_failure as search
from benchmarks.natural_failure import FLASH, SAVED, TWIN, Record, Taught, Trial, drawn, judged

from halfulp.training.attention import AttentionPlan

SMALL = Trial(width=8, context=6, vocabulary=5, sequences=3, steps=4)
PLAN = AttentionPlan.of(TWIN)


def test_a_student_with_the_teachers_weights_has_no_loss() -> None:
    taught = Taught(SMALL, PLAN, 0)
    batch = taught.batch(taught.order(1, 3)[0], 1)
    with torch.no_grad():
        assert float(taught.loss(taught.model, batch)) > 0.01
        assert float(taught.loss(taught.teacher, batch).abs()) < 1e-6


def test_batches_are_fresh_or_the_same() -> None:
    for fresh in (False, True):
        taught = Taught(Trial(**asdict(SMALL) | {"fresh": fresh}), PLAN, 0)
        order = taught.order(2, 3)
        first, second = (taught.batch(samples, i)[0] for i, samples in enumerate(order))
        assert torch.equal(first, second) != fresh
        assert first.shape == (3, 6)
        assert not first[:, 0].any()


def test_a_sink_takes_the_teachers_weights() -> None:
    lead: list[float] = []

    def tap(layer: int, call: Any, out: Any) -> Any:
        scores = (call.query @ call.key.mT * call.scale).detach()
        lead.append(float((scores[..., 0] - scores[..., 1:].mean(-1)).mean()))
        return out

    for sink in (0.0, 12.0):
        taught = Taught(Trial(**asdict(SMALL) | {"sink": sink, "offset": 3.0}), PLAN, 0)
        tokens, _ = taught.batch(taught.order(1, 3)[0], 1)
        taught.teacher.blocks[0].attention.attend.tap = tap
        taught.teacher(tokens)
    assert lead[1] - lead[0] > 6


def test_drawn_settings_are_the_same_every_time() -> None:
    one, other = (list(itertools.islice(drawn(), 20)) for _ in range(2))
    assert one == other
    assert len(set(one)) == 20


def test_a_record_is_taken_up_and_a_torn_line_made_again(tmp_path: Path) -> None:
    record = Record(tmp_path, time.time() + 60)
    for attention in (TWIN, FLASH):
        assert record.run(SMALL, attention, 0) is not None
    assert "trials: 1, ran away: 0, lost: 0, natural failures: 0" in record.table()[-1]
    whole = record.path.read_text()
    record.path.write_text(whole[:-20])
    again = Record(tmp_path, time.time() + 60)
    assert list(again.lines) == [(SMALL, TWIN, 0)]
    found = again.run(SMALL, FLASH, 0)
    assert found is not None
    assert found["rows"] == record.lines[SMALL, FLASH, 0]["rows"]
    assert Record(tmp_path, 0).run(SMALL, SAVED, 0) is None  # time is up: nothing is written
    assert len(again.path.read_text().splitlines()) == 2


def line(loss: float | None, score: float, sigma: float) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for step in range(1, 101):
        measure = {
            "mean_score": [[score * step / 100]],
            "max_score": [[score * step / 100]],
            "sigma_query": [[sigma]],
            "sigma_key": [[1.0]],
        }
        rows += [{"step": step, "measure": measure}]
        rows += [{"step": step, "loss": 0.01 if step < 80 else loss}]
    trial = asdict(Trial(steps=100))
    return {"trial": trial, "attention": FLASH, "seed": 0, "rows": rows, "seconds": 1.0}


@pytest.mark.parametrize(
    ("loss", "score", "sigma", "ledger", "rule", "lost"),
    [
        (0.01, 1.0, 2.0, "stable", "survived", False),
        (0.40, 1.0, 9.0, "failed", "failed", True),
        (0.04, 1.0, 2.0, "stable", "failed", True),  # four times its best, and little in nats
        (0.01, 200.0, 9.0, "neither", "failed", False),  # scores ran away, the loss did not suffer
        (0.01, 8.0, 2.0, "stable", "drifting", False),
        (None, 1.0, 2.0, "failed", "failed", True),
    ],
)
def test_verdicts_on_planted_runs(
    loss: float | None, score: float, sigma: float, ledger: str, rule: str, lost: bool
) -> None:
    found = judged(line(loss, score, sigma), line(0.01, 1.0, 2.0))
    assert (found.ledger, found.rule, found.lost) == (ledger, rule, lost)
    assert math.isclose(found.score, score)


def test_a_natural_failure_needs_two_seeds_and_a_kernel_that_saves_it(tmp_path: Path) -> None:
    trial = Trial(steps=100)

    def table(flash: list[float], saved: list[float]) -> str:
        record = Record(tmp_path, 0)
        for seed in range(3):
            for attention, losses in ((FLASH, flash), (SAVED, saved), (TWIN, [0.01] * 3)):
                record.lines[trial, attention, seed] = line(losses[seed], 1.0, 2.0)
        return record.table()[-1]

    assert "natural failures: 1" in table([0.05, 0.05, 0.01], [0.01] * 3)
    assert "natural failures: 0" in table([0.05, 0.01, 0.01], [0.01] * 3)
    assert "natural failures: 0" in table([0.05] * 3, [0.01, 0.05, 0.01])


def test_the_search_begins_with_what_is_listed() -> None:
    assert len(set(search.LISTED)) == len(search.LISTED)
    assert search.LISTED[0] == Trial()
