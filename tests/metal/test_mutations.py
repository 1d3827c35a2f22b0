"""Mutants of the Metal kernels: what they are, and that a kernel without one of its barriers fails.

All other mutants, some thousand, are for run_mutations.py.
"""

from __future__ import annotations

import pytest
from metal.equivalent_mutants import EQUIVALENT
from metal.mutate import barriers, mutants
from metal.run_mutations import killed_by

from sdpa.kernels.metal import source

FILES = sorted(path.stem for path in source.FOLDER.glob("*.metal"))
BARRIERS = [(name, mutant) for name in FILES for mutant in barriers(source.read(name))]

TEXT = """// for (int i = 0; i < 3; ++i) with `+ 1`
#define LD 4
for (int i = 0; i < count; ++i) tile[row * LD + 1] = from[i + 1];
threadgroup_barrier(mem_flags::mem_threadgroup);
if (at.row == 0 && group.x >= BLOCK_M) simdgroup_barrier(mem_flags::mem_none);
"""


def test_mutants_of_a_text():
    found = mutants(TEXT)
    said = {(mutant.line, mutant.description.split(" in: ")[0]) for mutant in found}
    assert said == {
        (3, "bound: `<` -> `<=`"),
        (3, "one more: `+ 1` -> ``"),
        (3, "leading dimension: `* LD` -> ``"),
        (4, "barrier: `threadgroup_barrier(mem_flags::mem_threadgroup);` -> `;`"),
        (5, "barrier: `simdgroup_barrier(mem_flags::mem_none);` -> `;`"),
        (5, "equality: `==` -> `!=`"),
        (5, "and: `&&` -> `||`"),
        (5, "bound: `>=` -> `>`"),
        (5, "axis: `group.x` -> `group.y`"),
        (5, "row for column: `.row` -> `.col`"),
        (5, "swap: `BLOCK_M` -> `BLOCK_N`"),
    }
    assert len({mutant.description for mutant in found}) == len(found) == 12  # `+ 1` is there twice
    for mutant in found:
        changed = [
            i for i, (a, b) in enumerate(zip(TEXT.split("\n"), mutant.source.split("\n"), strict=True), 1) if a != b
        ]
        assert changed == [mutant.line]


@pytest.mark.parametrize(("file", "mutant"), BARRIERS, ids=[f"{name}-{m.line}" for name, m in BARRIERS])
def test_every_barrier_is_needed(file, mutant):
    assert killed_by(file, mutant.source) or (file, mutant.description) in EQUIVALENT, mutant.description


def test_what_is_excused_is_there():
    """A mutant is excused by the text of its line, so that a line that changes is judged again."""
    there = {(name, mutant.description) for name in FILES for mutant in mutants(source.read(name))}
    assert set(EQUIVALENT) - there == set()
    assert all(EQUIVALENT.values())
