"""The bench: ratios within rounds, no ratio that the spread hides, errors over the floor; times are planted."""

from __future__ import annotations

import json
import statistics

import pytest
import torch

from halfulp import cli
from halfulp.experiments import bench as module
from halfulp.experiments.bench import Setting, bench, is_clear

SMALL = Setting((1, 2, 24, 8), True)


def test_a_ratio_is_told_only_where_its_spread_is_smaller_than_the_difference() -> None:
    assert is_clear((1.9, 2.0, 2.1))
    assert is_clear((0.45, 0.5, 0.6))
    assert not is_clear((0.8, 1.1, 1.4))
    assert not is_clear((1.0, 1.0, 1.0001))
    assert not is_clear((1.0, 2.0, 4.0))


def test_errors_are_those_of_the_floor_for_the_floor_and_more_for_a_planted_fault(tmp_path) -> None:
    (tmp_path / "kernels.py").write_text(
        "import torch\nfrom halfulp import emulate\n"
        "def exact(query, key, value, *, is_causal, scale):\n"
        "    return emulate(query, key, value, is_causal=is_causal, scale=scale, recipe='BF16_FLOOR')\n"
        "def coarse(query, key, value, *, is_causal, scale):\n"
        "    return emulate(query, key, value, is_causal=is_causal, scale=scale, recipe='BF16_FLASH2[out=e8m4]')\n"
    )
    names = [f"{tmp_path / 'kernels.py'}:{name}" for name in ("exact", "coarse")]
    found = bench(names, [SMALL], rounds=3)
    by_name = {timing.kernel: timing.errors for timing in found.timings}
    assert by_name[names[0]] == pytest.approx(dict.fromkeys(("out", "dQ", "dK", "dV"), 1.0))
    assert by_name[names[1]]["out"] > 4
    assert by_name["sdpa"]["dV"] < 3


def test_ratios_are_taken_within_rounds() -> None:
    """A machine that is busy in every third round changes times, and no ratio."""
    spent = module._Spent(
        {"sdpa": [(2.0 * load, 2.0 * load) for load in (1, 5, 1, 9)], "twice": [(load, load) for load in (1, 5, 1, 9)]},
        [1.0, 5.0, 1.0, 9.0],
    )
    timing = module._timing("twice", SMALL, spent, {})
    assert timing.ratio == (2.0, 2.0, 2.0)
    assert timing.forward_ms[1] == 1e3 * statistics.median((1, 5, 1, 9))
    assert len(set(timing.gemm_share)) == 1
    assert timing.gemm_share[0] == pytest.approx(SMALL.work / 2 / (2 * 2048**3))


def test_a_kernel_without_a_backward_pass_is_held_against_the_forward_pass_alone() -> None:
    spent = module._Spent({"sdpa": [(2.0, 9.0)] * 3, "forward": [(1.0, None)] * 3}, [1.0] * 3)
    timing = module._timing("forward", SMALL, spent, {})
    assert (timing.ratio, timing.backward_ms) == ((2.0, 2.0, 2.0), None)
    assert timing.gemm_share[1] == pytest.approx(SMALL.work * 4 / 14 / (2 * 2048**3))


def test_a_ratio_that_the_spread_hides_is_not_printed() -> None:
    spent = module._Spent({"sdpa": [(1.0, 1.0)] * 3, "noisy": [(0.5, 0.5), (1.0, 1.0), (3.0, 3.0)]}, [1.0] * 3)
    timing = module._timing("noisy", SMALL, spent, {})
    assert timing.ratio is None
    assert module._cells(timing)[2] == "not distinguishable"


def test_every_round_has_another_order_and_every_kernel_once(monkeypatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(module, "_time", lambda run, like: seen.append(run) or (1.0, 1.0))
    module._interleaved({"a": "a", "b": "b", "c": "c"}, torch.zeros(1), 6, lambda fraction: None)
    rounds = [tuple(seen[i : i + 3]) for i in range(0, len(seen), 3)]
    assert all(sorted(turn) == ["a", "b", "c"] for turn in rounds)
    assert len(set(rounds)) > 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rounds": 2}, "rounds=2"),
        ({"dtype": torch.float64}, "dtype=torch.float64"),
        ({"kernels": ["nothing"]}, "target='nothing'"),
        ({"kernels": ["flash_attn"]}, "kernel='flash_attn'"),
    ],
)
def test_what_cannot_be_timed_is_said_before(options, said) -> None:
    with pytest.raises(ValueError, match=r".") as refused:
        bench(settings=[SMALL], **options)
    assert said in str(refused.value)


def test_the_command(capsys, tmp_path) -> None:
    arguments = ["bench", "sdpa:math", "halfulp:stock", "--shapes", "1,2,16,8,causal", "--rounds", "3"]
    assert cli.main([*arguments, "--json", "-"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert [t["kernel"] for t in plain["timings"]] == ["sdpa", "sdpa:math", "halfulp:stock"]
    assert {t["is_causal"] for t in plain["timings"]} == {True}
    assert cli.main([*arguments, "--json", str(tmp_path / "bench.json"), "--svg", str(tmp_path / "bench.svg")]) == 0
    said = capsys.readouterr().out
    assert "halfulp:stock" in said
    assert json.loads((tmp_path / "bench.json").read_text())["rounds"] == 3


@pytest.mark.parametrize("shape", ["1,2,3", "1,2,3,4,sideways", "1,2,x,4", "0,2,3,4"])
def test_a_shape_that_is_none_is_refused(capsys, shape) -> None:
    assert cli.main(["bench", "--shapes", shape]) == 2
    assert "accepted is B,H,N,D" in capsys.readouterr().err
