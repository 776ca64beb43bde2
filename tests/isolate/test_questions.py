"""The investigation with an oracle in the place of training: it names the planted cause, where it
is, and how sure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from halfulp.isolate import climb
from halfulp.isolate.isolation import isolate
from halfulp.isolate.questions import Investigation
from halfulp.isolate.result import Isolation, worst
from halfulp.isolate.rule import Outcome
from halfulp.isolate.rung import Job, RungRun
from halfulp.isolate.substitutions import EXACT, Place, cells_of, is_recipe
from halfulp.recipes import Recipe, recipe_named
from halfulp.training.attention import AttentionPlan
from halfulp.training.config import Language, RunConfig

Plant = Callable[..., list[Job]]
MODEL = Language(layers=12, heads=12, width=12, context=256)
STEPS = 4000


def another_delta(recipe: Recipe) -> bool:
    """Saved by any δ that is not from the rounded O."""
    return recipe.delta_from != "out"


def three_repairs(recipe: Recipe) -> bool:
    """Saved as the one-layer task is: by dP ∘ P, or by three repairs together."""
    repaired = recipe.delta_from == "residual" and recipe.row_sum_from == "rounded"
    return recipe.delta_from == "probabilities" or (
        repaired and recipe.backward_weights == "rounded"
    )


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Plant:
    """Let a run fail where every head of one of the causes runs what does not save it; returns the
    jobs.
    """

    def planted(
        *causes: set[Place],
        saves: Callable[[Recipe], bool] = another_delta,
        sound: tuple[int, ...] = (),
        twin_fails: tuple[int, ...] = (),
        out_of_time: int | None = None,
    ) -> list[Job]:
        done: list[Job] = []

        def bad(choice: str) -> bool:
            return choice != EXACT and not (is_recipe(choice) and saves(recipe_named(choice)))

        def run(job: Job) -> RungRun | None:
            if out_of_time is not None and len(done) >= out_of_time:
                return None
            done.append(job)
            cells, seed = cells_of(job.config), job.config.seed
            fails = seed not in sound and any(
                all(bad(cells[place]) for place in cause) for cause in causes
            )
            fails |= job.rung == "fp32" and seed in twin_fails
            last = 100 if fails else job.horizon
            outcome = "failed" if fails else "survived"
            at = 100 if fails else None
            return RungRun(
                job.rung,
                seed,
                outcome,
                "planted",
                at,
                last,
                last,
                1.0,
                0.0,
                {},
                0.0,
                str(job.folder),
            )

        monkeypatch.setattr(climb, "run_rung", run)
        return done

    return planted


def ask(out: Path, *attention: str, **options: Any) -> Isolation:
    config = RunConfig(MODEL, AttentionPlan.of(*(attention or ("BF16_FLASH2",))), steps=STEPS)
    found = isolate(config, out=out, **({"workers": 1, "seeds": range(6)} | options))
    assert json.loads((out / "isolation.json").read_text()) == json.loads(
        json.dumps(found.as_dict())
    )
    return found


def test_one_head_of_144_is_named_with_few_runs(plant: Plant, tmp_path: Path) -> None:
    done = plant({(3, 7)})
    found = ask(tmp_path / "out")
    assert found.places == ((3, 7),)
    assert found.verdict.startswith(
        "δ from the rounded O, head 7 of layer 3; 6 of 6 seeds: found on one, confirmed on 5 of 5,"
        " so it holds for at least 55 % of all seeds at 95 % confidence. "
    )
    assert (found.exit_code, found.found, found.status, found.not_tested) == (0, True, "done", ())
    for kind in (
        "only-layer",
        "only-head",
    ):  # twelve of each; the halving asks two questions four times, and what is left one
        assert sum(job.rung.startswith(kind) and job.config.seed == 0 for job in done) <= 9
    outcomes = {
        (r.attention, seed): run.outcome for r in found.rungs for seed, run in r.runs.items()
    }
    ends = [outcomes[str(job.config.attention), job.config.seed] for job in done]
    assert found.steps == sum(100 if end == "failed" else STEPS for end in ends)
    assert len(set(outcomes)) == len(done), "no run is made twice"


def test_heads_that_fail_alone_and_heads_that_need_each_other(plant: Plant, tmp_path: Path) -> None:
    plant({(1, 2)}, {(1, 5)}, {(4, 0), (4, 11)})
    found = ask(tmp_path / "out", seeds=(0, 1))
    assert found.places == ((1, 2), (1, 5), (4, 0), (4, 11))
    assert "heads 2 and 5 of layer 1; heads 0 and 11 of layer 4; 2 of 2 seeds" in found.verdict
    assert "No single head carries the failure alone in: " in " ".join(found.notes)
    assert "layer 4 head 0 with layer 4 head 11" in " ".join(found.notes)
    assert "Each of these layers or sets of layers fails alone: 1; 4." in found.notes


def test_changes_that_save_only_together_are_all_named(plant: Plant, tmp_path: Path) -> None:
    plant({(0, 0)}, saves=three_repairs)
    found = ask(tmp_path / "out", seeds=range(3))
    by_size = {one.operations: one for one in found.rescues}
    assert set(by_size) == {("delta-dP.P",), ("residual", "row-sum", "weights")}
    assert [one.repair for one in found.rescues] == [False, True]
    assert found.verdict.startswith(
        "δ = rowsum(dO ∘ O), which is not the sum of the dP ∘ P that the backward pass uses"
    )
    assert (
        "This change alone saves the run: δ = rowsum(dP ∘ P) (3 of 3). None of the 12 other single"
        " changes does (tried on seed 0)." in found.verdict
    )
    assert found.fix.startswith(
        "All of these together: δ from O and its residual; l summed from the rounded weights; the"
        " backward pass on the"
    )
    assert "on 3 of 3 seeds; on seed 0 none of them can be left out" in found.fix
    assert "halfulp's own recipe (attention BF16_HALFULP) survives on 3 of 3 seeds" in found.fix


def test_without_a_single_rescue_the_set_is_the_cause(plant: Plant, tmp_path: Path) -> None:
    plant(
        {(0, 0)},
        saves=lambda recipe: (
            recipe.row_sum_from == "rounded" and recipe.backward_weights == "rounded"
        ),
    )
    found = ask(tmp_path / "out", seeds=(0,))
    assert [one.operations for one in found.rescues] == [("row-sum", "weights")]
    assert found.verdict.startswith(
        "l from the weights before rounding together with weights recomputed otherwise than they"
        " were used, "
    )
    assert "1 of 1 seed, the one it was searched on; others were not tried." in found.verdict
    assert re.search(r"No single change saves the run \(\d\d tried on seed 0\)\.$", found.verdict)


def test_seeds_that_do_not_fail_or_whose_twin_fails_do_not_count(
    plant: Plant, tmp_path: Path
) -> None:
    plant({(0, 0)}, sound=(0, 3), twin_fails=(4,))
    found = ask(tmp_path / "out")
    assert found.failing == (1, 2, 5)
    assert "3 of 3 seeds" in found.verdict
    assert "Seeds 4: fp32 attention fails too; they were left out." in found.notes
    assert "Seeds 0, 3: the run itself survives; they were left out." in found.notes


def test_a_run_that_does_not_fail(plant: Plant, tmp_path: Path) -> None:
    done = plant({(0, 0)}, sound=tuple(range(6)))
    found = ask(tmp_path / "out")
    assert (found.exit_code, found.verdict) == (
        1,
        "The run does not fail: it survives on 6 of 6 seeds.",
    )
    assert len(done) == 12, "nothing else is asked"


def test_attention_that_is_not_the_cause(plant: Plant, tmp_path: Path) -> None:
    plant({(0, 0)}, twin_fails=tuple(range(6)))
    found = ask(tmp_path / "out")
    assert found.exit_code == 1
    assert (
        found.verdict
        == "Attention is not the cause: with fp32 attention the run fails too (6 of 6 seeds)."
    )


def test_a_kernel_is_emulated_and_that_is_said(plant: Plant, tmp_path: Path) -> None:
    plant({(2, 2)})
    found = ask(tmp_path / "out", "torch:flash", seeds=(0,))
    assert found.places == ((2, 2),)
    (said,) = (note for note in found.notes if "replaced inside" in note)
    assert said.startswith(
        "Operations were replaced inside BF16_FLASH2[block_query=32,block_key=512,"
    )
    assert "seed 0 at step 100, the kernel itself at step 100" in said
    kernel = next(rung for rung in found.rungs if rung.name == "only-head-2.2")
    assert kernel.attention == "torch:fp32; layer 2 head 2: torch:flash", (
        "places are told apart with the kernel itself"
    )


def test_a_kernel_that_no_recipe_follows_is_still_located(plant: Plant, tmp_path: Path) -> None:
    plant({(2, 2)}, saves=lambda recipe: True)
    found = ask(tmp_path / "out", "torch:flash", seeds=(0,))
    assert found.verdict.startswith(
        "Attention in low precision, head 2 of layer 2; which operation is not found; "
    )
    assert found.exit_code == 0
    assert [what for what, _ in found.not_tested] == ["(b) tiling", "(d) operations", "(f) bits"]
    assert "No recipe that emulates torch:flash fails alike" in found.notes[0]


def test_tiling_that_is_the_cause_is_named(plant: Plant, tmp_path: Path) -> None:
    plant({(0, 0)}, saves=lambda recipe: recipe.block_key is None)
    found = ask(tmp_path / "out", seeds=(0,))
    assert next(rung for rung in found.rungs if rung.name == "block-N").runs[0].survived
    assert found.verdict.startswith(
        "The tiling, layer 0" if len(found.places) == 12 else "The tiling, head 0 of layer 0"
    )


def test_bits_are_bisected(plant: Plant, tmp_path: Path) -> None:
    plant(
        {(0, 0)}, saves=lambda recipe: recipe.delta_from != "out" or recipe.out.mantissa_bits >= 11
    )  # type: ignore[union-attr]
    found = ask(tmp_path / "out", seeds=(0,))
    (table,) = (t for t in found.tables() if t.title == "Mantissa bits of out")
    outcomes = {row[0]: row[1] for row in table.rows}
    assert outcomes[10] == "failed"
    assert outcomes[11] == "survived"
    assert {5, 6, 7} <= set(outcomes), "fewer bits too"
    assert len(outcomes) <= 9
    assert "Mantissa bits of out: 7 are too few, 11 suffice" in " ".join(found.notes)
    (figure,) = (f for f in found.figures if "bits" in f.title)
    assert figure.series[0].x == tuple(
        sorted(bits for bits, outcome in outcomes.items() if outcome == "failed")
    )


def test_a_budget_of_steps_is_kept_and_what_is_left_is_said(plant: Plant, tmp_path: Path) -> None:
    done = plant({(0, 0)})
    budget = 3 * STEPS + 150
    found = ask(tmp_path / "out", seeds=(0, 1), budget_steps=budget)
    assert found.steps <= budget
    assert found.not_tested
    assert found.not_tested[0] == (
        "(b) tiling",
        f"the budget of {budget} steps of training was spent",
    )
    assert "which operation is not known, the budget was spent" in found.verdict
    assert [job.rung for job in done][:3] == ["fp32", "fp32", "original"]
    more = ask(tmp_path / "out", seeds=(0, 1))
    assert more.not_tested == (), "the same folder goes on with a larger budget"


def test_what_is_known_when_the_budget_ends_is_said(plant: Plant, tmp_path: Path) -> None:
    """The third operation of the first round was the last run: that the first saves the run is
    known by then.
    """
    plant({(0, 0)}, out_of_time=19)
    found = ask(tmp_path / "out", seeds=(0, 1), budget_seconds=3600.0)
    made = [r.name for r in found.rungs if r.question == "(d) operations" and r.runs]
    assert made[0] == "delta-exact-O"
    assert len(made) < 12
    assert found.verdict.startswith("δ from the rounded O, layer 0; 1 of 1 seed")
    assert ("(d) operations", "the budget of 3600 seconds was spent") in found.not_tested
    untested = next(table for table in found.tables() if table.title == "Not tested").rows
    assert "the rest of (d) operations" in dict(untested), "some of them stand in the ladder"
    assert "(f) bits" in dict(untested)


def test_a_budget_too_small_for_anything_says_so(plant: Plant, tmp_path: Path) -> None:
    plant({(0, 0)})
    found = ask(tmp_path / "out", budget_steps=10)
    assert (found.exit_code, found.verdict) == (
        1,
        "Not known: the budget was spent before the run and its fp32 twin were made.",
    )


def test_a_budget_of_seconds_that_ends_in_the_middle(plant: Plant, tmp_path: Path) -> None:
    plant({(0, 0)}, out_of_time=20)
    found = ask(tmp_path / "out", seeds=(0, 1), budget_seconds=3600.0)
    assert found.not_tested
    assert found.not_tested[0][1] == "the budget of 3600 seconds was spent"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"steps": 5000}, r"steps=5000: accepted are 1 to the run's 4000"),
        ({"seeds": ()}, r"seeds=\[\]: accepted are different ones, at least one"),
        ({"seeds": (1, 1)}, r"seeds=\[1, 1\]: accepted are different ones"),
        ({"from_step": 10}, r"from_step=10: accepted are 0 and the run's checkpoints \[\]"),
        ({"budget_seconds": 0.0}, r"budget_seconds=0.0: accepted is a number above 0"),
        ({"budget_steps": -1}, r"budget_steps=-1: accepted is a number above 0"),
        ({"workers": 0}, r"workers=0: accepted is an integer of at least 1"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_written(
    plant: Plant, tmp_path: Path, options: dict[str, Any], says: str
) -> None:
    plant({(0, 0)})
    with pytest.raises(ValueError, match=says):
        ask(tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_nothing_to_isolate_in_fp32(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"attention='torch:fp32': it is in fp32 everywhere"):
        ask(tmp_path / "out", "torch:fp32")


def test_a_folder_of_something_else_is_left_alone(plant: Plant, tmp_path: Path) -> None:
    plant({(0, 0)})
    (tmp_path / "thesis.tex").write_text("the only copy", encoding="utf-8")
    with pytest.raises(ValueError, match="holds other files"):
        ask(tmp_path)
    ask(tmp_path / "out", seeds=(0,))
    with pytest.raises(ValueError, match="holds an isolation with another horizon"):
        ask(tmp_path / "out", seeds=(0,), steps=2000)


@pytest.mark.parametrize(
    ("seconds", "steps", "passed", "says"),
    [
        (2.0, None, 2.5, "the budget of 2 seconds was spent"),
        (None, 60, 2.5, "the budget of 60 steps of training was spent"),
        (2.0, 60, 1.0, "the budget of 60 steps of training was spent"),
        (2.0, 60, 2.5, "the budget of 2 seconds was spent"),
    ],
)
def test_what_a_budget_cut_off_is_not_called_a_finding(seconds, steps, passed, says):
    """Emulations that were never tried do not fail alike, nor otherwise."""
    settings = SimpleNamespace(budget_seconds=seconds, budget_steps=steps)
    found = Investigation.__new__(Investigation)
    found.ladder = SimpleNamespace(settings=settings, seconds=passed)
    found.base, found.rescues, found.not_tested = None, [], []
    found.tiling()
    assert found.not_tested.pop() == ("(b) tiling", "no emulation fails alike")
    found.not_tested.append(("emulation", found.budget_text()))
    found.tiling()
    found.operations()
    found.bits()
    assert found.not_tested[1:] == [(x, says) for x in ("(b) tiling", "(d) operations", "(f) bits")]


def test_a_rung_is_shown_by_the_seed_that_got_least_far() -> None:
    def run(seed: int, outcome: Outcome, failed_at: int | None, reason: str) -> RungRun:
        return RungRun("r", seed, outcome, reason, failed_at, 9, 9, 1.0, 0.0, {}, 0.0, "")

    runs = {
        0: run(0, "survived", None, "calm"),
        1: run(1, "failed", 300, "late"),
        2: run(2, "failed", 100, "early"),
        3: run(3, "drifting", None, "wanders"),
    }
    rung = climb.Rung("r", "which", "what", "BF16_FLASH2", runs)
    assert worst(rung).reason == "early"
    del runs[1], runs[2]
    assert worst(rung).reason == "wanders"
