"""A suite as a picture: operations per second, ours beside the peer, one panel per dtype. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sdpa.bench.run import Row

BAR = 0.4
INCHES_PER_CELL = 0.34
PANEL_HEIGHT = 3.6


def plot(path: Path, suite: str, rows: Sequence[Row]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    timed = [row for row in rows if row.ours and row.peer]
    dtypes = list(dict.fromkeys(row.problem.dtype for row in timed))
    if not dtypes:
        raise ValueError(f"suite {suite} has no timed cell to plot")
    widest = max(sum(row.problem.dtype == dtype for row in timed) for dtype in dtypes)
    size = (max(7.0, widest * INCHES_PER_CELL), PANEL_HEIGHT * len(dtypes))
    figure, axes = pyplot.subplots(len(dtypes), 1, figsize=size, squeeze=False, layout="constrained")
    for axis, dtype in zip(axes[:, 0], dtypes, strict=True):
        draw_panel(axis, dtype, [row for row in timed if row.problem.dtype == dtype])
    figure.suptitle(f"{suite}: attention in GFLOP/s, higher is better")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def draw_panel(axis, dtype: str, rows: Sequence[Row]) -> None:
    """A pair of bars per problem, and above it how many times faster ours is."""
    places = range(len(rows))
    ours = [row.problem.flops() / row.ours.minimum * 1e-9 for row in rows]
    peer = [row.problem.flops() / row.peer.minimum * 1e-9 for row in rows]
    axis.bar([x - BAR / 2 for x in places], ours, BAR, label="sdpa", color="#2a7f62")
    axis.bar([x + BAR / 2 for x in places], peer, BAR, label="torch", color="#b8b8b8")
    for x, row in zip(places, rows, strict=True):
        axis.text(x, max(ours[x], peer[x]), f"{row.ratio:.1f}x", ha="center", va="bottom", fontsize=6)
    axis.set_xticks(list(places), [label(row) for row in rows], rotation=90, fontsize=6)
    axis.set_ylabel("GFLOP/s")
    axis.set_title(dtype, fontsize=9)
    axis.legend(fontsize=7)
    axis.margins(x=0.01)


def label(row: Row) -> str:
    return row.problem.label.removeprefix(f"{row.problem.dtype} ")
