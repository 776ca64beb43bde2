"""Kernels as they are called in real life: each form's sound kernel is judged, and a fault planted
in it, which plain tensors would not show, is caught.
"""

import math

import pytest
import torch
from torch.nn import functional

from halfulp.audit import Case, Shape, audit
from halfulp.audit import run as audit_run
from halfulp.audit.run import runner
from halfulp.audit.shrink import severity
from halfulp.report.audit_summary import facts
from halfulp.targets import BHND, FORMS, Form, Target, run_target
from halfulp.targets.calling import UNWRITTEN
from halfulp.targets.form import recognized
from tests.targets.calls import relative

SMALL = Shape(2, 4, 33, 33, 16)


def good(q, k, v, causal, scale, offset=0):
    """Out and lse on `[B, H, N, D]`, in fp32."""
    groups = q.shape[1] // k.shape[1]
    wide, values = (x.float().repeat_interleave(groups, 1) for x in (k, v))
    s = q.float() @ wide.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        seen = torch.ones(s.shape[-2:], dtype=torch.bool).tril(offset)
        s = s.masked_fill(~seen, -math.inf)
    return (s.softmax(-1) @ values).to(q.dtype), s.logsumexp(-1)


def one(q, k, v, causal, scale):
    """Of one sequence `[N, H, D]`, causal at the end."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out, lse = good(q, k, v, causal, scale, k.shape[2] - q.shape[2])
    return out[0].transpose(0, 1), lse[0]


def packed(qkv, *, causal, softmax_scale):
    q, k, v = qkv.transpose(1, 3).unbind(2)
    return good(q, k, v, causal, softmax_scale)[0].transpose(1, 2)


def packed_swapped(qkv, *, causal, softmax_scale):
    q, k, v = qkv.transpose(1, 3).unbind(2)
    return good(q, v, k, causal, softmax_scale)[0].transpose(1, 2)


def packed_first(qkv, *, causal, softmax_scale):
    """[3, B, H, N, D], which only its result tells."""
    return good(*qkv.unbind(0), causal, softmax_scale)[0]


def packed_first_coarse(qkv, *, causal, softmax_scale):
    """Its values are kept in steps of 1/16."""
    q, k, v = qkv.unbind(0)
    return packed_first(
        torch.stack([q, k, v + (torch.round(v * 16) / 16 - v).detach()]),
        causal=causal, softmax_scale=softmax_scale,
    )  # fmt: skip


def packed_pairs_swapped(q, kv, *, causal, softmax_scale):
    return packed_pairs(q, kv.flip(2), causal=causal, softmax_scale=softmax_scale)


def by_tokens_more(q, k, v, *, causal, softmax_scale):
    """The gradient of its keys is 1 % too large."""
    still = k.detach()
    return by_tokens(q, still + 1.01 * (k - still), v, causal=causal, softmax_scale=softmax_scale)


def packed_pairs(q, kv, *, causal, softmax_scale):
    return by_tokens(q, *kv.unbind(2), causal=causal, softmax_scale=softmax_scale)


def by_tokens(q, k, v, *, causal, softmax_scale):
    out, lse = good(*(x.transpose(1, 2) for x in (q, k, v)), causal, softmax_scale)
    return out.transpose(1, 2), lse.transpose(1, 2)


def varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, sm_scale, causal):
    assert max_seqlen_k == cu_seqlens_k.diff().max()
    parts = [
        one(q[a:b], k[c:d], v[c:d], causal, sm_scale)
        for a, b, c, d in zip(
            cu_seqlens_q, cu_seqlens_q[1:], cu_seqlens_k, cu_seqlens_k[1:], strict=False
        )
    ]
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts], 1)


def varlen_border(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, sm_scale):
    """Reads one key beyond each sequence's end."""
    ends = [min(int(end) + 1, len(k)) for end in cu_seqlens_k[1:]]
    places = zip(cu_seqlens_q, cu_seqlens_q[1:], cu_seqlens_k, ends, strict=False)
    return torch.cat([one(q[a:b], k[c:d], v[c:d], False, sm_scale)[0] for a, b, c, d in places])


def varlen_packed(qkv, cu_seqlens, max_seqlen, sm_scale=None, causal=False):
    lengths = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return varlen(*qkv.unbind(1), *lengths, sm_scale, causal)


def varlen_longest(qkv, cu_seqlens, max_seqlen, sm_scale=None, causal=False):
    """Takes the longest sequence's length for every one's lse."""
    out, lse = varlen_packed(qkv, cu_seqlens, max_seqlen, sm_scale, causal)
    return out, lse + max_seqlen / max(cu_seqlens.diff()[1:].tolist()) - 1


def cache(q, k_cache, v_cache, cache_seqlens, softmax_scale=None, causal=False):
    parts = zip(q, k_cache, v_cache, cache_seqlens.tolist(), strict=True)
    return torch.stack([one(a, k[:n], v[:n], causal, softmax_scale)[0] for a, k, v, n in parts])


def cache_one_length(q, k_cache, v_cache, cache_seqlens, softmax_scale=None, causal=False):
    """Takes the first sequence's length for all."""
    same = cache_seqlens[:1].expand_as(cache_seqlens)
    return cache(q, k_cache, v_cache, same, softmax_scale, causal)


def paged(q, k_cache, v_cache, block_table, cache_seqlens, scale):
    rows = zip(q, block_table.long(), cache_seqlens.tolist(), strict=True)
    parts = [(a, *(c[table].flatten(0, 1)[:n] for c in (k_cache, v_cache))) for a, table, n in rows]
    return torch.stack([one(a[None], k, v, False, scale)[0][0] for a, k, v in parts])


def paged_whole_pages(q, k_cache, v_cache, block_table, cache_seqlens, scale):
    whole = (cache_seqlens + 15) // 16 * 16
    return paged(q, k_cache, v_cache, block_table, whole, scale)


def paged_in_halves(q, k_cache, v_cache, block_table, cache_seqlens, scale):
    """Takes pages of 32 rows for pages of 16, twice as many."""
    halves = (c.flatten(0, 1).unflatten(0, (-1, 16)) for c in (k_cache, v_cache))
    twice = block_table.repeat_interleave(2, 1)
    return paged(q, *halves, twice, cache_seqlens, scale)


def append(q, k_cache, v_cache, k_new, v_new, cache_seqlens, softmax_scale=None, causal=False):
    """Writes the new rows behind each sequence's, and attends to all."""
    more = k_new.shape[1]
    for i, n in enumerate(cache_seqlens.tolist()):
        k_cache[i, n : n + more], v_cache[i, n : n + more] = k_new[i], v_new[i]
    return cache(q, k_cache, v_cache, cache_seqlens + more, softmax_scale, causal)


def append_late(q, k_cache, v_cache, k_new, v_new, cache_seqlens, scale=None, causal=False):
    """Attends to the right rows, and writes them one row too late."""
    out = append_unwritten(q, k_cache, v_cache, k_new, v_new, cache_seqlens, scale, causal)
    append(q, k_cache, v_cache, k_new, v_new, cache_seqlens + 1, scale, causal)
    return out


def append_unseen(q, k_cache, v_cache, k_new, v_new, cache_seqlens, scale=None, causal=False):
    """Writes its new keys and does not attend to the last."""
    append(q, k_cache, v_cache, k_new, v_new, cache_seqlens, scale, causal)
    seen = (cache_seqlens + k_new.shape[1] - 1).clamp_min(1)
    return cache(q, k_cache, v_cache, seen, scale, causal)


def append_elsewhere(q, k_cache, v_cache, k_new, v_new, cache_seqlens, scale=None, causal=False):
    """Attends to the right rows, and writes them into the neighbor's cache."""
    out = append_unwritten(q, k_cache, v_cache, k_new, v_new, cache_seqlens, scale, causal)
    append(q, k_cache, v_cache, k_new.roll(1, 0), v_new.roll(1, 0), cache_seqlens, scale, causal)
    return out


def append_unwritten(q, k_cache, v_cache, k_new, v_new, cache_seqlens, scale=None, causal=False):
    """Attends to new keys, which it leaves no trace of."""
    caches = (x.clone() for x in (k_cache, v_cache))
    return append(q, *caches, k_new, v_new, cache_seqlens, scale, causal)


def decode(q, k, v, sm_scale):
    out, _ = good(q[:, :, None], k.transpose(1, 2), v.transpose(1, 2), False, sm_scale)
    return out[:, :, 0]


def decode_shared(q, k, v, sm_scale):
    """Heads of queries take their keys by the wrong order of groups."""
    groups = q.shape[1] // k.shape[2]
    turned = q.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2)
    out = decode(turned, k, v, sm_scale)
    return out.unflatten(1, (-1, groups)).transpose(1, 2).flatten(1, 2)


def into(q, k, v, out, *, causal=False, sm_scale=None):
    out.copy_(good(q, k, v, causal, sm_scale)[0])


def into_all_but_the_last(q, k, v, out, *, causal=False, sm_scale=None):
    out[:, :, :-1] = good(q, k, v, causal, sm_scale)[0][:, :, :-1]


def into_nan(q, k, v, out, *, causal=False, sm_scale=None):
    out.copy_(q.sum(-1, keepdim=True) * math.nan)


def with_lse(q, k, v, out, lse, *, causal=False, sm_scale=None):
    for buffer, x in zip((out, lse), good(q, k, v, causal, sm_scale), strict=True):
        buffer.copy_(x)


def with_lse_base_2(q, k, v, out, lse, *, causal=False, sm_scale=None):
    with_lse(q, k, v, out, lse, causal=causal, sm_scale=sm_scale)
    lse /= math.log(2)


def single(q, k, v, causal=False, scale=None):
    """One sequence a call."""
    assert q.ndim == 3
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return good(q, k, v, causal, scale)[0][0].transpose(0, 1)


def single_transposed(q, k, v, causal=False, scale=None):
    out = single(q, k, v, causal, scale)
    return out.flip(0)


def plain(q, k, v, *, is_causal, scale):
    return good(q, k, v, is_causal, scale)[0]


def casts_inside(q, k, v, *, is_causal, scale):
    """Its products are autocast's, so that its scores are rounded."""
    s = q @ k.mT * scale
    if is_causal:
        s = s.masked_fill(s.new_ones(s.shape[-2:]).tril() == 0, -math.inf)
    return s.to(torch.bfloat16).softmax(-1, dtype=torch.bfloat16) @ v


def under_autocast(q, k, v, *, is_causal, scale):
    assert q.dtype == torch.float32
    assert torch.is_autocast_enabled("cpu")
    with torch.autocast("cpu", enabled=False):
        return good(q, k, v, is_causal, scale)[0]


PAGES_OF_32 = FORMS["paged"].replace("S", "32")
CASES = {
    "packed": (packed, packed_swapped, None, "qkv[B,N,3,H,D]"),
    "packed, found out": (
        packed_first,
        packed_first_coarse,
        None,
        "qkv[3,B,H,N,D] -> out[B,H,N,D]",
    ),
    "packed pairs": (packed_pairs, packed_pairs_swapped, None, "q[B,N,H,D], kv[B,N,2,H,D]"),
    "by tokens": (by_tokens, by_tokens_more, None, FORMS["BNHD"]),
    "varlen": (varlen, varlen_border, None, "q[T,H,D], k[T,H,D], v[T,H,D], cu_seqlens_q"),
    "varlen packed": (varlen_packed, varlen_longest, None, "qkv[T,3,H,D], cu_seqlens, max_seqlen"),
    "cache": (cache, cache_one_length, None, FORMS["cache"]),
    "append": (append, append_unseen, None, FORMS["append"]),
    "paged": (paged, paged_whole_pages, None, FORMS["paged"]),
    "pages of 32": (paged, paged_in_halves, PAGES_OF_32, PAGES_OF_32),
    "decode": (decode, decode_shared, "q[B,H,D], k[B,N,G,D], v[B,N,G,D]", "q[B,H,D], k[B,N,G,D]"),
    "out": (into, into_all_but_the_last, None, f"{FORMS['BHND']}, out"),
    "out and lse": (with_lse, with_lse_base_2, None, f"{FORMS['BHND']}, out, lse"),
    "one sequence": (single, single_transposed, "q[N,H,D], k[N,H,D], v[N,H,D]", "q[N,H,D], k"),
    "autocast": (under_autocast, casts_inside, "under autocast", f"{FORMS['BHND']} under autocast"),
}


@pytest.fixture
def small_plan(monkeypatch):
    """A plain probe both ways, grouped heads, and relations."""

    def plan(depth, dtype, seed=0, shapes=(), captured=()):
        names = ("gaussian", "gaussian_causal", "sharp")
        cases = tuple(Case(name, SMALL, seed, dtype) for name in names)
        array = (
            Case(
                "sizes/full/no-option/plain/contiguous/contiguous/once", Shape(2, 6, 20, 20, 16, 2)
            ),
            Case("sizes/causal/no-option/plain/transposed/expanded/twice", Shape(2, 3, 7, 40, 16)),
        )
        relations = tuple(Case(f"free_feature{c}", SMALL, seed, dtype) for c in ("", "_causal"))
        return audit_run.Plan(cases, (), relations, array)

    monkeypatch.setattr(audit_run, "plan", plan)


@pytest.mark.thorough(keep=6)
@pytest.mark.usefixtures("small_plan")
@pytest.mark.parametrize("case", CASES)
def test_a_sound_kernel_is_judged_and_a_fault_is_caught(case):
    sound, faulty, form, known = CASES[case]
    report = audit(sound, form=form, explain=False)
    assert report.verdict in ("sound", "forward sound"), report.reason
    assert (report.exit_code, report.missing) == (0, ())
    assert report.form.startswith(known)
    assert ("called as", report.form) in facts(report.as_dict())
    assert audit(faulty, form=form, explain=False).verdict == "defect"


@pytest.mark.usefixtures("small_plan")
@pytest.mark.parametrize("kernel", [append_late, append_elsewhere, append_unwritten])
def test_what_the_next_step_reads_is_judged(kernel):
    """A step that is right by itself and leaves another cache than it should."""
    report = audit(kernel, form="append", explain=False)
    assert report.verdict == "defect"
    assert report.form == FORMS["append"]
    assert report.cause.key == "cache"


def test_new_rows_are_named_as_kernels_name_them():
    def theirs(q, k, v, k_cache, v_cache, seq_lens, causal=False):
        return append(q, k_cache, v_cache, k, v, seq_lens, None, causal)

    form = recognized(theirs)
    assert str(form).startswith("q[B,N,H,D], k[B,N,H,D]=new_key, v[B,N,H,D]=new_value, k_cache[")
    assert Form.parse(str(form)) == form
    x = [torch.randn(2, 3, n, 4) for n in (2, 9, 9)]
    own, other = (
        run_target(Target.of(f), *x, is_causal=False, scale=None) for f in (theirs, append)
    )
    assert torch.equal(own.result.out, other.result.out)
    assert not own.notes
    left = run_target(Target.of(append_unwritten, form="append"), *x, is_causal=False, scale=None)
    assert "modifies its inputs: k_cache (its rows are not those appended)" in left.notes[0]


@pytest.mark.usefixtures("small_plan")
def test_a_kernel_of_a_file_is_called_in_its_form_in_a_process_of_its_own(tmp_path):
    (tmp_path / "kernel.py").write_text(
        "import torch\n"
        "def attention(qkv, flag, *, sm_scale):\n"
        "    q, k, v = qkv.transpose(1, 3).float().unbind(2)\n"
        "    s = (q @ k.mT * sm_scale)\n"
        "    s = s.masked_fill(s.new_ones(s.shape[-2:]).tril() == 0, -torch.inf) if flag else s\n"
        "    return (s.softmax(-1) @ v).transpose(1, 2).to(qkv.dtype)\n"
    )
    name = f"{tmp_path}/kernel.py:attention"
    with pytest.raises(ValueError, match=r"wants flag.*form='q\[B,H,N,D\].*flag=\.\.\.'"):
        audit(name, isolate=True)
    report = audit(name, isolate=True, form="qkv[B,N,3,H,D], flag=is_causal", explain=False)
    assert report.verdict == "sound", report.reason


def test_a_compiled_function_is_one_of_its_signature():
    compiled = torch.compile(plain, backend="eager")
    target = Target.of(compiled)
    q, k, v, do = (torch.randn(2, 2, n, 8) for n in (5, 5, 5, 5))
    wanted = run_target(Target.of(plain), q, k, v, do, is_causal=True, scale=0.3).result
    own = {"recompile_limit": 1, "fail_on_recompile_limit_hit": True}
    with torch._dynamo.config.patch(own):
        for n in (5, 4, 3):  # more shapes than its own limit
            parts = (x[:, :, :n] for x in (q, k, v, do))
            found = run_target(target, *parts, is_causal=True, scale=0.3)
            assert found.kind == "ok", found.refusal
        again = run_target(target, q, k, v, do, is_causal=True, scale=0.3).result
    assert torch.equal(again.out, wanted.out)


@pytest.mark.parametrize("case", [name for name in CASES if name != "autocast"])
def test_forms_change_nothing_that_exact_arithmetic_gives(case):
    """In fp32 every form's kernel gives what the same kernel on plain tensors does."""
    kernel, _, form, known = CASES[case]
    found_by_result = case in ("packed, found out", "by tokens")  # which an audit finds
    target = Target.of(kernel, form=known if found_by_result else form)
    generator = torch.Generator().manual_seed(1)
    rows = 1 if target.form.decodes else 9
    q, k, v, do = (torch.randn(3, 2, n, 4, generator=generator) for n in (rows, 9, 9, rows))
    asked = {"is_causal": not target.form.decodes, "scale": 0.4}
    found = run_target(target, q, k, v, do, **asked)
    truth = run_target(Target.of(plain), q, k, v, do, **asked)
    assert found.kind == "ok", found.refusal
    for name, x in found.result.given().items():
        if name != "lse":
            assert relative(x, getattr(truth.result, name)) < 1e-6
    expected = {"out", "lse"} if target.form.forward_only else {"out", "grad_key", "grad_value"}
    assert expected - {"lse"} <= found.result.given().keys()


def test_what_is_written_to_is_said_by_its_role():
    def writes(qkv, *, is_causal, scale):
        out = packed(qkv, causal=is_causal, softmax_scale=scale)
        with torch.no_grad():
            qkv[0, 0] = 0
        return out

    target = Target.of(writes)
    x = [torch.randn(1, 2, 5, 4) for _ in range(3)]
    assert "modifies its inputs: qkv" in run_target(target, *x, is_causal=False, scale=None).notes


def test_what_is_never_written_is_said():
    x = [torch.randn(1, 2, 5, 4) for _ in range(3)]
    kernels = {into: (), into_all_but_the_last: (UNWRITTEN,), into_nan: ()}
    for kernel, notes in kernels.items():
        assert run_target(Target.of(kernel), *x, is_causal=False, scale=None).notes == notes


def test_a_program_and_a_replay_call_in_the_form():
    call = runner(Target.of(varlen_border), forward=True)
    case = Case("gaussian", SMALL)

    class Finding:
        kind, tensor, property = "element", "out", "O element"

    assert severity(call, case, Finding()) > 1


@pytest.mark.parametrize(
    "text",
    [
        *FORMS,
        "qkv[T,3,H,D], cu_seqlens, n=64, causal=causal_end",
        PAGES_OF_32,
        "q[N,H,D], k[N,H,D], v[N,H,D] -> out[H,N,D] under autocast",
    ],
)
def test_a_form_is_its_line(text):
    form = Form.parse(text)
    assert Form.parse(str(form)) == form
    assert Form.parse(form.name) == form


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("q[B,H,N,D], k[B,H,N,D]", "must hold q, k and v, or qkv"),
        ("q[B,H,N,D], k[B,H,N,D], v", "v needs its dimensions, such as v"),
        ("q[B,X,N,D], k[B,H,N,D], v[B,H,N,D]", "q has a dimension 'X'"),
        ("qkv[B,N,H,D]", "is no order of dimensions"),
        ("qkv[B,B,3,N,H,D]", "is no order of dimensions"),
        ("qkv[T,3,H,D]", "T needs cu_seqlens; one sequence a call is N"),
        ("q[B,H,D], k[P,S,H,D], v[P,S,H,D]", "P needs block_table"),
        ("q[B,N,H,D], k_cache[B,S,H,D], v_cache[B,S,H,D], k_new[B,N,H,D]", "are appended to"),
        ("q[B,H,D], k_cache[B,S,H,D], v_cache[B,S,H,D]", "which cache_seqlens counts"),
        ("q[B,H,D], k[B,32,H,D], v[B,32,H,D], block_table", "k has a dimension '32'"),
        ("q[B,H,D], k[P,32,H,D], v[P,64,H,D], block_table", "hold as many rows"),
        ("qkv[B,N,3,H,D], q[B,N,H,D]", "must hold"),
        ("qkv[B,N,3,H,D], cu_seqlen", "such as cu_seqlen=cu_seqlens, or a value"),
        ("qkv[B,N,3,H,D], flag=is_casual", "did you mean 'is_causal'"),
        ("qkv[B,N,3,H,D] -> qkv[B,N,3,H,D]", "results are out and lse"),
        ("qkv[B,N,3,H,D], cu_seqlens, cu_lens", "cu_seqlens is given twice"),
        ("qkv[B,N,3,H,D]; x", "is no argument"),
    ],
)
def test_a_wrong_line_says_what_is_wrong_and_what_is_right(text, says):
    with pytest.raises(ValueError, match=r"^form=") as raised:
        Form.parse(text)
    assert says in str(raised.value)
    assert "such as 'q[B,N,H,D], k[B,N,H,D], v[B,N,H,D]" in str(raised.value)


def test_what_a_form_cannot_hold_is_unsupported():
    x = [torch.randn(2, 2, n, 4) for n in (3, 5, 5)]
    for kernel, form, says in (
        (packed, None, "as many keys as queries"),
        (decode, "decode", "one query a sequence, not 3"),
        (varlen, None, "ends a causal mask's diagonal at the last key"),
    ):
        found = run_target(Target.of(kernel, form=form), *x, is_causal=True, scale=None)
        assert found.kind == "unsupported"
        assert says in found.refusal


def test_plain_functions_say_nothing():
    assert recognized(plain) is None
    assert recognized(functional.scaled_dot_product_attention) is None
    assert Target.of(plain).form is None
    assert Form.parse("under autocast").tensors == BHND.tensors
    with pytest.raises(ValueError, match="of an attention function of your own"):
        audit("sdpa", form="BNHD")


def test_a_modules_form_is_its_forward_passs():
    class Packed(torch.nn.Module):
        def forward(self, qkv, causal=False, softmax_scale=None):
            query, key, value = (x.transpose(1, 2) for x in qkv.unbind(2))
            sdpa = functional.scaled_dot_product_attention
            return sdpa(query, key, value, is_causal=causal, scale=softmax_scale).transpose(1, 2)

    class Varlen(torch.nn.Module):
        def forward(self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
            raise NotImplementedError

    assert recognized(Varlen()) == recognized(Varlen().forward)
    assert recognized(Packed()).of("qkv") is not None
    report = audit(Packed(), only=["gaussian_causal"], shapes=[Shape(2, 2, 24, 24, 8)])
    assert report.tests > 0, report.reason
    assert not report.findings
