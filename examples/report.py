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
FAR_APART = 2.0  # quartiles of a run, whose steps all do the same work


class Report(NamedTuple):
    name: str
    losses: list[float]
    seconds: list[float]  # of each step
    tokens: int  # of each step
    attention: float  # its share of a step

    @property
    def step(self) -> float:
        return statistics.median(self.seconds)

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.step

    @property
    def quartiles(self) -> tuple[float, float]:
        """Of the speed, the slower first."""
        if len(self.seconds) == 1:
            return self.speed, self.speed
        fast, _, slow = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return self.tokens / slow, self.tokens / fast


def show(reports: list[Report], explanation: str, title: str, path: Path) -> None:
    """Prints the results and writes the picture, which the last line names."""
    Console().print(result_table(reports))
    for warning in warnings(reports):
        print(warning)
    ours = reports[-1]
    for other in reports[:-1]:
        distance = max(abs(x - y) for x, y in zip(ours.losses, other.losses, strict=True))
        print(f"largest distance of the losses, {ours.name} to {other.name}: {distance:.1e}")
    print(f"\nWhich kernel ran, and why not another:\n\n{explanation}\n")
    draw(reports, title, path)
    print(f"the picture: {path.resolve()}")


def warnings(reports: list[Report]) -> list[str]:
    """A sentence for each run whose speed changed while it was measured."""
    apart = [(report.name, report.quartiles[1] / report.quartiles[0]) for report in reports]
    return [
        f"warning: the quartiles of {name} are {times:.1f} times apart, so something else ran on this machine, and the "
        "speeds may be off"
        for name, times in apart
        if times > FAR_APART
    ]


def result_table(reports: list[Report]) -> Table:
    title = f"{len(reports[0].losses)} steps of {reports[0].tokens} tokens each"
    table = Table(title=title, title_justify="left")
    for column in ("attention", "tokens/s", "quartiles", "to torch", "in attention", "loss"):
        table.add_column(column, justify="left" if column == "attention" else "right", no_wrap=True)
    torch_speed = next(report.speed for report in reports if report.name == "torch")
    for report in reports:
        slow, fast = report.quartiles
        table.add_row(
            report.name,
            f"{report.speed:,.0f}",
            f"{slow:,.0f}-{fast:,.0f}",
            f"{report.speed / torch_speed:.2f} x",
            f"{report.attention:.0%}",
            f"{report.losses[-1]:.4f}",
        )
    return table


def draw(reports: list[Report], title: str, path: Path) -> None:
    figure, (curves, bars) = plt.subplots(1, 2, figsize=(12, 5), width_ratios=(3, 2), layout="constrained")
    for report, width, colour in zip(reports, WIDTHS, COLOURS, strict=True):
        curves.plot(report.losses, label=report.name, linewidth=width, color=colour)
    curves.set(title="Loss", xlabel="step", ylabel="cross entropy of the next byte")
    curves.legend(title="attention")
    below = [report.speed - report.quartiles[0] for report in reports]
    above = [report.quartiles[1] - report.speed for report in reports]
    names, speeds = [report.name for report in reports], [report.speed for report in reports]
    drawn = bars.bar(names, speeds, yerr=(below, above), capsize=4, color=COLOURS)
    bars.bar_label(drawn, fmt="{:,.0f}", padding=4)
    bars.margins(y=0.1)
    bars.set(title="Training speed, median and quartiles", ylabel="tokens per second")
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=120, format="png")
    plt.close(figure)
