"""The door to the Triton kernels where there is no GPU: what it refuses, what it imports, which
tiles it would take.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from halfulp.kernels import triton_attention as door
from halfulp.kernels.triton_configs import KINDS, Config, config_for, shipped_table, use
from tests.kernels.asked import Options

X = torch.zeros(1, 4, 8, 16, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"recipe": "paper"}, "none of halfulp, stock"),
        ({"scale": 0.0}, "not positive"),
        ({"scale": -1.0}, "positive"),
        ({"scale": float("inf")}, "finite"),
        ({"attn_mask": X[..., 0]}, "does not broadcast"),
        ({"attn_mask": X[:, :2, :, :8]}, "does not broadcast"),
        ({"attn_mask": X[0, 0, 0].int()}, "dtype torch.int32"),
        ({"attn_mask": X.to("meta")}, "attn_mask on meta"),
        ({"softcap": -1.0}, "softcap -1.0"),
        ({"sinks": X[0, :3, 0, 0]}, "for 4 heads"),
        ({"sinks": X[0, :, 0, 0].to("meta")}, "sinks on meta"),
        ({"dropout_p": 1.5}, "1.5 is not between"),
    ],
)
def test_options_that_the_kernels_lack_are_named(changes: dict, reason: str) -> None:
    found = door.supports(*replace(Options(), **changes).of(X, X, X))
    assert found is not None
    assert reason in found
    with pytest.raises(ValueError, match="not for the Triton kernels"):
        door.forward(*replace(Options(), **changes).of(X, X, X))


@pytest.mark.parametrize(
    ("query", "key", "reason"),
    [
        (X.double(), X.double(), "float64"),
        (X, X.half(), "not query's"),
        (X[:, :3], X[:, :2], "do not divide"),
        (X, X[:, :, :0], "no key"),
        (X.expand(1, 4, 8, 16).repeat(1, 1, 1, 17), X.repeat(1, 1, 1, 17), "above 256"),
    ],
)
def test_operands_that_the_kernels_lack_are_named(
    query: torch.Tensor, key: torch.Tensor, reason: str
) -> None:
    found = door.supports(*Options().of(query, key, key))
    assert found is not None
    assert reason in found


def test_cpu_tensors_are_refused_without_the_interpreter() -> None:
    assert door.supports(*Options().of(X, X, X)) == "tensors on cpu: the Triton kernels run on GPUs"
    with pytest.raises(ValueError, match="run on GPUs"):
        door.backward(*Options().of(X, X, X), None, X, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("3.4.0", "triton 3.4.0 is older than 3.5"),
        ("2.1.0", "triton 2.1.0 is older than 3.5"),
        ("3.5.0", None),
        ("3.10.1+git1234", None),
        ("4.0.0a1", None),
    ],
)
def test_a_triton_that_cannot_compile_them_is_named(
    version: str, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pytest.importorskip("triton"), "__version__", version)
    assert door._unsupported_triton() == reason


def test_triton_is_imported_for_gpus_alone() -> None:
    code = """
import json, sys, torch
before = set(sys.modules)
from halfulp.calls import Call
from halfulp.kernels import triton_attention as door
x = torch.zeros(1, 1, 4, 16, dtype=torch.bfloat16)
door.supports(Call(x, x, x), "halfulp")
print(json.dumps([name for name in set(sys.modules) - before if name.split(".")[0] == "triton"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_no_kernel_adds_by_atomics() -> None:
    """Their order is the chip's own, so that a second run would have other bits."""
    files = sorted(Path(door.__file__).parent.glob("triton_*.py"))
    assert len(files) >= 8
    assert not [file.name for file in files if "tl.atomic" in file.read_text(encoding="utf-8")]


def test_every_chip_has_tiles() -> None:
    for capability in (0, 80, 86, 89, 90, 100, 103, 120, 121):
        for dim in (16, 64, 128, 256):
            for kind in KINDS:
                config = config_for(kind, capability, dim, causal=False)
                assert config.block_m * config.block_n >= 32 * 32
                # no row of its own is shipped
                assert config == config_for(kind, capability, dim, causal=True)
    assert config_for("forward", 89, 64, False) == config_for("forward", 80, 64, False)
    # a third of the memory
    assert config_for("forward", 120, 128, False) != config_for("forward", 100, 128, False)
    assert config_for("key", 90, 32, False) == config_for("key", 90, 64, False)
    assert config_for("key", 90, 64, False, itemsize=4) == Config(32, 32, 4, 1)
    with pytest.raises(ValueError, match="accepted are 'forward', 'query', 'key'"):
        config_for("backward", 90, 64, False)


def test_calls_with_options_take_tiles_of_their_own() -> None:
    assert config_for("forward", 90, 64, False, options=2) != config_for("forward", 90, 64, False)
    assert config_for("forward", 90, 64, True, options=3) == config_for(
        "forward", 90, 64, False, options=2
    )
    assert config_for("forward", 80, 128, False, options=1) == config_for(
        "forward", 80, 128, False, options=2
    )
    assert config_for("key", 90, 64, False, options=1) != config_for(
        "key", 90, 64, False, options=2
    )
    assert config_for("key", 90, 64, False, itemsize=4, options=1) == Config(32, 32, 4, 1)


def test_a_table_of_ones_own_is_used(tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    table = json.loads(json.dumps(shipped_table()))
    table["90"]["64"]["key"] = {"block_m": 16, "block_n": 16, "warps": 1, "stages": 1}
    file.write_text(json.dumps(table))
    before = config_for("key", 90, 64, False)
    try:
        use(file)
        assert config_for("key", 90, 64, False) == Config(16, 16, 1, 1)
        for wrong in ("{", '{"90": {"64": {}}}', '{"90": 3}', '{"ninety": {}}'):
            file.write_text(wrong)
            with pytest.raises(ValueError, match="no table of tile sizes"):
                use(file)
        assert config_for("key", 90, 64, False) == Config(16, 16, 1, 1)
    finally:
        use(None)
    assert config_for("key", 90, 64, False) == before


def test_a_row_for_causal_calls_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    table = json.loads(json.dumps(shipped_table()))
    table["90"]["64"]["key causal"] = {
        "block_m": 16,
        "block_n": 16,
        "warps": 1,
        "stages": 1,
        "descriptors": True,
    }
    monkeypatch.setattr("halfulp.kernels.triton_configs.shipped_table", lambda: table)
    assert config_for("key", 90, 64, True) == Config(16, 16, 1, 1, True)
    assert config_for("key", 90, 64, False) != Config(16, 16, 1, 1, True)
