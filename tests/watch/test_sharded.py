"""A model that FSDP2 shards, its blocks in checkpoint wrappers: watched, and none the wiser."""

from collections.abc import Iterator

import pytest
import torch
from torch import distributed
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.fsdp import fully_shard

import halfulp
from halfulp.runs.threads import one_thread
from tests.watch.gpt import GPT, LAYERS, Block, train


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def sharded() -> GPT:
    model = GPT()
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_sharded_and_checkpointed_it_has_the_same_losses_and_plain_names(alone, tmp_path):
    with one_thread():
        plain = train(sharded(), 4, autocast=False)
        with halfulp.watch(model := sharded(), every=2) as watcher:
            watcher.snapshot(tmp_path / "one")
            assert train(model, 4, autocast=False) == plain
    report = watcher.report()
    names = tuple(f"blocks.{i}.attention" for i in range(LAYERS))
    assert (report.layers, report.unseen, report.measurements) == (names, (), 3)
    snapshot = halfulp.read_snapshot(tmp_path / "one")
    assert set(snapshot.model) == set(dict(GPT().named_parameters()))
    assert set(snapshot.about["sharded"]) >= set(snapshot.model)
