"""The demo: what it says follows from what it measured, and what it writes can be read, whenever it
was stopped.
"""

import functools
import json
import math

import pytest
from tests.report.markup import Page, problems

from halfulp import cli
from halfulp.audit import Case, Shape
from halfulp.audit import run as audit_run
from halfulp.audit.inputs import read_captured
from halfulp.experiments import demo
from halfulp.experiments.audits import Job, audit_all, choose_targets
from halfulp.experiments.demo_findings import audit_finding, failure_finding, grouped
from halfulp.experiments.failure import FailureRun
from halfulp.runs.folder import read_json
from halfulp.runs.machine import describe_machine, describe_versions
from halfulp.training.config import Language, RunConfig


def run(name, outcome, seed=0, loss=(1.0, 1e-5, 1e-3), score=110.0, broke_at=None):
    scores = (0.0, score / 2, score)
    return FailureRun(
        name,
        seed,
        (1, 2, 3),
        tuple(loss),
        *[scores] * 5,
        broke_at,
        outcome,
        "by decree",
    )


def runs(**outcomes):
    return {
        name: [run(name, outcome, seed) for seed, outcome in enumerate(each)]
        for name, each in outcomes.items()
    }


def test_the_failure_is_told_with_its_figures():
    said = failure_finding(
        runs(flash=["failed", "failed"], math=["survived"] * 2, fp32=["survived"] * 2), "flash"
    )
    assert (
        said
        == "flash ruins the training on all of 2 seeds: its loss climbs 100-fold from its lowest,"
        " to 1.0e-3, while the mean score runs to +110; on the same data, math and fp32 survive."
    )


@pytest.mark.parametrize(
    ("outcomes", "part"),
    [
        (
            {"flash": ["survived"], "math": ["survived"]},
            "did not ruin this training on any of 1 seed; math survives.",
        ),
        (
            {"flash": ["drifting", "survived"], "math": ["failed", "survived"]},
            "flash did not ruin this training",
        ),
        ({"flash": ["failed", "survived"], "math": ["failed", "failed"]}, "on 1 of 2 seeds"),
        (
            {"flash": ["failed", "failed"], "math": ["survived", "failed"]},
            "on the same data, math fails.",
        ),
    ],
)
def test_the_sentence_follows_the_outcome(outcomes, part):
    assert part in failure_finding(runs(**outcomes), "flash")


def test_a_run_that_broke_is_told_by_its_step():
    broken = {
        "flash": [run("flash", "failed", loss=(1.0, 1e-5, math.nan), broke_at=1700)],
        "math": [run("math", "survived")],
    }
    said = failure_finding(broken, "flash")
    assert "no number any more after 1700 steps" in said
    assert "nan" not in said


def test_names_are_grouped_by_outcome():
    outcomes = {"a": "survived", "b": "failed", "c": "survived", "d": "drifting"}
    assert grouped(outcomes) == "a and c survive, d drifts, b fails"


def audited(target, verdict):
    return {"target": target, "verdict": verdict}


def test_verdicts_are_counted_for_kernels_and_for_recipes():
    audits = [
        audited("sdpa", "defect"),
        audited("sdpa:math", "sound"),
        audited("recipe:A", "stock"),
        audited("x", "defect"),
    ]
    assert (
        audit_finding(audits, {"flash_attn": "is not installed"})
        == "Of 3 kernels found here, 1 is sound (sdpa:math), 2 have a defect (sdpa, x); of 1 recipe"
        " emulated, 1 is stock (A); 1 more was skipped."
    )
    assert (
        audit_finding([audited("recipe:A", "error")], {})
        == "Of 1 recipe emulated, 1 could not be audited (A)."
    )


def test_targets_that_are_missing_have_a_reason():
    chosen, skipped = choose_targets()
    assert {"sdpa", "sdpa:math", "recipe:BF16_HALFULP"} <= set(chosen)
    assert set(skipped) >= {"flex:compiled"}
    assert all(skipped.values())
    assert not set(chosen) & set(skipped)
    assert choose_targets(["sdpa:math", "flash_attn"])[0] == ["sdpa:math"]


def test_the_machine_names_itself():
    machine, versions = describe_machine(), describe_versions()
    assert machine["cores"] >= 1
    assert machine["processor"]
    assert {"python", "torch", "halfulp"} <= set(versions)
    json.dumps([machine, versions])


@pytest.fixture
def tiny(monkeypatch):
    """The whole demo, on sizes of a second."""

    def plan(depth, dtype, seed=0, shapes=(), captured=()):
        small = Shape(2, 2, 32, 32, 16)
        files = tuple(Case("captured", Shape(2, 2, 24, 24, 8), 0, dtype, file) for file in captured)
        relations = (
            Case("free_feature", small, seed, dtype),
            Case("free_feature_causal", small, seed, dtype),
        )
        return audit_run.Plan((Case("gaussian", small, seed, dtype), *files), (), relations)

    monkeypatch.setattr(audit_run, "plan", plan)
    # the slowest part, and not what is tested here
    monkeypatch.setattr(audit_run, "reconstructed", lambda *_: None)
    config = functools.partial(
        demo.DemoConfig,
        steps=60,
        workers=1,
        gpt=RunConfig(
            Language(layers=1, heads=2, width=16, context=24, data="english"), batch=2, steps=3
        ),
        targets=("sdpa:math", "recipe:BF16_FLASH2", "flash_attn"),
    )
    monkeypatch.setattr(demo, "DemoConfig", config)


def demo_in(capsys, folder, *arguments):
    code = cli.main(["demo", "--out", str(folder), *arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.usefixtures("tiny")
def test_the_whole_demo(capsys, tmp_path):
    out = tmp_path / "demo"
    code, said, err = demo_in(capsys, out, "--seeds", "2", "--isolation-seeds", "1")
    assert (code, err) == (0, "")
    assert list(tmp_path.iterdir()) == [out]
    assert str(out / "report.html") in said
    record = read_json(out / "run.json")
    assert (record["kind"], record["status"]) == ("demo", "done")
    assert record["config"]["steps"] == 60
    assert record["started"] <= record["ended"]
    for key in ("versions", "git", "machine", "seed", "halfulp"):
        assert key in record
    html = (out / "report.html").read_text(encoding="utf-8")
    assert problems(html) == []
    text = Page(html).text
    for number, act in enumerate(record["acts"], 1):
        assert act["finding"] in " ".join(text.split())
        assert f"{number} {act['title']}" in said
        assert " ".join(act["finding"].split()) in " ".join(said.split())
        assert read_json(out / f"{act['name']}.json")["finding"] == act["finding"]
    assert "-4.71875" in text
    assert "flash_attn is not installed" in text or "flash_attn" in record["acts"][2]["finding"]
    assert "halfulp demo --seeds 2 --isolation-seeds 1" in text
    assert (
        read_json(out / "isolation" / "isolation.json")["verdict"] == record["acts"][1]["finding"]
    )
    assert (out / "failure.svg").read_text(encoding="utf-8").startswith("<svg ")
    captured = read_captured(str(out / "tensors" / "gpt.safetensors"))
    assert captured.query.shape == (2, 2, 24, 8)
    audits = read_json(out / "audit.json")["audits"]
    assert html.count("<svg") == 4 + len(audits), "of the failing run, and one an audit"
    files = {case["file"] for audit in audits for case in audit["cases"] if case["file"]}
    assert files == {str((out / "tensors" / "gpt.safetensors").resolve())}, (
        "named by where it lies in the end"
    )


@pytest.mark.usefixtures("tiny")
def test_a_stopped_demo_can_be_read(capsys, tmp_path, monkeypatch):
    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "audit_all", stopped)
    out = tmp_path / "demo"
    code, said, err = demo_in(capsys, out, "--seeds", "1")
    assert code == 130
    assert err == f"halfulp: interrupted; what was measured lies in {out}\n"
    assert "Traceback" not in said + err
    record = read_json(out / "run.json")
    assert (record["status"], len(record["acts"])) == ("interrupted", 2)
    html = (out / "report.html").read_text(encoding="utf-8")
    assert problems(html) == []
    assert "This run was interrupted after 2 of its acts" in Page(html).text


@pytest.mark.usefixtures("tiny")
def test_a_demo_repeats_itself_and_one_that_is_stopped_replaces_no_whole_one(
    capsys, tmp_path, monkeypatch
):
    out = tmp_path / "demo"
    code, said, _ = demo_in(capsys, out, "--seeds", "1", "--json", "-")
    assert (code, json.loads(said)["status"]) == (0, "done")
    before = (out / "report.html").read_bytes()

    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "audit_all", stopped)
    code, _, err = demo_in(capsys, out, "--seeds", "1")
    assert code == 130
    assert "demo.partial" in err
    assert (out / "report.html").read_bytes() == before
    (partial,) = tmp_path.glob("demo.partial-*")
    assert f"lies in {partial}\n" in err
    assert read_json(partial / "run.json")["status"] == "interrupted"
    first, second = (read_json(folder / "failure.json") for folder in (out, partial))
    assert first["runs"] == second["runs"]
    assert first["figures"] == second["figures"]


@pytest.mark.usefixtures("tiny")
def test_a_machine_without_the_flash_kernel_says_so(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "flash_missing", lambda: "No available kernel.")
    out = tmp_path / "demo"
    assert demo_in(capsys, out, "--seeds", "1")[0] == 0
    act = read_json(out / "failure.json")
    assert "PyTorch's bf16 flash kernel does not run here (No available kernel.)" in act["text"][-1]
    assert {run["attention"] for run in act["runs"]} == {
        "stock, emulated",
        "PyTorch math",
        "PyTorch fp32",
        "halfulp",
    }
    assert act["finding"].startswith("stock, emulated ")


def test_flash_attention_is_found_or_explained():
    assert demo.flash_missing() is None or demo.flash_missing()


@pytest.mark.parametrize(
    "name", ["seeds", "isolation_seeds", "steps", "isolation_steps", "workers"]
)
def test_a_config_of_nothing_is_refused(name):
    with pytest.raises(ValueError, match=f"{name}=0: accepted is an integer of at least 1"):
        demo.DemoConfig(**{name: 0})


@pytest.mark.usefixtures("tiny")
def test_audits_come_back_in_the_order_of_the_jobs():
    names = ["recipe:BF16_FLASH2", "sdpa:math"]
    told = []
    jobs = [Job(name, (), (), 0) for name in names]
    found = audit_all(jobs, 1, lambda fraction, _: told.append(fraction))
    assert [audit["target"] for audit in found] == names
    assert told == sorted(told)
    assert told[-1] == 1
