"""A row of sdpa bench as a line of the terminal."""

from __future__ import annotations

from rich.markup import escape

from sdpa.bench.contest import DEFAULT, NOT_TORCHS, OWN, Entry, Row
from sdpa.bench.problems import Problem
from sdpa.cli.common import duration

SLOWER = 0.9  # below this share of the best peer's speed a row is red
LINE = "{:<48} {:<18} {:>9} {:>8} {:<7} {:>7} {:>7} {:>6}  {}"


def line(row: Row, regret: float | None = None) -> str:
    """A row as it is printed; `regret` is the default's beside our other kernels."""
    own, label = row.own, row.problem.label
    peers = " ".join(map(told, sorted(row.peers, key=lambda peer: peer.seconds or float("inf"))))
    peers += f"; {own.note}" if own.note == NOT_TORCHS else ""
    peers += f" regret={regret:.2f}" if regret is not None and own.name == DEFAULT else ""
    if own.seconds is None or own.timing is None:
        color = "red" if own.failed else "yellow"
        return f"[{color}]{escape(f'{label:<48} {own.name:<18} {own.reason}  {peers}')}"
    name = f"({own.kernel})" if own.name in (DEFAULT, OWN) else own.kernel
    ratio, torch_ratio = row.ratio(), row.torch_ratio
    ratios = ["" if number is None else f"{number:.3f}" for number in (ratio, torch_ratio)]
    times = (duration(own.seconds), *speed(row.problem, own.seconds), *ratios, f"{own.timing.spread:.0%}")
    text = escape(LINE.format(label, name, *times, peers))
    if ratio is None:
        return text
    return f"[red]{text}" if ratio < SLOWER else f"[green]{text}" if ratio > 1 else text


def speed(problem: Problem, seconds: float) -> tuple[str, str]:
    """Figure and unit; where they are less than one of those of a CSV, operations in smaller ones."""
    figure = problem.figure(seconds)
    small = problem.unit == "TFLOP/s" and figure < 1.0
    return (f"{figure * 1e3:.1f}", "GFLOP/s") if small else (f"{figure:.1f}", problem.unit)


def told(peer: Entry) -> str:
    return f"{peer.name}={duration(peer.seconds)}" if peer.seconds is not None else f"{peer.name}=no"
