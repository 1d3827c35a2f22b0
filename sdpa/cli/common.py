"""What the commands share: consoles, options, and how times and devices are checked and printed."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sdpa.dispatch import apple
from sdpa.dispatch.catalog import KERNELS, by_name, kernels_for

DTYPES = ("float32", "float64", "bfloat16", "float16")
# Where standard output is not a terminal nobody sees its width, and a wrapped table cannot be searched.
PIPED_WIDTH = 160
PROGRESS_LINES = 20  # of a long command whose standard output is no terminal
LINE_SECONDS = 10.0  # of steps that may take long there is a line after so many
MOST_THREADS = 4096  # more than any machine has; torch takes more, and ends the process where it starts them
LARGEST_SEED = 2**63 - 1  # that torch's generators take
NO_CUDA = "torch sees no CUDA device"  # as the kernels say it

as_json = click.option("--json", "json_out", is_flag=True, help="Print JSON instead of tables.")
device_option = click.option(
    "--device", default="cpu", show_default=True, metavar="DEVICE", help="cpu, cuda, cuda:N or mps."
)
seed_option = click.option("--seed", type=click.IntRange(0, LARGEST_SEED), default=0, show_default=True)


class Time(click.FloatRange):
    """Of seconds or minutes, from 0 on; not NaN, which no clock reaches."""

    def __init__(self) -> None:
        super().__init__(0.0)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"expected a number >= 0, got {value!r}", param, ctx)
        return number


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


@contextmanager
def named_steps(task: str, total: int) -> Iterator[Callable[[str], object]]:
    """A function to call with its name before each of `total` steps, or with none at first and when each has ended: it
    moves a bar, or where standard output is no terminal it prints a line when none was printed for `LINE_SECONDS`."""
    begun, begin, said = 0, time.perf_counter(), -math.inf
    if sys.stdout.isatty():
        with progress() as bar:
            shown = bar.add_task(task, total=total)

            def move(name: str) -> None:
                nonlocal begun
                bar.update(shown, completed=begun, description=f"{name or task:<48}")
                begun += 1

            yield move
        return

    def tell(name: str) -> None:
        nonlocal begun, said
        now = time.perf_counter()
        if now - said >= LINE_SECONDS:
            click.echo(f"{task}: {begun} of {total} done, {now - begin:.0f} s" + (f"; now {name}" if name else ""))
            said = now
        begun += 1

    yield tell


def compiling_kernels(device: str) -> tuple[str, ...]:
    """Those that a first call on such a device compiles; of CPUs none."""
    return tuple(kernel.name for kernel in kernels_for(device.partition(":")[0]) if kernel.compiles)


def require_device(name: str) -> str:
    """The device's name, if this machine has it. Raises UsageError in one sentence."""
    require_name(name)
    kind = name.partition(":")[0]
    absent = apple.absence() if kind == "mps" else absence(name)
    if absent is not None:
        raise click.UsageError(f"expected a device of this machine, got {name!r}: {absent}")
    return name


def require_name(device: str) -> None:
    """A name that torch knows of what computes, whether or not such a device is here. Raises UsageError in one
    sentence."""
    told = f"expected a device such as cpu or cuda:0, got {device!r}"
    try:
        kind = torch.device(device).type
    except RuntimeError:  # which lists what no machine has: ideep, fpga, ve
        raise click.UsageError(told) from None
    if kind == "meta":
        raise click.UsageError(f"{told}: it computes nothing")


def absence(device: str) -> str | None:
    """Why this machine has no such device, as a clause, or None."""
    kind = device.partition(":")[0]
    if kind == "cuda" and not torch.cuda.is_available():
        return NO_CUDA if torch.version.cuda or torch.version.hip else f"{NO_CUDA}: this torch was built without CUDA"
    try:
        torch.empty(0, device=device)
    except (NotImplementedError, ImportError):  # whose texts are torch's lists of backends, and names of modules
        return f"this torch was built without {kind}"
    except (RuntimeError, AssertionError) as error:
        return (str(error).splitlines() or [type(error).__name__])[0]
    return None


def require_kernels(names: Iterable[str]) -> tuple[str, ...]:
    """Names of the catalog's rows. Raises UsageError with the known ones."""
    for name in names:
        if name not in by_name():
            known = ", ".join(kernel.name for kernel in KERNELS)
            raise click.UsageError(f"unknown kernel {name!r}; known kernels: {known}")
    return tuple(names)


def require_served(kernels: Iterable[str], device: str) -> None:
    """Those of the names that are kernels' run on a device of this kind. Raises UsageError."""
    for kernel in filter(None, map(by_name().get, kernels)):
        if not kernel.serves(device.partition(":")[0]):
            raise click.UsageError(f"kernel {kernel.name} runs on {' or '.join(kernel.devices)}, got --device {device}")


def set_threads(threads: int | None) -> None:
    """Raises UsageError where there are too many."""
    if threads is not None and threads > MOST_THREADS:
        raise click.UsageError(f"expected --threads up to {MOST_THREADS}, got {threads}")
    if threads is not None:
        torch.set_num_threads(threads)


def duration(seconds: float) -> str:
    """Three digits and a unit."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
