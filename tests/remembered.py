"""What is remembered of front-door calls, for tests to look at."""

from __future__ import annotations

from collections.abc import Iterator

import sdpa
from sdpa.calls import CALLS, Pass
from sdpa.prepared import Prepared, PreparedWeights

DENSE, PACKED, PAGED = "scaled_dot_product_attention", "varlen_attention", "paged_attention"


class Other(sdpa.Mask):
    """A mask that may be read in another way: its calls are the operator's."""


def runs(name: str = DENSE) -> list:
    """What answers the remembered calls of a public function."""
    return [run for key, run in CALLS.known.items() if key[0][0] == name]


def remembered(name: str = DENSE) -> int:
    return len(runs(name))


def forwards(name: str = DENSE) -> list[Pass]:
    """The forward of each of them."""
    return [next(passes_in(run)) for run in runs(name)]


def prepared(name: str = DENSE) -> list[Prepared]:
    """What each of those comes to that learns."""
    return [next(owners_in(run)) for run in runs(name)]


def owners_in(run: object) -> Iterator[object]:
    """What a function is a method of, has in its closure, or is given first."""
    if isinstance(run, (Pass, Prepared, PreparedWeights)):
        yield run
        return
    held = [
        getattr(run, "__self__", None),
        *getattr(run, "args", ()),  # of a partial: our node's
        *(cell.cell_contents for cell in getattr(run, "__closure__", None) or ()),
    ]
    for found in held:
        if found is not None and (callable(found) or isinstance(found, (Prepared, PreparedWeights))):
            yield from owners_in(found)


def passes_in(run: object) -> Iterator[Pass]:
    for found in owners_in(run):
        while not isinstance(found, Pass):
            found = found.forward
        yield found
