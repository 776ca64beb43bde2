"""What a mean over heads cannot see: one wrong head, row or element among many good ones."""

import pytest
import torch
from torch.nn import functional

from halfulp.audit import Case, Shape, audit, verdict
from halfulp.audit import run as audit_run
from halfulp.audit.figures import excess, unlike
from halfulp.audit.inputs import Inputs
from halfulp.audit.natural_noise import natural_noise
from halfulp.audit.references import references
from halfulp.audit.rounding_bound import rounding_bounds
from halfulp.audit.shrink import severity
from halfulp.audit.statistics import error_ratio
from halfulp.calls import Result, Sees
from halfulp.operations import DTYPES
from halfulp.targets import resolve

pytestmark = pytest.mark.usefixtures("probes_alone")

SHAPE, LONG = Shape(2, 8, 128, 128, 32), Shape(2, 8, 128, 136, 32)
PROBES = ("gaussian", "sharp")


@pytest.fixture(autouse=True)
def small_plan(monkeypatch):
    """Two probes and the relations."""
    small = Shape(2, 2, 32, 32, 16)

    def plan(depth, dtype, seed=0, shapes=(), captured=()):
        cases = tuple(Case(name, SHAPE, seed, dtype) for name in PROBES)
        names = ("free_feature", "free_feature_causal")
        return audit_run.Plan(cases, (), tuple(Case(n, small, seed, dtype) for n in names))

    monkeypatch.setattr(audit_run, "plan", plan)


def good(query, key, value, *, is_causal, scale):
    operands = (x.float() for x in (query, key, value))
    out = functional.scaled_dot_product_attention(*operands, is_causal=is_causal, scale=scale)
    return out.to(query.dtype)


def unwritten_heads(query, key, value, *, is_causal, scale):
    out = good(query, key, value, is_causal=is_causal, scale=scale)
    written = torch.arange(query.shape[1]) % 2 == 0
    return torch.where(written[:, None, None], out, 0.0)


def neighbors_head(query, key, value, *, is_causal, scale):
    other = torch.cat([value[:, :-1], value[:, :1]], 1) if value.shape[1] > 2 else value
    return good(query, key, other, is_causal=is_causal, scale=scale)


def last_sequence(query, key, value, *, is_causal, scale):
    other = torch.cat([key[:-1], key[:1]])
    return good(query, other, value, is_causal=is_causal, scale=scale)


def one_element(query, key, value, *, is_causal, scale):
    out = good(query, key, value, is_causal=is_causal, scale=scale)
    wrong = torch.zeros_like(out)
    wrong.view(-1)[777] = 0.25
    return out + wrong


def one_gradient_row(query, key, value, *, is_causal, scale):
    out = good(query, key, value, is_causal=is_causal, scale=scale)
    if key.shape[2] > 100:
        # forward alone: a key whose gradient goes elsewhere
        key.register_hook(lambda g: torch.cat([g[:, :, 1:2], g[:, :, 1:]], 2))
    return out


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "kernel", [unwritten_heads, neighbors_head, last_sequence, one_element, one_gradient_row]
)
def test_what_a_mean_cannot_see_is_a_defect(kernel, dtype):
    report = audit(kernel, explain=False, dtype=dtype)
    assert (report.verdict, report.exit_code) == ("defect", 1)
    found = [f for f in report.findings if f.kind == "element"]
    assert found
    assert found[0].ratio > 12.5
    assert "× beyond what rounding can do" in found[0].figure


def test_an_error_below_the_largest_elements_rounding_is_beyond_its_own(monkeypatch):
    """The last row is a mean of 128 keys, the first one value."""

    def last_row(query, key, value, *, is_causal, scale):
        out = good(query, key, value, is_causal=is_causal, scale=scale)
        wrong = torch.zeros_like(out)
        wrong[0, 0, -1, 3] = 0.05
        return out + wrong

    monkeypatch.setitem(globals(), "PROBES", ("gaussian_causal",))
    report = audit(last_row, explain=False)
    (finding,) = [f for f in report.findings if f.case and f.case.probe == "gaussian_causal"]
    assert finding.figure.startswith("element (0, 0, 127, 3) of O is ")
    reference = references(finding.case)
    measured = reference.measure(audit_run.runner(audit_run.Target.of(last_row))(reference.inputs))
    (out,) = [f for f in measured.figures if f.name == "O error"]
    (stock,) = [f for f in reference.stock.figures if f.name == "O error"]
    assert float(excess(out, stock).max()) < 12.5


@pytest.mark.parametrize(
    ("shape", "words"),
    [(SHAPE, "× beyond what rounding can do"), (LONG, "× beyond what rounding makes there; in 1")],
)
def test_the_worst_element_is_named(shape, words, monkeypatch):
    monkeypatch.setitem(globals(), "SHAPE", shape)
    report = audit(one_element, explain=False)
    (finding,) = [f for f in report.findings if f.kind == "element" and f.case.probe == "gaussian"]
    assert finding.tensor == "out"
    assert finding.figure.startswith("element (0, 0, 24, 9) of O is ")  # 777 = 24 · 32 + 9
    assert words in finding.figure
    assert report.causes[0].name.startswith("some elements are wrong")
    assert report.reason.startswith("some elements are wrong")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_is_proven_to_be_rounding_is_no_defect_in_fp32(dtype):
    """A tiny gradient of scores that lie late, off by half and by twice of its bound."""
    name = "sizes/causal/no-option/late/contiguous/expanded/backward-twice"
    reference = references(case := Case(name, Shape(3, 2, 7, 128, 80), dtype=dtype))
    most = rounding_bounds(reference.inputs, reference.truth)["grad_query"]
    at = torch.unravel_index((most / reference.truth.grad_query.abs()).argmax(), most.shape)

    def found(times):
        moved = reference.truth.grad_query.clone()
        moved[at] += times * most[at]
        result = {n: x.to(DTYPES[dtype]) for n, x in reference.truth.given().items()}
        measured = reference.measure(Result(**result | {"grad_query": moved.to(DTYPES[dtype])}))
        figure = next(f for f in measured.figures if f.name == "dQ error")
        stock = next(f for f in reference.stock.figures if f.name == "dQ error")
        assert float(excess(figure, stock).max()) > verdict.PEAK * verdict.LIMITS[dtype].stock
        return [f.figure for f in verdict.judge_case(case, measured, reference, 1e-4)[1]]

    assert "2 × beyond what rounding can do" in found(2)[0]
    inside = found(0.5)
    if dtype == "float32":
        assert not inside
    else:
        assert "largest error there, though no more than rounding can do" in inside[0]


def test_a_test_of_means_alone_does_not_see_one_element():
    """Why the bound is there."""
    reference = references(Case("gaussian", SHAPE))
    run = audit_run.runner(audit_run.Target.of(one_element))
    measured = reference.measure(run(reference.inputs))
    stock = {f.name: f for f in reference.stock.figures}
    (out,) = [f for f in measured.figures if f.name == "O error"]
    assert error_ratio(out, stock["O error"], 1e-4, through_delta=True).lower < 1.25


@pytest.mark.parametrize("name", ["sdpa:math", "halfulp", "recipe:BF16_FLASH1", "sdpa:flash"])
def test_rounding_stays_below_the_bound(name):
    report = audit(resolve(name), explain=False)
    assert not [f for f in report.findings if f.kind == "element"]


def test_the_smallest_input_still_shows_it(monkeypatch):
    monkeypatch.setattr(audit_run, "reconstructed", lambda *_: None)
    report = audit(unwritten_heads)
    shown = next(f for f in report.findings if f.kind == "element")
    run = audit_run.runner(audit_run.Target.of(unwritten_heads))
    assert severity(run, shown.case, shown) > 3


@pytest.mark.parametrize(("tensor", "rows"), [("grad_query", 1), ("grad_key", 7)])
def test_one_element_may_get_all_that_rounding_o_makes_of_delta(tensor, rows):
    """Where keys share a feature, dQ's error through δ is that feature's; where a query has one,
    dK's. Over many heads the largest error of rounding O is what is said of an element, no less.
    """
    g = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(200, 2, n, 32, generator=g) for n in (rows, 24, 24, rows))
    k[..., 0] += 40
    q[..., 1] *= 20
    q, k, v, do = (x.bfloat16() for x in (q, k, v, do))
    scale = 32**-0.5
    wide = (q.double(), k.double())
    weights = torch.softmax(wide[0] @ wide[1].mT * scale, -1)
    out = weights @ v.double()
    moved = (do * (out.bfloat16() - out)).sum(-1, keepdim=True) * weights * scale
    errors = {"grad_query": moved @ wide[1], "grad_key": moved.mT @ wide[0]}
    call = Inputs(query=q, key=k, value=v, grad_out=do, sees=Sees(), scale=scale)
    most = getattr(natural_noise(call, out).delta, f"most_{tensor}")
    beyond = errors[tensor].abs().amax((2, 3)).flatten() / (0.4 * 2**-8 * most)
    assert beyond.max() < 5  # ten times as much is a fault
    assert 0.3 < beyond.square().mean().sqrt() < 2


def test_numbers_that_look_alike_get_the_digits_that_tell_them_apart():
    assert unlike(0.711, 0.0131) == "0.711, expected 0.0131"
    assert unlike(2.7122, 2.7118) == "2.7122, expected 2.7118"
    assert unlike(1.0, 1.0 + 2**-52) == "1, expected 1.0000000000000002"


def test_a_gross_error_is_cited_before_the_way_it_leans():
    def exchanged(gate, up):
        return functional.silu(up.float()).mul(gate.float()).to(gate.dtype)

    first, *others = audit(exchanged, op="swiglu", explain=False).findings
    assert (first.kind, first.ratio > verdict.GROSS) == ("error", True)
    assert any(f.kind == "lean" and f.ratio > first.ratio for f in others)
