"""The charts, the table and the reasons of one direction of a suite, as HTML."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping
from html import escape
from textwrap import shorten

from sdpa.bench.contest import DEFAULT
from sdpa.bench.plots import Panels, panels_of
from sdpa.bench.race import Contest, Part
from sdpa.bench.race_chart import chart
from sdpa.bench.record import Record

LONGEST_REASON = 90  # characters that are shown at once; the whole unfolds
HOST_TIME = "us"  # the unit in which a suite's figure is its time
UNITS = {HOST_TIME: "microseconds, lower is better"}
TEXT = ' class="t"'  # of a cell
SLOW = ' class="slow"'
NEW_LINE = "\n"


class Notes:
    """Reasons by number. A reason that many rows have stands once."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.numbers: dict[tuple[str, str], int] = {}

    def link(self, who: str, reason: str) -> str:
        number = self.numbers.setdefault((who, reason), len(self.numbers) + 1)
        return f'<a href="#{self.prefix}-{number}">{number}</a>'

    def html(self) -> str:
        items = (f'<li id="{self.prefix}-{n}">{told(who, reason)}</li>' for (who, reason), n in self.numbers.items())
        return f'<ol class="notes">\n{NEW_LINE.join(items)}\n</ol>' if self.numbers else ""


def told(who: str, reason: str) -> str:
    """Its beginning, which unfolds where there is more."""
    begin = shorten(reason, LONGEST_REASON, placeholder=" ...")
    if len(begin) >= len(" ".join(reason.split())):
        return escape(f"{who}: {reason}")
    return f"<details><summary>{escape(f'{who}: {begin}')}</summary>{escape(reason)}</details>"


def part_html(name: str, part: Part, number: str, kinds: Mapping[str, int]) -> str:
    """`name` is the section's, `number` makes ids unique in the page, and `kinds` numbers the contestants' colours."""
    notes = Notes(f"note-{number}")
    columns = Columns(part, notes)
    rows = [row for contest in part.contests for row in contest.rows]
    pictures = charts(panels_of(rows), kinds)
    told = (f"<h4>{part.direction}</h4>", pictures, columns.table(f"{name}, {part.direction}"), columns.absent())
    return "\n".join(filter(None, (*told, notes.html())))


def charts(panels: Panels, kinds: Mapping[str, int]) -> str:
    if not panels:
        return ""
    timed = {name for groups in panels.values() for _, bars in groups for name in bars}
    shown = {name: number for name, number in kinds.items() if name in timed}
    items = (f"<li>{swatch(number)}{escape(name)}</li>" for name, number in shown.items())
    figures = (
        f'<figure class="wide" tabindex="0"><figcaption>{escape(title)}, {UNITS.get(unit, unit)}</figcaption>'
        f"{chart(title, unit, groups, shown)}</figure>"
        for (title, unit), groups in panels.items()
    )
    return f'<ul class="legend">{"".join(items)}</ul>\n<div class="charts">\n{NEW_LINE.join(figures)}\n</div>'


def swatch(number: int) -> str:
    return f'<svg width="11" height="11" aria-hidden="true"><rect class="k{number}" width="11" height="11"/></svg>'


def scrolling(label: str, inner: str) -> str:
    """What may be wider than the window scrolls by itself, by keys too."""
    return f'<div class="wide" role="region" tabindex="0" aria-label="{escape(label)}">{inner}</div>'


def table(caption: str, titles: Iterable[str], bodies: Iterable[str], texts: Container[int]) -> str:
    """`bodies` are its rows, and `texts` the places of columns of text."""
    heads = (f'<th scope="col"{TEXT * (place in texts)}>{title}</th>' for place, title in enumerate(titles))
    inner = f"<caption>{escape(caption)}</caption>\n<thead><tr>{''.join(heads)}</tr></thead>\n{NEW_LINE.join(bodies)}"
    return scrolling(caption, f"<table>{inner}\n</table>")


class Columns:
    """Which columns a part has, and its contests in them: a row for each of our kernels."""

    def __init__(self, part: Part, notes: Notes) -> None:
        rows = [row for contest in part.contests for row in contest.rows]
        self.part, self.notes, self.peers = part, notes, part.peers
        self.by_name = all(row["asked"] == row["kernel"] for row in rows)
        self.asked = not self.by_name and any(row["asked"] != DEFAULT for row in rows)
        units = {row["unit"] for row in rows} - {HOST_TIME}
        self.speed = ["speed"] if len(units) > 1 else [*units]  # the title of its column, if there is one

    def table(self, name: str) -> str:
        kernel = "our kernel, by name" if self.by_name else "our kernel"
        titles = ["problem", *["asked for"] * self.asked, kernel, "ms", *self.speed, "ratio", "error"]
        titles += ["best peer", *(f"{escape(peer)}<small>ms, error</small>" for peer in self.peers)]
        caption = f"{name}: our time and speed, the ratio to the best peer, our error; each peer's time and error"
        return table(caption, titles, map(self.contest, self.part.contests), range(2 + self.asked))

    def contest(self, contest: Contest) -> str:
        count = len(contest.rows)
        span = f' rowspan="{count}"' * (count > 1)
        head = f'<th scope="row{"group" * (count > 1)}"{span}>{escape(contest.problem)}</th>'
        first, *others = contest.rows
        peers = "".join(f"<td{span}{self.peer(contest, name)}</td>" for name in self.peers)
        rows = [f"{head}{self.ours(first)}<td{span}>{best_peer(first)}</td>{peers}", *map(self.ours, others)]
        return f"<tbody>{''.join(f'<tr>{row}</tr>' for row in rows)}</tbody>"

    def ours(self, row: Record) -> str:
        note = self.notes.link("ours", row["note"]) if row["note"] else ""
        kernel = text_cell(named(row["asked"])) * self.asked + f"<td{TEXT}>{escape(row['kernel'])}"
        if not row["ms"]:
            return f'{kernel}</td><td colspan="{3 + len(self.speed)}">no: {note}</td>'
        unit = f" {row['unit']}" * (self.speed == ["speed"])
        speed = f"<td>{digits(row['tflops_or_gbs'])}{unit}</td>" if row["unit"] != HOST_TIME else "<td></td>"
        figures = f"<td>{digits(row['ms'])}</td>{speed * len(self.speed)}{ratio_cell(number(row['ratio']))}"
        return f"{kernel}{f' <sup>{note}</sup>' * bool(note)}</td>{figures}<td>{error(row['our_error'])}</td>"

    def peer(self, contest: Contest, name: str) -> str:
        """What follows upon the beginning of a cell."""
        if name in contest.times:
            best = ' class="best"' * (name == contest.rows[0]["best_peer"])
            return f"{best}>{digits(contest.times[name])}<small>{error(contest.errors.get(name, ''))}</small>"
        return f">no: {self.notes.link(name, contest.refused[name])}" if name in contest.refused else ">"

    def absent(self) -> str:
        """The peers that no problem of the part has a time of, each with its reasons."""
        reasons: dict[str, dict[str, None]] = {}
        for contest in self.part.contests:
            for name, reason in contest.refused.items():
                if name not in self.peers:
                    reasons.setdefault(name, {})[self.notes.link(name, reason)] = None
        told = ", ".join(f"{escape(name)} ({', '.join(links)})" for name, links in reasons.items())
        return f"<p>No time in this table: {told}.</p>" if told else ""


def best_peer(row: Record) -> str:
    figure = f" {digits(row['best_peer_value'])}" * (row["unit"] != HOST_TIME)
    return escape(row["best_peer"]) + figure if row["best_peer"] else ""


def named(asked: str) -> str:
    """What was asked of us."""
    return "default choice" if asked == DEFAULT else escape(asked)


def text_cell(text: str) -> str:
    return f"<td{TEXT}>{text}</td>"


def ratio_cell(ratio: float) -> str:
    """Below 1 it never reads as 1.000."""
    if math.isnan(ratio):
        return "<td></td>"
    told = f"{ratio:.3f}"
    return f"<td{SLOW * (ratio < 1)}>{told if ratio >= 1 or told != '1.000' else f'{ratio:.4g}'}</td>"


def number(text: str) -> float:
    return float(text) if text else math.nan


def digits(text: str) -> str:
    """Four of them, zeros at the end included."""
    return f"{float(text):#.4g}".removesuffix(".") if text else ""


def error(text: str) -> str:
    return f"{float(text):.1e}" if text else ""
