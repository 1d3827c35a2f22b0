"""torch's private parts: each that calls can do without is taken away, and calls are right all the same."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

from sdpa import torch_private

SOURCE = Path(torch_private.__file__)
SCRIPT = Path(__file__).with_name("without_part.py")
TOLD = re.compile(r'\bpart\(\s*f?"([^"]+)"')


def parts() -> list[str]:
    """The paths of the parts that have something in their stead."""
    found = []
    for path in TOLD.findall(SOURCE.read_text()):
        names = ("FAKE", "PROXY") if "{name}" in path else ("",)
        found += [path.replace("{name}", name) for name, _ in product(names, [0])]
    return found


@pytest.fixture(scope="module")
def results():
    """What calls came to without each of the parts, and without any ("")."""
    given = [sys.executable, "-W", "ignore", str(SCRIPT), "no.such", *parts()]
    done = subprocess.run(given, check=True, capture_output=True, text=True, timeout=500)
    return {found["path"]: found for found in map(json.loads, done.stdout.splitlines())}


def test_there_are_few():
    assert len(parts()) == len(set(parts()))
    assert 10 < len(parts()) <= 25


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
