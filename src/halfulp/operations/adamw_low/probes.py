"""Inputs that expose what goes wrong where an optimizer's weights have 16 bits."""

from __future__ import annotations

import torch

from halfulp.operations.operation_data import OperationProbe as Probe
from halfulp.operations.operation_data import Sizes, Tensors
from halfulp.operations.random_tensors import normal, with_

INDEPENDENT = ("R",)


def _plain(sizes: Sizes, g: torch.Generator) -> Tensors:
    s, shape = sizes["S"], sizes.shape("R C")
    return {
        "param": normal(g, *shape) * 0.05,
        "grads": normal(g, s, *shape) * 0.01,
        "exp_avg": normal(g, *shape) * 0.005,
        "exp_avg_sq": (normal(g, *shape) * 0.01).square() + 1e-6,
    }


def _steady(sizes: Sizes, g: torch.Generator) -> Tensors:
    """Gradients that stay as they are, of weights between 1 and 2, whose bf16 ulp is 2⁻⁷."""
    s, shape = sizes["S"], sizes.shape("R C")
    grad = normal(g, *shape).sign() * 0.01 * (0.5 + torch.rand(shape, generator=g))
    return {
        "param": normal(g, *shape).sign() * (1.1 + 0.8 * torch.rand(shape, generator=g)),
        "grads": grad.expand(s, *shape).clone(),
        "exp_avg": grad,
        "exp_avg_sq": torch.full(shape, 1e-4),
    }


def _one_way(sizes: Sizes, g: torch.Generator) -> Tensors:
    """The same, all weights and gradients positive."""
    return {name: x.abs() for name, x in _steady(sizes, g).items()}


_NEVER = "an update that is never applied; Kahan summation, arXiv 2010.06192"
_SEED = "Primus-Turbo PR 365 (a zero seed defeats stochastic rounding)"
_LATE = {"step": 50_000}  # so that moments and their corrections stand still

PROBES = (
    Probe("plain", "errors that any input shows", "AdamW, arXiv 1711.05101", _plain),
    Probe(
        "quarter_ulp",
        "updates below half an ulp, never applied",
        _NEVER,
        _steady,
        # at most 1.5 quarters of an ulp a step, so rounding to nearest gives the old weight back
        options={"lr": 2.0**-9, **_LATE},
    ),
    Probe(
        "tenth_ulp",
        "random numbers of one seed in every step",
        _SEED,
        _steady,
        options={"lr": 0.1 * 2.0**-7, **_LATE},
    ),
    Probe(
        "one_way",
        "random numbers that parameters share, or of too few bits",
        _SEED,
        _one_way,
        options={"lr": 0.1 * 2.0**-7, **_LATE},
        sizes={"calls": 32, "R": 64, "C": 64},  # one number for all is one sample a call
    ),
    Probe(
        "decay_alone",
        "weight decay that is never applied",
        'OneTrainer 996 ("no weight decay is applied")',
        with_(_steady, grads=lambda x: x * 0, exp_avg=lambda x: x * 0),
        options={"lr": 1e-2, "weight_decay": 0.1},
    ),
    Probe(
        "first_steps",
        "a bias correction that counts from 0",
        "AdamW, arXiv 1711.05101, Algorithm 2",
        with_(_plain, exp_avg=lambda x: x * 0, exp_avg_sq=lambda x: x * 0),
        options={"step": 1},
    ),
    Probe(
        "moments",
        "moments that do not move in low precision",
        "1 − β₂ of 0.001 below half an ulp of bf16",
        with_(_plain, exp_avg_sq=lambda x: x * 0 + 1e-4, grads=lambda x: x.sign() * 0.0125),
    ),
    Probe(
        "other_constants",
        "constants that are not read",
        "betas of 0.9 and 0.95",
        _plain,
        options={"beta1": 0.8, "beta2": 0.95, "eps": 1e-4, "weight_decay": 0.1},
    ),
)
