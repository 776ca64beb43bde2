"""`halfulp diff RUN RUN`: settings, curves, weights in context, and one pass of both models."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from halfulp.cli import main
from halfulp.diff.run_sides import RunSide
from halfulp.diff.two_runs import diff_runs
from halfulp.training.checkpoint import load_weights, model_tensors
from halfulp.training.trust import trusted

MODEL = """
import torch
from torch import nn


print("imported")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(13, 16), nn.LayerNorm(16), nn.Linear(16, 13)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        return self.head(self.norm(x) + x)


def loss(model, batch):
    tokens = batch["input_ids"]
    return nn.functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def make(seed, device):
    model = Net()
    torch.nn.init.normal_(model.head.weight)
    start = torch.arange(6)[:, None] + torch.arange(8)
    batch = lambda step: {"input_ids": (start + step) % 13}
    return model, torch.optim.SGD(model.parameters(), 0.5), batch, loss


def scheduled(seed, device):
    model, _, batch, loss = make(seed, device)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    return model, (optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)), batch, loss
"""
PARTS = ("--set", "optimizer.clip=0.3", "--set", "accumulation=2")


def train(*line):
    assert main(["train", *line, "--set", "metrics_every=1", "--set", "checkpoint_every=2"]) == 0


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    (folder / "my.py").write_text(MODEL)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for out, more in (
            ("A", ()),
            ("again", ()),
            ("bf16", ("--set", "autocast=bf16")),
            ("seed", ("--seed", "1")),
        ):
            train("my.py:make", "--steps", "4", "--out", out, *more)
        real = ("my.py:scheduled", "--steps", "6", *PARTS)
        train(*real, "--out", "real")
        train(*real, "--out", "half", "--set", "autocast=fp16")
        train(*real, "--out", "parts", "--set", "accumulation=3")
        train("seconds", "--steps", "4", "--out", "flash")
        train("seconds", "--steps", "4", "--out", "math", "--attention", "sdpa:math")
        train("seconds", "--steps", "4", "--out", "slow", "--set", "optimizer.learning_rate=5e-4")
        train("seconds", "--steps", "4", "--out", "e8m2", "--attention", "BF16_FLASH2[out=e8m2]")
    return folder


@pytest.fixture(autouse=True)
def here(runs, monkeypatch):
    monkeypatch.chdir(runs)


def test_a_run_made_again_is_identical_and_nothing_is_imported(capsys):
    capsys.readouterr()
    assert main(["diff", "A", "again", "--json", "same.json"]) == 0
    out = capsys.readouterr().out
    assert "are identical" in out
    assert "imported" not in out
    assert "accepted with --trust" in " ".join(out.split())
    found = json.loads(Path("same.json").read_text())
    assert found["verdict"] == "identical"
    assert all(x["first"] is None for x in found["curves"])
    assert [x["step"] for x in found["drifts"]] == [2, 4]
    assert found["own_weights"] is found["same_weights"] is None
    shutil.copytree("A", "two")
    record = Path("two/run.json")
    assert '"processes": 1' in record.read_text()
    record.write_text(record.read_text().replace('"processes": 1', '"processes": 2'))
    main(["diff", "A", "two"])
    assert "Versions and machine: processes: 1 → 2" in " ".join(capsys.readouterr().out.split())


def test_curves_and_weights_are_measured_from_what_lies_there(runs):
    found = diff_runs(runs / "A", runs / "bf16", beside=[runs / "seed"], workload="my.py:make")
    assert found.settings == ("autocast: none → bf16",)
    assert found.verdict == "beyond rounding"
    assert "coarser of both formats explains it" in found.why
    rows = [
        [json.loads(x) for x in (runs / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("A", "bf16")
    ]
    loss = next(x for x in found.curves if x.name == "loss")
    pairs = [(a["step"], a["loss"], b["loss"]) for a, b in zip(*rows, strict=True)]
    assert loss.first == next(step for step, a, b in pairs if a != b)
    assert loss.beyond == next(
        (step for step, a, b in pairs if abs(b - a) > found.tolerance * abs(a)), None
    )
    assert loss.last == pairs[-1]
    # distances, by hand
    a, b, c = (
        torch.cat([x.flatten().double() for _, x in sorted(load_weights(place).items())])
        for place in (runs / name / "checkpoints" / "step-4" for name in ("A", "bf16", "seed"))
    )
    last = found.drifts[-1]
    assert last.gap.norm == pytest.approx(float((b - a).norm()))
    assert last.gap.largest == float((b - a).abs().max())
    assert last.gap.norm == pytest.approx(sum(x.gap**2 for x in last.modules) ** 0.5)
    assert last.travelled == pytest.approx(sum(x.travelled**2 for x in last.modules) ** 0.5)
    ((label, scale),) = found.beside.items()
    assert "seed: 0 → 1" in label
    assert scale.norm == pytest.approx(float((c - a).norm()))
    assert 0 < last.gap.norm < 0.1 * scale.norm
    # where the weights drifted, operations differ beyond what their formats explain
    assert found.same_weights.p_formats > 0.05
    assert found.own_weights.first.place == "embed embedding"
    assert found.own_weights.what == "log-probabilities"


@pytest.mark.parametrize("name", ["real", "half"])
def test_steps_after_a_checkpoint_are_those_of_the_run(runs, name):
    side = RunSide.of(runs / name)
    side = RunSide.of(runs / name, trusted(side.config, runs / name, True, None))
    setting = side.setting(side.weights(2), name)
    step = side.steps_from(side.checkpoint(2))(setting.model)
    for k, batch in enumerate(side.batches(2, 4)):
        step.gradients(setting, batch, lambda _: None, 0)
        step.make(setting.model, k)
    made = model_tensors(setting.model)
    assert all(torch.equal(x, made[at]) for at, x in side.weights(6).items())


def test_runs_are_trained_on_from_a_checkpoint(runs, capsys):
    line = ["--workload", "my.py:scheduled", "--at", "2", "--steps", "2", "--json", "steps.json"]
    assert main(["diff", "real", "parts", *line, "--html", "steps.html"]) == 0
    assert "Both sides trained by AdamW" in (runs / "steps.html").read_text()
    said = " ".join(capsys.readouterr().out.split())
    assert "accumulation: 2 → 3" in said
    found = json.loads(Path("steps.json").read_text())
    assert found["verdict"] == "within rounding"
    after = found["same_weights"]["after"]
    assert after["optimizer"] == "AdamW"
    assert [x["step"] for x in after["steps"]] == [0, 1, 2]
    rows = [json.loads(x) for x in Path("real/metrics.jsonl").read_text().splitlines()]
    first = after["steps"][0]["losses"][0]  # of two stretches
    assert min(x["loss"] for x in rows[2:]) <= first <= max(x["loss"] for x in rows[2:])


def test_kernels_of_one_precision_are_within_rounding_and_another_is_named(runs):
    sound = diff_runs(runs / "flash", runs / "math")
    assert sound.verdict == "within rounding"
    assert "may still ruin a run" in " ".join(str(sound).split())
    assert sound.same_weights.culprit == "attend attention"
    assert sound.same_weights.sequences == 16  # one fixed batch counts once
    planted = diff_runs(runs / "flash", runs / "e8m2")
    assert planted.verdict == "beyond rounding"
    assert planted.same_weights.first.place == "attend scaled_dot_product_attention"
    assert planted.same_weights.groups[0].into["outputs"][0] == pytest.approx(1, abs=1e-6)


def test_other_settings_are_told_and_scaled(runs, capsys):
    found = diff_runs(runs / "flash", runs / "slow")
    assert found.settings == ("optimizer.learning_rate: 0.001 → 0.0005",)
    assert found.verdict == "beyond rounding"
    assert found.same_weights is None
    (label,) = found.beside
    assert "two initializations, seeds 0 and 1" in label
    assert main(["diff", "flash", "slow", "--html", "page.html"]) == 1
    assert "they were asked for other things" in " ".join(capsys.readouterr().out.split())
    page = (runs / "page.html").read_text()
    assert "0.0005" in page
    assert "attend scaled_dot_product_attention" not in page  # equal operations


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["A", "flash"], "a run of UserModel and one of LayerTask; accepted are runs of one model"),
        (["A", "my.py:make"], "a run folder and b='my.py:make' a setting"),
        (["A", "bf16", "--at", "3"], "at=3: accepted are checkpoints that both runs have, [2, 4]"),
        (["my.py:make", "pieces=1", "--trust"], "trust=True: accepted with two run folders"),
        (
            ["flash", "math", "--workload", "my.py:make"],
            "accepted for a run of a model of your",
        ),
        (["A", "bf16", "--beside", "none"], "there is no such folder"),
    ],
)
def test_what_cannot_be_compared(line, message, capsys):
    assert main(["diff", *line]) == 2
    assert message in capsys.readouterr().err
