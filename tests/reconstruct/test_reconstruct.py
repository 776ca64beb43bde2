"""What was planted is found: recipes exactly, faults by their field, function or place; what cannot
be found is said to be unexplained.
"""

import json
import math

import pytest
import torch

from halfulp import cli, emulate
from halfulp.operations import operation_named
from halfulp.recipes import RECIPES, recipe_named, recipe_text
from halfulp.reconstruct import CAUSES, reconstruct, reconstruct_operation
from tests.audit import zoo

ZOO = {kernel.name: kernel for kernel in (*zoo.FAULTY, *zoo.SOUND)}


OTHERS = ("FP64", "FP32", "FP16_FLOOR")  # what they are in bfloat16 has other names


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    "recipe",
    [
        "BF16_FLASH2[block_key=64,accumulator=bf16]",
        *(name for name in RECIPES if name not in OTHERS),
    ],
)
def test_a_recipe_is_recovered_exactly(recipe):
    found = reconstruct(
        f"recipe:{recipe}", dtype="float16" if recipe.startswith("FP16") else "bfloat16"
    )
    assert found.text == recipe_text(recipe_named(recipe))
    assert found.understood
    assert not found.places
    assert all(e.model.value > 0.999 for e in found.explained)


def test_attention_written_by_hand_is_a_recipe():
    def by_hand(query, key, value, *, is_causal, scale):
        scores = query.float() @ key.float().mT * scale
        if is_causal:
            unseen = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(unseen, -math.inf)
        return torch.softmax(scores, -1).to(query.dtype) @ value

    found = reconstruct(by_hand)
    assert found.text == "BF16_STANDARD_FP32"
    assert found.understood


# fault → cause, what its text says, the results that it is in
NAMED = {
    "lse_low": ("lse", "lse=bf16"),
    "dv_weights_fp8": ("probabilities", "=ocp_e4m3"),  # P, or P as an operand: one number here
    "tail_dropped": ("key-tail", "block of 64"),
    "causal_sees_next": ("causal-mask", "queries 63 of every 64"),
}


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("name", NAMED)
def test_a_fault_is_named_with_its_field_or_its_function(name):
    found = reconstruct(ZOO[name].fn)
    key, text = NAMED[name]
    assert [named.cause.key for named in found.causes][:1] == [key], found.sentence
    assert text in found.causes[0].text
    assert found.causes[0].harm > 1.25
    assert found.understood


@pytest.mark.thorough(keep=0)
def test_what_no_candidate_explains_is_located_and_not_guessed():
    """δ is dropped where it is small, which no recipe does: every row's δ is told to be off."""
    found = reconstruct(ZOO["delta_dropped"].fn, effort=200)
    assert not found.understood
    assert not found.causes
    assert {place.tensor for place in found.places} == {"grad_query", "grad_key"}
    assert {place.cause for place in found.places} <= {"delta", "no-delta"}
    assert "unexplained: dQ" in found.sentence
    by_name = {e.tensor: e for e in found.explained}
    assert by_name["grad_value"].share > 0.99


def test_noise_is_explained_by_nothing_and_located():
    def noisy(query, key, value, *, is_causal, scale, attn_mask=None, enable_gqa=False):
        out = emulate(
            query, key, value, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
        noise = torch.randn(out.shape, generator=torch.Generator().manual_seed(out.numel()))
        return out + (0.03 * noise).to(out.dtype)

    found = reconstruct(noisy, effort=200)
    assert not found.understood
    assert not found.causes
    first = found.places[0]
    assert (first.tensor, first.cause) == ("out", "out")
    assert "off after it is summed" in first.text


def test_a_kernel_without_gradients_is_told_by_its_results():
    def forward_only(query, key, value, *, is_causal, scale):
        with torch.no_grad():
            return emulate(
                query, key, value, is_causal=is_causal, scale=scale, recipe="BF16_FLASH1"
            )

    found = reconstruct(forward_only, effort=200)
    assert [e.tensor for e in found.explained] == ["out"]
    assert found.text == "BF16_FLASH1"
    assert "masked" in found.refused


def test_the_search_is_plain_data_and_the_same_every_time():
    first, second = (reconstruct(ZOO["out_cut"].fn).as_dict() for _ in range(2))
    seconds = first.pop("seconds"), second.pop("seconds")
    assert all(math.isfinite(s) for s in seconds)
    assert json.dumps(first, allow_nan=False) == json.dumps(second, allow_nan=False)


def test_arguments_are_checked_in_one_line():
    with pytest.raises(ValueError, match=r"dtype='int8': accepted are bfloat16"):
        reconstruct("sdpa", dtype="int8")
    with pytest.raises(ValueError, match=r"effort=0: accepted is an integer of at least 1"):
        reconstruct("sdpa", effort=0)
    with pytest.raises(ValueError, match=r"gives no result on any of the inputs.*refuses"):
        reconstruct(_refusing)


def _refusing(query, key, value, *, is_causal, scale):
    raise ValueError("not today")


def test_every_cause_has_a_key_of_its_own_and_words():
    for key, cause in CAUSES.items():
        assert cause.key == key
        assert cause.name
        assert cause.effect
        assert cause.resembles


def test_the_command_prints_the_recipe_its_shares_and_plain_data(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert cli.main(["reconstruct", "recipe:BF16_FLASH2", "--in-process"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("recipe:BF16_FLASH2 is BF16_FLASH2: explains 100 % of O's error")
    assert "dK      100.0 %" in said
    assert cli.main(["reconstruct", "recipe:BF16_FLASH2", "--in-process", "--json", "-"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["recipe"] == "BF16_FLASH2"
    assert plain["understood"]
    assert cli.main(["reconstruct", "sdpaa"]) == 2
    assert "target='sdpaa': accepted is" in capsys.readouterr().err


@pytest.mark.parametrize("takes", ["q, k, v", "qkv"])
@pytest.mark.parametrize("given", [(), ("--form", "{form}")])
def test_a_kernel_is_asked_in_the_form_that_it_takes(takes, given, capsys, tmp_path):
    """It was once called a kernel that attends over heads."""
    file = tmp_path / "mine.py"
    parts = "qkv.unbind(2)" if takes == "qkv" else "(q, k, v)"
    file.write_text(
        "from torch.nn.functional import scaled_dot_product_attention as sdpa\n\n\n"
        f"def attention({takes}, causal=False):\n"
        f"    q, k, v = (x.transpose(1, 2) for x in {parts})\n"
        "    return sdpa(q, k, v, is_causal=causal).transpose(1, 2)\n"
    )
    form = "qkv[B,N,3,H,D]" if takes == "qkv" else "q[B,N,H,D], k[B,N,H,D], v[B,N,H,D]"
    asked = ["reconstruct", f"{file}:attention", "--in-process", "--effort", "1", "--dtype",
             "float32", "--json", "-", *(x.format(form=form) for x in given)]  # fmt: skip
    assert cli.main(asked) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["form"] == form
    assert not plain["causes"]


def test_the_command_says_what_a_kernel_of_another_operation_does(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "120")
    kernel = tmp_path / "gated.py"
    kernel.write_text(
        "import torch\n\n\ndef gated(gate, up):\n    return gate * torch.sigmoid(gate) * up\n"
    )
    asked = ["reconstruct", "--op", "swiglu", f"{kernel}:gated", "--in-process"]
    assert cli.main(asked) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "(sigmoid, activated) is rounded to bf16, as eager code does: explains 100 %" in said
    assert cli.main([*asked, "--json", "-"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["found"]["cause"] == "step-low"
    assert plain["found"]["rivals"][0][0] == plain["found"]["text"]
    assert cli.main(["reconstruct", "--op", "swiglu", "torch", "--in-process"]) == 0
    count = len(operation_named("swiglu").probes)
    assert f"errs by no more than its recipes on {count} calls" in capsys.readouterr().out
    with pytest.raises(
        ValueError, match=r"gives no result on any of the inputs \(.*\); accepted is"
    ):
        reconstruct_operation(_silent, "swiglu")


def _silent(gate, up):
    raise NotImplementedError("not today")


def _overflowing(gate, up):
    e = gate.float().exp()
    return (gate.float() * (e / (1 + e)) * up.float()).to(gate.dtype)


def test_results_that_are_not_finite_are_the_first_thing_said():
    found = reconstruct_operation(_overflowing, "swiglu")
    assert str(found).partition(": ")[2].startswith("NaN or Inf where exact values are finite: ")
    assert found.nonfinite["output"] > 0
    assert not found.understood


def test_plain_code_that_casts_its_weights_down_is_understood():
    """By autograd, which casts dP to the same format."""

    def attention(query, key, value, *, is_causal, scale):
        scores = query.float() @ key.float().mT * scale
        if is_causal:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
            scores = scores.masked_fill(~seen, -torch.inf)
        weights = scores.softmax(-1).to(torch.float8_e4m3fn).float()
        return (weights @ value.float()).to(query.dtype)

    found = reconstruct(attention)
    assert found.understood
    assert {"weights", "probabilities", "delta"} == {n.cause.key for n in found.causes}
