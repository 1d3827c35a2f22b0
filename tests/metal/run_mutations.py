"""Runs small cases through every mutant of the Metal kernels and names the mutants that no case notices.

    python tests/metal/run_mutations.py [--file forward] [--rule barrier] [--share 0.1] [--jobs 2]

A mutant is killed by a wrong result, an error of the emulator, or a source that does not compile. Exits with 1 where
one survives that equivalent_mutants.py does not excuse.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from metal import build, emulator, mutate
from metal.equivalent_mutants import EQUIVALENT
from metal.mutation_cases import CASES, emulated

from sdpa.kernels.metal import launch, source

SECONDS = 5.0  # of one dispatch; a mutant may never end
# Settings of the emulator, one after the other, and whether cases that are much like others run with them, too.
PASSES = (
    ({}, True),
    ({"checked": True, "views": True}, False),
    ({"schedule": "random", "seed": 1}, False),
)


class Verdict(NamedTuple):
    mutant: mutate.Mutant
    file: str
    reason: str  # what killed it, empty where nothing did


def killed_by(file: str, text: str) -> str:
    """The first case that notices a text of a file, and how; empty if none does. Without a file, all cases run."""
    original = source.read
    source.read = lambda name: text if name == file else original(name)
    launch.library_of.cache_clear()
    try:
        for settings, every in PASSES:
            with emulator.configure(seconds=SECONDS, **settings):
                for case in CASES:
                    asked = (every or case.checked) and (not file or case.concerns(file))
                    if asked and (reason := noticed(case.run)):
                        return f"{case.name}: {reason}"
    finally:
        source.read = original
        launch.library_of.cache_clear()
    return ""


def noticed(run: Callable[[], list]) -> str:
    try:
        bad = [str(comparison) for comparison in run() if not comparison.ok]
    except Exception as error:  # whatever a wrong kernel leads to
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return bad[0] if bad else ""


def judged(file: str, mutant: mutate.Mutant, out: int) -> None:
    """In a process of its own, which may die of the mutant; what it compiles is thrown away."""
    made, cached = [], build.cached

    def noted(name, make):
        if not (build.cache() / name).exists():
            made.append(build.cache() / name)
        return cached(name, make)

    build.cached = noted
    try:
        reason = killed_by(file, mutant.source)
    finally:
        for path in made:
            path.unlink(missing_ok=True)
    os.write(out, reason.encode()[:4000] or b"-")


def started(file: str, mutant: mutate.Mutant) -> tuple[int, int]:
    read, write = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(read)
        try:
            judged(file, mutant, write)
        finally:
            os._exit(0)
    os.close(write)
    return process, read


def verdicts(work: list[tuple[str, mutate.Mutant]], jobs: int):
    """A verdict for each mutant, some at a time."""
    running: dict[int, tuple[int, str, mutate.Mutant]] = {}
    todo = list(reversed(work))
    while todo or running:
        while todo and len(running) < jobs:
            file, mutant = todo.pop()
            process, read = started(file, mutant)
            running[process] = read, file, mutant
        process, _ = os.wait()
        read, file, mutant = running.pop(process)
        with os.fdopen(read, "rb") as pipe:
            said = pipe.read().decode(errors="replace")
        yield Verdict(mutant, file, "" if said == "-" else said or "the process died")


def work_of(arguments) -> list[tuple[str, mutate.Mutant]]:
    found = []
    for path in sorted(source.FOLDER.glob("*.metal")):
        if arguments.file and path.stem not in arguments.file:
            continue
        for mutant in mutate.mutants(path.read_text()):
            if not arguments.rule or mutant.description.split(":")[0] in arguments.rule:
                found.append((path.stem, mutant))
    if arguments.again:
        said = {line.removeprefix("SURVIVED ").strip() for line in arguments.again.read_text().splitlines()}
        found = [(file, mutant) for file, mutant in found if f"{file}:{mutant.line} {mutant.description}" in said]
    if arguments.share < 1:
        random.Random(arguments.seed).shuffle(found)
        found = found[: round(len(found) * arguments.share)]
    return found


def parsed():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--file", action="append", help="a file of kernels/metal, without .metal")
    parser.add_argument("--rule", action="append", help="a rule of mutate.py, such as barrier")
    parser.add_argument("--share", type=float, default=1.0, help="of the mutants, by chance")
    parser.add_argument("--seed", type=int, default=0, help="of that chance")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--verbose", action="store_true", help="what killed each mutant")
    parser.add_argument("--again", type=Path, help="what an earlier run wrote: those that survived it alone")
    return parser.parse_args()


def main() -> int:
    arguments = parsed()
    torch.set_num_threads(1)
    emulator.runtime()
    with emulated():
        if reason := killed_by("", ""):
            print(f"without a mutation: {reason}")
            return 2
        work, begin = work_of(arguments), time.monotonic()
        killed, total, survived, excused = Counter(), Counter(), [], set()
        for verdict in verdicts(work, arguments.jobs):
            rule = verdict.mutant.description.split(":")[0]
            total[rule] += 1
            key = verdict.file, verdict.mutant.description
            if verdict.reason:
                killed[rule] += 1
                if arguments.verbose:
                    print(
                        f"killed {verdict.file}:{verdict.mutant.line} {verdict.mutant.description}\n  {verdict.reason}"
                    )
                if key in EQUIVALENT:
                    print(f"{verdict.file}:{verdict.mutant.line} is excused, but killed: {verdict.mutant.description}")
            elif key in EQUIVALENT:
                excused.add(key)
            else:
                survived.append(verdict)
                print(f"SURVIVED {verdict.file}:{verdict.mutant.line} {verdict.mutant.description}", flush=True)
    for rule, count in sorted(total.items()):
        print(f"{rule:24} {killed[rule]:5} of {count:5} killed")
    print(
        f"{sum(killed.values())} of {sum(total.values())} mutants killed, {len(excused)} equivalent, "
        f"{len(survived)} survived, in {time.monotonic() - begin:.0f} s"
    )
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
