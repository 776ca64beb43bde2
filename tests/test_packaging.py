"""Holds what is shipped: one version, a console script, the types, all files, and pins for every
dependency.
"""

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

import halfulp
from halfulp.cli.entry import LAB

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TESTED_TORCH = Version("2.13.0")

# Modules, standard library apart, that all names of `halfulp` may add to those of `import torch`: a
# small library fits, a plotting library does not. The time itself is measured by
# benchmarks/import_time.py.
MAX_ADDED_MODULES = 40


def requirements() -> dict[str, Requirement]:
    """Every dependency of halfulp and of its extras, by name."""
    lines = [
        *PROJECT["dependencies"],
        *(line for extra in PROJECT["optional-dependencies"].values() for line in extra),
    ]
    named = {canonicalize_name(one.name): one for one in map(Requirement, lines)}
    del named["halfulp"]  # an extra that asks for others
    return named


def pins(text: str) -> dict[str, Version]:
    """Constraints as {name: version}; anything but `name==version` is an error."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    pairs = [line.split("==") for line in lines]
    assert all(len(pair) == 2 for pair in pairs), [line for line in lines if line.count("==") != 1]
    return {canonicalize_name(name): Version(version) for name, version in pairs}


CONSTRAINTS = pins((ROOT / "constraints.txt").read_text(encoding="utf-8"))


def installed_needs(name: str, extras: frozenset[str]) -> list[Requirement]:
    """Return what an installed distribution asks for here; exact versions it pins by itself are
    left out.
    """
    found = map(Requirement, importlib.metadata.requires(name) or [])
    chosen = extras or {""}
    wanted = [
        need
        for need in found
        if not need.marker or any(need.marker.evaluate({"extra": e}) for e in chosen)
    ]
    return [need for need in wanted if not any(part.operator == "==" for part in need.specifier)]


def bounds(specifier: SpecifierSet) -> tuple[list[Version], list[Version]]:
    lower = [Version(part.version) for part in specifier if part.operator in {">=", ">"}]
    upper = [Version(part.version) for part in specifier if part.operator in {"<=", "<"}]
    return lower, upper


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source distribution, built without a network and without a
    C++ compiler.
    """
    folder = tmp_path_factory.mktemp("built")
    code = (
        f"from scikit_build_core.build import *; build_sdist({str(folder)!r});"
        f" build_wheel({str(folder)!r})"
    )
    environment = os.environ | {"CXX": str(folder / "no-compiler")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(next(built.glob("*.whl")))


def test_version_is_the_same_everywhere(wheel):
    assert importlib.metadata.version("halfulp") == halfulp.__version__
    metadata = wheel.read(f"halfulp-{halfulp.__version__}.dist-info/METADATA").decode()
    assert f"\nVersion: {halfulp.__version__}\n" in metadata


def test_wheel_ships_every_source_file(wheel):
    shipped = set(wheel.namelist())
    assert "halfulp/py.typed" in shipped
    source = ROOT / "src"
    files = {
        file.relative_to(source).as_posix()
        for file in source.glob("halfulp/**/*")
        if file.is_file()
    }
    files = {file for file in files if "__pycache__" not in file and "/libhalfulp." not in file}
    # what `halfulp explain HU109` prints
    pages = {f"halfulp/docs/causes/{page.name}" for page in (ROOT / "docs/causes").glob("HU*.md")}
    assert pages
    assert files | pages <= shipped
    assert {name.split("/")[0] for name in shipped} == {
        "halfulp",
        f"halfulp-{halfulp.__version__}.dist-info",
    }


def test_a_wheel_built_without_a_compiler_says_what_it_lacks(wheel, tmp_path):
    assert not [name for name in wheel.namelist() if "libhalfulp" in name]
    wheel.extractall(tmp_path)
    code = "from halfulp import native; print(native.__file__); print(native.missing())"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    file, reason = done.stdout.splitlines()
    assert Path(file).is_relative_to(tmp_path)
    assert "no C++ compiler" in reason


def test_wheel_ships_the_license_and_the_script(wheel):
    info = f"halfulp-{halfulp.__version__}.dist-info"
    assert "Apache License" in wheel.read(f"{info}/licenses/LICENSE").decode()
    assert "halfulp = halfulp.cli:main" in wheel.read(f"{info}/entry_points.txt").decode()


def test_source_distribution_can_be_tested(built):
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {
        "native/CMakeLists.txt",
        "native/dispatch.cpp",
        "native/halfulp.h",
        "pyproject.toml",
        "Makefile",
        "constraints.txt",
        "LICENSE",
        "README.md",
        "tests/conftest.py",
    }
    assert wanted | {"src/halfulp/__init__.py", "src/halfulp/py.typed"} <= names


def test_console_script_runs():
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="halfulp")
    assert script.value == "halfulp.cli:main"
    command = [Path(sys.executable).parent / "halfulp", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "audit" in done.stdout


def test_torch_is_a_range_around_the_tested_version():
    torch_range = requirements()["torch"].specifier
    lower, upper = bounds(torch_range)
    assert len(lower) == len(upper) == 1
    assert lower[0] <= TESTED_TORCH < upper[0]
    assert CONSTRAINTS["torch"] == TESTED_TORCH


def test_runtime_dependencies_are_not_pinned():
    pinned = [line for line in PROJECT["dependencies"] if re.search("===?|~=", line)]
    assert not pinned, (
        "a library's users must be able to move; constraints.txt holds the exact versions"
    )


@pytest.mark.parametrize("name", sorted(requirements()))
def test_constraint_satisfies_the_requirement(name):
    assert requirements()[name].specifier.contains(CONSTRAINTS[name])


def test_extras_that_messages_name_are_there():
    named = {
        extra
        for file in (ROOT / "src").rglob("*.py")
        for extra in re.findall(r"halfulp\[([\w,]+)\]", file.read_text(encoding="utf-8"))
    }
    assert {"tokens"} <= named <= set(PROJECT["optional-dependencies"])


def test_the_tests_have_every_extra_but_wandb():
    """It has no offline part that is small; its sink is tested against a stand-in."""
    extras = PROJECT["optional-dependencies"]
    assert tuple(Requirement(line).name for line in extras["lab"]) == LAB
    (asked,) = (one for one in map(Requirement, extras["dev"]) if one.name == "halfulp")
    assert asked.extras == set(extras) - {"dev", "targets", "bench", "wandb"}


def test_constraints_are_complete():
    """Whatever the dependencies bring along is pinned too, so a set-up next year is the set-up of
    today.
    """
    open_needs = list(requirements().values())
    seen: set[tuple[str, frozenset[str]]] = set()
    while open_needs:
        need = open_needs.pop()
        name, extras = canonicalize_name(need.name), frozenset(need.extras)
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        try:
            open_needs += installed_needs(name, extras)
        except importlib.metadata.PackageNotFoundError:
            assert name in CONSTRAINTS, f"{name} is neither installed nor pinned"
    names = {name for name, _ in seen}
    assert len(names) > 30
    assert names <= set(CONSTRAINTS), sorted(names - set(CONSTRAINTS))


@pytest.mark.parametrize("text", ["torch>=2.13\n", "torch\n", "torch==2.13.0,<3\n"])
def test_a_loose_constraint_is_refused(text):
    with pytest.raises((AssertionError, ValueError)):
        pins(text)


def without(*modules: str) -> str:
    """Code after which none of these modules can be imported."""
    return f"import sys; sys.modules.update(dict.fromkeys({modules}))\n"


def test_the_core_needs_torch_numpy_and_safetensors_alone():
    assert {Requirement(line).name for line in PROJECT["dependencies"]} == {
        "torch",
        "numpy",
        "safetensors",
    }
    lab = [name for name in LAB if name != "jinja2"]  # torch asks for it
    code = f"{without(*lab)}import runpy; runpy.run_path('wheel_smoke.py', run_name='__main__')"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT / "tests", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "halfulp.watch: 12 steps" in done.stdout
    assert "wrong: defect" in done.stdout


def test_names_are_there_without_their_packages_in_the_way():
    code = """
import sys, halfulp
assert "torch" not in sys.modules
import halfulp.audit.probes, halfulp.watch.calls
assert callable(halfulp.audit) and callable(halfulp.watch)
from halfulp import *
assert set(halfulp.__all__) <= set(dir(halfulp)) and set(halfulp.__all__) <= set(globals())
assert halfulp.audit is audit
try:
    halfulp.atention
except AttributeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "module 'halfulp' has no attribute 'atention'\n"


@pytest.mark.parametrize("arguments", [["--help"], ["ls", "formats"], ["train", "seconds"]])
def test_the_command_line_says_what_to_install(arguments):
    code = "from halfulp.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", without("tyro", "scipy") + code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "halfulp: the command line needs tyro, scipy, not installed here: pip install"
        " 'halfulp[lab]'\n"
    )


def test_every_install_is_constrained():
    lines = (ROOT / "Makefile").read_text(encoding="utf-8").splitlines()
    installs = [line for line in lines if re.search(r"\bpip install\b", line)]
    installs = [line for line in installs if "$(VENV)-lowest" not in line]
    assert installs
    assert all("-c constraints.txt" in line for line in installs)
    assert "pip install" not in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_import_adds_little_to_torch(added_modules):
    added = added_modules("halfulp")
    foreign = {
        name for name in added if name.split(".")[0] not in sys.stdlib_module_names | {"halfulp"}
    }
    assert len(foreign) <= MAX_ADDED_MODULES, sorted(foreign)
    slow = ("torch._dynamo", "torch._inductor", "torch.utils.cpp_extension")
    assert not [name for name in foreign if name.startswith(slow)]


WITHOUT_POSIX = """
import importlib, os, pkgutil, sys, torch
for name in ("fork", "sched_getaffinity", "sysconf", "getuid", "uname"):
    if hasattr(os, name):
        delattr(os, name)
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog"):
            raise ImportError(name)
sys.meta_path.insert(0, Absent())
import halfulp
from halfulp.runs.machine import describe_machine
describe_machine()
for module in pkgutil.walk_packages(halfulp.__path__, "halfulp."):
    if "libhalfulp" not in module.name and "triton" not in module.name:
        importlib.import_module(module.name)
"""


def test_every_module_imports_where_posix_is_not():
    """As on Windows; Triton's own modules need Triton."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_POSIX], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_third_parties_import_without_a_warning():
    named = ("matplotlib.pyplot", "scipy.stats", "tyro", "rich.progress", "transformers")
    names = [name for name in named if importlib.util.find_spec(name.partition(".")[0])]
    command = [sys.executable, "-W", "error", "-c", f"import {', '.join(names)}"]
    subprocess.run(command, check=True)


def test_the_wheels_for_users_are_one_for_every_python():
    wheels = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
        "cibuildwheel"
    ]
    assert wheels["build"] == "cp311-*"
    assert wheels["linux"]["manylinux-x86_64-image"] == "manylinux_2_28"
    assert (ROOT / wheels["test-command"].split("{project}/")[1].split()[0]).is_file()


@pytest.mark.parametrize(
    ("schema", "pattern"),
    [("github-workflows", ".github/workflows/*.yml"), ("github-actions", "action.yml")],
)
def test_workflows_are_valid(schema, pattern, tmp_path):
    """By the schemas that the checker ships; a job without a machine is refused by them."""
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}"]
    files = sorted(ROOT.glob(pattern))
    assert files
    done = subprocess.run([*check, *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    broken = tmp_path / files[0].name
    broken.write_text(files[0].read_text(encoding="utf-8").replace("runs", "ruins"), "utf-8")
    assert subprocess.run([*check, broken], capture_output=True, check=False).returncode == 1


def test_workflows_run_what_the_makefile_has():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    text = (ROOT / ".github" / "workflows" / "check.yml").read_text(encoding="utf-8")
    named = set(re.findall(r"run: make (\w+)", text))
    assert {"lint", "test", "lowest", "documents"} == named
    assert named <= targets
