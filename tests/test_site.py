"""The built site of the documentation, as `make docs` leaves it in build/site: what a newcomer looks for is near the
front page, and a browser shows its pages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).resolve().parent.parent
SITE, FRONT = ROOT / "build" / "site", "index.html"
SHOWN = (FRONT, "performance.html", "support.html", "guide/masks.html")
# Questions of a newcomer: the page with the answer, and the title that stands above it.
WANTED = {
    "install": ("guide/install.html", "Install"),
    "a first call": ("guide/quick_start.html", "Quick start"),
    "why it was refused": ("guide/troubleshooting.html", "It was refused, or another kernel ran"),
    "masks": ("guide/masks.html", "Masks"),
    "layers": ("guide/layers.html", "Transformer layers"),
    "charts": ("performance.html", "Performance"),
    "what a kernel takes": ("support.html", "Support matrix"),
}
CLICKS = 2
# Pictures that do not load, those below the window among them, and those without words for who does not see them.
PICTURES = """(async () => {
  const faults = [];
  for (const image of document.images) {
    image.loading = 'eager';
    try { await image.decode(); } catch { faults.push(`not loaded: ${image.src}`); }
    if (!image.alt) faults.push(`no words: ${image.src}`);
  }
  return faults;
})()"""
SIDEWAYS = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


def newest_source() -> float:
    return max(path.stat().st_mtime for path in (ROOT / "mkdocs.yml", *(ROOT / "docs").rglob("*")))


@pytest.fixture(autouse=True)
def built():
    front = SITE / FRONT
    if not front.exists() or front.stat().st_mtime < newest_source():
        pytest.skip("build/site is not there, or older than docs/: make docs")


class Article(HTMLParser):
    """What a page itself says and links to: without the menus beside it, in which every page has every other."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.depth, self.targets, self.text = 0, [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.depth += tag == "article"
        href = dict(attributes).get("href")
        if tag == "a" and href and self.depth:
            self.targets.append(href)

    def handle_endtag(self, tag):
        self.depth -= tag == "article"

    def handle_data(self, data):
        self.text += data * bool(self.depth)


def article(page: str) -> Article:
    return Article((SITE / page).read_text(encoding="utf-8"))


def pages_of(page: str) -> Iterator[str]:
    """Pages of the site that a page links to."""
    for href in article(page).targets:
        parts = urlsplit(href)
        if parts.path.endswith(".html") and not parts.netloc:
            target = (SITE / page).parent / unquote(parts.path)
            yield target.resolve().relative_to(SITE.resolve()).as_posix()


def clicks_from_the_front() -> dict[str, int]:
    """How many links lead to each page that is near enough."""
    found, here = {FRONT: 0}, [FRONT]
    for click in range(1, CLICKS + 1):
        here = [target for page in here for target in pages_of(page) if target not in found]
        found |= dict.fromkeys(here, click)
    return found


@pytest.mark.parametrize("question", WANTED)
def test_what_a_newcomer_looks_for_is_two_clicks_away(question):
    page, title = WANTED[question]
    assert page in clicks_from_the_front() and title in article(page).text


def test_menus_do_not_count():
    inside = Article(
        '<nav><a href="menu.html">m</a></nav><article>said <a href="told.html">t</a></article><a href="foot.html">'
    )
    assert inside.targets == ["told.html"] and inside.text == "said t"


@pytest.mark.parametrize("page", SHOWN)
@pytest.mark.parametrize("width", [1280, 400])
def test_in_a_browser(browser, page, width):
    for scheme in ("light", "dark"):
        browser.open(SITE / page, width, scheme)
        assert browser.evaluate(PICTURES) == []
        assert browser.messages == []
        assert browser.evaluate(SIDEWAYS) <= 0
        assert all(url.startswith(("file://", "data:")) for url in browser.requests)
        behind = browser.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (max(map(int, re.findall(r"\d+", behind)[:3])) > 128) == (scheme == "light"), behind


def test_a_browser_notices_a_picture_that_is_not_there(browser, tmp_path):
    page = tmp_path / "page.html"
    page.write_text('<body><img src="absent.svg" alt="a picture"><p style="width: 3000px">wide</p>')
    browser.open(page, 400, "light")
    (fault,) = browser.evaluate(PICTURES)
    assert fault.startswith("not loaded") and fault.endswith("absent.svg")
    assert browser.messages and browser.evaluate(SIDEWAYS) > 0
