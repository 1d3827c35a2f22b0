"""Reads tuning tables: measured times per device, the user's tables over the shipped ones; nearest measured bucket.

A table is one YAML file named after its device (`device.names`):

    schema: 1
    device: amd_zen4
    date: 2026-01-31
    versions: {torch: 2.13.0, sdpa: 0.1.0}
    command: sdpa tune --suite cpu
    entries:
      - {direction: forward, dtype: bfloat16, mask: causal, B: 1, H: 8, Hkv: 8, M: 1024, N: 1024, D: 64, Dv: 64,
         ms: {cpu_flash: 1.2, vendor_cpu_flash: 3.4}}
"""

from __future__ import annotations

import math
import os
import tempfile
import warnings
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import yaml

from sdpa.dispatch.device import device_of
from sdpa.environment import tuning_dir
from sdpa.problem import AttentionProblem

SCHEMA = 1
SHIPPED = Path(__file__).resolve().parent.parent / "tuning_tables"
HEADER = {"schema": int, "device": str, "date": object, "versions": dict, "command": str, "entries": list}
SIZES = ("B", "H", "Hkv", "M", "N", "D", "Dv")
# A bucket further away than this factor in any size says nothing about a problem: the estimate is used instead.
FARTHEST = math.log(8.0)


class Bucket(NamedTuple):
    """One measured problem: its sizes, and milliseconds by kernel."""

    direction: str
    dtype: str
    mask: str
    sizes: tuple[int, ...]  # in the order of SIZES
    ms: dict[str, float]


class Table(NamedTuple):
    path: str
    device: str
    buckets: tuple[Bucket, ...]


class Measurement(NamedTuple):
    """Times of the nearest bucket, scaled to the problem, and where they come from."""

    seconds: dict[str, float]
    source: str


def measured(problem: AttentionProblem) -> Measurement | None:
    """What the tables of the problem's device say about it, or None."""
    for table in tables(device_of(problem.device).names):
        bucket = nearest(table.buckets, problem)
        if bucket is not None:
            scale = work(problem) / bucket_work(bucket, problem)
            seconds = {name: ms * 1e-3 * scale for name, ms in bucket.ms.items()}
            return Measurement(seconds, f"{table.device}: {describe(bucket)}")
    return None


def nearest(buckets: tuple[Bucket, ...], problem: AttentionProblem) -> Bucket | None:
    """The bucket of the same direction, dtype and kind of mask that is nearest in log space, within FARTHEST."""
    dtype, mask = str(problem.dtype).removeprefix("torch."), mask_kind(problem)
    best, best_distance = None, math.inf
    for bucket in buckets:
        if (bucket.direction, bucket.dtype, bucket.mask) != (problem.direction, dtype, mask):
            continue
        steps = distances(bucket, problem)
        if max(steps) <= FARTHEST and sum(steps) < best_distance:
            best, best_distance = bucket, sum(steps)
    return best


def distances(bucket: Bucket, problem: AttentionProblem) -> list[float]:
    """Log ratios of the sizes that decide speed: B * H only matters through how much work there is in parallel."""
    B, H, Hkv, M, N, D, Dv = bucket.sizes
    pairs = (
        (M, problem.M),
        (N, problem.N),
        (D, problem.D),
        (Dv, problem.Dv),
        (H // max(1, Hkv), problem.G),
    )
    parallel = 0.25 * abs(math.log(max(1, B * H) / max(1, problem.B * problem.H)))
    return [abs(math.log(max(1, a) / max(1, b))) for a, b in pairs] + [parallel]


def mask_kind(problem: AttentionProblem) -> str:
    """The kind of mask a bucket is measured for."""
    if problem.features & {"bias", "allowed"}:
        return "dense"
    if problem.features & {"k_lengths", "segments", "prefix"}:
        return "structured"
    if "band" not in problem.features:
        return "none"
    return "causal" if problem.left < 0 and problem.right == 0 else "window"


def work(problem: AttentionProblem) -> float:
    return max(1.0, problem.B * problem.H * problem.M * problem.N * (problem.D + problem.Dv))


def bucket_work(bucket: Bucket, problem: AttentionProblem) -> float:
    B, H, _, M, N, D, Dv = bucket.sizes
    return max(1.0, B * H * M * N * (D + Dv))


def describe(bucket: Bucket) -> str:
    sizes = ",".join(f"{name}{size}" for name, size in zip(SIZES, bucket.sizes, strict=True))
    return f"measured at {sizes} {bucket.mask}"


def tables(names: tuple[str, ...]) -> list[Table]:
    """The readable tables for a device: user's before shipped, specific before general."""
    found = (read(str(folder / f"{name}.yaml")) for name in names for folder in (tuning_dir(), SHIPPED))
    return [table for table in found if table is not None]


@lru_cache(maxsize=64)
def read(path: str) -> Table | None:
    """A table, or None where there is no file; a broken one is named in a warning and ignored as a whole."""
    if not Path(path).is_file():
        return None
    try:
        data = yaml.safe_load(Path(path).read_text())
        return parse(path, data)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValueError) as error:
        warnings.warn(f"tuning table {path} is ignored: {error}", stacklevel=2)
        return None


def parse(path: str, data: object) -> Table:
    """Check `data` against the schema. Raises ValueError with what is wrong."""
    if not isinstance(data, dict):
        raise ValueError(f"expected a mapping, got {type(data).__name__}")
    for key, kind in HEADER.items():
        if not isinstance(data.get(key), kind) or data.get(key) is None:
            raise ValueError(f"expected '{key}' to be a {kind.__name__}, got {data.get(key)!r}")
    if data["schema"] != SCHEMA:
        raise ValueError(f"expected schema {SCHEMA}, got {data['schema']}")
    if data["device"] != Path(path).stem:
        raise ValueError(f"expected a table of device {Path(path).stem}, got one of {data['device']!r}")
    return Table(
        path, data["device"], tuple(parse_entry(number, entry) for number, entry in enumerate(data["entries"]))
    )


def parse_entry(number: int, entry: object) -> Bucket:
    if not isinstance(entry, dict):
        raise ValueError(f"entry {number}: expected a mapping, got {entry!r}")
    texts = [entry.get(key) for key in ("direction", "dtype", "mask")]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"entry {number}: expected direction, dtype and mask, got {texts!r}")
    sizes = tuple(entry.get(name) for name in SIZES)
    if not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes):
        raise ValueError(f"entry {number}: expected positive integers for {', '.join(SIZES)}, got {sizes!r}")
    ms = entry.get("ms")
    if not isinstance(ms, dict) or not ms or not all(is_time(name, value) for name, value in ms.items()):
        raise ValueError(f"entry {number}: expected ms to map kernels to positive milliseconds, got {ms!r}")
    return Bucket(*texts, sizes, {name: float(value) for name, value in ms.items()})


def is_time(name: object, value: object) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(name, str) and number and math.isfinite(value) and value > 0


def write(path: Path, data: dict) -> None:
    """Replace a table atomically: whoever reads sees the old one or the new one. The folder is created private."""
    parse(str(path), data)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    try:
        with os.fdopen(handle, "w") as file:
            yaml.safe_dump(data, file, sort_keys=False, width=160, default_flow_style=None)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    read.cache_clear()
