"""The tuner's problems on a GPU: those of the suites, then what lies around them; the most usual ones first. And drawn
ones, on any device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

from sdpa.bench import book
from sdpa.bench.drawn import drawn
from sdpa.bench.problems import DIRECTIONS, Problem
from sdpa.bench.suites import GPU_SUITES, MPS_WIDTH, TOKENS, WIDTH
from sdpa.bench.suites import SUITES as SUITES_BY_NAME

# In this order a run that is cut short has what most models ask for.
SUITES = (
    "gpu-forward", "gpu-backward", "gpu-decode", "gpu-gqa", "gpu-mask", "gpu-dropout", "gpu-bias", "gpu-cross",
    "gpu-fp32", "gpu-overhead",
)  # fmt: skip
# Lengths at which all tiles are tried: those between take over what was best next to them.
EXPLORED = (512, 1024, 2048, 8192)
# Around the suites. Buckets speak for sizes up to eight times theirs, so one length is enough for rare head sizes.
HEAD_SIZES = (64, 128)
OTHER_HEAD_SIZES = (32, 96, 192)
USUAL = 2048
SHORT = 128
FEW_HEADS = 4
FEW_HEADS_AT = (64, 256, USUAL)  # lengths; the two short ones take the host longer than the device
GROUP = 4  # query heads per key/value head of today's models
WINDOW = 1024
DECODE_HEADS = 32
PLAIN = ("none", "causal")
OTHERS = ("bias", "allowed", "lengths", "segments", "window")
# What fewer kernels take than a table's kinds of masks tell.
UNTOLD_MASKS = ("alibi",)
# The calls that a table tells from others: plain ones, and those of tables.BESIDE that a problem can ask.
TOLD_CALLS = ("", "dropout", "softcap")


@dataclass(frozen=True)
class Cell(Problem):
    """A problem that says how many tiles are tried: with `explore` every one, else a kernel's first guess and what was
    best nearby, because each tile costs a compilation."""

    explore: bool = False


def gpu_grid(device: str) -> tuple[Cell, ...]:
    """In the order in which they are measured, each once."""
    cells = [cell_of(problem) for name in SUITES for problem in GPU_SUITES[name] if problem.call in TOLD_CALLS]
    cells += [*around_decode(), *few(), *masks(), *full(OTHER_HEAD_SIZES, USUAL, PLAIN), *latent()]
    return each_once(cells, device)


def mps_grid(device: str) -> tuple[Cell, ...]:
    """The problems on Apple's GPUs: those of their suite, then other lengths, head sizes and masks."""
    cells = [cell_of(problem) for problem in SUITES_BY_NAME["mps"] if not problem.call]
    for direction, D, N, mask in product(DIRECTIONS, (64, 128), (128, 1024), PLAIN):
        cells.append(Cell(1, MPS_WIDTH // D, N, N, D, dtype="float16", mask=mask, direction=direction, explore=True))
    for direction, D in product(DIRECTIONS, (32, 96, 192, 256)):
        cells.append(Cell(1, MPS_WIDTH // D, 1024, 1024, D, dtype="float16", direction=direction, explore=True))
    for direction, mask in product(DIRECTIONS, ("bias", "allowed", "lengths")):
        cells.append(Cell(2, 8, 1024, 1024, 64, dtype="float16", mask=mask, direction=direction, explore=True))
    for dtype, direction, N in product(("float32", "bfloat16"), DIRECTIONS, (256, 1024)):
        cells.append(Cell(1, 16, N, N, 64, dtype=dtype, mask="causal", direction=direction, explore=True))
    for Hkv, N in product((32, 8), (1024, 8192)):
        cells.append(Cell(1, 32, 1, N, 128, Hkv=Hkv, dtype="bfloat16", explore=True))
    return each_once(cells, device)


def drawn_grid(seed: int, count: int, device: str) -> tuple[Cell, ...]:
    """`count` problems of suite `random` with this seed, less those that a table cannot tell from others."""
    problems = drawn(seed, count, device.partition(":")[0])
    told = (p for p in problems if p.call in TOLD_CALLS and p.mask not in UNTOLD_MASKS)
    return each_once((cell_of(p, explore=False) for p in told), device)


def each_once(cells: Iterable[Cell], device: str) -> tuple[Cell, ...]:
    """The cells on a device, the first one of those that are one entry of a table."""
    first: dict[tuple[Any, ...], Cell] = {}
    for cell in cells:
        own = replace(cell, device=device)
        first.setdefault(book.entry_key(own), own)
    return tuple(first.values())


def cell_of(problem: Problem, explore: bool | None = None) -> Cell:
    given = {field.name: getattr(problem, field.name) for field in fields(problem)}
    return Cell(**given | {"host": False, "grad": False}, explore=explores(problem) if explore is None else explore)


def explores(problem: Problem) -> bool:
    plain = problem.mask in PLAIN and problem.H == problem.Hkv
    return not plain or problem.N in EXPLORED or problem.M != problem.N


def full(head_sizes: Iterable[int], N: int, kinds: Iterable[str], explore: bool = False) -> list[Cell]:
    """Cells of TOKENS tokens and WIDTH features: a GPU is full, and cells compare."""
    cells = []
    for direction, D, mask in product(DIRECTIONS, head_sizes, kinds):
        options: dict[str, Any] = {
            "dtype": "bfloat16",
            "mask": mask,
            "direction": direction,
            "window": WINDOW,
            "explore": explore,
        }
        cells.append(Cell(TOKENS // N, WIDTH // D, N, N, D, **options))
    return cells


def masks() -> list[Cell]:
    """Every kind of mask at both head sizes, the bias that learns in the backward alone."""
    cells = full(HEAD_SIZES, USUAL, OTHERS)
    return cells + [c for c in full(HEAD_SIZES, USUAL, ("bias_grad",)) if c.direction == "backward"]


def latent() -> list[Cell]:
    """Keys wider than values, as multi-head latent attention has them (DeepSeek-V2)."""
    options: dict[str, Any] = {"Dv": 128, "dtype": "bfloat16"}
    sizes = (TOKENS // USUAL, WIDTH // 128, USUAL, USUAL, 192)
    return [Cell(*sizes, mask=mask, direction=direction, **options) for direction, mask in product(DIRECTIONS, PLAIN)]


def around_decode() -> list[Cell]:
    """A few new queries against many keys: more of them, more conversations, heads shared and not."""
    options: dict[str, Any] = {"dtype": "bfloat16", "explore": False}
    heads = (DECODE_HEADS // GROUP, DECODE_HEADS)
    cells = [Cell(B, DECODE_HEADS, 1, 1024, 128, Hkv=Hkv, **options) for B, Hkv in product((1, 16, 64), heads)]
    cells += [Cell(B, DECODE_HEADS, 8, 8192, 128, Hkv=Hkv, **options) for B, Hkv in product((1, 16), heads)]
    cells += [Cell(16, DECODE_HEADS, 1, 8192, 128, **options)]
    return cells + [Cell(B, DECODE_HEADS, 1, 8192, 64, Hkv=heads[0], **options) for B in (1, 16)]


def few() -> list[Cell]:
    """Short sequences, and so few heads that a GPU is not full."""
    cells = full(HEAD_SIZES, SHORT, PLAIN)
    for N, direction, D, mask in product(FEW_HEADS_AT, DIRECTIONS, HEAD_SIZES, PLAIN):
        cells.append(Cell(1, FEW_HEADS, N, N, D, dtype="bfloat16", mask=mask, direction=direction))
    return cells
