"""Every built-in target computes attention or says why it cannot, and every name leads to a target
or to one line.
"""

import importlib
import math
import re
import shutil
import sys
import types
import warnings
from importlib.machinery import ModuleSpec

import pytest
import torch
from torch.nn import functional

from halfulp.attention import emulate
from halfulp.recipes import RECIPES
from halfulp.targets import Target, builtin_targets, resolve, run_target
from tests.targets.calls import FORWARD_ONLY, B, D, H, N, check_right, plain, run, tensors

FLASH_ATTENTION = importlib.import_module("halfulp.targets.flash_attention")
TRANSFORMERS = importlib.import_module("halfulp.targets.transformers_layer")
LOCAL = ("sdpa", "sdpa:math", "sdpa:flash", "eager", "flex", "recipe:BF16_HALFULP", "recipe:FP32")


@pytest.mark.thorough(keep=9)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", LOCAL)
def test_builtins_compute_attention_with_each_option(name, dtype):
    target = resolve(name)
    if name == "recipe:BF16_HALFULP" and dtype != torch.bfloat16:
        assert run(target, dtype=dtype).kind == "unsupported"
        return
    mask = torch.rand(N, N, generator=torch.Generator().manual_seed(0)) < 0.7
    mask[:, 0] = True
    additive = torch.randn(1, H, N, N, generator=torch.Generator().manual_seed(1)).to(dtype)
    cases = (
        {},
        {"is_causal": True, "scale": 0.3},
        {"enable_gqa": True},
        {"attn_mask": mask},
        {"attn_mask": additive},
    )
    for options in cases:
        outcome = check_right(target, dtype, **options)
    forward_only = name == "flex"
    assert (outcome.result.grad_query is None) == forward_only
    assert (FORWARD_ONLY in outcome.notes) == forward_only
    assert (outcome.result.lse is not None) == (name == "flex" or name.startswith("recipe:"))


def test_every_builtin_runs_here_or_says_why_not():
    targets = {t.name: t for t in builtin_targets()}
    assert {
        "sdpa",
        "sdpa:math",
        "sdpa:flash",
        "sdpa:efficient",
        "sdpa:cudnn",
        "flex",
        "eager",
        "flash_attn",
    } <= set(targets)
    assert {f"recipe:{name}" for name in RECIPES} <= set(targets)
    for name, target in targets.items():
        assert target.description
        assert "\n" not in target.description
        if target.missing is not None:
            outcome = run(target)
            assert (outcome.kind, outcome.refusal, outcome.result) == (
                "unsupported",
                target.missing,
                None,
            ), name
    if not torch.cuda.is_available():
        assert "CUDA" in targets["sdpa:efficient"].missing
        assert "CUDA" in targets["sdpa:cudnn"].missing
        assert targets["flash_attn"].missing


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU these backends exist")
@pytest.mark.parametrize("name", ["sdpa:efficient", "sdpa:cudnn"])
def test_a_backend_without_a_device_never_falls_back(name):
    forced = resolve(name)
    forced = Target(forced.name, forced.call, forced.accepts, forced.description)
    outcome = run(forced)
    assert outcome.kind == "unsupported"
    assert outcome.result is None
    assert "does not take these arguments on cpu" in outcome.refusal


def test_flash_refuses_what_it_cannot_do_and_default_dispatch_may_choose():
    q, k, _, _ = tensors()
    wide = torch.randn(B, H, N, D + 8, generator=torch.Generator().manual_seed(0))
    for name, kind in (("sdpa:flash", "unsupported"), ("sdpa", "ok"), ("sdpa:math", "ok")):
        assert (
            run_target(resolve(name), q, k, wide, wide.clone(), is_causal=False, scale=None).kind
            == kind
        )


def test_flash_and_math_are_the_backends_they_name():
    outs = {
        name: run(resolve(name), dtype=torch.bfloat16).result
        for name in ("sdpa:flash", "sdpa:math")
    }
    q, k, v, do = (x.requires_grad_() for x in tensors(torch.bfloat16))
    out = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0]
    assert torch.equal(outs["sdpa:flash"].out, out)
    assert torch.equal(outs["sdpa:flash"].grad_key, torch.autograd.grad(out, k, do.detach())[0])
    assert not torch.equal(outs["sdpa:math"].out, out)


def test_a_recipe_target_is_the_emulation_bit_for_bit():
    result = run(resolve("BF16_HALFULP"), dtype=torch.bfloat16, is_causal=True).result
    q, k, v, do = tensors(torch.bfloat16)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = emulate(q, k, v, is_causal=True, recipe="BF16_HALFULP", return_lse=True)
    assert torch.equal(result.out, out)
    assert torch.equal(result.lse, lse)
    for got, expected in zip(
        (result.grad_query, result.grad_key, result.grad_value),
        torch.autograd.grad(out, leaves, do),
        strict=True,
    ):
        assert torch.equal(got, expected)


def test_flex_runs_more_shapes_than_torch_compiles_by_default():
    target = resolve("flex")
    for n in range(2, 14):
        q = torch.ones(1, 1, n, 16 + 8 * (n % 3))
        outcome = run_target(target, q, q, q, is_causal=n % 2 == 0, scale=0.1 * n)
        assert outcome.kind == "ok", outcome.refusal
        assert not [note for note in outcome.notes if note.startswith("warns")]


def test_compiled_flex_says_what_it_needs(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("on a GPU it needs triton")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert resolve("flex:compiled").missing == "needs a C++ compiler"


def test_flash_attn_gets_its_own_layout(monkeypatch):
    seen = {}

    def flash_attn_func(q, k, v, softmax_scale=None, causal=False, return_attn_probs=False):
        seen.update(shape=tuple(q.shape), key_shape=tuple(k.shape), probs=return_attn_probs)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = functional.scaled_dot_product_attention(
            q, k, v, scale=softmax_scale, is_causal=causal, enable_gqa=True
        )
        scores = (
            q
            @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT
            * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
        )
        if causal:
            scores = scores.masked_fill(torch.ones(N, N, dtype=torch.bool).triu(1), -math.inf)
        return out.transpose(1, 2), scores.logsumexp(-1), None

    fake = types.ModuleType("flash_attn")
    fake.__spec__ = ModuleSpec("flash_attn", None)
    fake.flash_attn_func = flash_attn_func
    monkeypatch.setitem(sys.modules, "flash_attn", fake)
    real = resolve_without_missing(monkeypatch)
    outcome = check_right(real, torch.float32, is_causal=True, scale=0.4, enable_gqa=True)
    assert outcome.result.lse is not None
    assert seen == {"shape": (B, N, H, D), "key_shape": (B, N, 1, D), "probs": True}
    assert (
        run(real, attn_mask=torch.ones(N, N, dtype=torch.bool)).refusal == "does not take attn_mask"
    )
    q, k, v, _ = tensors(n_query=5)
    assert "bottom right" in run_target(real, q, k, v, is_causal=True, scale=None).refusal


@pytest.mark.parametrize(
    ("name", "modules"),
    [("flash_attn:3", ["flash_attn_interface"]), ("flash_attn:3", ["fa3_fwd_interface"]),
     ("flash_attn:4", ["flash_attn", "flash_attn.cute"])],
)  # fmt: skip
@pytest.mark.parametrize("gives_lse", [False, True])
def test_later_versions_of_flash_attn(monkeypatch, name, modules, gives_lse):
    """They take no return_attn_probs and give lse, none, or O alone."""

    def flash_attn_func(q, k, v, softmax_scale=None, causal=False):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = functional.scaled_dot_product_attention(
            q, k, v, scale=softmax_scale, is_causal=causal, enable_gqa=True
        )
        out = out.transpose(1, 2)
        if name == "flash_attn:3" and not gives_lse:
            return out
        return out, (
            torch.logsumexp(q.float() @ k.float().mT * softmax_scale, -1) if gives_lse else None
        )

    assert f"{modules[-1]}" in resolve(name).missing
    assert resolve(name).missing.endswith("is not installed")
    for module in modules:
        fake = types.ModuleType(module)
        fake.__spec__ = ModuleSpec(module, None, is_package=True)
        fake.flash_attn_func = flash_attn_func
        monkeypatch.setitem(sys.modules, module, fake)
    if not torch.cuda.is_available():
        assert resolve(name).missing == "needs a CUDA device"
    real = resolve_without_missing(monkeypatch, name)
    assert (run(real, scale=0.4).result.lse is not None) == gives_lse


def resolve_without_missing(monkeypatch, name="flash_attn"):
    monkeypatch.setattr(FLASH_ATTENTION, "no_flash_attn", lambda *modules: None)
    return resolve(name)


@pytest.fixture
def transformers():
    with warnings.catch_warnings():  # of its dependencies, at import
        warnings.simplefilter("ignore")
        pytest.importorskip("transformers.models.llama.modeling_llama")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["transformers:sdpa", "transformers:eager"])
def test_transformers_functions(transformers, name, dtype):
    mask = torch.rand(N, N, generator=torch.Generator().manual_seed(0)) < 0.7
    mask[:, 0] = True
    for options in (
        {},
        {"is_causal": True, "scale": 0.3},
        {"enable_gqa": True, "is_causal": True},
        {"attn_mask": mask},
    ):
        outcome = check_right(resolve(name), dtype, **options)
        assert outcome.result.grad_key is not None
    q, k, v, _ = tensors(n_query=1)
    assert run_target(resolve(name), q, k, v, is_causal=True, scale=None).kind == "unsupported"


def test_an_unknown_transformers_function_is_unsupported(transformers):
    outcome = run(resolve("transformers:no_such"))
    assert outcome.kind == "unsupported"
    assert "no_such" in outcome.refusal
    assert "sdpa" in outcome.refusal


def test_without_transformers_its_targets_say_so(monkeypatch):
    monkeypatch.setattr(TRANSFORMERS, "installed", lambda package: False)
    assert resolve("transformers:eager").missing == "transformers is not installed"
    assert resolve("transformers:flash_attention_2").missing == "transformers is not installed"


# Names.


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("sdpa:flash", "sdpa:flash"),
        ("recipe:BF16_FLASH2", "recipe:BF16_FLASH2"),
        ("recipe:bf16_flash2", "recipe:BF16_FLASH2"),
        ("BF16_AUTHORS", "recipe:BF16_AUTHORS"),
        ("halfulp", "halfulp"),
        ("halfulp:torch", "halfulp:torch"),
        ("flash1", "recipe:BF16_FLASH1"),
        ("torch_cpu", "recipe:TORCH_CPU_FLASH"),
    ],
)
def test_names(name, target):
    assert resolve(name).name == target


@pytest.mark.parametrize(
    ("name", "close"),
    [
        ("spda", "sdpa"),
        ("sdpa:flsh", "sdpa:flash"),
        ("BF16_HALFULB", "BF16_HALFULP"),
        ("halfup", "halfulp"),
        ("zzz", None),
        ("", None),
    ],
)
def test_an_unknown_name_is_one_line_with_the_nearest(name, close):
    with pytest.raises(ValueError, match=r"^target=") as raised:
        resolve(name)
    text = str(raised.value)
    assert "\n" not in text
    assert "module:function" in text
    assert ("did you mean" in text) == (close is not None)
    if close:
        assert f"did you mean {close!r}?" in text


KERNEL = """
import torch
from sibling import FACTOR

def attention(query, key, value, *, is_causal, scale):
    '''A kernel from a file.

    More text.
    '''
    attend = torch.nn.functional.scaled_dot_product_attention
    out = attend(query, key, value, is_causal=is_causal, scale=scale)
    return out * FACTOR

class Group:
    @staticmethod
    def inner(query, key, value, *, is_causal, scale):
        return attention(query, key, value, is_causal=is_causal, scale=scale)

def two(query, key): ...
def norm(x, weight, eps=1e-6): ...
answer = 42
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "kernel.py").write_text(KERNEL)
    (tmp_path / "sibling.py").write_text("FACTOR = 1.0\n")
    (tmp_path / "broken.py").write_text("import torch\n\ndef f(:\n")
    (tmp_path / "raising.py").write_text("x = 1\n\nraise RuntimeError('no device\\nsecond line')\n")
    (tmp_path / "exiting.py").write_text("raise SystemExit('usage: ...')\n")
    (tmp_path / "importing.py").write_text("import no_such_module_here\n")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in ("sibling", "kernel"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    "name",
    [
        "kernel.py:attention",
        "kernel.py:Group.inner",
        "kernel:attention",
        "{folder}/kernel.py:attention",
    ],
)
def test_a_users_function_from_file_or_module(folder, name):
    path = list(sys.path)
    target = resolve(name.format(folder=folder))
    assert sys.path == path
    check_right(target, torch.float32, is_causal=True, scale=0.3)
    assert target.accepts == frozenset()
    if name.endswith(":attention"):
        assert target.description == "A kernel from a file."


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nowhere.py:f", "there is no file nowhere.py"),
        ("kernel.py:nothing", "has no 'nothing'; it has attention, Group, two"),
        ("kernel.py:answer", "is no function but int"),
        ("kernel.py:Group", "is no function but type"),
        ("kernel.py:norm", r"eps=1e-06\); accepted is .*, or op=, --op with the name of another"),
        ("kernel.py:two", r"takes \(query, key\); accepted is f\(query, key, value"),
        ("kernel.py:", "'module:function'"),
        ("broken.py:f", "line 3: SyntaxError"),
        ("raising.py:f", "line 3: RuntimeError: no device$"),
        ("exiting.py:f", "SystemExit: usage"),
        ("importing.py:f", "No module named 'no_such_module_here'"),
        ("no_such_module_here:f", "No module named 'no_such_module_here'"),
    ],
)
def test_what_cannot_be_loaded_is_one_line(folder, name, says):
    with pytest.raises(ValueError, match=re.compile(says)) as raised:
        resolve(name)
    assert "\n" not in str(raised.value)
    assert not [m for m in sys.modules if m.startswith("halfulp_target_raising")]


def test_builtin_functions_without_a_signature_work():
    target = resolve("torch.nn.functional:scaled_dot_product_attention")
    assert target.accepts == {"attn_mask", "enable_gqa"}
    check_right(target, torch.float32, is_causal=True, scale=0.2, enable_gqa=True)


def test_name_of_a_function_leads_back_to_it():
    assert Target.of(functional.softplus, "x").name == "x"
    assert Target.of(plain).name == f"{plain.__module__}:plain"
