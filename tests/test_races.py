"""Races on a GPU: whose turn it is, how many samples each has, whose random numbers; the device's own time."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from sdpa.bench import contest, timing
from sdpa.bench.problems import Problem
from sdpa.bench.timing import Pace, Racer


class FakeClock:
    """A device on which each call takes the seconds it is known for, and the very first one a second longer."""

    def __init__(self, **seconds: float) -> None:
        self.seconds, self.log = seconds, []

    def queue(self, racer):
        self.log.append(racer.call)
        return self.seconds[racer.call] + (len(self.log) == 1)

    def read(self, span):
        return span


def test_device_race_alternates_and_gives_the_hopeless_few():
    clock = FakeClock(ours=1e-2, peer=2e-2, math=1.0)
    racers = [Racer(name) for name in clock.seconds]
    timings = timing.device_race(racers, clock, time_limit=0.25)
    assert [len(t.samples) for t in timings] == [25, 12, timing.HOPELESS_SAMPLES]
    assert clock.log[:6] == ["ours", "peer", "math"] * 2 and clock.log[-1] == "ours"
    assert [t.median for t in timings] == [1e-2, 2e-2, 1.0]


def test_sample_counts_are_bounded():
    assert timing.sample_counts([1e-6, 0.1], None, 0.25)[0] == timing.MAX_SAMPLES
    assert timing.sample_counts([0.1, 0.2], None, 0.25) == [timing.MIN_SAMPLES] * 2
    assert timing.sample_counts([0.1, 9.0], 4, 0.25) == [4, 4]
    assert timing.sample_counts([0.1], None, 0.25, fewest=5) == [5]
    assert timing.race([], "cuda") == []


class Generator:
    offset = 100

    def get_offset(self):
        return self.offset

    def set_offset(self, offset):
        self.offset = offset


def test_racers_draw_from_a_generator_that_nobody_else_moves_on(monkeypatch):
    generator, told = Generator(), []
    monkeypatch.setattr(torch.cuda, "default_generators", [None, generator])

    def draw(step):
        told.append((step, generator.offset))
        generator.offset += step

    problem = Problem(1, 1, 8, 8, 8, call="dropout", device="cuda:1")
    racers = [contest.drawing_alone(Racer(lambda step=step: draw(step)), problem) for step in (4, 10**6)]
    for racer in racers * 2:
        with racer.around():
            racer.call()
    assert told == [(4, 100), (10**6, 100), (4, 104), (10**6, 100 + 10**6)] and generator.offset == 100
    plain = Racer(draw)
    others = (replace(problem, call=""), replace(problem, device="cpu"))
    assert all(contest.drawing_alone(plain, other) is plain for other in others)


@pytest.mark.gpu
def test_a_device_race_hides_the_host():
    """A call that takes the host long is timed as short as it is on the device."""
    small = torch.zeros(1024, device="cuda")

    def slow():
        end = time.perf_counter() + 2e-4
        while time.perf_counter() < end:
            pass
        small.zero_()

    device, _ = timing.race([Racer(slow), Racer(small.zero_)], "cuda", pace=Pace(20))
    assert device.median < 5e-5
    assert timing.race([Racer(slow)], "cuda", True, Pace(5))[0].median >= 2e-4
