"""A panel of a suite as inline SVG: groups of bars, a class per contestant. It needs no package and no script."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import NamedTuple

from sdpa.bench.plots import Group

# Pixels. A panel stands at its own size, so that its text is as large on a phone as on a wide screen.
BAR = 8
GAP = 14
HEIGHT = 150  # of the bars
LEFT, TOP, RIGHT = 46, 8, 4
LINE = 13  # of a label's text
LETTER = 6.4  # a digit of 11 pixels
TICKS = 5  # at most
STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)  # round numbers between ticks, times a power of ten


class Layout(NamedTuple):
    """A panel's contestants in their order, the labels below its groups as lines, and its sizes."""

    here: list[str]
    labels: list[list[str]]
    step: int  # from a group to the next
    width: int
    height: int


def layout(groups: Sequence[Group], kinds: Iterable[str]) -> Layout:
    here = [name for name in kinds if any(name in bars for _, bars in groups)]
    labels = [place.split("\n") for place, _ in groups]
    longest = max(len(line) for lines in labels for line in lines)
    step = GAP + max(BAR * len(here), math.ceil(LETTER * longest))
    height = TOP + HEIGHT + LINE * max(map(len, labels)) + 6
    return Layout(here, labels, step, LEFT + step * len(groups) + RIGHT, height)


def chart(title: str, unit: str, groups: Sequence[Group], kinds: Mapping[str, int]) -> str:
    """`kinds` numbers all contestants of the page's part in their order: bars have the class of that number."""
    here, labels, step, width, height = layout(groups, kinds)
    ticks = ticks_to(max(figure for _, bars in groups for figure in bars.values()))
    middles = [LEFT + step * (number + 0.5) for number in range(len(groups))]
    parts = [axis(ticks, width)]
    for place, name in enumerate(here):
        left = BAR * (place - len(here) / 2)
        shares = [bars.get(name, 0.0) / ticks[-1] for _, bars in groups]
        drawn = (bar(x + left, share) for x, share in zip(middles, shares, strict=True) if share)
        parts.append(f'<path class="k{kinds[name]}" d="{"".join(drawn)}"/>')
    parts += [text(middle, TOP + HEIGHT + 2, lines) for middle, lines in zip(middles, labels, strict=True)]
    told = escape(described(title, unit, groups, here))
    return (
        f'<svg role="img" aria-label="{told}" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
        f"{''.join(parts)}</svg>"
    )


def ticks_to(most: float) -> list[float]:
    """Round numbers from 0 to the first that is not below `most`."""
    if most <= 0:
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(most / TICKS))
    step = next(power * factor for factor in STEPS if power * factor * TICKS >= most)
    return [step * number for number in range(math.ceil(most / step - 1e-9) + 1)]


def axis(ticks: Sequence[float], width: int) -> str:
    """Lines across the panel, with their figures on the left."""
    heights = [TOP + HEIGHT * (1 - tick / ticks[-1]) for tick in ticks]
    lines = "".join(f"M{LEFT} {round(y) + 0.5}H{width}" for y in heights)
    places = zip(ticks, heights, strict=True)
    figures = (f'<text x="{LEFT - 5}" y="{y + 4:.0f}">{tick:.4g}</text>' for tick, y in places)
    return f'<path class="grid" d="{lines}"/><g class="ticks">{"".join(figures)}</g>'


def bar(x: float, share: float) -> str:
    """A part of a path, from the base line up."""
    height = round(HEIGHT * share)
    return f"M{x:g} {TOP + HEIGHT}v-{height}h{BAR}v{height}z"


def text(x: float, y: float, lines: Sequence[str]) -> str:
    return "".join(f'<text x="{x:g}" y="{y + LINE * row}">{escape(line)}</text>' for row, line in enumerate(lines, 1))


def described(title: str, unit: str, groups: Sequence[Group], here: Sequence[str]) -> str:
    """The panel for those who do not see it: who wins how often. The table has the figures."""
    lower = unit == "us"
    best = min if lower else max
    wins = dict.fromkeys(here, 0)
    for _, bars in groups:
        wins[best(bars, key=lambda name: bars[name])] += 1
    won = ", ".join(f"{name} in {count}" for name, count in wins.items() if count)
    problems = f"{len(groups)} problem{'s' * (len(groups) != 1)}"
    return f"{title}: bars in {unit}, {'lower' if lower else 'higher'} is better. Of {problems} the fastest is {won}."
