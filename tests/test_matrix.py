"""docs/matrix.md against a sample of what it says, and the ways themselves against calls that are wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sdpa.bench import matrix, matrix_ways
from sdpa.bench.matrix_kinds import Kind, kinds

PAGE = Path(__file__).resolve().parent.parent / "docs" / "matrix.md"
CHEAP = (
    "eager", "vmap", "jvp", "jacrev", "hessian", "per sample", "double backward", "autocast", "checkpoint",
    "checkpoint, reentrant", "selective", "FakeTensor", "jit.trace", "fx", "export",
)  # fmt: skip
KINDS = kinds()
MODULES = ("MHA", "MHA, need_weights", "encoder layer", "decoder")
# Every kind in two ways, every way with some kinds, and modules in a trace that is made again without gradients.
SAMPLE = dict.fromkeys(
    [
        (name, CHEAP[(step * number + shift) % len(CHEAP)])
        for number, name in enumerate(KINDS)
        for step, shift in ((1, 0), (4, 7))
    ]
    + [(name, "jit.trace") for name in MODULES]
)
pytestmark = pytest.mark.filterwarnings("ignore")


def written() -> dict[str, dict[str, str]]:
    """The page's cells, with the sentences in place of their numbers."""
    lines = PAGE.read_text().splitlines()
    rows = [[part.strip() for part in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    notes = dict(line.split(". ", 1) for line in lines if line.partition(". ")[0].isdigit())
    return {
        row[0]: {way: notes.get(said, said) for way, said in zip(rows[0][1:], row[1:], strict=True)} for row in rows[2:]
    }


def test_page_has_every_kind_in_every_way():
    found = written()
    assert list(found) == list(KINDS)
    assert all(list(row) == list(matrix_ways.WAYS) for row in found.values())


def test_page_has_nothing_wrong():
    """Every cell is right, or refused by a sentence of ours, as a whole."""
    said = {said for row in written().values() for said in row.values()} - {"ok", "ok*"}
    assert all(sentence.startswith("refused: ") for sentence in said)
    advice = (
        "call it under torch.no_grad",
        "generate under torch.no_grad",
        "call new_cache",
        "torch.export",
        "export the program under sdpa.decomposed()",
    )
    assert all(any(words in sentence for words in advice) for sentence in said)


@pytest.mark.parametrize(("name", "way"), SAMPLE, ids=[f"{name}-{way}" for name, way in SAMPLE])
def test_page_says_what_is(name, way):
    assert written()[name][way] == matrix.cell(KINDS[name], matrix_ways.WAYS[way])


class Off(torch.autograd.Function):
    """Right numbers, and other gradients."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 1.01 * grad


@pytest.mark.parametrize("way", ["eager", "checkpoint", "jacrev", "double backward"])
def test_other_numbers_are_found(way):
    """A call whose answer depends on who answers."""
    from sdpa.decomposed import is_decomposed

    def call(q, k, v):
        return q.sin() * (1 + 1e-6 * (not is_decomposed()))

    assert matrix.cell(Kind(call, KINDS["plain"].tensors), matrix_ways.WAYS[way]).startswith("WRONG: ")


def test_other_gradients_are_found():
    from sdpa.decomposed import is_decomposed

    def call(q, k, v):
        return (q if is_decomposed() else Off.apply(q)) * k

    assert matrix.cell(Kind(call, KINDS["plain"].tensors), matrix_ways.WAYS["eager"]).startswith("WRONG: ")


def test_errors_of_others_are_no_refusals():
    def call(q, k, v):
        return q @ torch.ones(99, 98)

    assert matrix.cell(Kind(call, KINDS["plain"].tensors), matrix_ways.WAYS["eager"]).startswith("ERROR: RuntimeError")
