"""diffusers' layers with our processor, and a small UNet of its own, held to its processor."""

import pytest
import torch

import halfulp
from halfulp.attention.diffusers import DiffusersProcessor

pytest.importorskip("diffusers")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

LAYERS = {
    "plain": {},
    "cross": {"cross_attention_dim": 12},
    "cross, normed": {"cross_attention_dim": 12, "cross_attention_norm": "layer_norm"},
    "normed queries": {"qk_norm": "layer_norm", "bias": True},
    "pictures": {"norm_num_groups": 4, "residual_connection": True, "rescale_output_factor": 1.7},
}


def built(name):
    from diffusers.models.attention_processor import Attention

    torch.manual_seed(0)
    return Attention(query_dim=16, heads=2, dim_head=8, **LAYERS[name]).eval()


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("masked", [False, True])
def test_a_layer_as_with_its_own_processor(name, masked):
    from diffusers.models.attention_processor import AttnProcessor2_0

    layer = built(name)
    x = torch.randn(2, 16, 3, 3) if name == "pictures" else torch.randn(2, 9, 16)
    context = torch.randn(2, 5, 12) if name.startswith("cross") else None
    n = 5 if context is not None else 9
    mask = torch.zeros(2, 1, n).masked_fill(torch.rand(2, 1, n) > 0.6, -1e4) if masked else None
    results = []
    for processor in (DiffusersProcessor(backend="torch"), AttnProcessor2_0()):
        layer.set_processor(processor)
        results.append(layer(x, encoder_hidden_states=context, attention_mask=mask))
    torch.testing.assert_close(*results)


def test_a_unet_by_processor_and_by_patch():
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=8,
        in_channels=2,
        out_channels=2,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=8,
        attention_head_dim=4,
    ).eval()
    arguments = torch.randn(1, 2, 8, 8), 7, torch.randn(1, 5, 8)
    with torch.no_grad():
        expected = unet(*arguments).sample
        with halfulp.patch(backend="torch"):
            patched = unet(*arguments).sample
        unet.set_attn_processor(DiffusersProcessor(backend="torch"))
        processed = unet(*arguments).sample
    torch.testing.assert_close(patched, expected)
    assert torch.equal(processed, patched), "the same kernel either way"
    assert not torch.equal(patched, expected)
