"""What is written down beside figures: device, versions, command; the suite's last line; the JSON file."""

from __future__ import annotations

import json
import math
import platform
import shlex
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import torch

from sdpa.bench.run import Row
from sdpa.dispatch.device import device_of

PACKAGES = ("torch", "sdpa-kernels", "numpy", "triton")


def versions() -> dict[str, str]:
    """Python and the packages that decide about speed, without importing any of them."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def command() -> str:
    """The command line as a user would type it; `python -m sdpa.cli` is the command sdpa."""
    name = Path(sys.argv[0]).name
    return shlex.join(["sdpa" if name == "__main__.py" else name, *sys.argv[1:]])


def header(device: str) -> dict:
    facts = device_of(device)
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": facts.names[0],
        "description": facts.description,
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "command": command(),
    }


def geomean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def summary(suite: str, rows: Sequence[Row]) -> str:
    """The last line of a run. Cells without two times do not count."""
    ratios = [row.ratio for row in rows if row.ratio is not None]
    worst = min(ratios, default=math.nan)
    return f"suite={suite} cells={len(ratios)} geomean={geomean(ratios):.3f} worst={worst:.3f}"


def write_json(path: Path, suite: str, device: str, rows: Sequence[Row]) -> None:
    data = header(device) | {"suite": suite, "summary": summary(suite, rows), "rows": [row.as_dict() for row in rows]}
    path.write_text(json.dumps(data, indent=1) + "\n")
