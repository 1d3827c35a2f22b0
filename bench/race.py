"""Times contestants on a GPU: single calls on a cold cache between events, in rounds; or the host's time to queue them.

The median is the figure to compare: the device has no other work, but its clock moves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from sdpa.bench.timing import Call, Timing, host_stopwatch, interleave

# Of each contestant: the seconds to fill, and the samples at least and at most.
DEVICE_SECONDS = 0.25
MIN_SAMPLES = 10
MAX_SAMPLES = 60
# Whoever is this much slower than the fastest has few samples: its rank is clear.
HOPELESS = 4.0
HOPELESS_SAMPLES = 3
# Read before every call: ten times an H200's L2 cache. Written, it would leave the cache full of lines that the call
# then waits for to be written back, which costs a decode as much as its own reads.
FLUSH_BYTES = 512 << 20
# The device is kept busy this much longer than a host's call takes, at most by so many flushes (about 2 ms).
HOST_MARGIN = 1.5
MAX_FLUSHES = 16
# Calls that are queued one after another where the host is timed.
QUEUED_CALLS = 20
# Of what calibrates, the least of so many samples.
TRIES = 3

# What was recorded on the device before and after a call.
Span = tuple[torch.cuda.Event, torch.cuda.Event]


@dataclass(frozen=True)
class Racer:
    """A call, and what has to be entered around it without being part of it."""

    call: Call
    around: Callable[[], AbstractContextManager] = nullcontext


class Clock(Protocol):
    """Queues a call on a device, and tells its seconds later."""

    def queue(self, racer: Racer) -> object: ...

    def read(self, span: object) -> float: ...


def race(
    racers: Sequence[Racer], device: str, host: bool, rounds: int | None = None, time_limit: float = DEVICE_SECONDS
) -> list[Timing]:
    """Seconds per call of each; with `host`, and on a CPU, of the host. Every call was warm before."""
    if not racers:
        return []
    if host or not device.startswith("cuda"):
        return host_race(racers, device, rounds, time_limit)
    with torch.cuda.device(device):
        return device_race(racers, DeviceClock(racers, device), rounds, time_limit)


def device_race(
    racers: Sequence[Racer],
    clock: Clock,
    rounds: int | None = None,
    time_limit: float = DEVICE_SECONDS,
    fewest: int = MIN_SAMPLES,
) -> list[Timing]:
    """Rounds alternate between the racers, each with the samples that `sample_counts` gives it; the clock is read at
    the end only, so that the device never waits for the host."""
    counts = sample_counts([clock.read(clock.queue(racer)) for racer in racers], rounds, time_limit, fewest)
    spans: list[list[object]] = [[] for _ in racers]
    for number in range(max(counts)):
        for racer, taken, count in zip(racers, spans, counts, strict=True):
            if number < count:
                taken.append(clock.queue(racer))
    return [Timing(tuple(map(clock.read, taken))) for taken in spans]


def sample_counts(
    first: Sequence[float], rounds: int | None, time_limit: float, fewest: int = MIN_SAMPLES
) -> list[int]:
    """How many samples each gets that took `first` seconds once: `rounds`, or as many as fill the time."""
    if rounds:
        return [rounds for _ in first]
    hopeless = HOPELESS * min(first)
    counts = (max(fewest, min(MAX_SAMPLES, int(time_limit / max(seconds, 1e-9)))) for seconds in first)
    return [HOPELESS_SAMPLES if seconds > hopeless else count for seconds, count in zip(first, counts, strict=True)]


class DeviceClock:
    """Events around a call, before which other memory is read into the cache as many times as give the host a lead:
    what is timed is the device as when a model keeps it busy."""

    def __init__(self, racers: Sequence[Racer], device: str) -> None:
        self.scratch = torch.zeros(FLUSH_BYTES // 4, dtype=torch.float32, device=device)
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


def host_race(
    racers: Sequence[Racer], device: str, rounds: int | None = None, time_limit: float = DEVICE_SECONDS
) -> list[Timing]:
    """Seconds of the host per call. On a GPU many calls are queued, and waited for outside of the time."""

    def stopwatch(racer: Racer, repeats: int) -> float:
        with racer.around():
            seconds = host_stopwatch(racer.call, repeats)
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)
        return seconds

    return interleave(racers, stopwatch, rounds, time_limit * len(racers))
