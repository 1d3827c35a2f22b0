"""Memory order of results, and masks without their expanded dimensions.

A result lies as (B, M, H, D) where the source does, heads inside of rows, else as (B, H, M, D).
"""

from __future__ import annotations

from torch import Tensor


def heads_inside(source: Tensor) -> bool:
    """Whether (B, H, M, D) `source` is a transposed view of (B, M, H, D) memory."""
    _, H, M, _ = source.shape
    if H == 1 or M == 1:
        return False
    _, head, row, _ = source.stride()
    return 0 < head < row


def empty_as(source: Tensor, last: int) -> Tensor:
    """Uninitialised (B, H, M, last) in the memory order of `source`."""
    B, H, M, _ = source.shape
    if heads_inside(source):
        return source.new_empty(B, M, H, last).transpose(1, 2)
    return source.new_empty(B, H, M, last)


def like_layout(result: Tensor, source: Tensor) -> Tensor:
    """`result` (B, H, M, .) in the memory order of `source`; no copy where it has that order already."""
    if heads_inside(source):
        return result.transpose(1, 2).contiguous().transpose(1, 2)
    return result.contiguous()


def with_dense_rows(tensor: Tensor) -> Tensor:
    """The tensor, or a copy where the numbers of its rows are apart, as an upstream gradient's of a sum."""
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor's numbers fill a piece of memory, each once, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def unexpanded(mask: Tensor) -> Tensor:
    """A view with one entry along each expanded dimension, which broadcasts to the same values."""
    for dimension in range(mask.dim()):
        if mask.stride(dimension) == 0:
            mask = mask.narrow(dimension, 0, 1)
    return mask
