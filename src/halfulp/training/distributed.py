"""Several processes on one run, by PyTorch's own engines: DDP copies the model, FSDP2 shards it.

Started by `torchrun`, which tells every process its rank. A step reads the same samples however
many processes share them, so losses differ from a single process's by fp32 rounding alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, distributed, nn

from halfulp.targets import device_named

Parallel: TypeAlias = Literal["none", "ddp", "fsdp"]


@dataclass(frozen=True)
class World:
    """Who takes part."""

    parallel: Parallel = "none"
    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def leads(self) -> bool:
        """Whether this process writes the run folder."""
        return self.rank == 0

    def share(self, samples: Any) -> Any:
        """Return this process's part of a micro-batch."""
        per = len(samples) // self.size
        return samples[self.rank * per : (self.rank + 1) * per]

    def mean(self, x: Tensor) -> Tensor:
        """Return the mean over processes."""
        if self.size == 1:
            return x
        # all_reduce writes into what it is given
        x = x.clone()
        distributed.all_reduce(x)
        return x / self.size

    def wait(self) -> None:
        """Wait until every process is here."""
        if self.size > 1:
            distributed.barrier()

    def agree(self, flag: bool) -> bool:
        """Return whether any process raises the flag: all of them must stop at the same step."""
        if self.size == 1:
            return flag
        raised = torch.tensor(float(flag), device=self.device)
        distributed.all_reduce(raised)
        return bool(raised.item() > 0)

    def wrap(self, model: nn.Module, *, unknown: bool = False) -> nn.Module:
        """Return the model to call: itself, or DDP around it, or itself sharded by FSDP2.

        Args:
            model: of any kind.
            unknown: whether a step may leave parameters out, as experts do.
        """
        if self.parallel == "ddp":
            devices = [self.device.index] if self.device.type == "cuda" else None
            return nn.parallel.DistributedDataParallel(
                model, device_ids=devices, find_unused_parameters=unknown
            )
        if self.parallel == "fsdp":
            return _sharded(model, self.device)
        return model

    def gathering(self, model: nn.Module, last: bool) -> AbstractContextManager[Any]:
        """Return a context in which a micro-batch's gradients are only summed up unless it is the
        last of its step.
        """
        if self.parallel == "fsdp":
            model.set_requires_gradient_sync(last)  # type: ignore[operator]
        if self.parallel == "ddp" and not last:
            return model.no_sync()  # type: ignore[operator, no-any-return]
        return nullcontext()


def _sharded(model: nn.Module, device: torch.device) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    for block in _blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)  # in place
    return model


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The members of the outermost lists of modules: layers, but not the experts in them, of which
    a step may call none.
    """
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from (one for one in child if any(True for _ in one.parameters()))
        else:
            yield from _blocks(child)


@contextmanager
def world(parallel: Parallel, device: str) -> Iterator[World]:
    """Join the processes that `torchrun` started, and leave them at the end.

    Raises:
        ValueError: parallel is asked for outside `torchrun`, or is not known.
    """
    device_named(device)
    if parallel == "none":
        yield World(device=torch.device(device))
        return
    if parallel not in ("ddp", "fsdp"):
        raise ValueError(f"parallel={parallel!r}: accepted are none, ddp and fsdp")
    if not distributed.is_torchelastic_launched():
        raise ValueError(
            f"parallel={parallel!r}: accepted under torchrun, such as torchrun --nproc-per-node 4"
            " -m halfulp train …"
        )
    on_gpu = torch.device(device).type == "cuda"
    joined = distributed.is_initialized()  # by the caller, who then also leaves
    if not joined:
        distributed.init_process_group("nccl" if on_gpu else "gloo")
    try:
        local = distributed.get_node_local_rank()
        if on_gpu:
            torch.cuda.set_device(local)
        place = torch.device("cuda", local) if on_gpu else torch.device("cpu")
        yield World(parallel, distributed.get_rank(), distributed.get_world_size(), place)
    finally:
        if not joined:
            distributed.destroy_process_group()
