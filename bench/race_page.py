"""A race as a page of HTML that needs nothing else: standings, what is slower, and how to repeat it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import NamedTuple

from sdpa.bench.contest import DEFAULT
from sdpa.bench.plots import Panels, contestants, panels_of
from sdpa.bench.race import Section, Source, Standing, overall, sections_of, slower_rows, standings_of
from sdpa.bench.race_part import NEW_LINE, digits, named, part_html, ratio_cell, table, text_cell
from sdpa.bench.race_style import style
from sdpa.bench.record import Record, Run, geomean, unpaired

ABOUT = (
    "The ratio is the best peer's time over ours: above 1 ours is faster. Every contestant was held against float64 "
    "before it was timed; who raised or was wrong has no time. The times of a run were taken in turns: on a GPU the "
    "median on cold caches, on a CPU the least. An error is the largest distance to float64, of the output or in a "
    "backward of the gradients."
)
HOW_TO_READ = (
    "A problem is named by its data type; by batch, heads (query heads / key heads), queries, keys where they are "
    "others, head size (of keys / of values); by its mask; and by its direction with what is special about the call."
)


class Ids(NamedTuple):
    """Numbers of sections and runs, of which their ids in the page are made."""

    sections: dict[int, int]  # by id(), as a section holds all its rows
    runs: dict[Run, int]

    def section(self, section: Section) -> str:
        return f"{escape(section.suite)}-{self.sections[id(section)]}"

    def suite_link(self, section: Section) -> str:
        return f'<a href="#{self.section(section)}">{escape(section.suite)}</a>'

    def run_link(self, run: Run) -> str:
        return f'<a href="#run-{self.runs[run]}">{when(run)}</a>'


def page(sources: Sequence[Source], command: str) -> str:
    """The whole document; `command` is what writes it again."""
    sections = sections_of(sources)
    standings = standings_of(sections)
    runs = dict.fromkeys(section.run for section in sections)
    ids = Ids({id(s): n for n, s in enumerate(sections, 1)}, {run: number for number, run in enumerate(runs, 1)})
    colors = contestants(panels_of_all(sections))
    kinds = {name: number for number, name in enumerate(colors)}
    title = f"Race on {escape(sections[0].run.device)}"
    parts = [
        f"<h1>{title}</h1>",
        *headline(standings),
        standings_table(standings, ids),
        f"<p>{ABOUT}</p>",
        *slower(standings, ids),
        f"<h2>Suites</h2>\n<p>{HOW_TO_READ}</p>",
        *(section_html(section, ids, kinds) for section in sections),
        "<h2>How to repeat it</h2>",
        *(run_html(run, number, [s.file for s in sections if s.run == run]) for run, number in ids.runs.items()),
        f"<h3>This page</h3>\n{preformatted(command)}",
    ]
    return DOCUMENT.format(title=title, style=style(colors.values()), body=NEW_LINE.join(parts))


DOCUMENT = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def panels_of_all(sections: Iterable[Section]) -> Panels:
    """For the contestants of the whole page, which have one colour each."""
    return {
        (f"{number} {title}", unit): groups
        for number, section in enumerate(sections)
        for (title, unit), groups in panels_of(section.records).items()
    }


def headline(standings: Sequence[Standing]) -> Iterator[str]:
    """The default choice first, then what was asked for by name where that was not measured."""
    default = [standing for standing in standings if standing.asked == DEFAULT]
    by_name = [standing for standing in standings if standing.asked != DEFAULT]
    for who, chosen in (("the default choice has", default), ("kernels asked for by name have", by_name)):
        known = overall(chosen)
        slow = sum(ratio < 1 for ratio in known)
        if known:
            count = f"{slow} of them {'is' if slow == 1 else 'are'}" if slow else "None is"
            cells = f"{len(known)} cell{'s' * (len(known) > 1)}"
            mean = f"In {cells} {who} {geomean(known):.3f} times the best peer's speed (geometric mean)."
            yield f"<p><strong>{mean} {count} slower than the best peer.</strong></p>"


def standings_table(standings: Sequence[Standing], ids: Ids) -> str:
    titles = ["suite", "direction", "ours", "geomean", "worst", "slower", "cells", "geomean<small>torch alone</small>"]
    caption = "Our speed over the best peer's, by suite and direction; torch alone: over the best of its backends"
    rows = (standing_row(standing, ids) for standing in standings)
    return table(caption, [*titles, "measured", "peers"], ["<tbody>", *rows, "</tbody>"], (0, 1, 2, 8, 9))


def standing_row(standing: Standing, ids: Ids) -> str:
    section, part, ratios = standing.section, standing.part, standing.ratios
    first = f"{text_cell(part.direction)}{text_cell(named(standing.asked))}"
    cells = f"{len(ratios)} of {len(standing.rows)}" if len(ratios) < len(standing.rows) else str(len(ratios))
    figures = f"{ratio_cell(geomean(ratios))}{ratio_cell(min(ratios, default=math.nan))}"
    counts = (
        f"<td>{sum(ratio < 1 for ratio in ratios)}</td><td>{cells}</td>{ratio_cell(geomean(standing.torch_ratios))}"
    )
    last = f"{text_cell(ids.run_link(section.run))}{text_cell(escape(', '.join(part.peers)))}"
    return f'<tr><th scope="row">{ids.suite_link(section)}</th>{first}{figures}{counts}{last}</tr>'


def when(run: Run) -> str:
    """Date and minute, in UTC."""
    return escape(run.date[:16].replace("T", " "))


def slower(standings: Sequence[Standing], ids: Ids) -> Iterator[str]:
    """Every cell that is slower than the best peer, with nothing left out."""
    rows = slower_rows(standings)
    yield "<h2>Slower than the best peer</h2>"
    if not rows:
        yield "<p>No cell is.</p>"
        return
    titles = ("problem", "suite", "our kernel", "ratio", "ours, ms", "best peer, ms")
    caption = f"{len(rows)} of {len(overall(standings))} cells, the slowest first"
    yield table(caption, titles, ["<tbody>", *(slower_row(*pair, ids) for pair in rows), "</tbody>"], range(3))


def slower_row(section: Section, row: Record, ids: Ids) -> str:
    head = f'<th scope="row">{escape(row["problem"])}</th>'
    suite = text_cell(f"{ids.suite_link(section)}, {when(section.run)}")
    best = f"{escape(row['best_peer'])} {digits(unpaired(row['peers'])[row['best_peer']])}"
    figures = f"{ratio_cell(float(row['ratio']))}<td>{digits(row['ms'])}</td><td>{best}</td>"
    return f"<tr>{head}{suite}{text_cell(escape(row['kernel']))}{figures}</tr>"


def section_html(section: Section, ids: Ids, kinds: Mapping[str, int]) -> str:
    name, place = f"{section.suite}, {when(section.run)}", ids.sections[id(section)]
    head = f'<h3 id="{ids.section(section)}">{escape(section.suite)}, {ids.run_link(section.run)}</h3>'
    parts = (part_html(name, part, f"n{place}.{number}", kinds) for number, part in enumerate(section.parts, 1))
    return NEW_LINE.join((head, *parts))


def run_html(run: Run, number: int, files: Iterable[str]) -> str:
    conditions = "driver, clocks in MHz" if "clock" in run.conditions else "conditions"
    facts = {"device": run.device, conditions: run.conditions, "versions": run.versions}
    facts["rows"] = ", ".join(dict.fromkeys(file for file in files if file))
    items = "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in facts.items() if text)
    head = f'<h3 id="run-{number}">Run of {when(run)} UTC</h3>'
    remarks = preformatted(NEW_LINE.join(run.remarks))
    unfolded = f"<details><summary>Last lines</summary>{remarks}</details>" if remarks else ""
    return NEW_LINE.join(filter(None, (head, f"<dl>{items}</dl>", preformatted(run.command), unfolded)))


def preformatted(text: str) -> str:
    return f"<pre><code>{escape(text)}</code></pre>" if text else ""
