"""Tiny models of transformers, and one numerical fault each, in one place."""

import copy
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from halfulp.diff import Setting
from halfulp.interpose import Swap

SIZES = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def language_model(kind: str, dtype: torch.dtype, seed: int = 0, layers: int = 2) -> nn.Module:
    """GPT-2, Llama or Mixtral with random weights, in eval mode."""
    import transformers

    torch.manual_seed(seed)
    if kind == "GPT2":
        sizes = {"vocab_size": 128, "n_embd": 64, "n_layer": layers, "n_head": 4}
        config = transformers.GPT2Config(**sizes, n_positions=64, bos_token_id=0, eos_token_id=0)
        return transformers.GPT2LMHeadModel(config).eval().to(dtype)
    more = {"num_local_experts": 4} if kind == "Mixtral" else {}
    sizes = SIZES | more | {"num_hidden_layers": layers}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval().to(dtype)


def batches(count: int = 2, rows: int = 4, length: int = 24, seed: int = 1) -> list[Any]:
    """Random tokens."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, length)
    return [{"input_ids": torch.randint(128, shape, generator=generator)} for _ in range(count)]


class ReciprocalNorm(nn.Module):
    """RMSNorm whose reciprocal is rounded to bf16."""

    def __init__(self, stock: nn.Module) -> None:
        super().__init__()
        self.weight, self.eps = stock.weight, stock.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        root = torch.sqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * (1.0 / root).bfloat16().float()).to(x.dtype)


def reciprocal_norm(model: nn.Module) -> Setting:
    model = copy.deepcopy(model)
    layer = model.model.layers[1]
    layer.input_layernorm = ReciprocalNorm(layer.input_layernorm)
    return Setting(model)


class NarrowNorm(nn.Module):
    """RMSNorm that multiplies in the input's dtype, by a reciprocal of it."""

    def __init__(self, stock: nn.Module) -> None:
        super().__init__()
        self.weight, self.eps = stock.weight, stock.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        mean = x.float().square().mean(-1, keepdim=True)
        return self.weight * (x * (1 / torch.sqrt(mean + self.eps)).to(torch.bfloat16))


def narrow_norm(model: nn.Module) -> Setting:
    model = copy.deepcopy(model)
    layer = model.model.layers[1]
    layer.input_layernorm = NarrowNorm(layer.input_layernorm)
    return Setting(model)


def epsilon(model: nn.Module) -> Setting:
    model = copy.deepcopy(model)
    model.model.layers[1].post_attention_layernorm.variance_epsilon = 1e-5
    return Setting(model)


def epsilon_of_layer_norm(model: nn.Module) -> Setting:
    model = copy.deepcopy(model)
    model.transformer.h[1].ln_1.eps = 1e-3
    return Setting(model)


def rotary_table(model: nn.Module) -> Setting:
    model = copy.deepcopy(model)
    stock = type(model.model.rotary_emb).forward

    def forward(self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:
        tables = stock(self, x, position_ids)
        return tuple(table.bfloat16().to(x.dtype) for table in tables)

    model.model.rotary_emb.forward = types.MethodType(forward, model.model.rotary_emb)
    return Setting(model)


def router(model: nn.Module) -> Setting:
    """The router's logits in bf16."""
    model = copy.deepcopy(model)

    def forward(self: Any, hidden: Tensor) -> tuple[Tensor, ...]:
        hidden = hidden.reshape(-1, self.hidden_dim).bfloat16()
        logits = functional.linear(hidden, self.weight.bfloat16())
        top, chosen = torch.topk(torch.softmax(logits.float(), -1), self.top_k, dim=-1)
        top = top / top.sum(-1, keepdim=True)
        return logits, top, chosen

    for layer in model.model.layers:
        layer.mlp.gate.forward = types.MethodType(forward, layer.mlp.gate)
    return Setting(model)


def kernel(model: nn.Module) -> Setting:
    return Setting(model, attention="sdpa:math")


def fp8_kernel(model: nn.Module) -> Setting:
    return Setting(model, attention="FP8_FLASH")


def coarse_linear(model: nn.Module) -> Setting:
    return Setting(model, swaps=(Swap("e8m4", paths=("*.1.mlp.up_proj",)),))


def through_fp8(x: Tensor, tile: int) -> Tensor:
    """[B, H, N, D] rounded to e4m3 with one scale for each tile of so many tokens."""
    count = x.shape[2]
    wide = functional.pad(x.float(), (0, 0, 0, -count % tile)).unflatten(2, (-1, tile))
    scale = wide.abs().amax((3, 4), keepdim=True).clamp_min(1e-6) / 448
    rounded = (wide / scale).to(torch.float8_e4m3fn).float() * scale
    return rounded.flatten(2, 3)[:, :, :count].to(x.dtype)


def with_fp8_cache(tile: int) -> Callable[[nn.Module, Any], Any]:
    """A forward pass whose keys and values go through a cache in fp8."""
    from transformers.cache_utils import DynamicCache

    class Cache(DynamicCache):
        def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
            kept = super().update(key, value, *args, **kwargs)
            return tuple(through_fp8(x, tile) for x in kept)

    def forward(model: nn.Module, batch: Any) -> Any:
        cache = batch.get("past_key_values")
        cache = Cache(config=model.config) if cache is None else cache
        return model(**(batch | {"past_key_values": cache}))

    return forward


# fault, model, dtype, what carries the gap
FAULTS = (
    (reciprocal_norm, "Llama", torch.float32, "model.layers.*.input_layernorm"),
    (reciprocal_norm, "Llama", torch.bfloat16, "model.layers.*.input_layernorm"),
    (narrow_norm, "Llama", torch.bfloat16, "model.layers.*.input_layernorm"),
    (epsilon, "Llama", torch.float32, "model.layers.*.post_attention_layernorm"),
    (epsilon, "Llama", torch.bfloat16, "model.layers.*.post_attention_layernorm"),
    (epsilon_of_layer_norm, "GPT2", torch.float32, "transformer.h.*.ln_1"),
    (rotary_table, "Llama", torch.float32, "model.rotary_emb rotary"),
    (router, "Mixtral", torch.float32, "model.layers.*.mlp.gate"),
    (kernel, "Llama", torch.float32, "model.layers.*.self_attn attention"),
    (kernel, "Llama", torch.bfloat16, "model.layers.*.self_attn attention"),
    (fp8_kernel, "Llama", torch.bfloat16, "model.layers.*.self_attn attention"),
    (coarse_linear, "Llama", torch.bfloat16, "model.layers.*.mlp.up_proj"),
)


class Expert(nn.Module):
    """A gated layer of `Experts`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.act = nn.SiLU()
        for name in ("gate", "up", "down"):
            setattr(self, name, nn.Linear(width, width, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """A mixture of experts in bf16, its router in fp32: each expert a module, on its tokens."""

    def __init__(self, width: int = 32, count: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(Expert(width).bfloat16() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        share, chosen = self.router(flat.float()).softmax(-1).topk(2)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            rows, place = (chosen == i).nonzero(as_tuple=True)
            out.index_add_(0, rows, expert(flat[rows]) * share[rows, place, None].bfloat16())
        return out.view_as(x)


class Fused(nn.Module):
    """The same as one module: gate and up in one product, all tokens in the order of their experts,
    one activation. With a fault "router" its scores are rounded, with "activation" that.
    """

    def __init__(self, stock: Experts, fault: str = "") -> None:
        super().__init__()
        self.mixture = nn.Module()
        self.mixture.router, self.fault = copy.deepcopy(stock.router), fault
        self.act = nn.SiLU()
        with torch.no_grad():
            both = [torch.cat([x.gate.weight, x.up.weight]) for x in stock.experts]
            self.gate_up = nn.Parameter(torch.stack(both))
            self.down = nn.Parameter(torch.stack([x.down.weight for x in stock.experts]))
        if fault == "router":
            self.mixture.router.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        scores = self.mixture.router(flat if self.fault == "router" else flat.float())
        share, chosen = scores.float().softmax(-1).topk(2)
        order = chosen.flatten().argsort(stable=True)
        ends = chosen.flatten().bincount(minlength=len(self.down)).tolist()
        parts = zip(flat[order // 2].split(ends), self.gate_up, strict=True)
        gate, up = torch.cat([part @ weight.T for part, weight in parts]).chunk(2, -1)
        hidden = self.act(gate) * up
        if self.fault == "activation":
            hidden = hidden.to(torch.float8_e4m3fn).to(x.dtype)
        parts = zip(hidden.split(ends), self.down, strict=True)
        out = torch.cat([part @ weight.T for part, weight in parts])
        out = out.float() * share.flatten()[order, None]
        return out[order.argsort()].unflatten(0, (-1, 2)).sum(1).to(x.dtype).view_as(x)
