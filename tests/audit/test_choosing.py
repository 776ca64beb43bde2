"""Less than the whole plan: what runs, in which order, and that the verdict says what did not."""

import json
import time

import pytest

from halfulp.audit import Shape, audit
from halfulp.audit.choosing import TELLING, Budget, budget, chosen, left_out
from halfulp.audit.planning import plan
from halfulp.audit.probes import probe_named
from halfulp.cli import main

SMALL = [Shape(1, 4, 64, 64, 8)]
TODO = plan("quick", "bfloat16")


def biased(query, key, value, *, is_causal=False, scale=None):
    return ((query.float() @ key.float().mT * scale).softmax(-1) @ value.float() * 1.05).to(
        query.dtype
    )


def test_the_most_telling_come_first_and_lengths_last():
    found = chosen(TODO, budget((), 20.0)).all_cases
    assert sorted(map(str, found)) == sorted(map(str, TODO.all_cases))
    assert found[0] == TODO.all_cases[0]  # the plain one, which tells the layout
    assert found[1].probe == TELLING[1]
    assert found[-len(TODO.lengths) :] == TODO.lengths
    assert all(name == "sizes" or probe_named(name) for name in TELLING)
    assert chosen(TODO, Budget()).all_cases == TODO.all_cases


def test_what_is_left_out_is_said():
    only = Budget(("gqa", "sizes"))
    part = chosen(TODO, only)
    assert {case.probe.partition("/")[0] for case in part.all_cases} == {"gqa", "sizes"}
    assert part.relations == ()
    (line,) = left_out(TODO, part, only, part.all_cases)
    assert line.startswith("only gqa, sizes asked for: ")
    late = Budget(until=time.perf_counter() - 1)
    (line,) = left_out(TODO, TODO, late, TODO.all_cases[:3])
    assert line.startswith(f"out of time after 3 of {len(TODO.all_cases)} cases, without ")
    assert left_out(TODO, TODO, Budget(), TODO.all_cases) == ()
    assert chosen(TODO, Budget(("relations",))).relations == TODO.relations


def test_a_part_is_never_sound_and_may_be_a_defect():
    part = audit("sdpa:math", only=["gaussian"], shapes=SMALL, explain=False)
    assert part.verdict == "incomplete"
    assert part.exit_code == 2
    assert "only gaussian asked for" in part.reason
    assert audit(biased, only=["gaussian"], shapes=SMALL, explain=False).verdict == "defect"
    late = audit("sdpa:math", seconds=1e-9, shapes=SMALL, explain=False)
    assert late.verdict == "incomplete"
    assert "out of time after 1 of " in late.reason
    assert late.cases[-1].reason == "not called, since the time was up"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"only": ["gausian"]}, "only='gausian': .*did you mean 'gaussian'"),
        ({"seconds": 0.0}, "seconds=0.0: accepted is a positive number"),
        ({"jobs": 0}, "jobs=0: accepted is an integer of at least 1"),
    ],
)
def test_what_is_no_part_is_told(wrong, said):
    with pytest.raises(ValueError, match=said):
        audit("sdpa:math", **wrong)


def test_the_list_runs_nothing(capsys):
    assert main(["audit", "nosuch.py:f", "--list", "--only", "gqa", "--json", "-"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["probe"] == "gqa"
    assert main(["audit", "sdpa", "--list", "--seconds", "5"]) == 0
    assert "deep_negative" in capsys.readouterr().out
