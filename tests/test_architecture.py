"""docs/architecture.md against the tree, and the rules of the house that a program can check."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("sdpa", "dispatch", "kernels", "tuning_tables", "bench")
SUFFIXES = {".py", ".c", ".cpp", ".h", ".cu", ".cuh", ".metal"}
TOP_LEVEL_CODE = {"sdpa", "dispatch", "kernels", "tuning_tables", "tests", "bench", "setup.py"}
NOT_CODE = {"docs", "examples", "build", "dist"}
MAX_LINES, MAX_KERNEL_LINES, MAX_FUNCTION = 400, 600, 60

FILES = sorted(p for folder in FOLDERS for p in (ROOT / folder).rglob("*") if p.suffix in SUFFIXES)
PYTHON = [p for p in FILES if p.suffix == ".py"]


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def documented() -> set[str]:
    """Paths of the tree block, read by its indentation."""
    block = (ROOT / "docs/architecture.md").read_text().split("## Tree\n```\n")[1].split("\n```")[0]
    found, stack = set(), []
    for line in block.splitlines():
        match = re.match(r"( *)(\S+)", line)
        if not match:
            continue
        depth, entry = len(match[1]) // 2, match[2]
        stack = [*stack[:depth], entry]
        if not entry.endswith("/"):
            found.add("".join(stack))
    return found


def test_tree_and_document_agree():
    names = {name(p) for p in FILES} | {"setup.py"}
    assert documented() - names == set(), "documented, but not there"
    assert names - documented() == set(), "there, but not documented"


def test_top_level_names():
    entries = [p for p in ROOT.iterdir() if not p.name.startswith(".") and not p.name.endswith(".egg-info")]
    code = {p.name for p in entries if p.suffix == ".py" or (p.is_dir() and p.name not in NOT_CODE)}
    assert code == TOP_LEVEL_CODE


@pytest.mark.parametrize("path", FILES, ids=name)
def test_first_line_tells_the_job(path):
    first = path.read_text().split("\n", 1)[0]
    assert first.startswith('"""' if path.suffix == ".py" else "// "), f"{name(path)} begins with {first!r}"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_length_of_files(path):
    limit = MAX_KERNEL_LINES if name(path).startswith("kernels/") else MAX_LINES
    lines = len(path.read_text().splitlines())
    assert lines <= limit, f"{name(path)} has {lines} lines, limit {limit}"


@pytest.mark.parametrize("path", PYTHON, ids=name)
def test_length_of_functions(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.FunctionDef):
            continue
        start = node.body[1].lineno if ast.get_docstring(node) and len(node.body) > 1 else node.lineno
        length = node.end_lineno - start + 1
        assert length <= MAX_FUNCTION, f"{name(path)}: {node.name} has {length} lines without its docstring"


# What a layer must not import at all, by the start of the imported module's name.
FORBIDDEN = {
    "sdpa/problem.py": ("sdpa",),
    "sdpa/environment.py": ("sdpa",),
    "sdpa/layout.py": ("sdpa.",),
    "kernels/": (
        "sdpa.dispatch",
        "sdpa.functional",
        "sdpa.ops",
        "sdpa.autograd",
        "sdpa.eager",
        "sdpa.plans",
        "sdpa.repeats",
        "sdpa.bench",
        "sdpa.cli",
    ),
    "dispatch/": (
        "sdpa.functional",
        "sdpa.ops",
        "sdpa.autograd",
        "sdpa.eager",
        "sdpa.plans",
        "sdpa.repeats",
        "sdpa.bench",
        "sdpa.cli",
        "sdpa.testing",
    ),
    "sdpa/ops.py": ("sdpa.functional", "sdpa.autograd", "sdpa.eager", "sdpa.plans", "sdpa.kernels"),
    "sdpa/autograd.py": ("sdpa.functional", "sdpa.eager", "sdpa.plans", "sdpa.dispatch"),
    "sdpa/repeats.py": ("sdpa.functional", "sdpa.autograd", "sdpa.eager", "sdpa.plans", "sdpa.ops", "sdpa.kernels"),
    "sdpa/plans.py": ("sdpa.functional", "sdpa.eager", "sdpa.kernels"),
    "sdpa/functional.py": ("sdpa.kernels",),
    "sdpa/eager.py": ("sdpa.functional", "sdpa.kernels"),
}
HEAVY = ("triton", "rich", "click", "matplotlib")


def imports(path: Path) -> set[str]:
    """Every module a file imports, at any depth; `from package import name` counts as package.name, too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", PYTHON, ids=name)
def test_arrows(path):
    for prefix, forbidden in FORBIDDEN.items():
        if name(path).startswith(prefix):
            wrong = {module for module in imports(path) if module.startswith(forbidden)}
            assert not wrong, f"{name(path)} imports {sorted(wrong)}"


@pytest.mark.parametrize("path", [p for p in PYTHON if name(p).count("/") == 2 and "kernels" in p.parts], ids=name)
def test_kernels_do_not_import_other_backends(path):
    backend = path.parent.name
    wrong = {m for m in imports(path) if m.startswith("sdpa.kernels.") and m.split(".")[2] != backend}
    assert not wrong, f"{name(path)} imports {sorted(wrong)}"


@pytest.mark.parametrize("path", PYTHON, ids=name)
def test_heavy_imports_stay_where_they_belong(path):
    if name(path).startswith(("sdpa/cli/", "kernels/triton/")):
        return
    tree = ast.parse(path.read_text())
    top = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {alias.name for node in top if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in top if isinstance(node, ast.ImportFrom) and node.module}
    assert not {module for module in names if module.split(".")[0] in HEAVY}


@pytest.mark.parametrize("path", PYTHON, ids=name)
def test_environment_is_read_in_one_file(path):
    if name(path) == "sdpa/environment.py":
        return
    text = path.read_text()
    reads = re.findall(r"os\.(?:environ|getenv)[^\n]*", text)
    allowed = name(path).startswith("sdpa/cli/") or name(path).startswith("bench/")
    assert not reads or allowed, f"{name(path)} reads the environment: {reads}"


def test_no_scripts_in_kernels():
    """Run as a script, a file there would find kernels/<backend> before the packages of the same name."""
    for path in PYTHON:
        assert not (name(path).startswith("kernels/") and "__main__" in path.read_text()), name(path)
