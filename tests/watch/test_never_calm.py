"""What `halfulp.watch` must not look calm over, and what it must not do to the training it watches:
every case here once ended in "No head alarms", in a lost run or in a leak.
"""

import copy
import gc
import io
import json
import re
import shutil
import threading
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import halfulp
from halfulp.experiments.watched import watched
from halfulp.runs.threads import one_thread
from halfulp.watch import notebook
from halfulp.watch.health import loss_of
from tests.watch.gpt import GPT, LAYERS, train
from tests.watch.test_foreign import One, one_step, watched_step
from tests.watch.test_watcher import STOCK, hooks_of, warnings_of

SCALER_METHOD = torch.amp.GradScaler._maybe_opt_step


def first_line(report):
    return " ".join(str(report).partition("\n\n")[0].split())


def written_out(query, key, value, **_):
    return (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1) @ value


@pytest.mark.filterwarnings("ignore:.*NaN:RuntimeWarning")
def test_gradients_that_are_not_finite_are_named_with_their_first_step(tmp_path):
    with halfulp.watch(model := GPT(), every=1, folder=tmp_path / "run") as watcher:
        train(model, 3)
        assert watcher.report().warnings == ()
        with torch.no_grad():
            model.last.bias[0] = torch.nan
        train(model, 2)
    assert "gradients are not finite, first in step 4" in first_line(watcher.report())
    run = tmp_path / "run"
    assert "gradients are not finite, first in step 4" in watched(run, "report")[1]
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(record | {"health": {}, "status": "running"}))
    assert "gradients are not finite" in watched(run, "report")[1], "not closed"
    assert "3 warnings" in first_line(watcher.report()).replace("\n", " "), "attention's own too"


def test_a_loss_that_is_not_finite_is_named():
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.factor = One(functional.scaled_dot_product_attention), 1.0

        def forward(self, x):
            return {"loss": self.inner(x).square().mean() * self.factor}

    model = Loss()
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
    with halfulp.watch(model, every=2) as watcher:
        for step in range(6):
            model.factor = float("inf") if step == 3 else 1.0
            model(torch.ones(1, 9, 16))["loss"].backward()
            sgd.step()
            sgd.zero_grad()
            if step == 2:
                assert watcher.report().warnings == ()
                assert watcher.report().loss.startswith("loss ")
    assert "the loss is not finite, first in step 4" in first_line(watcher.report())


def test_losses_are_told_from_other_outputs():
    loss = torch.tensor(1.5)
    assert loss_of(loss) is loss
    assert loss_of({"loss": loss}) is loss
    assert loss_of((loss, torch.ones(3))) is loss
    assert loss_of(type("Output", (), {"loss": loss})()) is loss
    for other in (torch.ones(2), torch.tensor(3), None, (), {"logits": loss}, "text"):
        assert loss_of(other) is None


def test_scores_and_errors_out_of_range_are_named():
    model = One(lambda q, k, v: functional.scaled_dot_product_attention(100 * q, 100 * k, v))
    report = watched_step(model)
    assert any(text.startswith("max S is") and "(model), head" in text for text in report.warnings)


class Quintupled(torch.autograd.Function):
    """Its gradient is five times what it is."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 5 * grad


def wrong_kernel(query, key, value, is_causal=False):
    return STOCK(Quintupled.apply(query), key, value, is_causal=is_causal)


def calls_wrong_kernel(*operands, **options):
    """It is found in this module's globals, as a model's own kernel is in its file's."""
    return wrong_kernel(*operands, **options)


def test_a_gradient_as_wrong_as_it_is_large_is_named():
    model = GPT((calls_wrong_kernel,) * LAYERS)
    with halfulp.watch(model, every=1, functions=(wrong_kernel,)) as watcher:
        train(model, 1)
    (said,) = (text for text in watcher.report().warnings if text.startswith("dQ"))
    assert said.startswith("dQ is 4 in blocks.")


def test_numbers_that_overflow_fp16_are_named():
    def attend(q, k, v):
        return functional.scaled_dot_product_attention(
            q.half(), k.half(), (v * 1e6).half(), is_causal=True
        ).float()

    report = watched_step(One(attend))
    assert any("not finite" in text for text in report.warnings), report
    assert "warning" in first_line(report)


def test_layers_that_are_not_seen_are_said_once_by_module_and_reason(caplog):
    functions = (written_out, None)
    with halfulp.watch(model := GPT(functions), every=1) as watcher:
        train(model, 12)
    said = [text for text in warnings_of(caplog) if "not measured" in text]
    assert len(said) == 1
    assert "blocks.0.attention" in said[0]
    assert "written out" in said[0]
    report = watcher.report()
    assert report.layers == ("blocks.1.attention",)
    assert any("blocks.0.attention" in text for text in report.unseen)
    assert "not all attention measured" in first_line(report)
    assert "attention that was not measured" in str(report).replace("\n", " ")


def table_of_docs():
    """By first column of the table in docs/watch.md: what is said of it."""
    text = (Path(__file__).parents[2] / "docs" / "watch.md").read_text()
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", text.partition("## What it cannot see")[2], re.M)
    return dict(rows[1:])


def ways():
    """Ways to call attention in a module that is not called so, by their name in docs/watch.md."""
    aten, library, jit = torch.ops.aten, torch.library, torch.jit
    flash = aten._scaled_dot_product_flash_attention_for_cpu

    @library.custom_op("halfulp_test::mix", mutates_args=())
    def mix(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return written_out(q, k, v)

    mix.register_autograd(lambda _, grad: (grad,) * 3, setup_context=lambda *_, **__: None)

    @library.custom_op("halfulp_test::packed_attn", mutates_args=())
    def packed(qkv: torch.Tensor) -> torch.Tensor:
        return written_out(*qkv.unbind(2))

    packed.register_autograd(
        lambda _, grad: torch.stack((grad,) * 3, 2), setup_context=lambda *_, **__: None
    )

    class Mix(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            return written_out(q, k, v)

        @staticmethod
        def backward(ctx, grad):
            return grad, grad, grad

    def exponential(q, k, v):
        weights = (q @ k.mT / 2).exp()
        return weights / weights.sum(-1, keepdim=True) @ v

    def three(q, k, v):
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        return torch.baddbmm(q[..., :1] @ k[..., :1].mT, q, k.mT).softmax(-1).bmm(v)

    def einsum(q, k, v):
        scores = torch.einsum("bhid,bhjd->bhij", q, k[:, :, :5])
        return torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v[:, :, :5])

    def scripted(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return torch.softmax(query @ key.transpose(-1, -2), -1) @ value

    script, compiled = jit.script(scripted), torch.compile(written_out, backend="aot_eager")
    held = functional.scaled_dot_product_attention

    class Child(nn.Module):
        def forward(self, x):
            return x * 1

    child = Child()
    return {
        "`torch.ops.aten.scaled_dot_product_attention`": aten.scaled_dot_product_attention,
        "`torch.ops.aten._scaled_dot_product_..._attention`": lambda *x: flash(*x)[0],
        "PyTorch's function, held where no module's name leads to it": lambda *x: held(*x),
        "`@` or `matmul`, and a softmax, of PyTorch's or of `torch.ops.aten`": (
            lambda q, k, v: child(aten._softmax(q @ k.mT, -1, False)) @ v
        ),
        "`einsum`, also with other keys than queries": einsum,
        "`bmm` and `baddbmm` of `[B·H, N, D]`": three,
        "an exponential and a sum by hand": exponential,
        "an `autograd.Function`": lambda *x: Mix.apply(*x),
        "a custom operator of `torch.library`": lambda *x: mix(*x),
        "a custom operator of packed operands, named like attention": (
            lambda *x: packed(torch.stack(x, 2))
        ),
        "TorchScript": lambda *x: script(*x),
        "a function under `torch.compile`": lambda *x: compiled(*x),
    }


class Inside(nn.Module):
    """Attention in a module whose name does not say so, beside one that is measured."""

    def __init__(self, function):
        super().__init__()
        self.mixer = One(function)
        self.seen = One(lambda *x: functional.scaled_dot_product_attention(*x))

    def forward(self, x):
        y = self.mixer(x)
        y = y if y.ndim == 4 else y.unflatten(0, (len(x), -1))
        return self.seen(x + y.transpose(1, 2).flatten(2))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:The .grad attribute")
def test_every_way_to_attention_is_named_by_module_as_the_docs_say(caplog):
    docs = table_of_docs()
    for name, function in ways().items():
        plain, model = Inside(function), Inside(function)
        for _ in range(2):  # of which TorchScript learns what to fuse, whose bits are others
            one_step(Inside(function))
        one_step(plain)
        with halfulp.watch(model, every=1) as watcher:
            one_step(model)
        report = watcher.report()
        said = report.unseen[0] if report.unseen else "nothing"
        assert said == f"mixer ({docs[name].strip('`')})", name
        assert report.layers == ("seen",)
        assert all(map(torch.equal, model.parameters(), plain.parameters())), name
        assert f"not measured: {said}" in warnings_of(caplog)
        caplog.clear()


@pytest.mark.parametrize(
    "sound",
    [
        lambda q, k, v: q @ (k.mT @ v),  # linear attention: no weights over tokens
        lambda q, k, v: (q.mean(2) @ torch.eye(4)).softmax(-1)[:, :, None] * v,
        lambda q, k, v: q * torch.sigmoid(k) + v,
    ],
)
def test_what_is_no_attention_is_not_named(sound):
    assert watched_step(Inside(sound)).unseen == ()


def test_experts_in_one_product_are_no_attention():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.up, self.down = (nn.Parameter(torch.randn(4, *n)) for n in ((4, 12), (12, 4)))

        def forward(self, q, k, v):
            x = (q + k + v).transpose(0, 1).flatten(1, 2)
            y = functional.gelu(x @ self.up.to(x.dtype)) @ self.down
            return y.unflatten(1, (len(q), -1)).transpose(0, 1)

    assert watched_step(Inside(Experts())).unseen == ()


def test_pytorchs_own_layer_with_weights_is_named():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.seen = One(functional.scaled_dot_product_attention)
            self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

        def forward(self, x):
            y = self.seen(x).transpose(1, 2).flatten(2)
            return self.attention(y, y, y, need_weights=True)[0]

    report = watched_step(Block())
    assert any(text.startswith("attention (") for text in report.unseen), report.unseen


def test_a_module_named_like_attention_that_shows_nothing_is_named():
    class LinearAttention(nn.Module):
        def forward(self, x):
            return x.cumsum(1)

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.seen = LinearAttention(), One(functional.scaled_dot_product_attention)

        def forward(self, x):
            return self.seen(self.linear(x))

    report = watched_step(Mixed())
    assert any(text.startswith("linear (named like") for text in report.unseen), report.unseen


def test_a_run_of_a_hundred_steps_gets_a_statement_by_default():
    model = One(lambda *x: functional.scaled_dot_product_attention(*x))
    adam = torch.optim.AdamW(model.parameters())
    with halfulp.watch(model) as watcher:
        for _ in range(100):
            model(torch.randn(1, 8, 16)).square().mean().backward()
            adam.step()
            adam.zero_grad()
    report = watcher.report()
    assert report.measurements == 11, "steps 1, 10, 20, ... 100"
    assert "No head alarms" in str(report)
    assert "since step 1" in str(report).replace("\n", " ")
    assert watcher.every == 200


@pytest.mark.parametrize("fault", ["full", "gone"])
def test_a_folder_that_cannot_be_written_ends_in_one_warning(fault, tmp_path, caplog, monkeypatch):
    with one_thread():
        plain = train(GPT(), 4)
        watcher = halfulp.watch(model := GPT(), every=1, folder=tmp_path / "run")
        if fault == "gone":
            shutil.rmtree(tmp_path / "run")
        else:
            full = OSError(28, "No space left on device")

            def raises(*_, **__):
                raise full

            monkeypatch.setattr(notebook, "write_json", raises)
            monkeypatch.setattr(notebook, "line_text", raises)
        assert train(model, 4) == plain
        watcher.close()
    assert watcher.measurements == 4
    assert len(watcher.report().rows) == LAYERS * 4
    assert len([text for text in warnings_of(caplog) if "no longer written" in text]) == 1


def test_processes_that_train_together_write_folders_of_their_own(tmp_path, monkeypatch):
    for rank in (0, 1):
        monkeypatch.setattr(notebook, "_rank", lambda rank=rank: rank)
        with halfulp.watch(model := GPT(), every=1, folder=tmp_path / "run"):
            train(model, 1)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["rank-0", "rank-1"]
    monkeypatch.setattr(notebook, "_rank", lambda: 1)
    with pytest.raises(ValueError, match="holds files"):
        halfulp.watch(GPT(), folder=tmp_path / "run")


def test_steps_that_a_grad_scaler_skips_are_counted_and_named():
    model = One(functional.scaled_dot_product_attention)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with halfulp.watch(model, every=1) as watcher:
        for step in range(6):
            loss = model(torch.ones(1, 9, 16)).square().mean()
            scaler.scale(loss * (float("inf") if step == 2 else 1.0)).backward()
            scaler.step(sgd)
            scaler.update()
            sgd.zero_grad()
        assert watcher.steps == 6
    assert "GradScaler skipped 1 step" in first_line(watcher.report())
    assert torch.amp.GradScaler._maybe_opt_step is SCALER_METHOD


def test_a_watcher_that_nobody_closed_keeps_nothing_alive():
    gone = []
    for _ in range(3):
        model = GPT()
        watcher = halfulp.watch(model, every=1)
        train(model, 1)
        gone.append((weakref.ref(model), weakref.ref(watcher)))
        del model, watcher
    gc.collect()
    assert [(model(), watcher()) for model, watcher in gone] == [(None, None)] * 3
    train(GPT(), 1)  # and no hook of theirs is called
    assert torch.amp.GradScaler._maybe_opt_step is SCALER_METHOD or gc.collect() is not None


def test_a_model_can_be_saved_and_copied_in_a_measured_pass():
    kept = {}

    def attend(query, key, value):
        file = io.BytesIO()
        torch.save(model, file)
        kept["copy"] = copy.deepcopy(model.inner)
        return functional.scaled_dot_product_attention(query, key, value)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(16, 48)

        def forward(self, x):
            parts = self.inner(x).unflatten(-1, (3, 4, 4)).movedim(-3, 0).transpose(-3, -2)
            return attend(*parts)

    globals()["Outer"] = Outer  # where pickle looks it up
    Outer.__qualname__ = "Outer"
    model = Outer()
    try:
        watched_step(model)
    finally:
        del globals()["Outer"]
    file = io.BytesIO()
    torch.save(kept["copy"], file)
    assert hooks_of(model) == []


def test_a_model_has_one_watcher():
    model = GPT()
    with halfulp.watch(model):
        for part in (model, model.blocks, nn.Sequential(model)):
            with pytest.raises(ValueError, match=r"being watched already.*watcher\.close\(\)"):
                halfulp.watch(part)
    with halfulp.watch(model):
        pass
    assert hooks_of(model) == []


def test_threads_that_train_one_model_leave_nothing_replaced(caplog):
    model = One(lambda *x: functional.scaled_dot_product_attention(*x))
    ready = threading.Barrier(4)

    def run():
        ready.wait()
        for _ in range(10):
            one_step(model)

    with halfulp.watch(model, every=1) as watcher:
        one_step(model)
        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert functional.scaled_dot_product_attention is STOCK
    assert hooks_of(model) == []
    assert watcher.measurements == 1
    assert any("another thread" in text for text in warnings_of(caplog))
