"""Times callables that compete: rounds alternate between them in one run, so that noise hits all alike.

A sample is the mean of as many calls as fill MIN_SAMPLE seconds. The minimum is the figure to compare (whatever else
runs on the machine only adds time); the median and the spread say how quiet the machine was.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

# A thousand times the clock's resolution, and short beside the slices in which a busy system shares a core: among many
# short samples some run undisturbed.
MIN_SAMPLE = 2e-3
MIN_ROUNDS = 5
MAX_ROUNDS = 400
# A least time that no other sample came this near is not trusted yet; up to so many times the rounds wait for one.
NEAR = 1.03
PATIENCE = 4
# A sample is never longer than this many calls, so that one fast call does not take a second to calibrate.
MAX_REPEATS = 10_000
# Larger than the last-level caches of the machines in question.
FLUSH_BYTES = 256 << 20

Call = Callable[[], object]
# (call, repeats) -> seconds for all of them
Stopwatch = Callable[[Call, int], float]


@dataclass(frozen=True)
class Timing:
    """Seconds per call of every sample."""

    samples: tuple[float, ...]
    repeats: int = 1

    @property
    def minimum(self) -> float:
        return min(self.samples)

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """Half of the samples lie within this share of the median (interquartile range)."""
        if len(self.samples) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.samples, n=4)
        return (high - low) / self.median

    def as_dict(self) -> dict:
        figures = {"min_ms": self.minimum * 1e3, "median_ms": self.median * 1e3, "spread": self.spread}
        return figures | {"samples": len(self.samples), "repeats": self.repeats}


def host_stopwatch(call: Call, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return time.perf_counter() - start


def cuda_stopwatch(call: Call, repeats: int) -> float:
    """Time on the device between two events; the host waits only at the end."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3


def stopwatch_for(device: str) -> Stopwatch:
    return cuda_stopwatch if device.startswith("cuda") else host_stopwatch


def calibrate(call: Call, stopwatch: Stopwatch, min_sample: float = MIN_SAMPLE) -> int:
    """Calls that fill `min_sample` seconds; runs the call, so it also warms up."""
    stopwatch(call, 1)
    repeats = 1
    while repeats < MAX_REPEATS:
        seconds = stopwatch(call, repeats)
        if seconds >= min_sample:
            return repeats
        grown = repeats * min_sample / seconds * 1.2 if seconds > 0 else repeats * 10
        repeats = min(MAX_REPEATS, max(repeats + 1, min(round(grown), repeats * 10)))
    return repeats


def interleave(
    calls: Sequence[Call], stopwatch: Stopwatch = host_stopwatch, rounds: int | None = None, time_limit: float = 1.0,
    flush: bool = False, min_sample: float = MIN_SAMPLE,
) -> list[Timing]:  # fmt: skip
    """One Timing per call. Rounds go through the calls, each time in another order, so that none is always behind one
    that leaves the machine hot or its caches full, until `rounds` are done or the time is up.

    Without `rounds`, at least MIN_ROUNDS are run and at most MAX_ROUNDS, however short `time_limit` seconds are; then
    up to PATIENCE times as many, until the least time of each call was met twice. With `flush` every sample is a single
    call on cold caches, else it is of `min_sample` seconds at least.
    """
    repeats = [1 if flush else calibrate(call, stopwatch, min_sample) for call in calls]
    samples: list[list[float]] = [[] for _ in calls]
    scratch = torch.empty(FLUSH_BYTES, dtype=torch.uint8) if flush else None
    spent, done, most = 0.0, 0, rounds or 0
    order, shuffle = list(range(len(calls))), random.Random(0).shuffle
    while not most or done < most:
        shuffle(order)
        for number in order:
            if scratch is not None:
                scratch.fill_(done & 1)
            seconds = stopwatch(calls[number], repeats[number])
            samples[number].append(seconds / repeats[number])
            spent += seconds
        done += 1
        if not rounds and done >= MIN_ROUNDS and (spent >= time_limit or done >= MAX_ROUNDS):
            most = most or PATIENCE * done
            if all(settled(s) for s in samples):
                break
    return [Timing(tuple(s), n) for s, n in zip(samples, repeats, strict=True)]


def settled(samples: Sequence[float]) -> bool:
    """Whether the least time is no accident: another sample came near it."""
    least, second = sorted(samples)[:2]
    return second <= least * NEAR
