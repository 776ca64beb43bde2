"""What an audit is compared with: a revision whose files leave nothing behind, a kernel, a saved
audit.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from halfulp.audit import Shape
from halfulp.audit.against import read_audits
from halfulp.experiments.before import before
from halfulp.targets import CallLimits

KERNEL = """
import torch
from helper import FACTOR
def attention(query, key, value, *, is_causal=False, scale=None):
    s = query.float() @ key.float().mT * scale
    if is_causal:
        s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), float("-inf"))
    return (s.softmax(-1) @ value.float() * FACTOR).to(query.dtype)
"""
OPTIONS = {
    "dtype": "bfloat16", "depth": "quick", "seed": 0, "device": "cpu", "forward": True,
    "shapes": [Shape(1, 2, 8, 8, 8)], "captured": [],
}  # fmt: skip


def git(*arguments):
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(
        ["git", *who, *arguments], check=True, capture_output=True, text=True
    ).stdout


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Factor 1 in the first commit, 2 in the working folder."""
    folder, scratch = tmp_path / "repo" / "kernels", tmp_path / "scratch"
    folder.mkdir(parents=True)
    scratch.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    git("init", "-q", "-b", "main", "..")
    (folder / "kernel.py").write_text(KERNEL)
    (folder / "helper.py").write_text("FACTOR = 1\n")
    git("add", "-A")
    git("commit", "-qm", "one")
    (folder / "helper.py").write_text("FACTOR = 2\n")
    return folder


def test_a_revision_is_audited_and_leaves_nothing_behind(repository):
    status, files = git("status", "--porcelain"), sorted(repository.parent.rglob("*"))
    name, path = "kernel.py:attention", list(sys.path)
    with before("main", [name], OPTIONS, CallLimits()) as reference:
        found = reference(name)
        assert found["target"].startswith("kernel.py:attention at main (")
        assert found["verdict"] == "forward sound"
    assert Path.cwd() == repository
    assert sys.path == path
    assert git("status", "--porcelain") == status
    assert git("worktree", "list").count("\n") == 1
    assert sorted(repository.parent.rglob("*")) == files
    assert not list(Path(tempfile.gettempdir()).iterdir())
    with before("HEAD", [name], OPTIONS, CallLimits()) as reference:
        moved = reference(str(repository / name))
    assert moved["verdict"] == "forward sound"
    assert [c["rows"] for c in moved["cases"]] == [c["rows"] for c in found["cases"]]


def test_a_module_is_taken_from_the_revision_or_not_at_all(repository, monkeypatch):
    with before("HEAD", ["kernel:attention"], OPTIONS, CallLimits()) as reference:
        assert reference("kernel:attention")["verdict"] == "forward sound"
    (repository / "later.py").write_text("attention = print\n")
    for name, said in (
        ("later:attention", "later is not there at that revision"),
        ("later.py:attention", "later.py is not there at that revision"),
        ("json:dumps", "json is not there at that revision .it would come from"),
        ("sdpa", "it is no code of this repository"),
        ("/nowhere/kernel.py:attention", "lies outside of the repository"),
    ):
        with (
            pytest.raises(ValueError, match=said),
            before("HEAD", [name], OPTIONS, CallLimits()),
        ):
            pass


def test_what_is_no_reference_is_told_in_one_line(repository, tmp_path, monkeypatch):
    for reference, said in (
        ("nosuch", "against='nosuch': .*a git revision of the repository"),
        ("--output=x", "accepted are a git revision"),
        ("nosuch.json", "there is no such file"),
    ):
        with (
            pytest.raises(ValueError, match=said),
            before(reference, ["kernel.py:attention"], OPTIONS, CallLimits()),
        ):
            pass
    with pytest.raises(ValueError, match="in-process"), before("HEAD", [], OPTIONS, None):
        pass
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="git"), before("HEAD", [], OPTIONS, CallLimits()):
        pass
    (tmp_path / "saved.json").write_text(json.dumps([{"target": "x"}]))
    with pytest.raises(ValueError, match="it holds something else"):
        read_audits("saved.json")


def test_a_saved_audit_is_found_by_its_target(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain = {"dtype": "bfloat16", "verdict": "sound", "cases": [], "findings": []}
    one = [plain | {"target": "a"}]
    Path("one.json").write_text(json.dumps(one))
    Path("two.json").write_text(json.dumps([*one, plain | {"target": "b"}]))
    with before("one.json", ["other"], OPTIONS, None) as reference:
        assert reference("other")["target"] == "a"  # nothing else can be meant
    with before("two.json", ["b", "a"], OPTIONS, None) as reference:
        assert reference("b")["target"] == "b"
    with (
        pytest.raises(ValueError, match="holds no audit of c; it holds a, b"),
        before("two.json", ["c"], OPTIONS, None),
    ):
        pass


def test_another_kernel_is_audited_once(monkeypatch):
    with before("sdpa:math", ["a", "b"], OPTIONS, None) as reference:
        assert reference("a") is reference("b")
        assert reference("a")["target"] == "sdpa:math"
