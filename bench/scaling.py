"""A model of context parallelism on 8 to 4,096 GPUs, beside what others published.

A rank computes at the speed that its share of the work has on one GPU, and its messages take their bytes by the
bandwidth of the slowest link that they cross. Nothing overlaps but the steps of a ring. It is arithmetic and no
measurement: it says which mode is worth trying.

Published: TFLOP/s a GPU on H100s, 64 query heads and 8 key heads of size 128 in bfloat16, causal, 8,192 tokens a GPU,
read off the charts of MagiAttention's benchmark (SandAI, 2025) to 1 %.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

RANKS = (8, 16, 32, 64, 256, 1024, 4096)
EACH, H, HKV, D, BYTES = 8192, 64, 8, 128, 2
NODE = 8  # GPUs of a node
BACKWARD = 2.5  # operations of a backward, where a forward has 1
PUBLISHED: dict[tuple[str, str], tuple[int, ...]] = {  # at 8, 16, 32, 64 GPUs
    ("forward", "Ulysses"): (602, 557, 580, 586),
    ("forward", "gather"): (602, 592, 591, 580),
    ("forward", "ring"): (421, 455, 451, 446),
    ("forward", "USP"): (593, 592, 594, 587),
    ("forward", "MagiAttention"): (645, 648, 621, 594),
    ("backward", "Ulysses"): (582, 560, 573, 585),
    ("backward", "gather"): (516, 525, 522, 523),
    ("backward", "ring"): (432, 475, 470, 457),
    ("backward", "USP"): (572, 569, 574, 571),
    ("backward", "MagiAttention"): (529, 531, 540, 528),
}
PUBLISHED_AT = (8, 16, 32, 64)


class Machine(NamedTuple):
    """Speeds that the model takes."""

    forward: float = 690e12  # operations/s of a causal kernel, as bench/results/nvidia_h200.csv has it at N=8192
    backward: float = 530e12
    node: float = 360e9  # bytes/s that a GPU sends to others of its node: 80 % of NVLink 4
    network: float = 40e9  # and to other nodes: 80 % of 400 Gbit/s


class Modelled(NamedTuple):
    """TFLOP/s a GPU of one mode in one direction; None where heads do not suffice."""

    mode: str
    direction: str
    ranks: int
    tflops: float | None


def modelled(machine: Machine = Machine()) -> Iterator[Modelled]:  # noqa: B008 (it is immutable)
    """Every mode on every number of ranks."""
    for direction in ("forward", "backward"):
        for mode in ("ulysses", "gather", "ring", "hybrid"):
            for ranks in RANKS:
                yield Modelled(mode, direction, ranks, tflops(mode, direction, ranks, machine))


def tflops(mode: str, direction: str, ranks: int, machine: Machine) -> float | None:
    """With ranks in zigzag, so that all compute the same."""
    operations = 2.0 * (EACH * ranks) ** 2 * D * H / ranks * (1.0 if direction == "forward" else BACKWARD)
    compute = operations / (machine.forward if direction == "forward" else machine.backward)
    if mode == "ulysses":
        if HKV % ranks:
            return None
        seconds = compute + heads_bytes(ranks) / machine.node
    elif mode == "hybrid":  # heads inside of a node, keys between nodes
        keys = keys_bytes(ranks // NODE, EACH * NODE, HKV // NODE)
        seconds = compute + heads_bytes(NODE) / machine.node + keys / machine.network
    else:
        link = machine.node if ranks <= NODE else machine.network
        wire = keys_bytes(ranks, EACH, HKV) / link
        if mode == "gather":
            seconds = compute + wire
        else:  # a backward takes the keys again, and hands on gradients in float32
            seconds = max(compute, wire * (1 if direction == "forward" else 3))
    return operations / seconds / 1e12


def heads_bytes(ranks: int) -> float:
    """What a rank sends by Ulysses: queries, keys, values and the output."""
    return EACH * (2 * H + 2 * HKV) * D * BYTES * (ranks - 1) / ranks


def keys_bytes(ranks: int, each: int, heads: int) -> float:
    """What a rank sends of keys and values that others see: in zigzag, nearly all others see them."""
    return each * 2 * heads * D * BYTES * (ranks - 1)
