"""Does anything notice when the laboratory is wrong? Faults are planted in a copy of the sources,
one at a time, and the tests that cover the place are run; or a claim, whose verdict must then
change.

The faults are in `benchmarks.mutant_list`: wrong measurements, rungs that run something else, rules
that cannot lose, statistics, emulation, reports. Each is one text that stands in its file exactly
once; where it does not, the list is out of date and nothing is run. Before, every test that is to
catch something must pass on the sources as they are.

A mutant is "caught" by the first test that fails, or by its claim; "survived" if all pass; "broken"
if tests could not be run at all, which counts as neither and ends in exit code 2. Exit code 0: at
least 95 % were caught.

    python -m benchmarks.mutants --workers 2 --json mutants.json
    python -m benchmarks.mutants --only A9 --only rung
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue
from typing import TypeVar

from benchmarks.mutant_list import MUTANTS, SLOW, Mutant

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[1]
COPIED = ("src", "tests", "benchmarks", "docs", "pyproject.toml", "README.md")
WANTED = 0.95
SECONDS = 240  # a run of tests at most


@dataclass(frozen=True)
class Outcome:
    """What became of one mutant."""

    room: str
    what: str
    file: str
    result: str  # caught, survived or broken
    by: str  # the test that failed, or the claim's new verdict
    seconds: float


@dataclass(frozen=True)
class Copy:
    """A copy of the working tree in which a fault may stand."""

    folder: Path

    @contextmanager
    def planted(self, mutant: Mutant) -> Iterator[None]:
        """The sources with one fault, and without it again."""
        file = self.folder / "src" / "halfulp" / mutant.file
        sound = file.read_text(encoding="utf-8")
        try:
            file.write_text(sound.replace(mutant.old, mutant.new), encoding="utf-8")
            yield
        finally:
            file.write_text(sound, encoding="utf-8")

    def tests(self, tests: Sequence[str], limit: float = SECONDS) -> tuple[int, str]:
        """Run tests up to the first that fails; exit code and output."""
        options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--no-header", "--tb=no", "-rf"]
        options += [f"--deselect={slow}" for slow in SLOW]
        return self._run(_tests, [*options, *tests], limit)

    def verdict(self, claim: str) -> str:
        """The verdict of a claim; "" where it has none."""
        _, said = self._run(_claim, [claim], SECONDS)
        found = re.search(r"^verdict: (.*)$", said, re.MULTILINE)
        return found[1] if found else ""

    def _run(
        self, what: Callable[[list[str]], int], arguments: list[str], limit: float
    ) -> tuple[int, str]:
        """In a process that has everything imported but the package, which it takes from here."""
        said = self.folder / "said.txt"
        server = multiprocessing.get_context("forkserver")
        process = server.Process(target=_inside, args=(self.folder, said, what, arguments))
        process.start()
        process.join(limit)
        if process.exitcode is None:
            process.kill()
            process.join()
            return 1, f"FAILED more-than-{limit:g}-seconds\n"
        return process.exitcode, said.read_text(encoding="utf-8", errors="replace")


def _inside(folder: Path, said: Path, what: Callable[[list[str]], int], rest: list[str]) -> None:
    """In a process of its own: one thread, the copy's sources and tests, output into a file."""
    for name in [n for n in sys.modules if n.partition(".")[0] in ("benchmarks", "tests")]:
        del sys.modules[name]
    os.chdir(folder)
    sys.path[:0] = [str(folder / "src"), str(folder)]
    sys.dont_write_bytecode = True
    os.environ["PYTHONPATH"] = str(folder / "src")
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    # this process ends without its own tidying up: what it leaves goes with the copy
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    with said.open("w", encoding="utf-8") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
        code = what(rest)
        sys.stdout.flush()
    os._exit(code)


def _tests(arguments: list[str]) -> int:
    import pytest

    # the copy may have no plugin of pytest, which an installed halfulp asks for
    return int(pytest.main(["-p", "no:halfulp", *arguments]))


def _claim(arguments: list[str]) -> int:
    from halfulp.papers.ledger import run_claims

    (found,) = run_claims(arguments)
    print("verdict:", found.verdict)
    return 0


def copies(count: int, inside: Path) -> list[Copy]:
    """Copies of the working tree, the built library among it."""
    made = []
    for number in range(count):
        folder = inside / f"copy-{number}"
        folder.mkdir()
        for name in COPIED:
            where = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
            where(ROOT / name, folder / name)
        made.append(Copy(folder))
    return made


def misfits(mutants: Sequence[Mutant]) -> list[str]:
    """Those whose text does not stand in its file exactly once, or that change nothing."""
    said = []
    for mutant in mutants:
        file = ROOT / "src" / "halfulp" / mutant.file
        count = file.read_text(encoding="utf-8").count(mutant.old) if file.exists() else 0
        if count != 1 or mutant.old == mutant.new or bool(mutant.tests) == bool(mutant.claim):
            said.append(f"{mutant.file}: {mutant.what}: its text stands there {count} times")
    return said


def outcome(mutant: Mutant, copy: Copy, sound: dict[str, str]) -> Outcome:
    """Plant one fault and look whether it is noticed."""
    began = time.time()
    with copy.planted(mutant):
        if mutant.claim:
            verdict = copy.verdict(mutant.claim)
            result = "survived" if verdict == sound[mutant.claim] else "caught"
            by = f"{mutant.claim}: {verdict or 'raises'}" if result == "caught" else ""
        else:
            code, said = copy.tests(mutant.tests)
            failed = re.search(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
            by = failed[1] if failed else ""
            result = {0: "survived", 1: "caught"}.get(code, "broken")
            if result == "broken":
                by = [*said.strip().splitlines(), f"exit code {code}"][-1][:200]
    return Outcome(mutant.room, mutant.what, mutant.file, result, by, round(time.time() - began, 1))


def every(mutants: Sequence[Mutant], made: Sequence[Copy]) -> list[Outcome]:
    """All outcomes, in order; each copy holds one fault at a time.

    Raises:
        SystemExit: something fails on the sources as they are.
    """
    free: Queue[Copy] = Queue()
    for copy in made:
        free.put(copy)

    def alone(work: Callable[[Copy], T]) -> T:
        copy = free.get()
        try:
            return work(copy)
        finally:
            free.put(copy)

    def one(mutant: Mutant) -> Outcome:
        found = alone(lambda copy: outcome(mutant, copy, sound))
        print(f"{found.result:9} {found.room}: {found.what} ({found.by})", flush=True)
        return found

    tests = sorted({test for mutant in mutants for test in mutant.tests})
    claims = sorted({mutant.claim for mutant in mutants if mutant.claim})
    with ThreadPoolExecutor(len(made)) as pool:
        passed = pool.map(
            lambda test: (test, *alone(lambda copy: copy.tests([test], 4 * SECONDS))), tests
        )
        for test, code, said in passed:
            if code:
                sys.exit(f"{test} fails without a fault:\n{said[-3000:]}")
        verdicts = pool.map(lambda claim: alone(lambda copy: copy.verdict(claim)), claims)
        sound = dict(zip(claims, verdicts, strict=True))
        for claim, verdict in sound.items():
            if not verdict.startswith("reproduced"):
                sys.exit(f"{claim} is {verdict or 'without a verdict'} without a fault")
        return list(pool.map(one, mutants))


def table(found: Sequence[Outcome]) -> str:
    """A row of Markdown for every mutant, and the counts by room."""
    rows = ["| planted | in | caught by |", "|---|---|---|"]
    rows += [
        f"| {one.room}: {one.what} | `{one.file}` |"
        f" {one.by.replace('tests/', '') if one.result == 'caught' else one.result} |"
        for one in found
    ]
    rooms = dict.fromkeys(one.room for one in found)
    counts = ", ".join(
        f"{room} {sum(o.result == 'caught' for o in found if o.room == room)} of"
        f" {sum(o.room == room for o in found)}"
        for room in rooms
    )
    caught = sum(one.result == "caught" for one in found)
    return "\n".join([*rows, "", f"{caught} of {len(found)} caught: {counts}"])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", action="append", default=[], help="part of a room or a fault")
    parser.add_argument("--json", type=Path, help="write the outcomes here")
    chosen = parser.parse_args()
    mutants = [
        mutant
        for mutant in MUTANTS
        if not chosen.only or any(part in f"{mutant.room}: {mutant.what}" for part in chosen.only)
    ]
    if not mutants:
        sys.exit(f"--only {chosen.only}: no fault has it")
    if said := misfits(mutants):
        sys.exit("\n".join(said))
    os.environ["OMP_NUM_THREADS"] = "1"
    preloaded = ["torch", "pytest", "scipy.stats", "rich", "matplotlib.pyplot"]
    multiprocessing.get_context("forkserver").set_forkserver_preload(preloaded)
    with tempfile.TemporaryDirectory() as folder:
        found = every(mutants, copies(min(chosen.workers, len(mutants)), Path(folder)))
    print(table(found))
    if chosen.json:
        chosen.json.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")
    if any(one.result == "broken" for one in found):
        return 2
    return int(sum(one.result == "caught" for one in found) < WANTED * len(found))


if __name__ == "__main__":
    sys.exit(main())
