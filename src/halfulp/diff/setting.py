"""One side of a comparison: a model, how it is run, and what one pass over a batch gives."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from halfulp.formats import dtype_named
from halfulp.interpose import Interposed, Observe, Operation, Swap, interpose
from halfulp.training.user_model import arguments_of, each_tensor

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DTYPES |= {"fp64": torch.float64}


@dataclass(frozen=True)
class Setting:
    """A model and how it is run.

    Attributes:
        model: `nn.Module`; called with a batch's tensors by name (a dictionary), by position (a
            tuple) or with the batch itself. It stays in the mode that it is in (train or eval).
        name: for the report.
        dtype: "bf16", "fp16", "fp32" or "fp64": run a copy of the model in it, on batches in it.
        autocast: "bf16" or "fp16": under autocast.
        attention: who computes scaled_dot_product_attention: a name of `halfulp ls targets`, or a
            function of the `Operation`.
        swaps: other arithmetic of operations (`halfulp.interpose.Swap`).
        pieces: the batch in pieces of so many entries each, one after the other.
        decode: the first so many tokens at once, then one after the other with a cache
            (`past_key_values`, as transformers' models take it).
        compiled: run it through torch.compile.
        context: makes a context that the pass runs in, such as `lambda: sdpa_kernel(...)`.
        forward: (model, batch) → what the model gives, instead of calling it.
    """

    model: nn.Module
    name: str = ""
    dtype: str | torch.dtype | None = None
    autocast: str | torch.dtype | None = None
    attention: str | Callable[[Operation], Any] | None = None
    swaps: tuple[Swap, ...] = ()
    pieces: int | None = None
    decode: int | None = None
    compiled: bool = False
    context: Callable[[], AbstractContextManager[Any]] | None = None
    forward: Callable[[nn.Module, Any], Any] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise ValueError(
                f"model={type(self.model).__name__}: accepted is an nn.Module, or a Setting of one"
            )
        for name in ("dtype", "autocast"):
            if (given := getattr(self, name)) is not None:
                known = list(DTYPES) if name == "dtype" else ["bf16", "fp16"]
                object.__setattr__(self, name, dtype_named(given, known, name))
        for name in ("pieces", "decode"):
            given = getattr(self, name)
            if given is not None and (not isinstance(given, int) or given < 1):
                raise ValueError(f"{name}={given!r}: accepted is a whole number from 1")
        if self.pieces and self.decode:
            raise ValueError("pieces and decode: accepted is one of them")
        if self.dtype is not None:
            made = copy.deepcopy(self.model).to(DTYPES[str(self.dtype)])
            object.__setattr__(self, "model", made)
        _ = self.own_swaps  # so that a name that nothing has is told here

    @cached_property
    def own_swaps(self) -> tuple[Swap, ...]:
        """The swaps that the setting itself asks for."""
        attention = () if self.attention is None else (Swap(self.attention, kinds=("attention",)),)
        return (*self.swaps, *attention)

    @cached_property
    def called(self) -> Any:
        """What a batch is handed to."""
        return torch.compile(self.model) if self.compiled else self.model

    @property
    def whole(self) -> bool:
        """Whether a batch is one call of the model."""
        return not (self.pieces or self.decode)

    @property
    def device(self) -> torch.device:
        """Where the model's parameters lie."""
        first = next(self.model.parameters(), None)
        return torch.device("cpu") if first is None else first.device

    def named(self, name: str) -> Setting:
        """The same under a name, if it has none."""
        if self.name:
            return self
        made = copy.copy(self)  # replace() would convert the model again
        object.__setattr__(made, "name", name)
        return made

    def swap_of(self, operation: Operation) -> Swap | None:
        """The swap that this setting itself puts in for an operation."""
        return next((swap for swap in self.own_swaps if swap.chooses(operation)), None)

    def compute(self, operation: Operation) -> Any:
        """Run one operation as this setting does."""
        swap = self.swap_of(operation)
        return operation.run() if swap is None else swap.run(operation)


@dataclass
class Outcome:
    """What a pass over one batch gave, on the CPU in float64."""

    loss: float | None
    # log-probabilities of the tokens that come next, `[sequences, tokens]`; without tokens the
    # outputs themselves `[sequences, numbers]`
    outputs: Tensor
    of_tokens: bool
    interposed: Interposed


@dataclass
class Piece:
    """Which part of the batch runs now; shared with whoever observes."""

    number: int = 0
    start: int = 0  # of tokens or entries
    length: int = 0
    total: int = 0  # 0: the batch is one piece
    tokens: bool = False


def run(
    setting: Setting,
    batch: Any,
    *,
    gradients: bool = False,
    observe: Observe | None = None,
    before: Callable[[Operation], None] | None = None,
    swaps: Sequence[Swap] | None = None,
    piece: Piece | None = None,
    seed: int = 0,
    backward: Callable[[Tensor], None] | None = None,
) -> Outcome:
    """One pass over a batch. Gradients, if asked for, are in the parameters' `.grad` afterwards;
    `backward` of the loss instead adds to what is there.
    """
    piece = Piece() if piece is None else piece
    model, reading = setting.model, False
    if setting.dtype is not None:
        wanted = DTYPES[str(setting.dtype)]
        batch = each_tensor(batch, lambda x: x.to(wanted) if x.is_floating_point() else x)

    def seen_by(operation: Operation, result: Any) -> None:
        if observe is not None and not reading:  # log-probabilities are no operation of theirs
            observe(operation, result)

    # both sides, and every pass that is held against theirs, draw the same numbers on a batch
    torch.manual_seed(seed)
    if gradients:
        model.zero_grad(set_to_none=True)
    with ExitStack() as stack:
        stack.enter_context(setting.context() if setting.context else nullcontext())
        stack.enter_context(torch.set_grad_enabled(gradients or backward is not None))
        seen = stack.enter_context(interpose(
            setting.called, None if observe is None else seen_by, before=before,
            swaps=setting.own_swaps if swaps is None else swaps,
        ))  # fmt: skip
        with _autocast(setting):
            given = _calls(setting, batch, piece)
            reading = True
            loss, outputs, of_tokens = _read(given, batch, setting)
        if loss is not None and (gradients or backward is not None):
            (backward or Tensor.backward)(loss)
    value = None if loss is None else float(loss.detach().double())
    return Outcome(value, outputs, of_tokens, seen)


def _autocast(setting: Setting) -> AbstractContextManager[Any]:
    if setting.autocast is None:
        return nullcontext()
    return torch.autocast(setting.device.type, DTYPES[str(setting.autocast)])


def _calls(setting: Setting, batch: Any, piece: Piece) -> list[Any]:
    """What the model gives of each piece."""
    if setting.whole:
        return [_call(setting, batch)]
    tokens = setting.decode is not None
    first = next(x for x in tensors_in(batch) if x.dim() > int(tokens))
    piece.total, piece.tokens = first.shape[int(tokens)], tokens
    found: list[Any] = []
    while piece.start < piece.total:
        length = 1 if tokens and piece.start else (setting.decode or setting.pieces or 1)
        piece.length = min(length, piece.total - piece.start)
        part = cut(batch, int(tokens), piece.start, piece.length, piece.total)
        if tokens:
            part = dict(part) if isinstance(part, Mapping) else {"input_ids": part}
            part = {k: x for k, x in part.items() if k not in ("labels", "attention_mask")}
            cache = getattr(found[-1], "past_key_values", None) if found else None
            part |= {"past_key_values": cache, "use_cache": True}
        found.append(_call(setting, part))
        piece.start += piece.length
        piece.number += 1
    return found


def cut(batch: Any, dim: int, start: int, length: int, total: int) -> Any:
    """A part of a batch: of every tensor that has so many entries along a dimension."""

    def part(x: Tensor) -> Tensor:
        fits = x.dim() > dim and x.shape[dim] == total
        return x.narrow(dim, start, length) if fits else x

    return each_tensor(batch, part)


def tensors_in(batch: Any) -> list[Tensor]:
    """The tensors of a batch; raises ValueError for what is none."""
    values = batch.values() if isinstance(batch, Mapping) else batch
    found = [batch] if isinstance(batch, Tensor) else [x for x in values if isinstance(x, Tensor)]
    if not found:
        raise ValueError("batch holds no tensor; accepted are a tensor, a tuple or a dictionary")
    return found


def _call(setting: Setting, batch: Any) -> Any:
    model = setting.called
    if setting.forward is not None:
        return setting.forward(model, batch)
    args, named = arguments_of(setting.model, batch)
    return model(*args, **named)


def _read(given: Sequence[Any], batch: Any, setting: Setting) -> tuple[Tensor | None, Tensor, bool]:
    """Loss, and log-probabilities or outputs, of the pieces together."""
    losses = [x for x in (_member(one, "loss") for one in given) if x is not None]
    logits = [x for x in (_member(one, "logits") for one in given) if x is not None]
    if not losses and not logits:
        plain = [_first_float(one) for one in given]
        if all(x.dim() == 0 for x in plain):
            losses = plain
        else:
            logits = plain
    # a mean over pieces is the batch's where they are equally long, which those of a batch are
    loss = torch.stack(losses).mean() if losses else None
    if not logits:
        assert loss is not None
        return loss, loss.detach().double().cpu().reshape(1, 1), False
    together = torch.cat(logits, dim=1 if setting.decode else 0)
    tokens = _token_ids(batch, together)
    if tokens is None:
        flat = together.detach().double().cpu().flatten(1)
        return (together.float().square().mean() if loss is None else loss), flat, False
    chosen = tokens[:, 1:, None].to(together.device)
    # in fp32 whatever the model's format is: what measures a gap must not round it
    log_probs = together[:, :-1].float().log_softmax(-1).gather(-1, chosen)[..., 0]
    loss = -log_probs.mean() if loss is None else loss
    return loss, log_probs.detach().double().cpu(), True


def _member(given: Any, name: str) -> Any:
    found = given.get(name) if isinstance(given, Mapping) else getattr(given, name, None)
    return found if isinstance(found, Tensor) else None


def _first_float(given: Any) -> Tensor:
    for x in [given] if isinstance(given, Tensor) else given:
        if isinstance(x, Tensor) and x.is_floating_point():
            return x
    raise ValueError(
        f"the model gives {type(given).__name__}: accepted is a tensor, or what has `logits` or"
        " `loss`; a `forward` of the Setting may pick it"
    )


def _token_ids(batch: Any, logits: Tensor) -> Tensor | None:
    """The tokens of a batch, where the outputs are logits for each of them."""
    given = batch.get("input_ids") if isinstance(batch, Mapping) else tensors_in(batch)[0]
    if not isinstance(given, Tensor) or given.is_floating_point() or logits.dim() != 3:
        return None
    fits = given.shape == logits.shape[:2] and given.shape[1] > 1
    return given if fits and int(given.max()) < logits.shape[-1] else None


def part_of(whole: Tensor, shape: tuple[int, ...], piece: Piece) -> Tensor | None:
    """What answers to a piece's result in a whole batch's; None: nothing of that shape."""
    if not piece.total or len(shape) != whole.dim():
        return None
    for dim, (long, short) in enumerate(zip(whole.shape, shape, strict=True)):
        if long == short:
            continue
        rows = short // piece.length if piece.length and short % piece.length == 0 else 0
        if rows and long == rows * piece.total:
            wide = whole.unflatten(dim, (rows, piece.total))  # type: ignore[no-untyped-call]
            whole = wide.narrow(dim + 1, piece.start, piece.length).flatten(dim, dim + 1)
        elif piece.tokens and long == piece.total and short == piece.start + piece.length:
            whole = whole.narrow(dim, 0, short)
    return whole if tuple(whole.shape) == shape else None


def setting_of(given: Any, name: str, argument: str) -> Setting:
    """A Setting of what a user hands over: one, or a model."""
    if isinstance(given, Setting):
        return given.named(name)
    if isinstance(given, nn.Module):
        return Setting(given, name)
    raise ValueError(
        f"{argument} is a {type(given).__name__}: accepted are an nn.Module, a Setting, or the"
        " path of a recording (`halfulp record`)"
    )
