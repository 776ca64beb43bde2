"""`assert_sound` and pytest's plugin: what a failing test says, and what is tried again first."""

import os
import subprocess
import sys
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from halfulp import testing
from halfulp.audit import Case, Shape, invariants, relation_replay
from halfulp.audit.run import runner
from halfulp.targets import resolve

SMALL = {"shapes": [Shape(1, 4, 64, 64, 8)]}
BAD = """
def attention(query, key, value, *, is_causal=False, scale=None):
    s = query @ key.mT * scale
    if is_causal:
        s = s.masked_fill(s.new_ones(s.shape[-2:]).tril() == 0, float("-inf"))
    return s.softmax(-1) @ value
"""
GOOD = "from halfulp import attention"
"""Two kernels that are recipes with a name, the bad one bf16 throughout: what a reconstruction
finds at once, where another fault takes it ten seconds.
"""


def made(kernel):
    names = {}
    exec(compile(kernel, "kernel", "exec"), names)
    return names["attention"]


def test_a_sound_kernel_passes_and_gives_its_audit():
    assert testing.assert_sound(made(GOOD), like="sound", **SMALL).verdict == "sound"


def test_a_failure_says_what_why_where_and_how_to_see_it():
    with pytest.raises(testing.SoundnessError) as raised:
        testing.assert_sound(made(BAD), **SMALL)
    text, report = str(raised.value), raised.value.report
    assert "has a DEFECT" in text.splitlines()[0]
    for word in ("cause", "evidence", "resembles", "in training", "worst", "findings", "smallest"):
        assert f"\n  {word:<11} " in text, text
    assert f"halfulp explain {report.as_dict()['cause']['code']}" in text
    assert "reproduce(" in text
    assert max(map(len, text.splitlines())) < 200
    assert isinstance(raised.value, AssertionError)
    again = testing.Failing.of(raised.value.failing.as_dict())
    assert again == raised.value.failing
    assert testing.replay(made(BAD), again) > 1 > testing.replay(made(GOOD), again)


def test_what_was_not_seen_is_not_sound():
    def forward(query, key, value, *, is_causal=False, scale=None):
        return made(GOOD)(query, key, value, is_causal=is_causal, scale=scale).detach()

    def failing(query, key, value, **options):
        raise RuntimeError("no GPU")

    with pytest.raises(testing.SoundnessError, match="gave no gradients"):
        testing.assert_sound(forward, **SMALL)
    assert testing.assert_sound(forward, forward=True, **SMALL).verdict == "forward sound"
    with pytest.raises(
        testing.SoundnessError, match=r"ERROR: could not be audited\n  why .*no GPU"
    ):
        testing.assert_sound(failing, **SMALL)


def test_like_another_kernel_or_a_saved_audit(tmp_path):
    with pytest.raises(testing.SoundnessError, match=r"is WORSE than .*attention"):
        testing.assert_sound(made(BAD), like=made(GOOD), **SMALL)
    bad = testing.assert_sound(made(BAD), like=made(BAD), **SMALL)  # no worse than itself
    assert bad.verdict == "defect"
    for wrong, said in (
        ({"like": "soundd"}, "like='soundd'.* or 'stock' or 'sound'"),
        ({"like": "no.json"}, "like='no.json': there is no such file"),
        ({"op": "norm_of_rms", "shapes": ()}, "norm_of_rms"),
        ({"depth": "deep"}, "depth='deep'"),
    ):
        with pytest.raises(ValueError, match=said):
            testing.assert_sound(made(GOOD), **(SMALL | wrong))


def shifted(query, key, value, *, is_causal=False, scale=None):
    """Scores of bf16 size where keys share a constant: a key shift is seen."""
    s = (query.float() @ key.float().mT * scale).to(query.dtype).float()
    return (s.softmax(-1) @ value.float()).to(query.dtype)


def test_a_broken_relation_is_shown_again():
    case = Case("free_feature", Shape(2, 4, 192, 192, 64))
    for kernel, broken in ((shifted, True), (made(GOOD), False)):
        failing = testing.Failing(case, "relation", "key shift: O", "out")
        assert (testing.replay(kernel, failing) > 1) is broken


def test_relations_go_by_the_names_they_give():
    call = runner(resolve("recipe:BF16_FLASH2"))  # which takes masks and gives lse
    case = Case("free_feature", Shape(2, 2, 24, 24, 16))
    x = relation_replay.references(case).inputs

    def run(x):
        return call(replace(x, num_splits=0))

    for name, relation in (invariants.PLAIN | invariants.CAUSAL).items():
        assert {found.invariant for found in relation(run, x, run(x))} == {name}


TEST = """
from pathlib import Path
def test_kernel(assert_sound):
    names = {}
    exec(Path("kernel.py").read_text(), names)
    assert_sound(names["softmax"], op="softmax")
"""
BAD_SOFTMAX = """
def softmax(input, dim):
    exponentials = (input - input.amax(dim, keepdim=True)).exp()
    return exponentials / exponentials.sum(dim, keepdim=True)
"""


def test_the_plugin_remembers_what_failed_and_writes_figures(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "test_it.py").write_text(TEST)

    def run(kernel, *options):
        (tmp_path / "kernel.py").write_text(kernel)
        # once, whether halfulp's entry point is installed or not
        given = [
            "-p",
            "no:halfulp",
            "-p",
            "halfulp.pytest_plugin",
            "--rootdir",
            ".",
            "-c",
            os.devnull,
            "-p",
            "no:unraisableexception",  # looks for garbage five times at each end, for seconds here
            *options,
        ]
        code = pytest.main(["test_it.py", "-q", "-o", "cache_dir=cache", *given])
        return code, "".join(capfd.readouterr())

    code, out = run(BAD_SOFTMAX, "--junit-xml=j.xml")
    assert code == 1
    assert "has a DEFECT" in out
    assert "soundness.py" not in out.replace("halfulp.testing.soundness", "")  # no frame of ours
    properties = ElementTree.parse(tmp_path / "j.xml").findall(".//property")
    assert {p.get("name").partition(": ")[2] for p in properties} == {
        "verdict", "cause", "worst times stock", "worst times floor",
    }  # fmt: skip
    code, out = run(BAD_SOFTMAX, "--halfulp-depth", "full")
    assert "still fails on the input that failed last time" in out
    code, out = run("from torch import softmax")
    assert code == 0, out
    assert (
        "invalid choice: 'deep'" in run("from torch import softmax", "--halfulp-depth", "deep")[1]
    )


def test_the_plugin_imports_nothing_until_it_is_used(tmp_path):
    code = (
        "import sys, halfulp.pytest_plugin;"
        " print([m for m in sys.modules if m.split('.')[0] in ('torch', 'numpy')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
