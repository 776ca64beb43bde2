"""Which attention runs where: plans as text, and that every head of every layer gets the function
the plan names.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from halfulp.attention import emulate
from halfulp.recipes import BF16_HALFULP, recipe_named
from halfulp.training.attention import (
    Assignment,
    Attend,
    AttentionPlan,
    attention_function,
    set_tap,
)


def tensors(heads: int = 4, key_heads: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    query = torch.randn(2, heads, 8, 4, generator=g)
    key, value = torch.randn(2, 2, key_heads or heads, 8, 4, generator=g)
    return query, key, value


def test_names_lead_to_the_kernel_they_name() -> None:
    options = {"is_causal": True, "scale": 0.5}
    q, k, v = tensors()
    exact = attention_function("torch:fp32")(q, k, v, **options)
    by_name = attention_function("bf16_halfulp")(q, k, v, **options)
    assert torch.equal(by_name, emulate(q, k, v, recipe=BF16_HALFULP, **options))
    changed = "BF16_FLASH2[out=e8m2,block_key=none]"
    assert torch.equal(
        attention_function(changed)(q, k, v, **options),
        emulate(q, k, v, recipe=recipe_named(changed), **options),
    )
    for name in ("torch:flash", "torch:math", "BF16_FLASH2", "halfulp", "halfulp:torch"):
        out = attention_function(name)(q, k, v, **options)
        assert out.dtype == q.dtype
        assert not torch.equal(out, exact)
        assert torch.allclose(out, exact, atol=0.05)
    assert torch.allclose(attention_function("torch")(q, k, v, **options), exact, atol=1e-6)


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ("torch:fast", "did you mean 'torch:flash'?"),
        ("flex", "FlexAttention has no backward pass on a CPU; accepted is a kernel that has one"),
        ("nothing", "attention='nothing'"),
        ("BF16_FLASH2[out=]", "format=''"),
        ("BF16_FLASH2[mass=3]", "mass='3'"),
        ("BF16_FLASH2[out]", "accepted is field=value"),
        ("nowhere.py:f", "there is no file"),
    ],
)
def test_what_is_not_there_is_refused_in_a_line(choice: str, said: str) -> None:
    with pytest.raises(ValueError, match=r".") as refused:
        attention_function(choice)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_function_of_the_users_is_loaded_and_read_in_bf16(tmp_path) -> None:
    (tmp_path / "kernel.py").write_text(
        "import torch\n\ndef attend(query, key, value, *, is_causal, scale):\n"
        "    assert query.dtype == torch.bfloat16 and is_causal and scale == 0.5\n"
        "    return torch.zeros_like(query), 'lse'\n"
    )
    out = attention_function(f"{tmp_path / 'kernel.py'}:attend")(
        *tensors(), is_causal=True, scale=0.5
    )
    assert out.dtype == torch.float32
    assert not out.any()


NUMBERS = st.none() | st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple)


@given(st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), NUMBERS, NUMBERS), max_size=5))
def test_the_last_assignment_that_covers_a_head_counts_and_text_reads_back(rules) -> None:
    plan = AttentionPlan((Assignment("a"), *(Assignment(*rule) for rule in rules)))
    assert AttentionPlan.of(*(str(a) for a in plan.assignments)) == plan
    for layer in range(4):
        expected = ["a"] * 4
        for choice, layers, heads in rules:
            for head in range(4):
                if (layers is None or layer in layers) and (heads is None or head in heads):
                    expected[head] = choice
        assert [plan.choice(layer, head) for head in range(4)] == expected
        groups = plan.groups(layer, 4)
        assert sorted(head for members in groups.values() for head in members) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "texts", [(), ("layer 1: torch",), ("torch", "layer one: torch"), ("torch", "head 1"), (" ",)]
)
def test_a_plan_that_leaves_heads_without_attention_is_refused(texts) -> None:
    with pytest.raises(ValueError, match="attention="):
        AttentionPlan.of(*texts)


@pytest.mark.parametrize("text", ["layer 2: torch", "head 4: torch"])
def test_a_layer_or_head_that_is_not_there_is_refused(text: str) -> None:
    plan = AttentionPlan.of("torch").with_(text)
    with pytest.raises(ValueError, match=r"accepted are (layers 0 to 1|heads 0 to 3)"):
        plan.check(layers=2, heads=4)


def test_every_head_gets_its_own_function() -> None:
    q, k, v = tensors()
    own = {
        name: lambda query, key, value, *, is_causal, scale, by=by: value * by
        for name, by in (("x2", 2), ("x3", 3))
    }
    plan = AttentionPlan.of("x2", "layer 1 head 0,3: x3")
    first, second = (Attend(layer, 4, plan, own)(q, k, v, is_causal=True) for layer in (0, 1))
    assert torch.equal(first, v * 2)
    assert torch.equal(second, v * torch.tensor([3.0, 2.0, 2.0, 3.0])[:, None, None])


def test_heads_that_share_keys_see_the_right_ones() -> None:
    q, k, v = tensors(4, 2)
    out = Attend(0, 4, AttentionPlan.of("torch:fp32"))(q, k, v, is_causal=False)
    for head in range(4):
        weights = (q[:, head] @ k[:, head // 2].mT * 0.5).softmax(-1)
        assert torch.allclose(out[:, head], weights @ v[:, head // 2], atol=1e-5)


def test_a_tap_sees_the_call_and_may_replace_out() -> None:
    q, k, v = tensors()
    model = torch.nn.Sequential(Attend(3, 4, AttentionPlan.of("torch:fp32")))
    seen = []

    def tap(layer, call, out):
        seen.append((layer, out.clone(), call.sees.causal, call.scale))
        return out * 0

    plain = model[0](q, k, v, is_causal=True)
    set_tap(model, tap)
    assert not model[0](q, k, v, is_causal=True).any()
    ((layer, out, is_causal, scale),) = seen
    assert (layer, is_causal, scale) == (3, True, 0.5)
    assert torch.equal(out, plain)
    set_tap(model, None)
    assert torch.equal(model[0](q, k, v, is_causal=True), plain)
