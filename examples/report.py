"""What the demo shows at its end: a table, the choice of kernels explained, and a picture."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import NamedTuple

import matplotlib
from rich.console import Console
from rich.table import Table

matplotlib.use("Agg")  # a file, also where there is no screen
from matplotlib import pyplot as plt

# Widest first: the curves lie on each other, and each must be seen below the next.
WIDTHS = (7.0, 3.5, 1.2)
COLOURS = ("#f2b880", "#4c9f9f", "#1d1d1d")


class Report(NamedTuple):
    name: str
    losses: list[float]
    speeds: list[float]  # tokens per second of each step
    attention_seconds: float  # of each step

    @property
    def speed(self) -> float:
        return statistics.median(self.speeds)


def show(reports: list[Report], tokens: int, explanation: str, title: str, path: Path) -> None:
    """Prints the results and writes the picture, whose path is the last line."""
    console = Console()
    console.print(result_table(reports, tokens))
    for report in reports[:-1]:
        console.print(
            f"largest distance of the losses, {reports[-1].name} to {report.name}: {distance(report, reports[-1]):.1e}"
        )
    print(f"\nWhich kernel ran, and why not another:\n\n{explanation}\n")
    draw(reports, title, path)
    print(path.resolve())


def distance(a: Report, b: Report) -> float:
    return max(abs(x - y) for x, y in zip(a.losses, b.losses, strict=True))


def result_table(reports: list[Report], tokens: int) -> Table:
    table = Table(title=f"{len(reports[0].losses)} steps of {tokens} tokens each", title_justify="left")
    for column in ("attention", "tokens/s", "quartiles", "to torch", "in attention", "final loss"):
        table.add_column(column, justify="left" if column == "attention" else "right")
    torch_speed = next(r.speed for r in reports if r.name == "torch")
    for report in reports:
        low, high = quartiles(report.speeds)
        share = report.attention_seconds * report.speed / tokens
        table.add_row(
            report.name,
            f"{report.speed:,.0f}",
            f"{low:,.0f} to {high:,.0f}",
            f"{report.speed / torch_speed:.2f} x",
            f"{share:.0%}",
            f"{report.losses[-1]:.4f}",
        )
    return table


def quartiles(values: list[float]) -> tuple[float, float]:
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def draw(reports: list[Report], title: str, path: Path) -> None:
    figure, (curves, bars) = plt.subplots(1, 2, figsize=(12, 5), width_ratios=(3, 2), layout="constrained")
    for report, width, colour in zip(reports, WIDTHS, COLOURS, strict=True):
        curves.plot(report.losses, label=report.name, linewidth=width, color=colour)
    curves.set(title="Loss: the curves coincide", xlabel="step", ylabel="cross entropy of the next byte")
    curves.legend(title="attention")
    speeds = [r.speed for r in reports]
    spread = [(s - quartiles(r.speeds)[0], quartiles(r.speeds)[1] - s) for s, r in zip(speeds, reports, strict=True)]
    drawn = bars.bar([r.name for r in reports], speeds, yerr=list(zip(*spread, strict=True)), capsize=4, color=COLOURS)
    bars.bar_label(drawn, fmt="{:,.0f}", padding=4)
    bars.set(title="Training speed, median and quartiles", ylabel="tokens per second")
    figure.suptitle(title, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
