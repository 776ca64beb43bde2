"""Many jobs at once: processes of one thread each on this machine, or whatever joblib knows how to
reach.

joblib is the one place where several worlds meet: its own processes here, and through its registry
a Ray or Dask cluster, without a line in between that knows of either. Jobs and results travel by
pickle between processes that belong to one program; nothing of it is kept in a file.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from halfulp.runs.results import Progress, no_progress
from halfulp.runs.threads import one_thread

if TYPE_CHECKING:
    from halfulp.runs.keeping import Slot

_KILLED = ("TerminatedWorkerError", "KilledWorker", "ActorDiedError", "WorkerCrashedError")
"""What loky, Dask (after it has tried on several workers) and Ray raise for a worker that died."""
_UNREACHED = ("FutureCancelledError", "CommClosedError", "NodeDiedError", "ActorUnavailableError")
"""What Dask and Ray raise where the cluster itself is lost."""
_PATIENCE = 60  # seconds for the first worker of a cluster to be there
_where: ContextVar[tuple[str | None, int] | None] = ContextVar("_where", default=None)
Job = TypeVar("Job")
Result = TypeVar("Result")


class WorkerKilledError(RuntimeError):
    """A worker process ended without a result (killed, or out of memory), or its cluster did."""


@contextmanager
def spread_over(backend: str | None, workers: int) -> Iterator[None]:
    """Send every job that `run_jobs` is given meanwhile in this thread to a backend of joblib,
    with so many workers, whatever the call itself says.

    Raises:
        ValueError: the number of workers is not accepted.
    """
    if workers < 1:
        raise ValueError(f"workers={workers}: accepted is an integer of at least 1")
    token = _where.set((backend, workers))
    try:
        yield
    finally:
        _where.reset(token)


def run_jobs(
    function: Callable[[Job], Result],
    jobs: Sequence[Job],
    *,
    workers: int = 2,
    backend: str | None = None,
    progress: Progress | None = None,
    what: str = "runs",
) -> list[Result]:
    """Return function(job) of every job, in order, on one thread of torch each. Inside of
    `halfulp.runs.keeping.keeping` what an earlier call has measured is taken from it.

    Args:
        function: at the top level of a module, so that a worker can find it.
        jobs: what it is called with.
        workers: processes; 1 means this process unless a backend is named.
        backend: of joblib: "loky" (the default), "threading", "dask" or "dask:ADDRESS" of its
            scheduler, "ray", or any that the caller registered. Workers on other machines need the
            same packages and the same folders.
        progress: called with the fraction of jobs that are done.
        what: the jobs are, in the words of progress.

    Raises:
        ValueError: the number of workers or the backend is not accepted.
        WorkerKilledError: a worker process was killed.
    """
    from halfulp.runs.keeping import now_keeping  # it needs torch

    backend, workers = _where.get() or (backend, workers)
    if workers < 1:
        raise ValueError(f"workers={workers}: accepted is an integer of at least 1")
    report, kept = progress or no_progress, now_keeping()
    slots: list[Slot | None] = [None for _ in jobs]
    results: dict[int, Result] = {}
    if kept is not None:
        slots, results = kept.before(function, jobs, what)
    missing = [(n, slots[n], job) for n, job in enumerate(jobs) if n not in results]
    calls = (
        _here
        if backend is None and min(workers, len(jobs)) <= 1
        else partial(_spread, workers, backend)
    )
    for number, result in calls(function, missing) if missing else ():
        results[number], slot = result, slots[number]
        if slot is not None and not slot.holds():  # of a worker that does not reach the folder
            slot.keep(result)
        report(len(results) / len(jobs), f"{len(results)} of {len(jobs)} {what}")
    return [results[number] for number in range(len(jobs))]


_Named: TypeAlias = tuple[int, "Slot | None", Job]
"""A job with its number, and where its result is kept."""


def _here(
    function: Callable[[Job], Result], jobs: Sequence[_Named[Job]]
) -> Iterator[tuple[int, Result]]:
    return (_numbered(function, job) for job in jobs)


def _spread(
    workers: int,
    backend: str | None,
    function: Callable[[Job], Result],
    jobs: Sequence[_Named[Job]],
) -> Iterator[tuple[int, Result]]:
    """Yield numbers and results as they come."""
    from joblib import Parallel, delayed

    done = 0
    with _configured(backend):
        # one job at a time, so that every result is kept as soon as it is there
        options: dict[str, Any] = {"n_jobs": min(workers, len(jobs)), "batch_size": 1}
        try:
            parallel = Parallel(return_as="generator_unordered", **options)
            counted = f", with {{}} of {len(jobs)} runs done"
        except ValueError:  # of a backend that gives all results at once, as Ray's
            parallel, counted = Parallel(**options), ""
        try:
            for found in parallel(delayed(_numbered)(function, job) for job in jobs):
                done += 1
                yield found
        except Exception as error:
            # by name, since neither Dask nor Ray is a dependency
            name = type(error).__name__
            if name in _KILLED:
                said = "a worker process was killed, perhaps for want of memory"
            elif name in _UNREACHED:
                said = f"backend={backend!r}: the cluster was lost ({name})"
            elif name == "TimeoutError" and "no worker after" in str(error):
                said = f"backend={backend!r}: the cluster had no worker within {_PATIENCE} s"
            else:
                raise
            raise WorkerKilledError(said + counted.format(done)) from error


def _numbered(function: Callable[[Job], Result], named: _Named[Job]) -> tuple[int, Result]:
    number, slot, job = named
    # another number of threads adds in another order, and gives other bits
    with one_thread():
        result = function(job)
    if slot is not None:  # where it was made: whoever waits for it may be gone
        slot.keep(result)
    return number, result


@contextmanager
def _configured(backend: str | None) -> Iterator[None]:
    """joblib's context for a backend's name; loky's workers get one thread in every library."""
    from joblib import parallel_config

    name, _, address = (backend or "loky").partition(":")
    options: dict[str, Any] = {"scheduler_host": address} if address else {}
    if name == "loky":
        # no max_nbytes: joblib would hand large arrays over as read-only maps of files
        options |= {"inner_max_num_threads": 1, "max_nbytes": None}
    elif name == "dask":
        options["wait_for_workers_timeout"] = _PATIENCE
    elif name == "ray":
        _register_ray(address)
        options = {}
    try:
        context = parallel_config(backend=name, **options)
    except (ValueError, TypeError, ImportError, OSError) as error:
        accepted = (
            "accepted are loky, threading, dask:ADDRESS, ray:ADDRESS or a name registered with"
            " joblib"
        )
        raise ValueError(
            f"backend={backend!r}: {' '.join(str(error).split())}; {accepted}"
        ) from None
    with context:
        yield


def _register_ray(address: str) -> None:
    """Put Ray into joblib's registry; Ray is not a dependency."""
    try:
        ray = importlib.import_module("ray")
        register = importlib.import_module("ray.util.joblib").register_ray
    except ImportError:
        raise ValueError(
            "backend='ray': the package ray is not installed here; accepted is loky"
        ) from None
    if address:
        ray.init(address=address)
    register()
