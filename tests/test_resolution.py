"""What an installer would choose: the constraints for the public and for PyTorch's CPU build, and
the lowest versions allowed. Only metadata is downloaded; without a network these tests skip.
"""

import importlib.metadata
import os
import re
import subprocess
import zipfile
from pathlib import Path

import pytest
import uv
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
CPU_BUILD_NEEDS = (
    "filelock",
    "typing-extensions>=4.10.0",
    "setuptools>=77.0.3",
    "sympy>=1.13.3",
    "networkx>=2.5.1",
    "jinja2",
    "fsspec>=0.8.5",
)
PYTHONS = ("3.11", "3.14")  # the oldest and the newest; the others here take 3.12
UNREACHABLE = re.compile(
    r"dns error|client error \(Connect\)|network was disabled|timed out"
    r"|HTTP status \S+ \((5|40[37]|429)"
)


def resolve(*options: str, python: str = "3.12") -> dict[str, Version]:
    """Resolve every extra and return {name: version}; ValueError says why nothing fits.

    No configuration of this machine takes part: no pip.conf, no uv.toml, no local wheels.
    """
    command = [uv.find_uv_bin(), "pip", "compile", "--no-config", "--no-python-downloads"]
    command += ["--quiet", "--no-header", "--no-annotate", "--python-version", python]
    command += ["--all-extras", "pyproject.toml", *options]
    # a source distribution is asked for its metadata by a Python that must not see ours
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        if UNREACHABLE.search(done.stderr):
            pytest.skip(f"without a network nothing is resolved: {done.stderr}")
        raise ValueError(done.stderr)
    pairs = [line.partition(" ")[0].split("==") for line in done.stdout.splitlines()]
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def pinned() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def cpu_build(folder: Path, version: str) -> Path:
    """Make a wheel of torch with the metadata of its CPU build and nothing in it, which is all that
    a resolver reads.
    """
    metadata = ["Metadata-Version: 2.1", "Name: torch", f"Version: {version}"]
    metadata += [f"Requires-Dist: {need}" for need in CPU_BUILD_NEEDS]
    wheel = folder / f"torch-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        inside = f"torch-{version}.dist-info"
        archive.writestr(f"{inside}/METADATA", "\n".join(metadata) + "\n")
        tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{inside}/WHEEL", tags)
        archive.writestr(f"{inside}/RECORD", "")
    return wheel


@pytest.mark.parametrize("python", PYTHONS)
def test_the_constraints_resolve_for_the_public(python):
    found = resolve("-c", "constraints.txt", python=python)
    assert len(found) > 100
    assert found.items() <= pinned().items(), "what is installed is pinned, CUDA's libraries too"
    assert {"nvidia-cublas", "triton"} <= set(found), "a plain install has CUDA"


def test_the_constraints_resolve_with_the_cpu_build(tmp_path):
    wheel = cpu_build(tmp_path, f"{pinned()['torch']}+cpu")
    found = resolve("-c", "constraints.txt", "--find-links", str(wheel.parent))
    assert found.pop("torch").local == "cpu"
    assert found.items() <= pinned().items()
    assert not [name for name in found if name.startswith(("nvidia", "cuda"))]


def test_the_stand_in_for_the_cpu_build_needs_what_the_real_one_does():
    if not (importlib.metadata.version("torch").endswith("+cpu")):
        pytest.skip("the torch of this machine is not the CPU build")
    found = importlib.metadata.requires("torch") or []
    assert {need for need in found if "extra ==" not in need} == set(CPU_BUILD_NEEDS)


def test_constraints_that_contradict_each_other_are_found(tmp_path):
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    other = tmp_path / "constraints.txt"
    other.write_text(re.sub("triton==.*", "triton==3.4.0", text), encoding="utf-8")
    with pytest.raises(ValueError, match="triton"):
        resolve("-c", str(other))


def test_the_lowest_versions_fit_together():
    """`make lowest` runs tests with them."""
    found = resolve("--resolution", "lowest-direct", python=PYTHONS[0])
    assert found["torch"] < pinned()["torch"]
    assert found["numpy"] < pinned()["numpy"]
