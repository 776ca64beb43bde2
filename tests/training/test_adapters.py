"""Loaders, transformers' Trainer and Lightning modules as workloads. The libraries are no
dependencies of these tests: each runs where its library is installed.

    pip install accelerate lightning && pytest tests/training/test_adapters.py
"""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from halfulp.training.adapters import batches_of
from halfulp.training.loop import train
from halfulp.training.user_model import user_run

LIGHTNING = """
import lightning
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from halfulp.training.adapters import of_lightning

class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = functional.mse_loss(self.layer(x), y)
        self.log("loss", loss)
        return {"loss": loss}

    def configure_optimizers(self):
        adam = torch.optim.AdamW(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LinearLR(adam, 0.5, 1.0, 4)
        return {"optimizer": adam, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

def make(seed, device):
    x = torch.randn(32, 4)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)
    return of_lightning(Net(), loader, seed)
"""
TRAINER = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from halfulp.training.adapters import of_trainer

def make(seed, device):
    model = GPT2LMHeadModel(GPT2Config(
        n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=8, bos_token_id=0, eos_token_id=0,
        loss_type="ForCausalLMLoss",
    ))
    rows = [{"input_ids": torch.arange(i, i + 8) % 16, "labels": torch.arange(i, i + 8) % 16}
            for i in range(32)]
    args = TrainingArguments(
        "OUT", max_steps=20, per_device_train_batch_size=4, learning_rate=1e-2, report_to=[],
        use_cpu=True, remove_unused_columns=False,
    )
    return of_trainer(Trainer(model=model, args=args, train_dataset=rows), seed)
"""


def test_batches_are_a_function_of_the_step() -> None:
    rows = torch.arange(10)
    batch = batches_of(DataLoader(TensorDataset(rows), batch_size=4, shuffle=True), 7)
    later = batch(5)[0]
    read = [batch(step)[0] for step in range(6)]
    assert torch.equal(read[5], later), "whatever was read before"
    for epoch in (read[0:2], read[2:4], read[4:6]):
        assert len(set(torch.cat(epoch).tolist())) == 8, "no row twice"
    assert not torch.equal(torch.cat(read[0:2]), torch.cat(read[2:4]))
    other = batches_of(DataLoader(TensorDataset(rows), batch_size=4, shuffle=True), 8)
    assert not torch.equal(other(0)[0], read[0])
    plain = batches_of(DataLoader(TensorDataset(rows), batch_size=4), 7)
    assert [plain(step)[0].tolist() for step in (0, 1, 2)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [0, 1, 2, 3],
    ]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(9))


@pytest.mark.parametrize(
    ("loader", "says"),
    [
        (lambda: DataLoader(Stream(), batch_size=4), "it has a Stream; accepted is"),
        (lambda: DataLoader(range(9), batch_size=None), "its own sampler of batches; accepted"),
        (lambda: DataLoader(range(3), batch_size=4), "dataset of 3 rows: accepted is at least"),
    ],
)
def test_what_has_no_order_is_refused(loader, says) -> None:
    with pytest.raises(ValueError, match=says):
        batches_of(loader(), 0)


@pytest.mark.filterwarnings("ignore")  # the libraries' own
@pytest.mark.parametrize(("needs", "text"), [("lightning", LIGHTNING), ("accelerate", TRAINER)])
def test_others_train_and_resume(tmp_path, monkeypatch, needs, text) -> None:
    pytest.importorskip(needs)
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(text)
    config = user_run(f"{tmp_path / 'mine.py'}:make", steps=12, metrics_every=1, checkpoint_every=5)
    whole = train(config, tmp_path / "whole")
    losses = whole.curve("loss")
    assert losses[-1] < losses[0]
    assert len(set(whole.curve("learning_rate"))) > 3, "the scheduler's"
    train(config, tmp_path / "cut", deadline=0.0)
    assert train(config, tmp_path / "cut", resume=True).curve("loss") == losses
