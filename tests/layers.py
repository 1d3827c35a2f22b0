"""The layers of the Python modules: which module is in which, and which layers it may import from.

A new module is named in LAYERS, by its own name or by its package's. test_architecture.py holds the modules to it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "sdpa": "sdpa",
    "dispatch": "sdpa.dispatch",
    "kernels": "sdpa.kernels",
    "tuning_tables": "sdpa.tuning_tables",
    "bench": "sdpa.bench",
}

# A layer's modules; a name with a dot at its end stands for a package and all below it. The longest match counts.
LAYERS: dict[str, tuple[str, ...]] = {
    # What a call is, the environment, torch's private parts, what runs a repeated call: they import nothing of ours but
    # each other.
    "facts": (
        "sdpa.problem",
        "sdpa.alignment",
        "sdpa.environment",
        "sdpa.installed",
        "sdpa.philox",
        "sdpa.layout",
        "sdpa.scalars",
        "sdpa.torch_private",
        "sdpa.repeated.",
        "sdpa.tuning_tables.",
    ),
    # What masks and packed sequences mean, in torch operations.
    "formulas": ("sdpa.dense", "sdpa.packing", "sdpa.batching", "sdpa.reference", "sdpa.sinks"),
    "kernels": ("sdpa.kernels.",),
    "dispatch": ("sdpa.dispatch.",),
    # From a user's arguments to AttentionInputs.
    "inputs": (
        "sdpa.validate",
        "sdpa.validate_sequences",
        "sdpa.mask",
        "sdpa.mask_algebra",
        "sdpa.inputs",
        "sdpa.interop",
        "sdpa.autocast",
        "sdpa.nested",
    ),
    # The memory of calls, and one direction of what it remembers.
    "calls": ("sdpa.calls",),
    "operators": ("sdpa.operators", "sdpa.flops", "sdpa.distributed.sharding"),
    "derivatives": ("sdpa.derivatives", "sdpa.decomposed"),
    # Graphs of torch's functions, and the operator in them.
    "graphs": ("sdpa.patterns.",),
    # From a public function to what answers its call.
    "entry": (
        "sdpa.entry",
        "sdpa.kinds",
        "sdpa.prepared",
        "sdpa.sequences",
        "sdpa.sharded",
        "sdpa.distributed.locally",
    ),
    # What users import.
    "public": (
        "sdpa",
        "sdpa.functional",
        "sdpa.varlen",
        "sdpa.explain",
        "sdpa.patch",
        "sdpa.pytrees",
        "sdpa.checkpointing",
        "sdpa.standalone",
    ),
    "modules": ("sdpa.nn.", "sdpa.distributed.", "sdpa.integrations."),
    "testing": ("sdpa.testing",),
    "bench": ("sdpa.bench.",),
    "cli": ("sdpa.cli.",),
}

# The layers that a layer sees, itself included. No kernel sees dispatch, and dispatch no kernel: it loads one by name.
ALLOWED: dict[str, tuple[str, ...]] = {
    "facts": ("facts",),
    "formulas": ("facts", "formulas"),
    "kernels": ("facts", "formulas", "kernels"),
    "dispatch": ("facts", "dispatch"),
    "inputs": ("facts", "formulas", "inputs"),
    "calls": ("facts", "dispatch", "calls"),
    "operators": ("facts", "formulas", "dispatch", "calls", "operators"),
    "derivatives": ("facts", "formulas", "dispatch", "calls", "operators", "derivatives"),
    "graphs": ("facts", "operators", "graphs"),
    "entry": ("facts", "formulas", "inputs", "dispatch", "calls", "operators", "derivatives", "entry"),
    "public": ("facts", "formulas", "inputs", "dispatch", "calls", "operators", "derivatives", "entry", "public"),
    "modules": ("facts", "formulas", "inputs", "dispatch", "entry", "public", "modules"),
    "testing": ("facts", "formulas", "inputs", "dispatch", "testing"),
    "bench": ("facts", "inputs", "dispatch", "public", "modules", "bench"),
    "cli": ("facts", "inputs", "dispatch", "public", "testing", "bench", "cli"),
}

# Arrows against that table, each with its reason.
KNOWN_ARROWS: dict[tuple[str, str], str] = {
    ("sdpa.derivatives", "sdpa.kernels.math.composite"): "derivatives of derivatives are compositions of operations",
    ("sdpa.derivatives", "sdpa.kernels.math.weights"): "the same of the weights",
    ("sdpa.decomposed", "sdpa.kernels.math.composite"): "a call as a composition of torch operations",
    ("sdpa.decomposed", "sdpa.kernels.math.weights"): "the same of the weights",
    ("sdpa.entry", "sdpa.kernels.math.weights"): "the same of the weights",
    ("sdpa.distributed.ring", "sdpa.operators"): "a step's gradients are those by the log-sum-exp of all steps",
    ("sdpa.distributed.ring", "sdpa.kernels.triton.merge"): "one launch merges the results of two steps on a GPU",
    ("sdpa.cli.explain", "sdpa.kernels.triton.target"): "tiles of a card that was named and is not here",
    ("sdpa.autocast", "sdpa.kernels.triton.cast"): "one launch casts query, key and value, of repeated calls on a GPU",
    ("sdpa.bench.warm", "sdpa.kernels.triton.arguments"): "compiles ahead what a kernel would be called with",
    ("sdpa.standalone", "sdpa.kernels.cpu.library"): "says where the library for C++ programs lies",
    ("sdpa.cli.info", "sdpa.kernels.cpu.library"): "says which instruction sets the library found",
}

# Circles, each with its reason.
KNOWN_CIRCLES: dict[frozenset[str], str] = {
    frozenset(
        {"sdpa.inputs", "sdpa.mask", "sdpa.mask_algebra", "sdpa.validate"}
    ): "methods of Mask call functions that take a Mask",
}


def modules() -> dict[str, Path]:
    """Every module of ours by the name that it is imported by."""
    found = {}
    for folder, package in PACKAGES.items():
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join([package, *(part for part in parts if part != "__init__")])] = path
    return found


MODULES = modules()


def for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def import_statements(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """At any depth, but not those that only type checkers execute."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        yield node
    for child in node.orelse if for_types_only(node) else ast.iter_child_nodes(node):
        yield from import_statements(child)


@cache
def imports(module: str) -> frozenset[str]:
    """The modules of ours that one imports; `from package import name` is package.name where that is a module."""
    found = set()
    for node in import_statements(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif node.module:
            named = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {other if other in MODULES else node.module for other in named}
    return frozenset(other for other in found if other in MODULES and other != module)


def layer_of(module: str) -> str:
    def matches(name: str) -> bool:
        return f"{module}.".startswith(name) if name.endswith(".") else module == name

    found = [(len(name), layer) for layer, names in LAYERS.items() for name in names if matches(name)]
    assert found, f"{module} is in no layer of tests/layers.py"
    return max(found)[1]


def reached(module: str) -> set[str]:
    """Every module that one imports, directly or by way of others."""
    found: set[str] = set()
    waiting = [module]
    while waiting:
        new = imports(waiting.pop()) - found
        found |= new
        waiting += new
    return found


def circles() -> list[set[str]]:
    """The sets of modules that all import each other."""
    seen = {module: reached(module) for module in MODULES}
    found: list[set[str]] = []
    for module in MODULES:
        if module in seen[module] and not any(module in circle for circle in found):
            found.append({other for other in seen[module] if module in seen[other]})
    return found
