"""The optimizer's step in another arithmetic: the bits of master weights, resumed exactly, updates
that narrow weights swallow, and that isolation names them and nothing else.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import halfulp
from halfulp.isolate.isolation import isolate
from halfulp.isolate.sites import layout_of
from halfulp.recipes import hash_seed
from halfulp.training.checkpoint import load_checkpoint
from halfulp.training.determinism import seed_generators
from halfulp.training.loop import train
from halfulp.training.operations import OperationPlan
from halfulp.training.optimizer_arithmetic import OptimizerArithmetic
from halfulp.training.user_model import user_run

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
MODEL = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel

def make(seed, device, rate=3e-3, kind=torch.optim.AdamW, dtype=torch.bfloat16):
    model = GPT2LMHeadModel(GPT2Config(
        n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=16, bos_token_id=0,
        eos_token_id=0, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
        loss_type="ForCausalLMLoss",
    )).to(dtype)
    def batch(step):
        words = (torch.arange(99) ** 2 % 29)[torch.randint(80, (4, 1)) + torch.arange(12)]
        return {"input_ids": words, "labels": words}
    return model, kind(model.parameters(), lr=rate), batch

def small(seed, device): return make(seed, device, 3e-4)
def exact(seed, device): return make(seed, device, dtype=torch.float32)
def adagrad(seed, device): return make(seed, device, kind=torch.optim.Adagrad)
def broken(seed, device):
    model, adam, batch = make(seed, device, 1e-4)
    layer = model.transformer.h[0].mlp.c_fc
    stock = type(layer)
    def forward(self, x):
        return (stock.forward(self, x) * 1e6).half().to(x.dtype) / 1e6
    layer.__class__ = type("Narrow", (stock,), {"forward": forward})
    return model, adam, batch
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("optimizer") / "mine.py"
    path.write_text(MODEL)
    return path


def run_of(file, name, *plan, **fields):
    fields = {"steps": 6, "metrics_every": 1} | fields
    return user_run(f"{file}:{name}", operations=OperationPlan.of(*plan), **fields)


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Adagrad", "Adafactor"])
def test_fp32_steps_are_those_of_master_weights(kind):
    """Held against the same optimizer on fp32 weights of its own."""
    torch.manual_seed(0)
    start = torch.randn(40)
    narrow = nn.Parameter(start.bfloat16())
    master = nn.Parameter(narrow.detach().float())
    ours, theirs = (getattr(torch.optim, kind)([p], lr=1e-3) for p in (narrow, master))
    arithmetic = OptimizerArithmetic(ours, {"p": narrow}, {"p": "fp32"}, 0)
    arithmetic.attach()
    storage = narrow.data_ptr()
    for number in range(1, 6):
        gradient = torch.randn(40).bfloat16()
        narrow.grad, master.grad = gradient, gradient.float()
        ours.step()
        theirs.step()
        if number == 3:  # somebody changes weights between two steps
            with torch.no_grad():
                narrow[:5] *= 2
                master[:5] = narrow[:5]
        assert torch.equal(narrow.data, master.data.bfloat16())
        assert narrow.grad is gradient
    assert torch.equal(arithmetic.masters["p"], master.data)
    assert narrow.data_ptr() == storage, "what shares its storage sees the step"


def test_a_loop_of_ones_own_makes_the_steps_of_the_lab(file):
    space = {}
    exec(compile(MODEL, "mine.py", "exec"), space)
    torch.manual_seed(0)
    with torch.random.fork_rng():
        seed_generators(torch.device("cpu"), 0, 0, 0)
        model, adam, batch = space["small"](0, "cpu")
    made = []
    with halfulp.planned(model, "optimizer: fp32", optimizer=adam):
        for step in range(6):
            with torch.random.fork_rng():
                torch.manual_seed(hash_seed(0, f"batch {step}", 0))
                given = batch(step)
            loss = model(**given).loss
            loss.backward()
            adam.step()
            adam.zero_grad()
            made.append(loss.item())
    assert tuple(made) == train(run_of(file, "small", "optimizer: fp32")).curve("loss")
    assert tuple(made) != train(run_of(file, "small")).curve("loss")
    assert not adam._optimizer_step_pre_hooks


def test_stochastic_rounding_keeps_on_average_what_rounding_to_nearest_loses():
    moved = {}
    for into in ("own", "stochastic", "fp64"):
        p = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
        sgd = torch.optim.SGD([p], lr=1.0)
        OptimizerArithmetic(sgd, {"p": p}, {"p": into}, 0).attach()
        for _ in range(8):
            p.grad = torch.full_like(p, -(2.0**-10))  # an eighth of a unit in the last place
            sgd.step()
        moved[into] = (p.data.double() - 1).mean().item() * 2**10
    assert moved["own"] == 0
    assert moved["fp64"] == 8
    assert moved["stochastic"] == pytest.approx(8, abs=5 * 8 * (7 / 8 / 4096) ** 0.5)


def test_a_format_is_a_planted_fault_and_kernels_stand_for_adamw(file, tmp_path):
    curves = {
        plan: train(run_of(file, "exact", *([plan] if plan else []))).curve("loss")
        for plan in ("", "optimizer: torch", "optimizer: by_hand", "optimizer: e8m2")
    }
    assert curves["optimizer: torch"] == curves[""]
    assert curves["optimizer: by_hand"] == pytest.approx(curves[""], rel=1e-5)
    assert curves["optimizer: e8m2"] != pytest.approx(curves[""], rel=1e-3)
    mine = tmp_path / "kernel.py"
    mine.write_text("from halfulp.operations.adamw_step.targets import by_hand as step\n")
    own = train(run_of(file, "exact", f"optimizer: {mine}:step")).curve("loss")
    assert own == curves["optimizer: by_hand"]


@pytest.mark.parametrize("plan", ["optimizer: fp32", "all: fp64", "optimizer: stochastic"])
def test_a_run_goes_on_to_the_same_bits(file, tmp_path, plan):
    config = run_of(file, "make", plan)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(config, whole)
    train(config, cut, deadline=0.0)
    train(config, cut, resume=True)
    ends = [load_checkpoint(one / "checkpoints" / "step-6") for one in (whole, cut)]
    for kind in ("model", "optimizer"):
        one, other = (getattr(end, kind) for end in ends)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one), kind
    masters = [name for name in ends[0].optimizer if name.endswith("/(master)")]
    assert bool(masters) == (plan != "optimizer: stochastic")


@pytest.mark.parametrize(
    ("name", "plan", "says"),
    [
        ("make", "optimizer: fp23", "of the optimizer accepted are fp32, fp64, stochastic"),
        ("make", "optimizer: recipe:stock", "accepted is 'fp32'"),
        ("make", "optimizer in transformer.g: fp32", "the model makes no such operation"),
        ("adagrad", "optimizer: by_hand", "the optimizer is Adagrad; a kernel is accepted"),
        ("make", "linear: stochastic", "of linear accepted are"),
    ],
)
def test_what_it_cannot_be_put_into_is_one_line(file, name, plan, says):
    with pytest.raises(ValueError, match="operations=") as caught:
        train(run_of(file, name, plan))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_swallowed_updates_are_named_and_nothing_else_is(file, tmp_path):
    lost = isolate(run_of(file, "make", steps=40), out=tmp_path / "lost", seeds=(0,), workers=1)
    assert lost.found
    assert all(site.startswith("optimizer") for site in lost.sites)
    assert "operations=optimizer" in lost.fix
    other = isolate(run_of(file, "broken"), out=tmp_path / "other", seeds=(0,), workers=1)
    assert other.sites == ("cast in transformer.h.0.mlp.c_fc",)
    sound = isolate(run_of(file, "small"), out=tmp_path / "sound", seeds=(0,), workers=1)
    assert "does not fail" in sound.verdict
    config = run_of(file, "exact", autocast="bf16")
    assert not layout_of(config).steps, "fp32 weights lose nothing that fp32 would keep"
    planted = replace(config, operations=OperationPlan.of("optimizer in transformer.wte: e8m2"))
    assert layout_of(planted).steps == (("transformer.wte", "optimizer"),)
