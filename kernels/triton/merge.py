"""Results of some keys added to those of others, in place, by one launch.

torch's operations would be three, which write and read the output between each other.

Dao et al., FlashAttention, 2022, section 3.1: outputs weighted by what each has of the sum of exponentials.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sdpa.kernels.triton.arguments import block_size, strides_of
from sdpa.kernels.triton.availability import unavailable
from sdpa.kernels.triton.launch import Launch, OnDevice, run
from sdpa.kernels.triton.primitives import RowRange, load_rows, store_rows
from sdpa.problem import Tile

__all__ = ["merge", "merge_launch", "unavailable"]

ROWS = 32  # of a program
TILE = Tile(ROWS, 0, 4, 1)  # whose warps and stages count


@triton.jit
def merge_kernel(out, lse, more, more_lse, out_strides, lse_strides, more_strides, more_lse_strides, H, rows,
                 DV: tl.constexpr, BLOCK: tl.constexpr, BLOCK_DV: tl.constexpr):  # fmt: skip
    """Rows of `out` and `lse`, with those of `more` and `more_lse`. Grid: blocks of rows * B * H."""
    blocks = tl.cdiv(rows, BLOCK)
    entry, start = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BLOCK
    at = RowRange(entry // H, entry % H, start, rows)
    batch, head = tl.cast(at.batch, tl.int64), tl.cast(at.head, tl.int64)
    offsets = start + tl.arange(0, BLOCK)
    first = lse + batch * lse_strides.batch + head * lse_strides.head + offsets
    second = more_lse + batch * more_lse_strides.batch + head * more_lse_strides.head + offsets
    a = tl.load(first, offsets < rows, other=float("-inf"))
    b = tl.load(second, offsets < rows, other=float("-inf"))
    largest = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    seen = largest != float("-inf")
    pivot = tl.where(seen, largest, 0.0)
    a_sum, b_sum = tl.exp(a - pivot), tl.exp(b - pivot)
    total = tl.where(seen, a_sum + b_sum, 1.0)
    before = load_rows(out, out_strides, at, DV, BLOCK, BLOCK_DV, False, True)
    added = load_rows(more, more_strides, at, DV, BLOCK, BLOCK_DV, False, True).to(before.dtype)
    store_rows(out, out_strides, at, before * (a_sum / total)[:, None] + added * (b_sum / total)[:, None], DV)
    tl.store(first, tl.where(seen, pivot + tl.log(total), float("-inf")), offsets < rows)


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Add `more` (B, H, M, Dv), of any dtype, with its log-sum-exp (B, H, M), to `out` and `lse`, which have the dtype
    that sums have: float32, or float64."""
    run([merge_launch(out, lse, more, more_lse)], OnDevice(str(out.device)))


def merge_launch(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> Launch:
    B, H, rows, Dv = out.shape
    strides = [strides_of(t if t.dim() == 4 else t.unsqueeze(3)) for t in (out, lse, more, more_lse)]
    sizes = (H, rows, Dv, ROWS, block_size(Dv))
    return Launch(merge_kernel, (-(-rows // ROWS) * B * H,), (out, lse, more, more_lse, *strides, *sizes), TILE)
