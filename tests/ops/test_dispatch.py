"""Which kernel runs, that an explicit choice is kept, and that the reasons are told."""

import importlib
import warnings
from types import SimpleNamespace

import pytest
import torch

import halfulp
from halfulp import ops
from halfulp.calls import Call
from halfulp.ops import dispatch, tiled

Q = torch.randn(1, 2, 5, 8, generator=torch.Generator().manual_seed(0))


def kernel(refusal=None, absent=None):
    """A kernel that counts its calls and refuses in words."""
    calls = []

    def forward(*args):
        calls.append(args)
        return tiled.forward(*args)

    return SimpleNamespace(
        supports=lambda *_: refusal or absent,
        missing=lambda: absent,
        forward=forward,
        backward=tiled.backward,
        calls=calls,
    )


@pytest.fixture
def planted(monkeypatch):
    """Plant kernels under the backends' names; nothing was said yet."""
    monkeypatch.setattr(dispatch, "_said", set())

    def plant(**kernels):
        def module(name):
            if name == "torch":
                return tiled
            found = kernels.get(name)
            if found is None:
                raise ImportError(f"no {name}")
            return found

        monkeypatch.setattr(dispatch, "_module", module)

    return plant


def test_the_first_that_fits_runs(planted):
    native = kernel()
    planted(cpu=native)
    out = halfulp.attention(Q, Q, Q)
    assert len(native.calls) == 1
    assert torch.equal(out, halfulp.attention(Q, Q, Q, backend="torch"))
    assert len(native.calls) == 1, "the one that was asked for ran, and no other"
    halfulp.attention(Q, Q, Q, backend="cpu")
    assert len(native.calls) == 2
    text = str(halfulp.explain_dispatch(Q, Q, Q))
    assert text.splitlines()[0] == "cpu runs"
    assert "cpu: runs: the first that takes these inputs" in text
    assert "triton: not: it is not part of this installation (no triton)" in text
    assert "torch: would take these inputs" in text


def test_a_kernel_that_does_not_fit_is_passed_over_in_silence(planted):
    native = kernel(refusal="head dimension 8")
    planted(cpu=native)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        halfulp.attention(Q, Q, Q)
    assert not native.calls
    assert "cpu: not: head dimension 8" in str(halfulp.explain_dispatch(Q, Q, Q))
    assert halfulp.explain_dispatch(Q, Q, Q).backend == "torch"


@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_an_explicit_choice_never_falls_back(planted, backend):
    planted(cpu=kernel(refusal="head dimension 8"), triton=kernel(refusal="needs a GPU"))
    reason = {"cpu": "head dimension 8", "triton": "needs a GPU"}[backend]
    with pytest.raises(ValueError, match=f"backend='{backend}': {reason}"):
        halfulp.attention(Q, Q, Q, backend=backend)
    told = halfulp.explain_dispatch(Q, Q, Q, backend=backend)
    assert told.backend is None
    assert (
        str(told).splitlines()[0]
        == f"no kernel runs: backend={backend!r} does not take these inputs"
    )
    assert f"{backend}: not: {reason}" in str(told)


def test_an_absent_kernel_is_told_once(planted):
    planted(cpu=kernel(absent="the library was not built"))
    with pytest.warns(
        RuntimeWarning, match="plain PyTorch.*'cpu' is missing: the library was not built"
    ):
        halfulp.attention(Q, Q, Q)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        halfulp.attention(Q, Q, Q)
        halfulp.attention(Q, Q, Q, backend="torch")
    planted()
    assert "not part of this installation" in dispatch.missing("cpu")


def test_what_only_plain_pytorch_gives(planted):
    planted(cpu=kernel(), triton=kernel())
    mask = torch.zeros(5, 5, requires_grad=True)
    reason = halfulp.explain_dispatch(Q, Q, Q, mask).reasons["triton"]
    assert reason == "not: it gives no gradient of attn_mask"
    with torch.no_grad():
        assert "it gives no gradient" not in str(halfulp.explain_dispatch(Q, Q, Q, mask))
    empty = Q[:0]
    assert halfulp.explain_dispatch(empty, empty, empty).reasons["cpu"] == "not: a tensor is empty"


def test_nothing_is_computed_to_explain(planted):
    native = kernel()
    planted(cpu=native)
    halfulp.explain_dispatch(Q, Q, Q, dropout_p=0.5)
    assert not native.calls


def test_the_real_kernels_keep_the_contract():
    """Every kernel of this installation offers what dispatch calls, and says in words what it
    refuses.
    """
    for name in ops.BACKENDS:
        try:
            module = dispatch._module(name)
        except ImportError:
            continue
        assert {"supports", "forward", "backward"} <= set(dir(module))
        refused = module.supports(Call(Q.double(), Q.double(), Q.double()), "halfulp")
        assert name == "torch" or (isinstance(refused, str) and refused)


def test_kernels_are_not_imported_before_a_call(added_modules):
    added = added_modules("halfulp")
    assert "halfulp.ops.dispatch" in added
    assert (
        not {"halfulp.kernels.cpu", "halfulp.kernels.triton_attention", "triton", "transformers"}
        & added
    )
    assert importlib.util.find_spec("halfulp.ops") is not None
