"""The GPU script where there is no GPU: it refuses cleanly, and its pieces run on a CPU at sizes
that say nothing.
"""

from __future__ import annotations

import json

import pytest
import torch
from benchmarks import gpu_attention


def test_without_a_gpu_it_says_so(tmp_path, capsys) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit):
        gpu_attention.main(["--out", str(tmp_path / "out")])
    assert "there is no GPU here" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        gpu_attention.main(["--tune", str(tmp_path / "table.json")])
    assert not list(tmp_path.iterdir())


def test_help_names_every_part(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu_attention.main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert all(f"- {part}:" in text for part in gpu_attention.PARTS)


def test_it_goes_on_where_time_ended(tmp_path, capsys) -> None:
    arguments = ["--out", str(tmp_path), "--device", "cpu", "--small"]
    gpu_attention.main([*arguments, "--seconds", "0"])
    assert "not measured: golden/halfulp:halfulp N=128" in capsys.readouterr().out
    gpu_attention.main([*arguments, "--only", "golden", "speed"])
    assert "everything is measured" in capsys.readouterr().out
    found = json.loads((tmp_path / "results.json").read_text())["figures"]
    ours, stock = found["golden/halfulp:halfulp N=128"], found["golden/halfulp:stock N=128"]
    assert ours["grad_query"] < 3e-3 < stock["grad_query"]
    rates = found["speed/d=64 N=128 causal"]["halfulp:halfulp"]["backward"]
    assert 0 < rates["least"] <= rates["median"] <= rates["most"]
    assert rates["rounds"] == 2
    file = tmp_path / "measured" / "golden-halfulp-halfulp_N=128.json"
    file.write_text(json.dumps({"grad_query": 7.0}))
    gpu_attention.main([*arguments, "--only", "golden"])
    assert json.loads((tmp_path / "results.json").read_text())["figures"][
        "golden/halfulp:halfulp N=128"
    ] == {"grad_query": 7.0}


def test_the_plan_on_a_gpu_is_whole() -> None:
    plan = list(gpu_attention.units("cuda", small=False))
    names = {f"{unit.part}/{unit.name}" for unit in plan}
    assert len(names) == len(plan)
    for dim in (64, 128):
        for length in (1024, 2048, 4096, 8192, 16384):
            assert {f"speed/d={dim} N={length}", f"speed/d={dim} N={length} causal"} <= names
    for name in (*gpu_attention.STOCK, "halfulp:halfulp"):
        assert {f"audit/{name}", f"golden/{name} N=16384"} <= names
    assert "weights/bfloat16 causal" in names


def test_an_unknown_or_absent_kernel_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="sdpa:cudnn"):
        gpu_attention.kernel("sdpa:cudnn", "cpu")
    found = gpu_attention.speeds(["sdpa:cudnn", "sdpa:math"], 16, 16, False, "cpu", small=True)
    assert "refused" in found["sdpa:cudnn"]
    assert found["sdpa:math"]["forward"]["median"] > 0


def test_operations_are_counted_as_flash_attention_does() -> None:
    assert gpu_attention.operations(2, 3, 5, 7, causal=False) == 4 * 2 * 3 * 5 * 5 * 7
    assert gpu_attention.operations(2, 3, 5, 7, causal=True) == 2 * 2 * 3 * 5 * 5 * 7


def test_no_ratio_within_the_spread() -> None:
    def one(median: float, half: float) -> dict[str, dict[str, float]]:
        rates = {"median": median, "least": median - half, "most": median + half}
        return {"forward": rates, "backward": rates}

    kernels = {
        "halfulp:stock": one(100.0, 0.1),
        "sdpa:flash": one(120.0, 0.1),
        "sdpa:cudnn": one(125.0, 0.1),
    }
    cells = gpu_attention._speed_cells(one(101.0, 2.0), kernels)
    assert len(cells) == 6
    assert cells[1:3] == ["within the spread", "0.808"]
    assert gpu_attention._speed_cells(one(97.0, 0.1), kernels)[4] == "0.970"
    # as fa3-fwd
    alone = {"forward": one(200.0, 0.1)["forward"], "refused": {"backward": "no backward pass"}}
    assert gpu_attention._speed_cells(alone, kernels)[1:] == [
        "2.000",
        "1.600",
        "no backward pass",
        "",
        "",
    ]


def test_a_forward_pass_alone_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward_only(query, key, value, *, is_causal, scale):
        return query.detach() * 2

    monkeypatch.setattr(gpu_attention, "prepared", lambda *arguments: forward_only)
    found = gpu_attention.speeds(["flash_attn:3"], 16, 16, False, "cpu", small=True)["flash_attn:3"]
    assert found["forward"]["median"] > 0
    assert "grad" in found["refused"]["backward"]
    assert "backward" not in found


def test_a_dry_run_plans_everything(capsys) -> None:
    pytest.importorskip("triton")
    gpu_attention.main(["--dry-run"])
    plan = json.loads(capsys.readouterr().out)
    assert "audit/flash_attn:4" in plan["units"]
    assert "is not installed" in plan["missing"]["flash_attn:3"]
    assert len(plan["launches"]) == 5 * 4 * 20  # chips, recipes, cases
    launched = plan["launches"]["sm_90 exact_delta d=128 N=16384 causal"]
    assert set(launched) == {"forward", "rows", "delta", "query", "key"}
    assert launched["forward"][0] == 16384 // launched["forward"][1] * 16


def test_tiles_of_ones_own_are_measured(tmp_path, monkeypatch) -> None:
    used = []
    monkeypatch.setattr("halfulp.kernels.triton_configs.use", used.append)
    arguments = ["--out", str(tmp_path / "out"), "--device", "cpu", "--small", "--seconds", "0"]
    gpu_attention.main([*arguments, "--tiles", str(tmp_path / "table.json")])
    assert used == [tmp_path / "table.json"]


def test_the_table_of_compiled_kernels_goes_on(tmp_path, monkeypatch) -> None:
    triton_compile = pytest.importorskip("benchmarks.triton_compile")
    asked = []
    monkeypatch.setattr(
        triton_compile, "rows", lambda: [("sm_90", 64, "key", recipe, False, "") for recipe in "ab"]
    )
    monkeypatch.setattr(triton_compile, "row", lambda *row: asked.append(row) or {"spills": 0})
    file = tmp_path / "table.json"
    gpu_attention.main(["--compile", str(file)])
    assert len(asked) == 2
    gpu_attention.main(["--compile", str(file)])
    assert len(asked) == 2
    assert set(json.loads(file.read_text())) == {"triton", "sm_90 64 key a", "sm_90 64 key b"}
    assert len(file.read_text().splitlines()) == 5
