"""The parameters of Python functions: how many, and which functions may have more than six.

test_architecture.py holds all functions to it.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

MAX_PARAMETERS = 6

# Files whose functions have the parameters that others fixed, by reason.
OPERATORS = "an operator's implementation: torch passes all that its schema names"
EXCUSED_FILES = {
    "sdpa/operators.py": OPERATORS,
    "sdpa/derivatives.py": OPERATORS,
    "sdpa/integrations/transformers.py": "transformers' signature of an attention function",
    "sdpa/integrations/transformers_masks.py": "transformers' signature of a mask function",
}
# Functions that users call, with torch's parameters and ours behind them.
PUBLIC = {
    ("sdpa/functional.py", "scaled_dot_product_attention"),
    ("sdpa/varlen.py", "varlen_attention"),
    ("sdpa/varlen.py", "paged_attention"),
    ("sdpa/explain.py", "explain"),
}
# Functions that want a noun, each with the reason why they have none yet.
KNOWN_SIGNATURES = {
    ("sdpa/testing.py", "compare"): "what tests compare: no noun yet",
}


class Signature(NamedTuple):
    name: str
    count: int  # without self and what * and ** collect
    decorators: tuple[str, ...]
    bases: tuple[str, ...]  # of the class around it


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef, bases: tuple[str, ...]) -> Signature:
    given = node.args
    names = [argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    count = len(names) - (names[:1] in (["self"], ["cls"]))
    return Signature(node.name, count, tuple(ast.unparse(d).partition("(")[0] for d in node.decorator_list), bases)


def signatures(path: Path) -> list[Signature]:
    found = []

    def visit(node: ast.AST, bases: tuple[str, ...]) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found.append(signature(node, bases))
            bases = ()
        elif isinstance(node, ast.ClassDef):
            bases = tuple(ast.unparse(base) for base in node.bases)
        for child in ast.iter_child_nodes(node):
            visit(child, bases)

    visit(ast.parse(path.read_text()), ())
    return found


def excused(file: str, function: Signature) -> str | None:
    """Why a function may have more parameters than six; None where it may not."""
    if any(name.endswith(".jit") for name in function.decorators):
        return "a kernel of Triton: nouns are named tuples only where the compiler takes them"
    if any(name.endswith(".command") for name in function.decorators):
        return "a command has a parameter for each of its options"
    if any(base.endswith("autograd.Function") for base in function.bases):
        return "torch.autograd passes every input of apply"
    if any(base.startswith("torch.nn.") for base in function.bases) and function.name == "forward":
        return "torch's signature of the module"
    if (file, function.name) in PUBLIC:
        return "a public function with torch's parameters"
    return EXCUSED_FILES.get(file)
