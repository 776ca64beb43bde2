"""What is kept between two calls is what was measured, by the same code, or it is nothing."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from halfulp.cli.entry import main
from halfulp.experiments import failure
from halfulp.experiments.drawing import Drawn
from halfulp.papers import constructed_run, runs_a, spike_run
from halfulp.papers.claim import Lab
from halfulp.papers.claims import b_training
from halfulp.papers.ledger import CLAIMS, run_claims
from halfulp.recipes import BF16_FLASH2
from halfulp.runs import cache, keeping
from halfulp.runs.keeping import now_keeping, unfinished_folder
from halfulp.runs.parallel import run_jobs
from halfulp.runs.values import decoded, encoded


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@dataclass(frozen=True)
class Asked:
    number: int
    log: str


@dataclass(frozen=True)
class Answer:
    square: int
    x: Tensor


def work(job: Asked) -> Answer:
    """Notes that it ran."""
    with Path(job.log).open("a") as file:
        file.write(f"{job.number}\n")
    return Answer(job.number**2, torch.full((2, 3), float(job.number)).mT)


def nothing(job: Asked) -> None:
    work(job)


def writes(job: tuple[Asked, Path]) -> Answer:
    return work(job[0])


class Bench:
    """Four jobs, and which of them have run."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "log"
        self.jobs = [Asked(number, str(self.log)) for number in range(4)]

    def call(self, function=work, jobs=None, **options) -> list[str]:
        """Numbers of the jobs that one call has measured."""
        self.log.write_text("")
        with keeping.keeping(**options):
            found = run_jobs(function, self.jobs if jobs is None else jobs, workers=1)
        if function is work:
            assert [one.square for one in found] == [one.number**2 for one in jobs or self.jobs]
            assert all(torch.equal(x.x, torch.full((3, 2), math.sqrt(x.square))) for x in found)
        return sorted(self.log.read_text().split())


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


ALL = ["0", "1", "2", "3"]


def test_jobs_are_measured_once_by_the_same_code_with_the_same_settings(bench, monkeypatch):
    assert bench.call() == ALL
    assert bench.call() == []
    assert bench.call(jobs=[*bench.jobs[:2], Asked(7, str(bench.log))]) == ["7"]
    assert bench.call(fresh=True) == ALL
    assert bench.call(backend="dask:here:1") == ALL, "a cluster is another machine"
    assert bench.call(backend="dask:there:2") == []
    monkeypatch.setenv(cache.VARIABLE, "off")
    assert bench.call() == ALL
    monkeypatch.undo()
    for name, other in (
        ("source_digest", lambda: "others"),
        ("describe_versions", lambda: {"torch": "3"}),
        ("bits_of_machine", lambda: ("another",)),
        ("bits_of_process", lambda: (torch.float64,)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(keeping, name, other)
            assert bench.call() == ALL, name
    bench.log.write_text("")
    run_jobs(work, bench.jobs, workers=1)
    assert sorted(bench.log.read_text().split()) == ALL, "nothing is taken outside of `keeping`"


def test_torn_and_foreign_files_are_measured_again(bench, folder):
    assert bench.call() == ALL
    files = sorted(folder.rglob("*.safetensors"))
    assert len(files) == 4
    files[0].write_bytes(files[0].read_bytes()[:-3])
    with keeping.keeping() as kept:
        slots, results = kept.before(work, bench.jobs, "jobs")
    assert len(results) == 3
    names = [slots[number].name for number in results]
    cache.write(names[0], {"value": {"square": 1}}, {})
    cache.write(names[1], [1], {})
    assert len(bench.call()) == 3
    assert bench.call() == []


def test_what_writes_elsewhere_or_returns_nothing_is_not_kept(bench, tmp_path):
    assert [bench.call(nothing) for _ in range(2)] == [ALL, ALL]
    jobs = [(job, tmp_path) for job in bench.jobs]
    assert [bench.call(writes, jobs) for _ in range(2)] == [ALL, ALL]


KILLED = """
import os, signal
from halfulp.experiments import failure
from halfulp.papers.claim import Lab
from halfulp.papers.ledger import run_claims
from halfulp.runs.keeping import keeping

own, made = failure.run_failure, []

def run_failure(*args, **options):
    if len(made) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    made.append(1)
    return own(*args, **options)

failure.run_failure = run_failure
with keeping():
    run_claims({ids}, lab=Lab(1, (0, 1), 10))
"""


def test_claims_that_were_killed_go_on_and_come_to_the_same(tmp_path, monkeypatch):
    # a cache of its own: in that of all tests others' entries may push these out meanwhile
    monkeypatch.setenv("HALFULP_CACHE", str(tmp_path))
    ids = ["A1", "A2"]
    killed = subprocess.run([sys.executable, "-c", KILLED.format(ids=ids)], capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    with keeping.keeping():
        resumed = [one.as_dict() for one in run_claims(ids, lab=Lab(1, (0, 1), 10))]
        again = [one.as_dict() for one in run_claims(ids, lab=Lab(1, (0, 1), 10))]
        other = [one.as_dict() for one in run_claims(ids, lab=Lab(1, (0, 2), 10))]
    assert [one["kept"].partition(",")[0] for one in resumed] == ["all", "1 of 4 runs"]
    assert all(one["kept"].startswith("all, measured at 20") for one in again)
    assert all("all" not in one["kept"] for one in other), "other seeds, another measurement"
    plain = [one.as_dict() for one in run_claims(ids, lab=Lab(1, (0, 1), 10))]

    def said(verdicts):
        return json.dumps([{**one, "seconds": 0, "kept": ""} for one in verdicts])

    assert said(resumed) == said(again) == said(plain) != said(other)


def test_a_sweep_says_what_it_took(capsys):
    command = ["sweep", "precision", "--length", "32", "--seeds", "1"]
    shown = []
    for extra in ([], [], ["--fresh"], ["--seeds", "2"]):
        assert main([*command, *extra]) == 0
        shown.append(capsys.readouterr().out)
    taken = "of an earlier call: 4 of 4 measurements (--fresh measures them again)\n"
    assert shown[1] == shown[0] + taken
    assert shown[2] == shown[0]
    assert "earlier" not in shown[3]


def test_every_job_of_the_claims_can_be_kept():
    """Names for what they are called with, and the results themselves; times are measured anew."""
    drawn = Drawn(("a",), np.ones((1, 2, 2), np.uint8), np.zeros((1, 2)), ("a",), "shapes", ())
    asked = [
        (runs_a.trace, runs_a.Plan(("torch:flash",), steps=3, at=(2,)), None),
        (constructed_run._job, (constructed_run.VARIANTS[0], 0, 2), None),
        (spike_run.approach, (0, 10, 1), None),
        (b_training._compared_run, (0, 2, 1), None),
        (b_training._drawing_run, (0, False), ((1.0,), drawn)),
        (failure._run, (BF16_FLASH2, 0, 2, None), None),
    ]
    with keeping.keeping() as kept:
        for function, job, result in asked:
            (slot,), _ = kept.before(function, [job], "jobs")
            result = function(job) if result is None else result
            slot.keep(result)
            _, found = kept.before(function, [job], "jobs")
            back, plain = found[0], encoded(result, tensors := {})
            assert type(back) is type(result), function
            assert repr(encoded(back, again := {})) == repr(plain)
            assert all(torch.equal(again[n], x) for n, x in tensors.items())
    assert [claim.id for claim in CLAIMS if claim.timed] == ["B10"]


@settings(max_examples=20)
@given(
    st.dictionaries(st.integers(), st.lists(st.floats())),
    st.one_of(st.none(), st.integers(), st.text()),
    st.permutations(range(3)),
)
def test_values_come_back_by_their_type(numbers, one, order):
    x = torch.arange(24.0).view(2, 3, 4).permute(order)
    value = (numbers, one, x)
    kind = tuple[dict[int, list[float]], int | str | None, Tensor]
    plain = json.loads(json.dumps(encoded(value, tensors := {})))
    back = decoded(kind, plain, tensors)
    assert repr(back[:2]) == repr(value[:2])
    assert torch.equal(back[2], x)
    assert back[2].stride() == x.stride()
    assert decoded(tuple[dict[int, list[int]], None, Tensor], plain[:2], tensors) is None


def test_an_unfinished_folder_is_there_again_until_it_is_done(folder):
    def half(fails: bool) -> list[str]:
        with unfinished_folder("work", 1) as place:
            found = sorted(one.name for one in place.iterdir() if one.name != ".lock")
            (place / "run").mkdir(exist_ok=True)
            if fails:
                raise KeyboardInterrupt
        return found

    def cut_off() -> None:
        with pytest.raises(KeyboardInterrupt):
            half(True)

    cut_off()
    assert half(False) == [], "nothing is kept outside"
    with keeping.keeping():
        cut_off()
        assert half(False) == ["run"]
        assert half(False) == []
        with unfinished_folder("work", 1) as place, unfinished_folder("work", 1) as other:
            assert place != other, "another works there"
        cut_off()
    with keeping.keeping(fresh=True):
        assert half(False) == []
        (folder / "unfinished" / "old").mkdir()
        os.utime(folder / "unfinished" / "old", (0, 0))
    with keeping.keeping():
        assert half(False) == []
    assert now_keeping() is None
    assert not list((folder / "unfinished").iterdir())
