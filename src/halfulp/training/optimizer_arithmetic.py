"""The arithmetic of an optimizer's step, which a plan may put into another, weight by weight: on
master copies in fp32 or fp64, with stochastic rounding, through a format, or for AdamW in another
kernel.

Weights in bf16 swallow every update below half a unit in their last place. No operation of the
model shows it; the same optimizer on wider copies of the same weights does. So for the length of a
step a weight lends its place: its data, gradient and the optimizer's state are wide, the user's own
optimizer steps, and what the model reads afterwards is rounded again. That holds for any optimizer
that works on its parameters' data, gradients and state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from halfulp.formats import BF16, FP16, FP32, Format, parse_format, round_to
from halfulp.interpose import module_names
from halfulp.recipes import hash_seed
from halfulp.targets import is_code, one_line, resolve

OPTIMIZER = "optimizer"
"""The kind under which a plan of operations speaks of the optimizer's step."""
STOCHASTIC = "stochastic"
_WIDE = {"fp32": torch.float32, "fp64": torch.float64}
_OWN_FORMAT = {torch.bfloat16: BF16, torch.float16: FP16, torch.float32: FP32}
_ADAMW = "adamw_step"
_MASTER = "(master)"


def check_optimizer(into: str) -> None:
    """Raise ValueError for what no optimizer's step can be put into; loads no code."""
    if into in (*_WIDE, STOCHASTIC) or is_code(into):
        return
    try:
        parse_format(into)
    except ValueError:
        try:
            target = resolve(into, "into", _ADAMW)
        except ValueError as error:
            said = str(error).partition(" accepted are ")[2]
            raise ValueError(
                f"into={into!r}: of the optimizer accepted are {', '.join(_WIDE)}, {STOCHASTIC}, a"
                f" format such as 'e8m4', and for AdamW {said}"
            ) from None
        if target.elsewhere is not None:
            raise ValueError(
                f"into={into!r}: a recipe of the optimizer's step is fp32; accepted is 'fp32'"
            ) from None


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, list[nn.Parameter]]:
    """Return what an optimizer changes, by the path of the module that holds it."""
    found: dict[str, list[nn.Parameter]] = {}
    left = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    for path, module in module_names(model):
        for parameter in module.parameters(recurse=False):
            # a tied weight counts once, in the first module that holds it
            if id(parameter) in left:
                left.remove(id(parameter))
                found.setdefault(path, []).append(parameter)
    return found


@dataclass(frozen=True)
class _Lent:
    """A weight for the length of a step."""

    name: str
    into: str
    data: Tensor
    grad: Tensor


class OptimizerArithmetic:
    """Makes the steps of an optimizer whose arithmetic a plan changes for some weights.

    Args:
        optimizer: the user's.
        parameters: of the model, by name.
        choice: the arithmetic of each of them by name; "own" and what is left out is unchanged.
        seed: of stochastic rounding.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, nn.Parameter],
        choice: Mapping[str, str],
        seed: int,
    ) -> None:
        self.optimizer, self.seed = optimizer, seed
        self.made = 0  # steps, of which stochastic rounding draws
        self.masters: dict[str, Tensor] = {}
        self._lent: list[_Lent] = []
        self._chosen = {
            name: (parameters[name], into) for name, into in choice.items() if into != "own"
        }
        self.kernels = {
            into: _kernel(into, optimizer)
            for _, into in self._chosen.values()
            if into not in (*_WIDE, STOCHASTIC) and _format(into) is None
        }

    def attach(self) -> None:
        """Have every later step of the optimizer made so, whoever calls for it."""
        self._handles = (
            self.optimizer.register_step_pre_hook(self._lend_all),
            self.optimizer.register_step_post_hook(self._take_all_back),
        )

    def remove(self) -> None:
        """Leave every later step as the optimizer has it."""
        for handle in self._handles:
            handle.remove()

    @torch.no_grad()
    def _lend_all(self, *_: Any) -> None:
        self.made += 1
        self._lent = [
            self._lend(name, parameter, into)
            for name, (parameter, into) in self._chosen.items()
            if parameter.grad is not None
        ]

    @torch.no_grad()
    def _take_all_back(self, *_: Any) -> None:
        while self._lent:
            self._take_back(self._lent.pop(), self.made)

    def state(self) -> dict[str, Tensor]:
        """The master copies, as a checkpoint holds them beside the optimizer's state."""
        return {f"{name}/{_MASTER}": x.detach().clone() for name, x in self.masters.items()}

    def take_up(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Take a checkpoint's master copies, and return the rest of the optimizer's state."""
        rest = dict(state)
        for key in state:
            name, _, entry = key.rpartition("/")
            if entry == _MASTER:
                master = rest.pop(key)
                if name in self._chosen:
                    self.masters[name] = master.to(self._chosen[name][0].device).clone()
        return rest

    def _lend(self, name: str, parameter: nn.Parameter, into: str) -> _Lent:
        assert parameter.grad is not None
        lent = _Lent(name, into, parameter.data, parameter.grad)
        # a gradient must have its parameter's dtype, which is about to change; and without one the
        # user's optimizer passes a weight over whose step a kernel makes
        parameter.grad = None
        if into in self.kernels:
            self._call(self.kernels[into], parameter, lent)
            return lent
        # never narrower than the weight is: fp32 would round a weight of fp64 once more
        wide = _WIDE.get(into, torch.float32)
        if wide.itemsize < parameter.dtype.itemsize:
            wide = parameter.dtype
        now = parameter.data.to(wide)
        master = self.masters.get(name, now) if into in _WIDE else now
        # what somebody changed since the last step is no longer the master's
        parameter.data = torch.where(master.to(lent.data.dtype) == lent.data, master, now)
        parameter.grad = lent.grad.to(wide)
        # moments are widened with their weight; a step count has no dimension and stays
        state = self.optimizer.state.get(parameter, {})
        for entry, x in state.items():
            if isinstance(x, Tensor) and x.ndim and x.is_floating_point():
                state[entry] = x.to(wide) if x.dtype.itemsize < wide.itemsize else x
        return lent

    def _take_back(self, lent: _Lent, number: int) -> None:
        parameter, into = self._chosen[lent.name]
        parameter.grad, made = None, parameter.data
        if into in _WIDE and made.dtype != lent.data.dtype:
            self.masters[lent.name] = made
        elif into == STOCHASTIC and made.dtype != lent.data.dtype:
            # of its own for every weight and step, or errors would be alike in all of them
            seed = hash_seed(self.seed, f"optimizer {lent.name}", number)
            own = _OWN_FORMAT[lent.data.dtype]
            made = round_to(made, own, rounding="stochastic", seed=seed)
        elif (fmt := _format(into)) is not None:
            made = round_to(made, fmt)
            for x in self.optimizer.state.get(parameter, {}).values():
                if isinstance(x, Tensor) and x.ndim and x.is_floating_point():
                    x.copy_(round_to(x, fmt))
        parameter.data = lent.data.copy_(made)  # in the storage that others may share
        parameter.grad = lent.grad

    def _call(self, kernel: Any, parameter: nn.Parameter, lent: _Lent) -> None:
        """A step of AdamW in another kernel, from weights as they are."""
        group = next(
            one for one in self.optimizer.param_groups if any(parameter is p for p in one["params"])
        )
        state = self.optimizer.state[parameter]
        if not state:
            # the entries that AdamW itself makes at its first step, as checkpoints know them
            state["step"] = torch.tensor(0.0)
            for entry in ("exp_avg", "exp_avg_sq"):
                state[entry] = torch.zeros_like(parameter, dtype=torch.float32)
        state["step"] += 1
        before = (parameter.data, lent.grad, state["exp_avg"], state["exp_avg_sq"])
        flat = [x.float().flatten() for x in before]
        beta1, beta2 = group["betas"]
        options = {"lr": float(group["lr"]), "beta1": beta1, "beta2": beta2, "eps": group["eps"]}
        options |= {"step": int(state["step"]), "weight_decay": group["weight_decay"]}
        try:
            made = kernel.call(flat[0], flat[1].to(lent.grad.dtype), *flat[2:], **options)
            for x, new in zip((parameter.data, *before[2:]), made, strict=True):
                x.copy_(new.view_as(x))
        except Exception as error:
            raise ValueError(f"into={lent.into!r}: the kernel raises {one_line(error)}") from error


def _kernel(into: str, optimizer: torch.optim.Optimizer) -> Any:
    plain = all(
        not group.get("amsgrad") and not group.get("maximize") for group in optimizer.param_groups
    )
    if type(optimizer) is not torch.optim.AdamW or not plain:
        raise ValueError(
            f"operations={into!r}: the optimizer is {type(optimizer).__name__}; a kernel is"
            " accepted for torch.optim.AdamW without amsgrad and maximize, fp32, fp64, stochastic"
            " and formats for every optimizer"
        )
    return resolve(into, "operations", _ADAMW)


def _format(into: str) -> Format | None:
    if is_code(into):
        return None
    try:
        found = parse_format(into)
    except ValueError:
        return None
    return found if isinstance(found, Format) else None


def choices(
    model: nn.Module, optimizer: torch.optim.Optimizer, choice: Callable[[str], str]
) -> dict[str, str]:
    """Return the arithmetic of each trained weight by its name, `choice` being that of a path."""
    names = {id(p): name for name, p in model.named_parameters()}
    found = {}
    for path, held in trained(model, optimizer).items():
        for p in held:
            into = choice(path)
            # a weight of fp32 is its own master, and has no wider one to round from
            changes = p.dtype.itemsize < 4 or into not in ("fp32", STOCHASTIC)
            found[names[id(p)]] = into if changes else "own"
    return found
