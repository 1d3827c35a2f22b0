"""Rows of bench/results as pictures: panels of bars side by side under a legend, a file of SVG that is readable on a
light and on a dark page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path
from typing import NamedTuple

from sdpa.bench.plots import Group
from sdpa.bench.race import direction_of
from sdpa.bench.race_chart import chart, described, layout
from sdpa.bench.race_style import DARK, DARK_BARS, LIGHT
from sdpa.bench.record import Record, Run, read, runs_of, unpaired

ROOT = Path(__file__).resolve().parent.parent
RESULTS, FOLDER = ROOT / "bench" / "results", ROOT / "docs" / "pictures"
OURS, FA4, CUDNN, FA2, TORCH = "sdpa", "FlashAttention-4", "cuDNN", "torch's FlashAttention-2", "torch"
FLEX, EFFICIENT = "FlexAttention", "torch's efficient"
COLOURS = {
    OURS: "#2563eb", FA4: "#d97706", CUDNN: "#059669", FA2: "#94a3b8", FLEX: "#7c3aed", EFFICIENT: "#db2777",
    TORCH: "#0891b2",
}  # fmt: skip
KINDS = {name: number for number, name in enumerate(COLOURS)}
PEERS = {"fa4": FA4, "cudnn": CUDNN, "flash": FA2, "flex": FLEX, "efficient": EFFICIENT, "torch": TORCH}
TITLE, LEGEND, MARGIN, GAP = 26, 20, 8, 20  # pixels: heights of a title and of a line of the legend; between panels
LETTER = 6.5  # of 12 pixels, on the average


@dataclass(frozen=True)
class Figures:
    """Rows of one CSV: a suite, by the default choice or a kernel asked for."""

    file: str
    suite: str
    direction: str = "forward"
    asked: str = "default"

    def records(self) -> list[Record]:
        wanted = (self.suite, self.direction, self.asked)
        every = ((r, (r["suite"], direction_of(r["problem"]), r["asked"])) for r in contents(self.file)[1])
        return [record for record, told in every if told == wanted]

    def run(self) -> Run:
        """Which measured them, as the first of them tells."""
        date = self.records()[0]["date"]
        return next(run for run in runs_of(contents(self.file)[0]) if run.date == date)


class Panel(NamedTuple):
    title: str
    unit: str
    groups: Sequence[Group]


@cache
def contents(file: str) -> tuple[list[str], list[Record]]:
    return read(RESULTS / f"{file}.csv")


def bars_of(records: Iterable[Record], place: Callable[[Record], str]) -> Iterator[Group]:
    """The speed of each contestant that has a colour; `place` says what stands below a problem's bars."""
    for record in records:
        own, ms = float(record["tflops_or_gbs"]), float(record["ms"])
        times = unpaired(record["peers"])
        yield place(record), {OURS: own} | {PEERS[n]: own * ms / float(time) for n, time in times.items() if n in PEERS}


def length_of(record: Record) -> str:
    """How many queries its problem has, by its label."""
    return record["problem"].split()[1].split(",")[2]


def picture(title: str, panels: Sequence[Panel]) -> str:
    shown = {
        name: number for name, number in KINDS.items() if any(name in bars for p in panels for _, bars in p.groups)
    }
    sizes = [layout(panel.groups, shown) for panel in panels]
    titles = [f"{panel.title}: {panel.unit}" for panel in panels]
    widths = [max(size.width, round(LETTER * len(told)) + MARGIN) for size, told in zip(sizes, titles, strict=True)]
    width = sum(widths) + GAP * (len(panels) - 1) + MARGIN
    marks, top = legend(shown, width)
    height = top + TITLE + max(size.height for size in sizes) + MARGIN // 2
    drawn, x = [], 0
    for panel, told, wide in zip(panels, titles, widths, strict=True):
        drawn.append(f'<text class="title" x="{x + MARGIN}" y="{top + 16}">{escape(told)}</text>')
        drawn.append(chart(*panel, shown).replace("<svg ", f'<svg x="{x}" y="{top + TITLE}" ', 1))
        x += wide + GAP
    told = " ".join(described(*p, size.here) for p, size in zip(panels, sizes, strict=True))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'role="img" aria-labelledby="title desc">',
        f'<title id="title">{escape(title)}</title><desc id="desc">{escape(told)}</desc>',
        f"<style>{style(shown)}</style>",
        f'<rect class="page" width="{width}" height="{height}" rx="4"/>',
    ]
    return "\n".join([*lines, *marks, *drawn, "</svg>\n"])


def legend(names: Iterable[str], width: int) -> tuple[list[str], int]:
    """A mark for each name, in as many lines as they need, and how high these are."""
    marks, x, y = [], MARGIN, 6
    for name in names:
        wide = 14 + round(LETTER * len(name))
        if x > MARGIN and x + wide > width:
            x, y = MARGIN, y + LEGEND
        marks.append(f'<rect class="k{KINDS[name]}" x="{x}" y="{y}" width="10" height="10"/>')
        marks.append(f'<text class="title" x="{x + 14}" y="{y + 9}">{escape(name)}</text>')
        x += wide + GAP
    return marks, y + LEGEND - 4


def style(shown: Iterable[str]) -> str:
    """The page is drawn, too: around a picture may be any colour, whatever the scheme says."""
    bars = "".join(f".k{KINDS[name]}{{fill:{COLOURS[name]}}}" for name in shown)
    return (
        f"text{{font:11px system-ui,sans-serif;fill:{LIGHT['faint']};text-anchor:middle}}.ticks text{{text-anchor:end}}"
        f".title{{font-size:12px;text-anchor:start}}.page{{fill:{LIGHT['page']}}}"
        f".grid{{stroke:{LIGHT['line']};fill:none}}{bars}@media(prefers-color-scheme:dark){{"
        f"text{{fill:{DARK['faint']}}}.page{{fill:{DARK['page']}}}.grid{{stroke:{DARK['line']}}}"
        f"[class^=k]{{filter:{DARK_BARS}}}}}"
    )
