"""python -m sdpa.bench.matrix: every kind of call in every way that torch has of running one, as docs/matrix.md.

A cell is right where results (and derivatives, where the way has them) are those of attention as operations of torch's
in float64; refused where our code says in a sentence what to do; else it tells what went wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from sdpa.bench.cpp_program import Refused
from sdpa.bench.matrix_kinds import Kind, kinds
from sdpa.bench.matrix_ways import TOGETHER, WAYS, Wrong

PAGE = Path(__file__).resolve().parent.parent / "docs" / "matrix.md"
LONGEST = 220  # characters of an error that is not ours
HEAD = """# What works with what

Kinds of call (rows) in the ways that torch has of running one (columns), on a CPU, with torch {torch}. Made by
`python -m sdpa.bench.matrix`; `tests/test_matrix.py` runs a sample of it.

- `ok`: the numbers are those of attention as operations of torch's in float64 (AOTInductor, ONNX and autocast: to the
  accuracy of their dtype), with gradients where the way has them.
- `ok*`: right, with random numbers of torch's dropout instead of ours.
- a number: refused, with the sentence below.
- `-`: not run for this page.

The packages of the column "AOTInductor in C++" are those of "AOTInductor", run by a program in C++ that has loaded
`sdpa.operators_library()`. Those of "AOTInductor, decomposed" name no operator of ours and need no library.
"""


def cell(kind: Kind, way: Callable[[Kind], str | None]) -> str:
    """What a way makes of a kind of call."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    try:
        return way(kind) or "ok"
    except Wrong as error:
        return f"WRONG: {error}"
    except Refused as error:
        return f"refused: {error}"
    except Exception as error:
        return told(error)


def told(error: BaseException) -> str:
    """A refusal of ours, which is its first sentence, or an error of somebody else's."""
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    sentence = next((link for link in chain if is_ours(link)), None)
    if sentence is not None:
        return f"refused: {text_of(sentence)}"
    return f"ERROR: {type(chain[-1]).__name__}: {text_of(chain[-1])[:LONGEST]}"


def is_ours(error: BaseException) -> bool:
    """Whether our code raised it."""
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(modules) and modules[-1].startswith("sdpa.") and not modules[-1].startswith("sdpa.bench.")


def text_of(error: BaseException) -> str:
    return " ".join(str(error).split())


def run(names: list[str], ways: list[str], found: dict[str, dict[str, str]], save: Callable[[], None]) -> None:
    known = kinds()
    for way in ways:
        cells = WAYS[way]
        if way in TOGETHER and len(names) > 1:
            cells = together({name: known[name] for name in names}, way)
        for name in names:
            found.setdefault(name, {})[way] = cell(known[name], cells)
            print(f"{way} | {name} | {found[name][way]}", flush=True)
        save()


def together(asked: dict[str, Kind], way: str) -> Callable[[Kind], str | None]:
    """A way that has run all kinds; if one of them cannot, each is asked by itself."""
    try:
        torch.manual_seed(0)
        compared = TOGETHER[way](asked)
    except Exception as error:
        print(f"{way} | one by one: {told(error)}", flush=True)
        return WAYS[way]
    names = {id(kind): name for name, kind in asked.items()}
    return lambda kind: compared[names[id(kind)]]()


def page(found: dict[str, dict[str, str]]) -> str:
    """The table, and the sentences that its numbers stand for."""
    ways = list(WAYS)
    sentences: list[str] = []
    lines = ["| | " + " | ".join(ways) + " |", "|---" * (len(ways) + 1) + "|"]
    for name in (name for name in kinds() if name in found):
        marks = []
        for way in ways:
            said = found[name].get(way) or "-"
            if said not in ("ok", "ok*", "-"):
                if said not in sentences:
                    sentences.append(said)
                said = str(sentences.index(said) + 1)
            marks.append(said)
        lines.append(f"| {name} | " + " | ".join(marks) + " |")
    notes = [f"{number}. {sentence}" for number, sentence in enumerate(sentences, 1)]
    return "\n".join([HEAD.format(torch=torch.__version__), *lines, "", *notes]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ways", default="", help="names of ways, divided by semicolons; all by default")
    parser.add_argument("--kinds", default="", help="names of kinds, divided by semicolons; all by default")
    parser.add_argument("--cells", type=Path, help="JSON file of cells that are kept, and to which these are added")
    parser.add_argument("--page", type=Path, default=PAGE)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    found = json.loads(given.cells.read_text()) if given.cells and given.cells.exists() else {}

    def save() -> None:
        if given.cells:
            given.cells.write_text(json.dumps(found, indent=1))
        given.page.write_text(page(found))

    names = given.kinds.split(";") if given.kinds else list(kinds())
    ways = given.ways.split(";") if given.ways else list(WAYS)
    run(names, ways, found, save)
    wrong = sum(said.startswith(("WRONG", "ERROR")) for row in found.values() for said in row.values())
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
