"""Suite `cold`: what it starts, how processes are timed, and what is told of those that fail."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

from sdpa.bench import cold
from sdpa.cli.app import app

DECODE = "1,32/8,1,4096,128"


def test_what_is_started():
    """Every kernel and torch on each problem, and a model's training step in both ways."""
    found = cold.starts("cpu")
    of_problems = [start for start in found if start.problem is not None]
    assert {start.who for start in of_problems} == {"cpu_flash", "vendor_cpu_flash", "torch"}
    assert len({start.label for start in of_problems}) == len(cold.problems("cpu"))
    assert [(start.who, start.model[:3]) for start in found[len(of_problems) :]] == [("ours", "GPT"), ("torch", "GPT")]
    assert {start.who for start in cold.starts("cpu", ("math",)) if start.problem} == {"math", "torch"}


def test_problems_of_a_gpu_are_in_half_precision():
    on_gpu = cold.problems("cuda")
    assert {(problem.dtype, problem.device) for problem in on_gpu} == {("bfloat16", "cuda")}
    assert any(problem.call == "varlen" for problem in on_gpu) and any(problem.M == 1 for problem in on_gpu)


def test_a_start_is_run_with_an_empty_cache_folder_and_with_what_that_left(monkeypatch):
    start, seen = cold.starts("cpu")[0], []

    def run_process(given, environment):
        (folder,) = set(environment.values())
        seen.append(folder)
        return {"first": float(len(seen)), "again": 0.5}

    monkeypatch.setattr(cold, "run_process", run_process)
    assert list(cold.run_starts((start, start))) == [cold.First(start, 1.0, 2.0, 0.5), cold.First(start, 3.0, 4.0, 0.5)]
    assert seen[0] == seen[1] != seen[2] == seen[3]


def test_the_reason_of_a_process_that_fails(monkeypatch):
    start = cold.starts("cpu")[0]
    assert start.problem is not None
    refused = replace(start, who="cpu_flash", problem=replace(start.problem, dtype="int32"))
    told = cold.run_process(refused, {})
    assert list(told) == ["reason"] and "\n" not in told["reason"]
    for done, reason in (
        (subprocess.CompletedProcess([], 139, "", ""), "its process ended with exit code 139"),
        (subprocess.CompletedProcess([], 0, "", ""), "its process ended with exit code 0"),
    ):
        monkeypatch.setattr(subprocess, "run", lambda *args, done=done, **kwargs: done)
        assert cold.measured(start, {}) == cold.First(start, reason=reason)

    def hangs(*args, **kwargs):
        raise subprocess.TimeoutExpired([sys.executable], 1.0)

    monkeypatch.setattr(subprocess, "run", hangs)
    assert cold.run_process(start, {}) == {"reason": "no answer within 300 s"}


def test_a_step_is_timed_with_its_backward(monkeypatch):
    start = cold.Start("cpu_flash", replace(cold.problems("cpu")[1], M=32, N=32))
    assert start.problem is not None and start.problem.grad
    seen = []
    monkeypatch.setattr(cold, "twice", lambda call, device: {"results": seen.extend(call())})
    cold.timed_problem(start, start.problem)
    assert len(seen) == 3 and all(isinstance(gradient, torch.Tensor) for gradient in seen)


def test_the_command(tmp_path):
    path = tmp_path / "cold.json"
    options = ["bench", "--suite", "cold", "--device", "cpu", "--only", DECODE, "--kernel", "cpu_flash"]
    done = CliRunner().invoke(app, [*options, "--json", str(path)])
    assert done.exit_code == 0 and "empty cache" in done.output, done.output
    rows = json.loads(path.read_text())["rows"]
    assert [row["kernel"] for row in rows] == ["cpu_flash", "torch"]
    assert all(row["empty_s"] > 0 and row["filled_s"] > 0 and row["again_s"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--repeat", "3"), "suite cold runs alone"),
        (("--threads", "1"), "suite cold runs alone"),
        (("--time-limit", "0"), "suite cold runs alone"),
        (("--suite", "overhead"), "suite cold runs alone"),
        (("--only", "nothing of it", "--device", "cpu"), "no problem of suite cold contains 'nothing of it'"),
        (("--kernel", "none", "--device", "cpu"), "unknown kernel 'none'"),
        (("--device", "cuda"), "expected a device of this machine"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="one of them asks for a GPU where there is none")
def test_wrong_options(options, sentence):
    done = CliRunner().invoke(app, ["bench", "--suite", "cold", *options])
    assert done.exit_code == 2 and sentence in done.output and len(done.output.splitlines()) == 1, done.output
