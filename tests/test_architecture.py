"""Holds the shape of the source: who may import whom, how long things grow, and what may not be
used at all.

Every rule is a function from a package folder to the violations in it, one line each. It is run on
the real tree, which must have none, and on a small tree with one planted fault, which must be
flagged: a rule that went blind fails.
"""

import ast
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "halfulp"
PACKAGE = SOURCE.name
# at 100 columns; what 400 and 60 lines of 120 columns take
MAX_FILE_LINES = 480
MAX_FUNCTION_LINES = 72

# From the bottom up: a layer may import the rows above its own in this table and nothing in its own
# row but itself.
ORDER = [
    {"native", "runs", "chances", "complaints", "covering"},
    {"formats"},
    {"recipes", "calls"},
    {"algorithms"},
    {"ops"},
    {"attention"},
    {"operations"},
    {"targets"},
    {"reconstruct", "interpose"},
    {"audit", "watch"},
    {"testing"},
    {"pytest_plugin"},
    {"training"},
    {"isolate", "diff"},
    {"prescribe"},
    {"experiments"},
    {"papers"},
    {"cli"},
]
MAY_IMPORT = {
    layer: set().union(*ORDER[:row]) for row, layers in enumerate(ORDER) for layer in layers
}
# held equal to the algorithms by tests, so neither may lean on the other
MAY_IMPORT["kernels"] = {"native", "formats", "recipes", "calls"}
MAY_IMPORT["ops"] |= {"kernels"}  # the one door to the kernels
MAY_IMPORT["report"] = {
    "complaints",
    "formats",
    "recipes",
}  # runs nothing
MAY_IMPORT["testing"] |= {"report"}  # what a verdict means, in words
MAY_IMPORT["cli"] |= {"report", ""}  # "" is the package's face, halfulp/__init__.py
MAY_IMPORT["__main__"] = {"cli"}

EXPECTED = {
    "formats",
    "recipes",
    "algorithms",
    "attention",
    "audit",
    "experiments",
    "report",
    "cli",
}
NUMERIC = {"formats", "recipes", "algorithms", "kernels", "ops", "attention", "audit"}
ENVIRONMENT = {"os.environ", "os.environb", "os.getenv", "os.getenvb"}
PICKLING = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib.numpy_pickle"}
CODE_LOADERS = {
    "eval",
    "exec",
    "torch.load",
    "torch.serialization.load",
    "torch.save",
    "torch.serialization.save",
}
# files of pickles; joblib.Parallel writes none
CODE_LOADERS |= {"joblib.load", "joblib.dump", "joblib.Memory"}
HEAVY = {"triton", "matplotlib", "transformers", "scipy", "rich", "tyro", "joblib", "cattrs"}


@dataclass(frozen=True)
class Module:
    """One source file: its path inside the package, its dotted name and layer, and its syntax tree
    with all nodes of it.
    """

    path: Path
    name: str
    layer: str
    text: str
    tree: ast.Module
    nodes: tuple[ast.AST, ...]

    def at(self, line: int, message: str) -> str:
        return f"{self.path}:{line}: {message}"


@functools.cache  # a tree is whole before the first rule reads it
def read_modules(package: Path) -> list[Module]:
    modules = []
    for file in sorted(package.rglob("*.py")):
        path = file.relative_to(package)
        parts = path.with_suffix("").parts
        dotted = parts[:-1] if parts[-1] == "__init__" else parts
        text = file.read_text(encoding="utf-8")
        name = ".".join((PACKAGE, *dotted))
        tree = ast.parse(text)
        nodes = tuple(ast.walk(tree))  # once, for every rule looks through them
        modules.append(Module(path, name, dotted[0] if dotted else "", text, tree, nodes))
    return modules


def imported_names(module: Module) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of every import, wherever it stands, `import_module("…")` with a
    literal included.
    """
    for node in module.nodes:
        match node:
            case ast.Import():
                yield from ((node.lineno, alias.name) for alias in node.names)
            case ast.ImportFrom():
                base = _absolute(module, node)
                yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
            case ast.Call(
                func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(name)), *_]
            ):
                yield node.lineno, f"{PACKAGE}{name}" if name.startswith(".") else name


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    # "from ." in a module names its package; in a package's __init__.py it names the package itself
    up = node.level - (module.path.name == "__init__.py")
    parent = module.name.split(".")[: len(module.name.split(".")) - up]
    return ".".join([*parent, *([node.module] if node.module else [])])


def used_names(module: Module) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of everything imported or used, with `import numpy as np`
    undone.
    """
    aliases = {}
    for node in module.nodes:
        if isinstance(node, ast.Import):
            aliases |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom):
            aliases |= {
                alias.asname or alias.name: f"{_absolute(module, node)}.{alias.name}"
                for alias in node.names
            }
    yield from imported_names(module)
    for node in module.nodes:
        if isinstance(node, ast.Name | ast.Attribute):
            root, *rest = ast.unparse(node).split(".")
            yield node.lineno, ".".join([aliases.get(root, root), *rest])


def upward_imports(package: Path) -> list[str]:
    """Imports point downward. The package's face re-exports: it may import all, and none but cli
    imports it.
    """
    found = []
    for module in read_modules(package):
        if not module.layer:
            continue
        if module.layer not in MAY_IMPORT:
            found.append(
                module.at(
                    1, f"{module.layer} has no place in the layer table of {Path(__file__).name}"
                )
            )
            continue
        for line, name in imported_names(module):
            top, *inner = name.split(".")
            if top != PACKAGE or inner == ["__version__"]:
                continue
            layer = inner[0] if inner and inner[0] in MAY_IMPORT else ""
            if layer not in MAY_IMPORT[module.layer] | {module.layer}:
                found.append(module.at(line, f"{module.layer} imports {name}"))
    return found


def strayed_triton(package: Path) -> list[str]:
    return [
        module.at(line, f"{name} outside kernels")
        for module in read_modules(package)
        for line, name in imported_names(module)
        if name.split(".")[0] == "triton" and module.layer != "kernels"
    ]


def long_files(package: Path) -> list[str]:
    sizes = [
        (module, len(module.text.splitlines()))
        for module in read_modules(package)
        if module.layer != "kernels"
    ]
    return [module.at(1, f"{size} lines") for module, size in sizes if size > MAX_FILE_LINES]


def long_functions(package: Path) -> list[str]:
    return [
        module.at(node.lineno, f"{node.name} has {size} lines")
        for module in read_modules(package)
        if module.layer != "kernels"
        for node in module.nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (size := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION_LINES
    ]


def drawers(package: Path) -> list[str]:
    """A `utils` module has no subject, so everything ends up in it."""
    return [
        module.at(1, "say what is in it")
        for module in read_modules(package)
        if "utils" in module.path.stem
    ]


def undocumented_modules(package: Path) -> list[str]:
    return [
        module.at(1, "no docstring")
        for module in read_modules(package)
        if not any(part.startswith("_") for part in module.name.split("."))
        and not ast.get_docstring(module.tree)
    ]


def environment_numerics(package: Path) -> list[str]:
    return [
        module.at(line, f"{name} where numbers are made")
        for module in read_modules(package)
        if module.layer in NUMERIC
        for line, name in used_names(module)
        if name in ENVIRONMENT
    ]


def arbitrary_code(package: Path) -> list[str]:
    """Files are data: nothing unpickles or evaluates. Audit targets are imported, which the user
    asks for by name.
    """
    found = []
    for module in read_modules(package):
        for line, name in used_names(module):
            if name in CODE_LOADERS or any(
                f"{name}.".startswith(f"{banned}.") for banned in PICKLING
            ):
                found.append(module.at(line, name))
        for node in module.nodes:
            if (
                isinstance(node, ast.keyword)
                and node.arg == "allow_pickle"
                and ast.unparse(node.value) != "False"
            ):
                found.append(module.at(node.lineno, "allow_pickle"))
    return found


def same_names(package: Path) -> list[str]:
    """Two modules of one name look alike in tabs, tracebacks and search results; but a folder of an
    operation has the same files as every other.
    """
    first: dict[str, Module] = {}
    found = []
    for module in read_modules(package):
        if of_one_operation(module):
            continue
        stem = module.path.stem
        other = first.setdefault(stem, module)
        if other is not module and not stem.startswith("__"):
            found.append(module.at(1, f"{other.path} has the same name"))
    return found


def of_one_operation(module: Module) -> bool:
    """Whether it lies in a folder of one operation, operations/NAME/."""
    return module.layer == "operations" and len(module.path.parts) == 3


def odd_operations(package: Path) -> list[str]:
    """A folder of an operation holds its four files and no other."""
    files = {"__init__.py", "definition.py", "recipes.py", "probes.py", "targets.py"}
    folders: dict[Path, set[str]] = {}
    for module in read_modules(package):
        if of_one_operation(module):
            folders.setdefault(module.path.parent, set()).add(module.path.name)
    return [
        f"{folder / name}:1: {'not there' if name in files else 'none of its four files'}"
        for folder, names in folders.items()
        for name in sorted(names ^ files)
    ]


def cycles(package: Path) -> list[str]:
    """A module that needs itself before it is there; imports inside functions come later and are no
    part of it.
    """
    modules = {module.name: module for module in read_modules(package)}
    needs = {name: set(_needed(module, modules)) for name, module in modules.items()}
    # a module can reach itself: take away, again and again, what needs nothing that is left
    while leaves := {name for name, needed in needs.items() if not needed & needs.keys()}:
        needs = {name: needed for name, needed in needs.items() if name not in leaves}
    while tops := needs.keys() - set().union(*needs.values()):
        needs = {name: needed for name, needed in needs.items() if name not in tops}
    if not needs:
        return []
    first, *others = sorted(needs)
    return [modules[first].at(1, f"in a circle of imports with {', '.join(others)}")]


def _needed(module: Module, modules: dict[str, Module]) -> Iterator[str]:
    """The modules that have to be there before this one, without the packages around it."""
    open_nodes: list[ast.AST] = list(module.tree.body)
    while open_nodes:
        node = open_nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            open_nodes += node.orelse
            continue
        open_nodes += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(module, node)
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                wanted = whole if whole in modules else base
                # the face imports lazily; __version__ is there before anything else
                if wanted in modules and wanted != PACKAGE:
                    yield wanted


def heavy(modules: frozenset[str]) -> list[str]:
    return sorted({name.split(".")[0] for name in modules} & HEAVY)


RULES = [
    upward_imports,
    strayed_triton,
    long_files,
    long_functions,
    drawers,
    undocumented_modules,
    environment_numerics,
    arbitrary_code,
    same_names,
    odd_operations,
    cycles,
]

CLEAN = {
    "__init__.py": '"""The face."""\nfrom halfulp.audit import verdict\n__version__ = "0"\n',
    "formats/__init__.py": '"""Formats."""\n',
    "recipes.py": '"""Recipes."""\nfrom halfulp.formats import Format\n',
    "algorithms/__init__.py": '"""Algorithms."""\n',
    "algorithms/flash2.py": (
        '"""Flash."""\nfrom halfulp import recipes\nfrom halfulp.algorithms import matmul\n'
    ),
    "kernels/triton.py": '"""Kernels."""\nimport triton\nfrom halfulp.formats import Format\n',
    "ops.py": '"""Dispatch."""\ndef load():\n    from halfulp.kernels import triton\n',
    "runs/parallel.py": '"""Jobs."""\ndef f():\n    from joblib import Parallel, parallel_config\n',
    "audit/__init__.py": '"""Audit."""\nfrom halfulp import __version__\n',
    **{
        f"operations/norm/{name}.py": '"""N."""\n'
        for name in ("__init__", "definition", "recipes", "probes", "targets")
    },
    "algorithms/loop2.py": (
        '"""Later."""\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n'
        "    from halfulp.algorithms import loop3\n"
        "def f():\n    from halfulp.algorithms import loop3\n"
    ),
    "algorithms/loop3.py": '"""Later."""\nfrom halfulp.algorithms import loop, loop2\n',
    "audit/load.py": '"""Load."""\nimport numpy as np\nnp.load("a", allow_pickle=False)\n',
    "report/_page.py": "from halfulp.recipes import Recipe\nimport os\nos.environ\nmodel.eval()\n",
    "cli.py": '"""Command line."""\nimport halfulp\nfrom halfulp.report import page\n',
}

# rule, the file it breaks in, that file's text, what the one violation says
PLANTED = [
    (
        upward_imports,
        "formats/up.py",
        "from halfulp.recipes import Recipe\n",
        "formats imports halfulp.recipes",
    ),
    (
        upward_imports,
        "formats/up.py",
        "from ..audit import verdict\n",
        "formats imports halfulp.audit.verdict",
    ),
    (upward_imports, "formats/__init__.py", "from .. import cli\n", "formats imports halfulp.cli"),
    (
        upward_imports,
        "recipes.py",
        "def f():\n    import halfulp.attention\n",
        "recipes imports halfulp.att",
    ),
    (
        upward_imports,
        "algorithms/up.py",
        "from halfulp import kernels\n",
        "algorithms imports halfulp.kernels",
    ),
    (
        upward_imports,
        "kernels/up.py",
        "from halfulp.algorithms import x\n",
        "kernels imports halfulp.algo",
    ),
    (
        upward_imports,
        "audit/up.py",
        "from halfulp import emulate\n",
        "audit imports halfulp.emulate",
    ),
    (upward_imports, "audit/up.py", "import halfulp\n", "audit imports halfulp"),
    (upward_imports, "watch.py", "from halfulp.audit import x\n", "watch imports halfulp.audit"),
    (
        upward_imports,
        "experiments/up.py",
        "from halfulp.report import x\n",
        "experiments imports halfulp.rep",
    ),
    (
        upward_imports,
        "report/up.py",
        "from halfulp.algorithms import x\n",
        "report imports halfulp.algo",
    ),
    (
        upward_imports,
        "recipes.py",
        'importlib.import_module("halfulp.cli")\n',
        "recipes imports halfulp.cli",
    ),
    (upward_imports, "misc.py", "", "misc has no place"),
    (
        strayed_triton,
        "audit/up.py",
        "def f():\n    import triton.language as tl\n",
        "triton.language outside",
    ),
    (long_files, "recipes.py", "x = 1\n" * 481, "481 lines"),
    (long_functions, "recipes.py", "def f():\n" + "    x = 1\n" * 72, "f has 73 lines"),
    (same_names, "watch/flash2.py", '"""F."""\n', "algorithms/flash2.py has the same name"),
    (same_names, "operations/load.py", '"""L."""\n', "audit/load.py has the same name"),
    (odd_operations, "operations/norm/more.py", '"""M."""\n', "none of its four files"),
    (
        cycles,
        "algorithms/loop.py",
        '"""L."""\nfrom halfulp.algorithms import loop3\n',
        "with halfulp.algorithms.loop3",
    ),
    (drawers, "audit/utils.py", "", "utils.py"),
    (drawers, "formats/_utils.py", "", "utils.py"),
    (undocumented_modules, "algorithms/bare.py", "x = 1\n", "no docstring"),
    (undocumented_modules, "algorithms/__init__.py", "", "no docstring"),
    (environment_numerics, "formats/env.py", 'import os\nx = os.environ["X"]\n', "os.environ"),
    (
        environment_numerics,
        "audit/env.py",
        'import os as system\nx = system.getenv("X")\n',
        "os.getenv",
    ),
    (environment_numerics, "attention.py", "from os import environ\n", "os.environ"),
    (arbitrary_code, "recipes.py", "import pickle\n", "pickle"),
    (arbitrary_code, "recipes.py", 'import torch as t\nx = t.load("x")\n', "torch.load"),
    (arbitrary_code, "recipes.py", "from torch import load\n", "torch.load"),
    (arbitrary_code, "recipes.py", "import pickle as p\n", "pickle"),
    (arbitrary_code, "recipes.py", "from joblib import load\n", "joblib.load"),
    (arbitrary_code, "recipes.py", 'import joblib as j\nj.dump(1, "x")\n', "joblib.dump"),
    (arbitrary_code, "recipes.py", "def f():\n    from joblib import Memory\n", "joblib.Memory"),
    (
        arbitrary_code,
        "recipes.py",
        "from joblib.numpy_pickle import load_temporary_memmap\n",
        "joblib.numpy_pickle",
    ),
    (arbitrary_code, "cli.py", 'x = eval("1")\n', "eval"),
    (arbitrary_code, "cli.py", 'exec("x = 1")\n', "exec"),
    (
        arbitrary_code,
        "cli.py",
        'import numpy as np\nnp.load("x", allow_pickle=True)\n',
        "allow_pickle",
    ),
]


def plant(folder: Path, files: dict[str, str]) -> Path:
    package = folder / PACKAGE
    for name, text in files.items():
        file = package / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return package


def test_every_layer_is_seen():
    seen = {module.layer for module in read_modules(SOURCE)}
    assert seen >= EXPECTED, f"not found below {SOURCE}: {sorted(EXPECTED - seen)}"
    imports = {
        module.layer
        for module in read_modules(SOURCE)
        for _, name in imported_names(module)
        if PACKAGE in name
    }
    assert imports >= {
        "algorithms",
        "attention",
        "audit",
        "cli",
    }, "imports inside the package go unseen"


@pytest.mark.parametrize("rule", RULES)
def test_source_keeps(rule: Callable[[Path], list[str]]):
    violations = rule(SOURCE)
    assert not violations, "\n".join(violations)


@pytest.mark.parametrize("rule", RULES)
def test_a_clean_tree_is_not_flagged(rule: Callable[[Path], list[str]], tmp_path: Path):
    assert rule(plant(tmp_path, CLEAN)) == []


@pytest.mark.parametrize(("rule", "file", "text", "expected"), PLANTED)
def test_a_planted_fault_is_flagged(rule, file, text, expected, tmp_path):
    (violation,) = rule(plant(tmp_path, CLEAN | {file: text}))
    assert violation.startswith(f"{file}:")
    assert expected in violation


def test_every_rule_has_a_planted_fault():
    assert {rule for rule, *_ in PLANTED} == set(RULES)


def test_import_stays_light(added_modules):
    modules = added_modules(PACKAGE)
    assert f"{PACKAGE}.recipes" in modules
    assert heavy(modules) == []


def test_a_heavy_import_is_flagged(added_modules, tmp_path):
    (tmp_path / "planted.py").write_text("import rich.console\n", encoding="utf-8")
    assert heavy(added_modules("planted", tmp_path)) == ["rich"]
