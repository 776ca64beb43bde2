"""Every class of the installed transformers, built tiny from its own default configuration.

A configuration's fields are overwritten by name, its own sub-configurations' too; what then cannot
be built in a few hundred thousand parameters is left out, with the reason.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

MOST_PARAMETERS = 8_000_000
LENGTH = 12  # of a text: more than the windows below
TOKENS = 64
TASKS = {
    "decoders": "CAUSAL_LM",
    "encoders": "MASKED_LM",
    "encoder–decoders": "SEQ_TO_SEQ_CAUSAL_LM",
    "vision": "IMAGE_CLASSIFICATION",
    "speech": "SPEECH_SEQ_2_SEQ",
    "audio": "CTC",
    "text with pictures": "IMAGE_TEXT_TO_TEXT",
}
"""Kinds of models and transformers' own lists of them; whatever is in none is "other"."""

_BY_VALUE: dict[Any, str] = {
    2: """num_hidden_layers encoder_layers decoder_layers n_layer n_layers num_layers depth
        num_decoder_layers num_encoder_layers num_codebooks speech_encoder_layers t2u_encoder_layers
        t2u_decoder_layers num_key_value_heads num_kv_heads n_kv_heads swa_num_key_value_heads
        num_global_key_value_heads linear_num_key_heads linear_num_value_heads linear_num_heads
        num_local_experts num_experts n_routed_experts moe_num_experts expert_capacity
        num_parallel_samples index_n_heads mamba_expand num_conv_pos_embedding_groups
        num_feat_extract_layers""",
    4: """num_attention_heads encoder_attention_heads decoder_attention_heads n_head n_heads
        num_heads swa_num_attention_heads speech_encoder_attention_heads num_encoder_attention_heads
        num_decoder_attention_heads decoder_cross_attention_heads rotary_dim attention_window
        window_size block_size d_rel index_topk patch_size encoder_stride num_conv_pos_embeddings
        mamba_d_conv chunk_size mamba_chunk_size mamba_dt_rank num_query_tokens latent_query_num""",
    32: """hidden_size d_model n_embd emb_dim embed_dim embedding_size projection_dim
        output_hidden_size encoder_hidden_size decoder_hidden_size attention_hidden_size
        out_hidden_size hidden_dim embedding_dim word_embed_proj_dim encoder_hidden_dim
        pooler_hidden_size cross_attention_hidden_size text_hidden_size vision_hidden_size dim
        image_text_hidden_size projector_hidden_size""",
    48: """intermediate_size encoder_ffn_dim decoder_ffn_dim ffn_dim d_ff n_inner
        moe_intermediate_size shared_expert_intermediate_size ffn_hidden_size d_inner mlp_dim
        shared_intermediate_size intermediate_size_mlp moe_shared_expert_intermediate_size
        expert_ffn_hidden_size feed_forward_size dense_intermediate_size
        speech_encoder_intermediate_size""",
    8: """head_dim d_kv d_head v_head_dim qk_nope_head_dim qk_rope_head_dim swa_head_dim kv_channels
        linear_key_head_dim linear_value_head_dim linear_head_dim mamba_d_head index_head_dim
        hidden_size_per_layer_input rel_extent mamba_d_state state_size mamba_n_heads
        mamba_num_heads mamba_head_dim""",
    16: """global_head_dim qk_head_dim q_lora_rank kv_lora_rank image_size img_size num_mel_bins""",
    1: """num_experts_per_tok moe_topk moe_k top_k_experts moe_top_k num_experts_per_token n_group
        topk_group num_expert_groups first_k_dense_replace n_shared_experts bos_token_id
        decoder_start_token_id mamba_n_groups""",
    3: "conv_kernel_size conv_depthwise_kernel_size num_labels",
    5: "sliding_window sliding_window_size attention_chunk_size",
    6: "local_attention num_queries",
    9: "query_pre_attn_scalar",
    TOKENS: """vocab_size vocab_size_per_layer_input text_vocab_size encoder_vocab_size
        decoder_vocab_size max_position_embeddings n_positions max_seq_len n_ctx max_length
        max_source_positions max_target_positions max_2d_position_embeddings
        original_max_position_embeddings num_position_embeddings""",
}
_SIZES: dict[str, Any] = {name: size for size, names in _BY_VALUE.items() for name in names.split()}
_SIZES |= {
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 5.0,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "forced_eos_token_id": None,
    "forced_bos_token_id": None,
    "scale_embedding": False,
    "attention_probs_dropout_prob": 0.0,
    "layerdrop": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "apply_spec_augment": False,
    "mask_time_prob": 0.0,
    "depths": [1, 1, 1, 1],
    "hidden_sizes": [8, 16, 16, 32],
    "conv_dim": [16, 16],
    "conv_stride": [5, 2],
    "conv_kernel": [10, 3],
    "use_cache": True,
}
_NEVER_NONE = ("head_dim", "num_key_value_heads", "vocab_size", "sliding_window")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_A_LAYER = (
    "layer_types",
    "mlp_layer_types",
    "layers_block_type",
    "indexer_types",
    "no_rope_layers",
    "layer_rope_theta",
)
_SWIN = {
    "depths": [1, 1],
    "num_heads": [2, 4],
    "image_size": 16,
    "patch_size": 2,
    "embed_dim": 8,
    "window_size": 2,
}
_OWN: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 5},
    "xmod": {"default_language": "en_XX"},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "roc_bert": {
        "pronunciation_vocab_size": 8,
        "shape_vocab_size": 8,
        "pronunciation_embed_dim": 8,
        "shape_embed_dim": 8,
    },
    "swin": _SWIN,
    "swinv2": _SWIN,
}
_OWN |= {name: {"image_size": 64} for name in ("segformer", "pvt", "pvt_v2")}
_OWN |= {
    name: {"num_key_value_heads": 4}
    for name in ("esmc", "dots3_note", "glm5_next_text", "moonshine")
}
_WITH_SECTIONS = (
    *("glm4v_text", "glm4v_moe_text", "glm_image_text", "glm_ocr_text", "paddleocr_vl_text"),
    *("qwen2_5_omni_text", "qwen2_5_vl_text", "qwen2_vl_text", "qwen3_omni_moe_text"),
)
_SPECIAL_TOKENS = ("image_token", "video_token", "audio_token", "boi_token", "eoi_token", "vision_")


def classes() -> Iterator[tuple[str, str, str]]:
    """(kind, model type, class name) of every class that is looked at, each once."""
    from transformers.models.auto import modeling_auto

    seen = set()
    types = set()
    for kind, task in (*TASKS.items(), ("other", "")):
        listed = getattr(
            modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES" if task else "MODEL_MAPPING_NAMES"
        )
        for model_type, names in sorted(listed.items()):
            for name in (names,) if isinstance(names, str) else names[:1]:
                if name not in seen and (task or model_type not in types):
                    seen.add(name)
                    yield kind, model_type, name
            types.add(model_type)


def tiny_config(config_class: Any) -> Any:
    """The class's default configuration with every size that is known by name made small."""
    default = config_class()
    given = default.to_dict()
    parts = config_class.sub_configs or {}
    sizes: dict[str, Any] = {}
    for name, value in given.items():
        if name in parts or isinstance(getattr(config_class, name, None), property):
            continue
        if name in _SIZES and (value is not None or name in _NEVER_NONE):
            sizes[name] = _like(_SIZES[name], value)
        elif name.startswith(_SPECIAL_TOKENS) and name.endswith(("_id", "_index")):
            sizes[name] = TOKENS - 1 - sorted(given).index(name) % 8
    if "kv_lora_rank" in sizes and "num_key_value_heads" in sizes:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
        sizes["head_dim"] = sizes["qk_rope_head_dim"]
    layers = next((sizes[name] for name in _LAYERS if name in sizes), 2)
    for name in _A_LAYER:
        if isinstance(given.get(name), list) and given[name]:
            sizes[name] = _kinds(given[name], layers)
    if isinstance(given.get("rope_parameters"), dict):
        sizes["rope_parameters"] = _rope(given["rope_parameters"])
        if config_class.model_type in _WITH_SECTIONS:
            sizes["rope_parameters"]["mrope_section"] = [2, 1, 1]
    if isinstance(given.get("intermediate_size"), list):
        sizes["intermediate_size"] = [_SIZES["intermediate_size"]] * layers
    if config_class.model_type in _OWN:
        sizes |= _OWN[config_class.model_type]
    for name in parts:
        own = getattr(default, name, None)
        if own is not None and hasattr(type(own), "sub_configs"):
            sizes[name] = tiny_config(type(own))
    return config_class(**sizes)


def _kinds(each: list[Any], layers: int) -> list[Any]:
    """One layer of each kind as far as they go, attention first."""
    kinds = sorted(
        dict.fromkeys(each), key=lambda kind: ("linear" in str(kind), "attention" not in str(kind))
    )
    return [kinds[min(i, len(kinds) - 1)] for i in range(layers)]


def _rope(parameters: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _rope(value)
        if isinstance(value, dict)
        else [2, 1, 1]
        if name == "mrope_section"
        else value
        for name, value in parameters.items()
    }


def _like(small: Any, value: Any) -> Any:
    """The small value in the form of the one it stands for."""
    if isinstance(value, (list, tuple)) and not isinstance(small, list):
        return type(value)([small] * len(value))
    if isinstance(small, list) and isinstance(value, (list, tuple)):
        return type(value)(small[: len(value)])
    if isinstance(small, list):
        return value
    if isinstance(value, bool) or isinstance(small, bool):
        return small
    return (
        min(small, value)
        if isinstance(value, int) and isinstance(small, int) and value > 0
        else small
    )


def model_class(name: str) -> Any:
    """A class of transformers by its name."""
    import transformers

    return getattr(transformers, name)


def built(name: str, model_type: str, implementation: str, state: Any = None) -> Any:
    """A model of float32 whose attention is far from an average, the same at every call.

    Raises whatever transformers raises, and ValueError for one that did not become small.
    """
    from transformers import CONFIG_MAPPING

    cls = model_class(name)
    config = tiny_config(cls.config_class or CONFIG_MAPPING[model_type])
    with torch.device("meta"):
        many = sum(p.numel() for p in cls(copy.deepcopy(config)).parameters())
    if many > MOST_PARAMETERS:
        raise ValueError(f"{many} parameters")
    config._attn_implementation = implementation
    torch.manual_seed(0)
    model = cls(config).eval().float()
    if state is not None:
        model.load_state_dict(state)
        return model
    draw = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=draw) * 0.1
        parameter.data.nan_to_num_(0, 0, 0).add_(noise)
    return model


def inputs(model: nn.Module) -> dict[str, torch.Tensor]:
    """What the class's forward pass asks for, drawn from a fixed seed."""
    names = inspect.signature(model.forward).parameters
    draw = torch.Generator().manual_seed(0)
    given: dict[str, torch.Tensor] = {}
    if "input_ids" not in names:
        given = _signal(model, draw)
    if not given:
        given["input_ids"] = torch.randint(3, 40, (2, LENGTH), generator=draw)
        required = "pixel_values" in names and names["pixel_values"].default is inspect._empty
        if required or "CLIP" in type(model).__name__:
            given["pixel_values"] = _picture(model.config.vision_config, draw)
    if "decoder_input_ids" in names:
        given["decoder_input_ids"] = torch.randint(3, 40, (2, LENGTH), generator=draw)
    return given


def _signal(model: nn.Module, draw: torch.Generator) -> dict[str, torch.Tensor]:
    """Sound or pictures; nothing for a model that asks for neither."""
    names, config = inspect.signature(model.forward).parameters, model.config
    if "input_features" in names:
        mel = getattr(config, "num_mel_bins", None) or getattr(config, "feature_size", None) or 16
        shape = (2, mel, 2 * getattr(config, "max_source_positions", 32))
        return {"input_features": torch.randn(shape, generator=draw)}
    if "input_values" in names:
        return {"input_values": torch.randn(2, 400, generator=draw)}
    if "grid_thw" in names:
        channels = getattr(config, "in_channels", getattr(config, "in_chans", 3))
        width = channels * getattr(config, "temporal_patch_size", 1) * config.patch_size**2
        return {
            next(iter(names)): torch.randn(48, width, generator=draw),
            "grid_thw": torch.tensor([[1, 4, 4], [1, 4, 8]]),
        }
    return {"pixel_values": _picture(config, draw)} if "pixel_values" in names else {}


def _picture(config: Any, draw: torch.Generator) -> torch.Tensor:
    size = getattr(config, "image_size", 16)
    sides = size if isinstance(size, (list, tuple)) else (size, size)
    return torch.randn(2, getattr(config, "num_channels", 3), *sides, generator=draw)
