"""Inputs that expose what goes wrong in a rotary embedding."""

from __future__ import annotations

import torch

from halfulp.operations.operation_data import Draw, Sizes, Tensors
from halfulp.operations.operation_data import OperationProbe as Probe
from halfulp.operations.random_tensors import normal, odd_sizes, outlier

INDEPENDENT = ("T", "H")


def _at(first: int, step: int) -> Draw:
    def draw(sizes: Sizes, g: torch.Generator) -> Tensors:
        return {
            "input": normal(g, *sizes.shape("T H D")),
            "positions": first + step * torch.arange(sizes["T"]),
        }

    return draw


def _restarted(sizes: Sizes, g: torch.Generator) -> Tensors:
    """Two packed sequences: positions start again."""
    x = _at(0, 1)(sizes, g)
    x["positions"] = x["positions"] % max(1, sizes["T"] // 2)
    return x


PROBES = (
    Probe(
        "first_positions", "errors that any input shows", "RoFormer, arXiv 2104.09864", _at(0, 1)
    ),
    Probe(
        "long_positions",
        "positions or angles in low precision",
        "aiter issue 4765, candle PR 3520",
        _at(3000, 37),
    ),
    Probe(
        "beyond_bf16",
        "positions above 256 that bf16 does not tell apart",
        "candle PR 3520",
        _at(257, 2),
    ),
    Probe(
        "interleaved",
        "the other layout of pairs",
        "GPT-J against GPT-NeoX",
        _at(0, 1),
        options={"interleaved": True},
    ),
    Probe(
        "interleaved_long",
        "the other layout of pairs, far away",
        "GPT-J against GPT-NeoX",
        _at(3000, 37),
        options={"interleaved": True},
    ),
    Probe(
        "large_base",
        "a base that is not read",
        "Llama 3, rope_theta of 500000",
        _at(2000, 11),
        options={"base": 500000.0},
    ),
    Probe(
        "many_heads",
        "heads past the last whole block",
        "ragged tiles",
        _at(5, 3),
        sizes={"T": 5, "H": 37},
    ),
    Probe("restarted", "positions taken from the place in memory", "packed sequences", _restarted),
    Probe(
        "outlier_feature",
        "a feature far larger than its partner",
        "Qwen's key bias",
        outlier(_at(5, 3), 1, 200.0),
    ),
    odd_sizes(_at(100, 3), D=36),
)
