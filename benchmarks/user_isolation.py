"""How often `halfulp isolate` names what was planted in one place of a model that is not halfulp's.

    python benchmarks/user_isolation.py [--families NAME ...] [--places N] [--out DIR] [--json FILE]

Families: GPT-2, Llama, Mixtral, ViT and Bloom of transformers, `torch.nn.TransformerEncoder`, and a
GPT written in one file as nanoGPT is. In each, one module after the other (drawn by seed) computes
its result through a narrower format: first coarse (e4m3 at a scale at which its steps are as large
as the values), and where the run survives that, fp16 at a scale at which it overflows. Then heads
of attention, computed by a kernel that overflows, or, where the model writes attention out (in
`matmul`, "-eager", in `einsum` or `bmm`, and in Bloom, which calls `baddbmm`), by scores that
overflow fp16 in one head; the rotary embedding of one layer; softmax and cross-entropy, computed by
a kernel that overflows; the optimizer's step on weights in bf16, which swallow its updates. Every
run is in bf16 autocast, so that every operation is suspect; isolation is told nothing but the
workload.

A placement counts as named if the verdict has that module (head, operation) and no other. One that
does not make the run fail is counted apart: there is nothing to find. Exit code 1: fewer than nine
of ten were named.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import random
import sys
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from halfulp.isolate.isolation import isolate
from halfulp.isolate.rule import judge_rows, read_curves, rule_for
from halfulp.runs.threads import one_thread
from halfulp.training.attention import AttentionPlan
from halfulp.training.loop import train
from halfulp.training.operations import OperationPlan
from halfulp.training.user_model import user_run

STEPS = 24
SHARE = 0.9
COMMON = '''
import torch
from torch import nn
from torch.nn import functional as F

MODULE, HOW, ROTARY, SHIFTED = {module!r}, {how!r}, {rotary!r}, {shifted!r}
NARROW, RATE = {narrow!r}, {rate!r}

def coarse(y):
    return (y / 16384).to(torch.float8_e4m3fn).to(y.dtype) * 16384

def overflows(y):
    return (y * 2.0**22).half().to(y.dtype) / 2.0**22

narrow = {{"coarse": coarse, "overflows": overflows}}.get(HOW)

def planted(model):
    """The model, one module of which computes its result through a narrower format."""
    if MODULE:
        module = model.get_submodule(MODULE)
        stock = type(module)
        def forward(self, *args, **kwargs):
            out = stock.forward(self, *args, **kwargs)
            if not isinstance(out, tuple):
                return narrow(out)
            return tuple(narrow(y) if y.is_floating_point() else y for y in out)
        module.__class__ = type("Narrow" + stock.__name__, (stock,), {{"forward": forward}})
    return model

def broken(query, key, value, *, is_causal, scale):
    out = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=scale)
    return overflows(out.float()).to(out.dtype)

def broken_softmax(input, dim):
    return overflows(F.softmax(input, dim, dtype=torch.float32)).to(input.dtype)

def broken_cross_entropy(input, target, *, ignore_index, reduction, label_smoothing):
    return overflows(F.cross_entropy(input.float(), target, ignore_index=ignore_index,
                     reduction=reduction, label_smoothing=label_smoothing))

def products(form):
    """Q Kᵀ and P V of [B, H, N, D], written in one of three ways."""
    if form == "einsum":
        return (lambda q, k: torch.einsum("bhqd,bhkd->bhqk", q, k),
                lambda p, v: torch.einsum("bhqk,bhkd->bqhd", p, v).transpose(1, 2))
    if form == "bmm":
        def through(x, y):
            return torch.bmm(x.flatten(0, 1), y.flatten(0, 1)).unflatten(0, x.shape[:2])
        return lambda q, k: through(q, k.mT), through
    return lambda q, k: q @ k.mT, lambda p, v: p @ v

def eager(modeling, form="matmul"):
    """Attention in products whose scores pass through fp16; those of one head have a constant
    added, which softmax takes out again, and which fp16 has not.
    """
    score, average = products(form)
    def eager_attention_forward(module, query, key, value, mask, scaling=None, **_):
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = score(query, key) * (scaling or query.shape[-1] ** -0.5)
        shift = torch.zeros(query.shape[1], 1, 1)
        if SHIFTED and module.layer_idx == SHIFTED[0]:
            shift[SHIFTED[1]] = 7e4
        scores = (scores + shift).half().to(query.dtype)
        if mask is not None:
            scores = scores + mask[..., : key.shape[-2]]
        else:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(hidden, -1e9)
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
        return average(weights, value).transpose(1, 2).contiguous(), weights
    own = modeling.eager_attention_forward
    eager_attention_forward.stock = getattr(own, "stock", own)
    modeling.eager_attention_forward = (
        eager_attention_forward if SHIFTED else eager_attention_forward.stock)

def words(step):
    start = torch.randint(900, (4, 1))
    return (torch.arange(1000) ** 2 % 29)[start + torch.arange(16)]

def language(model):
    if NARROW:
        model = model.to(torch.bfloat16)
    adam = torch.optim.AdamW(model.parameters(), lr=RATE)
    return planted(model), adam, lambda step: {{"input_ids": words(step), "labels": words(step)}}
'''
ROTARY = '''
def turn_one_layer(modeling, model):
    """Rotary embedding of one layer in a narrower format."""
    if ROTARY is None:
        return model
    stock, layer = modeling.apply_rotary_pos_emb, model.model.layers[ROTARY].self_attn
    if hasattr(stock, "turned"):
        stock = stock.turned
    inside = []
    layer.register_forward_pre_hook(lambda *_: inside.append(1))
    layer.register_forward_hook(lambda *_: inside.clear())

    def apply_rotary_pos_emb(*args, **kwargs):
        q, k = stock(*args, **kwargs)
        return (overflows(q), overflows(k)) if inside else (q, k)

    apply_rotary_pos_emb.turned = stock
    modeling.apply_rotary_pos_emb = apply_rotary_pos_emb
    return model
'''
SIZE = "hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4"
TOKENS = "vocab_size=32, max_position_embeddings=32, bos_token_id=0, eos_token_id=0"
FAMILIES = {
    "gpt2": """
from transformers import GPT2Config, GPT2LMHeadModel
def make(seed, device):
    return language(GPT2LMHeadModel(GPT2Config(
        n_layer=2, n_head=4, n_embd=16, vocab_size=32, n_positions=32, bos_token_id=0,
        eos_token_id=0, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, loss_type="ForCausalLMLoss"
    )))
""",
    "llama": f"""
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama
{ROTARY}
def make(seed, device):
    model = LlamaForCausalLM(LlamaConfig({SIZE}, {TOKENS}, num_key_value_heads=2))
    return language(turn_one_layer(modeling_llama, model))
""",
    "mixtral": f"""
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.models.mixtral import modeling_mixtral
{ROTARY}
def make(seed, device):
    model = MixtralForCausalLM(MixtralConfig(
        {SIZE}, {TOKENS}, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2
    ))
    return language(turn_one_layer(modeling_mixtral, model))
""",
    "vit": f"""
from transformers import ViTConfig, ViTForImageClassification
def make(seed, device):
    model = planted(ViTForImageClassification(ViTConfig(
        {SIZE}, image_size=8, patch_size=2, num_channels=1, num_labels=4
    )))
    def batch(step):
        labels = torch.randint(4, (8,))
        pictures = torch.randn(8, 1, 8, 8) * 0.3
        rows = torch.arange(8).view(8, 1)
        return dict(pixel_values=pictures + torch.sin(rows * (1 + labels)).T[:, None, :, None],
                    labels=labels)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), batch
""",
    "encoder": """
class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    def forward(self, input_ids, labels):
        mask = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1])
        logits = self.head(self.layers(self.embed(input_ids), mask, is_causal=True))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
def make(seed, device):
    return language(Encoder())
""",
    "nano": """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.c_attn, self.c_proj = nn.Linear(16, 48), nn.Linear(16, 16)
        self.c_fc, self.c_down = nn.Linear(16, 64), nn.Linear(64, 16)
    def forward(self, x):
        q, k, v = (y.unflatten(-1, (4, 4)).transpose(1, 2)
                   for y in self.c_attn(self.ln_1(x)).split(16, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).flatten(2))
        return x + self.c_down(F.gelu(self.c_fc(self.ln_2(x))))
class Nano(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe, self.ln_f = nn.Embedding(32, 16), nn.Embedding(32, 16), nn.LayerNorm(16)
        self.h = nn.ModuleList(Block() for _ in range(2))
        self.lm_head = nn.Linear(16, 32, bias=False)
    def forward(self, input_ids, labels):
        x = self.wte(input_ids) + self.wpe(torch.arange(input_ids.shape[1]))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
def make(seed, device):
    return language(Nano())
""",
}
WRITTEN = {"gpt2-eager": "matmul", "llama-eager": "matmul", "gpt2-einsum": "einsum"}
WRITTEN |= {"llama-einsum": "einsum", "gpt2-bmm": "bmm", "llama-bmm": "bmm"}
EAGER = {
    name: FAMILIES[name.partition("-")[0]]
    .replace(
        "\ndef make(seed, device):",
        f"\nfrom transformers.models.{name.partition('-')[0]} import"
        f" modeling_{name.partition('-')[0]} as modeling\n"
        f"eager(modeling, {form!r})\ndef make(seed, device):",
    )
    .replace("Config(", 'Config(attn_implementation="eager", ')
    for name, form in WRITTEN.items()
}
EAGER["bloom"] = """
import types
from transformers import BloomConfig, BloomForCausalLM
from transformers.models.bloom import modeling_bloom
inside = []
def softmax(scores, **options):
    shift = torch.zeros(scores.shape[1], 1, 1)
    if SHIFTED and inside and inside[-1] == SHIFTED[0]:
        shift[SHIFTED[1]] = 7e4
    return F.softmax((scores + shift).half().to(scores.dtype), **options)
modeling_bloom.F = types.SimpleNamespace(**(vars(F) | {"softmax": softmax}))
def make(seed, device):
    model = BloomForCausalLM(BloomConfig(
        n_layer=2, n_head=4, hidden_size=16, vocab_size=32, bos_token_id=0, eos_token_id=0,
        hidden_dropout=0.0, attention_dropout=0.0, loss_type="ForCausalLMLoss"))
    for layer, block in enumerate(model.transformer.h):
        block.self_attention.register_forward_pre_hook(lambda *_, n=layer: inside.append(n))
    return language(model)
"""
FAMILIES |= EAGER
HEADS = ("gpt2", "llama", "mixtral", "vit", "nano")  # which call PyTorch's attention themselves
TURNED = ("llama", "mixtral")
NARROWED = ("gpt2", "llama", "mixtral", "encoder", "nano")
SOFTMAX = {
    family: [("softmax", path.format(layer)) for layer in range(2)]
    for family, path in (
        ("mixtral", "model.layers.{}.mlp.gate"),
        ("gpt2-eager", "transformer.h.{}.attn"),
        ("llama-eager", "model.layers.{}.self_attn"),
    )
}


@dataclass(frozen=True)
class Planted:
    """Where something was planted."""

    family: str
    module: str = ""
    how: str = ""
    head: tuple[int, int] | None = None
    rotary: int | None = None
    shifted: tuple[int, int] | None = None
    site: tuple[str, str] | None = None  # kind, and path of the module
    narrow: bool = False

    def source(self) -> str:
        """The user's file."""
        names = ("module", "how", "rotary", "shifted", "narrow")
        given = {name: getattr(self, name) for name in names}
        head = COMMON.format(**given, rate=3e-5 if self.narrow else 1e-2)
        return head + FAMILIES[self.family]

    @property
    def steps(self) -> int:
        """Lost updates show later than what overflows."""
        return 10 * STEPS if self.narrow else STEPS

    def where(self) -> str:
        """In words."""
        if self.head is not None:
            return f"layer {self.head[0]} head {self.head[1]}"
        if self.rotary is not None:
            return f"rotary of layer {self.rotary}"
        if self.shifted is not None:
            return f"layer {self.shifted[0]} head {self.shifted[1]}, written out"
        if self.site is not None:
            return " in ".join(self.site)
        if self.narrow:
            return "weights in bf16"
        return self.module


@dataclass(frozen=True)
class Found:
    """What isolation said of it."""

    family: str
    planted: str
    how: str
    fails: bool
    named: bool
    verdict: str
    runs: int
    seconds: float


def config_of(planted: Planted, folder: Path) -> Any:
    """The run with what was planted."""
    file = folder / "mine.py"
    file.write_text(planted.source())
    config = user_run(f"{file}:make", steps=planted.steps, metrics_every=1, autocast="bf16")
    if planted.site is not None:
        kind, path = planted.site
        plan = OperationPlan.of(f"{kind} in ={path}: {file}:broken_{kind}")
        config = replace(config, operations=plan)
    if planted.head is not None:
        layer, head = planted.head
        plan = AttentionPlan.of("own", f"layer {layer} head {head}: {file}:broken")
        config = replace(config, attention=plan)
    return config


def fails(config: Any) -> bool:
    """Whether the run fails by the rule that isolation goes by."""
    exact = replace(
        config, operations=OperationPlan.of("all: fp32"), attention=AttentionPlan.of("own")
    )
    runs = [train(one) for one in (exact, config)]
    twin = read_curves(runs[0].metrics)
    rule, steps = rule_for(config.workload), config.steps
    assert judge_rows(runs[0].metrics, rule, steps).survived, "sound in fp32"
    return not judge_rows(runs[1].metrics, rule, steps, twin).survived


def placements(family: str, places: int) -> list[Planted]:
    """Modules drawn by seed among those that are called and hold weights, heads, rotary."""
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "mine.py").write_text(Planted(family).source())
        sys.path.insert(0, name)
        try:
            sys.modules.pop("mine", None)
            model, _, batch = importlib.import_module("mine").make(0, "cpu")
        finally:
            sys.path.remove(name)
    called: dict[str, None] = {}
    kinds = ("Linear", "Conv1D", "Norm", "Embedding", "Router", "Experts")
    for path, module in model.named_modules():
        if not list(module.children()) and type(module).__name__.endswith(kinds):
            module.register_forward_hook(lambda *_, path=path: called.setdefault(path))
    model(**batch(0))
    if family in EAGER:
        cells = [(layer, head) for layer in range(2) for head in range(4)]
        drawn = random.Random(f"{family} 0").sample(cells, 4)
        found = [Planted(family, shifted=cell) for cell in drawn]
        return found + [Planted(family, site=site) for site in SOFTMAX.get(family, ())]
    draw = random.Random(f"{family} 0")
    modules = draw.sample(sorted(called), min(places, len(called)))
    found = [Planted(family, module) for module in modules]
    if family in HEADS:
        cells = [(layer, head) for layer in range(2) for head in range(4)]
        found += [Planted(family, head=cell) for cell in draw.sample(cells, 2)]
    if family in TURNED:
        found += [Planted(family, rotary=layer) for layer in range(2)]
    sites = [("cross_entropy", "(model)"), *SOFTMAX.get(family, [])]
    found += [Planted(family, site=site) for site in sites]
    return found + [Planted(family, narrow=True)] * (family in NARROWED)


def tried(planted: Planted, folder: Path) -> Found:
    """Plant, isolate, compare."""
    began = time.time()
    folder.mkdir(parents=True)
    options = [replace(planted, how=how) for how in ("coarse", "overflows")]
    for one in options if planted.module else [planted]:
        config = config_of(one, folder)
        if fails(config):
            break
    else:
        seconds = time.time() - began
        return Found(one.family, one.where(), one.how, False, False, "", 0, round(seconds, 1))
    found = isolate(config, out=folder / "isolated", seeds=(0,), workers=1)
    paths = {site.partition(" in ")[2] for site in found.sites}
    if one.head is not None:
        named = found.places == (one.head,)
    elif one.shifted is not None:
        named = found.places == (one.shifted,)
    elif one.site is not None:
        named = found.sites == (" in ".join(one.site),)
    elif one.narrow:
        named = all(site.startswith("optimizer") for site in found.sites)
    elif one.rotary is not None:
        named = found.sites == (f"rotary in model.layers.{one.rotary}.self_attn",)
    else:
        named = paths == {one.module}
    return Found(
        one.family,
        one.where(),
        one.how or ("loses updates" if one.narrow else "overflows"),
        True,
        named and found.found,
        found.verdict,
        sum(len(rung.runs) for rung in found.rungs),
        round(time.time() - began, 1),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--places", type=int, default=8, help="modules a family")
    parser.add_argument("--only", nargs="+", help="placements that say one of these")
    parser.add_argument("--out", type=Path, help="where runs lie; by default nowhere afterwards")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    results: list[Found] = []
    with tempfile.TemporaryDirectory() as name, one_thread():
        out = asked.out or Path(name)
        for family in asked.families:
            for n, planted in enumerate(placements(family, asked.places)):
                if asked.only and not any(text in planted.where() for text in asked.only):
                    continue
                found = tried(planted, out / f"{family}-{n}")
                results.append(found)
                said = ("named" if found.named else "NOT NAMED") if found.fails else "does not fail"
                print(
                    f"{family:8} {found.planted:44} {found.how:10} {said:14} {found.runs:3} runs"
                    f" {found.seconds:6.1f} s  {found.verdict if not found.named else ''}",
                    flush=True,
                )
                if asked.json:
                    plain = [asdict(one) for one in results]
                    asked.json.write_text(json.dumps(plain, indent=1))
    failing = [one for one in results if one.fails]
    named = sum(one.named for one in failing)
    print(
        f"named {named} of {len(failing)} placements that make the run fail;"
        f" {len(results) - len(failing)} of {len(results)} do not"
    )
    return 0 if named >= SHARE * len(failing) else 1


if __name__ == "__main__":
    raise SystemExit(main())
