"""From a call to the arguments of a Metal kernel: buffers, integers, floats, and what its source is specialised for."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sdpa import philox
from sdpa.kernels.metal.source import FLOATS, INTEGERS, Config, Tiles, flags_read
from sdpa.problem import UNLIMITED, AttentionInputs, AttentionProblem

VECTOR = 4  # elements that are loaded together, where all rows begin at multiples of so many
FAR = 1 << 30  # a reach from which on a window has no side: positions and reaches are 32 bits wide

Strides = tuple[int, int, int]
Named = Mapping[str, Tensor | None]


def flags_of(inputs: AttentionInputs) -> frozenset[str]:
    """What the inputs alone say of `source.FLAGS`."""
    allowed, bias = inputs.allowed, inputs.bias
    asked = {
        "LEFT": inputs.left != UNLIMITED,
        "RIGHT": inputs.right != UNLIMITED,
        "BOTTOM_RIGHT": inputs.bottom_right,
        "Q_LENGTHS": inputs.q_lengths is not None,
        "K_LENGTHS": inputs.k_lengths is not None,
        "PREFIX": inputs.prefix is not None,
        "SEGMENTS": inputs.q_segments is not None,
        "ALLOWED": allowed is not None,
        "ALLOWED_ROWS": allowed is not None and allowed.shape[2] > 1,
        "BIAS": bias is not None,
        "BIAS_BATCHES": bias is not None and bias.shape[0] > 1,
        "BIAS_HEADS": bias is not None and bias.shape[1] > 1,
        "BIAS_ROWS": bias is not None and bias.shape[2] > 1,
        "BIAS_COLUMNS": bias is not None and bias.shape[3] > 1,
        "ALIBI": inputs.alibi is not None,
        "SOFTCAP": inputs.softcap != 0.0,
        "SINKS": inputs.sinks is not None,
        "DROPOUT": inputs.dropout_p != 0.0,
        "PACKED": inputs.cu_q is not None,
        "PAGED": inputs.block_table is not None,
    }
    return frozenset(name for name, on in asked.items() if on)


def config_of(
    kernel: str, inputs: AttentionInputs, tiles: Tiles, flags: frozenset[str], beside: Named | None = None
) -> Config:
    """`beside` are tensors that are loaded by rows in addition to q, k and v."""
    rows = [*inputs[:3], *(t for t in (beside or {}).values() if t is not None)]
    D, Dv = inputs.q.shape[3], inputs.v.shape[3]
    vector = VECTOR if D % VECTOR == Dv % VECTOR == 0 and all(map(in_vectors, rows)) else 1
    bias, sinks = (None if t is None else t.dtype for t in (inputs.bias, inputs.sinks))
    threads = tiles.BLOCK_N if kernel == "backward_kv" else tiles.BLOCK_M
    read = (flags | flags_of(inputs)) & flags_read(kernel)
    return Config(kernel, inputs.q.dtype, D, Dv, tiles, threads, vector, bias, sinks, read)


def in_vectors(tensor: Tensor) -> bool:
    """Whether all rows begin at multiples of VECTOR elements of a buffer, which itself begins at a multiple."""
    return tensor.storage_offset() % VECTOR == 0 and all(stride % VECTOR == 0 for stride in tensor.stride()[:3])


def view_of(tensor: Tensor | None) -> Tensor:
    """A tensor as a buffer: bytes for booleans."""
    assert tensor is not None
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


def integers_of(inputs: AttentionInputs, problem: AttentionProblem, **others: int | tuple[int, ...]) -> list[int]:
    """The list `n` of a kernel. `others` are by their names in `source.INTEGERS`."""
    p = problem
    given: dict[str, int | tuple[int, ...]] = {
        "B": p.B,
        "H": p.H,
        "G": p.G,
        "M": p.M,
        "N": p.N,
        "LEFT": min(inputs.left, FAR),
        "RIGHT": min(inputs.right, FAR),
        "DROPOUT": philox.threshold(inputs.dropout_p),
        "PART": int(inputs.rng is not None and philox.is_of_part(inputs.rng)),
        "SPLITS": 1,
        "ROWS": inputs.q.shape[2],
        "PAGE_SIZE": inputs.k.shape[2],
        "BLOCK_TABLE": 0 if inputs.block_table is None else inputs.block_table.stride(0),
        "Q_SEGMENTS": batch_stride(inputs.q_segments),
        "K_SEGMENTS": batch_stride(inputs.k_segments),
        "ALIBI": batch_stride(inputs.alibi),
        "LSE": (p.H * inputs.q.shape[2], inputs.q.shape[2]),
        "Q": rows_of(inputs.q),
        "K": rows_of(inputs.k),
        "V": rows_of(inputs.v),
        "BIAS": dense_of(inputs.bias),
        "ALLOWED": dense_of(inputs.allowed),
    }
    given.update(others)
    found: list[int] = []
    for name, count in INTEGERS.items():
        value = given.get(name, 0 if count == 1 else (0,) * count)
        found += value if isinstance(value, tuple) else (value,)
    return found


def floats_of(inputs: AttentionInputs) -> list[float]:
    given = {"SCALE": inputs.scale, "SOFTCAP": inputs.softcap, "KEPT": philox.kept_factor(inputs.dropout_p)}
    return [given[name] for name in FLOATS]


def rows_of(tensor: Tensor) -> Strides:
    """Strides of batch, head and row."""
    batch, head, row = tensor.stride()[:3]
    return batch, head, row


def batch_stride(tensor: Tensor | None) -> int:
    return 0 if tensor is None or tensor.shape[0] == 1 else tensor.stride(0)


def dense_of(mask: Tensor | None) -> tuple[int, ...]:
    """The strides of a dense mask, 0 along what it has one entry of."""
    if mask is None:
        return (0, 0, 0, 0)
    return tuple(0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True))


DENSE_FIELDS = ("q_segments", "k_segments", "alibi", "sinks")


def readable(inputs: AttentionInputs) -> AttentionInputs:
    """`inputs` with contiguous copies of the small tensors of which kernels take the last stride to be 1."""
    copies = {
        name: tensor.contiguous()
        for name in DENSE_FIELDS
        if (tensor := getattr(inputs, name)) is not None and tensor.stride(-1) != 1
    }
    return inputs._replace(**copies) if copies else inputs
