"""Dask and Ray for real: clusters of two worker processes on this machine, of which a worker, a
whole node or the scheduler is killed in the middle of a job. They are no dependencies: a test runs
where its engine is installed.

    pip install distributed ray && pytest tests/runs/test_clusters.py
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from halfulp.experiments.sweep import Setting, sweep_length
from halfulp.isolate.isolation import isolate
from halfulp.papers.claim import Lab
from halfulp.papers.ledger import run_claims
from halfulp.runs import cache
from halfulp.runs.keeping import keeping
from halfulp.runs.parallel import WorkerKilledError, run_jobs, spread_over
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


def slow(job: tuple[int, str]) -> int:
    """The third job says who runs it, and waits to be killed the first time."""
    number, folder = job
    if number == 2 and not (armed := Path(folder) / "killed").exists():
        armed.touch()
        (Path(folder) / "running").write_text(f"{os.getpgid(0)}")
        threading.Event().wait(60)
    return number * number


def when_running(folder: Path, act: Callable[[int], None]) -> threading.Thread:
    """Do something to the process group that runs the third job, once it does."""
    os.mkfifo(folder / "running")  # reading waits until somebody writes

    def wait() -> None:
        act(int((folder / "running").read_text()))

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


class Nodes:
    """A scheduler of Dask and two workers, each in a session of its own, as on machines of their
    own; the workers stand in another folder.
    """

    def __init__(self, folder: Path) -> None:
        pytest.importorskip("distributed")
        (folder / "elsewhere").mkdir()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        host, port = self.address.split(":")
        self.parts = [self._start(folder, "scheduler", "--host", host, "--port", port)]
        self.parts += [
            self._start(folder, "worker", self.address, "--nthreads", "1") for _ in range(2)
        ]
        from distributed import Client

        with Client(self.address, timeout=60) as client:
            client.wait_for_workers(2, timeout=60)

    def _start(self, folder: Path, what: str, *options: str) -> subprocess.Popen[bytes]:
        here = {"PYTHONPATH": os.pathsep.join(sys.path)}  # where workers find `slow`
        return subprocess.Popen(
            [sys.executable, "-m", f"distributed.cli.dask_{what}", *options, "--no-dashboard"],
            env=os.environ | here,
            cwd=folder / "elsewhere",
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def close(self) -> None:
        for part in self.parts:
            if part.poll() is None:
                os.killpg(part.pid, signal.SIGKILL)
            part.wait()


@pytest.fixture
def nodes(tmp_path) -> Iterator[Nodes]:
    made = Nodes(tmp_path)
    yield made
    made.close()


def test_a_lost_node_of_dask_is_made_up_for_and_paths_hold_elsewhere(
    nodes, tmp_path, monkeypatch
) -> None:
    """Worker and nanny of a node are killed at once; then an isolation in a folder that is named
    from here, by a worker that stands elsewhere.
    """
    backend = f"dask:{nodes.address}"
    killer = when_running(tmp_path, lambda group: os.killpg(group, signal.SIGKILL))
    found = run_jobs(slow, [(n, str(tmp_path)) for n in range(6)], workers=2, backend=backend)
    killer.join()
    assert found == [0, 1, 4, 9, 16, 25]
    assert sum(part.poll() is not None for part in nodes.parts) == 1, "one node is gone"
    monkeypatch.chdir(tmp_path)
    away = isolate(CONFIG, out=Path("away"), seeds=(0,), workers=2, backend=backend)
    assert away.status == "done"
    assert not any((tmp_path / "elsewhere").iterdir())


def test_a_lost_scheduler_is_one_line_and_what_was_done_is_kept(
    nodes, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    killer = when_running(tmp_path, lambda _: os.killpg(nodes.parts[0].pid, signal.SIGKILL))
    jobs = [(n, str(tmp_path)) for n in range(6)]
    backend = f"dask:{nodes.address}"
    with keeping(backend=backend), pytest.raises(WorkerKilledError, match="the cluster was lost"):
        run_jobs(slow, jobs, workers=2, backend=backend)
    killer.join()
    with keeping(backend=backend) as kept:  # as on the next cluster
        assert run_jobs(slow, jobs, workers=1) == [0, 1, 4, 9, 16, 25]
    assert kept.counts["runs"][0] >= 1


def test_a_lost_node_of_ray_is_one_line_and_the_others_go_on(tmp_path) -> None:
    cluster_of = pytest.importorskip("ray.cluster_utils").Cluster
    import ray as engine

    cluster = cluster_of(initialize_head=True, head_node_args={"num_cpus": 1})
    node = cluster.add_node(num_cpus=1)
    here = {"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}}
    engine.init(address=cluster.address, runtime_env=here, log_to_driver=False)
    try:
        jobs = [(n, str(tmp_path)) for n in range(6)]
        lost = when_running(tmp_path, lambda _: cluster.remove_node(node, allow_graceful=False))
        try:
            found = run_jobs(slow, jobs, workers=2, backend="ray")
        except WorkerKilledError:  # where the third job ran on it
            found = run_jobs(slow, jobs, workers=1, backend="ray")
        lost.join()
        assert found == [0, 1, 4, 9, 16, 25]
    finally:
        engine.shutdown()
        cluster.shutdown()


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
def test_jobs_run_in_both_and_survive_a_killed_worker(
    engine, tmp_path, request, monkeypatch
) -> None:
    """Dask gives the job to another worker; with Ray the call ends in a line, and goes on when it
    is made again, with what the workers had done.
    """
    backend = request.getfixturevalue(engine)
    jobs = [(number, str(tmp_path)) for number in range(6)]
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    if engine == "ray":
        with (
            keeping(backend=backend),
            pytest.raises(WorkerKilledError, match="a worker process was killed"),
        ):
            run_jobs(work, jobs, workers=2, backend=backend)
    with keeping(backend=backend) as kept:
        found = run_jobs(work, jobs, workers=2, backend=backend)
    taken, _ = kept.counts["runs"]
    assert (1 <= taken < 6) if engine == "ray" else taken == 0
    with keeping(backend=f"{engine}:elsewhere") as kept:
        assert run_jobs(work, jobs, workers=2) == found
    assert kept.counts["runs"] == [6, 6]
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


def test_sweeps_and_claims_go_the_same_way(dask) -> None:
    setting = Setting(length=32, head_dim=16, seeds=1)
    lengths = (16, 32)
    home = sweep_length(setting, lengths=lengths)
    with spread_over(dask, 2):
        away = sweep_length(setting, lengths=lengths)
        (verdict,) = run_claims(["B4"], lab=Lab(2))
    assert away.as_dict() == home.as_dict()
    (own,) = run_claims(["B4"], lab=Lab(1))
    assert {**verdict.as_dict(), "seconds": 0} == {**own.as_dict(), "seconds": 0}
