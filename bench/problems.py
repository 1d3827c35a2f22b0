"""The problems that are measured: one frozen noun, and the named suites as data.

Sizes by the glossary: B batch, H query heads, Hkv key/value heads, M queries, N keys, D and Dv head sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch

MASKS = ("none", "causal", "window", "padding", "lengths", "bias")
DIRECTIONS = ("forward", "backward")
# Keys a query of the "window" mask sees to its left: large enough for a model, small enough that skipping pays.
WINDOW = 256


@dataclass(frozen=True)
class Problem:
    """One call to measure; `grad` makes a forward record its graph, which a backward needs anyway."""

    B: int
    H: int
    M: int
    N: int
    D: int
    dtype: str = "float32"
    mask: str = "none"  # of MASKS
    direction: str = "forward"  # of DIRECTIONS
    Hkv: int = 0  # 0: as many as H
    Dv: int = 0  # 0: as large as D
    layout: str = "bhmd"  # or "bmhd": as a model's projections leave it
    grad: bool = False
    device: str = "cpu"

    def __post_init__(self) -> None:
        object.__setattr__(self, "Hkv", self.Hkv or self.H)
        object.__setattr__(self, "Dv", self.Dv or self.D)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def needs_grad(self) -> bool:
        return self.grad or self.direction == "backward"

    @property
    def shape(self) -> str:
        """B,H,M,N,D, short where sizes agree: 1,8/2,1024,64 has 8 query heads, 2 key heads and M = N."""
        heads = f"{self.H}/{self.Hkv}" if self.Hkv != self.H else str(self.H)
        lengths = str(self.M) if self.M == self.N else f"{self.M},{self.N}"
        sizes = f"{self.D}/{self.Dv}" if self.Dv != self.D else str(self.D)
        return f"{self.B},{heads},{lengths},{sizes}"

    @property
    def label(self) -> str:
        """Short enough for a column: what distinguishes the cells of a suite."""
        recorded = self.grad and self.direction == "forward"
        notes = [self.direction] + ["grad"] * recorded + [self.layout] * (self.layout != "bhmd")
        return f"{self.dtype} {self.shape} {self.mask} {'+'.join(notes)}"

    def key_lengths(self) -> tuple[int, ...]:
        """Valid keys per batch entry under "padding" and "lengths": from half of N to all."""
        half = self.N // 2
        return tuple(max(1, half + (self.N - half) * b // max(1, self.B - 1)) for b in range(self.B))

    def flops(self) -> float:
        """Operations of the matrix products over what the mask lets a query see."""
        passes = 6 * self.D + 4 * self.Dv if self.direction == "backward" else 2 * (self.D + self.Dv)
        return self.H * self.visible_pairs() * passes

    def visible_pairs(self) -> int:
        """Pairs of query and key that the mask leaves, of one head in the whole batch."""
        if self.mask in ("padding", "lengths"):
            return self.M * sum(self.key_lengths())
        if self.mask not in ("causal", "window"):
            return self.B * self.M * self.N
        reach = WINDOW if self.mask == "window" else self.M  # M: no row reaches further back
        return self.B * sum(max(0, min(i, self.N - 1) - max(0, i - reach) + 1) for i in range(self.M))


DTYPES = ("float32", "bfloat16", "float16")
VIT = {"B": 4, "H": 12, "M": 197, "N": 197, "D": 64}


def heads_for(length: int) -> int:
    """Heads that keep one call between a tenth of a millisecond and a few tenths of a second on one core."""
    if length <= 512:
        return 8
    return 4 if length <= 2048 else 1


def square(length: int, D: int, **rest) -> Problem:
    return Problem(1, heads_for(length), length, length, D, **rest)


def cpu_forward() -> tuple[Problem, ...]:
    lengths = (64, 128, 256, 512, 1024, 2048, 4096)
    grid = product(DTYPES, (64, 128), lengths, ("none", "causal"))
    cells = [square(length, D, dtype=dtype, mask=mask) for dtype, D, length, mask in grid]
    for dtype in DTYPES:
        cells += [
            square(512, 128, dtype=dtype, mask="causal", Hkv=2),
            square(1024, 64, dtype=dtype, mask="none", Hkv=1),
            square(1024, 64, dtype=dtype, mask="padding"),
            Problem(4, 8, 256, 256, 64, dtype=dtype, mask="lengths"),
            Problem(**VIT, dtype=dtype, layout="bmhd"),
        ]
    cells += [square(length, 64, dtype=d, mask="window") for d in ("float32", "bfloat16") for length in (1024, 4096)]
    cells += [square(512, 64, dtype=d, mask="bias") for d in ("float32", "bfloat16")]
    return tuple(cells)


def cpu_backward() -> tuple[Problem, ...]:
    grid = product(("float32", "bfloat16"), (64, 128), (128, 256, 512, 1024), ("none", "causal"))
    cells = [square(length, D, dtype=dtype, mask=mask, direction="backward") for dtype, D, length, mask in grid]
    for dtype in ("float32", "bfloat16"):
        cells += [
            square(512, 64, dtype=dtype, mask="causal", Hkv=2, direction="backward"),
            square(512, 64, dtype=dtype, mask="padding", direction="backward"),
            Problem(**VIT, dtype=dtype, layout="bmhd", direction="backward"),
        ]
    # torch's float16 backward takes ten times its float32 one: two cells show it, more would only take time.
    cells += [square(length, 64, dtype="float16", mask="causal", direction="backward") for length in (256, 512)]
    return tuple(cells)


def cpu_decode() -> tuple[Problem, ...]:
    grid = product(("bfloat16", "float32"), (32, 8), (1024, 4096, 16384))
    return tuple(Problem(1, 32, 1, N, 128, dtype=dtype, Hkv=Hkv) for dtype, Hkv, N in grid)


def overhead() -> tuple[Problem, ...]:
    """Calls so small that only the way to the kernel costs."""
    small = {"B": 1, "H": 4, "M": 16, "N": 16, "D": 64}
    return (
        Problem(**small),
        Problem(**small, grad=True),
        Problem(**small, direction="backward"),
        Problem(**small, mask="causal"),
        Problem(**small, dtype="bfloat16"),
        Problem(**small, mask="padding"),
        Problem(**small, layout="bmhd"),
        Problem(**small, Hkv=2),
        Problem(1, 1, 1, 1, 64),
        Problem(1, 4, 1, 16, 64),
        Problem(2, 8, 32, 32, 32, grad=True),
    )


SUITES = {
    "cpu-forward": cpu_forward(),
    "cpu-backward": cpu_backward(),
    "cpu-decode": cpu_decode(),
    "overhead": overhead(),
}
