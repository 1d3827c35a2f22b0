"""The page of a race: what it says, that the committed ones are not stale, and how a browser shows it."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from browser import COLORS, FAULTS, hexadecimal

from helpers import some_rows
from sdpa.bench import race, race_chart, race_pages, race_part, race_style, record
from sdpa.bench.contest import Entry
from sdpa.bench.race import Source
from sdpa.bench.race_page import page

FOLDER = race_pages.ROOT / race_pages.FOLDER
PAGES = sorted(FOLDER.glob("*.html"))
LARGEST = 400_000  # bytes of a committed page
CONTRAST = 4.5  # of text, by WCAG 2.2 AA
VOID = {"meta", "link", "br", "rect", "path"}
HEADER = {
    "date": "2030-01-02T03:04:05+00:00", "device": "nvidia_h200", "description": "NVIDIA H200", "threads": 8,
    "versions": {"python": "3.12", "torch": "2.11.0"}, "command": "sdpa bench --suite gpu-forward",
    "driver": {"driver": "580.1", "sm_clock": "1980"},
}  # fmt: skip


def source(*rows, header=HEADER, file="rows.csv") -> Source:
    """What a CSV of these rows would hold."""
    records = [record.as_record(row, header["date"]) for row in rows]
    return Source(file, record.header_lines(header), records)


def slowed(row, factor: float):
    """Our time as a multiple of the best peer's."""
    return replace(row, own=replace(row.own, seconds=row.best().seconds * factor))


class Tags(HTMLParser):
    """The elements of a page, and the text of each; fails where they are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[tuple[str, dict[str, str | None]]] = []
        self.found: list[tuple[str, dict[str, str | None], tuple[str, ...]]] = []
        self.texts: Counter[str] = Counter()
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes), tuple(name for name, _ in self.open)))
        if tag not in VOID:
            self.open.append((tag, dict(attributes)))
        elif tag in ("rect", "path"):
            assert self.get_starttag_text().endswith("/>")

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        self.texts[data.strip()] += 1

    def all(self, *names):
        return [attributes for tag, attributes, _ in self.found if tag in names]


# the committed pages


def test_committed_pages_are_what_make_pages_writes():
    made = race_pages.made()
    assert {path.name for path in FOLDER.iterdir()} == set(made)
    for name, text in made.items():
        assert (FOLDER / name).read_text(encoding="utf-8") == text, f"{race_pages.FOLDER}/{name} is stale: make pages"


def test_every_page_has_its_row_in_the_index():
    index = (FOLDER / race_pages.INDEX).read_text()
    assert PAGES and all(f"]({path.name})" in index for path in PAGES)
    known = Path(record.__file__).parent / "results"
    assert {name for tables in race_pages.PAGES.values() for name in tables} == {p.stem for p in known.glob("*.csv")}


def test_a_committed_page_is_what_its_command_writes(monkeypatch, tmp_path):
    pytest.importorskip("click")
    from click.testing import CliRunner

    from sdpa.cli.app import app

    monkeypatch.chdir(race_pages.ROOT)
    text = (FOLDER / "nvidia_h100.html").read_text()
    (command,) = re.findall(r"<code>(sdpa bench --race .*?)</code>", text)
    monkeypatch.setattr("sys.argv", command.split())
    out = tmp_path / "page.html"
    arguments = [str(out) if word.endswith(".html") else word for word in command.split()[1:]]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert out.read_text() == text


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_needs_nothing_else_and_is_accessible(path):
    text = path.read_text()
    assert len(text.encode()) <= LARGEST
    assert "://" not in text and "@import" not in text and "url(" not in text
    tags = Tags(text)
    assert not tags.all("script", "img", "iframe", "object", "embed")
    ids = Counter(attributes["id"] for _, attributes, _ in tags.found if "id" in attributes)
    assert max(ids.values()) == 1
    targets = [attributes["href"] for attributes in tags.all("a", "link")]
    assert all(href == "data:," or href.removeprefix("#") in ids for href in targets)
    levels = [int(tag[1]) for tag, _, _ in tags.found if re.fullmatch(r"h[1-6]", tag)]
    assert levels.count(1) == 1 and levels[0] == 1 and all(b <= a + 1 for a, b in pairwise(levels))
    assert all(attributes.get("scope") for attributes in tags.all("th"))
    assert len(tags.all("caption")) == len(tags.all("table")) > 2
    assert all("aria-hidden" in a or (a["role"] == "img" and len(a["aria-label"]) > 40) for a in tags.all("svg"))
    assert all("tabindex" in a for a in tags.all("div", "figure") if a.get("class") == "wide")
    assert all("div" in parents for tag, _, parents in tags.found if tag == "table")


def test_pages_name_every_problem_and_every_reason():
    for name, tables in race_pages.PAGES.items():
        told = Tags((FOLDER / f"{name}.html").read_text())
        for table in tables:
            for row in record.read(race_pages.ROOT / race_pages.RESULTS / f"{table}.csv")[1]:
                assert row["problem"] in told.texts
                for who, reason in (*record.unpaired(row["refused"]).items(), ("ours", row["note"])):
                    assert not reason or reason in told.texts or f"{who}: {reason}" in told.texts, (name, reason)


# what a page says


def test_standings_are_what_the_last_line_says():
    rows = [slowed(row, 0.855 + number / 100) for number, row in enumerate(some_rows(kernel="default"))]
    (standing,) = race.standings_of(race.sections_of([source(*rows)]))
    last = record.summary("gpu-forward", "default", rows)
    mean, worst = record.geomean(standing.ratios), min(standing.ratios)
    assert f"cells={len(standing.ratios)} geomean={mean:.3f} worst={worst:.3f}" in last
    text = page([source(*rows)], "sdpa bench")
    slow = sum(row.ratio() < 1 for row in rows)
    assert 0 < slow < len(rows)
    assert f"In {len(rows)} cells the default choice has {mean:.3f} times the best peer's speed" in text
    assert f"{slow} of them are slower than the best peer." in text
    table = text.split("<h2>Slower than the best peer</h2>")[1].split("</table>")[0]
    named = re.findall(r'<th scope="row">(.*?)</th>', table)
    assert named == [row.problem.label for row in sorted(rows, key=lambda row: row.ratio()) if row.ratio() < 1]


def test_where_nothing_is_slower_it_says_so():
    text = page([source(*some_rows(kernel="default", few=3))], "")
    assert "None is slower than the best peer." in text and "<p>No cell is.</p>" in text
    unmatched = [replace(row, peers=()) for row in some_rows(kernel="default", few=2)]
    assert "times the best peer's speed" not in page([source(*unmatched)], "")


def test_kernels_by_name_stand_where_the_default_was_not_measured():
    named, default = some_rows(few=2), some_rows(kernel="default", few=2)
    alone = race.standings_of(race.sections_of([source(*named)]))
    both = race.standings_of(race.sections_of([source(*named, *default)]))
    assert [s.asked for s in alone] == ["triton_flash"] and [s.asked for s in both] == ["default"]
    assert [row["asked"] for row in both[0].part.contests[0].rows] == ["default", "triton_flash"]
    text = page([source(*named)], "")
    assert "kernels asked for by name have" in text and "the default choice has" not in text
    assert "our kernel, by name" in text and "asked for</th>" not in text
    assert 'rowspan="2">bfloat16' in page([source(*named, *default)], "")


def test_runs_are_not_mixed():
    """Peers are timed anew in each run, so that a ratio is of one run."""
    later = HEADER | {"date": "2030-01-03T00:00:00+00:00", "command": "sdpa bench --suite gpu-mask"}
    rows = some_rows(kernel="default", few=2)
    first, second = source(*rows), source(*(slowed(row, 2) for row in rows), header=later, file="later.csv")
    sections = race.sections_of([second, first])
    assert [section.run.date for section in sections] == [HEADER["date"], later["date"]]
    merged = Source("", [*first.comments, *second.comments], [*first.records, *second.records])
    assert [(s.run, s.records) for s in race.sections_of([merged])] == [(s.run, s.records) for s in sections]
    text = page([second, first], "sdpa bench --race")
    for told in (HEADER["command"], later["command"], "driver 580.1, sm_clock 1980", "torch 2.11.0", "later.csv"):
        assert f">{told}<" in text or told in text
    assert text.count("<dl>") == 2


def test_directions_are_apart():
    rows = [*some_rows("gpu-mask", "default"), *some_rows("gpu-small-training", "default", 2)]
    sections = race.sections_of([source(*rows)])
    assert [(s.suite, [part.direction for part in s.parts]) for s in sections] == [
        ("gpu-mask", ["forward", "backward"]), ("gpu-small-training", ["training step"]),
    ]  # fmt: skip
    assert race.direction_of("float32 1,2,9,8 none backward+deterministic") == "backward, deterministic"


def test_two_devices_are_refused():
    other = HEADER | {"description": "NVIDIA H100", "device": "nvidia_h100"}
    rows = some_rows(few=1)
    with pytest.raises(ValueError, match=r"expected rows of one device, got NVIDIA H200 .* and NVIDIA H100"):
        race.sections_of([source(*rows), source(*rows, header=other)])


def test_reasons_unfold_and_what_they_say_is_text():
    long = "expected <b>scores</b> below 8 GB & got " + "more " * 40
    row = some_rows(few=1)[0]
    row = replace(row, own=Entry("default", reason=long, failed=True), peers=(Entry("flex", reason=long), *row.peers))
    tags = Tags(page([source(row)], "sdpa bench --only '<i>'"))
    assert not tags.all("b", "i") and len(tags.all("details")) == 2
    assert tags.texts[long.strip()] == 2
    assert any(text.startswith("flex: expected <b>scores</b>") and text.endswith("...") for text in tags.texts)
    assert tags.texts["math: expected scores below 8 GB, got 9"] == 1  # short: at once


def test_a_ratio_below_one_never_reads_as_one():
    assert race_part.ratio_cell(0.99996) == '<td class="slow">1</td>' or "0.99996" in race_part.ratio_cell(0.99996)
    assert (
        race_part.ratio_cell(0.9996) == '<td class="slow">0.9996</td>' and race_part.ratio_cell(1.0) == "<td>1.000</td>"
    )
    assert (race_part.digits("6"), race_part.digits("0.0020012"), race_part.digits("1234.4")) == (
        "6.000",
        "0.002001",
        "1234",
    )


# charts and colours


def test_ticks_are_round_and_reach_the_highest_bar():
    for most, ticks in ((683, [0, 200, 400, 600, 800]), (5.0, [0, 1, 2, 3, 4, 5]), (0.13, [0, 0.05, 0.1, 0.15])):
        assert race_chart.ticks_to(most) == pytest.approx(ticks)


def test_bars_are_as_high_as_their_figures():
    groups = [("512", {"ours": 100.0, "torch": 50.0}), ("1024", {"ours": 25.0})]
    text = race_chart.chart("forward", "TFLOP/s", groups, {"ours": 0, "torch": 7, "absent": 8})
    paths = dict(re.findall(r'<path class="k(\d)" d="(.*?)"', text))
    heights = {kind: [int(height) for height in re.findall(r"v-(\d+)", path)] for kind, path in paths.items()}
    full = race_chart.HEIGHT
    assert heights == {"0": [full, round(full / 4)], "7": [full // 2]}
    assert "Of 2 problems the fastest is ours in 2." in text
    host = race_chart.chart("forward", "us", groups[:1], {"ours": 0, "torch": 7})
    assert "lower is better. Of 1 problem the fastest is torch in 1." in host


def luminance(color: str) -> float:
    parts = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [race_style.LIGHT, race_style.DARK], ids=["light", "dark"])
def test_text_is_readable(scheme):
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    for name in ("text", "faint", "slow", "link"):
        assert contrast(scheme[name], scheme["page"]) >= CONTRAST, name


# in a browser


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_in_a_browser(browser, path, scheme, width):
    browser.open(path, width, scheme)
    assert browser.requests == [path.resolve().as_uri()] and browser.messages == []
    assert browser.evaluate(FAULTS) == []
    behind = hexadecimal(browser.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert behind == getattr(race_style, scheme.upper())["page"]
    colors = [hexadecimal(color) for color in browser.evaluate(COLORS)]
    assert len(colors) >= 3 and all(contrast(color, behind) >= CONTRAST for color in colors), colors


def test_a_browser_notices_what_is_wrong(browser, tmp_path):
    bad = tmp_path / "bad.html"
    bad.write_text(
        '<body><img src="picture.png"><script>console.error("wrong")</script><p style="width: 3000px">wide</p>'
        '<svg role="img" aria-label="small" width="9" height="9"></svg><svg role="img" width="99" height="150">'
        '<text x="9" y="50">one text</text><text x="12" y="52">another text that is long</text></svg>'
    )
    browser.open(bad, 400, "light")
    assert any(url.endswith("picture.png") for url in browser.requests)
    assert any("wrong" in message for message in browser.messages)
    faults = "\n".join(browser.evaluate(FAULTS))
    for fault in ("the page is", "no size: small", "leaves", "one text lies on another"):
        assert fault in faults
