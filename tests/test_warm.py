"""Compiling beforehand: pools whose tasks raise, die and hang; what is compiled once; what is ready after it."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from sdpa.bench import contest, pool, tuner, warm
from sdpa.bench.gpu_grid import Cell
from sdpa.bench.problems import Problem
from sdpa.dispatch.catalog import by_name
from sdpa.problem import AttentionProblem, Tile

# A process of the pool finds `eval` by name, and cannot import this file.
HANG, DIE, RAISE = "__import__('time').sleep(600)", "__import__('os')._exit(3)", "1 / 0"
OWN_ID = "__import__('os').getpid()"


def tasks(*texts):
    return [(eval, text) for text in texts]


def test_tasks_that_raise_die_or_hang_do_not_hold_up_the_others():
    chains = [tasks("6 * 7", RAISE, "6 * 8"), tasks(HANG, "1"), tasks(DIE, "2")]
    found = {outcome.task[1]: outcome for outcome in pool.run_tasks(chains, jobs=2, seconds=4.0)}
    assert {text: o.value for text, o in found.items() if not o.error} == {"6 * 7": 42, "6 * 8": 48, "1": 1, "2": 2}
    assert found[RAISE].error == "ZeroDivisionError: division by zero" and not found[RAISE].fatal
    assert found[HANG].fatal and "hangs" in found[HANG].error
    assert found[DIE].fatal and found[DIE].error == "its process ended with exit code 3"


def test_a_chain_stays_in_one_process_and_closing_ends_all():
    outcomes = pool.run_tasks([tasks(OWN_ID, OWN_ID, HANG)], jobs=4)
    first, second = next(outcomes), next(outcomes)
    assert first.value == second.value
    outcomes.close()
    with pytest.raises(ProcessLookupError):  # though its last task hangs
        os.kill(first.value, 0)
    assert list(pool.run_tasks([[]], jobs=4)) == []


def test_processes_that_do_not_start_end_the_run(monkeypatch):
    monkeypatch.setattr(pool, "START_SECONDS", 0.0)
    with pytest.raises(RuntimeError, match="expected processes for tasks to start, but 3 of them"):
        list(pool.run_tasks([tasks("1")], jobs=1))


def test_jobs_leave_cores_to_others(monkeypatch):
    for cores, jobs in ((1, 1), (2, 1), (16, 14), (128, 14)):
        monkeypatch.setattr(pool.os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)), raising=False)
        assert pool.default_jobs() == jobs


# what is compiled once

FLASH = by_name()["cpu_flash"]
TILE = Tile(64, 64, 4, 2)
ASKED = AttentionProblem("cpu", torch.bfloat16, 4, 16, 16, 4096, 4096, 64, 64)


def like(changed, tile=TILE, kernel=FLASH):
    return warm.likeness(kernel, tile, changed) == warm.likeness(FLASH, TILE, ASKED)


def test_lengths_that_a_compiler_cannot_tell_apart():
    assert like(ASKED._replace(M=8192, N=8192)) and like(ASKED._replace(B=1)) and like(ASKED._replace(H=32, Hkv=32))
    assert like(ASKED, kernel=replace(FLASH, name="twin")), "the same code under another name"
    for changes in (
        {"N": 4097}, {"N": 4104}, {"M": 1}, {"H": 4, "Hkv": 4, "B": 3}, {"Hkv": 4}, {"D": 128},
        {"dtype": torch.float16}, {"direction": "backward"}, {"features": frozenset({"band"})}, {"tf32": True},
        {"M": 512, "N": 512},
    ):  # fmt: skip
        assert not like(ASKED._replace(**changes)), changes
    assert not like(ASKED, Tile(64, 64, 4, 3)) and not like(ASKED, kernel=by_name()["math"])


def test_a_short_band_is_another_kernel():
    """It has one loop where others have several (triton.arguments)."""
    pytest.importorskip("triton", reason="Triton has no package for this platform")
    from ahead import H200

    from sdpa.kernels.triton.target import assume

    kernel, window = by_name()["triton_flash"], ASKED._replace(device="cuda:0", right=0, features=frozenset({"band"}))
    with assume(H200):
        short, shorter, long = (warm.likeness(kernel, TILE, window._replace(left=left)) for left in (512, 640, 1024))
    assert short == shorter != long


def test_builds_are_the_smallest_problem_of_each_kind(monkeypatch):
    module = FLASH.load()
    monkeypatch.setattr(module, "TILES", (Tile(16, 16), Tile(32, 32)))
    cells = [Cell(2, 16, N, N, 16, explore=True) for N in (128, 64, 96, 40)]
    found = list(warm.builds_of(cells, ("cpu_flash", "math")).values())
    assert {build.kernel for build in found} == {"cpu_flash"}, "math has nothing to compile"
    assert sorted((build.tile[0], build.problem.N) for build in found) == [(16, 40), (16, 64), (32, 40), (32, 64)]
    plain = warm.builds_of([replace(cell, explore=False) for cell in cells[:1]], ("cpu_flash",))
    assert [build.tile for build in plain.values()] == [Tile(16, 16)], "the first guess alone"


def outcome_of(task, **changes):
    return pool.Outcome(task, **changes)


def test_what_fails_is_remembered_and_the_rest_is_ready(monkeypatch):
    cell = Cell(1, 2, 32, 32, 16, explore=True)
    builds = warm.builds_of([cell], ("cpu_flash",))
    bad, told, judged, steps = FLASH.load().TILES[0], [], [], []

    def run_tasks(chains, jobs):
        for function, argument in [task for chain in chains for task in chain]:
            wrong = function is warm.run_build and argument.tile == bad
            yield outcome_of((function, argument), error="hangs" if wrong else "", fatal=wrong)

    monkeypatch.setattr(pool, "run_tasks", run_tasks)
    first = [(len, "case")]
    listener = warm.Listener(judged.append, told.append, lambda: steps.append(1))
    ready = warm.warm_builds(builds, 2, first, listener=listener)
    assert [o.task for o in judged] == first and len(steps) == len(builds) + 1
    assert len(told) == 1 and told[0] == f"{cell.label}: cpu_flash {list(bad)} fails: hangs"
    asked = tuner.prepare(cell, tuner.Contest()).asked
    assert [tile for tile in FLASH.load().TILES if not ready(FLASH, tile, asked)] == [bad]
    assert ready(by_name()["math"], None, asked)
    late = warm.warm_builds(builds, 2, first, 0.0, listener)
    assert len(judged) == 2 and not late.done, "the time is up when the checks are done"


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_build_runs(direction, monkeypatch):
    seen, module = [], FLASH.load()
    honest = getattr(module, direction)
    monkeypatch.setattr(module, direction, lambda *a: (seen.append(a[-1]), honest(*a))[1])
    tile = Tile(96, 64)
    warm.run_build(warm.Build("cpu_flash", tile, Cell(1, 2, 24, 24, 16, direction=direction)))
    assert seen[-1] == tile


# contests


def test_who_compiles_before_a_contest():
    window = Problem(1, 2, 64, 64, 16, mask="window", device="cuda")
    plain = replace(window, mask="none")
    options = contest.Options(("default", "triton"))
    chains = [[task[1] for task in chain] for chain in warm.entrants_of([window, plain], options)]
    assert [(e.problem, e.name, e.peer) for e in chains[0]] == [(window, "flex", True)]
    assert [[e.name for e in chain] for chain in chains[1:]] == [["default", "triton"]] * 2
    none = contest.Options(("default",), peers=("cudnn",))
    assert len(warm.entrants_of([window], none)) == 1


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_an_entrant_runs_or_refuses_in_silence(direction, monkeypatch):
    problem = Problem(1, 2, 24, 24, 16, direction=direction)
    seen = []
    honest = contest.ours
    monkeypatch.setattr(contest, "ours", lambda work, kernel: (seen.append(kernel), honest(work, kernel))[1])
    for name in ("default", "math", "triton", "triton_hopper"):
        warm.run_entrant(warm.Entrant(problem, name, False))
    assert seen[:2] == [None, "math"]


def test_only_who_died_or_hung_is_not_asked_again(monkeypatch):
    problem = Problem(1, 2, 24, 24, 16)
    chain = [(warm.run_entrant, warm.Entrant(problem, name, False)) for name in ("good", "raises", "hangs")]
    ends = {"good": {}, "raises": {"error": "no"}, "hangs": {"error": "hangs", "fatal": True}}
    monkeypatch.setattr(pool, "run_tasks", lambda c, *_: (outcome_of(t, **ends[t[1].name]) for t in c[0]))
    told, steps = [], []
    lost = warm.warm_entrants([chain], 1, told.append, lambda: steps.append(1))
    assert lost == {(problem, "hangs"): "hangs"} and len(told) == 1 and len(steps) == 3


# the check before tuning


def in_this_process(chains, jobs):
    for function, argument in [task for chain in chains for task in chain]:
        yield outcome_of((function, argument), value=function(argument))


@pytest.fixture
def tune(monkeypatch):
    pytest.importorskip("click")
    from sdpa.cli import tune

    few = [case for case in tune.chosen_cases("cpu", quick=True) if case.mask == "none"][::6]
    monkeypatch.setattr(tune, "chosen_cases", lambda device, quick: few)
    monkeypatch.setattr(warm, "builds_of", lambda todo, kernels: {})
    monkeypatch.setattr(pool, "run_tasks", in_this_process)
    return tune


def test_the_check_of_a_gpu_runs_in_processes(tune):
    said = []
    ready = tune.check_and_build("cuda", ("math",), [], 2, 0.0, said.append)
    assert isinstance(ready, warm.Readiness) and len(said) == 1
    assert said[0].startswith("check: ") and ", 0 failed; 0 of 0 builds ready after " in said[0]


def test_a_wrong_kernel_or_a_hung_check_measures_nothing(tune, monkeypatch):
    import click

    module = by_name()["math"].load()
    honest = module.forward
    with monkeypatch.context() as patch:
        patch.setattr(module, "forward", lambda *a: (r := honest(*a))._replace(out=r.out * 1.1))
        with pytest.raises(click.ClickException, match=r"failed, in math; nothing was measured\. First: "):
            tune.check_and_build("cuda", ("math",), [], 2, 0.0, print)

    def hung(chains, jobs):
        yield outcome_of(chains[0][0], error="hangs", fatal=True)

    monkeypatch.setattr(pool, "run_tasks", hung)
    with pytest.raises(click.ClickException, match=r"the check of .* fails: hangs; nothing was measured"):
        tune.check_and_build("cuda", ("math",), [], 2, 0.0, print)


def test_of_float16_every_fourth_case_is_checked(tune):
    from sdpa.cli.check import chosen_cases

    cases = chosen_cases("cuda", quick=True)
    kept = tune.without_most_halves(cases)
    count = {dtype: sum(case.dtype == dtype for case in cases) for dtype in (torch.float16, torch.bfloat16)}
    assert sum(case.dtype == torch.float16 for case in kept) == -(-count[torch.float16] // tune.HALF_STRIDE)
    assert sum(case.dtype == torch.bfloat16 for case in kept) == count[torch.bfloat16]
