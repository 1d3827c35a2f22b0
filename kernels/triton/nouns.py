"""What kernels are called with, as named tuples: strides, sizes, the mask, what is built in.

An absent thing is None, which Triton makes a constant: a kernel is compiled for what is there. A flag is 1 or None,
because Triton makes a constant of an integer 1, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from torch import Tensor

from sdpa.kernels.triton.spans import Spans

FLAG = 1


class Side(Enum):
    """What a kernel's loop runs over."""

    KEYS = "keys"
    QUERIES = "queries"
    SPLIT_KEYS = "split keys"  # the rows of a program are several heads'
    HEADS = "heads"  # the tile of scores stays where it is


class Strides(NamedTuple):
    """In elements; the last stride is 1."""

    batch: int
    head: int
    row: int


class AllStrides(NamedTuple):
    q: Strides
    k: Strides
    v: Strides
    other: Strides | None  # of out in a forward, of the gradient of out in a backward


class Sizes(NamedTuple):
    M: int
    N: int
    H: int
    G: int
    rows: int  # of one head in lse: M, or all packed rows
    key_rows: int  # of one head in k: N, or all packed rows
    blocks: int  # of a head, along the side that the grid runs over
    entries: int  # batch * heads of the grid
    section: int  # heads side by side in the grid


class Dense(NamedTuple):
    """Strides of a dense mask, 0 where it broadcasts; of batch and heads 0 or 1 where a descriptor has them."""

    batch: int
    head: int
    row: int
    column: int


class DenseBuild(NamedTuple):
    """What is fixed about a dense mask when a kernel is compiled."""

    ROWS: bool  # it has a row for each query
    COLUMNS: bool
    DESCRIBED: bool  # it is a tensor descriptor


class Segments(NamedTuple):
    pointer: Tensor
    batch: int


class Pages(NamedTuple):
    """block_table and its batch stride; keys of a page lie together."""

    pointer: Tensor
    batch: int
    size: int  # keys per page


class Mask(NamedTuple):
    left: int | None
    right: int | None
    bottom_right: int | None
    prefix: Tensor | None
    k_lengths: Tensor | None
    q_lengths: Tensor | None
    cu_q: Tensor | None
    cu_k: Tensor | None
    pages: Pages | None
    q_segments: Segments | None
    k_segments: Segments | None
    key_spans: Spans | None
    query_spans: Spans | None
    alibi: Segments | None
    bias: Dense | None
    allowed: Dense | None
    dense: int | None  # a dense mask that must be asked everywhere
    softcap: float | None


class Dropout(NamedTuple):
    rng: Tensor
    threshold: int
    inverse_keep: float


class Build(NamedTuple):
    """What is fixed when a kernel is compiled."""

    BLOCK_M: int
    BLOCK_N: int
    D: int
    DV: int
    BLOCK_D: int
    BLOCK_DV: int
    DESCRIBED: bool  # q, k, v are tensor descriptors
    PRECISION: str  # of float32 products
    MODIFIED: bool  # scores are more than scale * q k^T
    LENGTHS: bool  # memory goes on behind an entry's last row
    PACKED: bool
    REVERSED: bool
    LEADING: bool  # masked blocks before the full ones
    FULL: bool
    TRAILING: bool  # masked blocks after them
    BIAS: DenseBuild | None
    ALLOWED: DenseBuild | None
    KEYS: bool = True  # of a backward over blocks of keys: dK is wanted
    VALUES: bool = True  # dV is wanted
    HALVES: int = 0  # float16 parts that a forward cuts float32 operands into
    LIFT: int = 0  # the power of two that probabilities then carry


class Prepared(NamedTuple):
    q: Any
    k: Any
    v: Any
    other: Any  # the gradient of out
    bias: Any
    allowed: Any
    strides: AllStrides
    sizes: Sizes
    mask: Mask
    sinks: Tensor | None
    dropout: Dropout | None
    build: Build

    @property
    def tensors(self) -> tuple:
        """What a backward reads."""
        return self.q, self.k, self.v, self.other, self.bias, self.allowed


class Rows(NamedTuple):
    """What a backward reads beside q, k and v."""

    grad_out: Tensor  # (B, H, M, Dv)
    lse: Tensor  # (B, H, M)
    delta: Tensor  # (B, H, M)


@dataclass
class Fixed:
    """What calls of the same problem, strides and tile share; made once."""

    build: Build
    sizes: Sizes
    strides: AllStrides
    bias: Dense | None
    allowed: Dense | None
    descriptors: tuple[dict | None, ...]  # of q, k, v, the gradient of out, bias and allowed: all but the address
    mask: Mask | None = None  # where no tensor is part of it
