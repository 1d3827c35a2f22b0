"""python -m sdpa.bench.performance_page: docs/performance.md and its charts, every suite of every device, out of
bench/results/."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from sdpa.bench.contest import DEFAULT
from sdpa.bench.last_runs import DEVICES, OF_SMALL_CALLS, last_rows, threads_of
from sdpa.bench.performance_charts import CHARTS, of_training
from sdpa.bench.pictures import FOLDER, Panel, picture
from sdpa.bench.race import Standing, ratios, read_source, sections_of, standings_of
from sdpa.bench.race_pages import PAGES, RESULTS, ROOT
from sdpa.bench.record import geomean

PAGE = ROOT / "docs" / "performance.md"
PREFIX = "performance_"  # of the charts' files
# Which variant of a model is compared with which: the fastest of torch's that runs in the same way.
OURS, COMPILED, THEIRS = "ours", " compiled", ("torch", "torch fast path")
HEAD = """# Performance

Every suite that was measured, made by `python -m sdpa.bench.performance_page` from `bench/results/`. The page of a
device, in [races](race/README.md), has each problem with its times, errors, charts, versions and commands.

- A ratio is the best peer's time over ours, of one run in which both took turns: above 1 we are faster.
- *beside torch* leaves out all peers but torch's backends.
- `default` is what a call runs. Where it was not measured, kernels that were asked for by name stand in its place.
- A row is as old as its date, and what `default` chose then may not be what it chooses now, which `sdpa explain
  --device cuda:H200` and the sizes tell.
- On a GPU times are medians on cold caches, on a CPU the least.
- Charts show a part of the rows. Higher bars are faster, and numbers below bars are lengths: as many queries as keys.

What was aimed at, what holds a figure back and what was tried is in the log: [on GPUs](log/bars-gpu.md), [on
CPUs](log/bars-cpu.md), and [by topic](log/README.md).
"""


def page() -> str:
    return "\n".join([HEAD, *(line for name in PAGES for line in of_device(name))])


def of_device(name: str) -> Iterator[str]:
    sources = [read_source(ROOT / RESULTS / f"{table}.csv") for table in PAGES[name]]
    sections = sections_of(sources)
    yield f"## {sections[0].run.device}\n"
    yield f"[Every problem](race/{name}.html).\n"
    yield from (shown(file, panel) for file, panel in panels(name).items())
    yield ""
    yield "| suite | direction | ours | cells | geomean | worst | slower | beside torch | peers | measured |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    yield from map(row, standings_of(sections))
    yield ""
    yield from models(name)
    yield from small_calls(name)


def panels(name: str) -> dict[str, Panel]:
    """A device's charts by the names of their files."""
    found = {}
    for chart in CHARTS[name]:
        panel = chart.panel()
        found[chart.name] = panel._replace(title=", ".join([panel.title, *threads_of(chart.rows.run())]))
    if ratios := {model: theirs / ours for model, theirs, ours in model_times(name)}:
        found["models"] = of_training(ratios)
    named = {chart: panel._replace(title=f"{DEVICES[name]}, {panel.title}") for chart, panel in found.items()}
    return {f"{PREFIX}{name}_{chart}.svg": panel for chart, panel in named.items()}


def shown(file: str, panel: Panel) -> str:
    return f"![{panel.title}: {panel.unit}](pictures/{file})"


def pictures() -> dict[str, str]:
    """Every file of a chart by its name."""
    made: dict[str, str] = {}
    for name in PAGES:
        device = CHARTS[name][0].rows.run().device
        made |= {file: picture(f"{device}: {panel.title}", [panel]) for file, panel in panels(name).items()}
    return made


def row(standing: Standing) -> str:
    found, section = standing.ratios, standing.section
    ours = "default" if standing.asked == DEFAULT else f"`{standing.asked}`"
    figures = (f"{geomean(found):.3f}", f"{min(found):.3f}", str(sum(one < 1 for one in found))) if found else ("",) * 3
    torch = f"{geomean(standing.torch_ratios):.3f}" if standing.torch_ratios else ""
    cells = [section.suite, standing.part.direction, ours, str(len(found)), *figures, torch]
    measured = ", ".join([section.run.date[:10], *threads_of(section.run)])
    return f"| {' | '.join([*cells, ', '.join(standing.part.peers), measured])} |"


def models(name: str) -> Iterator[str]:
    """Whole models, by least times."""
    times = list(model_times(name))
    if not times:
        return
    run = contents(f"{name}_models.json")
    versions = ", ".join(f"{package} {version}" for package, version in run["versions"].items())
    yield f"Whole models, least times in ms, {run['date'][:10]} (`{RESULTS}/{name}_models.json`), {versions}, by:\n"
    command, _, more = run["command"].partition(" (")
    yield f"```\n{command}\n```\n"
    if more:
        yield f"{more[:1].upper()}{more[1:].removesuffix(')')}.\n"
    yield "| model | torch | ours | times as fast |"
    yield "|---|---|---|---|"
    for model, theirs, ours in times:
        yield f"| {model} | {theirs:.2f} | {ours:.2f} | {theirs / ours:.2f} |"
    yield ""


def model_times(name: str) -> Iterator[tuple[str, float, float]]:
    """A model, and as compiled; milliseconds of torch's faster way and of ours."""
    times: dict[str, dict[str, float]] = {}
    for one in contents(f"{name}_models.json").get("rows", ()):
        times.setdefault(one["model"], {})[one["variant"]] = one["min_ms"]
    for model, of_model in times.items():
        for manner in ("", COMPILED):
            theirs = [of_model[variant + manner] for variant in THEIRS if variant + manner in of_model]
            if ours := of_model.get(OURS + manner):
                yield f"{model}{manner}", min(theirs), ours


def small_calls(name: str) -> Iterator[str]:
    """Calls so small that only the way to the kernel costs."""
    rows = [row for _, row in last_rows(name) if row["suite"] in OF_SMALL_CALLS]
    if not rows:
        return
    yield f"Small calls in us, by the last run of each: geomean {geomean(ratios(rows)):.3f}.\n"
    yield "| call | best peer | ours | ratio | measured |"
    yield "|---|---|---|---|---|"
    for one in rows:
        ours, ratio = 1e3 * float(one["ms"]), float(one["ratio"])
        times = f"{one['best_peer']} {ours * ratio:.1f} | {ours:.1f} | {ratio:.2f}"
        yield f"| {one['problem']} | {times} | {one['date'][:10]} |"
    yield ""


def contents(file: str) -> dict[str, Any]:
    """Empty where a device has no such file."""
    path = ROOT / RESULTS / file
    return json.loads(path.read_text()) if path.exists() else {}


def main() -> None:
    PAGE.write_text(page())
    for old in FOLDER.glob(f"{PREFIX}*.svg"):
        old.unlink()
    for file, drawn in pictures().items():
        (FOLDER / file).write_text(drawn)


if __name__ == "__main__":
    main()
