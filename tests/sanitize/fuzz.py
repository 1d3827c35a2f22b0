"""The process that fuzzes: loads the instrumented library, proves that errors are found, and calls until time is over.

It is started by run.py, which builds the library and knows what to do with an error.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import random
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import calls
import torch
from problems import DTYPES, random_problem
from torch import Tensor

from sdpa.kernels.cpu import library
from sdpa.problem import AttentionInputs

FOUND = b"AddressSanitizer: heap-buffer-overflow"
LEAK_CASES, LEAK_ROUNDS, LEAK_CALLS = 3, 3, 5
LEAST_LEAK = 64  # bytes of a call; any tensor takes more
PATIENCE = 60.0  # seconds until an error must have been found
KINDS: dict[str, tuple[Callable[[int], None], int]] = {
    "operators": (calls.operators, 14),
    "refusals": (calls.refusals, 2),
    "public": (calls.public, 4),
}


def load(path: Path) -> None:
    """In place of the shipped library; everything above it stays as it is."""
    library.LIBRARY = path
    reason = library.load_error()
    if reason is not None:
        raise SystemExit(reason)


def last_words(call: Callable[[], object]) -> bytes:
    """What a process says that calls, up to the error that AddressSanitizer finds."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(writer, 2)
        try:
            call()
        finally:
            os._exit(0)
    os.close(writer)
    said, deadline = b"", time.monotonic() + PATIENCE
    while FOUND not in said and select.select([reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
        part = os.read(reader, 4096)
        if not part:
            break
        said += part
    os.close(reader)
    os.kill(child, signal.SIGKILL)  # its report takes seconds, and is not read
    os.waitpid(child, 0)
    return said


def shortened(tensor: Tensor) -> Tensor:
    """The same sizes in memory that ends an element earlier."""
    storage = tensor.untyped_storage()
    storage.resize_(storage.nbytes() - tensor.element_size())
    return tensor


def check_that_errors_are_found() -> None:
    """An element read beyond the end of q, k or v has to end a process, on any instruction set."""
    for number, isa in enumerate(library.isas()):
        library.set_isa(isa)
        for place in range(3):
            dtype, M = DTYPES[(number + place) % len(DTYPES)], (5, 300)[number % 2]  # keys in place; keys packed
            tensors = [torch.ones(1, 1, M, 17, dtype=dtype) for _ in range(3)]
            shortened(tensors[place])
            said = last_words(partial(calls.forward, AttentionInputs(*tensors, 1.0), None))
            if FOUND not in said:
                what = f"{isa} {dtype} M {M}: {said.decode(errors='replace')}"
                raise SystemExit(f"a read beyond {'qkv'[place]} was not found: {what}")


def allocated() -> int:
    count = ctypes.CDLL(None).__sanitizer_get_current_allocated_bytes
    count.restype = ctypes.c_size_t
    return count()


def growth(call: Callable[[], object]) -> int:
    """Bytes that calling leaves behind."""
    gc.collect()
    before = allocated()
    for _ in range(LEAK_CALLS):
        call()
    gc.collect()
    return allocated() - before


def check_for_leaks(seed: int, note: Path) -> None:
    """Calls, and calls that are refused, leave nothing behind: what grows now and then is Python's and torch's."""
    for kind in (calls.operators, calls.refusals):
        for number in range(seed, seed + LEAK_CASES):
            note.write_text(str(number))
            least = min(growth(partial(kind, number)) for _ in range(LEAK_ROUNDS))
            if least >= LEAK_CALLS * LEAST_LEAK:
                raise SystemExit(f"case {number}: {LEAK_CALLS} calls left {least} bytes behind")


def chosen(seed: int) -> tuple[str, str, int]:
    """What is called with the problem of a seed, on which instruction set and how many threads."""
    rng = random.Random(f"case {seed}")  # other numbers than the problem's
    names, weights = list(KINDS), [weight for _, weight in KINDS.values()]
    return rng.choices(names, weights)[0], rng.choice(library.isas()), rng.choice((1, 2))


def run_case(seed: int) -> str:
    kind, isa, threads = chosen(seed)
    library.set_isa(isa)
    torch.set_num_threads(threads)
    KINDS[kind][0](seed)
    return f"{kind} {isa}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", type=Path)
    parser.add_argument("note", type=Path, help="file that holds the seed of the case that runs")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--cases", type=int, required=True, help="0: as many as there is time for")
    given = parser.parse_args()
    load(given.library)
    torch.set_num_threads(1)
    if given.cases == 1:
        kind, isa, threads = chosen(given.seed)
        print(f"fuzz: {kind}, {isa}, threads {threads}: {random_problem(given.seed)}", flush=True)
    start = time.monotonic()
    check_that_errors_are_found()
    check_for_leaks(given.seed, given.note)
    print(f"fuzz: deliberate errors are found, no leaks: {time.monotonic() - start:.0f} s", flush=True)
    end, ran = time.monotonic() + given.seconds, Counter()
    case = given.seed
    while time.monotonic() < end and (given.cases == 0 or case < given.seed + given.cases):
        given.note.write_text(str(case))
        ran[run_case(case)] += 1
        case += 1
    print(f"fuzz: {case - given.seed} cases from seed {given.seed}: {dict(sorted(ran.items()))}")


if __name__ == "__main__":
    sys.exit(main())
