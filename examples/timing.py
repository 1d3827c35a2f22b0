"""Times of several ways to do the same, in turns, so that a busy moment meets all of them."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping

import torch


def positive(text: str) -> int:
    """An argument: a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text}")
    return int(text)


def usable(text: str) -> str:
    """An argument: a device that torch can use here."""
    try:
        torch.zeros(1, device=text)
    except (RuntimeError, AssertionError):
        raise argparse.ArgumentTypeError(f"expected a device that torch can use here, got {text}") from None
    return text


def fastest(ways: Mapping[str, Callable[[], object]], rounds: int, device: str = "cpu") -> dict[str, float]:
    """The least seconds of each way. Each runs once before, which loads libraries and chooses kernels."""
    for way in ways.values():
        way()
    seconds = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds):
        for name, way in ways.items():
            wait(device)
            begin = time.perf_counter()
            way()
            wait(device)
            seconds[name] = min(seconds[name], time.perf_counter() - begin)
    return seconds


def wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def table(seconds: Mapping[str, float], work: float, unit: str) -> str:
    """A line for each way: how much it does in a second, and how many times as fast as the first it is."""
    first = next(iter(seconds.values()))
    return "\n".join(f"{name:<24} {work / s:>12,.0f} {unit}/s  {first / s:.2f} x" for name, s in seconds.items())
