"""Operands that stand in another's place or order, options of the backward pass alone, and keys
that are there twice: named as what they are.
"""

import math
from dataclasses import replace

import pytest
import torch

from halfulp.recipes import BF16_FLASH2
from halfulp.reconstruct import reconstruct
from halfulp.reconstruct.call_options import asked
from halfulp.reconstruct.emulating import GRADIENTS, Emulator, Model
from halfulp.reconstruct.exact import scores_of, weights_of
from halfulp.reconstruct.heads import layouts
from halfulp.reconstruct.naming import named
from halfulp.reconstruct.panel import panel
from halfulp.reconstruct.places import FORMULAS
from halfulp.reconstruct.slip_kinds import Slip
from halfulp.reconstruct.twists import masks
from halfulp.reconstruct.weights_read import compared
from tests.reconstruct.exact_kernel import right

TRIALS = {t.name: t for rare in (False, True) for t in panel(torch.bfloat16, rarer=rare)}
PLAIN = TRIALS["plain"]
ORDERS = {t.key: t for t in layouts()}


def first_of(kernel, dtype="bfloat16"):
    found = reconstruct(kernel, dtype=dtype)
    return [n.cause.key for n in found.causes] + [p.cause for p in found.places]


def exact(query, key, value, is_causal, scale, mix=lambda p: p):
    s = query.double() @ key.double().mT * scale
    hidden = torch.ones(s.shape[-2:], dtype=torch.bool).triu(1)
    s = s.masked_fill(hidden, -math.inf) if is_causal else s
    return (mix(s.softmax(-1)) @ value.double()).to(query.dtype)


@pytest.mark.parametrize("turned", ["viewed", "read"])
def test_operands_whose_memory_is_another_while_o_is_put_in_its_place(turned):
    """The twist says the same as the reshapes that people write."""

    def reshaped(x):
        b, h, n, d = x.shape
        rows = x.transpose(1, 2).reshape(b, h, n, d)
        return rows if turned == "viewed" else x.reshape(b, n, h, d).transpose(1, 2)

    read = ORDERS[f"layout-{turned}"].turn(PLAIN)
    for name in ("query", "key", "value"):
        assert torch.equal(getattr(read.call, name), reshaped(getattr(PLAIN.call, name)))

    def kernel(query, key, value, *, is_causal, scale):
        return exact(*(reshaped(x) for x in (query, key, value)), is_causal, scale)

    assert first_of(kernel)[0] == "layout"


def test_weights_that_are_transposed_are_a_layout():
    def kernel(query, key, value, *, is_causal, scale):
        square = query.shape[2] == key.shape[2]
        return exact(query, key, value, is_causal, scale, (lambda p: p.mT) if square else (
            lambda p: p))  # fmt: skip

    assert first_of(kernel)[0] == "layout"


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_an_operand_in_anothers_place_needs_one_of_its_shape(name):
    for other in {"query", "key", "value"} - {name}:
        twist = ORDERS[f"in-place-{name}-{other}"]
        read = twist.turn(PLAIN)
        assert torch.equal(getattr(read.call, name), getattr(PLAIN.call, other))
        assert twist.turn(TRIALS["other_widths"]) is None or {name, other} == {"query", "key"} - {
            ""
        }


def test_attention_over_heads_is_asked_of_groups_too():
    trial = TRIALS["grouped_causal"]
    turned = ORDERS["layout-BNHD"].turn(trial)
    assert turned.call.scores_shape == (*trial.call.query.shape[:3:2], 4, 2)
    assert ORDERS["layout-BNHD"].turn(TRIALS["cross"]) is None


@pytest.mark.parametrize(
    ("keys", "cause"),
    [((0, 16), "other-data"), ((176, 192), "key-tail")],
)
def test_first_keys_that_are_there_twice_were_joined_once_more(keys, cause):
    weights = weights_of(PLAIN.call, scores_of(PLAIN.call))
    weights[..., slice(*keys)] *= 2
    assert compared(PLAIN, weights / weights.sum(-1, keepdim=True)).cause == cause


@pytest.mark.parametrize("option", ["mask", "window"])
def test_what_the_backward_pass_alone_hides_otherwise_is_a_mask_of_its(option):
    trial = TRIALS["masked" if option == "mask" else "window"]
    twist = next(t for t in (*masks(), *asked()) if t.cause == option and t.turn(trial) is not None)
    wrong = Model.of(BF16_FLASH2).with_ways(
        frozenset(GRADIENTS), lambda way: replace(way, twists=(twist,))
    )
    emulator = Emulator({trial: right(trial)})
    made = emulator.tensors(trial, wrong.forward, None) | emulator.tensors(
        trial, wrong.forward, wrong.gradients[0])  # fmt: skip
    result = right(trial, **{n: made[n].bfloat16() for n in GRADIENTS})
    found, _ = named(Emulator({trial: result}), wrong, BF16_FLASH2)
    assert [n.cause.key for n in found] == ["backward-mask"]


def test_no_option_but_a_cap_multiplies_scores():
    assert {o for o, causes in FORMULAS.items() if "scale" in causes} == {
        "causal-mask", "key-heads", "ragged", "window", "mask"}  # fmt: skip

    def kernel(query, key, value, *, is_causal, scale, attn_mask=None):
        scale = scale if attn_mask is None else 2 * scale
        s = query.double() @ key.double().mT * scale
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            s = s.masked_fill(~attn_mask, -math.inf)
        elif attn_mask is not None:
            s = s + attn_mask
        hidden = torch.ones(s.shape[-2:], dtype=torch.bool).triu(1)
        s = s.masked_fill(hidden, -math.inf) if is_causal else s
        return (s.softmax(-1).nan_to_num(0.0) @ value.double()).to(query.dtype)

    assert first_of(kernel)[0] == "scale"


@pytest.mark.parametrize(
    ("parts", "cause"), [(("last keys",), "key-tail"), (("later keys",), "accumulator")]
)
def test_a_sum_that_lacks_the_last_block_lacks_its_keys(parts, cause):
    for stage in ("accumulator", "divided_out"):
        assert Slip(stage, "stale", parts).cause == cause
