"""The presets are what they say, run, fail where they should; any of their fields can be set from
text.
"""

import inspect
import statistics
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfulp.training.attention import AttentionPlan
from halfulp.training.config import Language, LayerTask, Optimizer, RunConfig
from halfulp.training.loop import train
from halfulp.training.presets import PRESETS, capture, gpt2, minutes, seconds
from halfulp.training.run_json import config_as_dict, config_from_dict
from halfulp.training.settings import settable, with_settings
from halfulp.training.updates import learning_rate


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_says_what_it_is_and_comes_back_from_its_record(name):
    config = PRESETS[name](seed=3, steps=7)
    assert (config.preset, config.seed, config.steps) == (name, 3, 7)
    assert config_from_dict(config_as_dict(config)) == config
    first = inspect.getdoc(PRESETS[name]).split("\n\n")[0]
    assert first.endswith(".")
    assert PRESETS[name]("BF16_HALFULP").attention == AttentionPlan.of("BF16_HALFULP")


def test_gpt2_is_paper_a():
    """arXiv 2510.04212, section 3.1, number by number."""
    config = gpt2()
    model, rates = config.workload, config.optimizer
    assert (model.layers, model.heads, model.width, model.context, model.vocabulary) == (
        12,
        12,
        768,
        1024,
        50304,
    )
    assert (model.positions, model.query_key_norm, model.key_heads) == ("learned", False, None)
    assert config.batch * model.context == 524_288
    assert config.batch // config.accumulation == 32  # sequences a micro-batch
    assert (rates.betas, rates.weight_decay, rates.clip) == ((0.9, 0.95), 0.0, 1.0)
    assert (config.autocast, config.device, str(config.attention)) == (
        "bf16",
        "cuda",
        "torch:flash",
    )
    assert learning_rate(rates, 1000, config.steps) == pytest.approx(0.5e-3)
    assert learning_rate(rates, 2000, config.steps) == pytest.approx(1e-3)
    assert learning_rate(rates, 10_000, config.steps) > 0.999e-3, (
        "where paper A's run fails the rate is near its top"
    )
    assert learning_rate(rates, 600_000, 600_000) == pytest.approx(1e-5)
    assert learning_rate(rates, 700_000, 700_000) == pytest.approx(1e-5), "and stays there"
    for steps in (2001, 12_000):  # a shorter run begins as a longer one does
        assert learning_rate(rates, 2001, steps) == learning_rate(rates, 2001, 600_000)


def test_gpt2_trains_at_a_size_that_fits_here():
    """The same optimizer and autocast on the CPU: bf16 attention, two micro-batches a step, the
    loss goes down.
    """
    config = gpt2(device="cpu", steps=30)
    small = Language(layers=2, heads=2, width=32, context=32, vocabulary=300)
    rates = replace(config.optimizer, warm_up=5, cosine_steps=100, learning_rate=1e-2)
    run = train(
        replace(config, workload=small, batch=8, accumulation=2, optimizer=rates, metrics_every=1)
    )
    loss = run.curve("loss")
    assert run.status == "done"
    assert statistics.mean(loss[-5:]) < loss[0] - 1.0


def test_minutes_fails_by_the_delta_alone():
    """One mantissa bit in O, half the batch: the loss climbs; with δ from O before its rounding the
    run learns on.
    """
    thirds = {}
    for change in ("", ",delta_from=exact_out"):
        run = train(replace(minutes(f"BF16_FLASH2[out=e8m1{change}]", steps=300), batch=8))
        lines = run.curve("loss")
        thirds[change] = [statistics.median(lines[i : i + 10]) for i in (0, 10, 20)]
    stock, fixed = thirds[""], thirds[",delta_from=exact_out"]
    assert stock[0] < stock[2]
    assert fixed[2] < fixed[0]
    assert fixed[2] < stock[2] - 0.2


def test_minutes_names_its_acceleration():
    assert str(minutes().attention) == "BF16_FLASH2[out=e8m2]"
    assert "Accelerated" in inspect.getdoc(minutes)


def test_capture_learns_english_bytes():
    config = replace(capture(steps=25), workload=replace(capture().workload, width=32, context=32))
    loss = train(config).curve("loss")
    assert len(loss) == 25
    assert loss[-1] < loss[0] - 1.0


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("steps=5", lambda c: c.steps == 5),
        ("optimizer.learning_rate=3e-4", lambda c: c.optimizer.learning_rate == 3e-4),
        ("optimizer.learning_rate=1", lambda c: repr(c.optimizer.learning_rate) == "1.0"),
        ("optimizer.betas=0.8,0.99", lambda c: c.optimizer.betas == (0.8, 0.99)),
        ("optimizer.clip=none", lambda c: c.optimizer.clip is None),
        ("optimizer.clip=2", lambda c: c.optimizer.clip == 2.0),
        ("workload.key_heads=1", lambda c: c.workload.key_heads == 1),
        ("workload.query_key_norm=true", lambda c: c.workload.query_key_norm is True),
        ("workload.positions = rope", lambda c: c.workload.positions == "rope"),
        ("workload.data=a=b.npy", lambda c: c.workload.data == "a=b.npy"),
        ("autocast=bf16", lambda c: c.autocast == "bf16"),
        ("data_seed=4", lambda c: c.data_seed == 4),
        ("keep=none", lambda c: c.keep is None),
        (
            "attention=torch:math; head 1: FP32[out=bf16,l=1]",
            lambda c: len(c.attention.assignments) == 2,
        ),
    ],
)
def test_a_field_is_set_from_text(text, read):
    base = minutes()
    changed = with_settings(base, [text])
    assert read(changed)
    assert not read(base)


def test_fields_that_only_go_together_are_set_together():
    changed = with_settings(
        minutes(), ["workload.width=30", "workload.heads=3", "batch=9", "accumulation=3"]
    )
    assert (
        changed.workload.width,
        changed.workload.heads,
        changed.batch,
        changed.accumulation,
    ) == (30, 3, 9, 3)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "stepz=5",
            (
                "set='stepz': 'stepz' is no field of RunConfig; accepted: workload, attention,"
                " optimizer, steps"
            ),
        ),
        ("workload.layer=5", "'layer' is no field of Language; accepted: layers, heads, key_heads"),
        ("workload=5", "set='workload': accepted is workload.layers and so on"),
        ("steps.more=5", "set='steps.more': accepted is steps"),
        ("steps", "set='steps': accepted is field=value"),
        ("=5", "set='=5': accepted is field=value"),
        ("steps=1.5", "steps='1.5': accepted is an integer"),
        ("steps=none", "steps='none': accepted is an integer"),
        ("keep=some", "keep='some': accepted is an integer, or none"),
        ("optimizer.clip=x", "optimizer.clip='x': accepted is a number, or none"),
        ("optimizer.betas=0.9", "optimizer.betas='0.9': accepted are 2 values"),
        ("optimizer.betas=0.9,x", "optimizer.betas='x': accepted is a number"),
        ("autocast=fp8", "autocast='fp8': accepted are none, bf16, fp16"),
        ("workload.positions=sine", "workload.positions='sine': accepted are learned, rope"),
        ("workload.query_key_norm=1", "workload.query_key_norm='1': accepted are true and false"),
        ("workload.heads=3", "heads=3: accepted is a divisor of width=64"),
        ("optimizer.cosine_steps=0", "cosine_steps=0: accepted are more than warm_up=0"),
    ],
)
def test_a_bad_field_is_one_line(text, says):
    with pytest.raises(ValueError, match="accepted") as error:
        with_settings(minutes(), [text])
    assert str(error.value).startswith(says) or says in str(error.value)
    assert "\n" not in str(error.value)


def test_every_field_is_settable():
    names = settable(seconds())
    assert {"steps", "attention", "workload.constant", "optimizer.least_rate", "preset"} <= set(
        names
    )
    for config in (seconds(), minutes(), gpt2(), PRESETS["pictures"]()):
        plain = config_as_dict(config)
        for name in settable(config):
            value = plain
            for part in name.split("."):
                value = value[part]
            text = "; ".join(value) if name == "attention" else _text(value)
            assert with_settings(config, [f"{name}={text}"]) == config, name


def _text(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(map(_text, value))
    return "none" if value is None else repr(value) if isinstance(value, float) else str(value)


@given(st.text(max_size=30))
def test_no_text_breaks_the_reader(text):
    said = "accepted"
    try:
        with_settings(RunConfig(LayerTask(), optimizer=Optimizer()), [text])
    except ValueError as error:
        said = str(error)
    assert "accepted" in said


def test_twin_presets_read_the_same_batches_into_the_same_weights():
    """The loss of the first step differs by rounding and by nothing else."""
    runs = [train(minutes(choice, steps=1)) for choice in ("torch:fp32", "BF16_FLASH2")]
    one, two = (run.curve("loss")[0] for run in runs)
    assert 0 < abs(one - two) < 1e-3
    assert np.array_equal(*(run.workload.order(3, 16) for run in runs))
