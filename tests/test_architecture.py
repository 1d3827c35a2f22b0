"""docs/architecture.md against the tree, and the rules of the house that a program can check."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import cpp_functions
import pytest
from layers import ALLOWED, KNOWN_ARROWS, KNOWN_CIRCLES, LAYERS, MODULES, circles, imports, layer_of
from signatures import KNOWN_SIGNATURES, MAX_PARAMETERS, excused, signatures

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("sdpa", "dispatch", "kernels", "tuning_tables", "bench")
SUFFIXES = {".py", ".c", ".cpp", ".h", ".cu", ".cuh", ".metal"}
TOP_LEVEL_CODE = {"sdpa", "dispatch", "kernels", "tuning_tables", "tests", "bench", "setup.py"}
NOT_CODE = {"docs", "examples", "build", "dist"}
MAX_LINES, MAX_KERNEL_LINES, MAX_FUNCTION, MAX_DEVICE_FUNCTION = 400, 600, 60, 180

FILES = sorted(p for folder in FOLDERS for p in (ROOT / folder).rglob("*") if p.suffix in SUFFIXES)
PYTHON = [p for p in FILES if p.suffix == ".py"]
NATIVE = [p for p in FILES if p.suffix in SUFFIXES - {".py"}]


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


@pytest.mark.parametrize("path", NATIVE, ids=name)
def test_length_of_native_functions(path):
    for function in cpp_functions.functions(path.read_text()):
        limit = MAX_DEVICE_FUNCTION if function.device else MAX_FUNCTION
        said = f"{name(path)}:{function.line}: {function.name} has {function.lines} lines, limit {limit}"
        assert function.lines <= limit, said


SAMPLE = """// not_a_function() {
#define MACRO(x) \\
  int x() {
namespace a {
template <class T, int N = (3)>
struct Two : Base<T> {
  int size = 1, sizes[2] = {1, 2};
  Two(int x) : size(x) {
    auto f = [&](int y) { return '{' + y; };
    struct Local { int inner() { return 1; } };
  }
  bool operator()(const char* c) const { return c == "}{"; }
  enum class E { kOne };
};
const Row kTable[] = {{f(1), 2}, {3, 4}};
template <typename T>
__global__ void __launch_bounds__(f(2), 1)
    device(T x) {
  if (x) {
    /* } */
  }
}
}  // namespace a
"""


def test_native_functions_are_found():
    found = cpp_functions.functions(SAMPLE)
    assert [(f.name, f.line, f.lines, f.device) for f in found] == [
        ("Two", 8, 4, False),
        ("operator()", 12, 1, False),
        ("device", 16, 7, True),
    ]


def test_the_longest_device_function_is_found():
    """What the limit is for; a parser that loses functions would hold every limit."""
    text = (ROOT / "kernels/cuda/sm90/flash.cuh").read_text()
    longest = max(cpp_functions.functions(text), key=lambda function: function.lines)
    assert longest.name == "consume" and longest.device and longest.lines > MAX_FUNCTION


HEAVY = ("triton", "rich", "click", "matplotlib")


@pytest.mark.parametrize("module", sorted(MODULES))
def test_arrows(module):
    """Each module has one layer, and imports from the layers that this one may see."""
    wrong = {other for other in imports(module) if layer_of(other) not in ALLOWED[layer_of(module)]}
    wrong -= {other for (own, other) in KNOWN_ARROWS if own == module}
    assert not wrong, f"{module}, of layer {layer_of(module)!r}, imports {sorted(wrong)}"


def test_arrows_between_layers_go_one_way():
    for layer, seen in ALLOWED.items():
        assert set(seen) <= set(LAYERS) and layer in seen
        back = {other for other in seen if other != layer and layer in ALLOWED[other]}
        assert not back, f"{layer!r} and {sorted(back)} see each other"


def test_no_circles():
    """No module imports itself by way of others, at any depth of its functions; what only types need is no import."""
    found = {frozenset(circle) for circle in circles()}
    assert found == set(KNOWN_CIRCLES), "circles of imports: see layers.py"


def test_known_arrows_are_needed():
    stale = {f"{own} -> {other}" for own, other in KNOWN_ARROWS if own not in MODULES or other not in imports(own)}
    stale |= {f"{own} -> {other}" for own, other in KNOWN_ARROWS if layer_of(other) in ALLOWED[layer_of(own)]}
    assert not stale, "exceptions in layers.py that nothing needs"


@pytest.mark.parametrize("path", PYTHON, ids=name)
def test_number_of_parameters(path):
    """More than six mean a missing noun."""
    for function in signatures(path):
        if function.count > MAX_PARAMETERS and excused(name(path), function) is None:
            known = (name(path), function.name) in KNOWN_SIGNATURES
            assert known, f"{name(path)}: {function.name} has {function.count} parameters, limit {MAX_PARAMETERS}"


def test_known_signatures_are_needed():
    long = {
        (name(path), function.name)
        for path in PYTHON
        for function in signatures(path)
        if function.count > MAX_PARAMETERS and excused(name(path), function) is None
    }
    assert set(KNOWN_SIGNATURES) - long == set(), "exceptions in signatures.py that nothing needs"


@pytest.mark.parametrize("module", [m for m in sorted(MODULES) if m.startswith("sdpa.kernels.")])
def test_kernels_do_not_import_other_backends(module):
    backend = module.split(".")[2]
    wrong = {m for m in imports(module) if m.startswith("sdpa.kernels.") and m.split(".")[2] != backend}
    assert not wrong, f"{module} imports {sorted(wrong)}"


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
