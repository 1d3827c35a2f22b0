"""The memory order of results, heads inside of rows (B, M, H, D) where the source has them so, else (B, H, M, D); and
masks without the dimensions that they repeat along."""

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
    """`result` (B, H, M, .) in the memory order of `source`, itself where it already is."""
    if heads_inside(source):
        return result.transpose(1, 2).contiguous().transpose(1, 2)
    return result.contiguous()


def unexpanded(mask: Tensor) -> Tensor:
    """A view of one entry along each dimension that is expanded, which broadcasts to the same."""
    for dimension in range(mask.dim()):
        if mask.stride(dimension) == 0:
            mask = mask.narrow(dimension, 0, 1)
    return mask
