"""Tiny random language models with `attn_implementation="halfulp"`, held to transformers' own
attention.
"""

import importlib
import warnings

import pytest
import torch

import halfulp

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
SIZE = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
WIDE = SIZE | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
MODELS = {
    "Llama": WIDE | {"num_key_value_heads": 2},
    "GPT2": SIZE | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "attn_pdrop": 0.0},
    "Qwen3": WIDE
    | {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
    },
    "GptOss": WIDE
    | {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "sliding_window": 5,
    },
    "Gemma2": WIDE
    | {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "attn_logit_softcapping": 2.0,
        "sliding_window": 5,
        "query_pre_attn_scalar": 9,
    },
}
HEADS = {"GPT2": "LMHeadModel"}


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    halfulp.register_transformers()
    name = request.param
    config = getattr(transformers, f"{name}Config")(**MODELS[name])
    torch.manual_seed(0)
    built = getattr(transformers, f"{name}{HEADS.get(name, 'ForCausalLM')}")(config).eval()
    torch.manual_seed(1)
    # as initialized, attention would hardly differ from an average
    for parameter in built.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return built


@pytest.fixture
def tokens():
    return padded_tokens("left")


def padded_tokens(side):
    ids = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, slice(4) if side == "left" else slice(-4, None)] = 0
    return ids, mask if side else torch.ones_like(ids)


def run(model, implementation, ids, mask):
    """Logits and the gradients of all parameters."""
    model.set_attn_implementation(implementation)
    model.zero_grad()
    logits = model(ids, attention_mask=mask).logits[mask.bool()]
    logits.square().mean().backward()
    return logits.detach(), {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_logits_and_gradients_as_eager(model, side):
    logits, grads = run(model, "halfulp", *padded_tokens(side))
    wanted, grads_w = run(model, "eager", *padded_tokens(side))
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
    assert grads.keys() == grads_w.keys()
    for name, grad in grads.items():
        assert float((grad - grads_w[name]).norm()) <= 1e-4 * float(grads_w[name].norm()) + 1e-6, (
            name
        )


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_with_a_cache(model, tokens, cache):
    """Greedy decoding token by token from padded prompts: the tokens that eager attention gives."""
    ids, mask = tokens
    texts = []
    for implementation in ("halfulp", "eager"):
        model.set_attn_implementation(implementation)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            texts.append(
                model.generate(
                    ids,
                    attention_mask=mask,
                    max_new_tokens=10,
                    do_sample=False,
                    cache_implementation=cache,
                    disable_compile=True,
                )
            )
    assert torch.equal(*texts)
    assert texts[0].shape[1] > 12


def test_chunks_of_a_prompt_with_a_cache(model, tokens):
    """The last logits are those of the prompt read at once: queries that start in the middle see
    the keys before.
    """
    ids = tokens[0]
    model.set_attn_implementation("halfulp")
    with torch.no_grad():
        whole, cache = model(ids).logits, None
        parts = []
        for part in ids.split(5, dim=1):
            result = model(part, past_key_values=cache, use_cache=True)
            cache = result.past_key_values
            parts.append(result.logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-4)


def test_it_is_halfulp_that_runs(model, tokens, monkeypatch):
    calls = []
    real = halfulp.attention

    def count(*args, **options):
        calls.append(args[0].shape)
        return real(*args, **options)

    monkeypatch.setattr(
        importlib.import_module("halfulp.attention.transformers"), "attention", count
    )
    model.set_attn_implementation("halfulp")
    with torch.no_grad():
        model(tokens[0], attention_mask=tokens[1])
    assert len(calls) == 2, "one call a layer"


def operands(queries=6, keys=6):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, n, 8, generator=generator) for n in (queries, keys, keys)]


def test_position_bias_and_sparse_attention():
    from halfulp.attention.transformers import attention_forward

    q, k, v = operands()
    generator = torch.Generator().manual_seed(1)
    bias = torch.randn(1, 2, 6, 6, generator=generator)
    indices = torch.tensor([[[0, 2], [1, 1], [0, 5], [3, -1], [2, 4], [5, 0]]])
    chosen = torch.zeros(6, 6, dtype=torch.bool)
    for query, keys in enumerate(indices[0].tolist()):
        chosen[query, [key for key in keys if key >= 0]] = True
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    hidden = bias.masked_fill(~causal, -torch.inf)
    sparse = bias.masked_fill(~(causal & chosen), -torch.inf)
    for mask, is_causal in ((None, True), (causal, False), (hidden - bias, False)):
        options = {"is_causal": is_causal, "position_bias": bias}
        for more, expected in (({}, hidden), ({"indices": indices}, sparse)):
            out, _ = attention_forward(None, q, k, v, mask, **options, **more)
            wanted = halfulp.attention(q, k, v, expected)
            torch.testing.assert_close(out.transpose(1, 2), wanted)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"cache": object()}, "cache is given: accepted is None, since paged caches"),
        ({"block_indices": torch.zeros(1)}, "block_indices is given: accepted is None"),
        ({"sinks": torch.zeros(2)}, "sinks is given"),
        ({"output_attentions": True}, "output_attentions=True .*eager"),
        ({"cu_seq_lens_q": torch.tensor([0, 2, 6])}, "cu_seq_lens_q is given"),
        ({"sliding_window": 3}, "sliding_window=3 for 6 keys"),
    ],
)
def test_keywords_that_are_not_understood_are_refused_by_name(asked, why):
    from halfulp.attention.transformers import attention_forward

    with pytest.raises(ValueError, match=why):
        attention_forward(None, *operands(), None, **asked)


def test_what_a_mask_holds_and_what_changes_nothing_is_taken():
    from halfulp.attention.transformers import attention_forward

    window = torch.ones(6, 6, dtype=torch.bool).tril().triu(-2)
    wanted = halfulp.attention(*operands(), window).transpose(1, 2)
    ends = torch.tensor([0, 2, 6])
    said = {"use_cache": True, "output_attentions": False, "alibi": None, "position_ids": ends}
    out, _ = attention_forward(
        None, *operands(), window, sliding_window=3, cu_seq_lens_q=ends, **said
    )
    torch.testing.assert_close(out, wanted)


def test_more_keys_than_queries_need_a_mask():
    """As where a layer reads only the last logits, or appends keys to a cache: "causal" alone would
    hide all but the first keys.
    """
    from halfulp.attention.transformers import attention_forward

    with pytest.raises(ValueError, match="3 queries and 6 keys: accepted is a mask"):
        attention_forward(None, *operands(queries=3), None)
    out, _ = attention_forward(None, *operands(queries=1), None)
    torch.testing.assert_close(out.transpose(1, 2), halfulp.attention(*operands(queries=1)))
