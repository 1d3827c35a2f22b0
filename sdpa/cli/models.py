"""sdpa bench --suite models: whole models beside torch's."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from sdpa.bench import record
from sdpa.bench.models import Disagreement, Outcome, models, ratio, run_model
from sdpa.cli.common import console, duration, require_device

SUITE = "models"
LINE = "{:<52} {:<22} {:>10} {:>14} {:>7} {:>10}"


@dataclass(frozen=True)
class Files:
    """Where figures go: JSON and a picture."""

    json: Path | None = None
    plot: Path | None = None


def run_models(device: str, only: str, rounds: int | None, time_limit: float | None, files: Files) -> bool:
    """Whether all that was asked for was measured and agreed."""
    require_device(device)
    chosen = [model for model in models(device) if only in model.label]
    if not chosen:
        known = "; ".join(model.label for model in models(device))
        raise click.UsageError(f"no model of suite {SUITE} contains {only!r}; there are: {known}")
    rows: list[dict[str, Any]] = []
    out, well = console(), True
    measured = record.header(device) | {"suite": SUITE, "rows": rows}
    out.print(LINE.format("model", "variant", "per step", "tokens/s", "ratio", "peak"), style="bold", soft_wrap=True)
    for model in chosen:
        try:
            outcomes = run_model(model, rounds, 5.0 if time_limit is None else time_limit)
        except Disagreement as error:
            out.print(str(error), style="red", soft_wrap=True)
            well = False
            continue
        show(out, outcomes)
        rows += [as_dict(outcome, outcomes) for outcome in outcomes]
        if files.json is not None:  # after each, so that an interruption loses one model
            files.json.write_text(json.dumps(measured, indent=1) + "\n")
    if files.plot is not None:
        draw(files.plot, measured)
    return well


def draw_json(path: Path, only: str, plot: Path) -> None:
    """A picture of what --json wrote."""
    try:
        measured = json.loads(path.read_text())
        if measured["suite"] != SUITE:
            raise click.ClickException(f"{path} holds suite {measured['suite']}, expected {SUITE}")
    except OSError as error:
        raise click.ClickException(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise click.ClickException(f"{path} is not what sdpa bench --json writes") from None
    draw(plot, measured | {"rows": [row for row in measured["rows"] if only in row["model"]]})


def draw(path: Path, measured: dict[str, Any]) -> None:
    from sdpa.bench.model_plots import plot_models

    versions = " ".join(f"{name} {version}" for name, version in measured["versions"].items())
    try:
        plot_models(path, f"{measured['description']}, {versions}: higher is better", measured["rows"])
    except ValueError as error:
        raise click.ClickException(str(error)) from None


def show(out: Console, outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        figures = as_dict(outcome, outcomes)
        peak = "" if outcome.peak is None else f"{outcome.peak / 2**20:.0f} MiB"
        speed = f"{outcome.tokens_per_second:,.0f}"
        times = (duration(outcome.timing.minimum), speed, f"{figures['ratio']:.2f}", peak)
        out.print(LINE.format(outcome.model.label, outcome.variant, *times), soft_wrap=True, highlight=False)


def as_dict(outcome: Outcome, outcomes: list[Outcome]) -> dict[str, Any]:
    """ratio: the faster of torch's ways / this one, above 1 means faster than torch."""
    figures = {"model": outcome.model.label, "variant": outcome.variant, **outcome.timing.as_dict()}
    more = {"tokens_per_s": outcome.tokens_per_second, "peak_bytes": outcome.peak}
    return figures | more | {"ratio": ratio(outcome, outcomes)}
