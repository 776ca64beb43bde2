"""What an audit is compared with: a saved audit, another kernel, or the same kernel at a git
revision.

A revision's files are written into a temporary folder through an index of their own: nothing in the
repository is touched, and nothing is left behind, however the command ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from halfulp.audit import audit
from halfulp.audit.against import audit_of, read_audits
from halfulp.operations import ATTENTION
from halfulp.targets import CallLimits, canonical, is_code, isolated, resolve

Plain = Mapping[str, Any]
Before = Callable[[str], dict[str, Any]]
"""The audit to compare a target's with, by the target's name, as plain data."""


def is_saved(name: str) -> bool:
    """Whether a name is that of a saved audit."""
    return name.endswith(".json")


@contextlib.contextmanager
def before(
    reference: str,
    names: Sequence[str],
    options: Mapping[str, Any],
    limits: CallLimits | None,
) -> Iterator[Before]:
    """Make what targets are compared with; audits at once what needs no other folder.

    Args:
        reference: FILE.json, a target's name, or a git revision of the working folder's repository.
        names: of the targets that will be compared.
        options: keyword arguments of `halfulp.audit`.
        limits: of calls in processes of their own; None calls in this process.

    Raises:
        ValueError: it is none of these, or none of that can be compared with these targets.
    """
    if is_saved(reference):
        reports = read_audits(reference)
        named = {name: audit_of(reports, reference, name) for name in names}
        yield lambda name: named[name]
        return
    if _is_target(reference, options.get("op", ATTENTION)):
        yield _target(reference, options, limits)
        return
    with _files_of(reference) as (tree, commit):
        for name in names:
            _check_lies_in(tree, name)
        if limits is None:
            raise ValueError(
                f"against={reference!r}: a revision's code is loaded in a process of its own;"
                " accepted without --in-process"
            )
        yield lambda name: _at_revision(tree, commit, reference, name, options, limits)


def _is_target(name: str, operation: str) -> bool:
    if is_code(name):
        return True
    try:
        resolve(canonical(name), operation=operation)
    except ValueError:
        return False
    return True


def _target(name: str, options: Mapping[str, Any], limits: CallLimits | None) -> Before:
    op, form = options.get("op", ATTENTION), options.get("form") if is_code(name) else None
    with ExitStack() as stack:
        given = (
            resolve(name, "against", op, form)
            if limits is None
            else stack.enter_context(isolated(name, str(options["device"]), limits, op, form))
        )
        report = audit(given, **{**options, "explain": False}).as_dict()
    return lambda _: report


def _at_revision(
    tree: Path,
    commit: str,
    reference: str,
    name: str,
    options: Mapping[str, Any],
    limits: CallLimits,
) -> dict[str, Any]:
    moved = _moved(tree, name)  # before the working folder is another
    given = (options.get("op", ATTENTION), options.get("form"))
    with (
        _standing_in(tree),
        isolated(moved, str(options["device"]), limits, *given) as target,
    ):
        # other processes would not stand there
        report = audit(target, **{**options, "explain": False, "jobs": 1}).as_dict()
    return report | {"target": f"{name} at {reference} ({commit[:10]})"}


def _git(*arguments: str, index: Path | None = None) -> str:
    """What git says; ValueError, with its own words, where it fails."""
    given = os.environ | ({"GIT_INDEX_FILE": str(index)} if index else {})
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, env=given)
    except OSError as error:
        raise ValueError(f"git does not run: {error.strerror}") from None
    if done.returncode:
        raise ValueError(" ".join(done.stderr.split()) or f"git {arguments[0]} fails")
    return done.stdout.strip()


@contextlib.contextmanager
def _files_of(revision: str) -> Iterator[tuple[Path, str]]:
    """The files of a revision in a temporary folder, and its commit."""
    try:
        _git("rev-parse", "--show-toplevel")
        # a revision that begins with a dash is no option of git's
        commit = _git("rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}")
    except ValueError as error:
        cut = ""
        with contextlib.suppress(ValueError):
            if _git("rev-parse", "--is-shallow-repository") == "true":
                cut = ", of which this clone holds a part (git fetch --unshallow; fetch-depth: 0)"
        raise ValueError(
            f"against={revision!r}: {error}; accepted are a git revision of the repository that"
            f" you are in{cut}, a target's name, and a FILE.json that `halfulp audit --json` wrote"
        ) from None
    with tempfile.TemporaryDirectory(prefix="halfulp-against-") as folder:
        tree, index = Path(folder).resolve() / "tree", Path(folder) / "index"
        tree.mkdir()
        top = _git("rev-parse", "--show-toplevel")
        _git("-C", top, "read-tree", commit, index=index)
        _git("-C", top, "checkout-index", "--all", f"--prefix={tree}/", index=index)
        yield tree, commit


def _top() -> Path:
    return Path(_git("rev-parse", "--show-toplevel")).resolve()


def _moved(tree: Path, name: str) -> str:
    """The name of a target's code in the other tree."""
    where, _, function = name.rpartition(":")
    if where.endswith(".py") and Path(where).is_absolute():
        at, top = Path(where).resolve(), _top()
        if not at.is_relative_to(top):
            raise ValueError(f"target={name!r}: {where} lies outside of the repository {top}")
        return f"{tree / at.relative_to(top)}:{function}"
    return name


@contextlib.contextmanager
def _standing_in(tree: Path) -> Iterator[None]:
    """The working folder and the path of modules, moved from the repository into the tree: what a
    process that is started meanwhile inherits.
    """
    top, before_path = _top(), list(sys.path)
    here = Path.cwd().resolve()
    folder = tree / here.relative_to(top)
    moved = []
    for entry in before_path:
        at = (here / entry).resolve()
        moved.append(str(tree / at.relative_to(top)) if at.is_relative_to(top) else entry)
    # what is installed into a folder of the repository, as many virtual environments are
    there = zip(moved, before_path, strict=True)
    sys.path[:] = [new if Path(new).exists() else old for new, old in there]
    try:
        with contextlib.chdir(folder if folder.is_dir() else tree):
            yield
    finally:
        sys.path[:] = before_path


_FIND = """
import importlib.util, json, sys
sys.path[:] = ["", *json.loads(sys.argv[1])]
found = importlib.util.find_spec(sys.argv[2])
print((found.origin if found else None) or "")
"""


def _check_lies_in(tree: Path, name: str) -> None:
    """Raise ValueError unless a target's code comes from the tree, so that no kernel is compared
    with itself.
    """
    if not is_code(name):
        raise ValueError(
            f"target={name!r}: it is no code of this repository, whose revisions are compared;"
            " accepted is 'file.py:function' or 'module:function'"
        )
    where = _moved(tree, name).rpartition(":")[0]
    with _standing_in(tree):
        if where.endswith(".py") or "/" in where:
            found = str(Path(where).resolve()) if Path(where).is_file() else ""
        else:
            asked = [sys.executable, "-c", _FIND, json.dumps(sys.path), where]
            done = subprocess.run(asked, capture_output=True, text=True)
            found = done.stdout.strip().rpartition("\n")[2]
    if not found or not Path(found).resolve().is_relative_to(tree):
        also = f" (it would come from {found})" if found else ""
        raise ValueError(f"target={name!r}: {where} is not there at that revision{also}")
