"""The GPT is GPT-2 with its biases at zero; its options are what others' code says; a seed is its
weights.
"""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from halfulp.training.attention import Attend, AttentionPlan
from halfulp.training.config import Language
from halfulp.training.model import CausalAttention, Gpt

SMALL = Language(layers=3, heads=4, width=32, context=24, vocabulary=97)
EXACT = AttentionPlan.of("torch")


def tokens(seed: int = 0, shape: tuple[int, int] = (5, 24), vocabulary: int = 97) -> torch.Tensor:
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(seed))


def shaken(model: torch.nn.Module) -> torch.nn.Module:
    """Weights ten times as large, so that no part of the model is close to the identity."""
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(i), dtype=p.dtype)
            p.copy_(noise * 0.2 + (p.ndim == 1))
    return model.double()


def as_gpt2(model: Gpt, config: Language) -> torch.nn.Module:
    """transformers' GPT-2 with the same weights and no biases, in fp64."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": config.vocabulary, "n_positions": config.context, "n_embd": config.width}
    shape = {"n_layer": config.layers, "n_head": config.heads, "activation_function": "gelu"}
    plain = {
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    settings = transformers.GPT2Config(**sizes, **shape, **plain, attn_implementation="eager")
    theirs = transformers.GPT2LMHeadModel(settings).double().eval()
    state = {name: torch.zeros_like(x) for name, x in theirs.state_dict().items()}
    state["transformer.wte.weight"] = state["lm_head.weight"] = model.tokens.weight
    state["transformer.wpe.weight"] = model.positions.weight
    state["transformer.ln_f.weight"] = model.norm.weight
    for i, block in enumerate(model.blocks):
        at = f"transformer.h.{i}."
        state[at + "ln_1.weight"], state[at + "ln_2.weight"] = (
            block.norm1.weight,
            block.norm2.weight,
        )
        # their Conv1D multiplies from the right
        state[at + "attn.c_attn.weight"] = block.attention.qkv.weight.T
        state[at + "attn.c_proj.weight"] = block.attention.project.weight.T
        state[at + "mlp.c_fc.weight"], state[at + "mlp.c_proj.weight"] = (
            block.up.weight.T,
            block.down.weight.T,
        )
    theirs.load_state_dict(state)
    return theirs


def test_the_model_is_gpt2_without_biases():
    model = shaken(Gpt(SMALL, EXACT))
    theirs = as_gpt2(model, SMALL)
    read = tokens()
    expected = theirs(read).logits
    found = model(read)
    assert expected.abs().max() > 1
    assert (found - expected).abs().max() < 1e-12 * expected.abs().max()
    for logits in (found, expected):  # the same loss, since theirs is computed in fp32
        torch.autograd.backward(
            functional.cross_entropy(logits[:, :-1].flatten(0, 1), read[:, 1:].flatten())
        )
    # tied: it gathers from both ends
    pairs = [(model.tokens.weight.grad, theirs.transformer.wte.weight.grad)]
    for ours, block in zip(model.blocks, theirs.transformer.h, strict=True):
        pairs.append((ours.attention.qkv.weight.grad, block.attn.c_attn.weight.grad.T))
        pairs.append((ours.norm2.weight.grad, block.ln_2.weight.grad))
    for found, expected in pairs:
        assert (found - expected).abs().max() < 1e-12 * expected.abs().max() + 1e-15


@pytest.mark.parametrize("fault", ["gelu", "post-norm", "untied"])
def test_another_architecture_would_be_seen(fault, monkeypatch):
    """The comparison above has teeth: a plausible slip is off by far more than rounding."""
    model = shaken(Gpt(SMALL, EXACT))
    theirs = as_gpt2(model, SMALL)
    if fault == "gelu":
        exact = functional.gelu
        monkeypatch.setattr(functional, "gelu", lambda x: exact(x, approximate="tanh"))
    elif fault == "post-norm":
        model.norm.weight.data += 1e-6
    else:
        theirs.lm_head.weight = torch.nn.Parameter(theirs.lm_head.weight.detach() * (1 + 1e-6))
    expected = theirs(tokens()).logits
    assert (model(tokens()) - expected).abs().max() > 1e-9 * expected.abs().max()


def attention_of(config: Language) -> CausalAttention:
    return shaken(CausalAttention(config, Attend(0, config.heads, EXACT)))


def heads(x: torch.Tensor, count: int) -> torch.Tensor:
    return x.reshape(*x.shape[:2], count, -1).transpose(1, 2)


def by_hand(module: CausalAttention, x: torch.Tensor, change=lambda q, k: (q, k)) -> torch.Tensor:
    """Causal attention written out, with every key head repeated for its group of query heads."""
    query_weight, key_weight = module.head_weights()
    value_weight = module.qkv.weight[-key_weight.shape[0] * module.head_dim :].reshape(
        key_weight.shape
    )
    query, key, value = (
        torch.einsum("bnw,hdw->bhnd", x, w) for w in (query_weight, key_weight, value_weight)
    )
    query, key = change(query, key)
    group = torch.arange(module.heads) // (module.heads // module.key_heads)
    scores = torch.einsum("bhnd,bhmd->bhnm", query, key[:, group]) / math.sqrt(module.head_dim)
    hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    out = scores.masked_fill(hidden, -math.inf).softmax(-1) @ value[:, group]
    return out.transpose(1, 2).flatten(2) @ module.project.weight.T


def llama_rotation(query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    size = {"hidden_size": query.shape[1] * query.shape[3], "num_attention_heads": query.shape[1]}
    config = llama.LlamaConfig(
        **size, rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}
    )
    cos, sin = llama.LlamaRotaryEmbedding(config)(query, torch.arange(query.shape[2])[None])
    return llama.apply_rotary_pos_emb(query, key, cos, sin)


def rms_normed(module: CausalAttention):
    def change(query, key):
        normed = []
        for x, norm in ((query, module.query_norm), (key, module.key_norm)):
            mean_square = (x**2).sum(-1, keepdim=True) / x.shape[-1]
            normed.append(x / (mean_square + 1e-6).sqrt() * norm.weight)
        return tuple(normed)

    return change


@pytest.mark.parametrize("key_heads", [1, 2, None])
def test_shared_key_heads_are_repeated_ones(key_heads):
    module = attention_of(replace(SMALL, key_heads=key_heads))
    x = torch.randn(2, 24, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = by_hand(module, x)
    assert (module(x) - expected).abs().max() < 1e-12 * expected.abs().max()
    assert [w.shape[0] for w in module.head_weights()] == [4, key_heads or 4]


def test_normed_queries_and_keys_follow_the_formula():
    module = attention_of(replace(SMALL, query_key_norm=True))
    x = torch.randn(2, 24, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    expected = by_hand(module, x, rms_normed(module))
    assert (module(x) - expected).abs().max() < 1e-12 * expected.abs().max()
    assert (module(x) - by_hand(module, x)).abs().max() > 1e-3 * expected.abs().max()


def test_rotary_positions_are_llamas():
    module = attention_of(replace(SMALL, positions="rope"))
    x = torch.randn(2, 24, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    expected = by_hand(module, x, llama_rotation)
    assert (module(x) - expected).abs().max() < 1e-6 * expected.abs().max(), "their table is fp32"
    assert (module(x) - by_hand(module, x)).abs().max() > 1e-2 * expected.abs().max()


def test_rotary_scores_depend_on_the_distance_alone():
    rotary = attention_of(replace(SMALL, positions="rope", context=512)).rotary
    query, key = torch.randn(
        2, 1, 1, 1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(4)
    )
    at = [rotary(x.expand(1, 1, 512, 8))[0, 0] for x in (query, key)]
    scores = at[0] @ at[1].T
    for distance in (0, 1, 7, 100):
        along = scores.diagonal(-distance)
        assert (along - along[0]).abs().max() < 1e-5
    assert scores.diagonal(-7)[0] - scores.diagonal(0)[0] != pytest.approx(0, abs=1e-3)


def test_options_together_keep_low_precision_inputs_low():
    """Under autocast attention is fed bf16, whatever norm or rotation is computed in."""
    fed = []

    def attention(query, key, value, *, is_causal, scale):
        fed.extend((query.dtype, key.dtype, value.dtype))
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=is_causal, scale=scale
        )

    config = replace(SMALL, positions="rope", query_key_norm=True, key_heads=2)
    model = Gpt(config, AttentionPlan.of("mine"), own={"mine": attention})
    with torch.autocast("cpu", torch.bfloat16):
        model(tokens())
    assert fed == [torch.bfloat16] * 9


def test_weights_come_from_the_seed_alone():
    before = torch.get_rng_state()
    one = Gpt(SMALL, AttentionPlan.of("torch:flash"), seed=3)
    torch.manual_seed(1234)
    two = Gpt(SMALL, AttentionPlan.of("BF16_HALFULP", "layer 1: torch:math"), seed=3)
    torch.set_rng_state(before)
    other = Gpt(SMALL, EXACT, seed=4)
    assert torch.equal(torch.get_rng_state(), before), "torch's own generator is left alone"
    for (name, x), (_, y), (_, z) in zip(
        *(m.named_parameters() for m in (one, two, other)), strict=True
    ):
        assert torch.equal(x, y), name
        assert x.ndim == 1 or not torch.equal(x, z), name


def test_initial_weights_are_nanogpts():
    model = Gpt(Language(layers=8, heads=4, width=128, context=64), EXACT)
    for name, x in model.named_parameters():
        if x.ndim == 1:
            assert torch.equal(x, torch.ones_like(x)), name
            continue
        expected = 0.02 / 4 if name.endswith(("project.weight", "down.weight")) else 0.02
        spread = x.std().item()
        # five standard errors
        assert spread == pytest.approx(expected, rel=5 / math.sqrt(2 * x.numel())), name
        assert abs(x.mean().item()) < 5 * expected / math.sqrt(x.numel()), name


def test_the_parameters_are_those_of_gpt2_without_biases():
    """12 layers of width 768 would be 12·(12·768² + 2·768) + (50304 + 1024 + 1)·768 =
    124,373,760.
    """
    model = Gpt(Language(layers=3, heads=4, width=48, context=40, vocabulary=101), EXACT)
    count = sum(p.numel() for p in model.parameters())
    assert count == 3 * (12 * 48**2 + 2 * 48) + (101 + 40 + 1) * 48


def test_a_model_sees_no_future():
    model = shaken(Gpt(replace(SMALL, positions="rope"), EXACT))
    read = tokens()
    changed = read.clone()
    changed[:, 13:] = (changed[:, 13:] + 1) % 97
    one, two = model(read), model(changed)
    assert torch.allclose(one[:, :13], two[:, :13], rtol=0, atol=1e-12)
    assert (one[:, 13:] - two[:, 13:]).abs().amax() > 0.1


def test_every_layer_and_head_runs_its_own_attention():
    def doubled(query, key, value, *, is_causal, scale):
        return 2 * functional.scaled_dot_product_attention(
            query, key, value, is_causal=is_causal, scale=scale
        )

    plain = shaken(Gpt(SMALL, EXACT))
    plan = EXACT.with_("layer 1 head 2: twice")
    planned = shaken(Gpt(SMALL, plan, own={"twice": doubled}))
    columns = plain.blocks[1].attention.project.weight[:, 16:24]
    with torch.no_grad():
        columns *= 2  # the same as twice the output of head 2
    expected = plain(tokens())
    assert (planned(tokens()) - expected).abs().max() < 1e-12 * expected.abs().max()
    with pytest.raises(ValueError, match="layers 0 to 2"):
        Gpt(SMALL, EXACT.with_("layer 3: torch"))
    with pytest.raises(ValueError, match="heads 0 to 3"):
        Gpt(SMALL, EXACT.with_("head 4: torch"))


def test_too_many_tokens_are_refused():
    with pytest.raises(ValueError, match="tokens of length 25: accepted are at most context=24"):
        Gpt(SMALL, EXACT)(tokens(shape=(1, 25)))
