"""What is written down beside figures: device, versions, command; the suite's last line; the JSON file."""

from __future__ import annotations

import json
import math
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import torch

from sdpa.bench import contest
from sdpa.bench.run import Row
from sdpa.dispatch.device import device_of

PACKAGES = ("torch", "sdpa-kernels", "numpy", "triton", "flash-attn-4")
# What the driver tells of a GPU, by the names of nvidia-smi; clocks in MHz, as they are when a run begins.
DRIVER_FACTS = {"driver": "driver_version", "sm_clock_max": "clocks.max.sm", "sm_clock": "clocks.sm"}


def versions() -> dict[str, str]:
    """Python and the packages that decide about speed, without importing any of them."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def driver_facts(device: str) -> dict[str, str]:
    """Driver and clocks of a GPU; empty where nothing can be asked."""
    if not device.startswith("cuda"):
        return {}
    query = ["nvidia-smi", f"--query-gpu={','.join(DRIVER_FACTS.values())}", "--format=csv,noheader,nounits"]
    index = device.partition(":")[2] or str(torch.cuda.current_device())
    try:
        told = subprocess.run([*query, f"--id={index}"], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    facts = dict(zip(DRIVER_FACTS, (item.strip() for item in told.strip().split(",")), strict=False))
    return facts | {"cudnn": str(torch.backends.cudnn.version())}


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


def contest_header(device: str) -> dict:
    """With what decides a GPU's figures."""
    return header(device) | {"driver": driver_facts(device)}


def geomean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def summary(suite: str, rows: Sequence[Row]) -> str:
    """The last line of a run. Cells without two times do not count."""
    ratios = [row.ratio for row in rows if row.ratio is not None]
    worst = min(ratios, default=math.nan)
    return f"suite={suite} cells={len(ratios)} geomean={geomean(ratios):.3f} worst={worst:.3f}"


def contest_summary(suite: str, kernel: str, rows: Sequence[contest.Row]) -> str:
    """The line of one of our kernels: against the best of all peers, then against torch's best backend."""
    text = ""
    for name, ratios in (("", [row.ratio() for row in rows]), ("torch_", [row.torch_ratio for row in rows])):
        known = [ratio for ratio in ratios if ratio is not None]
        worst = min(known, default=math.nan)
        counted = f" {name}cells={len(known)} {name}geomean={geomean(known):.3f} {name}worst={worst:.3f}"
        text += counted if name else f"suite={suite}{counted} kernel={kernel}"
    return text


def write_json(path: Path, suite: str, device: str, rows: Sequence[Row]) -> None:
    data = header(device) | {"suite": suite, "summary": summary(suite, rows), "rows": [row.as_dict() for row in rows]}
    path.write_text(json.dumps(data, indent=1) + "\n")


def write_contest(path: Path, header: dict, summaries: Sequence[str], records: Sequence[dict[str, str]]) -> None:
    path.write_text(json.dumps(header | {"summaries": list(summaries), "rows": list(records)}, indent=1) + "\n")
