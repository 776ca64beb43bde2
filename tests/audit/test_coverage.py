"""Sound is said only of what was seen whole: every planned call, every gradient, every input."""

import pytest
import torch
from torch.nn import functional

from halfulp.audit import Case, Shape, audit
from halfulp.audit import run as audit_run
from halfulp.report.audit_summary import MEANING, facts, headline, why
from halfulp.report.tables import sign_of

pytestmark = pytest.mark.usefixtures("probes_alone")

SHAPE = Shape(2, 4, 48, 48, 16)
PROBES = ("gaussian", "free_feature_causal", "value_constant", "masked_rows")


@pytest.fixture(autouse=True)
def small_plan(monkeypatch):
    """Four probes and the relations."""
    small = Shape(2, 2, 32, 32, 16)

    def plan(depth, dtype, seed=0, shapes=(), captured=()):
        cases = tuple(Case(name, SHAPE, seed, dtype) for name in PROBES)
        names = ("free_feature", "free_feature_causal")
        return audit_run.Plan(cases, (), tuple(Case(n, small, seed, dtype) for n in names))

    monkeypatch.setattr(audit_run, "plan", plan)


def good(query, key, value, *, is_causal, scale, attn_mask=None):
    operands = (x.double() for x in (query, key, value))
    out = functional.scaled_dot_product_attention(
        *operands, is_causal=is_causal, scale=scale, attn_mask=attn_mask
    )
    return out.to(query.dtype)


def no_causal(query, key, value, *, is_causal, scale, attn_mask=None):
    if is_causal:
        raise RuntimeError("no causal kernel")
    return good(query, key, value, is_causal=False, scale=scale, attn_mask=attn_mask)


def asserts_no_causal(query, key, value, *, is_causal, scale, attn_mask=None):
    assert not is_causal
    return good(query, key, value, is_causal=False, scale=scale, attn_mask=attn_mask)


class Once:
    """Works on its first call and never again."""

    def __init__(self):
        self.calls = 0

    def __call__(self, query, key, value, *, is_causal, scale, attn_mask=None):
        self.calls += 1
        if self.calls > 1:
            raise RuntimeError("already used")
        return good(query, key, value, is_causal=is_causal, scale=scale, attn_mask=attn_mask)


def no_gradient_when_causal(query, key, value, *, is_causal, scale, attn_mask=None):
    out = good(query, key, value, is_causal=is_causal, scale=scale, attn_mask=attn_mask)
    return out.detach() if is_causal else out


def detaches_key(query, key, value, *, is_causal, scale, attn_mask=None):
    return good(query, key.detach(), value, is_causal=is_causal, scale=scale, attn_mask=attn_mask)


def zeroes_inputs(query, key, value, *, is_causal, scale, attn_mask=None):
    out = good(
        query.clone(), key.clone(), value.clone(),
        is_causal=is_causal, scale=scale, attn_mask=attn_mask,
    )  # fmt: skip
    with torch.no_grad():
        query.zero_(), key.zero_(), value.zero_()
    return out


def exits(query, key, value, *, is_causal, scale, attn_mask=None):
    if is_causal:
        raise SystemExit(0)
    return good(query, key, value, is_causal=False, scale=scale, attn_mask=attn_mask)


@pytest.mark.parametrize(
    ("kernel", "missing"),
    [
        (
            no_causal,
            "raises RuntimeError: no causal kernel in ",
        ),
        (asserts_no_causal, "refuses: AssertionError: assert not True in "),
        (Once(), "raises RuntimeError: already used in "),
        (no_gradient_when_causal, "no gradient for query, key, value in "),
        (detaches_key, "no gradient for key in "),
        (zeroes_inputs, "modifies its inputs: query, key, value in "),
        (exits, "raises SystemExit: 0 in "),
    ],
    ids=lambda x: getattr(x, "__name__", type(x).__name__) if callable(x) else "",
)
def test_a_broken_kernel_is_never_sound(kernel, missing):
    report = audit(kernel, explain=False)
    assert (report.verdict, report.exit_code) == ("incomplete", 2)
    assert report.missing[0].startswith(missing)
    assert report.reason.startswith(report.missing[0])
    assert "what was seen is sound" in report.reason
    plain = report.as_dict()
    assert plain["missing"] == list(report.missing)
    assert why(plain) == "; ".join(report.missing)


def test_a_whole_kernel_is_sound_and_what_it_does_not_take_is_said():
    report = audit(good, explain=False)
    assert (report.verdict, report.exit_code, report.missing) == ("sound", 0, ())
    (limit,) = report.limits
    assert limit.startswith("does not take causal_offset in 1 of ")

    def plain(query, key, value, *, is_causal, scale):
        return good(query, key, value, is_causal=is_causal, scale=scale)

    report = audit(plain, explain=False)
    assert (report.verdict, report.exit_code) == ("sound", 0)
    first, second = report.limits
    assert first.startswith("does not take attn_mask in 2 of ")
    assert second.startswith("does not take causal_offset in 1 of ")
    assert ("not audited", f"{first}; {second}") in facts(report.as_dict())


@pytest.mark.parametrize("seed", range(3))
def test_a_kernel_that_seeds_everybodys_random_numbers_anew_is_told(seed):
    def seeding(query, key, value, *, is_causal, scale):
        torch.manual_seed(seed)
        return good(query, key, value, is_causal=is_causal, scale=scale)

    report = audit(seeding, explain=False, seed=seed)
    assert report.notes == ("leaves changed (put back): torch's random numbers",)


def test_a_kernel_without_a_backward_pass_is_forward_sound():
    def forward(query, key, value, *, is_causal, scale, attn_mask=None):
        out = good(query, key, value, is_causal=is_causal, scale=scale, attn_mask=attn_mask)
        return out.detach()

    report = audit(forward, explain=False)
    assert (report.verdict, report.exit_code) == ("forward sound", 2)
    asked = audit(forward, explain=False, forward=True)
    assert (asked.verdict, asked.exit_code) == ("forward sound", 0)
    assert "forward pass alone" in headline(asked.as_dict())
    whole = audit(good, explain=False, forward=True)
    assert (whole.verdict, whole.exit_code) == ("forward sound", 0)


def test_a_defect_outranks_what_is_missing():
    def biased(query, key, value, *, is_causal, scale, attn_mask=None):
        if is_causal:
            raise RuntimeError("no")
        return 1.05 * good(query, key, value, is_causal=False, scale=scale, attn_mask=attn_mask)

    report = audit(biased, explain=False)
    assert (report.verdict, report.exit_code) == ("defect", 1)
    assert ("missing", "; ".join(report.missing)) in facts(report.as_dict())


def test_a_first_call_that_fails_ends_the_audit():
    calls = []

    def failing(query, key, value, *, is_causal, scale):
        calls.append(1)
        raise RuntimeError("no device")

    report = audit(failing, explain=False)
    assert (report.verdict, report.exit_code) == ("error", 2)
    assert len(calls) == 4  # and in the forms that it may have meant
    assert "called as q[B,H,N,D], k[B,H,N,D], v[B,H,N,D]; say --form or form=" in report.reason
    assert {case.status for case in report.cases} == {"error", "not called"}


def test_every_verdict_has_a_sign_and_a_meaning():
    assert all(sign_of(word) for word in MEANING)


def by_tokens(query, key, value, *, is_causal, scale, attn_mask=None):
    """As FlashAttention has its tensors: [B, N, H, D]."""
    turned = (x.transpose(1, 2) for x in (query, key, value))
    out = good(*turned, is_causal=is_causal, scale=scale, attn_mask=attn_mask)
    return out.transpose(1, 2)


def narrow_by_tokens(query, key, value, *, is_causal, scale):
    """In bf16 throughout, a recipe with a name, which the reconstruction finds at once."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    s = q @ k.mT * scale
    if is_causal:
        s = s.masked_fill(s.new_ones(s.shape[-2:]).tril() == 0, float("-inf"))
    return (s.softmax(-1) @ v).transpose(1, 2)


def test_tensors_by_tokens_are_recognized_and_said():
    report = audit(by_tokens, explain=False)
    assert report.verdict == "sound", report.reason
    assert report.notes == ("takes [B, N, H, D]",)
    defect = audit(narrow_by_tokens)
    assert defect.verdict == "defect"
    assert defect.script.rstrip().endswith(", form='BNHD'))")


def test_what_is_attention_in_neither_layout_is_taken_as_it_is():
    def nothing(query, key, value, *, is_causal, scale, attn_mask=None):
        return query * 0 + 1 + value.sum() * 0 + key.sum() * 0

    report = audit(nothing, explain=False)
    assert report.verdict == "defect"
    assert report.notes == ()
