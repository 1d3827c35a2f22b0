"""The demo end to end in a few steps: three equal curves, the explanation, the picture; and its bad arguments."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).resolve().parent.parent / "examples" / "train_gpt.py"
# Two steps at a rate still rising move no loss further than this when only the rounding of attention differs.
CLOSE = 1e-4


def demo(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, DEMO, "--device", "cpu", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_demo(tmp_path):
    picture = tmp_path / "demo.png"
    done = demo("--steps", 2, "--out", picture)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    distances = re.findall(r"^largest distance of the losses, sdpa to .*: (\S+)$", done.stdout, re.MULTILINE)
    assert len(distances) == 2 and all(float(distance) < CLOSE for distance in distances)
    assert "chosen: " in done.stdout
    steps = re.findall(r"^step \d of 2: written out .* s, torch .* s, sdpa .* s, loss", done.stdout, re.MULTILINE)
    assert len(steps) == 2


def test_demo_prints_each_step_at_once_into_a_pipe():
    """A buffer of a pipe would hold about a hundred lines back."""
    command = [sys.executable, DEMO, "--device", "cpu", "--steps", "200"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            lines = [process.stdout.readline() for _ in range(3)]
        finally:
            process.kill()
        rest = process.stdout.read().splitlines()
    assert lines[2].startswith("step 1 of 200: ") and len(rest) < 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--steps", "0"), "expected a whole number of at least 1, got 0"),
        (("--steps", "many"), "expected a whole number of at least 1, got many"),
        (("--out", "/nowhere/demo.png"), "expected a file in a folder that exists, got --out /nowhere/demo.png"),
    ],
)
def test_bad_arguments_are_refused_before_training(arguments, message):
    done = demo(*arguments)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
