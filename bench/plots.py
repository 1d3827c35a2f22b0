"""A suite as a picture, higher is better: all contestants as FlashAttention's papers draw them, a panel per head size
and mask, the sequence lengths along it. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sdpa.bench.peers import PEERS
from sdpa.bench.problems import CALLS, DIRECTIONS, MASKS, Problem
from sdpa.bench.record import Record, problem_of, unpaired

COLUMNS = 2
PANEL = (7.5, 3.4)  # inches
GROUP_WIDTH = 0.86  # of the distance between two lengths
PEER_COLORS = {
    "torch": "#555555", "cudnn": "#76b900", "flash": "#4c72b0", "efficient": "#dd8452", "math": "#b8b8b8",
    "flex": "#937860", "fa3": "#64b5cd", "fa4": "#8172b3", "flashinfer": "#ccb974", "zentorch": "#da8bc3",
    "openvino": "#8c8c8c",
}  # fmt: skip
OUR_COLORS = ("#2a7f62", "#c44e52", "#e377c2", "#17a2a2", "#1b4d3e", "#9c2f6b")


# One group of bars: what stands below it, and the figure of each contestant.
Group = tuple[str, dict[str, float]]
# Title and unit -> groups from left to right.
Panels = dict[tuple[str, str], list[Group]]


def panel_grid(count: int, most_columns: int, panel: tuple[float, float]) -> tuple[Any, Any]:
    """(figure, axes) of so many panels of a size in inches, of which at most `most_columns` stand side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(count, most_columns)
    rows = -(-count // columns)
    size = (panel[0] * columns, panel[1] * rows)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for axis in axes.flat[count:]:
        axis.axis("off")
    return figure, axes.flat[:count]


def save_with_legend(figure: Any, axes: Any, path: Path, order: Sequence[str] | None = None) -> None:
    """One legend for all panels, its names in `order` or as they come, and the figure as a file."""
    from matplotlib import pyplot

    bars = {text: bar for axis in axes for bar, text in zip(*axis.get_legend_handles_labels(), strict=True)}
    names = [name for name in order or bars if name in bars]
    figure.legend([bars[name] for name in names], names, loc="outside lower center", ncols=len(names), fontsize=8)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def plot(path: Path, suite: str, records: Sequence[Record]) -> None:
    panels = panels_of([record for record in records if record["suite"] == suite])
    if not panels:
        raise ValueError(f"suite {suite} has no timed cell to plot")
    figure, axes = panel_grid(len(panels), COLUMNS, PANEL)
    names = contestants(panels)
    for axis, ((title, unit), groups) in zip(axes, panels.items(), strict=True):
        draw_groups(axis, names, groups)
        axis.set_title(title, fontsize=9)
        axis.set_ylabel(unit)
    figure.suptitle(suite)
    save_with_legend(figure, axes, path)


def panels_of(records: Sequence[Record]) -> Panels:
    """A panel per direction, head size and mask with the lengths along it; where that would leave a single group in
    most, a panel per direction and head size with the masks along it."""
    figures = figures_of(records)
    panels = grouped(figures, panel_title, place_of)
    if 2 * sum(len(groups) > 1 for groups in panels.values()) > len(panels):
        return panels
    return grouped(figures, lambda p: panel_title(p).split(" mask ")[0], lambda p: f"{p.mask}\n{place_of(p)}")


def figures_of(records: Sequence[Record]) -> dict[Problem, dict[str, float]]:
    """Each contestant's figure by problem, those of the same kind together and short lengths first."""
    found: dict[Problem, dict[str, float]] = {}
    for record in records:
        problem = problem_of(record)
        times = unpaired(record["peers"]) | ({our_name(record): record["ms"]} if record["ms"] else {})
        if problem is not None and times:
            found.setdefault(problem, {}).update({n: problem.figure(float(ms) * 1e-3) for n, ms in times.items()})

    def place(problem: Problem) -> tuple[Any, ...]:
        kind = (DIRECTIONS.index(problem.direction), problem.deterministic, problem.dtype)
        asked = (problem.precision != "highest", problem.D, CALLS.index(problem.call), MASKS.index(problem.mask))
        shared = (problem.H, problem.Hkv) if problem.H != problem.Hkv else (0, 0)
        return (*kind, *asked, *shared, problem.N, problem.B, problem.M, problem.H)

    return {problem: found[problem] for problem in sorted(found, key=place)}


def grouped(
    figures: dict[Problem, dict[str, float]], title: Callable[[Problem], str], place: Callable[[Problem], str]
) -> Panels:
    panels: Panels = {}
    for problem, bars in figures.items():
        panels.setdefault((title(problem), problem.unit), []).append((place(problem), bars))
    return panels


def our_name(record: Record) -> str:
    return "sdpa (default)" if record["asked"] == "default" else f"sdpa {record['kernel'] or record['asked']}"


def panel_title(problem: Problem) -> str:
    heads = f" heads {problem.H} / {problem.Hkv}" if problem.H != problem.Hkv else ""
    tf32 = " TF32" if problem.precision != "highest" else ""
    mode = " deterministic" if problem.deterministic else ""
    return f"{problem.direction}{mode} {problem.dtype}{tf32} head size {problem.D}{heads} mask {problem.mask}"


def place_of(problem: Problem) -> str:
    """Below a group of bars: the length, or batch and lengths where they differ; and how it is called."""
    sizes = str(problem.N) if problem.M == problem.N else f"B{problem.B}\n{problem.M} x {problem.N}"
    return "\n".join((sizes, *problem.manner))


def contestants(panels: Panels) -> dict[str, str]:
    """Every contestant's colour, ours first and the peers in their usual order."""
    named = dict.fromkeys(name for groups in panels.values() for _, bars in groups for name in bars)
    mine = [name for name in named if name not in PEERS]
    colors = {name: OUR_COLORS[number % len(OUR_COLORS)] for number, name in enumerate(mine)}
    return colors | {name: PEER_COLORS[name] for name in PEERS if name in named}


def draw_groups(axis: Any, names: dict[str, str], groups: Sequence[Group]) -> None:
    """A bar per contestant, its figure on top."""
    here = [name for name in names if any(name in bars for _, bars in groups)]
    width = GROUP_WIDTH / len(here)
    for number, name in enumerate(here):
        offset = (number - (len(here) - 1) / 2) * width
        places = [(x + offset, bars[name]) for x, (_, bars) in enumerate(groups) if name in bars]
        axis.bar([x for x, _ in places], [height for _, height in places], width, label=name, color=names[name])
        for x, height in places:
            axis.text(x, height, f" {height:.3g}", ha="center", va="bottom", fontsize=5, rotation=90)
    axis.set_xticks(range(len(groups)), [place for place, _ in groups], fontsize=7)
    axis.margins(y=0.12)
