"""What share of a core we use: `python -m sdpa.bench.ceilings`, one thread, on a machine with a C compiler.

float32 forwards beside products in registers, decodes beside plain reads of as many bytes. Each pair is timed by turns,
so that a clock that moves, or memory that others use, is no share of ours.
"""

from __future__ import annotations

import ctypes
import platform
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import torch

from sdpa.bench import record
from sdpa.bench.calls import our_call
from sdpa.bench.problems import Problem, square
from sdpa.bench.timing import interleave
from sdpa.bench.workload import make_workload

COMPILER = "cc"
SOURCE = Path(__file__).with_name("ceilings.c")
SECONDS = 1.5  # for a pair
ROUNDS = 100_000  # of products: a few milliseconds
FORWARDS = tuple(square(N, 128, mask=mask) for N, mask in product((1024, 2048, 4096), ("none", "causal")))
DECODES = tuple(
    Problem(1, 32, 1, 32768, 128, dtype=dtype, Hkv=Hkv) for dtype, Hkv in product(("bfloat16", "float32"), (32, 8))
)


def compile_library() -> ctypes.CDLL:
    """The loops of ceilings.c, for the processor at hand. Raises RuntimeError with what the compiler says."""
    native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ceilings.so"
        options = ("-O3", native, "-ffp-contract=fast", "-shared", "-fPIC", str(SOURCE), "-o", str(path))
        try:
            subprocess.run([COMPILER, *options], check=True, capture_output=True, text=True)
        except OSError as error:
            raise RuntimeError(f"expected a C compiler of the name {COMPILER}: {error}") from None
        except subprocess.CalledProcessError as error:
            raise RuntimeError(f"{COMPILER} cannot compile {SOURCE.name}: {error.stderr or error}") from None
        library = ctypes.CDLL(str(path))
    library.operations_of_round.restype = ctypes.c_size_t
    library.multiply.argtypes = (ctypes.c_size_t, ctypes.c_float, ctypes.c_float)
    library.multiply.restype = ctypes.c_float
    library.read_all.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    library.read_all.restype = ctypes.c_uint
    return library


def ceiling_of(library: ctypes.CDLL, problem: Problem) -> tuple[Callable[[], object], float]:
    """What a problem is measured by, and how much of the problem's unit (1e12 operations, 1e9 bytes) it does."""
    if problem.unit == "GB/s":
        memory = torch.ones(round(problem.figure(1.0) * 1e9), dtype=torch.uint8)
        return lambda: library.read_all(memory.data_ptr(), memory.numel()), memory.numel() * 1e-9
    return lambda: library.multiply(ROUNDS, 0.5, 1.0), library.operations_of_round() * ROUNDS * 1e-12


def measure(problems: tuple[Problem, ...], time_limit: float = SECONDS) -> Iterator[tuple[Problem, float, float]]:
    """Problems with our speed and the ceiling's, in the problem's unit, by least times."""
    library = compile_library()
    for problem in problems:
        ceiling, amount = ceiling_of(library, problem)
        ours, most = interleave([our_call(make_workload(problem)), ceiling], time_limit=time_limit)
        yield problem, problem.figure(ours.minimum), amount / most.minimum


def main() -> None:
    torch.set_num_threads(1)
    facts = record.header("cpu")
    versions = " ".join(f"{name} {version}" for name, version in facts["versions"].items())
    print(f"{facts['description']} ({facts['device']}), one thread; {versions}")
    try:
        for problem, ours, most in measure((*FORWARDS, *DECODES)):
            print(f"{problem.label:<48} {ours:7.4g} of {most:7.4g} {problem.unit}: {ours / most:.1%}", flush=True)
    except RuntimeError as error:
        raise SystemExit(f"sdpa: {error}") from None


if __name__ == "__main__":
    main()
