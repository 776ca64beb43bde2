"""Every name in every command: it works, or one line says why not and what would."""

import importlib
import sys

import pytest
import torch
from torch.nn import functional

from halfulp.attention import emulate
from halfulp.experiments.bench import bench
from halfulp.experiments.bench_result import Setting
from halfulp.isolate.substitutions import is_recipe, suspects
from halfulp.recipes import recipe_named
from halfulp.targets import Target, builtin_targets, canonical, emulations, resolve, run_target
from halfulp.training.attention import AttentionPlan, attention_function
from halfulp.watch.functions import functions_named
from tests.targets.calls import D, tensors

KERNEL = """
from torch.nn import functional

def attention(query, key, value, *, causal=False, sm_scale=None):
    return functional.scaled_dot_product_attention(
        query, key, value, is_causal=causal, scale=sm_scale
    )
"""
# every built-in name, and one of each kind that is composed
NAMES = [target.name for target in builtin_targets()]
NAMES += ["torch", "torch:flash", "torch:math", "torch:fp32", "torch:cudnn"]
NAMES += ["halfulp:torch:stock", "halfulp:published:cpu", "transformers:none"]
NAMES += ["BF16_FLASH2[out=fp32]", "recipe:BF16_FLASH2[block_key=32]", "bf16_flash2", "flash2"]
NAMES += ["recipe:halfulp", "mine.py:attention", "mine:attention"]


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(KERNEL)
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("mine", None)


def said(error: pytest.ExceptionInfo[ValueError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("name", NAMES)
def test_every_name_audits_trains_and_is_watched_or_says_why_not(mine, name):
    target = resolve(name)
    assert canonical(name) == (target.name if not name.startswith("mine") else name)
    assert canonical(target.name) == target.name
    q, k, v, do = tensors(torch.bfloat16)
    if name != "flex:compiled":  # half a minute
        outcome = run_target(target, q, k, v, do, is_causal=True, scale=D**-0.5)
        assert outcome.kind == "ok" or outcome.refusal, "audit"
    untrainable = target.missing or target.forward_only
    if untrainable:
        with pytest.raises(ValueError, match="accepted is") as error:
            attention_function(name)
        assert said(error).startswith(f"attention={name!r}: ")
        assert untrainable in said(error)
    else:
        check_trains(name)
    unwatched = target.missing or target.unseen
    if unwatched:
        with pytest.raises(ValueError, match="accepted are") as error:
            functions_named([name])
        assert said(error).startswith(f"functions={name!r}: {unwatched}")
    else:
        functions = functions_named([name])
        assert all(callable(function) for function in functions)
        assert bool(functions) == (name.startswith("mine") or is_recipe(name))


def check_trains(name):
    attend = attention_function(name)
    leaves = [x.float().requires_grad_() for x in tensors()[:3]]
    if name == "transformers:none":
        with pytest.raises(NotImplementedError, match="it has eager"):
            attend(*leaves, is_causal=True, scale=D**-0.5)
        return
    out = attend(*leaves, is_causal=True, scale=D**-0.5)
    assert out.dtype == torch.float32
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), leaves))


@pytest.mark.parametrize("name", ["torch:math", "halfulp:torch:stock", "flash2", "flex"])
def test_bench_takes_the_same_names(name):
    found = bench([name], [Setting((1, 1, 32, 16), True)], rounds=6)
    assert {timing.kernel for timing in found.timings} == {"sdpa", name}


def test_bench_takes_a_kernel_of_the_users(mine):
    found = bench(["mine.py:attention"], [Setting((1, 1, 32, 16), True)], rounds=6)
    assert "mine.py:attention" in {timing.kernel for timing in found.timings}


@pytest.mark.parametrize(
    "name",
    ["sdpa", "sdpa:flash", "torch", "torch:flash", "transformers:sdpa",
     "torch.nn.functional:scaled_dot_product_attention"],
)  # fmt: skip
def test_pytorchs_flash_kernel_is_emulated_bit_by_bit_under_all_its_names(name):
    first = emulations(name, "cpu")[0]
    assert first == "TORCH_CPU_FLASH"
    q, k, v, do = tensors(torch.bfloat16)
    options = {"is_causal": True, "scale": D**-0.5}
    try:
        kernel = run_target(resolve(name), q, k, v, do, **options)
    except ImportError:
        pytest.skip("transformers is not installed")
    if kernel.kind != "ok":
        pytest.skip(kernel.refusal)
    emulated = run_target(resolve(first), q, k, v, do, **options)
    for tensor in ("out", "grad_query", "grad_key", "grad_value"):
        a, b = (getattr(outcome.result, tensor) for outcome in (kernel, emulated))
        assert float((a == b).double().mean()) > 0.99, tensor


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_isolated_by_recipes_that_exist(name):
    for recipe in emulations(name):
        assert recipe_named(recipe)
        assert is_recipe(recipe)
    exact = canonical(name) in ("sdpa:fp32", "recipe:FP32", "recipe:FP64")
    assert bool(suspects({(0, 0): name})) != exact


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("torch:flsh", "did you mean 'torch:flash'?"),
        ("sdpa:mat", "did you mean 'sdpa:math'?"),
        ("halfulp:stok", "did you mean 'halfulp:stock'?"),
        ("halfulp:cpu:stok", "did you mean 'halfulp:cpu:stock'?"),
        ("halfulp:cpu:triton", "did you mean"),
        ("flex:fast", "`halfulp ls targets`"),
        ("eager:x", "`halfulp ls targets`"),
        ("BF16_FLASH2[ot=fp32]", "not a field of a recipe; accepted are"),
        ("BF16_FLAS2[out=fp32]", "did you mean"),
        ("recipe:nothing", "`halfulp ls targets`"),
    ],
)
@pytest.mark.parametrize("read", [resolve, attention_function, lambda n: functions_named([n])])
def test_near_misses_are_told_in_one_line(name, says, read):
    with pytest.raises(ValueError, match=r"^\w+='") as error:
        read(name)
    assert says in said(error)


@pytest.mark.parametrize("name", ["mine.py", "mine"])
@pytest.mark.parametrize("operation", ["attention", "rms_norm"])
def test_a_file_without_its_function_is_told_with_what_it_holds(
    name, operation, tmp_path, monkeypatch
):
    text = "def fast(q, k, v): ...\n\nclass Slow: ...\n\ndef _hidden(): ...\nraise SystemExit"
    (tmp_path / "mine.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"; did you mean 'mine.py:fast' or 'mine.py:Slow'\?$"):
        resolve(name, operation=operation)


def test_a_plan_places_any_name():
    plan = AttentionPlan.of("sdpa:flash", "layer 1 head 2: halfulp:cpu:stock")
    assert plan.choice(1, 2) == "halfulp:cpu:stock"
    assert plan.choice(0, 0) == "sdpa:flash"


# How a kernel spells its arguments.


def test_other_peoples_spellings_are_understood():
    seen = {}

    def kernel(q, k, v, causal=False, sm_scale=None, window_size=None, debug=False):
        seen.update(causal=causal, sm_scale=sm_scale, window=window_size)
        return functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=sm_scale)

    target = Target.of(kernel)
    assert target.accepts == {"window"}
    q, k, v, _ = tensors()
    assert run_target(target, q, k, v, is_causal=True, scale=0.3).kind == "ok"
    assert seen == {"causal": True, "sm_scale": 0.3, "window": None}
    run_target(target, q, k, v, is_causal=False, scale=None, window=(3, 0))
    assert seen["window"] == (3, 0)


def test_any_keywords_do_not_swallow_what_is_spelled_otherwise():
    def kernel(query, key, value, causal=False, **ignored):
        assert "is_causal" not in ignored
        return functional.scaled_dot_product_attention(query, key, value, is_causal=causal)

    q, k, v, _ = tensors()
    assert run_target(Target.of(kernel), q, k, v, is_causal=True, scale=None).kind == "ok"


def test_what_a_kernel_does_not_know_is_refused_and_never_dropped():
    def kernel(query, key, value, use_causal=False):
        return functional.scaled_dot_product_attention(query, key, value)

    q, k, v, _ = tensors()
    outcome = run_target(Target.of(kernel), q, k, v, is_causal=True, scale=None)
    assert outcome.kind == "unsupported"
    assert "does not take is_causal under a name that is known here; it has use_causal" in (
        outcome.refusal
    )


def test_an_argument_that_nobody_gives_is_refused_with_the_line_that_maps_it():
    def kernel(query, key, value, qk_scale, causal):
        raise AssertionError

    with pytest.raises(ValueError, match="wants qk_scale, which nobody gives") as error:
        Target.of(kernel, "mine.py:kernel")
    assert (
        "def attention(query, key, value, *, is_causal, scale): return kernel(query, key, value,"
        " qk_scale=scale, is_causal=is_causal)"
    ).replace("is_causal=is_causal", "causal=is_causal") in said(error)


def test_a_watched_function_is_read_by_its_own_names():
    functions = importlib.import_module("halfulp.watch.functions")

    def kernel(q, k, v, causal=False, sm_scale=None):
        raise AssertionError

    q, k, _, _ = tensors()
    made = functions.Made(functions._own_form(kernel), kernel, (q, k, k, True), {"sm_scale": 0.5})
    asked = made.form.read(made.arguments, q, k)
    assert (asked.sees.causal, asked.scale) == (True, 0.5)


@pytest.mark.parametrize("name", ["sdpa:flash", "torch:flash", "torch", "eager"])
def test_a_kernel_asked_for_as_a_recipe_is_told_its_emulation(name):
    q, k, v, _ = tensors(torch.bfloat16)
    with pytest.raises(ValueError, match="cannot be emulated") as error:
        emulate(q, k, v, recipe=name)
    assert said(error).endswith(f"stands for it on a CPU, {emulations(name)[0]}")
