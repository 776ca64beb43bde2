"""Attack run folders and what is printed of them: kills, faults and hostile texts, seeded.

usage: python -m benchmarks.fuzz_runs [--kills 120] [--faults 2000] [--injections 600] [--seed 0]

Kills trainings at chosen events of the file system, plants faults in run folders, puts hostile
texts wherever a text is shown, and prints a line of a table for each; it exits with 1 where
anything was lost, ended in a traceback, waited without end, was left over, executed or obeyed.
Needs Linux.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from benchmarks.fuzz_faults import faults
from benchmarks.fuzz_forks import SMALL, awaited, bad_end, forked, run, state_of
from benchmarks.fuzz_texts import injections

from halfulp import cli
from halfulp.runs.folder import NewRun, is_run_folder, write_json

EVENTS = ("open", "os.", "shutil.", "tempfile.", "fcntl.")
"""Of Python's audit hook: what happens to files."""
BAD = ("lost", "tracebacks", "executed", "endless", "left over", "obeyed")


def dying(arguments: Sequence[object], where: Path, moment: int, count: Path | None) -> int:
    """Run a command that is killed before its n-th event below a folder; write down how many there
    were if it gets to its end.
    """
    seen = itertools.count(1)
    total = [0]

    def hook(event: str, details: tuple[object, ...]) -> None:
        if event.startswith(EVENTS) and any(str(where) in str(d) for d in details[:2]):
            total[0] = next(seen)
            if total[0] == moment:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    code = cli.main([str(a) for a in arguments])
    if count is not None:
        count.write_text(str(total[0]))
    return code


def kills(number: int, chance: random.Random, room: Path) -> Counter[str]:
    """Kill trainings, some of them again while they are taken up, and compare with one that was
    not.
    """
    table: Counter[str] = Counter()
    whole, count = room / "whole", room / "count"
    begin = ["train", "seconds", *SMALL, "--out"]
    done = awaited(*forked(lambda: dying([*begin, whole], whole, 0, count), room))
    assert done.code == 0, done.err
    expected, events = state_of(whole), int(count.read_text())
    while table["kills"] < number:
        folder = room / "run"
        for _ in range(chance.choice((1, 1, 2, 4))):
            there = (folder / "run.json").exists()
            command = ["train", "--resume", folder] if there else [*begin, folder]
            moment = chance.randint(1, events)
            ended = awaited(*forked(lambda: dying(command, folder, moment, None), room))  # noqa: B023
            table["kills"] += ended.code == -signal.SIGKILL
            table["tracebacks"] += bad_end(ended) and ended.code != -signal.SIGKILL
        there = (folder / "run.json").exists()
        ended = run(["train", "--resume", folder] if there else [*begin, folder], room)
        table["tracebacks"] += bad_end(ended)
        lost = ended.code != 0 or state_of(folder) != expected
        left = [p for p in folder.rglob(".*") if p.name.startswith((".halfulp-", ".lock"))]
        table["lost"] += lost
        table["left over"] += bool(left)
        if lost or left or bad_end(ended):
            print("kill:", ended, left)
        shutil.rmtree(folder)
    return table + replacements(max(20, number // 4), chance, room)


def replacements(number: int, chance: random.Random, room: Path) -> Counter[str]:
    """Kill a run that takes another one's place; one of the two is always there, whole."""
    table: Counter[str] = Counter()
    out = room / "demo"

    def replaced(moment: int) -> int:
        seen = itertools.count(1)

        def hook(event: str, details: tuple[object, ...]) -> None:
            if event.startswith(EVENTS) and "demo" in str(details[:2]) and next(seen) == moment:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        new = NewRun(out, "demo")
        write_json(new.folder / "run.json", {"halfulp": "0", "kind": "demo", "name": moment})
        new.finish()
        return 0

    assert awaited(*forked(lambda: replaced(0), room)).code == 0
    for _ in range(number):
        moment = chance.randint(1, 30)
        ended = awaited(*forked(lambda: replaced(moment), room))  # noqa: B023
        table["kills"] += ended.code == -signal.SIGKILL
        table["tracebacks"] += ended.code == 99
        awaited(*forked(lambda: 0 if NewRun(out, "demo") else 1, room))  # which puts back
        table["lost"] += not is_run_folder(out, "demo")
    return table


def main() -> int:
    """Attack, print the table, and return 1 where anything gave way."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("kills", 120), ("faults", 2000), ("injections", 600), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--at-once", type=int, default=2, help="forks that read faults")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    wrong = 0
    attacks: dict[str, Callable[[random.Random, Path], Counter[str]]] = {
        "kills": lambda chance, room: kills(asked.kills, chance, room),
        "faults": lambda chance, room: faults(asked.faults, chance, room, asked.at_once),
        "injections": lambda chance, room: injections(asked.injections, chance, room),
    }
    with tempfile.TemporaryDirectory() as root:
        for name, attack in attacks.items():
            if not getattr(asked, name):
                continue
            room = Path(root) / name
            (room / "faults").mkdir(parents=True)
            began = time.time()
            table = attack(random.Random(asked.seed), room)
            wrong += sum(table[end] for end in BAD)
            cells = [f"{key} {table[key]}" for key in dict.fromkeys((name, *BAD, *sorted(table)))]
            print(f"| {time.time() - began:.0f} s | {' | '.join(cells)} |", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
