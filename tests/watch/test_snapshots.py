"""Snapshots of watched trainings: the step can be made again from what they hold."""

import logging

import pytest
import torch
from torch import nn
from torch.nn import functional

import halfulp
from halfulp.runs.generators import set_generator_states
from halfulp.runs.threads import one_thread
from tests.watch.gpt import BIASED_HEAD, BIASED_LAYER, GPT, LAYERS, batch, biased, calls_biased

LAYER = f"blocks.{BIASED_LAYER}.attention"


def trained(model, adam, steps, *, spoil=None, accumulation=2, autocast=False):
    """Gradients of the last step, and the weights before it."""
    torch.manual_seed(3)
    for step in range(steps):
        before = {name: x.detach().clone() for name, x in model.named_parameters()}
        adam.zero_grad()
        for part in range(accumulation):
            words, following = batch(step * accumulation + part)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                out = model(words)
            if spoil == step:
                out = out * float("inf")
            functional.cross_entropy(out.flatten(0, 1), following.flatten()).backward()
        adam.step()
    return before, {name: x.grad.clone() for name, x in model.named_parameters()}


def replayed(snapshot):
    """Gradients of a snapshot's step, made again; dropout draws what it drew."""
    model = GPT()
    model.load_state_dict(snapshot.model)
    set_generator_states(snapshot.generators)
    for part, (args, kwargs) in enumerate(snapshot.batches):
        out = model(*args, **kwargs)
        following = batch((snapshot.step - 1) * len(snapshot.batches) + part)[1]
        functional.cross_entropy(out.flatten(0, 1), following.flatten()).backward()
    return {name: x.grad for name, x in model.named_parameters()}


def test_a_step_can_be_made_again_bit_by_bit(tmp_path):
    with one_thread():
        adam = torch.optim.AdamW((model := GPT()).parameters(), lr=1e-3)
        with halfulp.watch(model) as watcher:
            trained(model, adam, 3)
            watcher.snapshot(tmp_path / "one")
            torch.manual_seed(3)
            before, grads = trained(model, adam, 1)
        snapshot = halfulp.read_snapshot(tmp_path / "one")
        assert (snapshot.step, snapshot.reason) == (4, "asked for")
        # batches are numbered from the second call's own start
        again = replayed(snapshot.__class__(**{**vars(snapshot), "step": 1}))
    assert snapshot.model.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(snapshot.model[name], x) for name, x in before.items())
    assert all(torch.equal(again[name], x) for name, x in grads.items())
    assert snapshot.optimizer["last.weight/step"].item() == 3.0
    assert snapshot.about["optimizer_class"] == "AdamW"
    assert snapshot.about["param_groups"][0]["lr"] == 1e-3
    assert set(snapshot.about["param_groups"][0]["params"]) == snapshot.model.keys()
    assert len(snapshot.batches) == 2


def test_what_is_not_finite_is_kept_before_it_spoils_the_weights(tmp_path, caplog):
    adam = torch.optim.AdamW((model := GPT()).parameters(), lr=1e-3)
    with halfulp.watch(model, folder=tmp_path / "run", snapshots=2) as watcher:
        trained(model, adam, 8, spoil=5)
    (folder,) = (tmp_path / "run" / "snapshots").iterdir()
    snapshot = halfulp.read_snapshot(folder)
    assert snapshot.step == 6
    assert snapshot.reason.startswith("not finite")
    assert all(x.isfinite().all() for x in snapshot.model.values())
    assert all(x.isfinite().all() for x in snapshot.optimizer.values())
    assert torch.equal(snapshot.batches[0][0][0], batch(10)[0])
    assert not model.last.weight.isfinite().all()
    (found,) = (alarm for alarm in watcher.alarms if alarm.kind == "not_finite")
    assert found.since == 6
    assert "the loss made of it" in found.detail, "the model's own numbers are finite"
    assert any("snapshot of step 6" in text for text in caplog.messages)


def test_an_alarm_is_followed_by_a_snapshot_with_the_guilty_heads(tmp_path):
    plan = [None] * LAYERS
    plan[BIASED_LAYER] = calls_biased
    adam = torch.optim.AdamW((model := GPT(plan)).parameters(), lr=1e-3)
    run = tmp_path / "run"
    with halfulp.watch(model, every=1, functions=(biased,), folder=run, snapshots=1) as watcher:
        trained(model, adam, 13, accumulation=1, autocast=True)
    (folder,) = (run / "snapshots").iterdir()
    snapshot = halfulp.read_snapshot(folder)
    assert snapshot.about["heads"] == {LAYER: [BIASED_HEAD]}
    assert snapshot.step == watcher.alarms[0].step + 1 == 11
    assert "biased" in snapshot.about["causes"][0]
    operands = snapshot.calls[LAYER]
    assert set(operands) == {"query", "key", "value", "out", "grad_out"}
    assert {x.shape for x in operands.values()} == {(1, 1, 24, 8)}
    exact = functional.scaled_dot_product_attention(
        *(operands[name].bfloat16().double() for name in ("query", "key", "value")),
        is_causal=True,
    )
    assert torch.allclose(operands["out"].double(), exact, atol=1e-2)
    assert watcher.measurements == 13, "it is none of the measurements"


def test_nothing_is_held_between_steps_and_nobody_waits_for_the_disk(tmp_path, monkeypatch):
    import threading

    from halfulp.watch import snapshots

    go_on, real = threading.Event(), snapshots.write_snapshot

    def slow(*args):
        assert go_on.wait(60)
        return real(*args)

    monkeypatch.setattr(snapshots, "write_snapshot", slow)
    adam = torch.optim.AdamW((model := GPT()).parameters(), lr=1e-3)
    watcher = halfulp.watch(model)
    watcher.snapshot(tmp_path / "one")
    before, _ = trained(model, adam, 1)
    assert watcher._snapshots.last_batch is None
    trained(model, adam, 2)
    assert not (tmp_path / "one").exists()
    go_on.set()
    watcher.close()
    snapshot = halfulp.read_snapshot(tmp_path / "one")
    assert all(torch.equal(snapshot.model[name], x) for name, x in before.items())


def test_a_disk_that_is_full_ends_in_a_warning(tmp_path, monkeypatch, caplog):
    from halfulp.runs import sealed

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sealed, "sync_file", full)
    adam = torch.optim.AdamW((model := GPT()).parameters(), lr=1e-3)
    with halfulp.watch(model) as watcher:
        watcher.snapshot(tmp_path / "one")
        trained(model, adam, 2)
    assert list(tmp_path.iterdir()) == []
    assert any("no snapshot of step 1: " in text for text in caplog.messages)


def test_bad_arguments_are_one_line(tmp_path):
    with pytest.raises(ValueError, match="snapshots=1: accepted with a folder"):
        halfulp.watch(GPT(), snapshots=1)
    with halfulp.watch(GPT()) as watcher:
        with pytest.raises(ValueError, match="path=None: accepted is a folder to make"):
            watcher.snapshot()
        with pytest.raises(ValueError, match="is there already"):
            watcher.snapshot(tmp_path)


def test_a_training_without_an_optimizer_is_kept_as_it_is_after_the_step(tmp_path):
    model = nn.Linear(4, 4)
    logging.getLogger("halfulp.watch").setLevel(logging.ERROR)
    with halfulp.watch(model) as watcher:
        watcher.snapshot(tmp_path / "one")
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        watcher.step(loss)
    logging.getLogger("halfulp.watch").setLevel(logging.NOTSET)
    snapshot = halfulp.read_snapshot(tmp_path / "one")
    assert snapshot.about["before_update"] is False
    assert torch.equal(snapshot.batches[0][0][0], torch.ones(2, 4))


def test_a_snapshot_that_no_step_followed_is_told(tmp_path, caplog):
    with halfulp.watch(torch.nn.Linear(2, 2)) as watcher:
        watcher.snapshot(tmp_path / "one")
    assert "no snapshot was written (asked for): no step came after it" in caplog.text
