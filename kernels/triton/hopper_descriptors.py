"""The tensor descriptors of Hopper's kernels, for TMA: checked once, then given other addresses."""

from __future__ import annotations

from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sdpa.kernels.triton.arguments import DESCRIPTOR_ALIGNMENT


def rows_descriptor(tensor: Tensor, rows: int, size: int) -> dict:
    """The descriptor of (B, H, rows, D), copied in blocks [1, 1, rows, size]. A dimension of one needs no stride."""
    unit = DESCRIPTOR_ALIGNMENT // tensor.element_size()
    strides = [unit if n == 1 else s for n, s in zip(tensor.shape[:3], tensor.stride()[:3], strict=True)]
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    return fields_of(TensorDescriptor(tensor, list(tensor.shape), [*strides, 1], [1, 1, rows, size], layout))


def numbers_descriptor(tensor: Tensor, count: int) -> dict:
    """The descriptor of (B * H, queries) float32, copied in blocks [1, count]."""
    layout = NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return fields_of(TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [1, count], layout))


def fields_of(descriptor: TensorDescriptor) -> dict:
    """The fields of a descriptor, all but the address."""
    return vars(descriptor) | {"base": None}


def describe(fields: dict | None, tensor: Tensor | None) -> TensorDescriptor | None:
    """The descriptor of these fields at another address; None where there is none."""
    if fields is None:
        return None
    descriptor = TensorDescriptor.__new__(TensorDescriptor)
    vars(descriptor).update(fields, base=tensor)
    return descriptor
