"""What the commands share: consoles, options, and how times and devices are checked and printed."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sdpa.dispatch import apple
from sdpa.dispatch.catalog import KERNELS, by_name

DTYPES = ("float32", "float64", "bfloat16", "float16")
# Where standard output is not a terminal nobody sees its width, and a wrapped table cannot be searched.
PIPED_WIDTH = 160
PROGRESS_LINES = 20  # of a long command whose standard output is no terminal

as_json = click.option("--json", "json_out", is_flag=True, help="Print JSON instead of tables.")
device_option = click.option(
    "--device", default="cpu", show_default=True, metavar="DEVICE", help="cpu, cuda, cuda:N or mps."
)


def console() -> Console:
    """Standard output; made anew per command, because tests and shells redirect it."""
    return Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False)


def print_json(data: object) -> None:
    click.echo(json.dumps(data, indent=1, default=str))


def progress() -> Progress:
    """A bar on standard error, so that standard output stays clean; silent where that is not a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    errors = Console(stderr=True)
    # Redirected, what is printed meanwhile would go to standard error: right only where both are the same terminal.
    redirect = sys.stdout.isatty()
    hidden = not errors.is_terminal
    return Progress(*columns, console=errors, transient=True, disable=hidden, redirect_stdout=redirect)


@contextmanager
def counted(task: str, total: int, json_out: bool) -> Iterator[Callable[[], object]]:
    """A function to call after each of `total` cases: it moves a bar, or where standard output is no terminal it prints
    a line of every twentieth part at once. Beside JSON the lines go to standard error."""
    if sys.stdout.isatty():
        with progress() as bar:
            shown = bar.add_task(task, total=total)
            yield lambda: bar.advance(shown)
        return
    done, begin, every = 0, time.monotonic(), max(1, -(-total // PROGRESS_LINES))

    def advance() -> None:
        nonlocal done
        done += 1
        if done % every == 0 or done == total:
            click.echo(f"{task}: {done} of {total} cases, {time.monotonic() - begin:.0f} s", err=json_out)

    click.echo(f"{task}: {total} cases", err=json_out)  # echo flushes
    yield advance


def require_device(name: str) -> str:
    """The device's name, if this machine has it. Raises UsageError in one sentence."""
    if name.partition(":")[0] == "mps" and (absent := apple.absence()) is not None:
        raise click.UsageError(f"expected a device of this machine, got {name!r}: {absent}")
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise click.UsageError(f"expected a device of this machine, got {name!r}: {reason}") from None
    return name


def require_kernels(names: Iterable[str]) -> tuple[str, ...]:
    """Names of the catalog's rows. Raises UsageError with the known ones."""
    for name in names:
        if name not in by_name():
            known = ", ".join(kernel.name for kernel in KERNELS)
            raise click.UsageError(f"unknown kernel {name!r}; known kernels: {known}")
    return tuple(names)


def set_threads(threads: int | None) -> None:
    if threads is not None:
        torch.set_num_threads(threads)


def duration(seconds: float) -> str:
    """Three digits and a unit."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
