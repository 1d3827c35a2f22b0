"""A process that compiles Triton kernels into Triton's cache: `python compile_ahead.py SHARE OF < pickle`.

Compiling takes seconds per variant, on one processor: tests/test_gpu.py starts one of these per core beforehand.
The pickle is (target, [(direction, "decode" or "averaged", case), ..]). What a variant that does not compile means,
its test tells.
"""

from __future__ import annotations

import pickle
import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from sdpa.kernels.triton import backward, decode, forward, tiles, weights
from sdpa.kernels.triton.target import Target, assume
from sdpa.problem import AttentionProblem, Results
from sdpa.testing import Case, make_inputs, problem_of


class Pretended:
    """What Triton asks of a driver while it compiles: the same answers as the device's own, without touching it."""

    def __init__(self, target: Target) -> None:
        self.target = GPUTarget(target.backend, target.arch, 64 if target.backend == "hip" else 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def launches_of(kind: str, case: Case) -> list:
    inputs = make_inputs(case)
    if kind == "decode":
        problem = problem_of(inputs, "forward")
        return decode.forward_launches(inputs, problem, decode.tiles(problem)[0])[1]
    if kind in ("weights", "averaged"):
        problem = AttentionProblem.of(inputs, "weights", frozenset({kind} & {"averaged"}))
        lse = torch.empty(inputs.q.shape[:3])
        return [weights.weights_launch(inputs, lse, problem, tiles.tiles(problem)[0])[1]]
    problem = problem_of(inputs, kind, case.requires_bias_grad and kind == "backward")
    tile = tiles.tiles(problem)[0]
    if kind == "forward":
        return forward.forward_launches(inputs, problem, tile)[1]
    q = inputs.q
    results = Results(q.new_empty(*q.shape[:3], inputs.v.shape[3]), torch.empty(q.shape[:3]))
    return backward.backward_launches(inputs, results, Results(torch.empty_like(results.out), None), problem, tile)[1]


def main() -> None:
    share, of = (int(number) for number in sys.argv[1:])
    target, work = pickle.load(sys.stdin.buffer)
    torch.set_num_threads(1)
    driver.set_active(Pretended(target))
    with assume(target):
        for kind, case in work[share::of]:
            try:
                for launch in launches_of(kind, case):
                    launch.compile()
            except Exception as error:
                print(f"{kind} {case}: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
