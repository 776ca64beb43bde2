"""What `halfulp.watch` reaches in other people's code: wrappers, kernels, masks; and what it
refuses, in words.
"""

import copy
import sys
import types

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention as by_name

import halfulp
from halfulp.runs.threads import one_thread
from halfulp.watch import calls as calls_module
from halfulp.watch import watcher as watcher_module
from halfulp.watch.calls import call_figures
from halfulp.watch.hooks import Idle
from tests.watch.gpt import BIASED_HEAD, GPT, HEADS, LENGTH, biased, train
from tests.watch.test_watcher import (
    ALL_HEADS,
    LAYER_NAMES,
    STOCK,
    hooks_of,
    layers_measured,
    warnings_of,
)


class One(nn.Module):
    """A model that is one attention call, of four heads unless it splits its input by itself."""

    def __init__(self, attend, width=16):
        super().__init__()
        torch.manual_seed(0)
        self.project, self.attend = nn.Linear(width, 3 * width), attend

    def forward(self, x):
        query, key, value = (
            part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.project(x).chunk(3, -1)
        )
        return self.attend(query, key, value)


def one_step(model, x=None, after=lambda: None):
    x = torch.randn(2, 12, 16, generator=torch.Generator().manual_seed(3)) if x is None else x
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).square().sum().backward()
    sgd.step()
    after()


def watched_step(model, **options):
    """The report after one measured step."""
    with halfulp.watch(model, **options) as watcher:
        one_step(model)
    assert functional.scaled_dot_product_attention is STOCK
    assert hooks_of(model) == []
    return watcher.report()


def test_sdpa_is_reached_however_it_is_held_and_whatever_stands_in_its_place(monkeypatch):
    assert len(watched_step(One(lambda *x: functional.scaled_dot_product_attention(*x))).rows) == 4
    assert (
        len(
            watched_step(One(lambda q, k, v: by_name(query=q, key=k, value=v, is_causal=True))).rows
        )
        == 4
    )
    assert len(watched_step(One(lambda *x: halfulp.attention(*x, is_causal=True))).rows) == 4
    with halfulp.patch():
        with halfulp.watch(model := One(lambda *x: by_name(*x))) as watcher:
            one_step(model)
        assert len(watcher.report().rows) == 4
    monkeypatch.setattr(functional, "scaled_dot_product_attention", biased)
    with halfulp.watch(
        model := One(lambda *x: functional.scaled_dot_product_attention(*x, is_causal=True))
    ) as watcher:
        one_step(model)
    rows = watcher.report().rows
    assert [row["grad_query_error"] > 0.005 for row in rows] == [
        head == BIASED_HEAD for head in range(4)
    ]
    assert functional.scaled_dot_product_attention is biased


def test_a_patch_inside_the_model_keeps_its_effect_where_it_is_measured():
    def attend(*x):
        with halfulp.patch(backend="torch"):
            return functional.scaled_dot_product_attention(
                *(y.bfloat16() for y in x), is_causal=True
            )

    model, x = One(attend), torch.randn(2, 12, 16)
    before = model(x)
    with halfulp.watch(model) as watcher:
        during = model(x)
        during.float().sum().backward()
        watcher.step()
    assert torch.equal(before, during)
    assert len(watcher.report().rows) == 4
    assert functional.scaled_dot_product_attention is STOCK


def test_flash_attn_func_and_its_layout(monkeypatch):
    """[B, N, H, D], causal at the bottom right, a window; as halfulp.attention computes the
    same.
    """

    def flash_attn_func(
        q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1)
    ):
        x = [y.transpose(1, 2) for y in (q, k, v)]
        offset = k.shape[1] - q.shape[1]
        return halfulp.attention(
            *x, is_causal=causal, window=window_size, causal_offset=offset
        ).transpose(1, 2)

    module = types.ModuleType("flash_attn")
    module.flash_attn_func = flash_attn_func
    monkeypatch.setitem(sys.modules, "flash_attn", module)

    def attend(query, key, value):
        x = [y.transpose(1, 2) for y in (query[:, :, 4:], key, value)]
        return module.flash_attn_func(*x, causal=True, window_size=(3, 0))

    rows = watched_step(One(attend)).rows
    assert len(rows) == 4
    assert (
        max(
            row[f"{name}_error"]
            for row in rows
            for name in ("out", "grad_query", "grad_key", "grad_value")
        )
        < 1e-5
    )
    assert module.flash_attn_func is flash_attn_func


def masks():
    causal = torch.ones(12, 12, dtype=torch.bool).tril()
    padded = causal.expand(2, 1, 12, 12).clone()
    padded[1, :, :, :3] = False  # the first rows of the second entry see nothing
    added = torch.randn(4, 12, 12, generator=torch.Generator().manual_seed(0))
    return {"bool": causal, "padded": padded, "added": added, "one row": torch.arange(12)[None] < 7}


@pytest.mark.parametrize("kind", ["bool", "padded", "added", "one row"])
def test_masks(kind):
    mask = masks()[kind]
    report = watched_step(
        One(lambda *x: functional.scaled_dot_product_attention(*x, attn_mask=mask))
    )
    assert len(report.rows) == 4
    for row in report.rows:
        assert (
            max(row[f"{name}_error"] for name in ("out", "grad_query", "grad_key", "grad_value"))
            < 1e-5
        )


def test_a_long_head_is_measured_in_some_of_its_rows(monkeypatch):
    """The figures that rows have by themselves are those of these rows; a share of Σ over all rows
    is kept.
    """
    found = {}
    model = One(
        lambda *x: functional.scaled_dot_product_attention(
            *(y.bfloat16() for y in x), is_causal=True
        ).float()
    )
    with halfulp.watch(model) as watcher:
        watcher._take = lambda call: found.update(full=call_figures(call), call=copy.deepcopy(call))
        one_step(model)
    call = found["call"]
    monkeypatch.setattr(calls_module, "CHUNK", 4 * 12)
    figures, parts = call_figures(call)
    full_figures, full_parts = found["full"]
    assert figures["rows"].tolist() == [4.0] * 4
    assert full_figures["rows"].tolist() == [12.0] * 4
    rows = [0, 3, 6, 9]
    q, k, v, out, do = (
        call.tensors[name].double() for name in ("query", "key", "value", "out", "grad_out")
    )
    golden = halfulp.golden(q, k, v, is_causal=True).out
    error = (do * (out - golden)).sum(-1)[:, :, rows]
    torch.testing.assert_close(parts["delta_error"], error.sum(-1), rtol=1e-9, atol=1e-15)
    torch.testing.assert_close(
        parts["delta_error_in_gradient"],
        full_parts["delta_error_in_gradient"] / 3,
        rtol=1e-9,
        atol=0,
    )
    assert figures["grad_key_error"].isnan().all()
    assert (figures["grad_query_error"] < 0.02).all()


def test_dropout_leaves_the_error_that_dk_shows():
    model = One(lambda *x: functional.scaled_dot_product_attention(*x, dropout_p=0.2))
    with halfulp.watch(model, every=1) as watcher:
        for _ in range(4):
            one_step(model)
    rows = watcher.report().rows
    assert [row["out_error"] == row["out_error"] for row in rows] == [False] * 4
    assert all(abs(row["delta_error_in_gradient_steps_t"]) >= 0 for row in rows)
    assert all(row["max_score"] > 0 for row in rows)


def test_gradient_accumulation_counts_optimizer_steps():
    with one_thread():
        plain = train(GPT(), 4, accumulation=3)
        with halfulp.watch(model := GPT(), every=2) as watcher:
            assert train(model, 4, accumulation=3) == plain
    assert (watcher.steps, watcher.measurements) == (4, 3)


def test_several_optimizers_make_one_step():
    model = GPT()
    parameters = list(model.parameters())
    optimizers = [torch.optim.SGD(half, lr=0.1) for half in (parameters[:5], parameters[5:])]
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with halfulp.watch(model, every=1) as watcher:
        for _ in range(2):
            model(torch.arange(LENGTH)[None] % 17).sum().backward()
            for optimizer in (*optimizers, other):
                optimizer.step()
    assert (watcher.steps, watcher.measurements) == (2, 2)


def test_a_step_of_ones_own_and_a_pass_without_a_backward_pass(caplog):
    model, words = GPT(), torch.arange(LENGTH)[None] % 17
    with halfulp.watch(model, every=1, start=10) as watcher:
        for _ in range(4):
            model(words)  # a look at the loss, with gradients on
            loss = model(words).sum()
            loss.backward()
            watcher.step(loss)
    assert watcher.steps == 14
    assert [row["step"] for row in watcher._rows][-1] == 14
    assert watcher.measurements >= 2, "after a failure the next pass is tried"
    assert layers_measured(watcher) == ALL_HEADS
    assert warnings_of(caplog) == []


def test_a_step_of_ones_own_beside_an_optimizer_is_one_step():
    with halfulp.watch(model := GPT(), every=1) as watcher:
        train(model, 4, after=watcher.step)
    assert (watcher.steps, watcher.measurements) == (4, 4)
    assert ["loss" in row for row in watcher._rows] == [
        False,
        True,
        True,
        True,
    ], "the first came with the optimizer"


def test_a_model_without_attention_is_not_tapped_for_ever(monkeypatch):
    opened = []
    monkeypatch.setattr(watcher_module.Taps, "open", lambda self, *_, **__: opened.append(self))
    model = nn.Linear(2, 2)
    with halfulp.watch(model, every=50):
        for _ in range(120):
            one_step(model, torch.ones(1, 2))
    assert len(opened) == 8, "six tries, then at steps 50 and 100"


def test_an_exception_in_the_model_leaves_nothing():
    def fails(*_):
        raise RuntimeError("planted")

    model = One(fails)
    with halfulp.watch(model) as watcher, pytest.raises(RuntimeError, match="planted"):
        one_step(model)
    assert functional.scaled_dot_product_attention is STOCK
    assert hooks_of(model) == []
    assert watcher.measurements == 0


def test_pytorchs_own_layers():
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    report = watched_step(layer)
    assert report.layers == ("self_attn",)
    assert len(report.rows) == 4


def test_a_measurement_that_fails_harms_nothing(caplog, monkeypatch):
    def full(call):
        raise torch.OutOfMemoryError("planted\nsecond line")

    monkeypatch.setattr(watcher_module, "call_figures", full)
    with one_thread():
        plain = train(GPT(), 2)
        with halfulp.watch(model := GPT(), every=1) as watcher:
            assert train(model, 2) == plain
    assert watcher.measurements == 0
    (said,) = warnings_of(caplog)
    assert "blocks.0.attention, blocks.1.attention (OutOfMemoryError: planted)" in said


def test_a_model_compiled_afterwards_is_said_to_be_out_of_sight(caplog):
    model = GPT()
    with one_thread(), halfulp.watch(model, every=1) as watcher:
        losses = train(model, 2, call=torch.compile(model, backend="eager"))
        assert losses == train(GPT(), 2)
    assert watcher.measurements == 0
    (said,) = warnings_of(caplog)
    assert "no forward pass of GPT: accepted is the module that the training calls" in said


def test_a_copy_is_not_watched_and_a_model_can_be_stored(tmp_path):
    with halfulp.watch(model := GPT(), every=1) as watcher:
        again = copy.deepcopy(model)
        train(again, 1)
        reduced = model.__reduce_ex__(4)[2]["_forward_pre_hooks"]
        stored = [
            made(*arguments) for made, arguments in (h.__reduce__() for h in reduced.values())
        ]
        assert [type(hook) for hook in stored] == [Idle], "a stored model is not watched"
        assert watcher.steps == 0
        train(model, 1)
    assert watcher.measurements == 1


def test_other_models_and_evaluation_are_not_looked_at():
    model, other = GPT(), GPT()
    with halfulp.watch(model, every=1) as watcher:
        with torch.no_grad():
            model(torch.arange(LENGTH)[None] % 17)
        assert functional.scaled_dot_product_attention is STOCK
        train(other, 1)
        assert (watcher.steps, watcher.measurements) == (0, 0)
        with halfulp.watch(other, every=1) as second:
            train(model, 2)
            train(other, 1)
    assert (watcher.measurements, second.measurements) == (2, 1)


def test_what_was_not_seen_is_said(caplog, monkeypatch):
    watched_step(One(lambda q, k, v: (q @ k.mT).softmax(-1) @ v))
    (said,) = warnings_of(caplog)
    assert said.startswith(
        "no attention is measured in step 1 of One: (model) (attention written out in products);"
    )
    caplog.clear()
    watched_step(One(lambda q, k, v: q + k + v))
    (said,) = warnings_of(caplog)
    assert said.startswith(
        "no attention was seen in step 1 of One: accepted are F.scaled_dot_product_attention"
    )
    caplog.clear()
    watched_step(One(lambda *x: halfulp.attention(*x, softcap=5.0)))
    (said,) = warnings_of(caplog)
    assert "(model) (softcap is given)" in said
    caplog.clear()

    def wrong(query, key, value, *, is_causal=False):
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    monkeypatch.setattr(sys.modules[__name__], "wrong_causal", wrong, raising=False)
    watched_step(One(lambda *x: wrong_causal(*x)), functions=(wrong,))  # noqa: F821
    (said,) = warnings_of(caplog)
    assert "off the attention that it was asked for" in said
    caplog.clear()
    model = GPT()
    with halfulp.watch(model.blocks[0].mlp):
        train(model, 1)
    (said,) = warnings_of(caplog)
    assert "no attention was seen" in said
    caplog.clear()
    with halfulp.watch(model.last, every=1) as watcher:
        for p in model.last.parameters():
            p.grad = torch.zeros_like(p)
        torch.optim.SGD(model.last.parameters(), lr=0.1).step()
    (said,) = warnings_of(caplog)
    assert "no forward pass of Linear" in said
    assert watcher.report().rows == ()


def test_bad_arguments(tmp_path):
    (tmp_path / "file").write_text("x", encoding="utf-8")
    model = GPT()
    for options, said in (
        ({"every": 0}, "every=0: accepted"),
        ({"every": "x"}, "every='x': accepted is an integer"),
        ({"on_alarm": 3}, "on_alarm=3: accepted is a function"),
        ({"writers": [3]}, "writers=3: accepted has row"),
        ({"start": -1}, "start=-1: accepted"),
        ({"folder": tmp_path}, "holds files; accepted is a new or empty folder"),
        ({"folder": tmp_path / "file"}, "is a file; accepted is a folder"),
    ):
        with pytest.raises(ValueError, match=said):
            halfulp.watch(model, **options)
    with pytest.raises(ValueError, match="accepted is an nn"):
        halfulp.watch(lambda x: x)
    with pytest.raises(ValueError, match="DistributedDataParallel"):
        halfulp.watch(nn.DataParallel(model))
    assert hooks_of(model) == []


def test_a_compiled_model_is_refused_or_measured_eagerly():
    with one_thread():
        model = GPT()
        compiled = torch.compile(model, backend="eager")
        with pytest.raises(
            ValueError, match="is compiled, and its graph cannot be tapped: accepted is eager=True"
        ):
            halfulp.watch(compiled)
        plain = train(GPT(), 3)
        with halfulp.watch(compiled, every=2, eager=True) as watcher:
            losses = train(model, 3, call=compiled)
    assert losses == plain, "of a back end that changes no arithmetic"
    assert layers_measured(watcher) == ALL_HEADS
    assert (watcher.steps, watcher.measurements) == (3, 2)
    other = GPT()
    other.compile(backend="eager")
    with pytest.raises(ValueError, match="compiled in place"):
        halfulp.watch(other, eager=True)


def test_ddp(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        losses = []
        for watched in (False, True):
            wrapped = nn.parallel.DistributedDataParallel(GPT())
            watcher = halfulp.watch(wrapped, every=1) if watched else None
            losses.append(train(wrapped.module, 2, call=wrapped))
        assert losses[0] == losses[1]
        assert watcher.report().layers == LAYER_NAMES
        assert layers_measured(watcher) == ALL_HEADS
        watcher.close()
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ["GPT2", "Llama"])
@pytest.mark.parametrize("implementation", ["sdpa", "halfulp"])
def test_transformers(kind, implementation):
    transformers = pytest.importorskip("transformers")
    halfulp.register_transformers()
    if kind == "GPT2":
        config = transformers.GPT2Config(
            vocab_size=17,
            n_positions=LENGTH,
            n_embd=32,
            n_layer=2,
            n_head=4,
            attn_pdrop=0.0,
            bos_token_id=1,
            eos_token_id=2,
        )
        build, path = transformers.GPT2LMHeadModel, "transformer.h.{}.attn"
    else:
        config = transformers.LlamaConfig(
            vocab_size=17,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        )
        build, path = transformers.LlamaForCausalLM, "model.layers.{}.self_attn"
    config._attn_implementation = implementation
    runs = []
    with one_thread():
        for watched in (False, True):
            torch.manual_seed(0)
            model = build(config)
            watcher = halfulp.watch(model, every=2) if watched else None
            losses = train(model, 3)
            runs.append((losses, list(model.parameters())))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))
    assert watcher.report().layers == tuple(path.format(i) for i in range(2))
    assert len(watcher.report().rows) == 2 * HEADS
    assert max(row["grad_query_error"] for row in watcher.report().rows) < 0.02
    watcher.close()
