"""The covering array beside the probes: every pair of levels, every way to be called, no test of
means, and faults that need one of them.
"""

import math
from itertools import combinations
from pathlib import Path

import pytest
import torch
from benchmarks import size_faults

from halfulp.audit import Case, Shape, size_array, verdict
from halfulp.audit.planning import plan
from halfulp.audit.references import references
from halfulp.audit.run import runner
from halfulp.audit.verdict import judge_case
from halfulp.covering import covering_array
from halfulp.targets import Target, resolve, run_target
from halfulp.targets.manner import CALLS, GRAD_MEMORY, MEMORY


def test_every_pair_that_may_be_is_there():
    rows = size_array._rows(0)
    assert len(rows) < 160
    assert all(size_array._allowed(row) for row in rows)
    lost = []
    for one, two in combinations(size_array.FACTORS, 2):
        seen = {(row[one], row[two]) for row in rows}
        for a in size_array.FACTORS[one]:
            for b in size_array.FACTORS[two]:
                if (a, b) not in seen and size_array._allowed({one: a, two: b}):
                    lost.append((one, a, two, b))
    # pairs that are cheap by themselves and in no whole row: with the third that both need
    assert len(lost) <= 12, lost
    assert size_array.size_cases(0) == size_array.size_cases(0)
    assert len({name for name, _ in size_array.size_cases(1)} - {"": 0}.keys()) > 50


def test_the_readme_counts_the_cases():
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert f"the {len(size_array.size_cases())} small calls" in text


def test_an_array_of_its_own():
    factors = {"a": (1, 2, 3), "b": (1, 2, 3), "c": (1, 2, 3)}
    rows = covering_array(factors, lambda _: True)
    assert len(rows) <= 12
    for one, two in combinations(factors, 2):
        assert len({(row[one], row[two]) for row in rows}) == 9
    odd = covering_array(factors, lambda row: sum(row.values()) < 6 or len(row) < 3)
    assert all(sum(row.values()) < 6 for row in odd)


@pytest.mark.parametrize("name", [name for name, _ in size_array.size_cases()[:6]])
def test_a_case_is_drawn_again_from_its_name(name):
    case = Case(name, Shape(1, 2, 9, 12, 8))
    assert torch.equal(case.inputs().query, case.inputs().query)
    levels = size_array.levels_of(name)
    assert case.inputs().manner == "/".join(levels[x] for x in ("memory", "grad_memory", "calls"))
    assert case.inputs().sees.causal is (levels["sees"] in size_array.CAUSAL)


@pytest.mark.parametrize("rest", ["full", "full/no-option/plain/packed/packed/now", ""])
def test_what_is_no_name_is_told(rest):
    name = f"sizes/{rest}"
    with pytest.raises(ValueError, match="accepted"):
        Case(name, Shape()).inputs()


def test_a_target_without_groups_and_offsets_covers_the_other_pairs():
    todo = plan("quick", "bfloat16")
    bare = todo.fitted(frozenset())
    assert all(c.shape.kv_heads is None and "causal-end" not in c.probe for c in bare.sizes)
    assert any(c.shape.kv_heads is not None for c in todo.fitted(frozenset({"enable_gqa"})).sizes)
    assert len(bare.sizes) > 0.9 * len(todo.sizes)
    assert plan("quick", "bfloat16", shapes=[Shape()]).sizes == ()


def test_a_case_makes_no_test_of_means_and_finds_an_element():
    case = Case("sizes/causal/no-option/plain/contiguous/contiguous/once", Shape(1, 2, 40, 40, 16))
    reference = references(case)
    result = runner(resolve("sdpa:math"))(reference.inputs)
    measured = reference.measure(result)
    assert verdict.tests_in(measured, reference) == 0
    assert judge_case(case, measured, reference, 0.01) == ([], [])
    result.out[0, 1, 7, 3] += 1
    (found,) = judge_case(case, reference.measure(result), reference, 0.01)[1]
    assert found.kind == "element"
    assert "element (0, 1, 7, 3) of O" in found.figure


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("grad_memory", GRAD_MEMORY)
def test_how_a_kernel_is_called(memory, grad_memory):
    seen = []

    def kernel(query, key, value, *, is_causal=False, scale=None):
        seen.append((query.stride(), query.storage_offset()))
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        out.register_hook(lambda g: seen.append(g.stride()))
        return out

    x = [torch.randn(2, 3, 5, 8) for _ in range(4)]
    x[3] = x[3][:, :, :1].expand_as(x[3]).contiguous()
    for calls in CALLS:
        seen.clear()
        asked = {"is_causal": False, "scale": None}
        plain = run_target(Target.of(kernel), *x, **asked).result
        seen.clear()
        found = run_target(Target.of(kernel), *x, **asked, manner=f"{memory}/{grad_memory}/{calls}")
        assert found.kind == "ok", found.refusal
        for name, got in found.result.given().items():
            assert torch.allclose(got, getattr(plain, name), atol=1e-6)
        strides = [s for s in seen if isinstance(s[0], tuple)]
        grads = [s for s in seen if not isinstance(s[0], tuple)]
        assert len(strides) == 1 + (calls == "twice")
        assert len(grads) == 1 + (calls == "backward-twice")
        assert (strides[0][1] > 0) is (memory == "packed")
        assert (strides[0][0][1] < strides[0][0][2]) is (memory == "transposed")
        assert (0 in grads[0]) is (grad_memory == "expanded")
    with pytest.raises(ValueError, match="manner"):
        run_target(Target.of(kernel), *x, **asked, manner="packed")


CAUGHT = (
    "last_key_lost_after_a_whole_tile",
    "tiles_beyond_132_not_written",
    "single_query_skips_the_first_key",
    "offset_of_storage_ignored",
    "expanded_grad_out_read_once",
    "second_backward_adds_to_the_first",
    "second_call_of_a_size_is_off",
    "gradients_of_groups_beyond_two_averaged",
)
"""Of benchmarks/size_faults.py, which has the others."""


def worst(kernel, every: int = 1) -> float:
    """How far the first case that shows it is beyond rounding; stops there."""
    target = Target.of(kernel)
    for case in plan("quick", "bfloat16").fitted(target.accepts).sizes[::every]:
        reference = references(case)
        result = runner(target)(reference.inputs)
        _, found = judge_case(case, reference.measure(result), reference, 0.01)
        if found:
            return max(f.ratio for f in found)
    return 0.0


@pytest.mark.parametrize("name", CAUGHT)
def test_a_fault_that_needs_a_size_or_a_stride_is_caught(name):
    assert worst(size_faults.FAULTS[name]) > 0


def test_a_sound_kernel_raises_no_alarm():
    assert worst(size_faults.SOUND["tiles of 16"], every=6) == 0


def keys_past_the_queries_left_out(query, key, value, *, is_causal, scale, attn_mask=None):
    n = query.shape[2]
    if attn_mask is not None:
        key, value, attn_mask = key[:, :, :n], value[:, :, :n], attn_mask[..., :n]
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attn_mask, is_causal=is_causal, scale=scale
    )


def test_a_fault_that_needs_a_mask_and_a_size_is_caught():
    assert worst(keys_past_the_queries_left_out) > 0


def eager_hiding_with(number):
    def kernel(query, key, value, *, is_causal, scale, attn_mask=None):
        scores = query @ key.mT * scale
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool)
        seen = seen.tril() if is_causal else seen if attn_mask is None else attn_mask
        hidden = torch.finfo(scores.dtype).min if number is None else number
        return scores.masked_fill(~seen, hidden).float().softmax(-1).to(value.dtype) @ value

    return kernel


@pytest.mark.parametrize(("number", "seen"), [(-1e4, True), (-5e4, True), (None, False)])
def test_a_finite_number_that_hides_is_caught_and_rounded_scores_are_not(number, seen):
    target = Target.of(eager_hiding_with(number))
    far = [c for c in plan("quick", "bfloat16").fitted(target.accepts).sizes if "abyss" in c.probe]
    found = []
    for case in far:
        reference = references(case)
        result = runner(target)(reference.inputs)
        found += judge_case(case, reference.measure(result), reference, 0.01)[1]
    assert bool(found) is seen


class InParts(torch.autograd.Function):
    """Blocks of 24 keys, dealt to two parts that are merged by their lse in base 2, in float32;
    `wrong` is what dV is multiplied by.
    """

    @staticmethod
    def forward(ctx, query, key, value, scale, wrong):
        q, k, v = (x.float() for x in (query, key, value))
        s = (q @ k.mT) * (scale * math.log2(math.e))
        part = torch.arange(k.shape[2]) // 24 % 2
        lses, outs = [], []
        for own in (0, 1):
            mine = s[..., part == own]
            top = mine.amax(-1, keepdim=True)
            p = torch.exp2(mine - top)
            lses.append(top + p.sum(-1, keepdim=True).log2())
            outs.append(p @ v[:, :, part == own] / p.sum(-1, keepdim=True))
        lse = torch.stack(lses)
        weights = torch.exp2(lse - lse.amax(0))
        out = ((weights * torch.stack(outs)).sum(0) / weights.sum(0)).to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse.amax(0) + weights.sum(0).log2())
        ctx.asked = scale, wrong
        return out

    @staticmethod
    def backward(ctx, grad_out):
        query, key, value, out, lse = ctx.saved_tensors
        q, k, v, o, do = (x.float() for x in (query, key, value, out, grad_out))
        scale, wrong = ctx.asked
        p = torch.exp2((q @ k.mT) * (scale * math.log2(math.e)) - lse)
        ds = p * (do @ v.mT - (do * o).sum(-1, keepdim=True)) * scale
        grads = (ds @ k, ds.mT @ q, p.mT @ do * wrong)
        return *(x.to(query.dtype) for x in grads), None, None


@pytest.mark.parametrize(("wrong", "seen"), [(1.0, False), (1.5, True)])
def test_an_lse_that_is_rounded_far_from_0_is_no_fault(wrong, seen):
    def attention(query, key, value, *, is_causal, scale):
        return InParts.apply(query, key, value, scale, wrong)

    name = "sizes/full/no-option/abyss/transposed/transposed/backward-twice"
    case = Case(name, Shape(34, 1, 1, 128, 96), dtype="float16")
    reference = references(case)
    measured = reference.measure(runner(Target.of(attention))(reference.inputs))
    assert bool(judge_case(case, measured, reference, 0.01)[1]) is seen


@pytest.mark.parametrize(("leak", "seen"), [(0.0, False), (1e-4, True)])
def test_what_all_keys_have_in_common_may_be_taken_off_first(leak, seen):
    """Of V: dV of a key that no query sees is what fp32 leaves of a sum that cancels."""

    def attention(query, key, value, *, is_causal, scale):
        q, k, v = (x.float() for x in (query, key, value))
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
        p = (q @ k.mT * scale).masked_fill(hidden, -math.inf).softmax(-1) + leak * hidden
        mean = v.mean(2, keepdim=True)
        return (p @ (v - mean) + p.sum(-1, keepdim=True) * mean).to(query.dtype)

    case = Case("sizes/causal/no-option/sharp/packed/expanded/once", Shape(2, 5, 42, 65, 64))
    reference = references(case)
    measured = reference.measure(runner(Target.of(attention))(reference.inputs))
    assert bool(judge_case(case, measured, reference, 0.01)[1]) is seen


@pytest.mark.parametrize("asked", ["biased/no-option", "causal/sinks"])
def test_the_bound_holds_a_bias_and_a_sink(asked):
    case = Case(f"sizes/{asked}/plain/contiguous/contiguous/once", Shape(1, 2, 40, 40, 16))
    reference = references(case)
    result = runner(resolve("halfulp:cpu"))(reference.inputs)
    before = reference.measure(result).beyond
    assert set(before) == {"out", "grad_query", "grad_key", "grad_value"}
    assert all(0 < ratio < 0.8 for ratio, _ in before.values())
    result.out[0, 1, 7, 3] += 0.1
    assert reference.measure(result).beyond["out"][0] > 1
