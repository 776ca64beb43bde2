"""Two processes: DDP and FSDP2 give one process's gradients through the operators."""

import subprocess
import sys

PROCESS = """
import os, socket, sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
import halfulp
torch.set_num_threads(1)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 24)
        self.outer = nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.inner(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        out = halfulp.attention(q, k, v, is_causal=True, backend="torch")
        return self.outer(out.transpose(1, 2).flatten(2))

def loss_of(model, x):
    return model(x).square().mean()

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
child = os.fork()  # two interpreters would import all of it twice
rank = int(child != 0)
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
torch.manual_seed(0)
x = torch.randn(4, 9, 8)
alone = Block()
loss_of(alone, x).backward()
expected = {n: p.grad.clone() for n, p in alone.named_parameters()}
for wrap in ("ddp", "fsdp"):
    model = Block()
    model.load_state_dict(alone.state_dict())
    if wrap == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (2,)))
    loss_of(model, x[2 * rank : 2 * rank + 2]).backward()
    for name, p in model.named_parameters():
        grad = p.grad.full_tensor() if wrap == "fsdp" else p.grad
        wanted = expected[name.removeprefix("module.")]
        torch.testing.assert_close(grad, wanted, rtol=1e-5, atol=1e-7)
    sys.stdout.write(f"{wrap} agrees\\n")  # at once, for both write to one pipe
dist.destroy_process_group()
if rank:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def test_ddp_and_fsdp2():
    command = [sys.executable, "-c", PROCESS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(done.stdout.split("\n")) == ["", *["ddp agrees"] * 2, *["fsdp agrees"] * 2]
