"""The GPU script on a CPU at a small size: it runs, ends on time, goes on, and its figures are
those of its runs.
"""

from __future__ import annotations

import json

import pytest
from benchmarks import gpu_lab


def test_it_goes_on_where_time_ended_and_ends_in_one_page(tmp_path, capsys) -> None:
    arguments = [
        "--out",
        str(tmp_path / "lab"),
        "--device",
        "cpu",
        "--small",
        "--only",
        "gpt2",
        "bytes",
    ]
    gpu_lab.main([*arguments, "--seconds", "0"])
    assert "not finished: gpt2, bytes-torch-flash, bytes-torch-fp32" in capsys.readouterr().out
    gpu_lab.main(arguments)
    assert "all runs are over" in capsys.readouterr().out
    found = json.loads((tmp_path / "lab" / "results.json").read_text())
    assert [(run["name"], run["status"], run["steps"]) for run in found["runs"]] == [
        ("gpt2", "done", 3),
        ("bytes-torch-flash", "done", 40),
        ("bytes-torch-fp32", "done", 40),
    ]
    last = (tmp_path / "lab" / "gpt2" / "metrics.jsonl").read_text().splitlines()[-1]
    assert found["runs"][0]["last"] == json.loads(last)
    assert "bytes-torch-flash" in (tmp_path / "lab" / "report.html").read_text()


def test_without_a_gpu_it_says_so(tmp_path, capsys) -> None:
    if gpu_lab.torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit):
        gpu_lab.main(["--out", str(tmp_path)])
    assert "there is no GPU here" in capsys.readouterr().err


def test_the_plan_is_paper_as_and_every_kernels() -> None:
    plan = list(gpu_lab.tasks("cuda", small=False))
    assert {t.config.attention.choice(0, 0) for t in plan if t.part == "seconds"} == set(
        gpu_lab.KERNELS
    )
    assert {t.config.steps for t in plan if t.part == "bytes"} == {1_000_000}
    (start,) = (t.config for t in plan if t.part == "gpt2")
    assert start.batch * start.workload.context == 524_288
    assert {t.config.device for t in plan} == {"cuda"}
