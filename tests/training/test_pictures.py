"""Text-to-image: pictures with their names, noise that repeats, a sampler with a known answer,
names that matter.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from halfulp.calls import Call
from halfulp.experiments.drawing import draw_workload
from halfulp.runs.threads import one_thread
from halfulp.training import glyphs
from halfulp.training.attention import AttentionPlan, set_tap
from halfulp.training.checkpoint import model_tensors
from halfulp.training.config import Optimizer, Pictures, RunConfig
from halfulp.training.diffusion import (
    PAD,
    PictureAttention,
    add_noise,
    draw_samples,
    encode_name,
    noise_levels,
)
from halfulp.training.glyphs import available_source, emoji_font, load_pictures
from halfulp.training.loop import train
from halfulp.training.pictures import PictureWorkload

ENGLISH = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TINY = Pictures(
    layers=2, heads=2, width=16, size=8, patch=4, count=8, data="shapes", name_length=20
)


def tiny(attention: str = "torch:fp32", seed: int = 0, data_seed: int = 0) -> PictureWorkload:
    config = RunConfig(TINY, AttentionPlan.of(attention), seed=seed, data_seed=data_seed)
    return PictureWorkload(config, torch.device("cpu"), None)


def shaken(workload: PictureWorkload) -> PictureWorkload:
    """A fresh model's gates are zero, so its output is: give every weight some value."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in workload.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return workload


def forward(workload: PictureWorkload, names: list[str]) -> Tensor:
    noise = torch.randn(len(names), 3, 8, 8, generator=torch.Generator().manual_seed(3))
    out: Tensor = workload.model(noise, torch.full((len(names),), 0.5), workload.symbols(names))
    return out.detach()


# --- noise and sampler


def test_picture_and_noise_come_back_from_the_noisy_picture_and_v() -> None:
    generator = torch.Generator().manual_seed(0)
    clean, noise = torch.randn(2, 5, 3, 4, 4, generator=generator, dtype=torch.float64)
    time = torch.linspace(0, 1, 5, dtype=torch.float64)
    noisy, v = add_noise(clean, noise, time)
    alpha, sigma = (level[:, None, None, None] for level in noise_levels(time))
    torch.testing.assert_close(alpha * noisy - sigma * v, clean, rtol=0, atol=1e-14)
    torch.testing.assert_close(sigma * noisy + alpha * v, noise, rtol=0, atol=1e-14)
    torch.testing.assert_close(noisy[0], clean[0], rtol=0, atol=0)


MEAN, SPREAD = 0.7, 0.2


def gaussian_v(x: Tensor, time: Tensor) -> Tensor:
    """The best prediction of v where pictures are N(MEAN, SPREAD²) in every pixel."""
    alpha, sigma = (level[:, None] for level in noise_levels(time))
    gain = (x - alpha * MEAN) / ((alpha * SPREAD) ** 2 + sigma**2)
    return alpha * sigma * gain - sigma * (MEAN + alpha * SPREAD**2 * gain)


def sampler_error(steps: int) -> float:
    """Distance to the exact flow, which maps standard normal noise x to MEAN + SPREAD·x."""
    noise = torch.randn(64, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return float((draw_samples(gaussian_v, noise, steps) - (MEAN + SPREAD * noise)).abs().max())


def test_the_sampler_reaches_the_known_distribution_and_its_error_falls_like_one_over_steps() -> (
    None
):
    coarse, fine = sampler_error(100), sampler_error(200)
    assert fine < 0.02
    assert coarse / fine == pytest.approx(2, rel=0.1)


def test_a_sampler_whose_v_has_the_wrong_sign_is_caught() -> None:
    noise = torch.randn(64, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wrong = draw_samples(lambda x, time: -gaussian_v(x, time), noise, 200)
    assert float((wrong - (MEAN + SPREAD * noise)).abs().max()) > 0.5


def test_one_known_picture_is_drawn_exactly_in_any_number_of_steps() -> None:
    clean = torch.linspace(-1, 1, 6, dtype=torch.float64).expand(3, 6)

    def known(x: Tensor, time: Tensor) -> Tensor:
        alpha, sigma = (level[:, None] for level in noise_levels(time))
        return alpha * (x - alpha * clean) / sigma - sigma * clean

    for steps in (1, 3, 20):
        drawn = draw_samples(known, torch.randn(3, 6, dtype=torch.float64), steps)
        torch.testing.assert_close(drawn, clean, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="steps=0"):
        draw_samples(known, clean, 0)


# --- pictures and names


def test_names_become_bytes_of_the_lower_cased_text() -> None:
    assert encode_name("Red É", 8) == [*"red é".encode(), PAD, PAD]
    assert encode_name("circle", 3) == [*b"cir"]


def test_shapes_are_what_their_names_say() -> None:
    found = load_pictures("shapes", 16)
    assert len(set(found.names)) == len(found.names) == 64
    picture = dict(zip(found.names, found.pixels.astype(int), strict=True))
    assert picture["red circle"][8, 8].tolist() == [220, 40, 40]
    assert picture["red circle"][0, 0].tolist() == [255, 255, 255]
    assert picture["blue ring"][8, 8].tolist() == [255, 255, 255]
    assert picture["blue bar"][8, 2:14].std(0).max() == 0
    assert picture["green triangle"][12].min(1).tolist().count(255) < picture["green triangle"][
        4
    ].min(1).tolist().count(255)
    some = load_pictures("shapes", 16, 8)
    assert some.names == found.names[::8]
    assert np.array_equal(some.pixels, found.pixels[::8])
    assert len({word for name in some.names for word in name.split()}) == 16


@pytest.mark.skipif(emoji_font() is None, reason="the emoji font is not installed")
def test_emoji_are_what_their_names_say() -> None:
    found = load_pictures("emoji", 16)
    assert len(found.names) > 1000
    assert len(set(found.names)) == len(found.names)
    picture = dict(zip(found.names, found.pixels.astype(int), strict=True))
    red, green, blue = picture["green book"][8, 8]
    assert green > red
    assert green > blue
    assert picture["black large square"][8, 8].max() < 90
    assert picture["hedgehog"][0, 0].tolist() == [255, 255, 255]


def test_what_is_not_installed_is_named_and_auto_takes_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(glyphs, "FONT_FOLDERS", (tmp_path, tmp_path / "nowhere"))
    emoji_font.cache_clear()
    try:
        monkeypatch.setattr(glyphs, "_has_digits", lambda: True)
        assert available_source("auto") == "digits"
        monkeypatch.setattr(glyphs, "_has_digits", lambda: False)
        assert available_source("auto") == "shapes"
        load_pictures.cache_clear()
        with pytest.raises(ValueError, match="data='emoji': there is no Noto"):
            load_pictures("emoji", 8)
        with pytest.raises(ValueError, match="data='digits': scikit-learn is not installed"):
            load_pictures("digits", 8)
    finally:
        emoji_font.cache_clear()
    with pytest.raises(ValueError, match="count=65: accepted are 1 to 64"):
        load_pictures("shapes", 8, 65)
    with pytest.raises(ValueError, match="data='cats': accepted are auto, emoji"):
        load_pictures("cats", 8)


def test_digits_are_dark_on_white() -> None:
    pytest.importorskip("sklearn")
    found = load_pictures("digits", 16, 20)
    assert set(found.names) <= {f"digit {n}" for n in ENGLISH}
    assert found.pixels[:, 0, 0].min() > 200
    assert found.pixels.min() < 80


# --- workload


def test_every_picture_comes_once_an_epoch_in_an_order_of_the_data_seed() -> None:
    order = tiny().order(6, 4).ravel()
    assert sorted(order.tolist()) == list(range(24))
    assert all(sorted((order[i : i + 8] % 8).tolist()) == list(range(8)) for i in (0, 8, 16))
    assert np.array_equal(tiny(seed=5).order(6, 4).ravel(), order)
    assert np.array_equal(tiny().order(3, 4).ravel(), order[:12])
    assert not np.array_equal(tiny(data_seed=1).order(6, 4).ravel(), order)


def test_a_sample_has_the_same_bits_in_any_batch_and_others_at_another_step() -> None:
    workload = tiny()
    whole = workload.batch(np.array([3, 11, 6]), 5)
    for i, sample in enumerate((3, 11, 6)):
        alone = workload.batch(np.array([sample]), 5)
        assert all(torch.equal(x[i : i + 1], y) for x, y in zip(whole, alone, strict=True))
    noisy, _, time, names = whole
    assert torch.equal(names[0], names[1])  # the same picture in another epoch
    assert not torch.equal(noisy[0], noisy[1])
    assert not torch.equal(time, workload.batch(np.array([3, 11, 6]), 6)[2])
    assert not torch.equal(time, tiny(data_seed=1).batch(np.array([3, 11, 6]), 5)[2])


def test_noise_is_standard_normal_and_times_uniform() -> None:
    workload = tiny()
    samples = np.arange(400)
    noisy, v, time, _ = workload.batch(samples, 1)
    alpha, sigma = (level[:, None, None, None] for level in noise_levels(time))
    noise = sigma * noisy + alpha * v
    assert abs(float(noise.mean())) < 4 / noise.numel() ** 0.5
    assert float(noise.std()) == pytest.approx(1, abs=0.01)
    from scipy.stats import kstest

    assert kstest(time.numpy(), "uniform").pvalue > 0.001


def test_equal_seeds_give_equal_weights_and_leave_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    one, same, other = (model_tensors(tiny(seed=seed).model) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["read.weight"], other["read.weight"])


def test_both_attentions_are_taken_by_layer_and_have_their_own_shape() -> None:
    workload, seen = shaken(tiny()), {}

    def tap(layer: int, call: Call, out: Tensor) -> Tensor:
        seen[layer] = (tuple(call.query.shape), tuple(call.key.shape), call.sees.causal)
        return out

    set_tap(workload.model, tap)
    forward(workload, ["red circle"])
    assert seen == {
        layer: ((1, 2, 4, 8), (1, 2, 20 if layer % 2 else 4, 8), False) for layer in range(4)
    }
    found = [m for m in workload.model.modules() if isinstance(m, PictureAttention)]
    assert [m.attend.layer for m in found] == [0, 1, 2, 3]
    x = torch.randn(1, 5, 16)
    for module in found:
        w_query, w_key = module.head_weights()
        assert torch.allclose(
            torch.einsum("bnw,hdw->bhnd", x, w_query),
            module.query(x).unflatten(-1, (2, 8)).transpose(1, 2),
            atol=1e-5,
        )
        assert w_key.shape == (2, 8, 16)
    with pytest.raises(ValueError, match="accepted are layers 0 to 3"):
        PictureWorkload(
            RunConfig(TINY, AttentionPlan.of("torch:fp32", "layer 4: torch:math")),
            torch.device("cpu"),
            None,
        )


def test_the_drawing_depends_on_the_name_through_cross_attention() -> None:
    workload, swap = shaken(tiny()), {}

    def keep(layer: int, _: Call, out: Tensor) -> Tensor:
        if layer % 2:
            swap[layer] = out
        return out

    def exchange(layer: int, _: Call, out: Tensor) -> Tensor:
        return swap[layer] if layer % 2 else out

    plain = forward(workload, ["red circle"])
    assert not torch.allclose(plain, forward(workload, ["red square"]), atol=1e-3)
    set_tap(workload.model, keep)
    forward(workload, ["blue bar"])
    set_tap(workload.model, exchange)
    # only cross-attention read blue bar
    assert not torch.allclose(plain, forward(workload, ["red circle"]), atol=1e-3)
    set_tap(workload.model, None)
    assert torch.equal(plain, forward(workload, ["red circle"]))


def test_patches_come_back_in_their_places() -> None:
    model = tiny().model
    picture = torch.arange(2 * 3 * 64, dtype=torch.float32).reshape(2, 3, 8, 8)
    patches = model._patches(picture)
    assert torch.equal(patches[1, 1], picture[1, :, :4, 4:].flatten())
    assert torch.equal(model._picture(patches), picture)


def config(**changes: object) -> RunConfig:
    plain: dict[str, object] = {
        "workload": Pictures(
            layers=1, heads=2, width=32, size=8, patch=4, count=8, data="shapes", name_length=16
        ),
        "attention": AttentionPlan.of("torch:fp32"),
        "optimizer": Optimizer(learning_rate=4e-3, warm_up=20, schedule="cosine", clip=1.0),
        "steps": 300,
        "batch": 16,
    }
    return RunConfig(**(plain | changes))  # type: ignore[arg-type]


def test_after_training_the_asked_picture_is_drawn() -> None:
    with one_thread():
        run = train(config())
    assert run.curve("loss")[-1] < run.curve("loss")[0] / 2
    workload = run.workload
    assert isinstance(workload, PictureWorkload)
    asked = list(reversed(workload.pictures.names))
    drawn = draw_workload(workload, asked)
    assert drawn.right >= 7  # of 8; by chance 1
    assert np.array_equal(drawn.drawn, draw_workload(workload, asked).drawn)
    # planted: a model that is told other names than are asked for
    names = workload.symbols(asked[1:] + asked[:1])
    workload.symbols = lambda _: names  # type: ignore[method-assign,assignment]
    assert draw_workload(workload, asked).right <= 1


def test_a_run_that_was_stopped_and_resumed_ends_in_the_same_bits(tmp_path: Path) -> None:
    small = config(steps=6, batch=4, autocast="bf16", attention=AttentionPlan.of("torch:flash"))
    with one_thread():
        whole = train(small, tmp_path / "whole")
        partly = small.__class__(**{**vars(small), "checkpoint_every": 3})
        train(partly, tmp_path / "parts")
        for path in (tmp_path / "parts" / "checkpoints" / "step-6").iterdir():
            path.unlink()
        (tmp_path / "parts" / "checkpoints" / "step-6").rmdir()
        record = tmp_path / "parts" / "run.json"
        record.write_text(record.read_text().replace('"status": "done"', '"status": "running"'))
        again = train(partly, tmp_path / "parts", resume=True)
    one, other = model_tensors(whole.workload.model), model_tensors(again.workload.model)
    assert all(torch.equal(one[name], other[name]) for name in one)
