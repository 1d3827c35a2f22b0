"""The documentation: its examples run, its generated pages are current, its sentences are short, every name has a
place."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from browser import FAULTS, hexadecimal

import sdpa
import sdpa.distributed
import sdpa.nn
from sdpa.bench import (
    examples,
    front,
    guide_tables,
    inserted,
    last_runs,
    mask_pictures,
    performance_page,
    pictures,
    race_style,
    record,
    support,
)
from sdpa.bench.race_pages import PAGES
from sdpa.cli import cold, distributed, models
from sdpa.dispatch import cards
from sdpa.dispatch.catalog import by_name
from sdpa.dispatch.device import Device

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
GUIDES = sorted((DOCS / "guide").glob("*.md"))
READ_BY_USERS = [ROOT / "README.md", DOCS / "index.md", DOCS / "transformers.md", *GUIDES]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
FENCED = re.compile(r"^```.*?^```$", re.M | re.S)
TOO_MANY_WORDS, TOO_MANY_LINES = 40, 6
LARGEST_CHART = 8_000  # bytes
SVG = "http://www.w3.org/2000/svg"


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
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)  # as torchrun sets them for one process
    text = page.read_text()
    names: dict[str, object] = {"__name__": page.stem}
    for block in BLOCK.finditer(text):
        line = text.count("\n", 0, block.start(1))
        exec(compile("\n" * line + block[1], str(page), "exec"), names)


def test_examples_of_several_ranks_run_on_two(tmp_path):
    """As torchrun starts them. Each rank ends without torch's threads, which at times abort a process at its end."""
    text, ending = (
        (DOCS / "guide" / "devices.md").read_text(),
        "assert dist.get_world_size() == 2\nimport os\nos._exit(0)\n",
    )
    blocks = [block[1] for block in BLOCK.finditer(text) if "init_process_group" in block[1]]
    assert len(blocks) == 2
    for block in blocks:
        file = tmp_path / "file.py"
        file.write_text(block.replace("dist.destroy_process_group()\n", ending))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", file]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
        assert done.returncode == 0, done.stderr


def test_the_first_example_says_who_ran(capsys):
    names: dict[str, object] = {}
    for block in list(BLOCK.finditer((ROOT / "README.md").read_text()))[:1]:
        exec(block[1], names)
    said = capsys.readouterr().out
    assert said.split("\n", 1)[0] in by_name() and "refused" in said


def test_what_the_front_page_says_that_accelerate_prints(capsys):
    text, names = (ROOT / "README.md").read_text(), {}
    for block in BLOCK.finditer(text):
        exec(block[1], names)
    printed = re.search(r"^It prints `(swapped \d+ modules: )`", text, re.M)[1]
    assert f"\n{printed}" in capsys.readouterr().out


def test_the_guides_name_the_suites_and_directions_of_the_command():
    command, choice = ((DOCS / "guide" / f"{page}.md").read_text() for page in ("command", "choice"))
    for suite in (cold.SUITE, distributed.SUITE, models.SUITE):  # those that have tables of their own
        assert f"--suite {suite}" in command
    for option in ("--backward", "--weights", "--training"):
        assert option in choice and option in command


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
    float_bias = lines["bias (M, N) in float32, queries in bfloat16"]
    assert float_bias[at["triton_efficient"]] == "yes" and float_bias[at["vendor_cudnn"]] == "-"


def test_the_support_matrix_tells_dtypes_apart():
    assert "- `vendor_efficient`, float32: head sizes, forward: multiples of 4;" in support.page()
    picky = replace(by_name()["cpu_flash"], rules=(lambda p: "no" if softcapped(p) else None,))
    usual = support.plain(picky, "cpu")
    said = list(support.other_dtypes(picky, "cpu", support.answers(picky, usual)))
    assert said == ["- `cpu_flash`, float16: softcap: backward"]


def softcapped(problem) -> bool:
    return problem.dtype == torch.float16 and problem.direction == "forward" and "softcap" in problem.features


def test_what_the_support_matrix_says_of_amd():
    """The page names those that take there what they take on Ampere."""
    before, told, by = torch.version.hip, support.amd(), by_name()
    assert re.findall(r"^- (.*) take what the table", told, re.M) == [
        "`triton_flash`, `triton_efficient` and `triton_decode`"
    ]
    assert "- `cuda_flash` and `triton_hopper` refuse them" in told and "Not measured" in told
    cards_there = [Device("cuda", "", (), 1, 1.0, 1.0, 1.0, 1.0, *one) for one in (("amd", "sm90"), ("nvidia", "sm80"))]
    for name in ("triton_flash", "triton_efficient", "triton_decode"):
        usual, found = support.plain(by[name], "cuda"), []
        for card, manner in zip(cards_there, (support.rocm(), nullcontext()), strict=True):
            with cards.assumed(card), manner:
                found.append(support.answers(by[name], usual))
        assert found[0] == found[1]
    assert torch.version.hip == before


@pytest.mark.parametrize("name", mask_pictures.MASKS)
def test_a_picture_is_its_masks(name):
    kept = mask_pictures.FOLDER / f"mask_{name}.svg"
    assert kept.read_text() == mask_pictures.picture(name), "python -m sdpa.bench.mask_pictures"
    written, *_ = mask_pictures.MASKS[name]
    line = next(line for line in (DOCS / "guide" / "masks.md").read_text().splitlines() if kept.name in line)
    assert f"| `{written}` |" in line  # the page shows the expression that was drawn


def test_the_speed_table_and_its_figure_are_of_the_results():
    """Every ratio in README.md stands in this table, which is made of bench/results."""
    kept = front.SPEED.kept()
    assert kept == front.table() and front.FIGURE.read_text() == front.figure(), "python -m sdpa.bench.front"
    others = front.SPEED.page.read_text().replace(kept, "")
    ratio = r"(?<!Python )(?<!torch )\b\d+\.\d\d\b"
    assert not re.search(ratio + r"|\d+ (?:TFLOP|GB)/s|\d(?:x| times) ", others), (
        "a figure that is not of bench/results"
    )


def test_the_front_page_is_of_the_rows_that_the_guide_is_of():
    """ALiBi's backward was slower than FlexAttention in a first run, and is not in its last one; torch's backends stood
    beside the first alone."""
    part = front.Part("nvidia_h200", "gpu-mask", "backward")
    guide = {row["problem"]: row for _, row in last_runs.last_rows("nvidia_h200")}
    assert len(part.rows()) == 7 and all(row is guide[row["problem"]] for row in part.rows())
    (alibi,) = [row["ratio"] for row in part.rows() if " alibi " in row["problem"]]
    assert alibi == "1.578" and all(row["torch_ratio"] for row in part.rows("torch_ratio"))
    line = next(line for line in front.table().splitlines() if "masks, backward" in line)
    slowest = min(float(row["ratio"]) for row in part.rows())
    assert f"({slowest:.2f}) |" in line and "FlashAttention-4, FlexAttention" in line


def test_the_front_page_says_of_which_cpu_a_figure_is():
    lines = [line for line in front.table().splitlines() if " CPU, " in line]
    assert all(re.search(r" CPU, \d+ threads?, (forward|backward|decode) \| fp32, bf16", line) for line in lines)
    assert [line.split()[2] for line in lines if line.startswith("| Zen")] == ["5"] * 3 + ["4"] * 3
    (row,) = [line for line in lines if "Zen 4" in line and "forward" in line]
    assert "2.42 (1.12)" in row  # the last line of its run
    (wide,) = [line for line in lines if "Sapphire" in line and "decode" in line]
    assert "16 threads" in wide and "1.64 (0.98)" in wide


def test_the_page_of_performance_is_of_the_results():
    text, made = performance_page.PAGE.read_text(), performance_page.pictures()
    assert text == performance_page.page(), "python -m sdpa.bench.performance_page"
    kept = {path.name: path.read_text() for path in pictures.FOLDER.glob(f"{performance_page.PREFIX}*")}
    assert kept == made, "python -m sdpa.bench.performance_page"
    assert set(re.findall(r"\]\(pictures/(.*?)\)", text)) == set(made)
    assert all(f"{performance_page.PREFIX}{device}_" in "".join(made) for device in PAGES)


CHARTS = [front.FIGURE, *sorted(pictures.FOLDER.glob(f"{performance_page.PREFIX}*"))]


def test_charts_are_small_and_told_in_words():
    for path in CHARTS:
        text = path.read_text()
        assert len(text) < LARGEST_CHART and "<script" not in text and "http" not in text.replace(SVG, "")
        assert 'role="img" aria-labelledby="title desc"' in text and "is better. Of" in text.partition("</desc>")[0]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_charts_in_a_browser(browser, tmp_path, scheme):
    """No label lies on another or leaves its chart, on a page of any colour."""
    for path in CHARTS:
        page = tmp_path / f"{path.stem}.html"
        page.write_text(f"<body>{path.read_text()}")
        browser.open(page, 1280, scheme)
        assert browser.evaluate(FAULTS) == [] and browser.messages == []
        drawn = browser.evaluate("['text', '.page'].map(e => getComputedStyle(document.querySelector(e)).fill)")
        wanted = getattr(race_style, scheme.upper())  # whose contrast tests/test_race.py looks at
        assert [hexadecimal(color) for color in drawn] == [wanted["faint"], wanted["page"]]


def test_a_legend_takes_as_many_lines_as_it_needs():
    (one, low), (two, high) = (pictures.legend(("sdpa", "cuDNN", "torch"), width) for width in (400, 90))
    assert high > low and len(one) == len(two) == 6
    assert pictures.LEGEND * len(set(re.findall(r'rect .*? y="(\d+)"', "".join(two)))) == 3 * pictures.LEGEND


def test_a_chart_is_of_its_rows():
    """Each bar of one, found again in the CSV: its height is the peer's speed, of which ours and both times tell."""
    chart = next(chart for chart in performance_page.CHARTS["nvidia_h200"] if chart.name == "backward_64")
    rows = [r for r in record.read(pictures.RESULTS / f"{chart.rows.file}.csv")[1] if r["suite"] == "gpu-backward"]
    for length, bars in chart.panel().groups:
        (row,) = [
            r for r in rows if r["problem"].endswith(f",32,{length},64 causal backward") and r["asked"] == "default"
        ]
        times = record.unpaired(row["peers"])
        assert bars["sdpa"] == float(row["tflops_or_gbs"])
        assert bars["FlashAttention-4"] == pytest.approx(bars["sdpa"] * float(row["ms"]) / float(times["fa4"]))
        assert bars["torch's FlashAttention-2"] == pytest.approx(
            bars["sdpa"] * float(row["ms"]) / float(times["flash"])
        )
    assert [length for length, _ in chart.panel().groups] == ["512", "1024", "2048", "4096", "8192", "16384"]


@pytest.mark.parametrize("table", guide_tables.TABLES, ids=lambda table: table.name)
def test_tables_of_guides_are_of_the_results(table):
    assert table.kept() == table.make(), f"python -m {table.module}"


@pytest.mark.parametrize("page", ["showcases.md", "speed.md"])
def test_guides_have_no_other_figure_of_speed(page):
    """Of what was measured; the models of AArch64's inner loops are percentages."""
    text = (DOCS / "guide" / page).read_text()
    for table in guide_tables.TABLES:
        text = text.replace(table.kept(), "") if table.page.name == page else text
    assert not re.search(r"(?<!torch )\b\d+\.\d\d\b|\d+ (?:us|ms|TFLOP/s|GB/s)\b|\d(?:x| times) ", text)


def test_what_is_slower_is_of_the_last_run_and_complete():
    told = guide_tables.slower()
    assert "| Zen 4, 1 thread | small call: forward+varlen | segments | 64 | torch | 1 |" in told
    counted = sum(int(line.split(" | ")[5]) for line in told.splitlines() if line.startswith("| H200"))
    slow = [row for _, row in last_runs.last_rows("nvidia_h200") if float(row["ratio"]) < guide_tables.NOTED]
    assert counted == len(slow) > 10
    # alibi's backward was slower than FlexAttention's once, and its last run says that it is not
    assert "backward | alibi" not in told and "| H200 | backward | segments | 128 | FlashAttention-4 | 1 |" in told


def timing_table(*arguments) -> str:
    """As examples/timing.py prints it."""
    names: dict[str, object] = runpy.run_path(str(ROOT / "examples" / "timing.py"))
    return names["table"](*arguments)


def test_the_examples_figures_are_read_from_what_they_print():
    figures = timing_table({"torch": 2.0, "ours, packed": 1.0}, 2468, "tokens")
    printed = f"2 blocks\n{figures}\nsame: True\n"
    plain, ours = examples.rows_of("one.py", ("--size", "16"), 2, printed)
    assert plain["way"] == "torch" and plain["per_second"] == 1234 and ours["way"] == "ours, packed"
    assert ours["ratio"] == 2.0 and ours["told"] == ["2 blocks", "same: True"]
    row = guide_tables.example_row("a task", [plain, ours])
    assert row == "| a task | `python examples/one.py --size 16` | 2.00 | 2 blocks; same: True |"
    with pytest.raises(ValueError, match=r"expected two ways with their figures of one\.py"):
        list(examples.rows_of("one.py", (), 1, "torch 12 tokens/s 1.00 x"))


def test_a_page_without_its_comments_is_refused(tmp_path):
    page = tmp_path / "page.md"
    table = inserted.Inserted(page, "name", "some.module", lambda: "new\n")
    page.write_text("before\n<!-- begin name: python -m some.module -->\nold\n<!-- end name -->\nbehind\n")
    table.write()
    assert table.kept() == "new\n" and page.read_text().startswith("before\n") and page.read_text().endswith("behind\n")
    page.write_text("before\n")
    with pytest.raises(ValueError, match=r"expected .* in page\.md"):
        table.write()


def test_every_public_name_has_a_place_in_the_reference():
    pages = "\n".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    told = set(re.findall(r"^::: sdpa\.([\w.]+)$", pages, re.M))
    public = set(sdpa.__all__) | {f"nn.{name}" for name in sdpa.nn.__all__ if name not in sdpa.__all__}
    public |= {f"distributed.{name}" for name in sdpa.distributed.__all__}
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
