"""sdpa bench: named suites beside torch and others, a line per problem as it is measured; CSV, JSON, picture, page."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import torch
from click.core import ParameterSource
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sdpa.bench import pool, record, warm
from sdpa.bench.contest import DEFAULT, OWN, DeviceLost, Options, Row, run_contest
from sdpa.bench.drawn import drawn
from sdpa.bench.models import models
from sdpa.bench.peers import PEERS, TORCH_PEERS, why_absent
from sdpa.bench.problems import Problem
from sdpa.bench.suites import SUITES
from sdpa.bench.timing import Pace
from sdpa.cli.cold import SUITE as COLD
from sdpa.cli.cold import run_cold
from sdpa.cli.common import Time, console, progress, require_device, require_served, set_threads
from sdpa.cli.distributed import SUITE as DISTRIBUTED
from sdpa.cli.distributed import run_distributed
from sdpa.cli.models import SUITE as MODELS
from sdpa.cli.models import Files, draw_json, run_models
from sdpa.cli.outputs import require_output, require_picture
from sdpa.cli.race import write_page_of_csvs, write_page_of_run
from sdpa.cli.rows import LINE, line
from sdpa.dispatch.catalog import kernels_for
from sdpa.dispatch.context import backend_name

FILE = click.Path(dir_okay=False, path_type=Path)
RANDOM = "random"  # the suite that is drawn by a seed
DRAWN = 300  # problems
KNOWN = ", ".join((*SUITES, MODELS, RANDOM, COLD, DISTRIBUTED))
FROM_CSV = "Draw what a CSV holds, or write its page, and measure nothing; repeatable for a page."


@dataclass(frozen=True)
class Request:
    """What the options ask for."""

    suites: tuple[str, ...]
    only: str
    seed: int | None
    problems: int | None
    simulate: int | None
    peers: tuple[str, ...]
    kernels: tuple[str, ...]
    repeat: int | None
    time_limit: float | None
    flush: bool
    deterministic: bool
    device: str | None
    jobs: int | None
    json: Path | None
    csv: Path | None
    merge: bool
    plot: Path | None
    race: Path | None
    from_csv: tuple[Path, ...]
    from_json: Path | None


@click.command(short_help="Times suites of problems beside torch and others.")
@click.option(
    "--suite",
    "suites",
    multiple=True,
    metavar="NAME",
    help=f"Repeatable: {', '.join(SUITES)}; or {MODELS}, {RANDOM}, {COLD}, {DISTRIBUTED}.",
)
@click.option("--list", "list_suites", is_flag=True, help="Name the suites and their cells.")
@click.option("--only", "--cells", default="", metavar="TEXT", help="Only problems whose line contains TEXT.")
@click.option("--seed", type=click.IntRange(0), help=f"Of suite {RANDOM}: which problems are drawn. 0 by default.")
@click.option("--problems", type=click.IntRange(1), help=f"Of suite {RANDOM}: how many. {DRAWN} by default.")
@click.option(
    "--simulate", type=click.IntRange(2, 4096), metavar="RANKS", help=f"Of suite {DISTRIBUTED}: on one device."
)
@click.option("--peer", "peers", multiple=True, type=click.Choice(list(PEERS)), help="Repeatable; all by default.")
@click.option("--kernel", "kernels", multiple=True, help="Repeatable; 'default', or 'triton' for our best.")
@click.option("--repeat", type=click.IntRange(1), help="Rounds per problem, instead of a time limit.")
@click.option("--time-limit", type=Time(), help="Seconds: of a contestant 0.5, on a GPU 0.25, of a model 5.")
@click.option("--threads", type=click.IntRange(1), help="Of the CPU; torch's own number by default.")
@click.option("--flush", is_flag=True, help="On a CPU, cold caches before every call; on a GPU they always are.")
@click.option(
    "--deterministic", is_flag=True, help="Under torch.use_deterministic_algorithms(True), which fills new memory, too."
)
@click.option("--device", metavar="DEVICE", help="Run suites on another device than they name.")
@click.option("--jobs", type=click.IntRange(0), help="Processes that compile on a GPU; the cores but two by default.")
@click.option("--json", type=FILE, metavar="FILE", help="Write rows and header.")
@click.option("--csv", type=FILE, metavar="FILE", help="Write rows as they are measured.")
@click.option("--merge", is_flag=True, help="Keep what the CSV holds, but for cells that are measured again.")
@click.option("--plot", type=FILE, metavar="FILE", help="Draw it; of several suites each adds its name to FILE's.")
@click.option("--race", type=FILE, metavar="FILE", help="Write a page of HTML: standings, charts, tables, commands.")
@click.option("--from-csv", type=FILE, multiple=True, metavar="FILE", help=FROM_CSV)
@click.option("--from-json", type=FILE, metavar="FILE", help=f"The same of what suite {MODELS} wrote by --json.")
def bench(list_suites: bool, threads: int | None, **options: Any) -> None:
    """Times us beside torch, alternating in one run, after each result was held against float64.

    ratio = the best peer's time / ours, above 1 means ours is faster; the next column is the same with torch's backends
    alone, and spread our interquartile range over our median. On a CPU: beside torch's default choice, by the least
    time. On a GPU: beside every backend of torch, FlexAttention, FlashAttention and FlashInfer, by the median on cold
    caches. What raises or is wrong is not timed.

    Exit code 1 when a result of ours is wrong or raises.
    """
    if list_suites:
        show_suites(console())
        return
    request = Request(**options)
    require_outputs(request)
    if request.from_csv:
        show_csvs(request)
        return
    if request.from_json is not None:
        assert request.plot is not None  # see require_outputs
        draw_json(request.from_json, request.only, request.plot)
        return
    request = as_drawn(request)
    if MODELS in request.suites:
        set_threads(threads)
        click.get_current_context().exit(0 if bench_models(request) else 1)
    for suite, bench_alone in ((COLD, bench_cold), (DISTRIBUTED, bench_distributed)):
        if suite in request.suites:
            click.get_current_context().exit(0 if bench_alone(request, threads) else 1)
    problems = chosen_problems(request)
    for kernel in request.kernels:
        check_name(kernel)
    for device in {problem.device for cells in problems.values() for problem in cells}:
        require_served(request.kernels, device)
    set_threads(threads)
    click.get_current_context().exit(0 if run_suites(request, problems) else 1)


def bench_models(request: Request) -> bool:
    """The suite of whole models, which has rows of its own; whether all went well."""
    if len(request.suites) > 1 or request.kernels or request.csv or request.deterministic or request.race:
        raise click.UsageError(
            f"suite {MODELS} runs alone, with --only, --device, --repeat, --time-limit, --json, --plot"
        )
    files = Files(request.json, request.plot)
    return run_models(request.device or "cpu", request.only, request.repeat, request.time_limit, files)


def bench_cold(request: Request, threads: int | None) -> bool:
    """The suite of fresh processes, likewise."""
    numbers = (request.repeat, request.time_limit, request.jobs, threads)
    files = (request.csv, request.plot, request.race)
    others = (*files, request.peers, request.flush, request.deterministic, request.merge)
    if len(request.suites) > 1 or any(others) or any(number is not None for number in numbers):
        raise click.UsageError(f"suite {COLD} runs alone, with --only, --device, --kernel, --json")
    device = request.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return run_cold(device, request.only, request.kernels, request.json)


def bench_distributed(request: Request, threads: int | None) -> bool:
    """The suite of several ranks, likewise."""
    numbers = (request.repeat, request.time_limit, request.jobs)
    files = (request.csv, request.plot, request.race)
    others = (*files, request.peers, request.kernels, request.flush, request.deterministic, request.merge)
    if len(request.suites) > 1 or any(others) or any(number is not None for number in numbers):
        raise click.UsageError(f"suite {DISTRIBUTED} runs alone, with --only, --device, --simulate, --threads, --json")
    set_threads(threads)
    return run_distributed(request.device, request.only, request.simulate, request.json)


def as_drawn(request: Request) -> Request:
    """The request for the suite that is drawn, with what it runs by default: every kernel of ours beside our choice,
    and torch's backends as peers."""
    if request.simulate is not None and DISTRIBUTED not in request.suites:
        raise click.UsageError(f"--simulate is of suite {DISTRIBUTED}")
    if RANDOM not in request.suites:
        if request.seed is not None or request.problems is not None:
            raise click.UsageError(f"--seed and --problems are of suite {RANDOM}")
        return request
    if len(request.suites) > 1 or request.plot:
        raise click.UsageError(f"suite {RANDOM} runs alone, and has no picture")
    device = request.device or ("cuda" if torch.cuda.is_available() else "cpu")
    kind = device.partition(":")[0]
    able = tuple(kernel.name for kernel in kernels_for(kind) if not kernel.materialises)
    peers = tuple(name for name in TORCH_PEERS if name != "torch") if kind == "cuda" else ("torch",)
    return replace(
        request, device=device, kernels=request.kernels or (DEFAULT, *able), peers=request.peers or peers,
        seed=request.seed or 0, problems=request.problems or DRAWN,
    )  # fmt: skip


def suite_of(name: str, request: Request) -> Sequence[Problem]:
    """The problems of a suite. Raises UsageError where there is none of that name."""
    if name == RANDOM:
        assert request.device and request.problems is not None and request.seed is not None  # see as_drawn
        return drawn(request.seed, request.problems, request.device)
    if name not in SUITES:
        raise click.UsageError(f"unknown suite {name!r}; known suites: {KNOWN}")
    return SUITES[name]


def chosen_problems(request: Request) -> dict[str, list[Problem]]:
    """The problems asked for by suite, without suites of which none is."""
    if not request.suites:
        raise click.UsageError(f"expected --suite NAME, one of {KNOWN}")
    chosen = {}
    for suite in request.suites:
        asked = [
            replace(problem, device=request.device or problem.device, deterministic=request.deterministic)
            for problem in suite_of(suite, request)
        ]
        problems = [problem for problem in asked if request.only in problem.label]
        if problems:
            chosen[suite] = problems
    if not chosen:
        suites = " or ".join(request.suites)
        raise click.UsageError(f"no problem of suite {suites} contains {request.only!r}")
    for device in {problem.device for problems in chosen.values() for problem in problems}:
        require_device(device)
        require_peers(request.peers, device)
    return chosen


def require_peers(names: Sequence[str], device: str) -> None:
    """A peer that was asked for and cannot run would be told of after all is measured."""
    for name in names:
        if reason := why_absent(name, device):
            raise click.UsageError(f"--peer {name}: {reason}")


def check_name(kernel: str) -> None:
    try:
        if kernel not in (DEFAULT, OWN):
            backend_name(kernel)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def require_outputs(request: Request) -> None:
    """Told before minutes are spent and not after."""
    for path in (request.json, request.plot, request.race):
        if path is not None:
            require_output(path)
    if request.csv is not None:
        require_output(request.csv, replaced=True)
    if request.merge and request.csv is None:
        raise click.UsageError("--merge needs --csv FILE")
    if request.from_csv and request.plot is None and request.race is None:
        raise click.UsageError("--from-csv needs --plot FILE or --race FILE")
    if request.from_json is not None and request.plot is None:
        raise click.UsageError("--from-json needs --plot FILE")
    if request.from_csv or request.from_json is not None:
        require_no_measuring("--from-csv" if request.from_csv else "--from-json")
    if request.plot is not None and len(request.from_csv) > 1:
        raise click.UsageError(f"--plot draws one CSV, got {len(request.from_csv)}")
    if request.plot is not None:
        if importlib.util.find_spec("matplotlib") is None:
            raise click.ClickException("--plot needs matplotlib: pip install matplotlib")
        require_picture(request.plot)


def require_no_measuring(source: str) -> None:
    """An option that is about a measurement would be dropped silently."""
    context = click.get_current_context()
    taken = {"--from-csv": ("suites", "only", "plot", "race", "from_csv"), "--from-json": ("only", "plot", "from_json")}
    for option in context.command.params:
        given = option.name and context.get_parameter_source(option.name) is ParameterSource.COMMANDLINE
        if given and option.name not in taken[source]:
            raise click.UsageError(f"{source} measures nothing, and does not go with {option.opts[0]}")


def show_csvs(request: Request) -> None:
    """A page of all that was asked for, and a picture of each suite."""
    if request.race is not None:
        write_page_of_csvs(request.race, request.from_csv, request.suites, request.only)
    if request.plot is not None:
        draw_csv(request.from_csv[0], request)


def draw_csv(path: Path, request: Request) -> None:
    """A picture of each suite asked for, or of all that the CSV holds."""
    assert request.plot is not None
    try:
        records = record.read(path)[1]
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    suites = request.suites or tuple(dict.fromkeys(row["suite"] for row in records if row["suite"] != RANDOM))
    draw(request.plot, suites, [row for row in records if request.only in row["problem"]])


def run_suites(request: Request, problems: dict[str, list[Problem]]) -> bool:
    """Measures, prints and writes; whether we had a time in every suite and no result of ours was wrong."""
    out, device = console(), next(iter(problems.values()))[0].device
    pace = Pace(request.repeat, request.time_limit, request.flush)
    options = Options(request.kernels or (DEFAULT,), request.peers, pace)
    if device.startswith("cuda") and request.jobs != 0:
        options = replace(options, lost=compile_all(problems, options, request.jobs or pool.default_jobs(), out))
    header = record.header(device)
    table = open_table(request, header)
    for text in record.header_lines(header):
        out.print(escape(text), soft_wrap=True)
    titles = LINE.format("problem", "kernel", "time", "figure", "", "ratio", "torch", "spread", "peers")
    out.print(titles, style="bold", soft_wrap=True)
    rows, summaries = [], []
    for suite, cells in problems.items():
        measured = run_and_show(suite, cells, options, table, out)
        rows += measured
        told_of = (DEFAULT,) if suite == RANDOM and DEFAULT in options.kernels else options.kernels
        for kernel in told_of:
            summaries.append(record.summary(suite, kernel, measured))
            if table is not None:
                table.remark(summaries[-1])
    if request.json is not None:
        record.write_json(request.json, header, summaries, rows)
    if request.plot is not None:
        draw(request.plot, tuple(problems), [record.as_record(row) for row in rows])
    if request.race is not None:
        write_page_of_run(request.race, header, summaries, rows)
    for text in summaries:
        out.print(text, soft_wrap=True)
    timed = {row.suite for row in rows if row.own.seconds is not None}
    return timed == set(problems) and not any(row.own.failed for row in rows)


def compile_all(
    problems: dict[str, list[Problem]], options: Options, jobs: int, out: Console
) -> dict[tuple[Problem, str], str]:
    """What is about to be timed runs once in processes of their own, which fills the compilers' caches."""
    warm.use_no_helpers()
    chains = warm.entrants_of((problem for cells in problems.values() for problem in cells), options)
    begin = time.monotonic()
    with progress() as bar:
        task = bar.add_task("compiling", total=sum(map(len, chains)))
        lost = warm.warm_entrants(
            chains, jobs, lambda text: out.print(text, soft_wrap=True, markup=False), lambda: bar.advance(task)
        )
    out.print(f"compiled in {time.monotonic() - begin:.0f} s, {len(lost)} lost")
    return lost


def open_table(request: Request, header: dict[str, Any]) -> record.Table | None:
    if request.csv is None:
        return None
    try:
        return record.Table(request.csv, header, request.merge)
    except ValueError as error:
        raise click.ClickException(str(error)) from None


def run_and_show(
    suite: str, problems: Sequence[Problem], options: Options, table: record.Table | None, out: Console
) -> list[Row]:
    """A line per row as soon as it is there, in the table too: a run that is stopped leaves what it has."""
    measured: list[Row] = []
    with progress() as bar:
        task = bar.add_task(suite, total=len(problems))
        try:
            for rows in run_contest(suite, problems, options):
                measured += rows
                if table is not None:
                    table.add(rows)
                lost = record.regrets(rows)
                for row in rows:
                    if suite != RANDOM or row.own.name == DEFAULT or row.own.failed or DEFAULT not in options.kernels:
                        out.print(line(row, lost.get(row.problem)), soft_wrap=True)
                bar.advance(task)
        except DeviceLost as error:
            raise click.ClickException(str(error)) from None
    return measured


def show_suites(out: Console) -> None:
    table = Table("suite", "cells", "device", "dtypes", "first cell")
    for name, problems in SUITES.items():
        dtypes = ", ".join(dict.fromkeys(problem.dtype for problem in problems))
        table.add_row(name, str(len(problems)), problems[0].device, dtypes, problems[0].label)
    whole = models("cpu")
    table.add_row(RANDOM, "--problems", "--device", "by --seed", drawn(0, 1, "cuda")[0].label)
    table.add_row(MODELS, str(len(whole)), "--device", "float32, bfloat16", whole[0].label)
    table.add_row(COLD, "", "--device", "float32, bfloat16", "first calls of fresh processes")
    table.add_row(DISTRIBUTED, "", "--device", "float32, bfloat16", "context parallelism, each mode")
    out.print(table)


def draw(path: Path, suites: Sequence[str], records: Sequence[record.Record]) -> None:
    """One picture; of several suites one each, named after it."""
    from sdpa.bench.plots import plot

    for suite in suites:
        file = path if len(suites) == 1 else path.with_stem(f"{path.stem}_{suite}")
        try:
            plot(file, suite, records)
        except ValueError as error:
            raise click.ClickException(str(error)) from None
