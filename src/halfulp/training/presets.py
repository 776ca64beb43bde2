"""Runs worth repeating, as functions that return their configuration: from seconds on one core to
paper A's GPT-2.

Two presets are at the papers' own precision (`seconds` and `gpt2`, true bf16); `minutes` is
accelerated, which its docstring says and every report has to say.
"""

from __future__ import annotations

from collections.abc import Callable

from halfulp.training.attention import AttentionPlan
from halfulp.training.config import Language, LayerTask, Optimizer, Pictures, RunConfig
from halfulp.watch.monitor import DEFAULT_EVERY

GPT2_VOCABULARY = 50_304  # 50,257 tokens, padded to a multiple of 64 as nanoGPT does
GPT2_COSINE = 600_000  # steps


def seconds(attention: str = "torch:flash", *, seed: int = 0, steps: int = 4000) -> RunConfig:
    """Ruin a one-layer task in true bf16, with nothing accelerated but the task: about 8 seconds on
    one core.

    AdamW without weight decay is Adam. PyTorch's own flash kernel fails (its loss climbs from 9e-5
    at step 1000 to 1.7e-3 at step 4000), its math backend does not.
    """
    return RunConfig(
        workload=LayerTask(),
        attention=AttentionPlan.of(attention),
        optimizer=Optimizer(learning_rate=1e-3, warm_up=50),
        steps=steps,
        seed=seed,
        metrics_every=50,
        measure_every=DEFAULT_EVERY,
        preset="seconds",
    )


def minutes(
    attention: str = "BF16_FLASH2[out=e8m2]", *, seed: int = 0, steps: int = 2000
) -> RunConfig:
    """Ruin a byte-level GPT of one layer. Accelerated: O has 2 mantissa bits (bf16 has 7); all else
    is bf16. A step is 1024 tokens.
    """
    return RunConfig(
        workload=Language(layers=1, heads=2, width=64, context=64, data="english"),
        attention=AttentionPlan.of(attention),
        optimizer=Optimizer(learning_rate=1e-2, clip=1.0),
        steps=steps,
        batch=16,
        seed=seed,
        metrics_every=10,
        measure_every=DEFAULT_EVERY,
        preset="minutes",
    )


def gpt2(
    attention: str = "torch:flash", *, seed: int = 0, steps: int = 12_000, device: str = "cuda"
) -> RunConfig:
    """Train paper A's GPT-2 (arXiv 2510.04212, section 3.1): 524,288 tokens a step, in bf16
    autocast, on GPUs.

    12 layers, 12 heads, width 768, context 1024; AdamW 0.9/0.95 without weight decay, 2000 steps of
    warm-up, cosine 1e-3 → 1e-5, clip 1.0; 16 micro-batches of 32 sequences, which are paper A's 4
    on each of 4 GPUs. The paper does not say how long the cosine is; it is nanoGPT's 600,000 steps
    here, of which the first 12,000 are made, since the loss explodes at about 10,000. Its text is
    OpenWebText: set `workload.data` to its token file.
    """
    return RunConfig(
        workload=Language(vocabulary=GPT2_VOCABULARY),
        attention=AttentionPlan.of(attention),
        optimizer=Optimizer(
            learning_rate=1e-3,
            warm_up=2000,
            schedule="cosine",
            cosine_steps=GPT2_COSINE,
            least_rate=1e-5,
            clip=1.0,
        ),
        steps=steps,
        batch=512,
        accumulation=16,
        autocast="bf16",
        seed=seed,
        checkpoint_every=500,
        device=device,
        measure_every=DEFAULT_EVERY,
        preset="gpt2",
    )


def capture(attention: str = "torch:flash", *, seed: int = 0, steps: int = 250) -> RunConfig:
    """Train the byte-level GPT whose activations feed the audit: 2 layers, width 128; under a
    minute on one core.
    """
    return RunConfig(
        workload=Language(layers=2, heads=4, width=128, context=256, data="english"),
        attention=AttentionPlan.of(attention),
        optimizer=Optimizer(
            learning_rate=3e-3, warm_up=20, schedule="cosine", least_rate=3e-4, clip=1.0
        ),
        steps=steps,
        batch=8,
        seed=seed,
        metrics_every=1,
        preset="capture",
    )


def pictures(
    attention: str = "torch:flash", *, seed: int = 0, steps: int = 2000, data: str = "auto"
) -> RunConfig:
    """Train a diffusion transformer to draw 36 pictures from their names in true bf16: about 3
    minutes on one core.

    Args:
        attention: in every layer.
        seed: of weights, data order and noise.
        steps: of 32 pictures each; after 2000 most are drawn so that one knows them.
        data: "emoji", "digits", "shapes", or "auto" for the first that is installed, which the run
            then records.
    """
    from halfulp.training.glyphs import available_source

    return RunConfig(
        workload=Pictures(
            layers=3, heads=4, width=96, size=24, patch=4, count=36, data=available_source(data)
        ),
        attention=AttentionPlan.of(attention),
        optimizer=Optimizer(learning_rate=2e-3, warm_up=100, schedule="cosine", clip=1.0),
        steps=steps,
        batch=32,
        autocast="bf16",
        seed=seed,
        measure_every=DEFAULT_EVERY,
        preset="pictures",
    )


PRESETS: dict[str, Callable[..., RunConfig]] = {
    "seconds": seconds,
    "minutes": minutes,
    "capture": capture,
    "pictures": pictures,
    "gpt2": gpt2,
}
"""By the names that `halfulp train` takes."""
