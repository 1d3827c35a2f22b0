"""Problem: one call to measure, what it computes, and the unit its speed is told in.

Sizes by the glossary: B batch, H query heads, Hkv key/value heads, M queries, N keys, D and Dv head sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

# "padding" is (B, 1, 1, N) bool and "lengths" the same as numbers; "bias" is (1, H, M, N) and "bias_grad" learns it;
# "allowed" is (B, 1, M, N) bool; "alibi" and "segments" (packed documents) are causal too. "lower_right" is causal with
# its diagonal in the lower right corner: M new queries behind a cache.
MASKS = (
    "none", "causal", "lower_right", "window", "padding", "lengths", "bias", "bias_grad", "allowed", "alibi",
    "segments",
)  # fmt: skip
DIRECTIONS = ("forward", "backward")
# What a call asks beyond plain attention (sdpa.bench.calls). "parameter" is a training step: q, k and v are
# nn.Parameters, and the forward is timed with its backward. "kernel" names its kernel. "module" is a whole
# nn.MultiheadAttention, of which the problem gives the sizes, and "weights" one that returns its weights, too.
MODULES = ("module", "weights")
CALLS = ("", "dropout", "softcap", "return_lse", "parameter", "autocast", "kernel", "varlen", *MODULES)
# Keys a query of the "window" mask sees to its left: large enough for a model, small enough that skipping pays.
WINDOW = 256
# Packed documents have about so many tokens, the lengths of neighbours in these proportions.
DOCUMENT = 1024
UNEVEN = (2, 5, 3, 6)
# So few queries are bound by reading keys and values: their figure is bytes and not operations.
FEW_QUERIES = 16
# A backward takes five products where a forward takes two.
BACKWARD_WORK = 2.5


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
    window: int = WINDOW  # of the "window" mask
    precision: str = "highest"  # torch's float32 matmul precision; "high" allows TF32
    host: bool = False  # the figure is the host's time of a call, and not the device's
    call: str = ""  # of CALLS
    deterministic: bool = False  # whether torch.use_deterministic_algorithms is set

    def __post_init__(self) -> None:
        object.__setattr__(self, "Hkv", self.Hkv or self.H)
        object.__setattr__(self, "Dv", self.Dv or self.D)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def is_step(self) -> bool:
        """Whether a forward is timed with its backward."""
        return self.call == "parameter"

    @property
    def differentiates(self) -> bool:
        """Whether gradients are computed, and so have to be right."""
        return self.is_step or self.direction == "backward"

    @property
    def needs_grad(self) -> bool:
        return self.grad or self.differentiates

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
        modes = ["tf32"] * (self.precision != "highest") + ["deterministic"] * self.deterministic
        mask = f"{self.mask}{self.window}" if self.mask == "window" and self.window != WINDOW else self.mask
        return f"{self.dtype} {self.shape} {mask} {'+'.join([self.direction, *self.manner, *modes])}"

    @property
    def manner(self) -> list[str]:
        """What is special about the way in which it is called."""
        recorded = self.grad and self.direction == "forward"
        return ["grad"] * recorded + [self.call] * bool(self.call) + [self.layout] * (self.layout != "bhmd")

    def key_lengths(self) -> tuple[int, ...]:
        """Valid keys per batch entry under "padding" and "lengths": from half of N to all."""
        half = self.N // 2
        return tuple(max(1, half + (self.N - half) * b // max(1, self.B - 1)) for b in range(self.B))

    def document_lengths(self) -> tuple[int, ...]:
        """Of the packed documents that fill a row of the "segments" mask."""
        count = max(2, self.N // DOCUMENT)
        ends = list(accumulate(UNEVEN[i % len(UNEVEN)] for i in range(count)))
        ends = [self.N * end // ends[-1] for end in ends]
        return tuple(b - a for a, b in zip([0, *ends], ends, strict=False))

    @property
    def unit(self) -> str:
        """What `figure` counts: microseconds, bytes of keys and values, or operations."""
        if self.host:
            return "us"
        few = self.M <= FEW_QUERIES and self.M < self.N and self.direction == "forward"
        return "GB/s" if few else "TFLOP/s"

    def figure(self, seconds: float) -> float:
        """Speed in `unit`, operations as papers count them; of host problems the microseconds."""
        if self.unit == "us":
            return seconds * 1e6
        if self.unit == "GB/s":
            return self.B * self.Hkv * self.N * (self.D + self.Dv) * self.torch_dtype.itemsize / seconds * 1e-9
        return self.operations() / seconds * 1e-12

    def operations(self) -> float:
        """By the papers' convention: a square causal mask leaves half, a backward is 2.5 times its forward."""
        half = self.mask in ("causal", "alibi") and self.M == self.N
        pairs = self.B * self.M * self.N / 2 if half else self.visible_pairs()
        return self.H * pairs * 2 * (self.D + self.Dv) * (BACKWARD_WORK if self.direction == "backward" else 1)

    def flops(self) -> float:
        """Operations of the matrix products over what the mask lets a query see."""
        passes = 6 * self.D + 4 * self.Dv if self.direction == "backward" else 2 * (self.D + self.Dv)
        return self.H * self.visible_pairs() * passes

    def visible_pairs(self) -> int:
        """Pairs of query and key that structure leaves, of one head in the whole batch; dense masks count in full."""
        if self.mask in ("padding", "lengths"):
            return self.M * sum(self.key_lengths())
        if self.mask == "segments":
            return self.B * sum(length * (length + 1) // 2 for length in self.document_lengths())
        if self.mask == "lower_right":
            return self.B * sum(min(self.N, max(0, self.N - self.M + i + 1)) for i in range(self.M))
        if self.mask not in ("causal", "window", "alibi"):
            return self.B * self.M * self.N
        reach = self.window if self.mask == "window" else self.M  # M: no row reaches further back
        return self.B * sum(max(0, min(i, self.N - 1) - max(0, i - reach) + 1) for i in range(self.M))


DTYPES = ("float32", "bfloat16", "float16")
VIT: dict[str, Any] = {"B": 4, "H": 12, "M": 197, "N": 197, "D": 64}


def heads_for(length: int) -> int:
    """Heads that keep one call between a tenth of a millisecond and a few tenths of a second on one core."""
    if length <= 512:
        return 8
    return 4 if length <= 2048 else 1


def square(length: int, D: int, **rest: Any) -> Problem:
    return Problem(1, heads_for(length), length, length, D, **rest)
