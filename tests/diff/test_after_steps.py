"""Both sides trained for some steps: gaps as trained by hand, silence on equal sides."""

import copy
import json

import pytest
import torch
from torch import nn

from halfulp.cli import main
from halfulp.diff import Setting, diff
from halfulp.interpose import Swap
from tests.diff import planted

WIDTH = 32


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.down(self.up(x).tanh())


def shrunk(operation):
    return operation.function(*operation.args, **operation.kwargs) * (1 - 2.0**-6)


def momentum(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


@pytest.fixture(scope="module")
def made():
    torch.manual_seed(0)
    return Net(), [torch.randn(6, WIDTH) for _ in range(8)]


def by_hand(model, batches, share):
    """Weights after each step of a net whose second product is so much smaller."""
    model = copy.deepcopy(model)
    optimizer, scheduler = momentum(model)
    found = []
    for batch in batches:
        found.append(torch.cat([x.detach().flatten() for x in model.parameters()]).double())
        optimizer.zero_grad()
        out = model.down(model.up(batch).tanh()) * share
        out.square().mean().backward()
        optimizer.step()
        scheduler.step()
    return found


def test_gaps_are_those_of_training_by_hand(made):
    model, batches = made
    b = Setting(model, swaps=(Swap(shrunk, paths=("down",)),))
    found = diff(model, b, batches, steps=3, optimizer=momentum).after
    assert found.optimizer == "SGD"
    assert [x.step for x in found.steps] == [0, 1, 2, 3]
    ways, norms = [], []
    for stretch in (batches[:4], batches[4:]):
        mine, theirs = (by_hand(model, stretch, share) for share in (1, 1 - 2.0**-6))
        ways.append(
            [
                float((y - x).norm() / (x - mine[0]).norm())
                for x, y in zip(mine, theirs, strict=True)
            ][1:]
        )
        norms.append([float((y - x).norm()) for x, y in zip(mine, theirs, strict=True)])
    expected = torch.tensor(ways).mean(0)
    assert [x.way for x in found.steps[1:]] == pytest.approx(expected.tolist(), rel=1e-4)
    spread = torch.tensor(ways)[:, -1].std() / 2**0.5
    assert found.steps[-1].way_error == pytest.approx(float(spread), rel=1e-2)
    # 2 sides × (1 − share), the product and its gradient, and nothing else at the start
    assert found.steps[0].outputs > 0
    assert found.steps[0].gradient == pytest.approx(1 - (1 - 2.0**-6) ** 2, rel=1e-3)
    assert found.p < 1e-6
    assert {x.first for x in found.modules} == {1}
    (group,) = found.groups
    assert group.name == "down"
    for way in (group.into, group.out):
        assert all(share == pytest.approx(1, abs=1e-4) for share, _ in way.values())
    assert found.growth[0] > 1


def test_equal_sides_are_not_accused(made):
    model, batches = made
    same = diff(model, copy.deepcopy(model), batches, steps=2, optimizer=momentum)
    assert same.exit_code == 0
    assert same.after.steps[-1].way == 0
    assert "After 2 steps of SGD: not a bit differs." in str(same)
    pieces = diff(model, Setting(model, pieces=2), batches, steps=3, optimizer=momentum)
    assert pieces.after.steps[-1].way > 0
    assert pieces.exit_code == 0
    assert all(x.first is None for x in pieces.after.modules)


def test_what_carries_the_gap_after_steps_of_adamw():
    model = planted.language_model("Llama", torch.float32)
    fault = planted.epsilon(model)
    other = Setting(fault.model, attention="sdpa:math")
    found = diff(
        model, other, planted.batches(6), steps=2, most=4,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    )  # fmt: skip
    first, *others = found.after.groups
    assert first.name == "model.layers.*.post_attention_layernorm"
    assert first.out["weights"][0] > 0.99
    assert all(x.out["weights"][0] < 0.01 for x in others)
    assert found.after.p < 0.01


def test_the_command_trains_with_the_functions_own_optimizer(tmp_path, monkeypatch, capsys):
    (tmp_path / "my.py").write_text("""
import torch
from torch import nn


def make(seed, device):
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(sgd, 2)
    return model, (sgd, schedule), lambda step: torch.randn(6, 16, generator=draw(step))


def draw(step):
    return torch.Generator().manual_seed(step)


def bare():
    return nn.Linear(16, 4), [torch.ones(6, 16)]
""")
    monkeypatch.chdir(tmp_path)
    main(
        [
            "diff",
            "my.py:make",
            "autocast=bf16",
            "--steps",
            "3",
            "--json",
            "d.json",
            "--html",
            "d.html",
        ]
    )
    said = " ".join(capsys.readouterr().out.split())
    assert "After 3 steps of SGD: within rounding in the outputs" in said
    assert "Both sides trained by SGD" in (tmp_path / "d.html").read_text()
    plain = json.loads((tmp_path / "d.json").read_text())["after"]
    assert plain["formats"] is True
    assert len(plain["steps"]) == 4
    for step in plain["steps"]:  # what random roundings to bf16 make is what rounding to it makes
        assert 0.5 < step["gradient"] / step["gradient_noise"] < 2
    for line, message in (
        (["my.py:bare", "autocast=bf16", "--steps", "2"], "makes no optimizer"),
        (["my.py:make", "autocast=bf16", "--steps", "-1"], "steps=-1: accepted is a whole number"),
    ):
        assert main(["diff", *line]) == 2
        assert message in capsys.readouterr().err


def test_steps_need_an_optimizer(made):
    with pytest.raises(ValueError, match="accepted are both, or neither"):
        diff(*made[:1], *made, steps=2)
