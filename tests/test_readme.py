"""The examples of README.md run, one after the other as a reader would type them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from sdpa.dispatch.catalog import by_name

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def test_examples_run(capsys):
    text = (ROOT / "README.md").read_text()
    blocks = list(BLOCK.finditer(text))
    assert len(blocks) == 10
    names: dict[str, object] = {"__name__": "readme"}
    for block in blocks:
        line = text.count("\n", 0, block.start(1))
        exec(compile("\n" * line + block[1], "README.md", "exec"), names)  # so that a traceback names README's line
    said = capsys.readouterr().out
    assert said.split("\n", 1)[0] in by_name()  # the first example's kernel
    assert "swapped" in said  # the report of accelerate
    assert names["x"].grad is not None  # the backward of the example before the last
    assert "backward B=2 H=8 " in said  # what the last one, of warm_up, prepared
