"""Where a call's tensors lie: addresses and strides that are no multiples of 16 bytes, dimensions of stride 0, and
whether there is memory at all.

A GPU's wide loads and TMA read from multiples of 16 bytes. CPU kernels read from any address.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from sdpa.problem import AttentionInputs

# The widest load of a GPU's thread; TMA, the bulk copy engine, wants addresses and strides in multiples of it, too.
BULK_BYTES = 16
ADDRESS_BITS = BULK_BYTES - 1  # the bits of an address below a multiple of them; kAlignmentBits in repeated/shared.h
# Names of the tensors that a problem may call unaligned. "bias" is the address of a bias, "bias_rows" its strides.
OTHERS = ("out", "lse", "grad_out")
PLACED = ("q", "k", "v", "bias", "bias_rows", *OTHERS)


def lies_on_gpu(tensor: Tensor) -> bool:
    """Whether alignment matters: on a GPU, and not for the subclasses that stand for tensors in a trace."""
    return tensor.is_cuda and type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__


def alignment_of(tensor: Tensor, strides: bool = True) -> int:
    """The largest of 16, 8, 4, 2 and 1 that divides the address of `tensor` in bytes and, with `strides`, all strides
    but the last. It is 16 where alignment does not matter (`lies_on_gpu`), and for tensors without memory, as
    transforms have them."""
    if not lies_on_gpu(tensor):
        return BULK_BYTES
    try:
        bits = tensor.data_ptr() | BULK_BYTES
    except RuntimeError:
        return BULK_BYTES
    if strides:
        bits |= stride_alignment(tensor)
    return bits & -bits


def placement_of(
    inputs: AttentionInputs, others: tuple[Tensor | None, ...]
) -> tuple[tuple[tuple[str, int], ...], bool]:
    """Which tensors of a call, and of what a backward reads in addition, are unaligned; whether q, k or v repeats."""
    return unaligned_of(inputs) + unaligned_others(others), any(map(has_zero_stride, inputs[:3]))


def unaligned_of(inputs: AttentionInputs) -> tuple[tuple[str, int], ...]:
    """(name, bytes) of q, k, v and the bias, for those that do not lie at multiples of 16 bytes."""
    tensors = zip(PLACED, inputs[:3], strict=False)
    found = [(name, alignment_of(t) if has_rows(t) else 0) for name, t in tensors]
    bias = inputs.bias
    if bias is not None and lies_on_gpu(bias):
        dense = bias.stride(3) == 1 or bias.shape[3] == 1
        found.append(("bias", alignment_of(bias, strides=False)))
        found.append(("bias_rows", stride_alignment(bias) if dense else 0))
    return tuple(pair for pair in found if pair[1] < BULK_BYTES)


def unaligned_others(others: tuple[Tensor | None, ...]) -> tuple[tuple[str, int], ...]:
    """The same for out, lse and grad_out. Kernels make their own copy of an out or grad_out whose last stride is not 1,
    and read a log-sum-exp number by number."""
    found = []
    for name, tensor in zip(OTHERS, others, strict=False):
        if tensor is not None and (name == "lse" or tensor.stride(3) == 1):
            found.append((name, alignment_of(tensor, strides=name != "lse")))
    return tuple(pair for pair in found if pair[1] < BULK_BYTES)


def has_rows(tensor: Tensor) -> bool:
    """Whether the last dimension of (B, H, M, D) has a stride of 1 and no other has: torch makes results of its kernels
    in the memory order of the queries, which is not theirs where rows overlap so, as `unfold` lets them."""
    *others, last = zip(tensor.shape, tensor.stride(), strict=True)
    return last[1] == 1 and (last[0] == 1 or all(n == 1 or stride != 1 for n, stride in others))


def stride_alignment(tensor: Tensor) -> int:
    """The largest of 16, 8, 4, 2 and 1 that divides all strides but the last in bytes. The stride of a dimension of one
    element does not count."""
    bits, size = BULK_BYTES, tensor.element_size()
    for n, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
        bits |= stride * size if n != 1 else 0
    return bits & -bits


def has_zero_stride(tensor: Tensor) -> bool:
    """Whether a tensor on a GPU repeats along a dimension."""
    if not lies_on_gpu(tensor):
        return False
    return any(n != 1 and stride == 0 for n, stride in zip(tensor.shape[:3], tensor.stride()[:3], strict=True))


def has_bulk_strides(tensor: Tensor) -> bool:
    """Whether all strides but the last are positive multiples of 16 bytes. The stride of a dimension of one element
    does not count."""
    size, strides = tensor.element_size(), zip(tensor.shape[:3], tensor.stride()[:3], strict=True)
    return all(n == 1 or (stride > 0 and stride * size % BULK_BYTES == 0) for n, stride in strides)


# Below this an address may be an offset into storage that was freed. Memory begins above it, as far as seen; where it
# does not, storages are asked.
LOW_ADDRESS = 1 << 32


def has_memory(tensor: Tensor) -> bool:
    """Whether there is memory behind a tensor's numbers. There is none where its storage was freed, as
    `untyped_storage().resize_(0)` does, nor behind torch's tensors that only stand for zeros or wrap another tensor."""
    return tensor.numel() == 0 or (tensor.untyped_storage().nbytes() > 0 and tensor.data_ptr() != 0)
