"""The demo end to end in a few steps: three equal curves, the explanation, the picture; and its bad arguments."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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
    assert done.stdout.splitlines()[-1] == f"the picture: {picture}"
    assert picture.read_bytes().startswith(b"\x89PNG")
    distances = re.findall(r"^largest distance of the losses, sdpa to .*: (\S+)$", done.stdout, re.MULTILINE)
    assert len(distances) == 2 and all(float(distance) < CLOSE for distance in distances)
    assert "chosen: " in done.stdout
    steps = re.findall(r"^step \d of 2: written out .* s, torch .* s, sdpa .* s, loss", done.stdout, re.MULTILINE)
    assert len(steps) == 2


@pytest.fixture
def examples(monkeypatch):
    """The demo's modules by their names, as the demo imports them."""
    monkeypatch.syspath_prepend(DEMO.parent)
    names = ("gpt", "report", "train_gpt")
    yield {name: importlib.import_module(name) for name in reversed(names)}
    for name in names:
        sys.modules.pop(name)


def test_the_share_of_attention_is_of_steps_taken_in_turns(examples):
    """A machine that is half as fast in the second half does not change it."""
    demo = examples["train_gpt"]
    steps = 3 * demo.REST_STEPS
    loads = [1.0 if step < steps // 2 else 2.0 for step in range(steps)]
    run, rest = (demo.Run(name, None) for name in ("sdpa", "none"))
    run.seconds, rest.seconds = [4 * load for load in loads], [1 * load for load in loads[2::3]]
    assert demo.attention_share(run, rest) == 0.75
    run.seconds, rest.seconds = [1.0], [2.0]  # noise, and fewer steps than a warm-up has
    assert demo.attention_share(run, rest) == 0.0


def test_the_model_without_attention_takes_turns_with_the_others(examples):
    demo, order = examples["train_gpt"], []
    config = examples["gpt"].Config(context=8, layers=1, heads=1, head_size=4, batch=1)
    runs = [demo.Run(name, None) for name in ("torch", "sdpa", "none")]
    for run in runs:
        run.losses = [0.0]
        run.step = lambda *batch, run=run: order.append(run.name) or run.seconds.append(1.0)
    steps = 2 * demo.REST_STEPS
    demo.train(runs[:2], runs[2], config, steps, torch.device("cpu"))
    assert order == ["torch", "sdpa", "torch", "sdpa", "none"] * (steps // 2)


def test_a_speed_that_changed_is_told(examples):
    Report, warnings = examples["report"].Report, examples["report"].warnings
    steady, changed = (Report(name, [], times, 8, 0.5) for name, times in (("torch", [1, 1.9]), ("sdpa", [1, 1, 3, 3])))
    assert warnings([steady, changed]) == [
        "warning: the quartiles of sdpa are 3.0 times apart, so something else ran on this machine, and the speeds may "
        "be off"
    ]


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
