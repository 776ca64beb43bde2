"""A cause is named on evidence: what the reconstruction found, or what the findings prove; else it
is called unexplained.
"""

import math
from dataclasses import replace

import pytest
import torch

from halfulp.attention import emulate
from halfulp.audit import Shape, audit, diagnosis
from halfulp.audit.diagnosis import GROSS, diagnose
from halfulp.audit.inputs import Case
from halfulp.audit.verdict import Finding
from halfulp.recipes import recipe_named
from halfulp.reconstruct import CAUSES, Named, reconstruct
from halfulp.reconstruct.emulating import Model
from halfulp.reconstruct.panel import panel
from halfulp.reconstruct.places import Place
from halfulp.reconstruct.reconstruction import ingredients

SMALL = Shape(batch=1, heads=16, n_query=160, n_key=160, head_dim=32)  # two tiles


def finding(tensor="out", *, grade="defect", kind="error", probe="gaussian", ratio=2.0):
    return Finding(grade, kind, f"{tensor} error", tensor, Case(probe), "figure", ratio)


@pytest.fixture(scope="module")
def stock():
    return reconstruct("recipe:BF16_FLASH2")


INGREDIENTS = {
    "BF16_FLASH2": "delta-from-out",
    "BF16_FLASH2[row_sum_from=rounded]": "delta-from-out",
    "BF16_FLASH2[delta_from=residual]": "weights-row-sum",
    "BF16_FLASH2[delta_from=residual,row_sum_from=rounded]": "backward-weights",
    "BF16_HALFULP[delta_from=out,residual_bits=none]": "delta-from-out",
    "BF16_HALFULP[row_sum_from=exact]": "weights-row-sum",
    "BF16_HALFULP[backward_weights=lse]": "backward-weights",
    "BF16_HALFULP[backward_weights=maximum]": "backward-weights",
    "BF16_HALFULP[shift=maximum]": "backward-weights",
    "BF16_HALFULP": None,
}


@pytest.mark.parametrize("name", INGREDIENTS)
def test_the_ingredient_that_rounds_more_than_it_must_is_named(name):
    found = ingredients(Model.of(recipe_named(name)))
    assert (found[0].cause.key if found else None) == INGREDIENTS[name]


def test_nothing_found_has_no_cause(stock):
    assert diagnose([], None) == ()
    assert diagnose([], stock) == ()


def test_stock_findings_name_the_recipe_they_come_from(stock):
    (named,) = diagnose([finding("grad_query", grade="stock")], stock)
    assert named.cause.key == "delta-from-out"
    assert "BF16_FLASH2: explains 100 %" in named.evidence
    assert diagnose([finding("grad_query", grade="stock")], None) == ()


def test_the_first_cause_stays_first_where_a_later_result_has_it_too(stock):
    def place(tensor, key):
        return Place(tensor, "plain", "text", key, 1.0, 9.0)

    keys = ("unnormalized", "operand", "unnormalized")
    places = map(place, ("out", "grad_query", "grad_value"), keys)
    found = replace(stock, causes=(), places=tuple(places))
    assert [d.cause.key for d in diagnose([finding()], found)] == ["unnormalized"]
    every = [finding(), finding("grad_query"), finding("grad_value")]
    assert [d.cause.key for d in diagnose(every, found)] == ["unnormalized", "operand"]


def test_above_twenty_times_no_rounding_is_a_cause_that_does_not_explain_the_error(stock):
    little = Named(CAUSES["accumulator"], "accumulator=bf16", 3.0, "out", "plain", 0.5)
    found = replace(stock, causes=(little,))
    assert [d.cause.key for d in diagnose([finding(ratio=2.0)], found)] == ["accumulator"]
    (gross,) = diagnose([finding(ratio=2 * GROSS)], found)
    assert gross.cause.kind == "unexplained"
    found = replace(stock, causes=(replace(little, explained=0.99),))
    assert [d.cause.key for d in diagnose([finding(ratio=2 * GROSS)], found)] == ["accumulator"]


def test_a_cause_in_dv_alone_is_not_why_dq_fails(stock):
    of_value = Named(CAUSES["probabilities"], "e4m3", 9.0, "grad_value", "plain", 1.0)
    found = replace(stock, causes=(of_value,), ingredients=())
    (named,) = diagnose([finding("grad_query")], found)
    assert named.cause.key == "gradient-unexplained"


NOT_FINITE = {
    ("ties_many", "out"): "underflow",
    ("lse_below_88", "grad_query"): "exp-of-lse",
    ("masked_rows", "out"): "masked-row",
    ("very_large", "out"): "maximum",
    ("gaussian", "out"): "non-finite",
}


@pytest.mark.parametrize(("probe", "tensor"), NOT_FINITE)
def test_what_is_not_finite_is_told_by_its_probes(probe, tensor):
    (named,) = diagnose([finding(tensor, kind="non-finite", probe=probe)], None)
    assert named.cause.key == NOT_FINITE[probe, tensor]


def test_a_causal_mask_that_is_off_by_one_is_called_that_with_its_evidence():
    def attention(query, key, value, *, is_causal, scale):
        mask = None
        if is_causal:
            mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(1)
        return emulate(query, key, value, mask, scale=scale, recipe="BF16_FLASH2")

    report = audit(attention, shapes=(SMALL,))
    assert report.verdict == "defect"
    assert report.causes[0].key == "causal-mask"
    assert "one key too many" in report.evidence[0]
    assert report.evidence[0] in report.reason
    assert report.fingerprint is not None
    assert report.fingerprint.understood
    plain = report.as_dict()
    assert plain["causes"][0]["evidence"] == report.evidence[0]
    assert plain["fingerprint"]["text"] == report.fingerprint.sentence


def masked_softmax(causal=0, shift=lambda s: s.amax(-1, keepdim=True)):
    """Attention in fp32 whose mask or maximum is another."""

    def attention(query, key, value, *, is_causal, scale):
        scores = query.float() @ key.float().mT * scale
        if is_causal:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(causal)
            scores = scores.masked_fill(~seen, -torch.inf)
        weights = (scores - shift(scores.detach())).exp()
        return (weights / weights.sum(-1, keepdim=True) @ value.float()).to(query.dtype)

    return attention


def test_rows_that_see_no_key_are_a_matter_of_the_mask():
    report = audit(masked_softmax(causal=-1), shapes=(SMALL,), only=["gaussian_causal"])
    assert report.findings[0].kind == "non-finite"
    assert report.causes[0].key == "causal-mask"
    assert "hides the diagonal" in report.evidence[0]


def test_one_maximum_for_all_rows_is_seen():
    kernel = masked_softmax(shift=lambda s: s.amax((-1, -2), keepdim=True))
    report = audit(kernel, shapes=(SMALL,), only=["gaussian", "rows_apart"])
    assert report.causes[0].key == "maximum"
    assert report.evidence[0] == "not finite on rows_apart"
    assert audit(masked_softmax(), shapes=(SMALL,), only=["rows_apart"]).findings == ()


def test_what_is_not_finite_at_odd_sizes_alone_stands_behind_what_is_wrong_everywhere(stock):
    broken = replace(finding("grad_key", kind="non-finite", probe="sizes/3"), ratio=math.inf)
    heads = Named(CAUSES["key-heads"], "text", 300.0, "out", "plain", 1.0)
    found = replace(stock, causes=(heads,))
    every = [broken, finding(ratio=300.0)]
    assert [d.cause.key for d in diagnose(every, found)] == ["key-heads", "non-finite"]
    everywhere = [replace(broken, case=Case("gaussian")), finding(ratio=300.0)]
    assert diagnose(everywhere, found)[0].cause.kind == "non-finite"
    rounding = replace(stock, causes=(replace(heads, cause=CAUSES["accumulator"], harm=3.0),))
    assert diagnose([broken, finding(ratio=3.0)], rounding)[0].cause.kind == "non-finite"


def test_calls_in_other_memory_are_asked_in_it():
    rarer = {t.name: diagnosis._inputs(t).manner for t in panel(torch.bfloat16, rarer=True)}
    assert rarer["strided"] == "transposed/transposed/once"
    assert rarer["strided_operands"] == "transposed/contiguous/once"
    assert rarer["few_tokens"] == "contiguous/contiguous/once"
