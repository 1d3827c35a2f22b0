"""The group of commands; every error is one sentence on standard error."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, TextIO

import click

import sdpa
from sdpa.cli.bench import bench
from sdpa.cli.check import check
from sdpa.cli.explain import explain
from sdpa.cli.info import info
from sdpa.cli.tune import tune
from sdpa.cli.warm_up import warm_up
from sdpa.environment import VariableError

INTERRUPTED = 130  # what shells report for a process ended by Ctrl-C


class OneSentence(click.Group):
    """A group whose errors are one line, with click's exit codes: 2 for arguments that do not fit."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        try:
            code = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        except click.Abort:
            click.echo("sdpa: interrupted", err=True)
            sys.exit(INTERRUPTED)
        except click.ClickException as error:
            self.tell(error)
            sys.exit(error.exit_code)
        except VariableError as error:
            click.echo(f"sdpa: {error}", err=True)
            sys.exit(click.UsageError.exit_code)
        except OSError as error:
            if error.strerror is None:  # not the system's: a fault of ours
                raise
            tell_system_error(error)
            sys.exit(1)
        sys.exit(code if isinstance(code, int) else 0)

    def tell(self, error: click.ClickException) -> None:
        context = getattr(error, "ctx", None)
        message = error.format_message()
        if context is not None and message == context.get_help():  # `sdpa` alone: the help is the message
            click.echo(message)
            return
        click.echo(f"{context.command_path if context is not None else 'sdpa'}: {message}", err=True)


def tell_system_error(error: OSError) -> None:
    """A file that cannot be opened, or standard output that takes no more: what is left of that would raise at the
    exit. `sdpa info | head` is no error: whoever read has seen enough."""
    if not isinstance(error, BrokenPipeError):
        click.echo(f"sdpa: {error.filename or 'cannot write to standard output'}: {error.strerror}", err=True)
    if error.filename is None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """In place of warnings.showwarning: what we warn of, as a tuning table that is broken, without the line of code."""
    told = str(message) if issubclass(category, UserWarning) else f"{category.__name__}: {message}"
    click.echo(f"sdpa: {told}", err=True)


@click.group(
    "sdpa", cls=OneSentence, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(sdpa.__version__, prog_name="sdpa")
def app() -> None:
    """Which attention kernel runs here, why, whether it is right, and how fast it is."""


for command in (info, explain, check, bench, tune, warm_up):
    app.add_command(command)
