"""torch's private parts: each that calls can do without is taken away, and calls are right all the same."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sdpa import torch_private

SOURCE = Path(torch_private.__file__)
SCRIPT = Path(__file__).with_name("without_part.py")
TOLD = re.compile(r'\bpart\(\s*f?"([^"]+)"')
NEEDED = re.compile(r'\bneeded\(\s*"([^"]+)"')
WHILE_DYNAMO_TRACES = "torch._dynamo.symbolic_convert.InstructionTranslator.current_tx"


def parts() -> list[str]:
    """The paths of the parts that have something in their stead."""
    return TOLD.findall(SOURCE.read_text())


def needed_at_import() -> list[str]:
    return [path for path in NEEDED.findall(SOURCE.read_text()) if path != WHILE_DYNAMO_TRACES]


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def names_of(node: ast.AST) -> list[str]:
    """What a node of a file reads, imports or has as text."""
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.Attribute):
        return [dotted(node).replace("forward_ad.", "torch.autograd.forward_ad.")]
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []


def private_names(path: Path) -> set[str]:
    """torch's names with an underscore in front, or in a module with one, that a file reads, imports or has as text."""
    names = {name for node in ast.walk(ast.parse(path.read_text())) for name in names_of(node)}
    found = {name for name in names if re.fullmatch(r"torch(\.\w+)*\._[a-zA-Z][\w.]*", name)}
    return {name for name in found if not any(other.startswith(f"{name}.") for other in found)}


@pytest.fixture(scope="module")
def results():
    """What calls came to without each of the parts, and without any ("")."""
    given = [sys.executable, "-W", "ignore", str(SCRIPT), "no.such", *parts(), *needed_at_import()]
    done = subprocess.run(given, check=True, capture_output=True, text=True, timeout=500)
    return {found["path"]: found for found in map(json.loads, done.stdout.splitlines())}


def test_there_are_few():
    """Those that are needed, too."""
    names = private_names(SOURCE)
    assert len(parts()) == len(set(parts())) and set(parts()) < names
    assert 10 < len(parts()) < len(names) <= 25


# Elsewhere: operators by which torch's kernels are called, a type in an annotation, and a name that is told of there.
ELSEWHERE = re.compile(
    r"torch(\.ops\.aten)?\._(scaled_dot_product|unsafe_view)|torch\._ops\.OpOverload$|torch\.autograd\.forward_ad\._current_level$"
)


def test_the_others_are_imported_from_there():
    root = SOURCE.parents[1]
    files = [path for folder in ("sdpa", "dispatch", "kernels") for path in (root / folder).rglob("*.py")]
    found = {name for path in files if path != SOURCE for name in private_names(path)}
    assert found
    assert not [name for name in found if not ELSEWHERE.match(name)]


def test_none_is_absent_here():
    """In a torch that has them all; one without CUDA lacks those of CUDA."""
    if not torch.__version__.startswith(("2.13", "2.15")):
        pytest.skip("told of torch 2.13 and 2.15")
    expected = [path for path in parts() if "_cuda_get" in path and torch.version.cuda is None]
    assert torch_private.ABSENT == expected


def test_calls_are_right_with_all_of_them(results):
    assert results["no.such"]["wrong"] == ""


@pytest.mark.parametrize("path", parts())
def test_calls_are_right_without(path, results):
    assert path in results, "its process died"
    assert results[path]["wrong"] == ""
    assert set(results[path]["absent"]) == {path, *torch_private.ABSENT}


@pytest.mark.parametrize("path", needed_at_import())
def test_without_what_is_needed_a_sentence_says_so(path, results):
    sentence = f"ImportError: sdpa needs {path}, which torch {torch.__version__} does not have."
    assert results[path]["wrong"].splitlines()[-1] == sentence


def test_what_is_needed_while_dynamo_traces(monkeypatch):
    from torch._dynamo.symbolic_convert import InstructionTranslator

    monkeypatch.delattr(InstructionTranslator, "current_tx")
    with pytest.raises(ImportError, match=f"sdpa needs {WHILE_DYNAMO_TRACES}, which torch .* does not have"):
        torch_private.current_trace()


def test_a_module_that_is_absent():
    before = list(torch_private.ABSENT)
    try:
        assert torch_private.part("torch._no_such.module.thing", 5) == 5
        assert torch_private.part("torch._C._no_such.thing", 6) == 6
        assert torch_private.ABSENT[len(before) :] == ["torch._no_such.module.thing", "torch._C._no_such.thing"]
    finally:
        torch_private.ABSENT[:] = before


def test_the_docstring_names_the_versions():
    assert "2.10, 2.11, 2.13 and 2.15" in torch_private.__doc__
