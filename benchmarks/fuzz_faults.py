"""Faults in run folders: files and folders that are not what a run wrote, under every command that
reads one.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from benchmarks.fuzz_forks import (
    HOSTILE,
    PICTURES,
    SMALL,
    awaited,
    bad_end,
    forked,
    run,
    same,
    state_of,
)

from halfulp import cli
from halfulp.runs.folder import read_json, write_json
from halfulp.runs.record import new_record
from halfulp.runs.sealed import _seal as seal_of_checkpoint

BUDGET = ["--workers", "1", "--seeds", "1"]
KERNEL = "from pathlib import Path\nPath(__file__).with_suffix('.ran').write_text('ran')\n"


TOLD = re.compile("missing|torn|is over|not those")
"""What a resumed training says of lines or weights that are not those it would have written."""


def nodes(plain: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in plain data."""
    yield path
    items = plain.items() if isinstance(plain, dict) else ()
    items = enumerate(plain) if isinstance(plain, list) else items
    for key, value in items:
        yield from nodes(value, (*path, key))


VALUES: tuple[Any, ...] = (None, True, -1, 0, 10**30, 1e308, -1e-308, "", "x", HOSTILE[8], [], {})
VALUES += ([[]], [None], {"a": 1}, ["kernel.py:attention"], "kernel.py:attention", "cuda:9", "nan")


def altered(plain: Any, chance: random.Random) -> Any:
    """Plain data with one value changed, removed or added, a few times."""
    for _ in range(chance.choice((1, 1, 1, 3))):
        path = chance.choice(list(nodes(plain)))
        value = chance.choice(VALUES)
        if not path:
            if chance.random() < 0.1:
                return value
            continue
        inner = plain
        for key in path[:-1]:
            inner = inner[key]
        if chance.random() < 0.25:
            del inner[path[-1]]
        else:
            inner[path[-1]] = value
    return plain


def resealed(path: Path, plain: Any) -> Any:
    """What an attacker writes: the seals are right again."""
    if isinstance(plain, dict) and path.name == "run.json":
        more = {k: plain[k] for k in ("data", "batches") if k in plain}
        sealed = new_record("train", plain.get("config"), None, **more)["seal"]
        return plain | {"seal": sealed} if "config" in plain else plain
    if isinstance(plain, dict) and path.name == "state.json":
        inner = {k: v for k, v in plain.items() if k != "seal"}
        for name in ("model.safetensors", "state.safetensors"):
            file = path.with_name(name)
            if isinstance(inner.get("sha256"), dict) and file.is_file():
                inner["sha256"][name] = hashlib.sha256(file.read_bytes()).hexdigest()
        return inner | {"seal": seal_of_checkpoint(inner)}
    return plain


def plant(path: Path, kind: str, chance: random.Random, other: Path) -> None:
    """Put a fault in the place of a file or folder."""
    data = path.read_bytes() if path.is_file() else b""
    if data and kind in ("altered", "resealed") and path.suffix in (".json", ".jsonl"):
        lines = data.decode().splitlines() if path.suffix == ".jsonl" else [data.decode()]
        at = chance.randrange(len(lines))
        plain = altered(json.loads(lines[at]), chance)
        plain = resealed(path, plain) if kind == "resealed" else plain
        lines[at] = json.dumps(plain)
        path.write_text("\n".join(lines) + "\n")
        return
    if data and kind == "resealed" and path.suffix == ".safetensors":
        path.write_bytes(flipped(data, chance))
        state = path.with_name("state.json")
        state.write_text(json.dumps(resealed(state, json.loads(state.read_text()))))
        return
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    texts = {
        "empty": b"",
        "torn": data[: chance.randrange(len(data) + 1)],
        "flipped": flipped(data, chance),
        "altered": flipped(data, chance),
        "resealed": data + b"more",
        "noise": chance.randbytes(chance.choice((1, 100, 5000))),
        "deep": b"[" * 100_000,
        "deeper": b'{"a":' * 100_000,
        "constants": b'{"step": NaN, "kind": Infinity}',
        "huge": b'{"kind": "train", "steps": ' + b"9" * 5000 + b"}",
        "bytes": b'{"kind": "\xff\xfe\x80"}',
    }
    if kind in texts:
        path.write_bytes(texts[kind])
    elif kind == "folder":
        (path / "inner").mkdir(parents=True)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind in ("dangling", "loop", "others", "device"):
        to = {"dangling": "nowhere", "loop": path.name, "device": "/dev/zero"}
        path.symlink_to(to.get(kind, str(other)))
    elif kind == "forbidden":
        path.write_bytes(data)
        path.chmod(0)
    else:
        assert kind == "missing", kind


KINDS = (
    "missing",
    "empty",
    "torn",
    "flipped",
    "altered",
    "altered",
    "altered",
    "resealed",
    "noise",
)
KINDS += ("resealed", "deep", "deeper", "constants", "huge", "bytes", "folder", "pipe", "dangling")
KINDS += ("noise", "loop", "others", "device", "forbidden", "altered", "resealed")


def flipped(data: bytes, chance: random.Random) -> bytes:
    """The data with a bit changed."""
    changed = bytearray(data or b"\0")
    changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def bases(room: Path) -> dict[str, Path]:
    """A folder of every kind: a killed training, its twin, pictures, an isolation, a watched model,
    a demo.
    """
    folder = room / "bases"
    folder.mkdir()
    found = {kind: folder / kind for kind in ("train", "twin", "pictures", "isolate", "watch")}
    found["demo"] = folder / "demo"
    for command in (
        ["train", "seconds", *SMALL, "--out", found["train"]],
        ["train", "seconds", *SMALL, "--seed", "1", "--set", "data_seed=0", "--out", found["twin"]],
        ["train", "pictures", *PICTURES, "--out", found["pictures"]],
        ["isolate", found["train"], "--out", found["isolate"], *BUDGET, "--budget-steps", "60"],
    ):
        ended = run(command, room)
        assert ended.code in (0, 1), ended

    def watched() -> int:
        from torch.nn import functional

        import halfulp

        class Layer(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.map = torch.nn.Linear(8, 8)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                x = self.map(x)[:, None]
                return functional.scaled_dot_product_attention(x, x, x, is_causal=True)[:, 0]

        model = Layer()
        adam = torch.optim.Adam(model.parameters())
        with halfulp.watch(model, every=1, folder=found["watch"]):
            for _ in range(4):
                adam.zero_grad()
                model(torch.randn(2, 8, 8)).square().mean().backward()
                adam.step()
        return 0

    ended = awaited(*forked(watched, room))
    assert ended.code == 0, ended
    record = new_record("demo", {"seeds": 1}, "halfulp demo", seed=0)
    acts = [{"name": "cause", "number": 1, "title": "Cause", "finding": "found", "seconds": 1.0}]
    isolation = read_json(found["isolate"] / "isolation.json")
    acts[0] |= {"figures": isolation["figures"], "tables": isolation["tables"], "text": ["text"]}
    write_json(found["demo"].parent / "demo.json", acts[0])
    found["demo"].mkdir()
    (found["demo"].parent / "demo.json").rename(found["demo"] / "cause.json")
    named = [{key: acts[0][key] for key in ("name", "title", "finding", "seconds")}]
    write_json(found["demo"] / "run.json", record | {"status": "done", "acts": named})
    return found


def as_killed(folder: Path) -> None:
    """A training's folder as a killed process leaves it."""
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(record | {"status": "running", "ended": None}))
    for step in (12, 2):
        shutil.rmtree(folder / "checkpoints" / f"step-{step}", ignore_errors=True)
    (folder / ".lock").write_text("process 1\n")


def commands(kind: str, folder: Path, base: dict[str, Path], chance: random.Random) -> list[Any]:
    """A command that reads the folder."""
    page_ = folder.with_suffix(".html")
    found: list[list[Any]] = [["report", folder, "--json", "-"]]
    if chance.random() < 0.1:  # pictures take most of the time
        return ["report", folder, "--html", page_]
    if kind in ("train", "twin"):
        found += [["train", "--resume", folder]] * 4
        found += [["compare", base["twin"], folder], ["compare", folder, base["train"]]]
        new = folder.with_suffix(".new")
        found += [["train", "seconds", *SMALL, "--batches", folder, "--out", new]]
        out = folder.with_suffix(".isolated")
        found += [["isolate", folder, "--out", out, *BUDGET, "--budget-steps", "1"]]
    if kind == "pictures":
        found += [["compare", folder, base["pictures"]]] * 3
        found += [["compare", folder, base["pictures"], "--html", page_]]
        found += [["train", "--resume", folder]]
    if kind == "isolate":
        again = ["isolate", base["train"], "--out", folder, *BUDGET, "--budget-steps", "60"]
        found += [again]
    return chance.choice(found)


def faults(number: int, chance: random.Random, room: Path, at_once: int) -> Counter[str]:
    """Plant faults in run folders and let commands read them."""
    table: Counter[str] = Counter()
    base = bases(room)
    expected = state_of(base["train"])
    (room / "kernel.py").write_text(KERNEL)
    going: list[tuple[int, Path, Any]] = []

    def judged(pid: int, files: Path, what: Any) -> None:
        folder, described = what
        ended = awaited(pid, files)
        bad = bad_end(ended)
        endless = ended.code == -signal.SIGALRM
        table["faults"] += 1
        table["tracebacks"] += bad and not endless
        table["endless"] += endless
        table[f"exit {ended.code}"] += 1
        resumed = "--resume" in described and ended.code == 0 and described[-3] == "train"
        over = described[-4] == "over"
        told = ended.err if over else TOLD.search(ended.err)
        lost = resumed and not told and described[-1] != "resealed" and not same(folder, expected)
        table["lost"] += lost
        if bad or lost:
            print("fault:", described, ended.code, ended.err[-600:])
        for path in folder.parent.glob(f"{folder.name}*"):
            subprocess.run(["rm", "-rf", str(path)], check=True)

    for n in range(number):
        kind = chance.choice(["train"] * 5 + ["pictures", "isolate", "isolate", "watch", "demo"])
        folder = room / "faults" / f"r{n}"
        shutil.copytree(base[kind], folder)
        killed = kind == "train" and chance.random() < 0.8
        if killed:
            as_killed(folder)
        places = sorted(
            p for p in folder.rglob("*") if "rungs" not in p.parts or chance.random() < 0.1
        )
        places += [folder / ".lock", folder / "run.json", folder / "metrics.jsonl"]
        place, fault = chance.choice(places), chance.choice(KINDS)
        plant(place, fault, chance, base["twin"] / place.relative_to(folder))
        command = commands(kind, folder, base, chance)
        described = [
            *command,
            "killed" if killed else "over",
            kind,
            str(place.relative_to(folder)),
            fault,
        ]
        os.chdir(room)
        pid, files = forked(lambda: cli.main([str(a) for a in command]), room)  # noqa: B023
        going.append((pid, files, (folder, described)))
        if len(going) >= at_once:
            judged(*going.pop(0))
    for one in going:
        judged(*one)
    table["executed"] += (room / "kernel.ran").exists()
    for kind, folder in base.items():
        table["lost"] += kind == "train" and state_of(folder) != expected
    return table
