"""PyTorch's own samples of scaled_dot_product_attention, put through what its suite does with an
operator's samples.

The description (an OpInfo) ships with torch. It asks for gradients of the first order alone and for
no forward mode, and so do we: both are refused in words.
"""

import functools
import os
import sys

import pytest
import torch
from hypothesis import settings
from torch.autograd import forward_ad
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._utils import wrapper_set_seed

import halfulp

EXACT = 1e-11
LOW = (torch.bfloat16, torch.float16, torch.float32)


@functools.cache
def described():
    """The OpInfo. Its module costs seconds, and what importing it changes in the process is put
    back.
    """
    kept = os.environ.copy(), list(sys.path), sys.argv
    sys.argv = ["pytest"]  # it reads pytest's own arguments
    try:
        with torch.backends.__allow_nonbracketed_mutation():
            from torch.testing._internal.common_methods_invocations import op_db
    finally:
        os.environ.clear()
        os.environ.update(kept[0])
        sys.path[:], sys.argv = kept[1:]
        settings.load_profile("halfulp")
    return next(op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention")


def samples(dtype, *, dropout=None):
    """(operands, arguments) of every sample, of those with dropout or of those without; all want
    gradients.
    """
    torch.manual_seed(0)  # the samples are random numbers of the global generator
    every = [
        ((x.input, *x.args), x.kwargs)
        for x in described().sample_inputs("cpu", dtype, requires_grad=True)
    ]
    taken = [x for x in every if dropout is None or bool(x[1]["dropout_p"]) == dropout]
    assert len(taken) >= 12
    return taken


def different(dtype):
    """As `samples`, one of each kind: it lists every one twice."""
    taken = {}
    for operands, options in samples(dtype):
        kind = tuple(
            (k, v if not isinstance(v, torch.Tensor) else v.shape) for k, v in options.items()
        )
        taken[tuple(x.shape for x in operands), kind] = operands, options
    return list(taken.values())


def seeded(*operands, **options):
    return wrapper_set_seed(halfulp.attention, *operands, **options)


def math_backend(*operands, **options):
    with sdpa_kernel(SDPBackend.MATH):
        return functional.scaled_dot_product_attention(*operands, **options)


def both_passes(function, operands, options):
    """Out and the gradient of all that wants one, the mask too; `out ** 2` has no direction of its
    own.
    """
    leaves = [x for x in (*operands, options.get("attn_mask")) if x is not None]
    out = function(*operands, **options)
    return out, *torch.autograd.grad(out.square().sum(), leaves)


def in_double(operands, options):
    operands = [x.detach().double().requires_grad_() for x in operands]
    mask = options.get("attn_mask")
    return operands, (
        options
        if mask is None
        else options | {"attn_mask": mask.detach().double().requires_grad_()}
    )


def test_every_dtype_that_pytorch_takes():
    assert described().dtypes == {torch.float64, *LOW}


def test_samples_in_float64():
    for operands, options in samples(torch.float64, dropout=False):
        results = (both_passes(f, operands, options) for f in (halfulp.attention, math_backend))
        for got, expected in zip(*results, strict=True):
            torch.testing.assert_close(got, expected, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("backend", [None, "torch"])
@pytest.mark.parametrize("dtype", LOW)
def test_samples_at_most_twice_the_error_of_the_math_backend(dtype, backend):
    """The largest error of each tensor against float64; one rounding of the largest element is
    always allowed.

    In float32, where scores of 300 alone put the weights off by more, it is the tolerance that the
    description sets.
    """
    for operands, options in samples(dtype, dropout=False):
        exact = both_passes(math_backend, *in_double(operands, options))
        stock = both_passes(math_backend, operands, options)
        got = both_passes(functools.partial(halfulp.attention, backend=backend), operands, options)
        for g, s, e in zip(got, stock, exact, strict=True):
            assert g.shape == e.shape
            assert g.dtype == dtype
            size = float(e.detach().abs().max())
            unit = 5e-5 + 5e-6 * size if dtype == torch.float32 else torch.finfo(dtype).eps * size
            assert (
                float((g - e).detach().abs().max())
                <= 2 * float((s - e).detach().abs().max()) + unit
            )


def test_gradients_numerically():
    """Also of batches of gradients at once, and with dropout: the seed that is drawn is in the
    function.
    """
    assert described().check_batched_grad
    for operands, options in samples(torch.float64):
        torch.autograd.gradcheck(
            functools.partial(seeded, **options), operands, fast_mode=True, check_batched_grad=True
        )


def test_dropout_is_the_same_at_the_same_seed():
    for operands, options in samples(torch.float32, dropout=True):
        first, again = (both_passes(seeded, operands, options) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        assert not torch.equal(
            first[0], halfulp.attention(*operands, **options | {"dropout_p": 0.0})
        )


@pytest.mark.parametrize("dtype", [torch.float64, *LOW])
@pytest.mark.parametrize("backend", [None, "torch"])
def test_elements_that_are_no_neighbors(dtype, backend):
    """PyTorch's noncontiguous samples (every other element of a larger tensor): the same bits."""
    call = functools.partial(seeded, backend=backend)
    torch.manual_seed(0)
    for sample in described().sample_inputs("cpu", dtype, requires_grad=True):
        apart = sample.noncontiguous()
        assert not apart.input.is_contiguous()
        results = (both_passes(call, (x.input, *x.args), x.kwargs) for x in (sample, apart))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of the check itself
def test_without_data_and_compiled_with_dynamic_shapes():
    from torch.testing._internal.optests import aot_autograd_check, fake_check

    for operands, options in different(torch.float32):
        fake_check(halfulp.attention, operands, options)
    for operands, options in different(torch.bfloat16)[::5]:
        aot_autograd_check(halfulp.attention, operands, options, dynamic=True)


def test_tensors_of_another_class():
    """PyTorch's check that an operator works with any of its arguments wrapped in a tensor
    subclass, backward too.
    """
    from torch.testing._internal import composite_compliance

    def same(a, b, **_):
        torch.testing.assert_close(a, b)

    for operands, options in different(torch.float32):
        composite_compliance.check_with_mode(seeded, operands, options, same)
        composite_compliance.check_all_permutations(seeded, operands, options, same)
        composite_compliance.check_backward_formula(seeded, operands, options, assert_equal_fn=same)


def test_mapped_over_every_argument():
    """vmap over each subset of the operands, along the first dimension and the last."""
    for operands, options in different(torch.float32)[::2]:
        if options["dropout_p"]:
            continue
        for i in range(1, 8):
            for place in (0, -1):
                dims = tuple(place if i >> j & 1 else None for j in range(3))
                many = [
                    x.detach() if d is None else torch.stack([x.detach(), -x.detach()], d)
                    for x, d in zip(operands, dims, strict=True)
                ]
                out = torch.vmap(functools.partial(halfulp.attention, **options), dims)(*many)
                each = [
                    [x if d is None else x.select(d, j) for x, d in zip(many, dims, strict=True)]
                    for j in (0, 1)
                ]
                expected = torch.stack([halfulp.attention(*x, **options) for x in each])
                torch.testing.assert_close(out, expected)


# of PyTorch's forward mode
@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")
def test_what_the_description_leaves_out_is_refused_in_words():
    """The tangent of a forward-mode derivative would be dropped without a word, a derivative of
    zero.
    """
    assert not described().supports_forward_ad
    operands, options = samples(torch.float32)[0]
    plain = tuple(x.detach() for x in operands)
    call = functools.partial(halfulp.attention, **options)
    with pytest.raises(NotImplementedError, match="forward mode AD"):
        torch.func.jvp(call, plain, plain)
    with (
        forward_ad.dual_level(),
        pytest.raises(NotImplementedError, match="no forward-mode derivative"),
    ):
        call(plain[0], plain[1], forward_ad.make_dual(plain[2], plain[2]))
    grad, *_ = torch.autograd.grad(call(*operands).sum(), operands, create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiable once"):
        grad.sum().backward()


def test_nothing_of_the_import_remains():
    before = dict(os.environ), list(sys.path), settings.default
    described()
    assert (dict(os.environ), list(sys.path), settings.default) == before
    assert settings.get_current_profile_name() == "halfulp"
    assert not torch.backends.flags_frozen()
