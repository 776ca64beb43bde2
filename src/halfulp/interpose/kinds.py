"""What kind of operation a torch function is: from its name, and, for arithmetic written out by
hand, from the module or function that it stands in.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, Final

from torch import nn

_BY_KIND: Final[dict[str, str]] = {
    "linear": "linear addmm addmv addr bilinear linear_cross_entropy",
    "matmul": "matmul mm bmm mv dot inner outer einsum baddbmm addbmm tensordot chain_matmul"
    " vdot kron cdist grouped_mm scaled_mm scaled_grouped_mm int_mm",
    "conv": "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc",
    "norm": "layer_norm rms_norm group_norm batch_norm instance_norm local_response_norm"
    " native_layer_norm normalize",
    "softmax": "softmax log_softmax softmin gumbel_softmax",
    "cross_entropy": "cross_entropy nll_loss kl_div binary_cross_entropy"
    " binary_cross_entropy_with_logits cross_entropy_loss",
    "embedding": "embedding embedding_bag",
    "attention": "scaled_dot_product_attention multi_head_attention_forward varlen_attn"
    " flex_attention",
    "activation": "gelu silu relu relu6 sigmoid logsigmoid tanh elu selu celu mish hardswish"
    " hardtanh hardsigmoid leaky_relu prelu glu softplus tanhshrink softsign threshold rrelu",
    "reduction": "sum mean var std norm vector_norm prod cumsum cumprod logsumexp logcumsumexp"
    " max min amax amin var_mean std_mean nansum nanmean median cosine_similarity mse_loss"
    " l1_loss smooth_l1_loss huber_loss pairwise_distance avg_pool1d avg_pool2d avg_pool3d"
    " adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d",
    "elementwise": "add sub rsub mul div true_divide divide multiply subtract neg negative pow"
    " square sqrt rsqrt reciprocal exp exp2 expm1 log log2 log10 log1p sin cos tan atan erf erfc"
    " abs floor_divide remainder fmod clamp clip clamp_min clamp_max maximum minimum lerp where"
    " addcmul addcdiv float_power atan2 hypot sinh cosh polar masked_fill round floor ceil trunc"
    " sign nan_to_num index_add scatter_add logaddexp xlogy interpolate",
    "cast": "to type type_as float double half bfloat16 copy index_copy setitem scatter"
    " masked_scatter index_put index_fill",
    "selection": "topk sort argsort gather index_select take_along_dim max_pool1d max_pool2d"
    " max_pool3d kthvalue",
    "dropout": "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout"
    " bernoulli rand_like randn_like multinomial rand randn randint randperm normal uniform",
    "layout": "view reshape view_as reshape_as transpose permute t swapaxes swapdims movedim"
    " expand expand_as repeat repeat_interleave unsqueeze squeeze flatten unflatten chunk split"
    " tensor_split split_with_sizes unbind cat concat concatenate stack hstack vstack getitem"
    " narrow select slice diagonal tril triu roll flip contiguous clone pad unfold fold"
    " broadcast_to broadcast_tensors atleast_1d atleast_2d atleast_3d tile pixel_shuffle"
    " pixel_unshuffle channel_shuffle diag diag_embed view_as_complex view_as_real adjoint"
    " as_strided alias rot90 detach requires_grad cpu cuda T mT H mH real imag data grad"
    " zeros ones empty full arange tensor zeros_like ones_like empty_like full_like new_zeros"
    " new_ones new_empty new_full new_tensor as_tensor linspace eye scalar_tensor asarray fill"
    " zero register_hook retain_grad backward register_post_accumulate_grad_hook size dim numel"
    " stride item tolist numpy len bool repr hash format share_memory record_stream",
}
_KIND: Final = {name: kind for kind, names in _BY_KIND.items() for name in names.split()}

KINDS: Final = (
    *(kind for kind in _BY_KIND if kind not in ("layout", "dropout")),
    "rotary",
    "custom",
    "other",
)
"""What an operation can be. "rotary" and "norm" are also elementwise arithmetic, reductions and
casts in a function or a module that is named so; "custom" is an `autograd.Function`; "other"
returns numbers and is in no table."""

_SPELLED: Final = {
    "iadd": "add", "radd": "add", "isub": "sub", "rsub": "rsub", "imul": "mul", "rmul": "mul",
    "truediv": "div", "rtruediv": "rdiv", "itruediv": "div", "rpow": "rpow", "ipow": "pow",
    "rmatmul": "matmul", "floordiv": "floor_divide", "mod": "remainder", "rdiv": "rdiv",
}  # fmt: skip
_KIND.update(rdiv="elementwise", rpow="elementwise")
_BY_HAND: Final = ("elementwise", "reduction", "cast", "selection")
_DEEPEST = 8  # frames between an operation and the function that is named after what it does


def name_of(function: Any) -> str:
    """The one spelling of a torch function: "add" for `+`, `Tensor.add_` and `torch.add`; "" for
    what only reads a property of a tensor.
    """
    name = getattr(function, "__name__", None) or type(function).__name__
    if name in ("__get__", "__set__", "__delete__"):
        about = getattr(getattr(function, "__self__", None), "__name__", "")
        return about if about in ("T", "mT", "H", "mH", "real", "imag", "data") else ""
    name = str(name).partition(".")[0].strip("_")  # "attention_forward.default" of torch.ops
    return _SPELLED.get(name, name)


def kind_of(name: str, module: nn.Module | None, frame: FrameType | None) -> str:
    """The kind of an operation of that name, called in a module and from a frame."""
    kind = _KIND.get(name, "attention" if "attention" in name else "other")
    if kind not in _BY_HAND:
        return kind
    return _written_in(module, frame) or kind


def _written_in(module: nn.Module | None, frame: FrameType | None) -> str:
    for _ in range(_DEEPEST):
        if frame is None or frame.f_code.co_name in ("forward", "_call_impl"):
            break
        if found := _named(frame.f_code.co_name):
            return found
        frame = frame.f_back
    return "" if module is None else _named(type(module).__name__)


def _named(name: str) -> str:
    name = name.lower()
    if "rotary" in name or "rope" in name.replace("property", ""):
        return "rotary"
    return "norm" if "norm" in name and "normal" not in name.replace("normalize", "") else ""


def caller() -> FrameType | None:
    """The frame that called a torch function whose handler called this."""
    return sys._getframe(2)
