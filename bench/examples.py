"""The timed examples, each alone on one thread of a CPU, as bench/results/<device>_examples.json:
`python -m sdpa.bench.examples`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from sdpa.bench import record

ROOT = Path(__file__).resolve().parent.parent
# By its file: what it does, and the arguments that it is run with.
EXAMPLES = {
    "fine_tune_encoder.py": ("fine-tune an encoder on batches with padding", ()),
    "pack_documents.py": ("train on documents of different lengths, packed", ()),
    "image_blocks.py": ("blocks of an image generator, text beside image", ()),
    "serve_pages.py": ("serve sequences that come and go, with pages", ("--tokens", "400")),
}
RUNS = 2  # of each, which shows how far its figure is to be trusted
# A line of examples/timing.py: a way, how much it does in a second, and how many times as fast as the first it is.
LINE = re.compile(r"^(?P<way>\S.*?) +(?P<per_second>[\d,]+) (?P<unit>\w+)/s +(?P<ratio>\d+\.\d\d) x$", re.M)


def rows_of(example: str, arguments: tuple[str, ...], run: int, printed: str) -> Iterator[dict[str, Any]]:
    """A row for each way. What is printed beside their lines is what the example tells of its data and results."""
    found = [line.groupdict() for line in LINE.finditer(printed)]
    if len(found) < 2:
        raise ValueError(f"expected two ways with their figures of {example}, got {printed!r}")
    told = LINE.sub("", printed).split("\n")
    for one in found:
        figures = {"per_second": int(one["per_second"].replace(",", "")), "ratio": float(one["ratio"])}
        about = {"example": example, "arguments": list(arguments), "run": run}
        yield about | one | figures | {"told": [line for line in told if line]}


def measured() -> Iterator[dict[str, Any]]:
    alone = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    for example, (_, arguments) in EXAMPLES.items():
        for run in range(1, RUNS + 1):
            print(f"{example} {' '.join(arguments)}: run {run} of {RUNS}", file=sys.stderr, flush=True)
            command = [sys.executable, str(ROOT / "examples" / example), *arguments]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=alone)
            yield from rows_of(example, arguments, run, done.stdout)


def main() -> None:
    torch.set_num_threads(1)
    header = record.header("cpu") | {"command": "python -m sdpa.bench.examples", "suite": "examples"}
    path = ROOT / "bench" / "results" / f"{header['device']}_examples.json"
    path.write_text(json.dumps(header | {"rows": list(measured())}, indent=1) + "\n")
    print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
