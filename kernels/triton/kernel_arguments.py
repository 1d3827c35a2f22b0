"""The named tuples that kernels are called with: strides, sizes, the mask, and the configuration they are compiled for.

What is absent is None. Triton makes None a constant, so a kernel is compiled for what is there. A flag is 1 or None,
because Triton makes the integer 1 a constant, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from torch import Tensor

from sdpa.kernels.triton.block_ranges import BlockRanges

FLAG = 1


class LoopOver(Enum):
    """What a kernel's loop runs over."""

    KEYS = "keys"
    QUERIES = "queries"
    SPLIT_KV = "split keys"  # one split of the keys; the rows of a program belong to several heads
    HEADS = "heads"  # the tile of scores stays where it is


class Strides(NamedTuple):
    """The strides of a tensor (B, H, rows, D) in elements. The last one is 1."""

    batch: int
    head: int
    row: int
    whole: int | None = None  # flag: they are multiples of 16 bytes


class AllStrides(NamedTuple):
    """The strides of the tensors of rows that a kernel reads or writes."""

    q: Strides
    k: Strides
    v: Strides
    other: Strides | None  # of out in a forward, of the gradient of out in a backward


class Sizes(NamedTuple):
    """The sizes of a call, and of the grid."""

    M: int
    N: int
    H: int
    G: int
    rows: int  # of one head in lse: M, or all packed rows
    key_rows: int  # of one head in k: N, or all packed rows
    blocks: int  # of a head, along the side that the grid runs over
    entries: int  # batch * heads of the grid
    section: int  # heads side by side in the grid: those whose keys and values share the L2 cache


class DenseStrides(NamedTuple):
    """The strides of a dense mask, 0 where it broadcasts. With a tensor descriptor batch and head are 0 or 1."""

    batch: int
    head: int
    row: int
    column: int


class DenseConfig(NamedTuple):
    """What a kernel is compiled for in a dense mask."""

    ROWS: bool  # it has a row for each query
    COLUMNS: bool
    TMA: bool  # it is read through a tensor descriptor


class PerBatch(NamedTuple):
    """A tensor with a row for each batch entry: segment ids or ALiBi slopes."""

    pointer: Tensor  # (B|1, positions or heads)
    batch: int


class Pages(NamedTuple):
    """The block table of a paged cache. The keys of a page lie together."""

    pointer: Tensor  # (B, pages per sequence)
    batch: int
    size: int  # keys per page


class MaskArgs(NamedTuple):
    """The mask and the score modifications of a call, as `mask.py` reads them on the device."""

    left: int | None
    right: int | None
    bottom_right: int | None
    prefix: Tensor | None
    k_lengths: Tensor | None
    q_lengths: Tensor | None
    cu_q: Tensor | None
    cu_k: Tensor | None
    pages: Pages | None
    q_segments: PerBatch | None
    k_segments: PerBatch | None
    key_ranges: BlockRanges | None
    query_ranges: BlockRanges | None
    alibi: PerBatch | None
    bias: DenseStrides | None
    allowed: DenseStrides | None
    dense: int | None  # flag: a dense mask must be read in every block
    softcap: float | None


class Dropout(NamedTuple):
    """Dropout by Philox. A pair is kept where its random number of 16 bits is at least the threshold."""

    rng: Tensor  # (2,) int64: key and offset; (4,) of a part of a call (sdpa.philox.of_part)
    whole: int  # 1, for which a kernel is compiled alone; 0 of a part
    threshold: int
    inverse_keep: float


class KernelConfig(NamedTuple):
    """What a kernel is compiled for: its only constexpr of this kind."""

    BLOCK_M: int
    BLOCK_N: int
    D: int
    DV: int
    BLOCK_D: int
    BLOCK_DV: int
    TMA: bool  # q, k, v are read through tensor descriptors
    PRECISION: str  # of float32 products
    SCORE_MOD: bool  # softcap, bias, ALiBi or a scale of 0 or less change scores beyond scale * q k^T
    LENGTHS: bool  # an entry may have fewer rows than its tensor
    PACKED: bool  # sequences lie one after the other (cu_q, cu_k)
    REVERSED: bool  # the last blocks come first, because they take longest
    LEADING: bool  # masked blocks before the full ones
    FULL: bool
    TRAILING: bool  # masked blocks after them
    BIAS: DenseConfig | None
    ALLOWED: DenseConfig | None
    GROUPED: bool = False  # several heads of queries share one of keys
    ONE_LOOP: bool = False  # masked and full blocks are visited in one loop
    KEYS: bool = True  # of a backward over blocks of keys: dK is wanted
    VALUES: bool = True  # dV is wanted
    FLOAT16_PARTS: int = 0  # float16 parts that float32 operands are cut into
    P_EXPONENT: int = 0  # a forward's probabilities are then multiplied by 2 to this power


class KernelArgs(NamedTuple):
    """What all kernels of the family take: tensors as pointers or tensor descriptors, and how they lie in memory."""

    q: Any
    k: Any
    v: Any
    other: Any  # the gradient of out
    bias: Any
    allowed: Any
    strides: AllStrides
    sizes: Sizes
    mask: MaskArgs
    sinks: Tensor | None
    dropout: Dropout | None
    config: KernelConfig

    @property
    def tensors(self) -> tuple:
        """What a backward reads."""
        return self.q, self.k, self.v, self.other, self.bias, self.allowed


class BackwardRows(NamedTuple):
    """What a backward reads beside q, k and v."""

    grad_out: Tensor  # (B, H, M, Dv)
    lse: Tensor  # (B, H, M)
    delta: Tensor  # (B, H, M)


@dataclass
class PreparedArgs:
    """What calls of the same problem, strides and tile share. It is made once (prepared.py)."""

    config: KernelConfig
    sizes: Sizes
    strides: AllStrides
    bias: DenseStrides | None
    allowed: DenseStrides | None
    descriptors: tuple[dict | None, ...]  # of q, k, v, the gradient of out, bias and allowed: all but the address
    mask: MaskArgs | None = None  # only where no tensor is part of it
