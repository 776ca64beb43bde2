"""Dask and Ray for real: clusters of two worker processes on this machine, one of which is killed
in the middle of a job. They are no dependencies: a test runs where its engine is installed.

    pip install distributed ray && pytest tests/runs/test_clusters.py
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from halfulp.isolate.isolation import isolate
from halfulp.runs.parallel import WorkerKilledError, run_jobs
from halfulp.training.config import LayerTask, Optimizer, RunConfig

# joblib, dask and ray warn of files that they leave to the interpreter's end
pytestmark = pytest.mark.filterwarnings("ignore")
CONFIG = RunConfig(
    LayerTask(batch=2, tokens=8, width=8, constant=2),
    optimizer=Optimizer(1e-2),
    steps=30,
    metrics_every=2,
)


def work(job: tuple[int, str]) -> tuple[int, int]:
    number, folder = job
    if number == 2 and not (armed := Path(folder) / "killed").exists():
        armed.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number * number, os.getpid()


@pytest.fixture(scope="module")
def dask() -> Iterator[str]:
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        n_workers=2,
        threads_per_worker=1,
        processes=True,
        dashboard_address=None,
        silence_logs=logging.CRITICAL,
    ) as cluster:
        yield f"dask:{cluster.scheduler_address}"


@pytest.fixture(scope="module")
def ray() -> Iterator[str]:
    engine = pytest.importorskip("ray")
    here = {"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}}  # where workers find `work`
    options = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    engine.init(num_cpus=2, runtime_env=here, **options)
    yield "ray"
    engine.shutdown()


@pytest.mark.parametrize("engine", ["dask", "ray"])
def test_jobs_run_in_both_and_survive_a_killed_worker(engine, tmp_path, request) -> None:
    """Dask gives the job to another worker; with Ray the call ends in a line, and goes on when it
    is made again.
    """
    backend = request.getfixturevalue(engine)
    jobs = [(number, str(tmp_path)) for number in range(6)]
    if engine == "ray":
        with pytest.raises(WorkerKilledError, match="a worker process was killed"):
            run_jobs(work, jobs, workers=2, backend=backend)
    found = run_jobs(work, jobs, workers=2, backend=backend)
    assert [square for square, _ in found] == [0, 1, 4, 9, 16, 25]
    assert (tmp_path / "killed").exists()
    assert os.getpid() not in {process for _, process in found}


@pytest.mark.parametrize("engine", ["dask", "ray"])
def test_an_isolation_over_a_cluster_is_the_one_at_home(engine, tmp_path, request) -> None:
    """In a folder that all workers reach; the second call finds every run there."""
    backend = request.getfixturevalue(engine)
    options = {"seeds": (0, 1), "workers": 2}
    home = isolate(CONFIG, out=tmp_path / "home", seeds=(0, 1), workers=1)
    away = isolate(CONFIG, out=tmp_path / "away", backend=backend, **options)
    judged = [
        {r.name: {s: (run.outcome, run.loss) for s, run in r.runs.items()} for r in one.rungs}
        for one in (home, away)
    ]
    assert judged[0] == judged[1]
    assert away.verdict == home.verdict
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "away" / "rungs").rglob("*")}
    again = isolate(CONFIG, out=tmp_path / "away", backend=backend, **options)
    assert again.verdict == home.verdict
    assert written == {path: path.stat().st_mtime_ns for path in written}
