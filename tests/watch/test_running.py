"""What is kept between measurements, against the same figures kept whole."""

import numpy as np
import pytest
import torch

from halfulp.watch.curvature import t_value
from halfulp.watch.running import WINDOW, Running


def run(samples: torch.Tensor) -> Running:
    running = Running.start(tuple(samples.shape[1:]))
    for sample in samples:
        running.add(sample)
    return running


def test_sums_and_signs_are_those_of_the_whole_record():
    samples = torch.randn(50, 2, 3, generator=torch.Generator().manual_seed(0)).double() + 0.3
    samples[:, 0, 0] = 0
    running = run(samples)
    torch.testing.assert_close(running.total, samples.sum(0))
    assert torch.equal(running.recent, samples[-WINDOW:])
    assert torch.equal(running.positive, (samples > 0).sum(0))
    assert torch.equal(running.negative, (samples < 0).sum(0))


def test_sign_test_is_the_exact_binomial_one():
    from scipy.stats import binomtest

    for positive, negative in ((9, 1), (1, 9), (5, 5), (300, 200), (40, 0), (0, 1)):
        signs = torch.tensor([1.0] * positive + [-1.0] * negative + [0.0] * 3)
        expected = binomtest(positive, positive + negative).pvalue
        assert float(run(signs[:, None]).sign_p) == pytest.approx(expected, rel=1e-9)
    assert run(torch.zeros(4, 1)).sign_p == 1


def test_t_over_entries_is_students():
    from scipy.stats import ttest_1samp

    samples = torch.randn(12, 4, generator=torch.Generator().manual_seed(1)).double() + 0.5
    np.testing.assert_allclose(t_value(samples), ttest_1samp(samples.numpy(), 0).statistic)
    assert t_value(samples[:1]).isnan().all()


def test_t_over_steps_is_not_fooled_by_steps_that_repeat_each_other():
    """4000 series without a mean: how often |t| > 3 with independent steps, and with correlated
    ones.
    """
    noise = torch.randn(WINDOW + 30, 4000, generator=torch.Generator().manual_seed(2)).double()
    walk = noise.clone()
    for step in range(1, len(walk)):
        walk[step] += 0.6 * walk[step - 1]
    assert (run(noise).t.abs() > 3).double().mean() < 0.01
    assert (run(walk).t.abs() > 3).double().mean() < 0.06
    naive = t_value(walk[-WINDOW:])
    assert (naive.abs() > 3).double().mean() > 0.12, "without the correction several times as often"
    torch.testing.assert_close(
        run(noise + 3).t.mean(), t_value(noise[-WINDOW:] + 3).mean(), rtol=0.2, atol=0
    )


def test_state_goes_round():
    samples = torch.randn(9, 2, generator=torch.Generator().manual_seed(3)).double()
    half = run(samples[:4])
    again = Running.of("x", half.tensors("x"))
    for sample in samples[4:]:
        again.add(sample)
    whole = run(samples)
    assert all(
        torch.equal(a, b) for a, b in zip(vars(again).values(), vars(whole).values(), strict=True)
    )
    assert again.t.isfinite().all()
    assert half.count == 4, "the state is a copy"
