"""The bench: ratios within rounds, none that the spread or chance hides, errors over the floor;
times are planted.
"""

from __future__ import annotations

import json
import math
import random
import re
import statistics

import pytest
import torch

from halfulp import cli
from halfulp.experiments import bench as module
from halfulp.experiments.bench import Setting, bench
from halfulp.experiments.bench_result import BenchResult, Timing, is_clear, short_name

SMALL = Setting((1, 2, 24, 8), True)
LOADS = (1, 5, 1, 9, 1, 2)


def test_a_ratio_is_told_only_where_its_spread_is_smaller_than_the_difference() -> None:
    assert is_clear([1.9, 1.9, 2.0, 2.0, 2.1, 2.1])
    assert is_clear([0.45, 0.47, 0.5, 0.5, 0.55, 0.6])
    assert not is_clear([1.3, 1.4, 1.8, 2.4, 3.9, 4.0])
    assert not is_clear([1.0, 1.0, 1.0, 1.0001, 1.0, 1.0])
    assert not is_clear([2.0] * 5), "five fair coins agree in 6 % of all cases"
    assert is_clear([2.0] * 6)
    assert not is_clear([1.1, 1.1, 1.1, 1.1, 0.99, 0.98]), "two of six rounds disagree"


def test_a_ratio_and_its_inverse_are_told_or_hidden_together() -> None:
    ratios = [0.01, 0.012, 0.013, 0.014, 0.08, 0.09]
    assert is_clear(ratios) == is_clear([1 / ratio for ratio in ratios])


def test_a_kernel_is_seldom_clearly_faster_than_itself() -> None:
    draw = random.Random(0)
    rounds = (
        [math.exp(draw.gauss(0, 0.1) - draw.gauss(0, 0.1)) for _ in range(9)] for _ in range(2000)
    )
    assert sum(map(is_clear, rounds)) < 0.03 * 2000


@pytest.mark.parametrize("setting", [SMALL, Setting((1, 4, 24, 8), False, 2, 40)], ids=str)
def test_errors_are_those_of_the_floor_for_the_floor_and_more_for_a_planted_fault(
    tmp_path, setting
) -> None:
    (tmp_path / "kernels.py").write_text(
        "import torch\nfrom halfulp import emulate\ndef exact(query, key, value, *, is_causal,"
        " scale, enable_gqa=False):\n    return emulate(query, key, value, is_causal=is_causal,"
        " scale=scale, enable_gqa=enable_gqa, recipe='BF16_FLOOR')\ndef coarse(query, key, value,"
        " *, is_causal, scale, enable_gqa=False):\n    return emulate(query, key, value,"
        " is_causal=is_causal, scale=scale, enable_gqa=enable_gqa,"
        " recipe='BF16_FLASH2[out=e8m4]')\n"
    )
    names = [f"{tmp_path / 'kernels.py'}:{name}" for name in ("exact", "coarse")]
    found = bench(names, [setting], rounds=6)
    by_name = {timing.kernel: timing.errors for timing in found.timings}
    assert by_name[names[0]] == pytest.approx(dict.fromkeys(("out", "dQ", "dK", "dV"), 1.0))
    assert by_name[names[1]]["out"] > 4
    assert by_name["sdpa"]["dV"] < 3


def test_ratios_are_taken_within_rounds() -> None:
    """A machine that is busy in every third round changes times, and no ratio."""
    spent = module._Spent(
        {
            "sdpa": [(2.0 * load, 2.0 * load) for load in LOADS],
            "twice": [(load, load) for load in LOADS],
        },
        [float(load) for load in LOADS],
    )
    timing = module._timing("twice", SMALL, spent, {})
    assert timing.ratio == (2.0, 2.0, 2.0)
    assert timing.forward_ms[1] == 1e3 * statistics.median(LOADS)
    assert len(set(timing.gemm_share)) == 1
    assert timing.gemm_share[0] == pytest.approx(SMALL.work / 2 / (2 * 2048**3))


def test_a_kernel_without_a_backward_pass_is_held_against_the_forward_pass_alone() -> None:
    spent = module._Spent({"sdpa": [(2.0, 9.0)] * 6, "forward": [(1.0, None)] * 6}, [1.0] * 6)
    timing = module._timing("forward", SMALL, spent, {})
    assert (timing.ratio, timing.backward_ms) == ((2.0, 2.0, 2.0), None)
    assert timing.gemm_share[1] == pytest.approx(SMALL.work * 4 / 14 / (2 * 2048**3))


def test_a_ratio_that_the_spread_hides_is_not_printed() -> None:
    noisy = [(x, x) for x in (0.5, 1.0, 3.0, 0.4, 1.1, 2.0)]
    spent = module._Spent({"sdpa": [(1.0, 1.0)] * 6, "noisy": noisy}, [1.0] * 6)
    found = result(*(module._timing(name, SMALL, spent, {}) for name in ("sdpa", "noisy")))
    assert [timing.ratio for timing in found.timings] == [None, None]
    (table,) = found.tables
    assert [row[table.columns.index("× sdpa")] for row in table.rows] == ["1", "unclear"]
    speed, _ = found.as_dict()["figures"]
    assert speed["series"][0]["y"] == [1.0, None]


def result(*timings: Timing) -> BenchResult:
    return BenchResult(timings, {}, "bfloat16", 6, 1, (1.0, 1.0, 1.0), "halfulp bench")


def test_halfulp_is_held_against_every_kernel() -> None:
    """Seconds a round: sdpa 4, halfulp 1, and a kernel without a backward pass 3 where halfulp's
    forward takes 0.5.
    """
    spent = module._Spent(
        {"sdpa": [(2.0, 2.0)] * 6, "halfulp": [(0.5, 0.5)] * 6, "forward": [(3.0, None)] * 6},
        [1.0] * 6,
    )
    timings = [module._timing(name, SMALL, spent, {}) for name in spent.times]
    ratios = {
        t.kernel: (t.ratio and t.ratio[1], t.halfulp_ratio and t.halfulp_ratio[1]) for t in timings
    }
    assert ratios == {
        "sdpa": (None, 4.0),
        "halfulp": (4.0, None),
        "forward": (pytest.approx(2 / 3), 6.0),
    }
    (table,) = result(*timings).tables
    assert [row[table.columns.index("halfulp ×")] for row in table.rows] == [
        "4.00 ± 0.00",
        "1",
        "6.00 ± 0.00",
    ]
    (table,) = result(timings[0], timings[2]).tables
    assert "halfulp ×" not in table.columns


def test_the_worst_gradient_stands_in_the_table_and_in_the_picture() -> None:
    errors = {"out": 1.0, "dQ": 1.1, "dK": 1.7, "dV": 1.2}
    spent = module._Spent({"sdpa": [(1.0, 1.0)] * 6}, [1.0] * 6)
    found = result(module._timing("sdpa", SMALL, spent, errors))
    (table,) = found.tables
    assert dict(zip(table.columns, table.rows[0], strict=True))["grad"] == "1.70"
    assert found.figures[1].series[0].y == (1.7,)


def test_a_size_at_which_nothing_is_rounded_has_no_error() -> None:
    (timing,) = bench(["sdpa"], [Setting((1, 1, 1, 1))], rounds=6).timings
    assert "dQ" not in timing.errors


def test_names_of_files_are_short() -> None:
    assert short_name("some/where/kernel.py:attention") == "kernel.py:attention"
    assert short_name("a" * 40) == "…" + "a" * 23


def test_every_round_has_another_order_and_every_kernel_once(monkeypatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(module, "_time", lambda run, like: seen.append(run) or (1.0, 1.0))
    module._interleaved({"a": "a", "b": "b", "c": "c"}, torch.zeros(1), 6, lambda *_: None, "")
    rounds = [tuple(seen[i : i + 3]) for i in range(0, len(seen), 3)]
    assert all(sorted(turn) == ["a", "b", "c"] for turn in rounds)
    assert len(set(rounds)) > 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rounds": 5}, "rounds=5"),
        ({"device": "mars"}, "device='mars'"),
        ({"settings": [Setting((1, 1, 2**34, 64))]}, "does not fit into memory"),
        ({"dtype": torch.float64}, "dtype=torch.float64"),
        ({"kernels": ["nothing"]}, "kernel='nothing'"),
        ({"kernels": ["flash_attn"]}, "kernel='flash_attn'"),
    ],
)
def test_what_cannot_be_timed_is_said_before(options, said) -> None:
    with pytest.raises(ValueError, match=r".") as refused:
        bench(**({"settings": [SMALL]} | options))
    assert said in str(refused.value)


def test_the_command(capsys, tmp_path) -> None:
    arguments = [
        "bench",
        "sdpa:math",
        "halfulp:stock",
        "--shapes",
        "1,2,16,8,causal",
        "--rounds",
        "6",
    ]
    assert cli.main([*arguments, "--json", "-"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert [t["kernel"] for t in plain["timings"]] == ["sdpa", "sdpa:math", "halfulp:stock"]
    assert {t["is_causal"] for t in plain["timings"]} == {True}
    assert (
        cli.main(
            [
                *arguments,
                "--json",
                str(tmp_path / "bench.json"),
                "--svg",
                str(tmp_path / "bench.svg"),
            ]
        )
        == 0
    )
    said = capsys.readouterr().out
    assert "halfulp:stock" in said
    assert json.loads((tmp_path / "bench.json").read_text())["rounds"] == 6
    assert said.count("Interleaved rounds") == 1
    picture = (tmp_path / "bench.svg").read_text(encoding="utf-8")
    # in both panels; the third, where there is one, is the description for who cannot see them
    said = re.sub(r"<(title|desc)\b.*?</\1>", "", picture, flags=re.DOTALL)
    assert said.count(">halfulp:stock<") == 2, "speed and error"


def test_a_named_kernel_that_fails_is_an_error(capsys, tmp_path) -> None:
    (tmp_path / "broken.py").write_text(
        "def attention(query, key, value, *, is_causal, scale):\n    raise OSError('no')\n"
    )
    assert (
        cli.main(
            ["bench", f"{tmp_path / 'broken.py'}:attention", "--shapes", "1,1,8,8", "--rounds", "6"]
        )
        == 2
    )
    assert "not timed, (1, 1, 8, 8): no" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("shape", ["1,2,3", "1,2,3,4,sideways", "1,2,x,4", "0,2,3,4"])
def test_a_shape_that_is_none_is_refused(capsys, shape) -> None:
    assert cli.main(["bench", "--shapes", shape]) == 2
    assert "accepted is B,H,N,D" in capsys.readouterr().err
