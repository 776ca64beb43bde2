"""Small trainings of eight architectures, and what breaks them: each plant is one cause, put in
at a step that is known.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import halfulp
from tests.watch.gpt import GPT

WORDS, LENGTH, WIDTH, HEADS, LAYERS, BATCH = 17, 24, 32, 4, 3, 8
PLANTED = 80
"""The step at which a plant begins, if it does not from the start."""
STEPS = 200


def words(step: int, seed: int, entries: int = BATCH) -> Tensor:
    """Words that count up by 3, one in ten replaced by any."""
    drawn = torch.Generator().manual_seed(1000 * seed + step)
    first = torch.randint(WORDS, (entries, 1), generator=drawn)
    counted = (first + torch.arange(LENGTH + 1) * 3) % WORDS
    other = torch.randint(WORDS, counted.shape, generator=drawn)
    return torch.where(torch.rand(counted.shape, generator=drawn) < 0.1, other, counted)


def pictures(step: int, seed: int) -> tuple[Tensor, Tensor]:
    """Noise with a wave of one of four lengths."""
    drawn = torch.Generator().manual_seed(1000 * seed + step)
    kind = torch.randint(4, (BATCH,), generator=drawn)
    wave = (torch.arange(16.0) * (kind[:, None] + 1) * 0.4).sin()
    noise = torch.randn(BATCH, 3, 16, 16, generator=drawn)
    return noise * 0.5 + wave[:, None, None, :], kind


@dataclass
class Training:
    """A model, and its loss on the batch of a step; `bad` has the batch hold noise."""

    model: nn.Module
    loss: Callable[[int, bool], Tensor]
    causal: bool = True


def _bad(given: Tensor, bad: bool, step: int) -> Tensor:
    drawn = torch.Generator().manual_seed(step)
    return torch.randint(WORDS, given.shape, generator=drawn) if bad else given


def _causal(model: nn.Module, seed: int) -> Training:
    def loss(step: int, bad: bool) -> Tensor:
        given = _bad(words(step, seed), bad, step)
        out = model(given[:, :-1])
        logits = out if isinstance(out, Tensor) else out.logits
        return functional.cross_entropy(logits.flatten(0, 1).float(), given[:, 1:].flatten())

    return Training(model, loss)


def gpt2(seed: int) -> Training:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=WORDS,
        n_positions=LENGTH,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return _causal(GPT2LMHeadModel(config), seed)


_LLAMA = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


def llama(seed: int) -> Training:
    from transformers import LlamaConfig, LlamaForCausalLM

    return _causal(LlamaForCausalLM(LlamaConfig(**_LLAMA)), seed)


def mixtral(seed: int) -> Training:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**_LLAMA, num_local_experts=4, sliding_window=None)
    return _causal(MixtralForCausalLM(config), seed)


def bert(seed: int) -> Training:
    from transformers import BertConfig, BertForMaskedLM

    model = BertForMaskedLM(
        BertConfig(
            vocab_size=WORDS + 1,
            hidden_size=WIDTH,
            num_hidden_layers=LAYERS,
            pad_token_id=0,
            num_attention_heads=HEADS,
            intermediate_size=2 * WIDTH,
            max_position_embeddings=64,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )

    def loss(step: int, bad: bool) -> Tensor:
        given = _bad(words(step, seed), bad, step)
        hidden = torch.arange(LENGTH + 1) % 4 == step % 4
        labels = given.masked_fill(~hidden, -100)
        return model(given.masked_fill(hidden, WORDS), labels=labels).loss

    return Training(model, loss, causal=False)


def vit(seed: int) -> Training:
    from transformers import ViTConfig, ViTForImageClassification

    model = ViTForImageClassification(
        ViTConfig(
            hidden_size=WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            image_size=16,
            intermediate_size=2 * WIDTH,
            patch_size=4,
            num_labels=4,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )

    def loss(step: int, bad: bool) -> Tensor:
        seen, kind = pictures(step, seed)
        kind = (kind + 1 + step % 3) % 4 if bad else kind  # wrong labels
        return model(seen, labels=kind).loss

    return Training(model, loss, causal=False)


def t5(seed: int) -> Training:
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=WORDS,
            d_model=WIDTH,
            d_kv=8,
            d_ff=2 * WIDTH,
            num_layers=LAYERS,
            num_heads=HEADS,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            pad_token_id=0,
        )
    )

    def loss(step: int, bad: bool) -> Tensor:
        given = words(step, seed)
        return model(given[:, :12], labels=_bad(given[:, 12:], bad, step).contiguous()).loss

    return Training(model, loss)


class Encoder(nn.Module):
    """PyTorch's own encoder with a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the nested tensors that norm_first rules out
            self.encoder = nn.TransformerEncoder(layer, LAYERS)
        self.last = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        y = self.encoder(self.words(x) + self.places.weight[: x.shape[1]], mask, is_causal=True)
        return self.last(y)


def encoder(seed: int) -> Training:
    return _causal(Encoder(), seed)


def handwritten(seed: int) -> Training:
    return _causal(GPT((None,) * LAYERS), seed)


ARCHITECTURES = {
    "GPT-2": gpt2,
    "Llama": llama,
    "Mixtral": mixtral,
    "BERT": bert,
    "ViT": vit,
    "T5": t5,
    "nn.TransformerEncoder": encoder,
    "hand-written GPT": handwritten,
}


def middle(model: nn.Module) -> nn.Module:
    """A weight of the second block's feed-forward part, whichever architecture it is."""
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(getattr(module, "weight", getattr(module, "down_proj", None)), Tensor)
        and any(
            part in name.lower()
            for part in (
                "mlp.c_proj",
                "mlp.down",
                "mlp.experts",
                "intermediate.dense",
                "linear1",
                "densereludense.wo",
                "mlp.1",
                "mlp.fc",
                "blocks.1.mlp.1",
            )
        )
        and ".1." in name
    ]
    assert found, [name for name, _ in model.named_modules()]
    return found[0][1]


def weight_of(module: nn.Module) -> Tensor:
    weight = getattr(module, "weight", None)
    return module.down_proj if weight is None else weight


class Multiplied(torch.autograd.Function):
    """A number that fp16 cannot hold."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x.float() * 1e8).half().to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


CAUSES = {
    "sound": None,
    "rate": "rate_too_high",
    "bad batch": "bad_batch",
    "fp16 overflow": "fp16_overflow",
    "mask": "broken_mask",
    "exploding layer": "exploding_layer",
    "data repeat": "data_repeat",
}
"""Plants, and the cause that is right for each."""


@dataclass
class Outcome:
    """What a watched training came to."""

    alarms: list[Any]
    losses: list[float]
    report: Any


def broken(
    name: str,
    plant: str,
    seed: int,
    steps: int = STEPS,
    every: int = 10,
    begun: int = PLANTED,
    **options: Any,
) -> Outcome:
    """Train an architecture, watched, with a plant that begins at a step."""
    torch.manual_seed(seed)
    training = ARCHITECTURES[name](seed)
    model = training.model.train()
    rate = 0.3 if plant == "rate" else 2e-3
    adam = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    half = plant == "fp16 overflow"
    scaler = torch.amp.GradScaler("cpu", enabled=half, init_scale=256.0)
    losses, alarms = [], []
    at = middle(model)
    logging.getLogger("halfulp.watch").setLevel(logging.CRITICAL)
    with halfulp.watch(model, every, on_alarm=alarms.append, **options) as watcher:
        for step in range(1, steps + 1):
            planted = step >= begun
            if half and step == begun:
                at.register_forward_hook(lambda m, a, out: Multiplied.apply(out))
            if plant == "mask" and step == begun:
                break_mask(model, training.causal)
            # the sampler begins again at its seed
            fed = step - begun + 5 if plant == "data repeat" and planted else step
            with torch.autocast("cpu", torch.float16, enabled=half):
                loss = training.loss(fed, plant == "bad batch" and step == begun)
            scaler.scale(loss).backward()
            scaler.step(adam)
            scaler.update()
            adam.zero_grad()
            if plant == "exploding layer" and planted:
                with torch.no_grad():
                    weight_of(at).mul_(1.04)
            losses.append(loss.item())
        report = watcher.report()
    logging.getLogger("halfulp.watch").setLevel(logging.NOTSET)
    return Outcome(alarms, losses, report)


def break_mask(model: nn.Module, causal: bool) -> None:
    """Have the second layer's attention see what the others' does not, or not see what it does."""
    for name, module in model.named_modules():
        if ".1." not in f".{name}." or list(module.children()) == []:
            continue
        if type(module).__name__ == "TransformerEncoderLayer":
            inner = module.forward

            def forward(x: Tensor, *args: Any, inner: Any = inner, **kwargs: Any) -> Tensor:
                return inner(x)

            module.forward = forward
            return
        if type(module).__name__ == "Attention" and hasattr(module, "function"):
            module.function = lambda q, k, v, is_causal: functional.scaled_dot_product_attention(
                q, k, v
            )
            return
        if hasattr(module, "is_causal") and type(module).__name__ != "T5Attention":
            module.is_causal = not causal
            return
        if type(module).__name__ == "T5Attention" and name.startswith("decoder.block.1."):
            inner, module.is_causal = module.forward, False

            def seeing(*args: Any, inner: Any = inner, **kwargs: Any) -> Any:
                return inner(*args, **kwargs | {"mask": None})

            module.forward = seeing
            return
    raise AssertionError(f"{type(model).__name__}: no layer whose mask could be broken")


class FailingLayer(nn.Module):
    """The README's: PyTorch's own bf16 flash attention ruins it within 4000 steps."""

    def __init__(self, seed: int, scale: float) -> None:
        super().__init__()
        drawn = torch.Generator().manual_seed(seed)
        weights = torch.randn(4, 32, 32, generator=drawn) * scale / 32**0.5
        self.query, self.key, self.value, self.out = map(nn.Parameter, weights)

    def forward(self, x: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        operands = [(x @ weight.mT).to(dtype) for weight in (self.query, self.key, self.value)]
        heads = (y[:, None] for y in operands)
        out = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return out[:, 0].float() @ self.out.mT


def failing_layer(seed: int, steps: int, *, repaired: bool = False) -> Outcome:
    """Train it, watched, with PyTorch's attention or with halfulp's."""
    x = torch.randn(16, 32, 32, generator=torch.Generator().manual_seed(0))
    x[..., :8] = 1
    target = FailingLayer(1, 1.5)(x, torch.float32).detach()
    model = FailingLayer(seed + 2, 0.5)
    adam = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    alarms: list[Any] = []
    losses = []
    logging.getLogger("halfulp.watch").setLevel(logging.CRITICAL)
    with contextlib.ExitStack() as stack:
        if repaired:
            stack.enter_context(halfulp.patch())
        watcher = stack.enter_context(halfulp.watch(model, 25, on_alarm=alarms.append))
        for _ in range(steps):
            loss = (model(x) - target).square().mean()
            loss.backward()
            adam.step()
            adam.zero_grad()
            losses.append(loss.item())
        report = watcher.report()
    logging.getLogger("halfulp.watch").setLevel(logging.NOTSET)
    return Outcome(alarms, losses, report)
