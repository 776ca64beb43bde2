"""Watching from inside other libraries' loops, each with the real one; what is not installed is
skipped.
"""

import logging
import sys
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

import halfulp
from halfulp.runs.writers import TensorBoardSink, WandbSink
from halfulp.watch.callbacks import lightning_callback, transformers_callback
from tests.watch.gpt import GPT, LAYERS, WORDS, batch, train

LAYER_NAMES = tuple(f"blocks.{i}.attention" for i in range(LAYERS))


def test_a_trainer_of_transformers_is_watched(tmp_path, caplog):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=24, n_embd=32, n_layer=2, n_head=4
    )
    model = transformers.GPT2LMHeadModel(config)
    rows = [{"input_ids": x, "labels": x} for x in torch.cat([batch(i)[0] for i in range(12)])]
    callback = transformers_callback(2, folder=tmp_path / "watched", snapshots=1)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"),
        max_steps=5,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
    )
    with warnings.catch_warnings(), caplog.at_level(logging.INFO, "halfulp.watch"):
        warnings.simplefilter("ignore")
        transformers.Trainer(
            model=model, args=arguments, train_dataset=rows, callbacks=[callback]
        ).train()
    report = callback.watcher.report()
    assert (report.steps, report.measurements) == (5, 3), "steps 1, 2 and 4"
    assert report.layers == ("transformer.h.0.attn", "transformer.h.1.attn")
    assert report.loss.startswith("loss ")
    assert "halfulp.watch: 5 steps" in caplog.text
    steps = callback.watcher._course.health.steps
    assert all(step.grad_norm > 0 for step in steps)
    assert (tmp_path / "watched" / "metrics.jsonl").exists()


def lightning():
    found = pytest.importorskip("lightning.pytorch")
    warnings.simplefilter("ignore")
    return found


def test_a_trainer_of_lightning_is_watched():
    with warnings.catch_warnings():
        lightning_module = lightning()

        class Module(lightning_module.LightningModule):
            def __init__(self):
                super().__init__()
                self.gpt = GPT()

            def training_step(self, batch, number):  # calls a part, and not itself
                words, following = batch
                out = self.gpt(words)
                return functional.cross_entropy(out.flatten(0, 1), following.flatten())

            def configure_optimizers(self):
                return torch.optim.AdamW(self.parameters(), lr=1e-3)

        callback = lightning_callback(2)
        trainer = lightning_module.Trainer(
            max_steps=5,
            accumulate_grad_batches=2,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            callbacks=[callback],
            gradient_clip_val=0.1,
            enable_model_summary=False,
        )
        loader = torch.utils.data.DataLoader([batch(i) for i in range(12)], batch_size=None)
        trainer.fit(Module(), loader)
    report = callback.watcher.report()
    assert (report.steps, report.measurements) == (5, 3)
    assert report.layers == tuple(f"gpt.{name}" for name in LAYER_NAMES)
    steps = list(callback.watcher._course.health.steps)
    assert all(2 < step.loss < 4 for step in steps), steps
    assert all(step.grad_norm > 0.1 for step in steps), "before they are clipped"
    assert all(step.learning_rate == 1e-3 for step in steps)


def test_a_loop_of_accelerate_is_watched():
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = GPT()
    model, adam = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    with halfulp.watch(model, every=2) as watcher:
        for step in range(6):
            with accelerator.accumulate(model):
                words, following = batch(step)
                out = model(words)
                loss = functional.cross_entropy(out.flatten(0, 1), following.flatten())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.05)
                adam.step()
                adam.zero_grad()
    report = watcher.report()
    assert (report.steps, report.layers) == (3, LAYER_NAMES)
    assert all(step.grad_norm > 0.05 for step in watcher._course.health.steps)


def test_tensorboard_and_whoever_else_gets_what_is_measured(tmp_path, caplog):
    pytest.importorskip("tensorboard")

    class Gone:
        rows = 0

        def row(self, row):
            self.rows += 1
            raise ConnectionError("nobody there")

        def close(self):
            raise AssertionError("it was let go")

    gone, board = Gone(), TensorBoardSink(tmp_path / "board")
    with halfulp.watch(model := GPT(), every=5, writers=(gone, board)) as watcher:
        train(model, 10)
    assert watcher.measurements == 3
    assert gone.rows == 1
    assert len([text for text in caplog.messages if "Gone gets no more: nobody" in text]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    events = EventAccumulator(str(tmp_path / "board")).Reload()
    names = events.Tags()["scalars"]
    assert {"loss", "grad_norm", "max_score/layer 1/head 3"} <= set(names)
    assert [event.step for event in events.Scalars("max_score/layer 1/head 3")] == [1, 5, 10]


def test_wandb_itself_gets_what_is_measured_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    (tmp_path / "run").mkdir()
    sink = WandbSink("halfulp", {"model": "GPT"}, tmp_path / "run")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with halfulp.watch(model := GPT(), every=5, writers=(sink,)):
            train(model, 10)
            summary = dict(sink._run.summary)
    assert wandb.run is None, "the run has ended"
    assert summary["max_score/layer 0/head 0"] > 0
    assert list((tmp_path / "run").rglob("*.wandb"))


def test_a_library_that_is_missing_is_an_import_error(monkeypatch):
    for name in ("lightning.pytorch", "pytorch_lightning", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError):
        lightning_callback()
    with pytest.raises(ImportError):
        transformers_callback()


def test_a_training_that_calls_parts_of_a_model_tells_of_its_passes():
    model = GPT()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with halfulp.watch(holder := nn.ModuleDict({"inner": model}), every=1) as watcher:
        for step in range(3):
            words, following = batch(step)
            watcher.begin_pass(words)
            out = holder["inner"](words)
            loss = functional.cross_entropy(out.flatten(0, 1), following.flatten())
            watcher.end_pass(loss)
            loss.backward()
            adam.step()
            adam.zero_grad()
    report = watcher.report()
    assert (report.steps, report.measurements) == (3, 3)
    assert report.layers == tuple(f"inner.{name}" for name in LAYER_NAMES)
