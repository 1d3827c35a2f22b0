"""Times callables that compete: rounds alternate between them in one run, so that noise hits all alike.

On the host a sample is the mean of as many calls as fill MIN_SAMPLE seconds. The minimum is the figure to compare
(whatever else runs on the machine only adds time); the median and the spread say how quiet the machine was.

On a GPU a sample is a single call on a cold cache between two events, or the host's time to queue a call. The median
is the figure to compare: the device has no other work, but its clock moves.

On Apple's GPUs a sample is as on the host, of as many calls as fill MPS_SAMPLE seconds, and waits for the last of them:
torch's events there are read by the host, and no less noisy.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

# A thousand times the clock's resolution, and short beside the slices in which a busy system shares a core: among many
# short samples some run undisturbed.
MIN_SAMPLE = 2e-3
# What waiting for Apple's GPU takes, some tenths of a millisecond, is little of this.
MPS_SAMPLE = 2e-2
MIN_ROUNDS = 5
MAX_ROUNDS = 400
# A least time that no other sample came this near is not trusted yet; up to so many times the rounds wait for one.
NEAR = 1.03
PATIENCE = 4
# A sample is never longer than this many calls, so that one fast call does not take a second to calibrate.
MAX_REPEATS = 10_000
# Larger than the last-level caches of the processors in question.
FLUSH_BYTES = 256 << 20
# Of each contestant: the seconds to fill, and on a GPU the samples at least and at most.
HOST_SECONDS = 0.5
DEVICE_SECONDS = 0.25
MIN_SAMPLES = 10
MAX_SAMPLES = 60
# Whoever is this much slower than the fastest has few samples: its rank is clear.
HOPELESS = 4.0
HOPELESS_SAMPLES = 3
# Read before every call: ten times an H200's L2 cache. Written, it would leave the cache full of lines that the call
# then waits for to be written back, which costs a decode as much as its own reads.
DEVICE_FLUSH_BYTES = 512 << 20
# The device is kept busy this much longer than a host's call takes, at most by so many flushes (about 2 ms).
HOST_MARGIN = 1.5
MAX_FLUSHES = 16
# Calls that are queued one after another where the host is timed.
QUEUED_CALLS = 20
# Of what calibrates, the least of so many samples.
TRIES = 3

Call = Callable[[], object]
# (call, repeats) -> seconds for all of them
Stopwatch = Callable[[Call, int], float]
# What was recorded on the device before and after a call.
Span = tuple[torch.cuda.Event, torch.cuda.Event]


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

    def as_dict(self) -> dict[str, Any]:
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


def mps_stopwatch(call: Call, repeats: int) -> float:
    """Time of the host until Apple's GPU has done all of it."""
    torch.mps.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    torch.mps.synchronize()
    return time.perf_counter() - start


STOPWATCHES: dict[str, Stopwatch] = {"cuda": cuda_stopwatch, "mps": mps_stopwatch}


def stopwatch_for(device: str) -> Stopwatch:
    return STOPWATCHES.get(device.partition(":")[0], host_stopwatch)


def sample_for(device: str) -> float:
    """Seconds that a sample of many calls fills."""
    return MPS_SAMPLE if device.startswith("mps") else MIN_SAMPLE


def synchronize(device: str) -> None:
    """Waits until a GPU has done what was queued."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    elif device.startswith("mps"):
        torch.mps.synchronize()


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
    calls: Sequence[Any], stopwatch: Callable[[Any, int], float] = host_stopwatch, rounds: int | None = None,
    time_limit: float = 1.0, flush: bool = False, min_sample: float = MIN_SAMPLE,
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


class OwnNumbers:
    """Enters `around`, with torch's generator of the device at the offset where this racer left it.

    Else racers would move it on for one another. torch's efficient kernel does so by a number for each score, after
    which a call of ours makes new seeds, as it does once in thousands of calls elsewhere.
    """

    def __init__(self, around: Callable[[], AbstractContextManager[Any]], generator: torch.Generator) -> None:
        self.around, self.generator, self.offset = around, generator, generator.get_offset()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        shared = self.generator.get_offset()
        self.generator.set_offset(self.offset)
        try:
            with self.around():
                yield
        finally:
            self.offset = self.generator.get_offset()
            self.generator.set_offset(shared)


@dataclass(frozen=True)
class Racer:
    """A call, and what has to be entered around it without being part of it."""

    call: Call
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


class Clock(Protocol):
    """Queues a call on a device, and tells its seconds later."""

    def queue(self, racer: Racer) -> object: ...

    def read(self, span: Any) -> float: ...


@dataclass(frozen=True)
class Pace:
    """How long a race takes: so many rounds, or `seconds` of each racer; on a CPU `flush` asks for cold caches."""

    rounds: int | None = None
    seconds: float | None = None  # HOST_SECONDS, on a GPU DEVICE_SECONDS
    flush: bool = False


USUAL = Pace()


def race(racers: Sequence[Racer], device: str, host: bool = False, pace: Pace = USUAL) -> list[Timing]:
    """Seconds per call of each; with `host`, and on a CPU, of the host. Every call was warm before."""
    if not racers:
        return []
    if host or not device.startswith("cuda"):
        return host_race(racers, device, pace, waits=not host and device.startswith("mps"))
    with torch.cuda.device(device):
        limit = DEVICE_SECONDS if pace.seconds is None else pace.seconds
        return device_race(racers, DeviceClock(racers, device), pace.rounds, limit)


def device_race(
    racers: Sequence[Racer],
    clock: Clock,
    rounds: int | None = None,
    time_limit: float = DEVICE_SECONDS,
    fewest: int = MIN_SAMPLES,
) -> list[Timing]:
    """Rounds alternate between the racers, each with the samples that `sample_counts` gives it by the least of its
    first ones: one alone may have met what few calls meet, as the drawing of dropout's next seeds. After these the
    clock is read at the end only, so that the device never waits for the host."""
    spans: list[list[object]] = [[] for _ in racers]

    def queue(counts: Sequence[int]) -> None:
        for number in range(max(counts)):
            for racer, taken, count in zip(racers, spans, counts, strict=True):
                if len(taken) <= number < count:
                    taken.append(clock.queue(racer))

    queue([rounds or HOPELESS_SAMPLES for _ in racers])
    first = [min(map(clock.read, taken)) for taken in spans]
    queue(sample_counts(first, rounds, time_limit, fewest))
    return [Timing(tuple(map(clock.read, taken))) for taken in spans]


def sample_counts(
    first: Sequence[float], rounds: int | None, time_limit: float, fewest: int = MIN_SAMPLES
) -> list[int]:
    """How many samples each gets that took `first` seconds: `rounds`, or as many as fill the time."""
    if rounds:
        return [rounds for _ in first]
    hopeless = HOPELESS * min(first)
    counts = (max(fewest, min(MAX_SAMPLES, int(time_limit / max(seconds, 1e-9)))) for seconds in first)
    return [HOPELESS_SAMPLES if seconds > hopeless else count for seconds, count in zip(first, counts, strict=True)]


class DeviceClock:
    """Events around a call, before which other memory is read into the cache as many times as give the host a lead:
    what is timed is the device as when a model keeps it busy."""

    def __init__(self, racers: Sequence[Racer], device: str) -> None:
        self.scratch = torch.zeros(DEVICE_FLUSH_BYTES // 4, dtype=torch.float32, device=device)
        self.total = torch.zeros((), dtype=torch.float32, device=device)
        self.flushes = 1
        flush = Racer(self.flush)
        busy = min(self.read(self.queue(flush)) for _ in range(TRIES))
        lead = HOST_MARGIN * max(min(host_seconds(racer) for _ in range(TRIES)) for racer in racers)
        self.flushes = max(1, min(MAX_FLUSHES, math.ceil(lead / busy)))

    def flush(self) -> None:
        torch.sum(self.scratch, dim=0, out=self.total)

    def queue(self, racer: Racer) -> Span:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with racer.around():
            for _ in range(self.flushes):
                self.flush()
            begin.record()
            racer.call()
            end.record()
        return begin, end

    def read(self, span: Span) -> float:
        begin, end = span
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3


def host_seconds(racer: Racer) -> float:
    """What the host takes to queue a call on an idle device."""
    torch.cuda.synchronize()
    with racer.around():
        seconds = host_stopwatch(racer.call, 1)
    torch.cuda.synchronize()
    return seconds


def queue_seconds(racer: Racer) -> float:
    """What the host takes for one of many calls that it queues, the device's part not waited for."""
    with racer.around():
        torch.cuda.synchronize()
        seconds = min(host_stopwatch(racer.call, QUEUED_CALLS) / QUEUED_CALLS for _ in range(TRIES))
    torch.cuda.synchronize()
    return seconds


def host_race(racers: Sequence[Racer], device: str, pace: Pace = USUAL, waits: bool = False) -> list[Timing]:
    """Seconds of the host per call. On a GPU many calls are queued, and waited for outside of the time, or with
    `waits` inside of it."""
    on_gpu = not device.startswith("cpu")
    watch = stopwatch_for(device) if waits else host_stopwatch

    def stopwatch(racer: Racer, repeats: int) -> float:
        with racer.around():
            seconds = watch(racer.call, repeats)
        synchronize(device)
        return seconds

    usual = DEVICE_SECONDS if on_gpu else HOST_SECONDS
    limit = (usual if pace.seconds is None else pace.seconds) * len(racers)
    sample = sample_for(device) if waits else MIN_SAMPLE
    return interleave(racers, stopwatch, pace.rounds, limit, pace.flush and not on_gpu, sample)
