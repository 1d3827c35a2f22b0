"""Descriptors by which Hopper's kernels copy blocks: checked once, then given other addresses."""

from __future__ import annotations

from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sdpa.kernels.triton.arguments import DESCRIPTOR_ALIGNMENT


def rows_descriptor(tensor: Tensor, rows: int, size: int) -> dict:
    """Descriptor of (B, H, rows, D) moved in blocks of [1, 1, rows, size]; a dimension of one needs no true stride."""
    unit = DESCRIPTOR_ALIGNMENT // tensor.element_size()
    strides = [unit if n == 1 else s for n, s in zip(tensor.shape[:3], tensor.stride()[:3], strict=True)]
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    return fields_of(TensorDescriptor(tensor, list(tensor.shape), [*strides, 1], [1, 1, rows, size], layout))


def numbers_descriptor(tensor: Tensor, count: int) -> dict:
    """Descriptor of (B * H, queries) float32, moved in blocks of [1, count]."""
    layout = NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return fields_of(TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [1, count], layout))


def fields_of(descriptor: TensorDescriptor) -> dict:
    """All but the address."""
    return vars(descriptor) | {"base": None}


def describe(fields: dict | None, tensor: Tensor | None) -> TensorDescriptor | None:
    """A checked descriptor with another address."""
    if fields is None:
        return None
    descriptor = TensorDescriptor.__new__(TensorDescriptor)
    vars(descriptor).update(fields, base=tensor)
    return descriptor
