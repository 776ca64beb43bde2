"""One extra pass through a model: what its attention was fed, gave and got back, and nothing left
behind.

The gradients come from `torch.autograd.grad` with respect to the attention's own tensors, so no
parameter's .grad is touched, no hook of a distributed wrapper runs and no gradient of a weight is
computed. Random generators and buffers are put back as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from halfulp.calls import Call
from halfulp.formats import BF16, FP16, OCP_E4M3, OCP_E5M2, Format, round_to
from halfulp.watch.curvature import ExactOut, FullPrecision
from halfulp.watch.taps import Observed, Tap

READ: tuple[Format, ...] = (FP16, BF16, OCP_E4M3, OCP_E5M2)
"""What kernels are asked about: do they read their operands rounded to this? Those with fewer bits
come later: on few numbers a kernel may well not notice that they were rounded to more bits before.
"""
AS_GIVEN = -1
# largest first: what falls below 2⁻²⁴ in fp16 is 0, and what overflows shows and is tried again
_HALF_SCALES = (2.0**16, 2.0**12, 2.0**8, 2.0**4, 1.0)


def attention_modules(model: nn.Module) -> dict[int, Any]:
    """The modules of a model that hold attention, by layer: `.attend` (with `.layer`, `.heads`,
    `.tap`), and `.head_weights()`.

    Raises:
        ValueError: there are none.
    """
    found: dict[int, Any] = {}
    for module in model.modules():
        attend: Any = getattr(module, "attend", None)
        if hasattr(attend, "tap") and hasattr(module, "head_weights"):
            found[attend.layer] = module
    if not found:
        raise ValueError(
            f"model={type(model).__name__}: accepted is one whose attention modules have `attend`"
        )
    return dict(sorted(found.items()))


@dataclass
class Seen:
    """One layer's call with its graph."""

    call: Call
    out: Tensor
    entries: int  # batch entries that are measured
    inputs: Tensor | None = None


@dataclass
class Recorder:
    """A tap that keeps every layer's call and, once, asks its attention what it reads."""

    modules: Mapping[int, Any]
    entries: Callable[[Tensor, Tensor], int]
    # indices into READ or AS_GIVEN, by layer, int64 [H]; filled in where missing
    reads: dict[int, Tensor]
    seen: dict[int, Seen] = field(default_factory=dict)
    inputs: dict[int, Tensor] = field(default_factory=dict)
    autocast: bool = False

    def __call__(self, layer: int, call: Call, out: Tensor) -> Tensor:
        """Return out as it came."""
        self.autocast = self.autocast or torch.is_autocast_enabled(out.device.type)
        if layer not in self.reads:
            attend = self.modules[layer].attend
            self.reads[layer] = _ask(attend, call)
        entries = self.entries(call.query, call.key)
        self.seen[layer] = Seen(call, out, entries, self.inputs.get(layer))
        return out

    def read(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The operands `[B, H, N, D]` (fp32 or fp64) rounded as the attention of that layer reads
        them.
        """
        q, k, v = (_rounded(x, self.reads[layer]) for x in (query, key, value))
        return q, k, v


def record(
    model: nn.Module, recorder: Recorder, loss: Callable[[], Tensor]
) -> tuple[float, dict[int, Observed]]:
    """Make a pass forward and back; return the loss and every recorded layer's call, operands as
    the attention reads them, in the first `entries` batch entries.
    """
    seen = recorder.seen
    with undisturbed(model), _taps(recorder.modules, recorder), _inputs(recorder):
        value = loss()
        # a layer's own number names its dO, the complement its dK
        outs = gradients(
            value,
            {layer: s.out for layer, s in seen.items()} | {~n: s.call.key for n, s in seen.items()},
        )
    calls = {}
    for layer, s in seen.items():
        query, key, v = (_wide(x[: s.entries]) for x in s.call.operands)
        grad_out, grad_key = outs[layer], outs[~layer]
        # where the loss does not depend on a layer its dO is 0; one column is broadcast to any D_v
        no_gradient = torch.zeros_like(query[..., :1])
        calls[layer] = Observed(
            *recorder.read(layer, query, key, v),
            s.call.sees,
            s.call.scale,
            out=_wide(s.out[: s.entries]),
            grad_out=no_gradient if grad_out is None else grad_out[: s.entries],
            grad_key=None if grad_key is None else grad_key[: s.entries],
            inputs=None if s.inputs is None else s.inputs[: s.entries],
        )
    return float(value.detach()), calls


def exact_pass(
    model: nn.Module, recorder: Recorder, loss: Callable[[], Tensor]
) -> tuple[float, dict[int, Tensor]]:
    """The same pass with exact attention in the measured batch entries, outside autocast; return
    its loss and dO by layer.
    """
    entries = {layer: s.entries for layer, s in recorder.seen.items()}
    taps = {layer: ExactOut(recorder.read, entries[layer]) for layer in entries}
    device = next(iter(recorder.seen.values())).out.device.type
    mode: AbstractContextManager[Any] = (
        FullPrecision(device) if recorder.autocast else nullcontext()
    )
    with undisturbed(model), _taps({n: recorder.modules[n] for n in entries}, taps), mode:
        value = loss()
        found = gradients(value, {layer: tap.outs[layer] for layer, tap in taps.items()})
    return float(value.detach()), {
        layer: g[: entries[layer]] for layer, g in found.items() if g is not None
    }


def gradients(loss: Tensor, wanted: Mapping[int, Tensor]) -> dict[int, Tensor | None]:
    """Gradients by name, fp32 or wider; fp16 ones come from a loss scaled up by the largest power
    of two that fits.
    """
    names = [name for name, x in wanted.items() if x.requires_grad]
    tensors = [wanted[name] for name in names]
    if not names:
        return dict.fromkeys(wanted)
    scales = _HALF_SCALES if any(x.dtype == torch.float16 for x in tensors) else (1.0,)
    for scale in scales:
        found = torch.autograd.grad(
            loss * scale, tensors, retain_graph=scale != scales[-1], allow_unused=True
        )
        if all(bool(g.isfinite().all()) for g in found if g is not None):
            break
    wide = (None if g is None else _wide(g) / scale for g in found)
    return dict.fromkeys(wanted) | dict(zip(names, wide, strict=True))


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Random generators and buffers as they were, whatever runs inside, the backward pass too;
    gradients on.
    """
    buffers = [(x, x.detach().clone()) for x in model.buffers()]
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices), torch.enable_grad():
            yield
    finally:
        with torch.no_grad():
            for x, kept in buffers:
                x.copy_(kept)


@contextmanager
def _taps(modules: Mapping[int, Any], tap: Tap | Mapping[int, Tap]) -> Iterator[None]:
    before = {layer: module.attend.tap for layer, module in modules.items()}
    try:
        for layer, module in modules.items():
            module.attend.tap = tap[layer] if isinstance(tap, Mapping) else tap
        yield
    finally:
        for layer, module in modules.items():
            module.attend.tap = before[layer]


@contextmanager
def _inputs(recorder: Recorder) -> Iterator[None]:
    """Keep what the attention modules are called with: X is the first argument."""

    def keep(layer: int) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(_module: nn.Module, arguments: tuple[Any, ...]) -> None:
            recorder.inputs[layer] = arguments[0].detach()

        return hook

    handles = [
        module.register_forward_pre_hook(keep(layer)) for layer, module in recorder.modules.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _ask(attend: Any, call: Call) -> Tensor:
    """Which format each head's attention reads: the last of READ that changes the operands and not
    a bit of out.
    """
    operands = call.operands
    options = {"is_causal": call.sees.causal, "scale": call.scale}
    # the tap that asks must not be asked again by the calls made here
    kept, attend.tap = attend.tap, None
    try:
        with torch.no_grad():
            given = attend(*operands, **options)
            reads = torch.full((given.shape[1],), AS_GIVEN)
            for number, fmt in enumerate(READ):
                rounded = [round_to(_wide(x), fmt).to(x.dtype) for x in operands]
                changes = [
                    (a != b).any(3).any(2).any(0) for a, b in zip(rounded, operands, strict=True)
                ]
                changed = (changes[0] | changes[1] | changes[2]).cpu()
                if not bool(changed.any()):
                    continue
                # rounding twice to one format is rounding once, so that a kernel that rounds its
                # operands itself gives the same bits; one that does not gives others
                same = (attend(*rounded, **options) == given).all(3).all(2).all(0).cpu()
                reads[changed & same] = number
    finally:
        attend.tap = kept
    return reads


def _rounded(x: Tensor, reads: Tensor) -> Tensor:
    for number in sorted(set(reads.tolist())):
        if number != AS_GIVEN:
            heads = (reads == number).to(x.device)
            x = torch.where(heads[:, None, None], round_to(x.contiguous(), READ[number]), x)
    return x


def _wide(x: Tensor) -> Tensor:
    return x.detach().to(torch.promote_types(x.dtype, torch.float32))
