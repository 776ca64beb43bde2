"""Two calls that exact arithmetic makes equal: sound kernels differ by rounding or not at all, and
a kernel whose result depends on what it must not is found by the relation that asks it.
"""

import math
from dataclasses import replace

import pytest
import torch

from halfulp.audit import Case, Shape, audit, invariants
from halfulp.audit import run as audit_run
from halfulp.audit.diagnosis import diagnose
from halfulp.audit.gathering import call
from halfulp.audit.references import references
from halfulp.audit.run import runner
from halfulp.audit.verdict import LIMITS, beside, errors_of, judge_relation
from halfulp.targets import Target
from halfulp.targets.calling import CONSTANT_LSE

SHAPE = Shape(2, 4, 48, 48, 16)
LEVEL = 1e-3


def good(query, key, value, causal, scale, mask=None, offset=0):
    s = query.float() @ key.float().mT * scale
    if causal:
        seen = torch.ones(s.shape[-2:], dtype=torch.bool).tril(offset)
        s = s.masked_fill(~seen, -math.inf)
    if mask is not None:
        s = s.masked_fill(~mask, -math.inf)
    return (s.softmax(-1) @ value.float()).to(query.dtype), s.logsumexp(-1)


def sound(query, key, value, *, is_causal, scale, attn_mask=None, causal_offset=0):
    return good(query, key, value, is_causal, scale, attn_mask, causal_offset)


def kernel(change):
    """A sound kernel on operands that `change` makes, by what the call looks like."""

    def call(query, key, value, *, is_causal, scale, attn_mask=None, causal_offset=0):
        q, k, v, lse_factor = change(query, key, value, is_causal, attn_mask)
        out, lse = good(q, k, v, is_causal, scale, attn_mask, causal_offset)
        return out, lse * lse_factor

    return call


def _by_place(q, k, v, causal, mask):
    place = torch.linspace(1, 1.2, len(v))[:, None, None, None]
    return q, k, (v * place).to(v.dtype), 1


def _by_company(q, k, v, causal, mask):
    return q, k, (v * (1 + 0.05 * len(v))).to(v.dtype), 1


def _by_heads(q, k, v, causal, mask):
    return q, k, (v * (1 + 0.05 * v.shape[1])).to(v.dtype), 1


def _by_rows(q, k, v, causal, mask):
    return q + (q.mean(2, keepdim=True) if not causal else 0), k, v, 1


def _base_2(q, k, v, causal, mask):
    return q, k, v, 1 / math.log(2)


def _sees_padding(q, k, v, causal, mask):
    if mask is not None:
        v = v + v.mean(2, keepdim=True)  # of what is hidden too
    return q, k, v, 1


def _decodes_narrowly(q, k, v, causal, mask):
    return q, k, (torch.round(v * 8) / 8 if q.shape[2] == 1 else v), 1


def _chunks_narrowly(q, k, v, causal, mask):
    return q, k, (torch.round(v * 8) / 8 if causal and q.shape[2] < k.shape[2] else v), 1


PLANTED = {
    "batch position": _by_place,
    "batch composition": _by_company,
    "heads over two ranks": _by_heads,
    "queries in chunks": _by_rows,
    "keys split, merged by lse": _base_2,
    "padding behind a mask": _sees_padding,
    "decode against prefill": _decodes_narrowly,
    "prefill in chunks": _chunks_narrowly,
}


def judged(name, function):
    """Tensor by tensor: (beyond rounding or not, times the floor, share of equal bits)."""
    causal = name in invariants.CAUSAL
    case = Case("free_feature_causal" if causal else "free_feature", SHAPE)
    reference, run = references(case), runner(Target.of(function))
    found = (invariants.PLAIN | invariants.CAUSAL)[name](
        run, reference.inputs, run(reference.inputs)
    )
    assert found
    judged = {}
    for relation in found:
        assert relation.invariant == name
        stock, floor = errors_of(reference, relation.tensor)
        finding = judge_relation(relation, stock, LEVEL, LIMITS["bfloat16"])
        judged[relation.tensor] = (finding is not None, beside(relation, floor), relation.identical)
    return judged


def splitting(share):
    """Splits its keys, and merges the parts by their lse to some power."""

    def call(query, key, value, *, is_causal, scale, num_splits=0):
        parts = zip(*(x.chunk(num_splits or 2, 2) for x in (key, value)), strict=True)
        outs, logs = zip(
            *(good(query.float(), k, v, is_causal, scale) for k, v in parts), strict=True
        )
        lse = torch.stack(logs)
        merged = ((share * lse).softmax(0).unsqueeze(-1) * torch.stack(outs)).sum(0)
        return merged.to(query.dtype), lse.logsumexp(0)

    return call


def test_the_number_of_splits_changes_nothing(monkeypatch):
    for share, broken in ((1.0, False), (0.0, True)):
        found = judged("split count", splitting(share))
        assert found["out"][0] is broken
        assert 0 < found["out"][2] < 1
    cases = (Case("free_feature", SHAPE),)
    monkeypatch.setattr(audit_run, "plan", lambda *_: audit_run.Plan(cases, (), cases))
    for function, told in ((splitting(1.0), True), (sound, False)):
        report = audit(function, explain=False)
        assert ("split count" in {r.invariant for r in report.relations}) is told
        assert not any("num_splits" in limit for limit in report.limits)


@pytest.mark.parametrize("name", PLANTED)
def test_a_sound_kernel_differs_by_rounding(name):
    for beyond, times_floor, _ in judged(name, sound).values():
        assert not beyond
        assert times_floor < 1.3


@pytest.mark.parametrize("name", PLANTED)
def test_what_a_result_must_not_depend_on_is_found_by_its_relation(name):
    found = judged(name, kernel(PLANTED[name]))
    assert any(beyond for beyond, _, _ in found.values())
    assert all(times > 1.25 for beyond, times, _ in found.values() if beyond)


def test_rows_alone_weigh_as_much_as_all():
    """A difference of the same size in few rows and in all is the same many times the floor."""
    case = Case("free_feature_causal", SHAPE)
    run = runner(Target.of(sound))
    base = run(references(case).inputs)
    noise = 1 + 1e-2 * torch.randn(base.out.shape, generator=torch.Generator().manual_seed(1))
    other = {"out": base.out.float() * noise}
    rows = [11, 20, 31, 47]
    (whole,) = invariants._relation("x", base, other)
    (some,) = invariants._relation("x", base, {"out": other["out"][:, :, rows]}, rows)
    assert some.difference.norm() == pytest.approx(whole.difference.norm(), rel=0.5)


def test_a_kernel_without_lse_or_mask_is_not_asked_for_them():
    def narrow(query, key, value, *, is_causal, scale):
        return good(query, key, value, is_causal, scale)[0]

    run, reference = runner(Target.of(narrow)), references(Case("free_feature", SHAPE))
    x = reference.inputs
    for relation in (invariants.split_keys, invariants.padded_keys, invariants.later_chunk):
        assert relation(run, replace(x), run(x)) == []


def with_lse_of(factor):
    """A sound kernel whose lse has so many times its gradient."""

    def call(query, key, value, *, is_causal, scale):
        out, lse = good(query, key, value, is_causal, scale)
        still = lse.detach()
        return out, still if factor is None else still + factor(scale) * (lse - still)

    return call


LOST = {"ignored": lambda _: 0.0, "wrong sign": lambda _: -1.0, "without scale": lambda s: 1 / s}


@pytest.mark.parametrize("fault", [None, *LOST])
def test_a_gradient_of_lse_is_asked_for(fault):
    found = judged("lse in the loss", with_lse_of(LOST.get(fault, lambda _: 1.0)))
    assert {name for name, (beyond, _, _) in found.items() if beyond} == (
        {"grad_query", "grad_key"} if fault else set()
    )


def test_an_lse_without_gradient_is_said_and_accuses_nobody():
    x = references(Case("free_feature", SHAPE)).inputs
    target = Target.of(with_lse_of(None))
    run = runner(target)
    assert invariants.lse_in_the_loss(run, x, run(x)) == []
    outcome = call(target, replace(x, grad_lse=torch.ones(x.query.shape[:3])), "cpu", False)
    assert (outcome.kind, outcome.refusal) == ("unsupported", CONSTANT_LSE)


def writes_all_but(rows):
    """A kernel that leaves the rows beyond the last whole tile, every other call, or none."""
    calls = []

    def kernel(query, key, value, *, is_causal, scale):
        out, _ = good(query, key, value, is_causal, scale)
        calls.append(query.shape)
        n = query.shape[2]
        left = {"tail": n % 16, "second": 3 * (len(calls) % 2), "none": 0}[rows]
        written = torch.empty_like(out)
        written[:, :, : n - left] = out[:, :, : n - left]
        return written

    return kernel


@pytest.mark.parametrize("rows", ["tail", "second", "none"])
def test_what_is_never_written_shows_in_memory_full_of_nan(rows):
    x, run = references(Case("free_feature", SHAPE)).inputs, runner(Target.of(writes_all_but(rows)))
    found = invariants.filled_memory(run, x, run(x))
    findings = [judge_relation(each, None, LEVEL, LIMITS["bfloat16"]) for each in found]
    broken = [each for each in findings if each is not None]
    assert bool(broken) == (rows != "none")
    assert [d.cause.key for d in diagnose(broken, None)] == ["unwritten"] * bool(broken)
    assert not torch.are_deterministic_algorithms_enabled()
