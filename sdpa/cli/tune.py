"""sdpa tune: measures the able kernels over a grid of problems and writes the device's tuning table."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
import yaml

from sdpa import environment
from sdpa.bench import gpu_grid, pool, prune, tuner, warm
from sdpa.bench.book import Book, BookError, alone, prefer_built, require_writable
from sdpa.bench.problems import Problem
from sdpa.cli.check import Verdict, chosen_cases, run_check
from sdpa.cli.check import summary as check_summary
from sdpa.cli.common import (
    Time,
    compiling_kernels,
    console,
    device_option,
    named_steps,
    require_device,
    require_kernels,
    require_served,
    set_threads,
)
from sdpa.cli.links import require_alone, tune_links
from sdpa.dispatch import tables
from sdpa.dispatch.catalog import kernels_for
from sdpa.dispatch.device import device_of
from sdpa.dispatch.select import clear_caches
from sdpa.testing import Case

FOLDER = click.Path(file_okay=False, path_type=Path)
TABLE = click.Path(exists=True, dir_okay=False, path_type=Path)
# Seconds of alternating rounds per problem, beside calibration and compilation; on a GPU, whose figures scatter less,
# of each kernel and tile.
SECONDS_PER_PROBLEM = 0.5
SECONDS_PER_RACER = 0.05
# The share of the time limit after which no more is compiled on a GPU; what is not, is not measured.
WARM_SHARE = 0.45
# On a GPU each case costs compilations, and float16 runs the code of bfloat16: every so many of its cases are checked.
HALF_STRIDE = 4
# A run that is killed loses at most so many problems.
SAVE_EVERY = 8


@click.command(short_help="Measures this machine and writes its tuning table.")
@click.option(
    "--time-limit", type=Time(), default=10.0, show_default=True, metavar="MIN",
    help="Minutes, the check and all compiling included.",
)  # fmt: skip
@click.option("--kernel", "kernels", multiple=True, metavar="NAME", help="Only this one; several are given one by one.")
@click.option("--out", type=FOLDER, metavar="DIR", help="The user's table folder by default.")
@click.option(
    "--problems", type=click.IntRange(0), default=0, metavar="K",
    help="Adds K problems drawn as suite `random` does, and measures no other.",
)  # fmt: skip
@click.option("--seed", type=click.IntRange(0), help="Of --problems: which are drawn. 0 by default.")
@click.option("--resume", is_flag=True, help="Keep what was measured and measure the rest.")
@click.option("--again", is_flag=True, help="Measures what the table has again, and nothing else.")
@click.option("--dry-run", is_flag=True, help="Only list what would be measured.")
@click.option("--jobs", type=click.IntRange(1), help="Processes that compile on a GPU; the cores but two by default.")
@click.option("--threads", type=click.IntRange(1), help="Of the CPU; torch's own number by default.")
@click.option(
    "--prune", "table", type=TABLE, metavar="FILE", help="Drop from a CPU's table what the estimate says, too."
)
@click.option(
    "--prefer-built", "ratio", type=click.FloatRange(1.0), metavar="RATIO",
    help="Take kernels that need no compiler where they take up to RATIO times as long.",
)  # fmt: skip
@click.option("--distributed", is_flag=True, help="Measure the links between ranks that torchrun started instead.")
@device_option
def tune(table: Path | None, ratio: float | None, distributed: bool, threads: int | None, **options: Any) -> None:
    """Times every able kernel, torch's own included, with each of its tiles, over a grid of problems, and writes the
    table the dispatcher reads.

    First a quick check: with a wrong kernel nothing is measured. On a GPU all that is to be measured is compiled at the
    same time, in processes of their own; what fails or hangs there is told of and left out. The table is replaced at
    the end and as a whole. What is measured until then is kept beside it, in a file that ends in .partial: --resume
    goes on from both, after an interruption as after the time limit. With --kernel the figures of all other kernels
    stay as they are.

    With --again the problems are those that the table has, the shortest first, and with --kernel those that it has a
    figure of these kernels of: after a kernel has changed, say. All tiles are tried, in the layout (B, H, N, D), which
    entries do not tell. After an interruption or the time limit it begins with the shortest again.

    With --prune nothing is measured: the entries that are not needed for any choice leave the table, as shipped tables
    have it. --resume would measure them again.

    With --prefer-built nothing is measured: from then on calls on the device take a kernel that is built already (CUDA,
    torch's own) in place of one that a first call compiles (Triton, Metal), where it takes up to RATIO times as long; 1
    ends that. It suits processes that live for seconds.

    With --distributed no kernel is measured, but the links between ranks, by which `context_parallel` chooses a mode.
    Without these figures its first call measures them. It measures all ranks together, and smaller groups, as those
    along a dimension of a mesh. Give it --device and --out alone. Start the ranks as those of your program, at once:
    torchrun --nproc-per-node 8 -m sdpa.cli tune --distributed --device cuda

    With --problems the table gets problems like those of real models (bench/drawn.py) beside what it has. Figures of
    suite `random` with the same seed then say nothing about problems that no table knows.
    """
    if distributed:
        require_alone(click.get_current_context())
    set_threads(threads)
    request = Request(**options)
    if request.again and (table is not None or ratio is not None):
        raise click.UsageError("--again measures, --prune and --prefer-built do not: give one")
    try:
        if distributed:
            device = require_device(request.device)
            tune_links(device, table_of(request, device))
        elif table is not None:
            prune_table(table)
        elif ratio is not None:
            write_preference(request, ratio)
        else:
            measure_book(request, time.monotonic())
    except BookError as error:
        raise click.ClickException(str(error)) from None


@dataclass(frozen=True)
class Request:
    """What the options of a measurement ask for."""

    device: str
    time_limit: float  # minutes
    kernels: tuple[str, ...]
    out: Path | None
    problems: int  # drawn ones; 0: the grid
    seed: int | None
    resume: bool
    again: bool
    dry_run: bool
    jobs: int | None

    @property
    def adds(self) -> bool:
        """Whether what the table has is kept."""
        return self.resume or self.again or self.problems > 0

    def todo(self, book: Book) -> list[Problem]:
        """What is to be measured of the grid, or of what the book has."""
        if self.again:
            return book.problems()
        grid = tuner.grid(self.device)
        if self.problems:
            grid = gpu_grid.drawn_grid(self.seed or 0, self.problems, self.device)
        return [problem for problem in grid if not (self.adds and book.has(problem))]


def prune_table(path: Path) -> None:
    try:
        before = tables.load(path.read_text())
        after = prune.prune(str(path), before)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValueError) as error:
        raise click.ClickException(f"cannot prune {path}: {' '.join(str(error).split())}") from None
    tables.write(path, after)
    clear_caches()
    console().print(f"{len(before['entries'])} entries, {len(after['entries'])} needed: {path}", soft_wrap=True)


def write_preference(request: Request, ratio: float) -> None:
    device = require_device(request.device)
    if not compiling_kernels(device):
        raise click.UsageError(f"--prefer-built has no effect on {device}, where no first call compiles a kernel")
    path = table_of(request, device)
    require_writable(path.parent)
    prefer_built(path, request.device, ratio)
    console().print(f"written: {path}", soft_wrap=True)


def measure_book(request: Request, begin: float) -> None:
    if request.seed is not None and not request.problems:
        raise click.UsageError("--seed says which problems --problems draws; give --problems K, too")
    if request.again and (request.resume or request.problems):
        raise click.UsageError("--again measures what the table has; --resume and --problems add to it: give one")
    device, kernels = require_device(request.device), require_kernels(request.kernels)
    require_served(kernels, device)
    book = Book(table_of(request, device), device, kernels)
    if request.dry_run:
        fill(book, request, begin)
        return
    require_writable(book.path.parent)
    with alone(book.path):
        fill(book, request, begin)


def table_of(request: Request, device: str) -> Path:
    folder = request.out or environment.tuning_dir()
    if folder is None:
        raise click.UsageError("this user's home is not known, so there is no folder for tables; give --out FOLDER")
    if request.out is not None and request.out.suffix in (".yaml", ".yml") and not request.out.exists():
        raise click.UsageError(f"--out is the folder of a table, which is called after the device; got {str(folder)!r}")
    if tables.is_no_folder(folder):
        raise click.ClickException(f"cannot write a table to {folder}: it is not a folder")
    return folder / f"{device_of(device).names[0]}.yaml"


def fill(book: Book, request: Request, begin: float) -> None:
    """Measures what the book lacks, from `begin` on for as long as was asked, and publishes it."""
    device, kernels = book.device, book.kernels
    if request.adds or kernels:
        book.open()
    todo = request.todo(book)
    if request.again and not todo:
        named = f" of {', '.join(kernels)}" if kernels else ""
        raise click.ClickException(f"{book.path} has no figures{named} that could be measured again")
    screen = console()
    kept = len(book.entries)
    screen.print(
        f"{device_of(device).description}: {len(todo)} problems to measure, {kept} kept, table {book.path}",
        soft_wrap=True,
    )
    if request.dry_run:
        for problem in todo:
            screen.print(problem.label, soft_wrap=True)
        return

    def say(line: str) -> None:
        screen.print(line, soft_wrap=True, markup=False)

    limit, jobs = request.time_limit * 60, request.jobs or pool.default_jobs()
    ready = check_and_build(device, kernels, todo, jobs, begin + limit * WARM_SHARE, say)
    done = measure_all(todo, begin + limit, book, say, ready)
    if not book.entries:
        raise click.ClickException("nothing was measured within the time limit; the table is as it was")
    book.publish()
    left, how = len(todo) - done, "" if request.again else ": run again with --resume"
    screen.print(f"{done} problems measured" + (f", {left} left{how}" if left else ""))
    screen.print(f"written: {book.path}", soft_wrap=True)


def check_and_build(
    device: str, kernels: tuple[str, ...], todo: list[Problem], jobs: int, end: float, report: Callable[[str], object]
) -> Callable[..., Any] | None:
    """A table must not send calls to a kernel that is wrong. On a GPU also compiles what is to be measured, until
    `end`: which of it is ready to run."""
    names = tuple(kernels or (kernel.name for kernel in kernels_for(device.partition(":")[0])))
    cases = chosen_cases(device, quick=True)
    if not device.startswith("cuda"):
        with named_steps("checking", len(cases)) as step:
            step("")
            verdicts = run_check(names, cases, seed=0, step=lambda: step(""))
        refuse_wrong_kernels(verdicts, device)
        return None
    begin = time.monotonic()
    tasks: list[pool.Task] = [(check_case, (names, case)) for case in without_most_halves(cases)]
    verdicts = []

    def judge(outcome: pool.Outcome) -> None:
        if outcome.error:
            raise click.ClickException(
                f"the check of {outcome.task[1][1]} fails: {outcome.error}; nothing was measured"
            )
        verdicts.extend(outcome.value)
        refuse_wrong_kernels(outcome.value, device)

    builds = warm.builds_of(todo, kernels)
    with named_steps("checking and compiling", len(tasks) + len(builds)) as step:
        step("")
        listener = warm.Listener(judge, report, lambda: step(""))
        ready = warm.warm_builds(builds, jobs, tasks, end, listener)
    told = f"{check_summary(verdicts)}; {len(ready.done)} of {len(builds)} builds ready"
    report(f"{told} after {time.monotonic() - begin:.0f} s")
    return ready


def without_most_halves(cases: Sequence[Case]) -> list[Case]:
    halves = [case for case in cases if case.dtype == torch.float16]
    kept = halves[::HALF_STRIDE]
    return [case for case in cases if case.dtype != torch.float16 or case in kept]


def check_case(task: tuple[tuple[str, ...], Case]) -> list[Verdict]:
    """Every kernel on one case, in a process of the pool."""
    names, case = task
    return run_check(names, [case], seed=0)


def refuse_wrong_kernels(verdicts: Sequence[Verdict], device: str) -> None:
    failing = [verdict.kernel for verdict in verdicts if verdict.failures]
    if failing:
        told = f"{check_summary(verdicts)}, in {', '.join(failing)}; nothing was measured"
        first = next(verdict.failures[0] for verdict in verdicts if verdict.failures)
        see = f"See: sdpa check --quick --device {device}"
        raise click.ClickException(f"{told}. First: {first['case']}: {first['what']}. {see}")


def measure_all(
    todo: list[Problem],
    end: float,
    book: Book,
    report: Callable[[str], object],
    ready: Callable[..., Any] | None = None,
) -> int:
    """Measure in the grid's order until the time `end`; the number of problems done. An interruption leaves the partial
    file with all that was measured."""
    done, unsaved = 0, 0
    with named_steps("measuring", len(todo)) as step:
        try:
            for problem in todo:
                if time.monotonic() >= end:
                    break
                step(problem.label)
                contest = tuner.Contest(book.kernels, list(book.entries.values()), report)
                contest.ready = ready or contest.ready
                limit = SECONDS_PER_RACER if problem.device.startswith("cuda") else SECONDS_PER_PROBLEM
                entry = tuner.measure(problem, limit, contest)
                done += 1
                if entry is not None:
                    book.add(entry)
                    unsaved += 1
                if unsaved >= SAVE_EVERY:
                    book.save()
                    unsaved = 0
        finally:
            if unsaved:
                book.save()
    return done
