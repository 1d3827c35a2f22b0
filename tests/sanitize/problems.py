"""Random problems for the operators of cpu_flash: tensors that end where their memory ends, in any layout, any mask."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sdpa import philox
from sdpa.dispatch.catalog import ALL_DTYPES
from sdpa.problem import UNLIMITED, AttentionInputs, Results, Tile

DTYPES = sorted(ALL_DTYPES, key=str)
# Zero, one, and around vectors and blocks; some long enough to be dealt out in parts.
LENGTHS = (0, 1, 1, 2, 3, 5, 7, 8, 13, 16, 17, 31, 33, 47, 64, 65, 95, 97, 129, 193, 301, 384, 385, 521, 769)
HEAD_SIZES = (0, 1, 2, 3, 5, 8, 15, 16, 17, 24, 31, 32, 33, 40, 63, 64, 65, 80, 96, 127, 128, 129, 160, 257)
LARGEST = 2e7  # pairs times head sizes: about a second under the sanitizers
BLOCKS = (1, 5, 16, 17, 32, 48, 96, 200)
FAR = 2000.0  # taken off all scores, it leaves a log-sum-exp too coarse for a backward to use
INT32 = (-(2**31), -1, 0, 1, 2**31 - 1)


@dataclass
class Problem:
    """One call of the operators, and what is known of its result."""

    inputs: AttentionInputs
    upstream: Results  # what arrives at the backward
    bias_grad: bool
    tile: Tile | None
    finite: bool = True  # all that is computed with
    meant: bool = True  # every number is one that the Python layers would pass

    def __str__(self) -> str:
        given = [
            f"{name}={said(value)}"
            for name, value in zip(AttentionInputs._fields, self.inputs, strict=True)
            if value is not None and value is not False
        ]
        return f"{' '.join(given)} bias_grad={self.bias_grad} tile={self.tile} lse_grad={said(self.upstream.lse)}"


def said(value: object) -> str:
    if not isinstance(value, Tensor):
        return str(value)
    return (
        f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}/{list(value.stride())}+{value.storage_offset()}"
    )


@dataclass
class Draw:
    """Random tensors from one seed."""

    seed: int
    rng: random.Random = field(init=False)
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.generator = torch.Generator().manual_seed(self.seed)

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def strides(self, shape: tuple[int, ...]) -> list[int]:
        """Dense, transposed, with gaps, expanded or overlapping: whatever torch allows, which is nothing negative."""
        order, strides, extent = list(range(len(shape))), [0] * len(shape), 1
        if self.chance(0.3):
            self.rng.shuffle(order)
        for dim in reversed(order):
            strides[dim] = extent + (self.rng.choice((1, 2, 7)) if self.chance(0.1) else 0)
            if self.chance(0.05):
                strides[dim] = self.rng.randint(0, extent)
            extent = max(extent, strides[dim] * shape[dim])
        return strides

    def laid_out(self, shape: tuple[int, ...], dtype: torch.dtype, values: Callable[[int], Tensor]) -> Tensor:
        """Values in a storage that ends with the last of them. In gaps and before the first lies NaN, the largest
        integer or True."""
        strides, offset = self.strides(shape), self.rng.choice((0, 0, 1, 3, 16))
        last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        size = offset + last + 1 if 0 not in shape else offset
        loud = True if dtype == torch.bool else torch.nan if dtype.is_floating_point else torch.iinfo(dtype).max
        memory = torch.full((size,), loud, dtype=dtype)
        places = torch.arange(size).as_strided(shape, strides, offset).reshape(-1)
        memory[places] = values(places.numel()).to(dtype)
        return memory.as_strided(shape, strides, offset)

    def normal(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return self.laid_out(shape, dtype, lambda n: torch.randn(n, generator=self.generator, dtype=torch.float64))

    def coins(self, *shape: int) -> Tensor:
        share = self.rng.choice((0.02, 0.5, 0.98))
        return self.laid_out(shape, torch.bool, lambda n: torch.rand(n, generator=self.generator) < share)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return self.laid_out(shape, torch.int32, lambda n: torch.randint(low, high + 1, (n,), generator=self.generator))

    def documents(self, rows: int, length: int) -> Tensor:
        """Ids (rows, length), ascending or not."""
        ids = torch.randint(-1, 3, (rows, length), generator=self.generator)
        ids = ids.sort(-1).values if self.chance(0.7) else ids
        return self.laid_out((rows, length), torch.int32, lambda n: ids.reshape(-1)) if ids.numel() else ids.int()

    def broadcast(self, *shape: int) -> list[int]:
        return [1 if self.chance(0.3) else size for size in shape]


def random_sizes(rng: random.Random) -> tuple[int, int, int, int, int, int, int]:
    """B, H, Hkv, M, N, D, Dv."""
    while True:
        B, Hkv, G = rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 2, 5, 8))
        if rng.random() < 0.03:
            B, Hkv = rng.choice(((0, Hkv), (B, 0)))
        M = 1 if rng.random() < 0.2 else rng.choice(LENGTHS)
        N, D = rng.choice(LENGTHS), rng.choice(HEAD_SIZES)
        N, Dv = M if rng.random() < 0.2 else N, D if rng.random() < 0.5 else rng.choice(HEAD_SIZES)
        if B * Hkv * G * M * N * (D + Dv) <= LARGEST:
            return B, Hkv * G, Hkv, M, N, D, Dv


def random_side(rng: random.Random) -> int:
    return rng.choice((UNLIMITED, UNLIMITED, UNLIMITED, 0, 0, 1, 7, 40, 300))


def masked(draw: Draw, inputs: AttentionInputs) -> AttentionInputs:
    """Any subset of the fields that hide keys or change scores."""
    rng, (B, H, M, _), N = draw.rng, inputs.q.shape, inputs.k.shape[2]
    fields: dict[str, object] = {}
    if draw.chance(0.5):
        fields |= {"left": random_side(rng), "right": random_side(rng), "bottom_right": draw.chance(0.5)}
    if draw.chance(0.2):
        fields["bias"] = draw.normal(*draw.broadcast(B, H, M, N), dtype=rng.choice((inputs.q.dtype, torch.float32)))
    if draw.chance(0.2):
        fields["allowed"] = draw.coins(*draw.broadcast(B, H, M, N))
    if draw.chance(0.25):
        fields["k_lengths"] = draw.integers(0, N, B)
    if draw.chance(0.15):
        fields["q_lengths"] = draw.integers(0, M, B)
    if draw.chance(0.15):
        rows = rng.choice((1, B))
        fields |= {"q_segments": draw.documents(rows, M), "k_segments": draw.documents(rng.choice((1, B)), N)}
    if draw.chance(0.15):
        fields["prefix"] = draw.integers(0, N, B)
    if draw.chance(0.15):
        fields["alibi"] = draw.normal(rng.choice((1, B)), H, dtype=torch.float32)
    return inputs._replace(**fields)


def dropout_words(draw: Draw, H: int) -> Tensor:
    """Dropout's two words, or the four of a part of a larger call."""
    rng = draw.rng
    words = torch.tensor([rng.randrange(2**63), rng.randrange(2**63)])
    if draw.chance(0.5):
        before, row, key = rng.choice((0, 1, 5)), *(philox.PERIOD * rng.randrange(2**24) for _ in range(2))
        words = philox.of_part(words, before + H + rng.choice((0, 3)), before, row, key)
    return draw.laid_out(tuple(words.shape), torch.int64, lambda n: words[:n])


def random_problem(seed: int) -> Problem:
    """Of the sizes and numbers that AttentionInputs allows."""
    draw = Draw(seed)
    rng, dtype = draw.rng, draw.rng.choice(DTYPES)
    B, H, Hkv, M, N, D, Dv = random_sizes(rng)
    q, k = draw.normal(B, H, M, D, dtype=dtype), draw.normal(B, Hkv, N, D, dtype=dtype)
    inputs = AttentionInputs(q, k, draw.normal(B, Hkv, N, Dv, dtype=dtype), rng.choice((0.2, 1.0, 0.0, -0.5)))
    if draw.chance(0.8):
        inputs = masked(draw, inputs)
    if draw.chance(0.15):
        inputs = inputs._replace(softcap=rng.choice((1.5, 30.0)))
    if draw.chance(0.15):
        inputs = inputs._replace(sinks=draw.normal(H, dtype=dtype))
    if draw.chance(0.1):
        inputs = inputs._replace(dropout_p=rng.choice((0.1, 0.5, 0.999)), rng=dropout_words(draw, H))
    precise = torch.promote_types(dtype, torch.float32)
    upstream = Results(
        draw.normal(B, H, M, Dv, dtype=dtype), draw.normal(B, H, M, dtype=precise) if draw.chance(0.2) else None
    )
    tile = Tile(rng.choice(BLOCKS), rng.choice(BLOCKS)) if draw.chance(0.3) else None
    problem = Problem(inputs, upstream, inputs.bias is not None and draw.chance(0.6), tile)
    return odd_numbers(draw, problem)


def odd_numbers(draw: Draw, problem: Problem) -> Problem:
    """Now and then what is no number, and what no Python layer would pass, but an operator has to bear."""
    inputs, rng = problem.inputs, draw.rng
    if draw.chance(0.08):
        tensor = rng.choice(inputs[:3])
        if tensor.numel():
            tensor[tuple(rng.randrange(size) for size in tensor.shape)] = rng.choice((torch.nan, torch.inf, -torch.inf))
            problem.finite = False
    if inputs.bias is not None and draw.chance(0.15):
        problem.inputs, problem.meant = inputs._replace(bias=inputs.bias - FAR), False
    names = [name for name in ("q_lengths", "k_lengths", "prefix") if getattr(inputs, name) is not None]
    if inputs.rng is not None and draw.chance(0.2):
        words = torch.tensor([rng.randrange(-(2**63), 2**63) for _ in range(inputs.rng.shape[0])])
        problem.inputs, problem.meant = problem.inputs._replace(rng=words), False
    if names and draw.chance(0.2):
        chosen = rng.choice(names)
        values = torch.tensor(rng.choices(INT32, k=inputs.q.shape[0]), dtype=torch.int32)
        problem.inputs, problem.meant = problem.inputs._replace(**{chosen: values}), False
    if draw.chance(0.05):
        sides = [rng.choice((UNLIMITED, 0, 2**31, 2**62, 2**63 - 1)) for _ in range(2)]
        problem.inputs, problem.meant = problem.inputs._replace(left=sides[0], right=sides[1]), False
    return problem
