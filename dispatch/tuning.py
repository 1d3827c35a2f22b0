"""What tuning tables tell of a problem: the times of the measured problems that are near it.

A bucket, which is one measured problem, is near where it differs by a small factor in every size (`distances`). Its
dtype and its kind of mask are the problem's or those that `dtype_names` and `mask_kinds` name. On a CPU the nearest
bucket answers. On a GPU the few nearest do: how much slower each kernel was there than the fastest, as a mean that
weighs near buckets more (docs/log/choice.md). The tables of other cards of a GPU's architecture speak, too, a step
behind its own; their times are scaled (`cost.beside`).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from sdpa.dispatch import cost, tables
from sdpa.dispatch.catalog import by_name
from sdpa.dispatch.device import Device, device_of
from sdpa.dispatch.tables import SIZES, Bucket, Table
from sdpa.problem import UNLIMITED, AttentionProblem, Tile

# A bucket that differs by more than this factor in any size is not used: the estimate is.
FARTHEST = math.log(8.0)
# Batch and heads beyond what fills a device only multiply the time; they break ties between equally near buckets.
PARALLEL_WEIGHT = 0.25
# How much more it decides of a forward than any other size how far it fills the device (docs/log/choice.md).
FORWARD_FILL = 1.5
# Query heads of a group beyond which more of them change nothing but the rows.
GROUPS = 16
# What another dtype of the same speed, and each further card, add to a distance; and each further kind of mask, which
# speaks only where none of the kinds before it does, as what lacks dropout, softcap or sinks that the problem has.
DTYPE_STEP = 0.1
CARD_STEP = 1.0
KIND_STEP = 20.0
# A bucket weighs by one over the square of its distance and this.
SOFTNESS = 0.1
# How much slower than the fastest a kernel counts where a bucket lacks it: it could not run there, or was not worth it.
UNHEARD = 2.0
# The same for a kernel that writes out the scores, which is measured at few problems. In the shipped tables of GPUs it
# is 20 to 28 times as slow as the fastest in the median, and 9 to 12 times at the 10th percentile.
UNHEARD_SCORES = 20.0
# Rows of queries one program of a GPU kernel takes, and how many programs per multiprocessor make a GPU full: beyond
# two waves the last, partly filled one no longer decides.
GPU_ROWS = 128
GPU_WAVES = 2
LEAST_COLUMNS = 16  # the smallest side of a tensor core's product
# Of half precision, where memory and launches take a part of the time (docs/log/choice.md).
HALF_PADDING = 0.5
# A band under which this share of the pairs is visible counts as no mask.
NEARLY_ALL = 0.9


class Reach(NamedTuple):
    """How many buckets speak for a problem, and the weights in a distance of the rows of queries, of head sizes, of
    empty rows and of what makes a backward another program."""

    buckets: int
    row_weight: float
    head_weight: float
    empty_weight: float
    program_weight: float


CPU_REACH = Reach(1, 1.0, 1.0, 0.0, 0.0)
# A GPU kernel has instances for head sizes, and blocks of queries and keys, the last of them filled in part. A bucket
# of another head size or another share of empty rows is further away. So is one of a backward that is another program
# (docs/log/choice.md).
GPU_REACH = Reach(5, 1.5, 5.0, 3.0, 1.0)


class Near(NamedTuple):
    """A bucket near a problem, its distance, its table, and the card where that is another one than the problem's."""

    distance: float
    bucket: Bucket
    table: Table
    card: Device | None = None

    @property
    def weight(self) -> float:
        return (self.distance + SOFTNESS) ** -2

    def seconds(self, problem: AttentionProblem) -> dict[str, float]:
        """By kernel: the bucket's, times how much larger the problem is, as on the problem's device, and how much more
        of a padded head size is empty."""
        scale, kernels = 1e-3 * larger(self.bucket, problem), by_name()
        padding = (padded(problem.D, problem.Dv) / padded(*self.bucket.sizes[-2:])) ** padding_weight(problem)

        def factor(name: str) -> float:
            kernel = kernels.get(name)
            if kernel is None:
                return 1.0
            return cost.beside(self.card, kernel, problem) * (padding if kernel.pads_columns else 1.0)

        return {name: ms * scale * factor(name) for name, ms in self.bucket.ms.items()}

    def __str__(self) -> str:
        told = describe(self.bucket)
        if self.card is None:
            return f"{self.table.device}: {told}"
        return f"scaled from {self.table.device}, a card of its architecture: {told}"


class Measurement(NamedTuple):
    """What tables tell of a problem: seconds by kernel, where they come from, and tiles by kernel."""

    seconds: dict[str, float]
    source: str
    tile: dict[str, Tile]


def measured(problem: AttentionProblem) -> Measurement | None:
    """What the tables of the problem's device tell of it, with those of other cards of its architecture; None where
    nothing near it was measured. What was measured on two cards counts as the nearer one's."""
    device = device_of(problem.device)
    every = (together(own, problem) for own in tables.of(device.names))
    found = next((own for own in every if own), [])  # the device's before its family's
    for rank, table in enumerate(tables.related(device), 1 if found else 0):
        further = near(table, problem, table.card)
        found = joined(found, [one._replace(distance=one.distance + CARD_STEP * rank) for one in further])
    return combined(found, problem)


def prefer_built(problem: AttentionProblem) -> float:
    """By which the time of a kernel that a first call compiles counts more than that of one that is built: what the
    first table of the device says that says it, 1 without any."""
    every = (table.prefer_built for own in tables.of(device_of(problem.device).names) for table in own)
    return next((ratio for ratio in every if ratio is not None), 1.0)


def together(own: list[Table], problem: AttentionProblem) -> list[Near]:
    """The buckets near a problem of the tables of one name."""
    found: list[Near] = []
    for table in own:
        found = joined(found, near(table, problem))
    return found


def joined(found: list[Near], further: list[Near]) -> list[Near]:
    """Buckets and others, without those of the others that were measured among the first."""
    known = {key_of(one.bucket) for one in found}
    return found + [one for one in further if key_of(one.bucket) not in known]


def key_of(bucket: Bucket) -> tuple[Any, ...]:
    """What makes two buckets the same measurement."""
    return (*bucket[:4], bucket.beside, bucket.window)


def combined(found: list[Near], problem: AttentionProblem) -> Measurement | None:
    """What buckets tell together: the fastest time of the nearest, times how much slower than the fastest each kernel
    is in their geometric mean."""
    heard = sorted(found, key=lambda one: one.distance)[: reach_of(problem).buckets]
    if not heard:
        return None
    times = [one.seconds(problem) for one in heard]
    fastest, weight = [min(seconds.values()) for seconds in times], sum(one.weight for one in heard)

    def slower(name: str) -> float:
        kernel = by_name().get(name)
        unheard = UNHEARD_SCORES if kernel and kernel.materialises else UNHEARD
        ratios = [seconds.get(name, unheard * best) / best for seconds, best in zip(times, fastest, strict=True)]
        logs = (one.weight * math.log(ratio) for one, ratio in zip(heard, ratios, strict=True))
        return math.exp(sum(logs) / weight)

    mean = {name: fastest[0] * slower(name) for name in dict.fromkeys(name for seconds in times for name in seconds)}
    alike = [one for one in heard if columns(one.bucket.sizes) == columns((problem.D, problem.Dv))]
    tiles = {name: tile for one in reversed(alike) for name, tile in one.bucket.tile.items()}
    others = f", and {len(heard) - 1} near it" if len(heard) > 1 else ""
    return Measurement(mean, f"{heard[0]}{others}", tiles)


def near(table: Table, problem: AttentionProblem, card: Device | None = None) -> list[Near]:
    """The buckets of a table that are near a problem."""
    device, dtypes, kinds = device_of(problem.device), dtype_names(problem), mask_kinds(problem)
    reach, beside = reach_of(problem), beside_of(problem)
    found = []
    for bucket in table.buckets:
        if bucket.direction != problem.direction or bucket.dtype not in dtypes or bucket.mask not in kinds:
            continue
        if not bucket.beside <= beside:
            continue
        steps = distances(bucket, problem, device)
        if max(steps) <= FARTHEST:
            kind = DTYPE_STEP * dtypes.index(bucket.dtype) + KIND_STEP * kinds.index(bucket.mask)
            kind += KIND_STEP * len(beside - bucket.beside)
            distance = kind + weighed(steps, reach) + reach.empty_weight * empty_rows(bucket, problem)
            distance += reach.program_weight * other_programs(bucket, problem)
            found.append(Near(distance, bucket, table, card))
    return found


def reach_of(problem: AttentionProblem) -> Reach:
    return CPU_REACH if problem.device_type == "cpu" else GPU_REACH


def weighed(steps: list[float], reach: Reach) -> float:
    """The distance of a bucket by its steps (`distances`)."""
    M, _, D, Dv, *_ = steps
    return sum(steps) + (reach.row_weight - 1.0) * M + (reach.head_weight - 1.0) * (D + Dv)


def distances(bucket: Bucket, problem: AttentionProblem, device: Device) -> list[float]:
    """Log ratios of the sizes that decide speed. What fills the device are the programs of a forward that has the query
    heads of a group in one tile, which is what kernels for few queries do, or of a backward's heads; more of them count
    little."""
    B, H, Hkv, M, N, D, Dv = bucket.sizes
    group = H // max(1, Hkv)
    if problem.direction == "backward":
        weight, filling = 1.0, (fill(B * H, M, device), fill(problem.B * problem.H, problem.M, device))
    else:
        weight, own = FORWARD_FILL, fill(problem.B * problem.Hkv, problem.M * problem.G, device)
        filling = fill(B * Hkv, M * group, device), own
    pairs = (
        (M, problem.M),
        (N, problem.N),
        (D, problem.D),
        (Dv, problem.Dv),
        (min(GROUPS, group), min(GROUPS, problem.G)),
        filling,
        (B * H, problem.B * problem.H),
    )
    steps = [abs(math.log(max(1, a) / max(1, b))) for a, b in pairs]
    steps[-2:] = weight * steps[-2], PARALLEL_WEIGHT * steps[-1]
    if bucket.mask == "window":
        width = 1 + bucket.window if bucket.window else 0
        step = abs(math.log(min(N, width) / max(1, problem.width(problem.N)))) if width else FARTHEST
        steps.append(min(FARTHEST, step))
    return steps


def empty_rows(bucket: Bucket, problem: AttentionProblem) -> float:
    """Log ratios of how much longer queries and keys are in whole blocks of GPU_ROWS than they are. Of lengths below
    that these are the log ratios of the lengths, which count once more."""

    def longer(length: int) -> float:
        return -(-length // GPU_ROWS) * GPU_ROWS / max(1, length)

    _, _, _, M, N, _, _ = bucket.sizes
    pairs = (M, problem.M), (N, problem.N)
    return sum(abs(math.log(max(1.0, longer(a)) / max(1.0, longer(b)))) for a, b in pairs)


def other_programs(bucket: Bucket, problem: AttentionProblem) -> int:
    """In how many respects a GPU's backward is another program: keys are one block, for which a single pass is enough;
    and heads share keys, whose gradients are then sums."""
    if problem.direction != "backward":
        return 0
    _, H, Hkv, _, N, _, _ = bucket.sizes
    return ((N <= GPU_ROWS) != (problem.N <= GPU_ROWS)) + ((H == Hkv) != (problem.H == problem.Hkv))


def columns(sizes: tuple[int, ...]) -> list[int]:
    """The head sizes as a kernel has columns for them, as exponents of powers of two. A tile is measured for these."""
    return [(max(LEAST_COLUMNS, size) - 1).bit_length() for size in sizes[-2:]]


def padded(*head_sizes: int) -> float:
    """How many columns a kernel that fills them up has for each that it needs."""
    return sum(2**exponent for exponent in columns(head_sizes)) / sum(head_sizes)


def padding_weight(problem: AttentionProblem) -> float:
    """The share of the time that columns take, as an exponent: float32 is bound by its products."""
    return 1.0 if problem.dtype == torch.float32 else HALF_PADDING


def fill(heads: int, M: int, device: Device) -> int:
    """Programs a GPU kernel has for `heads` matrices of M queries, up to as many as keep the GPU busy. On a CPU tasks
    are so many more than threads that this does not tell problems apart."""
    if device.kind == "cpu":
        return 1
    return min(heads * -(-M // GPU_ROWS), GPU_WAVES * device.cores)


def dtype_names(problem: AttentionProblem) -> tuple[str, ...]:
    """The dtypes of buckets that are used for a problem, the nearest first.

    On GPUs float32 products in TF32 are a dtype of their own, and both half precisions have the same speed.
    """
    name = str(problem.dtype).removeprefix("torch.")
    if problem.device_type == "cpu":
        return (name,)
    if name == "float32" and problem.tf32:
        return ("tfloat32",)
    return (name, "bfloat16") if name == "float16" else (name,)


def beside_of(problem: AttentionProblem) -> frozenset[str]:
    """What a problem asks beside its mask that decides which kernels are able."""
    return problem.features & tables.BESIDE


def window_of(problem: AttentionProblem) -> int:
    """The keys beside one that a query of the mask "window" sees at most; 0 of other masks, and where a side has no
    end."""
    ends = mask_kind(problem) == "window" and UNLIMITED not in (problem.left, problem.right)
    return problem.left + problem.right if ends else 0


def mask_kind(problem: AttentionProblem) -> str:
    """The kind of mask that a problem is measured as. On a CPU the finer kinds give the same order of kernels."""
    return coarse_kind(problem) if problem.device_type == "cpu" else mask_kinds(problem)[0]


def coarse_kind(problem: AttentionProblem) -> str:
    if problem.features & {"bias", "allowed"}:
        return "dense"
    if problem.features & STRUCTURED:
        return "structured"
    return band_kind(problem)


def band_kind(problem: AttentionProblem) -> str:
    """The kind of a band. A causal mask that hides almost nothing, as the bottom-right one of a few new queries, is
    "none"."""
    if "band" not in problem.features:
        return "none"
    if problem.right == 0 and problem.left == UNLIMITED and problem.visible_share() >= NEARLY_ALL:
        return "none"
    return "causal" if problem.left == UNLIMITED and problem.right == 0 else "window"


STRUCTURED = frozenset({"k_lengths", "q_lengths", "segments", "prefix", "packed", "paged"})


def mask_kinds(problem: AttentionProblem) -> tuple[str, ...]:
    """The kinds of mask whose buckets are used for a problem, the nearest first.

    "rows" is a dense mask with one row for all queries (padding), which moves few bytes. "dense" is a boolean mask of M
    rows, "bias" one of numbers, "bias_grad" one that learns. Lengths and segments fall back to the band alone:
    `why_not` decides which kernels take them, and the order of tiles changes little. Packed sequences count as lengths,
    because a loop ends with the sequence.
    """
    features = problem.features
    if features & {"bias", "allowed"}:
        bias = ("bias", "dense") if "bias" in features else ("dense", "bias")
        if "bias_grad" in features:
            return ("bias_grad", *bias)
        return ("rows", *bias) if problem.row_mask else bias
    if features & STRUCTURED:
        kind = "segments" if "segments" in features else "lengths"
        return (kind, "structured", band_kind(problem))
    return (band_kind(problem),)


def larger(bucket: Bucket, problem: AttentionProblem) -> float:
    """How many times the work of a bucket a problem is."""
    B, H, _, M, N, D, Dv = bucket.sizes
    measured, keys = (min(N, 1 + bucket.window), problem.width(problem.N)) if bucket.window else (N, problem.N)
    work = problem.B * problem.H * problem.M * keys * (problem.D + problem.Dv)
    return max(1.0, work) / max(1.0, B * H * M * measured * (D + Dv))


def describe(bucket: Bucket) -> str:
    sizes = ",".join(f"{name}{size}" for name, size in zip(SIZES, bucket.sizes, strict=True))
    beside = " and ".join(sorted(bucket.beside))
    mask = f"{bucket.mask} of {bucket.window}" if bucket.window else bucket.mask
    return f"measured at {sizes} {mask}" + (f" with {beside}" if beside else "")
