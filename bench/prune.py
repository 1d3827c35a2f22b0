"""Prunes a CPU's tuning table: an entry stays only if, without it, another kernel or tile would be chosen.

An entry speaks for every problem near it. Where one stays that disagrees with the estimate, its neighbours would come
under its word; those that it would mislead stay, too. Asked is what the dispatcher chooses among all kernels, and not
what it would choose where a user has left some out.
"""

from __future__ import annotations

from typing import Any

import torch

from sdpa.dispatch import select, tables, tuning
from sdpa.dispatch.candidates import ranking
from sdpa.dispatch.catalog import kernels_for
from sdpa.dispatch.device import X86_TABLES
from sdpa.problem import AttentionProblem, Tile

# A kind of mask in the tables of CPUs as fields of a problem; of "dense" and "structured" ones the most usual kind.
MASK_FIELDS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"right": 0, "features": frozenset({"band"})},
    "window": {"left": 0, "right": 0, "features": frozenset({"band"})},
    "dense": {"features": frozenset({"allowed"})},
    "structured": {"features": frozenset({"k_lengths"})},
}
CPU_TABLES = frozenset(name for name, _ in X86_TABLES.values())
# What may be chosen: a kernel and its tile.
Chosen = tuple[str, "Tile | None"]


def is_of_cpu(device: str) -> bool:
    """Whether a table's device is a CPU: on a GPU the estimate asks the device for facts that the table lacks."""
    return device in CPU_TABLES or device.startswith("cpu_")


def prune(path: str, data: dict[str, Any]) -> dict[str, Any]:
    """The table with the entries that are needed, in their order, and how many were measured. Raises ValueError where
    it is no table of a CPU."""
    buckets = tables.parse(path, data).buckets
    if not is_of_cpu(data["device"]):
        raise ValueError(f"expected a table of a CPU, got one of {data['device']!r}")
    kept = needed(buckets)
    entries = [entry for entry, stays in zip(data["entries"], kept, strict=True) if stays]
    head = {name: value for name, value in data.items() if name != "entries"}
    return head | {"measured": data.get("measured", len(buckets)), "entries": entries}


def needed(buckets: tuple[tables.Bucket, ...]) -> list[bool]:
    """Which buckets must stay so that the choice for every bucket's problem stays."""
    problems = [problem_of(bucket) for bucket in buckets]
    wanted = [chosen(buckets, problem) for problem in problems]
    kept = [choice != chosen((), problem) for choice, problem in zip(wanted, problems, strict=True)]
    while True:
        left = tuple(bucket for bucket, stays in zip(buckets, kept, strict=True) if stays)
        misled = [chosen(left, problem) != choice for choice, problem in zip(wanted, problems, strict=True)]
        if not any(misled):
            return kept
        kept = [stays or wrong for stays, wrong in zip(kept, misled, strict=True)]


def chosen(buckets: tuple[tables.Bucket, ...], problem: AttentionProblem) -> Chosen:
    """Whom the dispatcher chooses, where these buckets are all that was measured."""
    measured = tuning.combined(tuning.near(tables.Table("", "", buckets), problem), problem)
    candidates = [select.candidate_of(kernel, problem, measured) for kernel in kernels_for("cpu")]
    able = [candidate for candidate in candidates if candidate.able]
    best = min(able, key=ranking(able))
    return best.kernel.name, best.tile


def problem_of(bucket: tables.Bucket) -> AttentionProblem:
    """The problem that a bucket was measured on, as far as its table tells."""
    sizes: dict[str, Any] = dict(zip(tables.SIZES, bucket.sizes, strict=True))
    fields: dict[str, Any] = dict(MASK_FIELDS[bucket.mask])
    fields["features"] = fields.get("features", frozenset()) | bucket.beside
    if bucket.window:
        fields["left"] = bucket.window
    if sizes["H"] != sizes["Hkv"]:
        fields["features"] |= {"gqa"}
    dtype = getattr(torch, bucket.dtype)
    return AttentionProblem("cpu", dtype, **sizes, direction=bucket.direction, **fields)
