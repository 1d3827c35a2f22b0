"""How long the first call of a fresh process takes, in which kernels are compiled and libraries loaded.

Each start is a process of its own, run twice with one cache folder: at first that is empty, then Triton and Inductor
find in it what the first process compiled. Before the clock starts come imports of torch and sdpa, the device's context
and the tensors.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from sdpa.bench import contest
from sdpa.bench.models import models
from sdpa.bench.peers import PEERS
from sdpa.bench.problems import Problem
from sdpa.bench.timing import synchronize
from sdpa.bench.workload import make_workload, surroundings
from sdpa.dispatch.catalog import kernels_for

# Where Triton and Inductor keep what they compile.
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
SECONDS = 300.0  # after which a process is given up
TORCH = "torch"
MODEL_WAYS = ("ours", TORCH)  # the variants of a model that both devices have


@dataclass(frozen=True)
class Start:
    """What a process does first: a problem by a kernel of ours, by our choice or by torch; or a step of a model, by its
    label and the variant's name."""

    who: str
    problem: Problem | None = None
    model: str = ""
    device: str = "cpu"

    @property
    def label(self) -> str:
        return self.model if self.problem is None else self.problem.label


@dataclass(frozen=True)
class First:
    """Seconds of the first call with an empty cache folder and with a filled one, and of the call after it; or why
    there are none."""

    start: Start
    empty: float | None = None
    filled: float | None = None
    again: float | None = None
    reason: str = ""


def starts(device: str, kernels: tuple[str, ...] = ()) -> tuple[Start, ...]:
    """The suite of a kind of device: every kernel and torch on a problem of each kind, then a model's training step."""
    kind = torch.device(device).type
    names = kernels or tuple(kernel.name for kernel in kernels_for(kind) if not kernel.materialises)
    found = [Start(who, problem, device=device) for problem in problems(device) for who in (*names, TORCH)]
    gpt = next(model.label for model in models(device) if model.name.startswith("GPT"))
    return (*found, *(Start(who, model=gpt, device=device) for who in MODEL_WAYS))


def problems(device: str) -> tuple[Problem, ...]:
    on_gpu = device.startswith("cuda")
    shared: dict[str, Any] = {"dtype": "bfloat16" if on_gpu else "float32", "device": device}
    square: dict[str, Any] = {"B": 2, "H": 8, "M": 512, "N": 512, "D": 64, **shared}
    return (
        Problem(**square),
        Problem(**square, mask="causal", grad=True),
        Problem(**square, mask="lengths", grad=True),
        Problem(**square, mask="bias_grad", grad=True),
        Problem(1, 32, 1, 4096, 128, Hkv=8, **shared),
        Problem(**{**square, "D": 128}, mask="segments", call="varlen" if on_gpu else "", grad=True),
    )


def run_starts(chosen: tuple[Start, ...]) -> Iterator[First]:
    for start in chosen:
        with tempfile.TemporaryDirectory() as folder:
            yield measured(start, dict.fromkeys(CACHES, folder))


def measured(start: Start, caches: dict[str, str]) -> First:
    found = [run_process(start, caches) for _ in range(2)]
    for told in found:
        if "reason" in told:
            return First(start, reason=told["reason"])
    return First(start, found[0]["first"], found[1]["first"], found[1]["again"])


def run_process(start: Start, environment: dict[str, str]) -> dict[str, Any]:
    command = [sys.executable, "-m", __name__]
    try:
        done = subprocess.run(
            command, input=json.dumps(asdict(start)), capture_output=True, text=True, timeout=SECONDS, check=False,
            env=os.environ | environment,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"reason": f"no answer within {SECONDS:.0f} s"}
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return {"reason": f"its process ended with exit code {done.returncode}"}
    told: dict[str, Any] = json.loads(lines[-1])
    return told


# -- in the process ---------------------------------------------------------------------------------------------------


def main() -> None:
    """What `run_process` starts: a Start as JSON on standard input; seconds, or a reason, as JSON on the last line."""
    given = json.loads(sys.stdin.read())
    problem = given.pop("problem")
    start = Start(problem=None if problem is None else Problem(**problem), **given)
    try:
        told = timed_model(start) if start.problem is None else timed_problem(start, start.problem)
    except Exception as error:
        told = {"reason": (str(error).splitlines() or [type(error).__name__])[0]}
    print(json.dumps(told))


def timed_problem(start: Start, problem: Problem) -> dict[str, Any]:
    maker = PEERS[TORCH] if start.who == TORCH else contest.maker_of(start.who)
    with surroundings(problem):
        one = maker(make_workload(problem))
        with one.around():
            return twice(one.step if problem.grad else one.forward, problem.device)


def timed_model(start: Start) -> dict[str, Any]:
    model = next(model for model in models(start.device) if model.label == start.model)
    return twice(model.variants[start.who](), start.device)


def twice(call: Callable[[], object], device: str) -> dict[str, Any]:
    seconds = []
    for _ in range(2):
        synchronize(device)
        begin = time.perf_counter()
        call()
        synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return {"first": seconds[0], "again": seconds[1]}


if __name__ == "__main__":
    main()
