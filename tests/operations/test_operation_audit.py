"""An operation as data is audited as attention is: verdict, worst figure, smallest input, program,
process of its own.
"""

import itertools
import re
import subprocess
import sys
from typing import Literal

import pytest
import torch

from halfulp.audit import audit, planning, run
from halfulp.formats import BF16, round_to
from halfulp.operations import (
    OperationCalls,
    Sizes,
    defined,
    emulated,
    operation_named,
    operation_names,
)
from halfulp.operations.seam import Steps, exactly
from halfulp.targets import UnsupportedError
from tests.operations.zoo_norms import rms
from tests.operations.zoo_operations import EXPECTED_DEFECTS, KERNELS
from tests.operations.zoo_quantizers import stochastic

LOW = """
import torch

def norm(input, normalized_shape, weight, eps):
    return input * torch.rsqrt(input.square().mean(-1, keepdim=True) + eps) * weight

def narrow(x):
    return x

def odd(rows, gamma, group):
    return rows

def ends(input, normalized_shape, weight, eps):
    raise SystemExit(3)
"""


@pytest.fixture
def probes_alone(monkeypatch):
    """Audits without the covering array of sizes, which is half of their time; the other tests here
    have it, and `python -m benchmarks.operation_rates`.
    """
    monkeypatch.setattr(planning, "size_cases_of", lambda *_: ())


def in_short(target, op):
    """The audit; of linear layers in six formats, which have fifty probes, in two of them."""
    probes = operation_named(op).probes if op == "quantized_linear" else ()
    only = [p.name for p in probes if p.name.endswith(("ranges_fp8_row", "_nvfp4"))]
    return audit(target, op=op, explain=False, only=only)


def seen(report):
    """The verdict, of an audit that was cut short too."""
    return "sound" if "what was seen is sound" in report.reason else report.verdict


@pytest.mark.thorough(keep=6)  # of the last, since the first take longest
@pytest.mark.usefixtures("probes_alone")
@pytest.mark.parametrize("op", operation_names()[::-1])
def test_recipes_get_their_own_verdict(op):
    assert seen(in_short("recipe:floor", op)) == "sound"
    assert seen(in_short("recipe:stock", op)) in ("sound", "stock")


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_dtypes_have_a_verdict(dtype):
    options = {"op": "rms_norm", "dtype": dtype, "explain": False}
    assert audit("recipe:floor", **options).verdict == "sound"
    assert audit(rms("inverse_low"), **options).verdict == "defect"


@pytest.mark.thorough(keep=6)
@pytest.mark.usefixtures("probes_alone")
@pytest.mark.parametrize("op", operation_names()[::-1])
def test_what_every_machine_has_raises_no_alarm(op):
    for target in operation_named(op).targets:
        report = in_short(target.name, op)
        assert (report.verdict == "defect") == ((op, target.name) in EXPECTED_DEFECTS), report


# What one probe of all shows: rows past the last tile, parts that are rounded, a small vocabulary.
ONE_PROBE = (
    "weight_grad_whole_tiles",
    "bias_grad_parts_low",
    "smoothing_of_others",
    "three_bits",
)


def a_few(op):
    """Some faults and a sound one; `python -m benchmarks.operation_rates` audits them all."""
    own = [kernel for kernel in KERNELS if kernel.op == op]
    faults = [kernel for kernel in own if kernel.faulty]
    few = [k for k in faults if k.name in ONE_PROBE] or [faults[-1]]
    return [faults[0], *few, next(kernel for kernel in own if not kernel.faulty)]


@pytest.mark.thorough(keep=12)
@pytest.mark.usefixtures("probes_alone")
@pytest.mark.parametrize(
    "kernel",
    [kernel for op in operation_names() for kernel in a_few(op)],
    ids=lambda k: f"{k.op}-{k.name}",
)
def test_the_zoo(kernel):
    report = in_short(kernel.fn, kernel.op)
    assert (seen(report) == "defect") == kernel.faulty, report
    assert report.exit_code == (1 if kernel.faulty else 2 if report.missing else 0), report


@pytest.mark.parametrize("op", operation_names())
def test_the_zoo_is_large_enough(op):
    own = [kernel for kernel in KERNELS if kernel.op == op]
    assert sum(kernel.faulty for kernel in own) >= 8
    assert sum(not kernel.faulty for kernel in own) >= 3


def test_an_oracle_that_shares_the_defect_of_its_kernel_hides_it():
    """As in Liger-Kernel PR 1432, where gradients were 4 to 23 % off and the test's own reference
    was too (PR 1438): the two agree, and a definition says that both are wrong.
    """
    kernel, oracle = rms("inner_without_weight"), rms("inner_without_weight")
    x, w = torch.randn(8, 64), 1 + 0.3 * torch.randn(64)
    found = []
    for function, dtype in ((kernel, torch.bfloat16), (oracle, torch.float32)):
        leaves = [t.to(torch.bfloat16).to(dtype).requires_grad_() for t in (x, w)]
        out = function(leaves[0], (64,), leaves[1], 1e-6)
        found.append([out, *torch.autograd.grad(out.float().square().sum(), leaves)])
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a.float(), b, rtol=5e-2, atol=5e-2 * float(b.detach().abs().max()))
    report = audit(kernel, op="rms_norm", explain=False)
    assert report.verdict == "defect"
    assert {finding.tensor for finding in report.findings} == {"grad_input"}


def test_a_program_shows_the_defect_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kernel.py").write_text(LOW, encoding="utf-8")
    report = audit("kernel.py:norm", op="rms_norm")
    assert (report.verdict, report.operation) == ("defect", "rms_norm")
    assert report.smallest.shape.work < report.cases[0].case.shape.work
    program = tmp_path / "shows.py"
    program.write_text(report.script, encoding="utf-8")
    ran = subprocess.run([sys.executable, program], capture_output=True, text=True, cwd="/")
    assert ran.returncode == 1, ran.stderr
    assert "× the limit of a defect" in ran.stdout


def test_a_process_of_its_own_gives_the_same_figures(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kernel.py").write_text(LOW, encoding="utf-8")
    options = {"op": "rms_norm", "explain": False}
    apart, here = (audit("kernel.py:norm", isolate=i, **options) for i in (True, False))
    assert [c.rows for c in apart.cases] == [c.rows for c in here.cases]
    ended = audit("kernel.py:ends", op="rms_norm", isolate=True)
    assert ended.verdict == "error"
    assert "SystemExit" in ended.reason
    assert "it was given input [24, 256], weight [256]" in ended.reason


def test_the_worst_element_is_named():
    def one_row(input, normalized_shape, weight, eps):
        out = torch.nn.functional.rms_norm(input, normalized_shape, weight, eps)
        wrong = torch.zeros_like(out)
        wrong[-1, -1] = out[-1, -1].detach()
        return out + wrong

    report = audit(one_row, op="rms_norm", explain=False)
    (finding, *_) = [f for f in report.findings if f.kind == "element"]
    assert report.verdict == "defect"
    assert "of output is" in finding.figure


@pytest.mark.parametrize(
    ("name", "op", "message"),
    [
        ("torch", "rmsnorm", "did you mean 'rms_norm'"),
        ("torhc", "rms_norm", "did you mean 'torch'"),
        ("kernel.py:narrow", "layer_norm", r"so map it: .*: return narrow\(x=input\)$"),
        ("kernel.py:odd", "rms_norm", r"return odd\(gamma=weight, rows=..., group=...\)$"),
        ("torch", "./nothing", "there is no such folder"),
    ],
)
def test_what_is_not_known_is_said_in_one_line(tmp_path, monkeypatch, name, op, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kernel.py").write_text(LOW, encoding="utf-8")
    with pytest.raises(ValueError, match=message) as found:
        audit(name, op=op)
    assert "\n" not in str(found.value)


def test_an_option_that_a_kernel_does_not_take_is_left_out_and_said():
    def fixed(input, normalized_shape, weight):
        return torch.nn.functional.rms_norm(input, normalized_shape, weight, 1e-6)

    report = audit(fixed, op="rms_norm", explain=False)
    assert report.verdict == "sound"
    assert report.limits[0].startswith("does not take eps=0.01 in ")


def test_arguments_are_taken_by_the_names_that_others_give_them():
    def other_order(epsilon, *, gamma, hidden_states):
        return torch.nn.functional.rms_norm(hidden_states, gamma.shape, gamma, epsilon)

    report = audit(other_order, op="rms_norm", only=["gaussian", "large_eps"], explain=False)
    assert (seen(report), report.limits) == ("sound", ())
    assert seen(audit(lambda x: torch.softmax(x, -1), op="softmax", explain=False)) == "stock"


@pytest.mark.parametrize("op", ["router", "rope", "embedding"])
def test_sizes_that_an_operation_needs_are_not_halved_away(op, monkeypatch):
    monkeypatch.setattr(run, "operation_causes", lambda *_: ())  # nobody asks why
    # Two experts cannot be chosen of one, nor half of a pair turned, nor row 2 of 2 looked up.
    sound = operation_named(op).targets[-1].function  # which takes every option

    def doubled(*operands, **options):
        found = sound(*operands, **options)
        return (found[0] * 2, found[1]) if isinstance(found, tuple) else found * 2

    report = audit(doubled, op=op, only=[operation_named(op).probes[0].name])
    assert report.verdict == "defect"
    assert report.smallest is not None


def test_a_kernel_says_which_values_of_an_option_it_takes():
    def of_one(logits, k, *, renormalize: Literal[False]):
        weights, indices = torch.softmax(logits.float(), -1).topk(k)
        return weights.to(logits.dtype), indices

    report = audit(of_one, op="router", explain=False)
    assert report.verdict == "sound"
    assert (report.limits, {case.status for case in report.cases}) == ((), {"ok"})


def mean_loss(input, target, *, reduction: Literal["mean"] = "mean", ignore_index=-100):
    return torch.nn.functional.cross_entropy(input.float(), target, ignore_index=ignore_index)


def unshifted_mean_loss(input, target, *, reduction: Literal["mean"] = "mean", ignore_index=-100):
    x, seen = input.float(), target != ignore_index
    own = x.gather(1, torch.where(seen, target, 0)[:, None])[:, 0]
    return (x.exp().sum(-1).log() - own)[seen].mean()


def test_a_loss_of_the_mean_alone_is_audited_on_every_probe_that_it_takes():
    found = {kernel: audit(kernel, op="cross_entropy", explain=False)
             for kernel in (mean_loss, unshifted_mean_loss)}  # fmt: skip
    assert [report.verdict for report in found.values()] == ["sound", "defect"]
    left = {
        case.case.probe.partition("/")[0] for case in found[mean_loss].cases if case.status != "ok"
    }
    left -= {"sizes"}  # some of which ask for z-loss, or do not
    assert left == {"smoothing", "smoothing_alone", "small_vocabulary", "z_loss"}
    # a mean changes with its rows
    assert {r.invariant for r in found[mean_loss].relations} == {"same call twice"}


def test_a_kernel_that_is_meant_for_hardly_any_call_is_not_called_sound():
    def narrow(x, weight, eps=1e-6):
        if x.shape != (24, 256) or x.abs().max() > 6:
            raise UnsupportedError("not meant for this")
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)

    report = audit(narrow, op="rms_norm", explain=False)
    assert report.verdict == "incomplete"
    assert report.missing[0].startswith("declared as not meant for more than two thirds")


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize(
    ("op", "fault", "key", "text"),
    [
        ("rms_norm", "squares_low", "sum-low", "squares is rounded to bf16 after every term"),
        ("rms_norm", "inverse_low", "statistic-low", "inverse_rms is rounded to bf16"),
        ("rms_norm", "weight_grad_low", "grad-sum-low", "the gradient of weights"),
        ("rms_norm", "eps_fixed", "option", "eps is taken as 1e-06 instead of 0.01"),
        ("rms_norm", "tail_dropped", "end", "squares ends at 64 of 77"),
        ("softmax", "out_cut", "step-low", "kept is cut to bf16"),
        ("softmax", "no_inner", "term-missing", "the gradient of inner"),
        ("swiglu", "swapped_gradients", "exchanged", "grad_gate and grad_up are exchanged"),
        ("sum", "mean", "factor", "mean(input, 0) stands in place of sum(input, 0)"),
        ("swiglu", "clamped", "limited", "activated is held within ±10 in the forward pass alone"),
        (
            "quantize",
            "scale_of_neighbor",
            "block-scale",
            "is its neighbor's, the one before, along blocks",
        ),
    ],
)
def test_the_cause_is_what_errs_as_the_kernel_does(op, fault, key, text):
    (kernel,) = [k.fn for k in KERNELS if (k.op, k.name) == (op, fault)]
    report = audit(kernel, op=op)
    assert report.causes[0].key == key, report.evidence
    assert text in report.evidence[0]
    assert re.search(r"explains (9\d|100) % of the error of \w+", report.evidence[0])


@pytest.mark.usefixtures("probes_alone")
@pytest.mark.parametrize("fault", ["three_bits", "four_bits"])
def test_random_numbers_of_few_bits_are_seen(fault):
    assert audit(stochastic(fault), op="stochastic_round", explain=False).verdict == "defect"


def test_random_numbers_that_elements_share_are_named():
    (kernel,) = [k.fn for k in KERNELS if (k.op, k.name) == ("stochastic_round", "a_number_a_row")]
    report = audit(kernel, op="stochastic_round")
    assert report.causes[0].key == "random"
    assert report.evidence == ("the elements of a row share random numbers",)


def test_what_nothing_explains_is_told_by_its_place():
    def noisy(input, dim):
        noise = torch.randn(input.shape, generator=torch.Generator().manual_seed(1))
        return torch.softmax(input.float(), dim).mul(1 + 0.02 * noise).to(input.dtype)

    report = audit(noisy, op="softmax", only=["gaussian"])
    assert report.causes[0].key == "operation-place", report.evidence
    # of the result, though its gradient is off by more
    assert report.evidence[0].startswith("output is 2 % off; it begins at kept, by 2 %")


def test_the_step_and_the_rows_whose_noise_makes_calls_differ_are_named():
    def noisy(gate, up):
        sigmoid = torch.sigmoid(gate.float())
        low = round_to(sigmoid.detach(), BF16.with_(rounding="stochastic"), seed=next(seeds))
        rows = (torch.arange(len(gate)) % 4 == 3)[:, None]
        sigmoid = sigmoid + torch.where(rows, low - sigmoid.detach(), 0.0)
        return (gate.float() * sigmoid * up.float()).to(gate.dtype)

    seeds = itertools.count()
    report = audit(noisy, op="swiglu", dtype="float16", only=["gaussian"])
    assert report.causes[0].key == "step-low"
    text = "sigmoid is rounded to bf16 by random numbers, where T modulo 4 is 3"
    assert report.evidence[0].startswith(text)


def test_a_factor_of_a_slope_that_is_rounded_is_no_other_slope():
    class Gated(torch.autograd.Function):
        @staticmethod
        def forward(ctx, gate, up):
            ctx.save_for_backward(gate, up)
            return (torch.nn.functional.silu(gate.float()) * up.float()).to(gate.dtype)

        @staticmethod
        def backward(ctx, grad):
            gate, up = (x.float() for x in ctx.saved_tensors)
            sigmoid = torch.sigmoid(gate)
            slope = sigmoid * (1 + gate * (1 - sigmoid).bfloat16().float())
            grads = grad * up * slope, grad * gate * sigmoid
            return tuple(x.to(grad.dtype) for x in grads)

    report = audit(Gated.apply, op="swiglu", dtype="float16")
    assert report.evidence[0].startswith("one_less passes through bf16")
    assert report.causes[0].key == "coarser", report.evidence


@pytest.mark.thorough(keep=0)
@pytest.mark.parametrize("steady", [True, False])
def test_no_number_in_two_calls_is_no_difference_of_calls(steady):
    def absent(input, dim):
        found = torch.softmax(input.float(), dim)
        there = bool(input[0, 0] > 0) if steady else next(calls) % 3 == 1  # in some calls alone
        return (found + torch.nan if there else found).to(input.dtype)

    calls = itertools.count()
    report = audit(absent, op="softmax", only=["gaussian", "relations"])
    assert report.verdict == "defect"
    twice = [f.figure for f in report.findings if f.property.startswith("same call twice")]
    assert "unstable" not in {c.key for c in report.causes} or not steady
    assert bool(twice) is not steady
    assert not any("nan" in text for text in (*twice, *report.evidence))
    assert all(text.startswith("one call gives no numbers where the") for text in twice)


def test_the_rows_of_a_wrong_function_are_read_off_the_results():
    def every_third(input, dim):
        rows = (torch.arange(len(input)) % 3 == 1)[:, None]
        found = torch.softmax(input.float(), dim)
        wrong = torch.where(rows, found.roll(1, 0) - found, 0.0)
        return (found + wrong.detach()).to(input.dtype)

    report = audit(every_third, op="softmax", only=["gaussian"])
    assert report.causes[0].key == "neighbor"
    assert "its neighbor's, the one before along T, where T modulo 3 is 1" in report.evidence[0]


def _cut_in_the_last_half(x: torch.Tensor) -> torch.Tensor:
    """Toward zero to bf16 there, to nearest elsewhere: half a roundoff that always leans."""
    cut = (x.float().contiguous().view(torch.int32) & -(1 << 16)).view(torch.float32)
    there = torch.arange(x.shape[-1]) >= x.shape[-1] // 2
    return torch.where(there, cut, x.bfloat16().float())


@pytest.mark.parametrize(
    ("table", "verdict"),
    [(_cut_in_the_last_half, "defect"), (lambda x: x.bfloat16().float(), "stock")],
)
def test_a_table_that_leans_in_a_part_is_seen_below_the_results_own_rounding(table, verdict):
    def rope(input, positions, *, base, interleaved):
        width = input.shape[-1]
        power = torch.arange(0, width, 2).float() / width
        angle = (positions[:, None].float() / base**power)[:, None]
        cos, sin = angle.cos().to(input.dtype), table(angle.sin()).to(input.dtype)
        a, b = (input[..., 0::2], input[..., 1::2]) if interleaved else input.chunk(2, -1)
        parts = (a * cos - b * sin, a * sin + b * cos)
        return torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)

    report = audit(rope, op="rope", explain=False)
    assert report.verdict == verdict, report.reason
    along = [f.property for f in report.findings if f.kind == "lean"]
    assert bool(along) == (verdict == "defect")
    assert not along or any("along sin, in the last" in told for told in along)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_a_tail_that_torch_loses_is_lost_by_the_stock_recipe_alone(approximate):
    """Rows of three gates, all of them far below 0, once made sound kernels defects."""
    gate = -torch.linspace(4, 14, 71)[None, :, None].expand(1, 71, 3).bfloat16()
    operation = operation_named("geglu")
    ones = torch.ones_like(gate)
    calls = OperationCalls(
        operation,
        "bfloat16",
        {"gate": gate, "up": ones},
        {"grad_output": ones},
        {"approximate": approximate},
    )
    exact, stock = defined(calls), emulated(calls, operation.stock)
    torchs = torch.nn.functional.gelu(gate.float(), approximate=approximate)
    lost, kept = gate < -6, gate > -4.8  # between them it hangs on how well tanh is computed
    assert (torchs[lost] == 0).all()
    assert (torchs[kept] != 0).all()
    assert (exact["output"][lost] < 0).all()
    for name, x in stock.items():
        # its slope's, where kernels sum that beside 1 as well
        far = gate < -7 if name == "grad_gate" else lost
        assert (x[far].abs() < 1e-14).all()
        assert (x[kept] != 0).all()


@pytest.mark.parametrize("op", operation_names())
def test_whether_a_size_fits_hangs_on_no_seed(op):
    """Tokens of a vocabulary of 2 were once drawn from 4: an audit fell at one seed of fifty."""
    operation = operation_named(op)

    def fits(probe, sizes, seed):
        x = probe.draw(sizes, torch.Generator().manual_seed(seed))
        x = {name: t.double() if t.is_floating_point() else t for name, t in x.items()}
        operation.define(Steps(exactly), x, {**operation.options, **probe.options})

    least = [
        Sizes(1, tuple((symbol, n if symbol == short else n + 2) for symbol, _ in first))
        for first in (operation.sizes[0].of,)
        for n in (1, 2, 3)
        for short, _ in first
    ]
    for probe, sizes in itertools.product(operation.probes, least):
        try:
            fits(probe, sizes, 0)
        except (RuntimeError, ValueError, LookupError):
            continue
        for seed in range(1, 7):
            fits(probe, sizes, seed)
