"""The monitor on whole models: it disturbs nothing, resumes exactly, and reports what the pure
functions say.
"""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from halfulp.attention import emulate, golden
from halfulp.calls import Sees
from halfulp.formats import OCP_E4M3, round_to
from halfulp.recipes import BF16_FLASH2, FP16_FLASH2
from halfulp.runs.threads import one_thread
from halfulp.training.config import Language, LayerTask, RunConfig
from halfulp.training.loop import train
from halfulp.watch import monitor as monitor_module
from halfulp.watch.measures import delta_error, exact_call
from halfulp.watch.monitor import Monitor
from halfulp.watch.passes import AS_GIVEN, READ
from halfulp.watch.taps import Observed
from tests.watch.toy import HEADS, Toy, toy_batch, toy_loss

FLASH = "BF16_FLASH2"


def train_toy(steps: int, measured: bool, autocast: bool = False, monitor_of=None):
    """Losses and final tensors of a toy training, its random state, and what was measured at every
    step.
    """
    model = Toy(FLASH)
    monitor = (monitor_of or Monitor)(model, 1) if measured else None
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, rows = [], []
    for step in range(1, steps + 1):
        batch = toy_batch(step)

        def loss(batch=batch):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                return toy_loss(model, batch)

        if monitor is not None and monitor.due(step):
            rows.append(monitor.measure(step, loss))
        adam.zero_grad()
        value = loss()
        value.backward()
        adam.step()
        losses.append(value.item())
    return losses, [*model.state_dict().values(), torch.get_rng_state()], rows, monitor


@pytest.mark.parametrize("autocast", [False, True])
def test_a_run_with_a_monitor_has_the_bits_of_one_without(autocast):
    with one_thread():
        losses, tensors, _, _ = train_toy(4, False, autocast)
        watched, watched_tensors, rows, _ = train_toy(4, True, autocast)
    assert losses == watched
    assert all(torch.equal(a, b) for a, b in zip(tensors, watched_tensors, strict=True))
    assert len(rows) == 4


def test_a_monitor_that_does_disturb_is_caught_by_that_comparison(monkeypatch):
    """Without the care for random numbers and buffers, the run changes: the test above would see
    it.
    """
    from contextlib import nullcontext

    from halfulp.watch import passes

    monkeypatch.setattr(passes, "undisturbed", lambda model: nullcontext())
    with one_thread():
        losses, tensors, _, _ = train_toy(3, False)
        watched, watched_tensors, _, _ = train_toy(3, True)
    assert losses != watched
    assert not all(torch.equal(a, b) for a, b in zip(tensors, watched_tensors, strict=True))


def test_gradients_in_place_and_taps_stay():
    model = Toy(FLASH)
    toy_loss(model, toy_batch()).backward()
    before = [p.grad.clone() for p in model.parameters()]

    def tap(layer, call, out):
        return out

    model.causal.attend.tap = tap
    Monitor(model).measure(1, lambda: toy_loss(model, toy_batch()))
    assert all(torch.equal(a, p.grad) for a, p in zip(before, model.parameters(), strict=True))
    assert model.causal.attend.tap is tap
    assert model.cross.attend.tap is None
    with pytest.raises(RuntimeError, match="no loss"):
        Monitor(model).measure(1, fails)
    assert model.causal.attend.tap is tap
    assert not model.causal._forward_pre_hooks


def fails() -> torch.Tensor:
    raise RuntimeError("no loss")


def test_figures_by_layer_and_head_are_those_of_the_calls():
    """δ's error, its sum over entries and its t against a tap of our own, in both layers (N ≠ N_k
    in the second).
    """
    model, batch = Toy(FLASH, dropout=0.0), toy_batch()
    measured = Monitor(model).measure(1, lambda: toy_loss(model, batch))
    kept = {}

    def tap(layer, call, out):
        out.retain_grad()
        kept[layer] = (call, out)
        return out

    model.causal.attend.tap = model.cross.attend.tap = tap
    value = toy_loss(model, batch)
    value.backward()
    assert measured["loss"] == value.item()
    for layer, (call, out) in kept.items():
        assert call.key.shape[1] == HEADS
        read = [x.detach().bfloat16().double() for x in (call.query, call.key, call.value)]
        exact = golden(*read, **call.options()).out
        error = (out.grad.double() * (out.detach().double() - exact)).sum((2, 3))
        torch.testing.assert_close(
            torch.tensor(measured["delta_error"][layer]).double(), error.sum(0), rtol=1e-6, atol=0
        )
        t = error.mean(0) / (error.std(0) / math.sqrt(len(error)))
        torch.testing.assert_close(
            torch.tensor(measured["delta_error_t"][layer]).double(), t, rtol=1e-5, atol=0
        )
        assert measured["entries"][layer] == [3.0] * HEADS
    assert len(measured["sigma_key"][0]) == 1, "one key head"
    assert len(measured["sigma_query_key"][0]) == HEADS


def test_cumulative_sum_and_signs_add_up_over_steps():
    _, _, rows, _ = train_toy(5, True)
    for layer in range(2):
        for head in range(HEADS):
            errors = [row["delta_error"][layer][head] for row in rows]
            assert rows[-1]["delta_error_cumulative"][layer][head] == pytest.approx(
                sum(errors), rel=1e-9
            )
            assert rows[-1]["delta_error_positive"][layer][head] == sum(e > 0 for e in errors) / 5
    assert math.isnan(rows[0]["direction_cosine"][0][0])
    assert all(
        math.isfinite(x) for row in rows[1:] for heads in row["direction_cosine"] for x in heads
    )


def test_state_resumes_exactly():
    with one_thread():
        _, _, rows, _ = train_toy(8, True)
        states = {}

        class Forgetful(Monitor):
            """Is replaced before every step by a new one that only has the state of the last."""

            def measure(self, step, loss):
                fresh = Monitor(self.model, 1)
                fresh.load_state(states)
                row = fresh.measure(step, loss)
                states.clear()
                states.update(fresh.state())
                return row

        _, _, resumed, _ = train_toy(8, True, monitor_of=Forgetful)
    for row, again in zip(rows, resumed, strict=True):
        assert str(row) == str(again)
    assert states["0/errors"].shape == (4, HEADS, 4, 12), "no more than the history"


def test_a_state_of_another_model_is_refused():
    with pytest.raises(ValueError, match=r"state of layers \[7\]: accepted are 0, 1"):
        Monitor(Toy(FLASH)).load_state({"7/reads": torch.zeros(2)})


def test_chunks_of_heads_change_nothing(monkeypatch):
    model = Toy(FLASH, dropout=0.0)
    whole = Monitor(model).measure(1, lambda: toy_loss(model, toy_batch()))
    monkeypatch.setattr(monitor_module, "CHUNK", 1)
    parts = Monitor(model).measure(1, lambda: toy_loss(model, toy_batch()))
    for name in set(whole) - {"loss", "loss_exact"}:
        if "shuffled" not in name and "sigma" not in name:  # these draw anew for every chunk
            torch.testing.assert_close(
                torch.tensor(whole[name][0]), torch.tensor(parts[name][0]), equal_nan=True
            )


def test_as_many_entries_are_measured_as_fit(monkeypatch):
    model = Toy(FLASH, dropout=0.0)
    monkeypatch.setattr(monitor_module, "MOST_SCORES", 2 * 36 * HEADS)
    measured = Monitor(model).measure(1, lambda: toy_loss(model, toy_batch()))
    assert measured["entries"][0] == [2.0] * HEADS
    assert measured["entries"][1] == [3.0] * HEADS


def e4m3(query, key, value, **options):
    rounded = [round_to(x.detach(), OCP_E4M3) for x in (query, key, value)]
    path = torch.nn.functional.scaled_dot_product_attention(query, key, value, **options)
    return path - path.detach() + golden(*rounded, **options).out.float()


def bf16(query, key, value, **options):
    return emulate(query, key, value, recipe=BF16_FLASH2, **options)


def fp16(query, key, value, **options):
    return emulate(query, key, value, recipe=FP16_FLASH2, **options)


def test_what_an_attention_reads_is_found_by_asking_it():
    own = {"bf16": bf16, "fp16": fp16, "e4m3": e4m3}
    names = [fmt.name for fmt in READ]
    for plan, expected in (
        (("bf16", "head 1: FP32"), ("bf16", None)),
        (("torch:flash", "head 0: fp16"), ("fp16", "bf16")),
        (("e4m3",), (OCP_E4M3.name, OCP_E4M3.name)),
        (("torch:fp32",), (None, None)),
    ):
        model = Toy(*plan, own=own, dropout=0.0)
        monitor = Monitor(model)
        monitor.measure(1, lambda model=model: toy_loss(model, toy_batch()))
        for reads in monitor.reads.values():
            assert reads.tolist() == [
                AS_GIVEN if name is None else names.index(name) for name in expected
            ]


def test_operands_are_taken_as_read():
    """An attention that is exact after rounding its operands to bf16 has no error of its own."""
    model = Toy("BF16_FLASH2[weights=fp32,weights_operand=fp32,out=fp32]", dropout=0.0)
    measured = Monitor(model).measure(1, lambda: toy_loss(model, toy_batch()))
    stock = Toy(FLASH, dropout=0.0)
    of_stock = Monitor(stock).measure(1, lambda: toy_loss(stock, toy_batch()))
    assert max(map(abs, measured["delta_error"][0])) < 1e-3 * max(
        map(abs, of_stock["delta_error"][0])
    )


def test_half_precision_models_are_measured_without_the_second_pass():
    model = Toy("torch:math", dropout=0.0).bfloat16()
    batch = tuple(x.bfloat16() for x in toy_batch())
    measured = Monitor(model).measure(1, lambda: toy_loss(model, batch))
    assert "loss_exact" not in measured
    assert all(map(math.isnan, measured["delta_error_curvature"][0]))
    assert all(map(math.isfinite, measured["delta_error"][0]))


def test_fp16_gradients_do_not_vanish():
    """Under fp16 autocast a gradient of 1e-9 is 0 unless the loss is scaled."""
    model = Toy("torch:math", dropout=0.0)
    rows = []
    for factor in (1.0, 2.0**-24):

        def loss(factor=factor):
            with torch.autocast("cpu", torch.float16):
                return toy_loss(model, toy_batch()) * factor

        rows.append(Monitor(model).measure(1, loss))
    for name in ("grad_out_rms", "row_sum_grad_scores"):
        assert all(x > 0 for x in rows[1][name][0])
    large, small = (torch.tensor(row["grad_out_rms"]) for row in rows)
    torch.testing.assert_close(small * 2.0**24, large, rtol=0.05, atol=0)


def test_a_broken_model_is_measured_and_says_nan():
    model = Toy(FLASH, dropout=0.0)
    with torch.no_grad():
        model.causal.query.weight[0, 0] = math.nan
    measured = Monitor(model).measure(1, lambda: toy_loss(model, toy_batch()))
    assert math.isnan(measured["loss"])
    assert math.isnan(measured["sigma_query"][0][0])
    assert math.isfinite(measured["sigma_query"][0][1])


def test_tiled_torch_and_recipe_agree_on_what_is_measured():
    """Grouped keys, rotary positions and normalized heads in the lab's own GPT, under bf16
    autocast.
    """
    workload = Language(
        layers=2, heads=4, key_heads=2, width=32, context=24, positions="rope", query_key_norm=True
    )
    config = RunConfig(workload, steps=2, batch=2, autocast="bf16", measure_every=1)
    (row, _) = train(config).measures
    for name, layers in row["measure"].items():
        if isinstance(layers, list):
            assert [len(heads) for heads in layers] == [2, 2] if name == "sigma_key" else [4, 4], (
                name
            )
    assert row["measure"]["entries"][0] == [2.0] * 4


def test_a_resumed_run_measures_what_the_whole_one_does(tmp_path: Path):
    config = RunConfig(
        LayerTask(batch=4, tokens=8, width=8, constant=2),
        steps=6,
        measure_every=1,
        checkpoint_every=2,
    )
    with one_thread():
        whole = train(config, tmp_path / "whole")
        part = train(config, tmp_path / "part", stop=lambda row: None, batches=None)
        for name in ("step-6", "step-4"):
            for file in sorted((tmp_path / "part/checkpoints" / name).iterdir()):
                file.unlink()
            (tmp_path / "part/checkpoints" / name).rmdir()
        record = tmp_path / "part/run.json"
        record.write_text(record.read_text().replace('"done"', '"interrupted"'))
        again = train(config, tmp_path / "part", resume=True)
        plain = train(replace(config, measure_every=0))
    assert part.status == "done"
    # a number that is not finite is null in a file
    assert [str(row).replace("None", "nan") for row in again.measures] == [
        str(row) for row in whole.measures
    ]
    assert torch.equal(plain.workload.model.query, whole.workload.model.query)


def test_delta_error_is_of_the_o_that_ran():
    """Beside the figures of a call: the same call by hand."""
    query = torch.randn(1, 1, 5, 4, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    out = emulate(query, query, query, is_causal=True, recipe=BF16_FLASH2)
    ones = torch.ones_like(out)
    call = Observed(query, query, query, Sees(True), 0.5, out=out, grad_out=ones)
    expected = (out.double() - golden(query, query, query, is_causal=True).out).sum(-1)
    torch.testing.assert_close(delta_error(call, exact_call(call)), expected, rtol=1e-9, atol=1e-15)


def test_a_bad_interval_is_refused():
    with pytest.raises(ValueError, match="every=0: accepted is an integer of at least 1"):
        Monitor(Toy(FLASH), 0)


def test_a_model_without_attention_is_refused():
    with pytest.raises(
        ValueError, match="model=Linear: accepted is one whose attention modules have `attend`"
    ):
        Monitor(torch.nn.Linear(2, 2))
