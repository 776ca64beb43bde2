"""`halfulp.watch` on models that know nothing of it: what it finds, what it leaves alone, what it says it misses."""

import json

import pytest
import torch
from torch.nn import functional

import halfulp
from halfulp.runs.threads import one_thread
from halfulp.watch.calls import call_figures
from tests.watch.gpt import (
    BIASED_HEAD,
    BIASED_LAYER,
    GPT,
    HEADS,
    LAYERS,
    biased,
    calls_biased,
    train,
)

STOCK = functional.scaled_dot_product_attention
LAYER_NAMES = tuple(f"blocks.{i}.attention" for i in range(LAYERS))


def hooks_of(model):
    return [
        hooks
        for module in model.modules()
        for hooks in (module._forward_pre_hooks, module._forward_hooks, module._backward_hooks)
        if hooks
    ]


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "halfulp.watch"]


def layers_measured(watcher):
    """(layer, heads) of the last measurement."""
    return {(row["layer"], row["head"]) for row in watcher.report().rows}


ALL_HEADS = {(layer, head) for layer in LAYER_NAMES for head in range(HEADS)}
KINDS = {
    "plain": {},
    "gqa": {"key_heads": 2},
    "checkpoint": {"reentrant": False},
    "reentrant checkpoint": {"reentrant": True},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_watched_run_has_the_bits_of_an_unwatched_one(kind, caplog):
    """Losses, parameters and random numbers; each layer is measured once a step, checkpointed or not."""
    runs = []
    with one_thread():
        for watched in (False, True):
            model = GPT(**KINDS[kind])
            watcher = halfulp.watch(model, every=2) if watched else None
            losses = train(model, 4)
            runs.append((losses, [*model.state_dict().values(), torch.get_rng_state()]))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))
    assert (watcher.steps, watcher.measurements) == (4, 3), "steps 1, 2 and 4"
    assert layers_measured(watcher) == ALL_HEADS
    assert watcher.report().layers == LAYER_NAMES
    assert watcher.report().unseen == ()
    assert functional.scaled_dot_product_attention is STOCK, "between measured steps nothing is replaced"
    watcher.close()
    assert hooks_of(model) == []
    assert warnings_of(caplog) == []


def test_figures_do_not_depend_on_checkpoints():
    rows = []
    with one_thread():
        for kind in ("plain", "checkpoint", "reentrant checkpoint"):
            watcher = halfulp.watch(model := GPT(**KINDS[kind]))
            train(model, 1)
            watcher.close()
            rows.append(watcher.report().rows)
    assert repr(rows[0]) == repr(rows[1]) == repr(rows[2])
    assert rows[0][0]["grad_query_error"] < 0.01


@pytest.mark.parametrize("key_heads", [HEADS, 2])
def test_figures_are_those_of_the_call(key_heads):
    """δ's error and dQ's, dK's, dV's against tensors taken from the model by hand."""
    model, kept, taken = GPT(key_heads=key_heads), {}, []
    watcher = halfulp.watch(model)
    original = watcher._take
    watcher._take = lambda call: (taken.append((call, dict(call.tensors), call_figures(call)[0])), original(call))
    first = model.blocks[0].attention

    def keep(name):
        def hook(_module, _args, out):
            kept[name] = out
            out.retain_grad()

        return hook

    for name in ("query", "key", "value"):
        getattr(first, name).register_forward_hook(keep(name))
    train(model, 1)
    call, tensors, figures = taken[-1]
    assert call.layer == LAYER_NAMES[0]
    for name, out in kept.items():
        by_head = out.detach().unflatten(-1, (-1, 8)).transpose(1, 2)
        assert torch.equal(tensors[name], by_head)
        assert torch.equal(tensors[f"grad_{name}"], out.grad.unflatten(-1, (-1, 8)).transpose(1, 2))
    q, k, v, do = (tensors[name].double() for name in ("query", "key", "value", "grad_out"))
    golden = halfulp.golden(q, k, v, do, is_causal=True, enable_gqa=True)
    for name in ("query", "key", "value"):
        exact = getattr(golden, f"grad_{name}")
        wrong, size = (x.square().sum((0, 2, 3)) for x in (tensors[f"grad_{name}"] - exact, exact))
        error = (wrong / size).sqrt().repeat_interleave(HEADS // len(size))
        torch.testing.assert_close(figures[f"grad_{name}_error"], error, rtol=1e-9, atol=0)
    watcher.close()


def test_a_planted_error_is_named_with_layer_and_head(caplog, tmp_path):
    """One head of one layer, in the backward pass of a kernel of the user's; the sound twin raises no alarm."""
    plan = [None] * LAYERS
    plan[BIASED_LAYER] = calls_biased
    told = []
    with halfulp.watch(
        model := GPT(plan), every=1, functions=(biased,), on_alarm=told.append, folder=tmp_path / "run"
    ) as watcher:
        train(model, 12)
    (alarm,) = watcher.report().alarms
    assert (alarm.layer, alarm.head, alarm.operation) == (LAYER_NAMES[BIASED_LAYER], BIASED_HEAD, "backward")
    assert told == watcher.alarms
    assert alarm.measurements == 12
    assert "O is not to blame" in warnings_of(caplog)[0]
    assert f"{alarm.layer}, head {BIASED_HEAD}: biased (t = " in str(watcher.report())
    record = json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))
    assert (record["kind"], record["status"], record["layers"]) == ("watch", "done", list(LAYER_NAMES))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 13))

    caplog.clear()
    with halfulp.watch(model := GPT(), every=1) as watcher:
        train(model, 12)
    assert watcher.alarms == []
    assert warnings_of(caplog) == []
    assert "No head alarms" in str(watcher.report())
