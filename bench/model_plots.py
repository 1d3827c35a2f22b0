"""The suite of whole models as a picture: tokens per second of each variant, a panel per model. Needs matplotlib.

Its bars stand as in nanoGPT's figure: attention written out, the same compiled, one fused call, the same compiled; of
the fused ones ours beside torch's.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sdpa.bench.plots import panel_grid, save_with_legend

COLUMNS = 2
COMPILED = " compiled"
PANEL = (6.0, 3.4)  # inches
TITLE_WIDTH = 80  # characters that a panel is wide
GAP = 0.7  # between stages, in widths of a bar
WRITTEN_OUT = "written out"
COLORS = {WRITTEN_OUT: "#b8b8b8", "torch": "#555555", "torch fast path": "#4c72b0", "ours": "#2a7f62"}
STAGES = (WRITTEN_OUT, f"{WRITTEN_OUT}\ncompiled", "fused", "fused\ncompiled")

Row = Mapping[str, Any]  # of the suite's JSON
Bar = tuple[float, Row]  # where it stands


def plot_models(path: Path, title: str, rows: Sequence[Row]) -> None:
    models = list(dict.fromkeys(row["model"] for row in rows))
    if not models:
        raise ValueError("there is no model to plot")
    figure, axes = panel_grid(len(models), COLUMNS, PANEL)
    for axis, model in zip(axes, models, strict=True):
        draw_model(axis, stages_of([row for row in rows if row["model"] == model]))
        axis.set_title(model, fontsize=8)
    figure.suptitle(textwrap.fill(title, TITLE_WIDTH * min(len(models), COLUMNS)), fontsize=10)
    save_with_legend(figure, axes, path, tuple(COLORS))


def stages_of(rows: Sequence[Row]) -> dict[str, list[Bar]]:
    """A model's bars by stage, from left to right: those of a stage touch."""
    stages, place = {}, 0.0
    for stage in STAGES:
        members = [row for row in rows if stage_of(row["variant"]) == stage]
        if members:
            stages[stage] = [(place + number, row) for number, row in enumerate(members)]
            place += len(members) + GAP
    return stages


def stage_of(variant: str) -> str:
    stage = WRITTEN_OUT if contestant(variant) == WRITTEN_OUT else "fused"
    return f"{stage}\ncompiled" if variant.endswith(COMPILED) else stage


def contestant(variant: str) -> str:
    return variant.removesuffix(COMPILED)


def draw_model(axis: Any, stages: Mapping[str, list[Bar]]) -> None:
    """A bar per variant; on top its figure, and how many times as fast as torch's best ours is."""
    for place, row in (bar for bars in stages.values() for bar in bars):
        name = contestant(row["variant"])
        height = row["tokens_per_s"]
        axis.bar(place, height, 1.0, label=name, color=COLORS[name], edgecolor="white")
        told = short(height) + (f"\n{row['ratio']:.2f}x" if name == "ours" else "")
        axis.text(place, height, told, ha="center", va="bottom", fontsize=7)
    centres = [(bars[0][0] + bars[-1][0]) / 2 for bars in stages.values()]
    axis.set_xticks(centres, list(stages) if len(stages) > 1 else [""], fontsize=8)
    axis.yaxis.set_major_formatter(lambda figure, _: short(figure))
    axis.set_ylabel("tokens/s")
    axis.margins(y=0.2)


def short(figure: float) -> str:
    """Three digits, thousands as k, millions as M."""
    for unit, letter in ((1e6, "M"), (1e3, "k")):
        if figure >= unit:
            return f"{figure / unit:.3g}{letter}"
    return f"{figure:.3g}"
