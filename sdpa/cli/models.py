"""sdpa bench --suite models: whole models beside torch's."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console

from sdpa.bench import record
from sdpa.bench.models import Disagreement, Outcome, models, ratio, run_model
from sdpa.cli.common import console, duration, require_device

SUITE = "models"
LINE = "{:<52} {:<22} {:>10} {:>14} {:>7} {:>10}"


def run_models(device: str, only: str, rounds: int | None, time_limit: float | None, json_file: Path | None) -> bool:
    """Whether all that was asked for was measured and agreed."""
    require_device(device)
    chosen = [model for model in models(device) if only in model.label]
    if not chosen:
        known = "; ".join(model.label for model in models(device))
        raise click.UsageError(f"no model of suite {SUITE} contains {only!r}; there are: {known}")
    out, rows, well = console(), [], True
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
    if json_file is not None:
        json_file.write_text(
            json.dumps(record.contest_header(device) | {"suite": SUITE, "rows": rows}, indent=1) + "\n"
        )
    return well


def show(out: Console, outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        figures = as_dict(outcome, outcomes)
        peak = "" if outcome.peak is None else f"{outcome.peak / 2**20:.0f} MiB"
        speed = f"{outcome.tokens_per_second:,.0f}"
        times = (duration(outcome.timing.minimum), speed, f"{figures['ratio']:.2f}", peak)
        out.print(LINE.format(outcome.model.label, outcome.variant, *times), soft_wrap=True, highlight=False)


def as_dict(outcome: Outcome, outcomes: list[Outcome]) -> dict:
    """ratio: the faster of torch's ways / this one, above 1 means faster than torch."""
    figures = {"model": outcome.model.label, "variant": outcome.variant, **outcome.timing.as_dict()}
    more = {"tokens_per_s": outcome.tokens_per_second, "peak_bytes": outcome.peak}
    return figures | more | {"ratio": ratio(outcome, outcomes)}
