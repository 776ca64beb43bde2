"""Inputs that expose what goes wrong in an optimizer's step."""

from __future__ import annotations

import torch

from halfulp.operations.operation_data import OperationProbe as Probe
from halfulp.operations.operation_data import Sizes, Tensors
from halfulp.operations.random_tensors import normal, with_

INDEPENDENT = ("N",)


def _plain(sizes: Sizes, g: torch.Generator) -> Tensors:
    n = sizes["N"]
    grad = normal(g, n) * 0.01
    return {
        "param": normal(g, n) * 0.05,
        "grad": grad,
        "exp_avg": normal(g, n) * 0.005,
        "exp_avg_sq": (normal(g, n) * 0.01).square() + 1e-6,
    }


def _first(sizes: Sizes, g: torch.Generator) -> Tensors:
    """No step was taken yet: both moments are 0."""
    x = _plain(sizes, g)
    return x | {"exp_avg": x["exp_avg"] * 0, "exp_avg_sq": x["exp_avg_sq"] * 0}


_NEVER = "an update that is never applied; Kahan summation, arXiv 2010.06192"

PROBES = (
    Probe("plain", "errors that any input shows", "AdamW, arXiv 1711.05101", _plain),
    Probe(
        "small_updates",
        "updates below half an ulp of a bf16 weight",
        _NEVER,
        with_(_plain, param=lambda x: x.sign() * (1 + x.abs())),
        options={"lr": 1e-4, "weight_decay": 0.0, "step": 1000},
    ),
    Probe(
        "decay_alone",
        "weight decay that is never applied",
        'OneTrainer 996 ("no weight decay is applied")',
        with_(_plain, grad=lambda x: x * 0, exp_avg=lambda x: x * 0),
        options={"lr": 1e-2},
    ),
    Probe(
        "no_decay",
        "a weight decay of 0 taken for one that is not given",
        "FlagGems issue 4988",
        _plain,
        options={"weight_decay": 0.0, "lr": 1e-2},
    ),
    Probe(
        "long",
        "elements past the first chunk",
        "apex, multi_tensor_apply's chunks of 65536",
        _plain,
        sizes={"calls": 2, "N": 65579},
    ),
    Probe(
        "first_step",
        "a bias correction that counts from 0",
        "AdamW, arXiv 1711.05101, Algorithm 2",
        _first,
        options={"step": 1},
    ),
    Probe(
        "late",
        "a bias correction left on",
        "betas ** step underflows",
        _plain,
        options={"step": 50000},
    ),
    Probe(
        "tiny_gradients",
        "squares of gradients that underflow, eps misplaced",
        "torch-xpu-ops 4498",
        with_(
            _plain,
            grad=lambda x: x * 1e-4,
            exp_avg=lambda x: x * 1e-4,
            exp_avg_sq=lambda x: x * 1e-8,
        ),
        options={"eps": 1e-6},
    ),
    Probe(
        "steady",
        "a second moment that does not move in low precision",
        "1 − β₂ of 0.001 below half an ulp of bf16",
        with_(_plain, exp_avg_sq=lambda x: x * 0 + 1e-4, grad=lambda x: x.sign() * 0.0125),
    ),
    Probe(
        "other_betas",
        "constants that are not read",
        "betas of 0.9 and 0.95",
        _plain,
        options={"beta1": 0.8, "beta2": 0.95, "eps": 1e-5, "lr": 3e-3},
    ),
)
