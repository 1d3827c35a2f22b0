"""A barrier of Hopper's shared memory, for plays of who waits for whom."""

from __future__ import annotations


class Barrier:
    """One in shared memory: a phase ends when all have arrived and all bytes that were announced."""

    def __init__(self, arrivals):
        self.arrivals = self.missing = arrivals
        self.bytes = self.phase = 0

    def arrive(self, announced=0):
        self.missing -= 1
        assert self.missing >= 0, "one arrival too many"
        self.land(-announced)

    def land(self, count):
        self.bytes -= count
        if self.missing == self.bytes == 0:
            self.phase ^= 1
            self.missing = self.arrivals

    def passed(self, parity):
        return self.phase != parity


def play_out(actors, landing, rng):
    """Run generators that yield what they wait for, and copies that land, in an order drawn by `rng`."""
    waiting = dict.fromkeys(actors)
    while waiting or landing:
        ready = [actor for actor, wait in waiting.items() if wait is None or wait()]
        assert ready or landing, "all wait for each other"
        choice = rng.randrange(len(ready) + len(landing))
        if choice >= len(ready):
            landing.pop(choice - len(ready))()
            continue
        try:
            waiting[ready[choice]] = next(ready[choice])
        except StopIteration:
            del waiting[ready[choice]]
