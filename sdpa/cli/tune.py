"""sdpa tune: measures the able kernels over a grid of problems and writes the device's tuning table."""

from __future__ import annotations

import time
from pathlib import Path

import click
import yaml

from sdpa import environment
from sdpa.bench import record, tuner
from sdpa.bench.problems import Problem
from sdpa.cli.check import chosen_cases, run_check
from sdpa.cli.check import summary as check_summary
from sdpa.cli.common import console, device_option, progress, require_device, set_threads
from sdpa.dispatch import tuning
from sdpa.dispatch.catalog import kernels_for
from sdpa.dispatch.device import device_of
from sdpa.dispatch.select import clear_caches

FOLDER = click.Path(file_okay=False, path_type=Path)
# Seconds of alternating rounds per problem, beside calibration.
SECONDS_PER_PROBLEM = 0.5


@click.command(short_help="Measures this machine and writes its tuning table.")
@click.option(
    "--time-limit", type=click.FloatRange(0.0), default=10.0, show_default=True, metavar="MIN", help="Minutes."
)
@click.option("--out", type=FOLDER, metavar="DIR", help="The user's table folder by default.")
@click.option("--resume", is_flag=True, help="Keep what the table has and measure the rest.")
@click.option("--dry-run", is_flag=True, help="Only list what would be measured.")
@click.option("--threads", type=click.IntRange(1), help="Of the CPU; torch's own number by default.")
@device_option
def tune(device: str, time_limit: float, out: Path | None, resume: bool, dry_run: bool, threads: int | None) -> None:
    """Times every able kernel, torch's own included, over a grid of problems, and writes the table the dispatcher
    reads.

    First a quick check: with a wrong kernel nothing is measured. What the time limit leaves out is measured by
    --resume. The table is replaced at the end and as a whole; interrupted, the old one stays.
    """
    require_device(device)
    set_threads(threads)
    facts = device_of(device)
    path = (out or environment.tuning_dir()) / f"{facts.names[0]}.yaml"
    kept = entries_of(path) if resume else []
    known = {tuner.entry_key_of(entry) for entry in kept}
    todo = [problem for problem in tuner.grid(device) if tuner.entry_key(problem) not in known]
    screen = console()
    screen.print(
        f"{facts.description}: {len(todo)} problems to measure, {len(kept)} kept, table {path}", soft_wrap=True
    )
    if dry_run:
        for problem in todo:
            screen.print(problem.label, soft_wrap=True)
        return
    refuse_wrong_kernels(device)
    found = measure_all(todo, time_limit * 60)
    if not found and not kept:
        raise click.ClickException("nothing was measured within the time limit; the table is as it was")
    write(path, device, kept + found)
    left = len(todo) - len(found)
    screen.print(f"{len(found)} problems measured" + (f", {left} left: run again with --resume" if left else ""))
    screen.print(f"written: {path}", soft_wrap=True)


def entries_of(path: Path) -> list[dict]:
    """The entries of a table to go on with; one of another torch, or a broken one, is not mixed with new figures."""
    if not path.is_file():
        return []
    try:
        data = yaml.safe_load(path.read_text())
        tuning.parse(str(path), data)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValueError) as error:
        raise click.ClickException(f"cannot resume {path}: {error}") from None
    measured, here = data["versions"].get("torch"), record.versions()["torch"]
    if measured != here:
        raise click.ClickException(f"cannot resume {path}: expected torch {here}, measured with {measured}")
    return data["entries"]


def refuse_wrong_kernels(device: str) -> None:
    """A table must not send calls to a kernel that is wrong."""
    names = [kernel.name for kernel in kernels_for(device.partition(":")[0])]
    verdicts = run_check(names, chosen_cases(device, quick=True), seed=0)
    failing = [verdict.kernel for verdict in verdicts if verdict.failures]
    if failing:
        told = f"{check_summary(verdicts)}, in {', '.join(failing)}"
        raise click.ClickException(f"{told}; nothing was measured. See: sdpa check --quick --device {device}")


def measure_all(todo: list[Problem], seconds: float) -> list[dict]:
    """Entries in the grid's order until the time is up."""
    found, end = [], time.monotonic() + seconds
    with progress() as bar:
        task = bar.add_task("measuring", total=len(todo))
        for problem in todo:
            if time.monotonic() >= end:
                break
            bar.update(task, description=f"{problem.label:<44}")
            entry = tuner.measure(problem, SECONDS_PER_PROBLEM)
            if entry is not None:
                found.append(entry)
            bar.advance(task)
    return found


def write(path: Path, device: str, entries: list[dict]) -> None:
    """Replace the table and make this process forget the old one."""
    facts = record.header(device)
    head = {"schema": tuning.SCHEMA, "device": path.stem, "date": facts["date"], "versions": facts["versions"]}
    about = {"command": facts["command"], "description": facts["description"], "threads": facts["threads"]}
    tuning.write(path, head | about | {"entries": entries})
    clear_caches()
