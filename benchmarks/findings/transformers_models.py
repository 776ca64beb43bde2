"""What transformers' models compute themselves: norms, routers, rotary embeddings and eager
attention, called from the modules as they are installed.

Needs the package transformers.
`halfulp audit --op rms_norm benchmarks/findings/transformers_models.py:llama_norm`.
"""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

NORMS = {
    "llama": "LlamaRMSNorm",
    "mistral": "MistralRMSNorm",
    "qwen3": "Qwen3RMSNorm",
    "gemma3": "Gemma3RMSNorm",
    "olmo2": "Olmo2RMSNorm",
    "t5": "T5LayerNorm",
    "gpt_oss": "GptOssRMSNorm",
    "deepseek_v3": "DeepseekV3RMSNorm",
}
LAYER_NORMS = {"cohere": "CohereLayerNorm", "nemotron": "NemotronLayerNorm1P"}
ROUTERS = {
    "mixtral": "MixtralTopKRouter",
    "qwen2_moe": "Qwen2MoeTopKRouter",
    "qwen3_moe": "Qwen3MoeTopKRouter",
    "olmoe": "OlmoeTopKRouter",
    "gpt_oss": "GptOssTopKRouter",
    "granitemoe": "GraniteMoeTopKRouter",
}
ROTARY = {
    "llama": "LlamaRotaryEmbedding",
    "qwen3": "Qwen3RotaryEmbedding",
    "cohere": "CohereRotaryEmbedding",
    "gpt_oss": "GptOssRotaryEmbedding",
}
EAGER = ("llama", "gpt2", "gpt_neox", "opt", "bert", "gemma2", "qwen3", "whisper")
ADDS_ONE = ("gemma3", "nemotron")  # their weight is stored less one
PAIRS = ("cohere",)  # neighbors turn together; elsewhere the halves do


def _of(family: str, name: str) -> Any:
    return getattr(import_module(f"transformers.models.{family}.modeling_{family}"), name)


def _norm(family: str, name: str) -> Any:
    def norm(input: Tensor, _: Any, weight: Tensor, eps: float) -> Tensor:
        module = _of(family, name)(weight.shape[0], eps=eps)
        stored = weight.float() - 1 if family in ADDS_ONE else weight
        return functional_call(module, {"weight": stored}, (input,))

    return norm


def _layer_norm(family: str, name: str) -> Any:
    def norm(input: Tensor, _: Any, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        module = _of(family, name)(weight.shape[0], eps=eps)
        if family == "cohere":  # which has no bias
            return functional_call(module, {"weight": weight}, (input,)) + bias
        return functional_call(module, {"weight": weight - 1, "bias": bias}, (input,))

    return norm


def _router(family: str, name: str) -> Any:
    def router(logits: Tensor, k: int, *, renormalize: bool = True) -> tuple[Tensor, Tensor]:
        """The logits come out of the router's own product with the identity, which is exact."""
        experts = logits.shape[-1]
        counts = {"num_experts_per_tok": k, "num_local_experts": experts, "num_experts": experts}
        config = SimpleNamespace(hidden_size=experts, norm_topk_prob=renormalize, **counts)
        module = _of(family, name)(config)
        weights = {"weight": torch.eye(experts, dtype=logits.dtype)}
        if hasattr(module, "bias"):
            weights["bias"] = torch.zeros(experts, dtype=logits.dtype)
        _, scores, indices = functional_call(module, weights, (logits,))
        return scores, indices

    def renormalizes(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        return router(logits, k)

    return router if family in ("qwen2_moe", "qwen3_moe", "olmoe") else renormalizes


def _rope(family: str, name: str) -> Any:
    def rope(input: Tensor, positions: Tensor, *, base: float) -> Tensor:
        # What turns neighbors is given halves as neighbors: a permutation rounds nothing.
        if family in PAIRS:
            input = input.unflatten(-1, (2, -1)).mT.flatten(-2)
        width = input.shape[-1]
        parameters = {"rope_type": "default", "rope_theta": base}
        config = SimpleNamespace(
            rope_parameters=parameters,
            head_dim=width,
            hidden_size=width,
            num_attention_heads=1,
            max_position_embeddings=4096,
            standardize_rope_params=lambda: None,
        )
        cos, sin = _of(family, name)(config)(input, positions[None])
        query = input.transpose(0, 1)[None]
        turned, _ = _of(family, "apply_rotary_pos_emb")(query, query, cos, sin)
        found = turned[0].transpose(0, 1)
        return found.unflatten(-1, (-1, 2)).mT.flatten(-2) if family in PAIRS else found

    return rope


def _eager(family: str) -> Any:
    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool = False,
        scale: float | None = None,
    ) -> Tensor:
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        groups = query.shape[1] // key.shape[1]
        module = SimpleNamespace(num_key_value_groups=groups, training=False, is_causal=is_causal)
        mask = None
        if is_causal:
            hidden = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).triu(1)
            lowest = torch.finfo(query.dtype).min
            mask = torch.zeros(hidden.shape, dtype=query.dtype).masked_fill(hidden, lowest)[
                None, None
            ]
        if groups > 1 and family in ("gpt2", "gpt_neox", "opt", "bert", "whisper"):
            raise NotImplementedError(f"{family} has as many key heads as query heads")
        function = _of(family, "eager_attention_forward")
        out, _ = function(module, query, key, value, mask, scaling=scale, dropout=0.0)
        return out.transpose(1, 2)

    return attention


AUDITED = {}
for _table, _make, _suffix, _operation in (
    (NORMS, _norm, "norm", "rms_norm"),
    (LAYER_NORMS, _layer_norm, "norm", "layer_norm"),
    (ROUTERS, _router, "router", "router"),
    (ROTARY, _rope, "rope", "rope"),
):
    for _family, _name in _table.items():
        globals()[f"{_family}_{_suffix}"] = _make(_family, _name)
        AUDITED[f"{_family}_{_suffix}"] = _operation
for _family in EAGER:
    globals()[f"{_family}_eager"] = _eager(_family)
    AUDITED[f"{_family}_eager"] = "attention"
