"""The command line: what it prints, what it writes, how it ends, and how it complains: in one line,
before the work.
"""

import importlib.metadata
import inspect
import itertools
import json
import platform
import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from rich.cells import cell_len

import halfulp
from halfulp import cli
from halfulp.audit import PROBES, Case, Shape
from halfulp.audit import run as audit_run
from halfulp.cli import listing
from halfulp.formats import FORMATS
from halfulp.recipes import RECIPES
from halfulp.training.presets import PRESETS
from tests.report.markup import problems

EXAMPLE = ["--", "-2.4071154594421387", "-2.296875"]
KERNEL = """
import torch
from torch.nn import functional

def good(query, key, value, *, is_causal, scale):
    operands = (x.double() for x in (query, key, value))
    out = functional.scaled_dot_product_attention(*operands, is_causal=is_causal, scale=scale)
    return out.to(query.dtype)

def biased(query, key, value, *, is_causal, scale):
    return good(query, key, value, is_causal=is_causal, scale=scale) * 1.02

def raising(query, key, value, *, is_causal, scale):
    raise RuntimeError("no such kernel")
"""


@pytest.fixture
def kernels(tmp_path):
    """A file with a sound target, one with a planted defect and one that cannot be called."""
    file = tmp_path / "kernels.py"
    file.write_text(KERNEL, encoding="utf-8")
    return lambda name: f"{file}:{name}"


def two_probes(depth, dtype, seed=0, shapes=(), captured=()):
    shape = shapes[0] if shapes else Shape(2, 4, 48, 48, 16)
    cases = tuple(Case(name, shape, seed, dtype) for name in ("gaussian", "value_constant"))
    small = Shape(2, 2, 32, 32, 16)
    relations = (
        Case("free_feature", small, seed, dtype),
        Case("free_feature_causal", small, seed, dtype),
    )
    return audit_run.Plan(cases, (), relations)


@pytest.fixture
def small_plan(monkeypatch):
    """Audits of two probes, so that the commands are tested and not the audit."""
    monkeypatch.setattr(audit_run, "plan", two_probes)
    # the slowest part, and not what is tested here
    monkeypatch.setattr(audit_run, "reconstructed", lambda *_: None)


def run(capsys, *arguments):
    code = cli.main([str(argument) for argument in arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nosuch"], "'nosuch' is not known; accepted are the commands demo, audit, "),
        (["adit"], "doctor; did you mean 'audit'?"),
        (["ls", "--nosuch"], "'--nosuch' is not known; accepted by halfulp ls are --op, --json"),
        (["audit", "sdpa", "--sede", "3"], "--repro; did you mean '--seed'?"),
        (["isolate", "run", "--from_stp=3"], "did you mean '--from-step'?"),
        (["--seed", "3"], "'--seed' is not known; accepted are the commands demo, "),
        (["report", "nowhere"], "run='nowhere': there is no such folder; accepted is"),
        (["train", "seconds", "--set", "step=3", "--out", "x"], "adjusted; did you mean 'steps'?"),
        (["train", "secnds", "--out", "x"], "did you mean 'seconds'?"),
        (["record", "os:getcwd", "--out", "x", "--device", "meta"], "device='meta': "),
        (["ls", "probes", "targets"], "'targets' is one argument too many; see --help"),
        (["ls", "formatz"], "presets; did you mean 'formats'?"),
        (
            ["ls", "colors"],
            "what='colors': accepted are all, formats, recipes, targets, probes, operations",
        ),
        (["explain", "1", "--operation", "dot"], "accepted for 'dot' is an even number"),
        (["explain", "1", "--format", "e4m3"], "accepted are ocp_e4m3 (largest 448"),
        (["explain", "1", "--format", "bflot16"], "did you mean 'bf16'?"),
        (["explain", "1", "two"], "values='two': accepted are finite numbers"),
        (["explain", "1", "inf"], "values='inf': accepted are finite numbers"),
        (["explain", "1", "2", "--format", "fp12"], "format='fp12' is not known; accepted: fp64, "),
        (["explain", "1", "2", "--format", "mxfp4"], "mxfp4: accepted is a scalar format"),
        (["explain", "1", "2", "--format"], "format: its value is missing"),
        (
            ["explain", "1", "2", "--operation", "root"],
            "operation='root': accepted are sum, product, dot",
        ),
        (["explain", "1", "2", "3", "--operation", "dot"], "accepted for 'dot' is an even number"),
        (["audit"], "targets: none given; accepted are names of `halfulp ls targets`"),
        (["audit", "sdap"], "target='sdap': accepted is a built-in name"),
        (["audit", "nosuch.py:f"], "target='nosuch.py:f': there is no file nosuch.py"),
        (
            ["audit", "sdpa", "--dtype", "int8"],
            "dtype='int8': accepted are bfloat16, float16, float32",
        ),
        (["audit", "sdpa", "--seed", "one"], "seed='one': accepted is an integer"),
        (["audit", "sdpa", "--quick"], "'--quick' is not known; accepted by halfulp audit are"),
        (["audit", "sdpa", "--shapes", "1,1,8,8,causal"], "accepted without ,causal"),
        (["bench", "--shapes", "1,4,8x9,8,causal"], "with causal is one number of tokens"),
        (
            ["bench", "--shapes", "1,4,8"],
            "shapes='1,4,8': accepted is B,H,N,D in positive",
        ),
        (
            ["audit", "sdpa", "--shapes", "4,4"],
            "shapes='4,4': accepted is B,H,N,D in positive integers",
        ),
        (
            ["audit", "sdpa", "--shapes", "1,1,0,8"],
            "shapes='1,1,0,8': accepted is B,H,N,D in positive integers",
        ),
        (
            ["audit", "sdpa", "--shapes", "1,3/2,8,8"],
            "shapes='1,3/2,8,8': accepted are key heads that divide the 3",
        ),
        (
            ["audit", "sdpa", "--json", "no/where.json"],
            "json='no/where.json': there is no folder 'no'",
        ),
        (
            ["audit", "sdpa", "--html", "no/where.html"],
            "html='no/where.html': there is no folder 'no'",
        ),
        (["audit", "sdpa", "--html", "."], "html='.' is a folder; accepted is a file"),
        (["audit", "sdpa", "--repro", "no/where"], "repro='no/where': there is no folder"),
        (["audit", "sdpa", "--captured", "no.safetensors"], "captured='no.safetensors': "),
        (["sweep"], "what is missing; see halfulp sweep --help"),
        (["sweep", "block", "--memory", "9"], "memory=9: accepted where it is not what is swept"),
        (["sweep", "length", "--seeds", "0"], "seeds=0: accepted is an integer of at least 1"),
        (
            ["figures", "--paper", "A", "--out", "f", "--claims", "no.json"],
            "'no.json': there is no s",
        ),
        (["tokens", "nowhere", "x.npy"], "folder='nowhere': there is no such folder"),
        (["report", __file__], "test_cli.py': it is a file; accepted is the folder of a training"),
        (["sweep", "color"], "what='color': accepted are precision, length, block, order"),
        (["sweep", "length", "--seeds", "1.5"], "seeds='1.5': accepted is an integer"),
        (["claims", "Z9"], "claim='Z9': accepted are A1, "),
        (["demo", "--out", "no/where"], "out='no/where': there is no folder"),
        (["demo", "--seeds", "0"], "seeds=0: accepted is an integer of at least 1"),
        (["demo", "--out"], "out: its value is missing"),
        (["isolate", "nosuch"], "run='nosuch': there is no such folder"),
    ],
)
def test_a_bad_argument_is_one_line(capsys, monkeypatch, tmp_path, arguments, says):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("halfulp: ")
    assert err.count("\n") == 1
    assert says in err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == [], (
        "nothing is written before the arguments are known to be good"
    )


def test_isolate_says_what_a_watched_run_lacks(capsys, tmp_path):
    record = tmp_path / "run.json"
    record.write_text('{"halfulp": "0.1.0", "kind": "watch"}', encoding="utf-8")
    for arguments, said in (
        (["isolate", tmp_path], "without a snapshot"),
        (["train", "--resume", tmp_path], "which records another program's training"),
    ):
        code, _, err = run(capsys, *arguments)
        assert code == 2
        assert f"is a folder of halfulp.watch{'' if 'without' in said else ','} {said}" in err


def test_a_demo_does_not_replace_other_files(capsys, tmp_path):
    (tmp_path / "thesis.tex").write_text("the only copy", encoding="utf-8")
    code, _, err = run(capsys, "demo", "--out", tmp_path)
    assert code == 2
    assert "holds other files than a demo's; accepted is a new or empty folder" in err
    assert (tmp_path / "thesis.tex").read_text(encoding="utf-8") == "the only copy"


def test_version_says_what_a_bug_report_needs(capsys):
    code, out, err = run(capsys, "--version")
    assert (code, err) == (0, "")
    first, versions, system, library = out.splitlines()
    assert first == f"halfulp {halfulp.__version__}"
    assert f"torch {importlib.metadata.version('torch')}" in versions
    assert platform.machine() in system
    assert library.startswith("native library: ")


def test_doctor(capsys, monkeypatch, tmp_path):
    code, out, err = run(capsys, "doctor", "--json", tmp_path / "found.json")
    assert (code, err) == (0, "")
    assert "✓ attention, forward and backward: backend " in out
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert found["versions"]["torch"] in out
    room = sys.modules["halfulp.attention"]
    monkeypatch.setattr(room, "attention", lambda query, key, value, **_: query + 0 * key * value)
    code, out, _ = run(capsys, "doctor")
    assert code == 1
    assert re.search("✗ attention, forward and backward: O is wrong by .*%", out)


def test_help_is_quick_for_it_needs_no_torch():
    code = (
        "import sys; from halfulp.cli import main; main(['--help']); main(['audit', '--help']);"
        " sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# serve ends in no result
@pytest.mark.parametrize("command", sorted(set(cli.COMMANDS) - {"serve"}))
def test_json_is_a_file_everywhere(command):
    parameters = inspect.signature(cli.COMMANDS[command]).parameters
    kinds = {name: one.annotation for name, one in parameters.items()}
    if "files" in parameters:  # options that a class holds together
        kinds |= type(parameters["files"].default).__annotations__
    assert kinds["json"] == "Path | None"


def test_json_beside_what_is_shown(capsys, tmp_path):
    code, out, _ = run(capsys, "ls", "formats", "--json", tmp_path / "formats.json")
    assert code == 0
    assert out.startswith("Number formats")
    rows = json.loads((tmp_path / "formats.json").read_text(encoding="utf-8"))
    assert rows == json.loads(run(capsys, "ls", "formats", "--json", "-")[1])


@pytest.mark.parametrize(
    "arguments", [[], ["--help"], *([name, "--help"] for name in cli.COMMANDS)]
)
def test_help(capsys, arguments):
    code, out, err = run(capsys, *arguments)
    assert (code, err) == (0, "")
    assert "usage: halfulp" in out
    documented = re.sub(r"[│\s]+", " ", out)
    for command in cli.COMMANDS:
        assert arguments not in ([], ["--help"]) or command in documented
    assert "PLACEHOLDER" not in documented


@pytest.mark.parametrize("command", sorted(cli.COMMANDS))
def test_every_option_says_what_it_is(capsys, command):
    _, out, _ = run(capsys, command, "--help")
    text = re.sub(r"[│╭╮╰╯─|+]|-{3,}|\s+", " ", out.split("--help", 1)[1])
    entries = re.split(r" (?=--[a-z])", re.sub(" +", " ", text))[1:]
    assert any(entry.startswith("--json") for entry in entries) == (command != "serve")
    lines = [line.removeprefix("│ ").rstrip(" │") for line in out.splitlines() if line[:1] == "│"]
    for line, after in itertools.pairwise(lines):
        if after.startswith("  ") and not line.startswith(("-", " " * 30)) and "•" not in line:
            first = after.split()[0]
            assert len(line) + len(first) + 1 > 76, f"{line!r} breaks off before {first!r}"
    for entry in entries:
        name, *words = re.sub(r" (\{[^}]*\}|\[.*?\]\]|[A-Z]{3,4}) ", " ", entry, count=1).split()
        assert len(words) >= 4, f"{command} {name} is not explained"


def test_help_names_units(capsys):
    _, out, _ = run(capsys, "sweep", "--help")
    for unit in ("tokens", "elements"):
        assert unit in out


@pytest.mark.parametrize(
    "arguments",
    [
        ["explain", *EXAMPLE, "--format", "bf16"],
        ["explain", "--format", "bf16", *EXAMPLE],
        ["explain", *EXAMPLE[1:], "--format", "bf16"],
        ["explain", *EXAMPLE],
    ],
)
def test_explain_takes_negative_numbers_and_options_in_any_order(capsys, arguments):
    code, out, err = run(capsys, *arguments)
    assert (code, err) == (0, "")
    assert "-4.71875 = 1 10000001 0010111" in out
    assert "-0.014759540557861328" in out
    assert max(map(len, out.splitlines())) <= 100


def test_explain_as_json(capsys):
    code, out, _ = run(capsys, "explain", *EXAMPLE, "--json", "-")
    found = json.loads(out)
    assert code == 0
    assert (found["result"], found["error"]) == (-4.71875, -0.014759540557861328)


def test_one_number_is_rounded_once(capsys):
    """In fp32 first, 1 + 2⁻⁸ + 2⁻⁴⁰ would be a tie."""
    code, out, _ = run(capsys, "explain", str(1 + 2.0**-8 + 2.0**-40))
    assert code == 0
    assert out.startswith("bf16, rounded to nearest, ties to even\n")
    assert "running value" not in out
    assert "result        1.0078125 = 0 01111111 0000001" in out


def test_explain_takes_exponents_and_other_operations(capsys):
    code, out, _ = run(
        capsys, "explain", "-1e-3", "3", "--operation", "product", "--format", "fp16", "--json", "-"
    )
    found = json.loads(out)
    assert code == 0
    assert (found["operation"], found["format"]) == ("product", "fp16")
    assert found["result"] == pytest.approx(-3e-3, rel=1e-3)


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("formats", [fmt.name for fmt in FORMATS]),
        ("recipes", list(RECIPES)),
        ("probes", [probe.name for probe in PROBES]),
        ("targets", ["sdpa:flash", "recipe:BF16_HALFULP"]),
        ("claims", ["A13", "D12"]),
        ("presets", list(PRESETS)),
    ],
)
def test_ls(capsys, what, names):
    code, out, err = run(capsys, "ls", what)
    assert (code, err) == (0, "")
    for name in names:
        assert re.search(rf"^{re.escape(name)} ", out, re.MULTILINE), name
    assert max(map(cell_len, out.splitlines())) <= 100
    rows = json.loads(run(capsys, "ls", what, "--json", "-")[1])
    first = next(iter(rows[0]))
    assert set(names) <= {row[first] for row in rows}


def test_explain_prints_the_page_of_every_cause(capsys):
    from halfulp.reconstruct import CAUSES

    for cause in CAUSES.values():
        code, out, _ = run(capsys, "explain", cause.code.lower(), "--json", "-")
        assert code == 0
        assert json.loads(out)["page"].startswith(f"# {cause.code}: ")
    _, out, _ = run(capsys, "explain", "HU109")
    assert "How to mend it" in out
    code, _, err = run(capsys, "explain", "HU900")
    assert code == 2
    assert err.startswith("halfulp: values='HU900': is no cause's code; accepted are those of")


@pytest.mark.parametrize("what", ["probes", "targets"])
def test_ls_of_an_operation_counts_what_the_table_of_operations_says(capsys, what):
    _, out, _ = run(capsys, "ls", "operations", "--json", "-")
    said = {row["operation"]: row[what] for row in json.loads(out)}
    for op in ("attention", "rms_norm"):
        code, out, _ = run(capsys, "ls", what, "--op", op, "--json", "-")
        assert code == 0
        assert len(json.loads(out)) == said[op] > 3
    code, _, err = run(capsys, "ls", "formats", "--op", "rms_norm")
    assert code == 2
    assert err == "halfulp: op='rms_norm': an operation has lists of targets and probes only\n"


def test_ls_everything(capsys):
    code, out, _ = run(capsys, "ls", "--json", "-")
    assert code == 0
    from halfulp.cli.listing import LISTS

    assert set(json.loads(out)) == set(LISTS)


@pytest.mark.usefixtures("small_plan")
def test_audit_of_a_sound_target(capsys, kernels, tmp_path):
    json_file, html_file = tmp_path / "a.json", tmp_path / "a.html"
    code, out, err = run(
        capsys, "audit", kernels("good"), "--in-process", "--json", json_file, "--html", html_file
    )
    assert (code, err) == (0, "")
    assert out.startswith(f"✓ SOUND  {kernels('good')}")
    (found,) = json.loads(json_file.read_text(encoding="utf-8"))
    assert found["verdict"] == "sound"
    page = html_file.read_text(encoding="utf-8")
    assert problems(page) == []
    assert "halfulp audit " in page
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {
        "kernels.py",
        "a.json",
        "a.html",
    }


@pytest.mark.usefixtures("small_plan")
def test_audit_of_a_defect_writes_a_program_that_runs_in_any_folder_and_says_when_it_cannot(
    capsys, kernels, monkeypatch, tmp_path
):
    """1 means that the defect is still there, and nothing else."""
    file = Path(kernels("")[:-1])
    monkeypatch.chdir(tmp_path)
    target = f"{file.name}:biased"
    code, out, _ = run(capsys, "audit", target, "--in-process", "--repro", "repro")
    assert code == 1
    assert out.startswith("✗ DEFECT")
    (program,) = (tmp_path / "repro").iterdir()
    assert not program.stem.isidentifier(), "programs beside it can import it in place of another"
    assert f"run {program.relative_to(tmp_path)}\n" in out, "a path that can be copied"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    shown = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    assert shown.returncode == 1, shown.stderr
    assert "× the limit of a defect" in shown.stdout
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace("* 1.02", "+ undefined"), encoding="utf-8")

    def refused():
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(program), run_name="__main__")
        return ended.value.code, capsys.readouterr().err

    code, err = refused()
    assert (code, err.count("\n")) == (2, 1)
    assert "not run: " in err
    file.unlink()
    code, err = refused()
    assert (code, err.count("\n")) == (2, 1)
    assert "there is no file" in err


@pytest.mark.usefixtures("small_plan")
@pytest.mark.parametrize(
    ("names", "code"),
    [
        (["raising"], 2),
        (["good", "raising"], 2),
        (["raising", "biased", "good"], 1),
        (["good", "good"], 0),
    ],
)
def test_the_exit_code_of_several_targets(capsys, kernels, names, code):
    found, out, err = run(capsys, "audit", *map(kernels, names), "--in-process")
    assert (found, err) == (code, "")
    assert "Traceback" not in out
    distinct = len(set(names))
    assert (f"{distinct} targets" in out) == (distinct > 1)
    if "raising" in names:
        assert "RuntimeError: no such kernel" in out


@pytest.mark.usefixtures("small_plan")
def test_audit_prints_json_alone_when_asked(capsys, kernels):
    code, out, _ = run(
        capsys,
        "audit",
        kernels("good"),
        "--in-process",
        "--json",
        "-",
        "--shapes",
        "2,2,24x40,8",
        "--seed",
        "3",
    )
    assert code == 0
    (found,) = json.loads(out)
    assert {(case["shape"], case["seed"]) for case in found["cases"]} == {("(2, 2, 24×40, 8)", 3)}


@pytest.mark.usefixtures("small_plan")
def test_a_missing_target_is_told_before_the_others_are_audited(capsys, kernels):
    code, out, err = run(capsys, "audit", kernels("good"), "flash_attn", "--in-process")
    assert (code, out) == (2, "")
    assert "target='flash_attn': " in err


def test_claims(capsys, tmp_path):
    page = tmp_path / "ledger.html"
    code, out, _ = run(capsys, "claims", "a13", "D3", "--html", page)
    assert code == 0
    assert "✓ A13  reproduced" in out
    assert "✓ D3  reproduced" in out
    assert problems(page.read_text(encoding="utf-8")) == []
    (found,) = json.loads(run(capsys, "claims", "A13", "--json", "-")[1])
    assert (found["id"], found["verdict"]) == ("A13", "reproduced")


def test_sweep(capsys, tmp_path):
    page = tmp_path / "sweep.html"
    small = ["--length", "64", "--head-dim", "16", "--memory", "1024", "--seeds", "2"]
    code, out, _ = run(capsys, "sweep", "precision", *small, "--html", page)
    assert code == 0
    assert "bf16" in out
    text = page.read_text(encoding="utf-8")
    assert problems(text) == []
    assert text.count("<svg") == 2
    found = json.loads(run(capsys, "sweep", "precision", *small, "--json", "-")[1])
    assert found["setting"]["length"] == 64


@pytest.mark.usefixtures("small_plan")
def test_targets_follow_shapes(capsys, kernels):
    """Each --shapes takes one size, and a second one another."""
    sizes = ["--shapes", "2,2,24,8", "--shapes", "2,4/2,24x40,8"]
    code, out, err = run(capsys, "audit", *sizes, kernels("good"), "--in-process", "--json", "-")
    assert (code, err) == (0, "")
    (found,) = json.loads(out)
    assert found["target"] == kernels("good")


def pipeline(command):
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False
    )


SMALL = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from halfulp import cli
from halfulp.audit import run
from tests.test_cli import two_probes
run.plan = two_probes
run.reconstructed = lambda *_: None
sys.exit(cli.main())
"""


def test_a_reader_that_stops_changes_neither_files_nor_exit_code(kernels, tmp_path):
    program = tmp_path / "audit.py"
    program.write_text(SMALL, encoding="utf-8")
    page, saved, target = tmp_path / "a.html", tmp_path / "a.json", kernels("biased")
    done = pipeline(
        f"{sys.executable} {program} audit {target} --in-process --html {page}"
        f" --json {saved} | head -n 1"
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.count("\n") == 1
    assert page.exists()
    assert saved.exists()


def test_a_full_device_is_one_line():
    done = pipeline(f"{sys.executable} -m halfulp ls probes > /dev/full")
    assert done.returncode == 3
    assert done.stderr == "halfulp: standard output: No space left on device\n"


def test_a_file_that_cannot_be_written_is_one_line_and_the_other_is_written(
    capsys, monkeypatch, tmp_path
):
    """The device is full when the work is done."""
    from halfulp.runs import folder

    whole = folder.write_text

    def full(path, text):
        if path.suffix == ".json":
            raise OSError(28, "No space left on device", str(path))
        return whole(path, text)

    monkeypatch.setattr(folder, "write_text", full)
    page = tmp_path / "a.html"
    small = ["--length", "64", "--head-dim", "16", "--memory", "1024", "--seeds", "2"]
    code, out, err = run(
        capsys, "sweep", "precision", *small, "--json", tmp_path / "a.json", "--html", page
    )
    assert code == 3
    assert err == f"halfulp: {tmp_path / 'a.json'}: No space left on device\n"
    assert "bf16" in out
    assert page.exists()


def test_a_closed_pipe_is_no_error():
    done = pipeline(f"{sys.executable} -m halfulp ls probes --json - | head -n 1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "[\n", "")


def test_interrupt(capsys, monkeypatch):
    def stopped() -> int:
        raise KeyboardInterrupt

    monkeypatch.setitem(cli.COMMANDS, "ls", stopped)
    assert run(capsys, "ls") == (130, "", "halfulp: interrupted\n")


@pytest.mark.usefixtures("small_plan")
def test_an_interrupted_audit_writes_what_is_done(capsys, kernels, tmp_path):
    """Ctrl-C while the second of three targets is audited."""
    file = tmp_path / "stopping.py"
    file.write_text(
        "def f(query, key, value, *, is_causal, scale):\n    raise KeyboardInterrupt\n",
        encoding="utf-8",
    )
    saved = tmp_path / "a.json"
    code, out, err = run(
        capsys,
        "audit",
        kernels("good"),
        f"{file}:f",
        kernels("biased"),
        "--json",
        saved,
        "--in-process",
    )
    assert code == 130
    assert err == "halfulp: interrupted after 1 of 3 targets\n"
    assert out.startswith("✓ SOUND")
    assert [report["verdict"] for report in json.loads(saved.read_text(encoding="utf-8"))] == [
        "sound"
    ]


class Mute(Exception):  # noqa: N818
    """An exception whose own words raise."""

    def __str__(self) -> str:
        raise RuntimeError


NAMED = r"\x1b[2Jname=1\x9b: [red]accepted[/red] is 2"
"""What is shown of a text that would clear the screen and set colors."""


@pytest.mark.parametrize(
    ("error", "ends", "says"),
    [
        (OSError(28, "No space left on device", "a/b"), 3, "a/b: No space left on device"),
        (OSError("no errno"), 3, "no errno"),
        (MemoryError(), 3, "not enough memory"),
        (
            RuntimeError("[enforce fail] can't allocate memory: you tried"),
            3,
            "not enough memory: [",
        ),
        (TypeError("two\nlines"), 4, "unforeseen TypeError: two lines (test_cli.py, line "),
        (RecursionError("deep"), 4, "unforeseen RecursionError: deep (test_cli.py, line "),
        (SystemExit(0), 4, "the code that ran asked the interpreter to exit"),
        (Mute(), 4, "unforeseen Mute: it cannot say (test_cli.py, line "),
        (ValueError("\x1b[2Jname=1\x9b: [red]accepted[/red] is 2"), 2, NAMED),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_whatever_ends_a_command_is_one_line_with_its_code(capsys, monkeypatch, error, ends, says):
    def broken(*args, **options):
        raise error

    monkeypatch.setitem(listing.LISTS, "targets", broken)
    code, out, err = run(capsys, "ls", "targets")
    assert (code, out) == (ends, "")
    assert err.startswith(f"halfulp: {says}")
    assert err.count("\n") == 1


def test_a_traceback_is_there_for_who_asks(capsys, monkeypatch):
    def broken(*args, **options):
        raise TypeError("two")

    monkeypatch.setitem(listing.LISTS, "targets", broken)
    monkeypatch.setenv("HALFULP_TRACEBACK", "1")
    assert "Traceback (most recent call last)" in run(capsys, "ls", "targets")[2]


def test_a_warning_is_one_line_of_the_commands(capsys, monkeypatch):
    def warned(*args, **options):
        said = UserWarning("line 3 of \x1b[31mmetrics\nis torn")
        # what the interpreter prints of it; pytest keeps warnings to itself
        sys.stderr.write(warnings.formatwarning(said, UserWarning, "file", 1))
        raise ValueError("and over")

    monkeypatch.setitem(listing.LISTS, "targets", warned)
    _, _, err = run(capsys, "ls", "targets")
    assert err == "halfulp: line 3 of \\x1b[31mmetrics is torn\nhalfulp: and over\n"


def test_a_kernel_that_ends_its_process_costs_only_its_own_report(capsys, small_plan, tmp_path):
    file = tmp_path / "kernels.py"
    file.write_text(
        f"{KERNEL}\nimport os\n\ndef ending(query, key, value, *, is_causal, scale):\n"
        "    print('bye')\n    os._exit(0)\n"
    )
    saved = tmp_path / "audits.json"
    code, out, err = run(capsys, "audit", f"{file}:ending", f"{file}:good", "--json", saved)
    assert (code, err) == (2, "")
    first, second = json.loads(saved.read_text())
    assert (first["verdict"], second["verdict"]) == ("error", "sound")
    assert first["reason"] == "ends its process (exit code 0); it prints: bye"
    assert "bye" in out


def test_reports_of_finished_targets_are_there_before_the_next(
    capsys, small_plan, kernels, tmp_path, monkeypatch
):
    saved = tmp_path / "audits.json"
    seen = []

    def stops(*args, **options):
        seen.append(json.loads(saved.read_text()))
        raise KeyboardInterrupt

    monkeypatch.setattr("halfulp.report.audit_table.print_audit", stops)
    code, _, err = run(
        capsys, "audit", kernels("good"), kernels("biased"), "--in-process", "--json", saved
    )
    assert code == 130
    assert "interrupted after 1 of 2" in err
    assert [report["verdict"] for report in seen[0]] == ["sound"]
