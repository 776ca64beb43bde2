"""Kernels and recipes in the place of other people's operations: what they compute is what runs,
forward and backward, and what they do not define is refused.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from halfulp import cli
from halfulp.interpose import Swap, interpose
from halfulp.isolate.isolation import isolate
from halfulp.training.loop import train
from halfulp.training.operations import OperationPlan
from halfulp.training.run_json import config_as_dict, config_from_dict
from halfulp.training.user_model import user_run
from tests.interpose.test_interpose import distance, language_model, same, step

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


def with_kernel(model, into, *kinds):
    swap = Swap(into, kinds=kinds)
    with interpose(model, swaps=[swap]):
        found = step(model)
    return found, swap.run.stood


@pytest.mark.parametrize(
    ("kind", "into", "kinds", "calls"),
    [
        ("gpt2", "recipe:floor", ("linear", "norm", "embedding", "cross_entropy"), 9 + 5 + 2 + 1),
        ("Llama", "recipe:stock", ("linear", "norm", "rotary", "cross_entropy"), 15 + 5 + 2 + 1),
        ("Llama", "complex", ("rotary",), 2),
        ("gpt2", "upcast", ("linear", "embedding", "cross_entropy"), 12),
        ("Mixtral", "upcast", ("softmax",), 2),
    ],
)
def test_in_fp32_they_compute_what_the_model_does(kind, into, kinds, calls):
    model = language_model(kind)
    own = step(model)
    found, stood = with_kernel(model, into, *kinds)
    assert stood == calls
    assert max(map(distance, found, own)) < 2e-6
    assert same(step(model), own), "nothing is left in the model"


def test_a_recipe_has_the_bits_of_the_kernel_that_it_is_of():
    """Of transformers' own RMSNorm in bf16, gradients included; the floor is another, and nearer to
    fp64.
    """
    model = language_model("Llama", torch.bfloat16)
    own = step(model)
    assert same(with_kernel(model, "recipe:stock", "norm")[0], own)
    floor = with_kernel(model, "recipe:floor", "norm")[0]
    assert not same(floor, own)


class Calls(nn.Module):
    """Every way in which a definition's operation may be called."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8, elementwise_affine=False)
        self.rms = nn.RMSNorm(8, eps=1e-3)
        self.table = nn.Embedding(5, 8, padding_idx=-1)
        self.up = nn.Linear(8, 6, bias=True)

    def forward(self, index):
        x = self.up(self.rms(self.norm(self.table(index))))
        weights = torch.softmax(x, 1) + x.softmax(-1, torch.float32).to(x.dtype)
        each = functional.cross_entropy(
            (x * weights).movedim(-1, 1), index % 6, reduction="none", label_smoothing=0.1
        )
        return each.sum() + functional.cross_entropy(
            x.flatten(0, 1), index.flatten() % 6, ignore_index=2, reduction="sum"
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("into", ["recipe:floor", "torch"])
def test_calls_of_every_form_are_read(into, dtype):
    torch.manual_seed(0)
    model, index = Calls().to(dtype), torch.randint(5, (2, 3, 4))[0]
    kinds = ("linear", "norm", "softmax", "embedding", "cross_entropy")

    def run(*swaps):
        model.zero_grad()
        with interpose(model, swaps=swaps):
            loss = model(index)
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

    own, swap = run(), Swap(into, kinds=kinds)
    found = run(swap)
    assert swap.run.stood == 8
    assert [x.dtype for x in found] == [x.dtype for x in own]
    assert max(map(distance, found, own)) < (1e-6 if dtype == torch.float32 else 0.02)


@pytest.mark.parametrize(
    ("into", "kinds", "says"),
    [
        ("recipe:stok", ("norm",), r"of rms_norm accepted are .*recipe:stock.*; did you mean"),
        ("recipe:stock", ("activation",), "no kernel can stand for operations of kind activation"),
        ("upcast", ("norm", "linear"), "of rms_norm accepted are torch, llama, gemma"),
        ("halfulp", ("softmax",), "of softmax accepted are torch, upcast, recipe:stock"),
    ],
)
def test_what_has_no_kernel_is_one_line(into, kinds, says):
    with pytest.raises(ValueError, match=says) as caught:
        Swap(into, kinds=kinds)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("call", "into", "says"),
    [
        (lambda x: functional.log_softmax(x, -1), "upcast", "is log_softmax, which has no def"),
        (lambda x: functional.group_norm(x, 2), "torch", "is group_norm, which has no definition"),
        (lambda x: functional.layer_norm(x, x.shape), "torch", "normalizes over"),
        (lambda x: functional.rms_norm(x, (8,)), "eager", r"rms_norm has no eager"),
        (
            lambda x: functional.cross_entropy(x, torch.tensor([0, 1]), x[0].detach()),
            "upcast",
            "has weight, which the definition has not",
        ),
    ],
)
def test_calls_outside_of_the_definition_are_refused(call, into, says):
    kinds = {"upcast": ("softmax", "cross_entropy")}.get(into, ("norm",))
    x = torch.randn(2, 8)
    swaps = [Swap(into, kinds=kinds)]
    with interpose(nn.Module(), swaps=swaps), pytest.raises(ValueError, match=says):
        call(x)


def test_scaled_angles_and_pieces_alone_are_refused(tmp_path):
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    scaled = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    config = transformers.LlamaConfig(
        vocab_size=64, num_attention_heads=2, rope_parameters=scaled, **sizes
    )
    model = transformers.LlamaForCausalLM(config)
    with pytest.raises(ValueError, match="its angles or its positions are not the definition's"):
        with_kernel(model, "complex", "rotary")
    swap = Swap("complex", kinds=("rotary",), paths=("model.rotary_emb",))
    with interpose(model, swaps=[swap]):
        step(model)
    with pytest.raises(ValueError, match="no whole operation that it can stand for"):
        swap.run.check()


MODEL = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

def make(seed, device):
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=16, bos_token_id=0, eos_token_id=0,
    ))
    adam = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return model, adam, lambda step: dict.fromkeys(
        ("input_ids", "labels"), torch.arange(step, step + 32).view(4, 8) % 13)

def broken(input, normalized_shape, weight, eps):
    y = torch.nn.functional.rms_norm(input, normalized_shape, weight, eps)
    return (y * 1e5).half().to(y.dtype) / 1e5
"""


def test_a_kernel_of_the_users_runs_where_it_is_put_and_is_named(tmp_path, capsys):
    file, folder = tmp_path / "mine.py", tmp_path / "run"
    file.write_text(MODEL)
    plan = f"norm in =model.layers.1.input_layernorm: {file}:broken"
    options = ["--steps", "3", "--set", "metrics_every=1", "--set", f"operations={plan}"]
    assert cli.main(["train", f"{file}:make", "--out", str(folder), *options]) == 1
    config = config_from_dict(json.loads((folder / "run.json").read_text())["config"])
    file.write_text("raise SystemExit('it was imported')\n")
    assert config_from_dict(config_as_dict(config)) == config, "and reading it imports nothing"
    assert cli.main(["train", "--resume", str(folder)]) == 2
    assert repr(f"{file}:broken") in capsys.readouterr().err
    file.write_text(MODEL)
    run = user_run(f"{file}:make", steps=3, metrics_every=1, operations=OperationPlan.of(plan))
    found = isolate(run, out=tmp_path / "out", seeds=(0,), workers=1)
    assert found.sites == ("norm in model.layers.1.input_layernorm",)
    assert found.found
    unlike = OperationPlan.of(f"linear: {file}:broken")
    with pytest.raises(ValueError, match=r"takes \(input, normalized_shape.*is linear\(input, w"):
        train(replace(run, operations=unlike))
