"""Jobs in several processes: the results of one process, in order; a killed worker and Ctrl-C end
in one line.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from halfulp.runs import cache
from halfulp.runs.keeping import keeping
from halfulp.runs.parallel import WorkerKilledError, run_jobs, spread_over


def square_and_threads(number: int) -> tuple[int, int, int]:
    return number * number, torch.get_num_threads(), os.getpid()


def die(number: int) -> int:
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def refuse(number: int) -> int:
    raise ValueError(f"number={number}: planted")


@pytest.mark.parametrize(("workers", "backend"), [(1, None), (2, None), (2, "threading")])
def test_results_come_in_order_from_one_thread_each(workers: int, backend: str | None) -> None:
    said: list[float] = []
    torch.set_num_threads(2)
    found = run_jobs(
        square_and_threads,
        range(5),
        workers=workers,
        backend=backend,
        progress=lambda done, _: said.append(done),
    )
    assert [(square, threads) for square, threads, _ in found] == [(n * n, 1) for n in range(5)]
    elsewhere = os.getpid() not in {process for *_, process in found}
    assert elsewhere == (workers == 2 and backend is None)
    assert said == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert workers > 1 or torch.get_num_threads() == 2


def test_what_is_spread_over_a_backend_is_so_wherever_it_is_asked_for() -> None:
    with spread_over("threading", 2):
        found = run_jobs(square_and_threads, range(3), workers=1)
    assert [square for square, *_ in found] == [0, 1, 4]
    with spread_over("nothing", 2), pytest.raises(ValueError, match="backend='nothing'"):
        run_jobs(square_and_threads, range(3), workers=1)
    with pytest.raises(ValueError, match="workers=0"), spread_over(None, 0):
        pass
    here = run_jobs(square_and_threads, range(3), workers=1)
    assert {process for *_, process in here} == {os.getpid()}


def test_no_jobs_no_results() -> None:
    assert run_jobs(square_and_threads, [], workers=2) == []


def test_a_killed_worker_is_one_line_and_costs_its_own_job(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path))
    with (
        keeping(),
        pytest.raises(
            WorkerKilledError, match=r"a worker process was killed, .* of 4 runs done"
        ) as caught,
    ):
        run_jobs(die, [0, 1, 2, 3], workers=2)
    assert "\n" not in str(caught.value)
    with keeping() as kept:
        assert run_jobs(die, [0, 1, 3], workers=1) == [0, 1, 3]
    taken, asked = kept.counts["runs"]
    assert 1 <= taken <= asked == 3, "the first one came before the second of its worker"
    assert [n for n, *_ in run_jobs(square_and_threads, [3, 4], workers=2)] == [
        9,
        16,
    ], "and the next call works"


@pytest.mark.parametrize("workers", [1, 2])
def test_what_a_job_raises_is_raised(workers: int) -> None:
    with pytest.raises(ValueError, match=r"number=[01]: planted"):
        run_jobs(refuse, [0, 1], workers=workers)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"workers": 0}, "workers=0: accepted is an integer of at least 1"),
        (
            {"backend": "nosuch"},
            "backend='nosuch': Invalid backend: nosuch.*accepted are loky, threading, dask:",
        ),
        (
            {"backend": "dask:tcp://planted:1"},
            "backend='dask:tcp://planted:1': .*accepted are loky",
        ),
        ({"backend": "ray"}, "backend='ray': the package ray is not installed here"),
    ],
)
def test_bad_arguments_are_one_line(options: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        run_jobs(square_and_threads, [1, 2], **options)
    assert "\n" not in str(caught.value)


def test_ray_is_put_into_the_registry_by_its_own_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the package, since it is no dependency: it is asked to connect and to
    register.
    """
    from joblib import register_parallel_backend
    from joblib._parallel_backends import ThreadingBackend

    asked: list[str] = []
    ray, inner = types.ModuleType("ray"), types.ModuleType("ray.util.joblib")
    ray.init = lambda address: asked.append(address)  # type: ignore[attr-defined]
    inner.register_ray = lambda: register_parallel_backend("ray", ThreadingBackend)  # type: ignore[attr-defined]
    for name, module in (
        ("ray", ray),
        ("ray.util", types.ModuleType("ray.util")),
        ("ray.util.joblib", inner),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    found = run_jobs(square_and_threads, [1, 2, 3], workers=2, backend="ray:head:6379")
    assert [n for n, *_ in found] == [1, 4, 9]
    assert asked == ["head:6379"]


INTERRUPTED = """
import os, signal
from pathlib import Path
from halfulp.runs import cache
from halfulp.runs.keeping import keeping
from halfulp.runs.parallel import run_jobs

BOTH_RUN = Path(__file__).with_name("both-run")

# whoever runs the tests in the background has SIGINT ignored, and so have their children
signal.signal(signal.SIGINT, signal.default_int_handler)

def stay():
    # until somebody ends it; a pause without an end would miss a signal that comes just before it
    while True:
        signal.sigtimedwait((), 0.05)

def wait(job):
    number, other_runs = job
    if number == 0:
        other_runs.touch()
        stay()
    while not other_runs.exists():
        os.sched_yield()
    # what Ctrl-C does: every process of the terminal's group gets it
    os.killpg(os.getpgrp(), signal.SIGINT)
    stay()

if __name__ == "__main__":
    try:
        run_jobs(wait, [(0, BOTH_RUN), (1, BOTH_RUN)], workers=2)
    except KeyboardInterrupt:
        print("interrupted")
"""


def test_ctrl_c_ends_every_process_at_once_and_without_noise(tmp_path: Path) -> None:
    script = tmp_path / "interrupted.py"
    script.write_text(INTERRUPTED, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        timeout=50,
        start_new_session=True,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("interrupted\n", 0)
    assert "Traceback" not in done.stderr
