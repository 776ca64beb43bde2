"""The composite Action's steps, run here as the runner would, and the pages that go with it."""

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from halfulp.cli.entry import COMMANDS
from halfulp.cli.usage import options_of
from halfulp.reconstruct.causes import CAUSES

ROOT = Path(__file__).parents[1]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
KERNEL = """
import torch
def attention(query, key, value, *, is_causal=False, scale=None):
    q, k, v = (x.to(DTYPE) for x in (query, key, value))
    s = q @ k.mT * scale
    if is_causal:
        s = s.masked_fill(s.new_ones(s.shape[-2:]).tril() == 0, float("-inf"))
    return (s.softmax(-1) @ v).to(query.dtype)
"""


INSTALL, AUDIT = ACTION["runs"]["steps"]


def write_kernels(folder: Path) -> None:
    """A sound kernel, good.py, and one with a defect, bad.py."""
    for name, dtype in (("good", "torch.float32"), ("bad", "torch.bfloat16")):
        (folder / f"{name}.py").write_text(KERNEL.replace("DTYPE", dtype))


def run_step(step, folder, **inputs):
    """One step with the inputs and files that a runner gives it; halfulp is there already."""
    defaults = {name: str(one.get("default", "")) for name, one in ACTION["inputs"].items()}
    given = defaults | {name: str(value) for name, value in inputs.items()}
    environment = {
        name: re.sub(r"\${{ inputs\.([\w-]+) }}", lambda found: given[found[1]], text)
        for name, text in step.get("env", {}).items()
    }
    binaries = folder / "bin"
    binaries.mkdir(exist_ok=True)
    (binaries / "halfulp").write_text(f'#!/bin/sh\nexec {sys.executable} -m halfulp "$@"\n')
    (binaries / "halfulp").chmod(0o755)
    environment |= {
        "PATH": f"{binaries}:{os.environ['PATH']}",
        "GITHUB_STEP_SUMMARY": str(folder / "summary"),
        "GITHUB_OUTPUT": str(folder / "output"),
        "GITHUB_ACTION_PATH": str(ROOT),
        "RUNNER_TEMP": str(folder),
    }
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )


def test_the_action_leaves_the_torch_that_a_kernel_is_used_with(tmp_path):
    """It once replaced it by the one that halfulp is tested with."""
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin/python"
    has = "Torch==2.8.0\\nnumpy==1.26.4\\ntyping_extensions==4.12\\nmine @ file:///x\\n"
    python.write_text(f"""#!/bin/sh
case "$3" in list) printf '{has}' ;; *) echo "$@" > {tmp_path}/asked ;; esac
""")
    python.chmod(0o755)
    done = run_step(INSTALL, tmp_path)
    assert done.returncode == 0, done.stderr
    tested = tmp_path / "halfulp-constraints.txt"
    asked = (tmp_path / "asked").read_text().split()
    assert asked == ["-m", "pip", "install", f"{ROOT}[lab]", "-c", str(tested)]
    names, every = (
        {line.split("==")[0] for line in text.splitlines() if "==" in line}
        for text in (tested.read_text(), (ROOT / "constraints.txt").read_text())
    )
    assert every - names == {"torch", "numpy", "typing-extensions"} & every
    assert {"torch", "numpy"} < every


def test_the_action_audits_compares_and_shows(tmp_path):
    write_kernels(tmp_path)
    options = "--shapes 1,4,64,8 --forward --in-process --only gaussian"
    done = run_step(
        AUDIT, tmp_path, targets="bad.py:attention", options=options, against="good.py:attention"
    )
    assert done.returncode == 5, done.stdout + done.stderr
    assert (tmp_path / "output").read_text() == "exit-code=5\n"
    assert "✗ DEFECT" in (tmp_path / "summary").read_text(encoding="utf-8")
    for name in ("html", "json", "md", "xml"):
        assert (tmp_path / f"halfulp-audit.{name}").is_file()
    ElementTree.parse(tmp_path / "halfulp-audit.xml")
    # of a step that audits nothing the job does not show what an earlier one found
    (tmp_path / "summary").unlink()
    missing = run_step(AUDIT, tmp_path, targets="'no such.py:attention' *.py")
    assert missing.returncode == 2
    assert "there is no file no such.py" in missing.stderr
    assert not (tmp_path / "summary").exists()
    nowhere = dict.fromkeys(("page", "json", "junit", "markdown"), "")
    given = run_step(AUDIT, tmp_path, targets="x", options="--list --op 'no such'", **nowhere)
    assert "op='no such'" in given.stderr
    unclosed = run_step(AUDIT, tmp_path, targets="'bad.py:attention")
    assert unclosed.returncode == 2
    assert "each quote of which is closed" in unclosed.stderr


def test_the_action_passes_options_that_there_are():
    named = set(re.findall(r"(--[a-z-]+)", AUDIT["run"]))
    assert named == {"--against", "--html", "--json", "--junit", "--markdown"}
    assert named <= set(options_of(COMMANDS["audit"]))


@pytest.mark.parametrize("page", ["docs/ci.md", "skills/halfulp/SKILL.md"])
def test_pages_name_options_codes_and_inputs_that_there_are(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    options = {*options_of(COMMANDS["audit"]), "--halfulp-depth"}
    assert set(re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", text)) <= options
    assert set(re.findall(r"HU\d{3}", text)) <= {cause.code for cause in CAUSES.values()}
    used = re.findall(r"uses: OWNER/halfulp@main.*?\n\s+with:\n((?: {10}\w.*\n)*)", text)
    for block in used:
        assert {line.split(":")[0].strip() for line in block.splitlines()} <= set(ACTION["inputs"])
    if page.endswith("SKILL.md"):
        header = yaml.safe_load(text.split("---")[1])
        assert header["name"] == "halfulp"
        assert len(header["description"]) < 1024


def test_every_cause_has_a_code_and_a_page_of_its_own():
    given = [cause.code for cause in CAUSES.values()]
    assert len(set(given)) == len(given)
    assert all(re.fullmatch(r"HU[1-9]\d\d", code) for code in given)
    pages = {p.stem for p in (ROOT / "docs/causes").glob("HU*.md")}
    assert pages == set(given)
    listed = (ROOT / "docs/causes/README.md").read_text(encoding="utf-8")
    for key, cause in CAUSES.items():
        code = cause.code
        text = (ROOT / f"docs/causes/{code}.md").read_text(encoding="utf-8")
        assert text.startswith(f"# {code}: {CAUSES[key].name}\n")
        # what the code was given for: another cause under an old code is seen here
        assert f"Reports know it as `{key}`." in " ".join(text.split())
        for part in ("## Seen in public", "## How to mend it", "```diff\n-", "\n+"):
            assert part in text
        if re.match("HU[13]|HU50", code):  # another arithmetic, which prescribe has, may end it
            assert "`halfulp prescribe` [tries](../prescribe.md#what-is-tried)" in text
        assert f"| [{code}]({code}.md) | {CAUSES[key].name} |" in listed
