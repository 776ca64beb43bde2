"""Tiny models of diffusers' families inside `halfulp.patch()`: their own outputs and gradients, and
every softmax attention caught. A processor of ours in their place would drop what is theirs.
"""

import inspect

import pytest
import torch

import halfulp

diffusers = pytest.importorskip("diffusers")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

WIDE = {"attention_head_dim": 8, "num_attention_heads": 2, "num_layers": 2}
TEXT = {"joint_attention_dim": 12, "pooled_projection_dim": 10}
HIDDEN = torch.ones(2, 5, dtype=torch.bool)
HIDDEN[1, 3:] = False


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


PICTURE, CONTEXT, TIME = drawn(2, 4, 8, 8), drawn(2, 5, 12), torch.tensor([7, 300])
# Class: settings, inputs, calls of softmax attention.
FAMILIES = {
    "SD3Transformer2DModel": (
        WIDE | TEXT | {"in_channels": 4, "out_channels": 4, "caption_projection_dim": 16,
                       "sample_size": 8, "pos_embed_max_size": 8, "qk_norm": "rms_norm"},
        {"hidden_states": PICTURE, "encoder_hidden_states": CONTEXT,
         "pooled_projections": drawn(2, 10), "timestep": TIME},
        2,
    ),
    "FluxTransformer2DModel": (
        WIDE | TEXT | {"in_channels": 4, "num_single_layers": 1, "axes_dims_rope": (2, 2, 4)},
        {"hidden_states": drawn(2, 16, 4), "encoder_hidden_states": CONTEXT,
         "pooled_projections": drawn(2, 10), "timestep": TIME / 1000,
         "img_ids": drawn(16, 3), "txt_ids": torch.zeros(5, 3)},
        3,
    ),
    "AuraFlowTransformer2DModel": (
        {"sample_size": 8, "in_channels": 4, "num_mmdit_layers": 1, "num_single_dit_layers": 1,
         "attention_head_dim": 8, "num_attention_heads": 2, "joint_attention_dim": 12,
         "caption_projection_dim": 16, "pos_embed_max_size": 16},
        {"hidden_states": PICTURE, "encoder_hidden_states": CONTEXT, "timestep": TIME / 1000},
        2,
    ),
    "CogVideoXTransformer3DModel": (
        WIDE | {"in_channels": 4, "out_channels": 4, "time_embed_dim": 8, "text_embed_dim": 12,
                "sample_width": 8, "sample_height": 8, "sample_frames": 5,
                "max_text_seq_length": 5},
        {"hidden_states": drawn(2, 2, 4, 8, 8), "encoder_hidden_states": CONTEXT,
         "timestep": TIME},
        2,
    ),
    "StableAudioDiTModel": (
        WIDE | {"sample_size": 8, "in_channels": 4, "out_channels": 4,
                "num_key_value_attention_heads": 1, "cross_attention_dim": 8, "time_proj_dim": 8,
                "global_states_input_dim": 6, "cross_attention_input_dim": 12},
        {"hidden_states": drawn(2, 4, 8), "encoder_hidden_states": CONTEXT,
         "timestep": TIME / 1000, "global_hidden_states": drawn(2, 1, 6),
         "rotary_embedding": (drawn(9, 4).cos(), drawn(9, 4).sin())},
        4,
    ),
    # its own attention is linear, and stays what it is
    "SanaTransformer2DModel": (
        WIDE | {"in_channels": 4, "out_channels": 4, "num_cross_attention_heads": 2,
                "cross_attention_head_dim": 8, "cross_attention_dim": 16, "caption_channels": 12,
                "sample_size": 8},
        {"hidden_states": PICTURE, "encoder_hidden_states": CONTEXT, "timestep": TIME,
         "encoder_attention_mask": HIDDEN.float()},
        2,
    ),
    "HunyuanDiT2DModel": (
        {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "patch_size": 2,
         "sample_size": 8, "hidden_size": 16, "num_layers": 2, "cross_attention_dim": 12,
         "cross_attention_dim_t5": 16, "pooled_projection_dim": 10, "text_len": 5,
         "text_len_t5": 5},
        {"hidden_states": PICTURE, "timestep": TIME.float(), "encoder_hidden_states": CONTEXT,
         "text_embedding_mask": HIDDEN, "encoder_hidden_states_t5": drawn(2, 5, 16),
         "text_embedding_mask_t5": HIDDEN, "style": torch.zeros(2, dtype=torch.int64),
         "image_meta_size": torch.full((2, 6), 8.0),
         "image_rotary_emb": (drawn(16, 8).cos(), drawn(16, 8).sin())},
        5,  # one pools the text
    ),
    "PixArtTransformer2DModel": (
        WIDE | {"in_channels": 4, "out_channels": 4, "cross_attention_dim": 16, "sample_size": 8,
                "caption_channels": 12, "use_additional_conditions": False,
                "norm_num_groups": 2},
        {"hidden_states": PICTURE, "encoder_hidden_states": CONTEXT, "timestep": TIME,
         "encoder_attention_mask": HIDDEN,
         "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}},
        4,
    ),
    "WanTransformer3DModel": (
        WIDE | {"attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 12,
                "freq_dim": 8, "ffn_dim": 16, "rope_max_seq_len": 16},
        {"hidden_states": drawn(2, 4, 2, 8, 8), "timestep": TIME,
         "encoder_hidden_states": CONTEXT},
        4,
    ),
    "LTXVideoTransformer3DModel": (
        WIDE | {"in_channels": 4, "out_channels": 4, "cross_attention_dim": 16,
                "caption_channels": 12},
        {"hidden_states": drawn(2, 32, 4), "encoder_hidden_states": CONTEXT, "timestep": TIME,
         "encoder_attention_mask": HIDDEN, "num_frames": 2, "height": 4, "width": 4},
        4,
    ),
    "QwenImageTransformer2DModel": (
        WIDE | {"in_channels": 4, "out_channels": 1, "joint_attention_dim": 12,
                "axes_dims_rope": (2, 2, 4)},
        {"hidden_states": drawn(2, 16, 4), "encoder_hidden_states": CONTEXT,
         "encoder_hidden_states_mask": HIDDEN, "timestep": TIME / 1000,
         "img_shapes": [[(1, 4, 4)]] * 2},
        2,
    ),
    "Lumina2Transformer2DModel": (
        {"sample_size": 8, "in_channels": 4, "hidden_size": 24, "num_layers": 2,
         "num_refiner_layers": 1, "num_attention_heads": 3, "num_kv_heads": 1, "multiple_of": 4,
         "axes_dim_rope": (4, 2, 2), "axes_lens": (16, 8, 8), "cap_feat_dim": 12},
        {"hidden_states": PICTURE, "timestep": TIME / 1000, "encoder_hidden_states": CONTEXT,
         "encoder_attention_mask": HIDDEN},
        4,
    ),
    "DiTTransformer2DModel": (
        WIDE | {"in_channels": 4, "sample_size": 8, "norm_num_groups": 2},
        {"hidden_states": PICTURE, "timestep": TIME, "class_labels": torch.tensor([1, 2])},
        2,
    ),
    "HunyuanVideoTransformer3DModel": (
        WIDE | {"in_channels": 4, "out_channels": 4, "num_single_layers": 1,
                "num_refiner_layers": 1, "guidance_embeds": False, "text_embed_dim": 12,
                "pooled_projection_dim": 10, "rope_axes_dim": (2, 2, 4)},
        {"hidden_states": drawn(2, 4, 2, 8, 8), "timestep": TIME,
         "encoder_hidden_states": CONTEXT, "encoder_attention_mask": HIDDEN.long(),
         "pooled_projections": drawn(2, 10)},
        4,
    ),
    "UNet2DConditionModel": (
        {"sample_size": 8, "in_channels": 4, "out_channels": 4, "layers_per_block": 1,
         "block_out_channels": (8, 16), "norm_num_groups": 4, "cross_attention_dim": 12,
         "attention_head_dim": 4, "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
         "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D")},
        {"sample": PICTURE, "timestep": 7, "encoder_hidden_states": CONTEXT},
        8,
    ),
}  # fmt: skip


def built(name):
    torch.manual_seed(0)
    model = getattr(diffusers, name)(**FAMILIES[name][0]).eval()
    draw = torch.Generator().manual_seed(1)
    for parameter in model.parameters():  # as initialized, gates are shut
        parameter.data.add_(torch.randn(parameter.shape, generator=draw) * 0.2)
    return model


def run(model, name):
    """Outputs, and the whole gradient."""
    model.zero_grad()
    out = model(**FAMILIES[name][1]).sample
    out.square().mean().backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return out.detach(), gradient


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_by_patch(name):
    assert set(FAMILIES[name][1]) <= set(
        inspect.signature(getattr(diffusers, name).forward).parameters
    )
    model = built(name)
    expected = run(model, name)
    with halfulp.patch() as patched:
        got = run(model, name)
    for ours, stock in zip(got, expected, strict=True):
        assert stock.isfinite().all()
        assert float((ours - stock).norm() / stock.norm()) <= 1e-4
    assert not torch.equal(got[0], expected[0]), "reached"
    assert sum(patched.calls.values()) == FAMILIES[name][2]
    assert "stock" not in {call.backend for call in patched.calls}
