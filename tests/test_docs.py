"""The documentation: its examples run, its generated pages are current, its sentences are short, every name has a
place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import sdpa
import sdpa.nn
from sdpa.bench import front, mask_pictures, performance_page, support
from sdpa.dispatch.catalog import by_name

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
GUIDES = sorted((DOCS / "guide").glob("*.md"))
READ_BY_USERS = [ROOT / "README.md", DOCS / "index.md", DOCS / "transformers.md", *GUIDES]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
FENCED = re.compile(r"^```.*?^```$", re.M | re.S)
TOO_MANY_WORDS, TOO_MANY_LINES = 40, 6


def title(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(autouse=True)
def as_before():
    """A page's examples begin alike and leave nothing behind."""
    torch.manual_seed(0)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("page", [page for page in READ_BY_USERS if BLOCK.search(page.read_text())], ids=title)
def test_examples_run(page, tmp_path, monkeypatch):
    """One after the other, as a reader would type them; a traceback names the page's own line."""
    monkeypatch.setenv("SDPA_TUNING_DIR", str(tmp_path))  # where sdpa.autotune writes
    text = page.read_text()
    names: dict[str, object] = {"__name__": page.stem}
    for block in BLOCK.finditer(text):
        line = text.count("\n", 0, block.start(1))
        exec(compile("\n" * line + block[1], str(page), "exec"), names)


def test_the_first_example_says_who_ran(capsys):
    names: dict[str, object] = {}
    for block in list(BLOCK.finditer((ROOT / "README.md").read_text()))[:1]:
        exec(block[1], names)
    said = capsys.readouterr().out
    assert said.split("\n", 1)[0] in by_name() and "refused" in said


def test_the_support_matrix_is_the_catalogs():
    assert support.PAGE.read_text() == support.page(), "python -m sdpa.bench.support"


def test_the_support_matrix_tells_kernels_apart():
    """What a few cells have to say, whatever the generator does."""
    found = support.page()
    hopper = found[found.index("## NVIDIA Hopper") : found.index("## NVIDIA Ampere")]
    named = next(line for line in hopper.splitlines() if "`cuda_flash`" in line).strip("| ").split(" | ")
    at = {name.strip("`"): place for place, name in enumerate(named)}
    lines = {line.strip("| ").split(" | ")[0]: line.strip("| ").split(" | ")[1:] for line in hopper.splitlines()}
    assert lines["window"][at["cuda_flash"]] == "yes" and lines["window"][at["vendor_cudnn"]] == "-"
    assert lines["ALiBi"][at["cuda_flash"]] == "backward" and lines["dropout"][at["triton_decode"]] == "forward"
    assert lines["head sizes, forward"][at["vendor_cudnn"]] == "multiples of 8 to 256"


@pytest.mark.parametrize("name", mask_pictures.MASKS)
def test_a_picture_is_its_masks(name):
    kept = mask_pictures.FOLDER / f"mask_{name}.svg"
    assert kept.read_text() == mask_pictures.picture(name), "python -m sdpa.bench.mask_pictures"
    written, *_ = mask_pictures.MASKS[name]
    line = next(line for line in (DOCS / "guide" / "masks.md").read_text().splitlines() if kept.name in line)
    assert f"| `{written}` |" in line  # the page shows the expression that was drawn


def test_the_speed_table_and_its_figure_are_of_the_results():
    """Every ratio in README.md stands in this table, which is made of bench/results."""
    text = front.README.read_text()
    kept = text.partition(front.BEGIN)[2].partition(front.END)[0]
    assert kept == front.table() and front.FIGURE.read_text() == front.figure(), "python -m sdpa.bench.front"
    others = text.replace(kept, "")
    ratio = r"(?<!Python )(?<!torch )\b\d+\.\d\d\b"
    assert not re.search(ratio + r"|\d+ (?:TFLOP|GB)/s|\d(?:x| times) ", others), (
        "a figure that is not of bench/results"
    )


def test_the_page_of_performance_is_of_the_results():
    assert performance_page.PAGE.read_text() == performance_page.page(), "python -m sdpa.bench.performance_page"


def test_every_public_name_has_a_place_in_the_reference():
    pages = "\n".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    told = set(re.findall(r"^::: sdpa\.([\w.]+)$", pages, re.M))
    public = set(sdpa.__all__) | {f"nn.{name}" for name in sdpa.nn.__all__ if name not in sdpa.__all__}
    assert public <= told, public - told


def prose(page: Path) -> list[str]:
    """Paragraphs, items of lists and cells of tables, without code, titles and comments."""
    lines = [
        line for line in FENCED.sub("\n", page.read_text()).splitlines() if not line.startswith(("#", "<!--", ":::"))
    ]
    cells = [cell for line in lines if line.startswith("|") for cell in line.strip("| ").split(" | ")]
    text = "\n".join("" if line.startswith("|") else line for line in lines)
    return [part for part in re.split(r"\n\s*\n|\n(?=\s*(?:-|\d+\.) )", text) if part.strip()] + cells


@pytest.mark.parametrize("page", READ_BY_USERS, ids=title)
def test_sentences_and_paragraphs_are_short(page):
    for paragraph in prose(page):
        assert len(paragraph.strip().splitlines()) <= TOO_MANY_LINES, paragraph
        plain = re.sub(r"`[^`]*`|\]\([^)]*\)", "x", paragraph)
        for sentence in re.split(r"(?<=[.:?!])\s", plain):
            assert len(sentence.split()) <= TOO_MANY_WORDS, sentence


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"])
def test_links_outside_of_the_site_are_alive(page):
    """Those of the site are looked at by `make docs`."""
    text = FENCED.sub("\n", (ROOT / page).read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"https?://|\.\./\.\./", target):  # the latter are places of GitHub's
            assert (ROOT / target.partition("#")[0]).exists(), target
