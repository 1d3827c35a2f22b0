"""Suites as data, timing on a fake clock, and a suite run end to end on tiny problems."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import replace

import pytest
import torch

import sdpa
from sdpa.bench import ceilings, record, run, timing, tuner, workload
from sdpa.bench.problems import DIRECTIONS, MASKS, WINDOW, Problem, square
from sdpa.bench.suites import SUITES
from sdpa.dispatch import tuning
from sdpa.problem import AttentionProblem

LAST_LINE = re.compile(r"suite=\S+ cells=\d+ geomean=\d+\.\d{3} worst=\d+\.\d{3}")
TINY = Problem(1, 2, 9, 9, 8)
FAST = run.Options(repeat=1)
# Those that the tuner's CPU grid is made of.
TUNED_MASKS = ("none", "causal", "window", "padding", "lengths", "bias")


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", SUITES)
def test_suite_is_well_formed(name):
    problems = SUITES[name]
    assert len(problems) == len(set(problems)) >= 7
    for problem in problems:
        assert problem.mask in MASKS and problem.direction in DIRECTIONS and problem.layout in ("bhmd", "bmhd")
        assert problem.H % problem.Hkv == 0 and problem.flops() > 0
        assert isinstance(problem.torch_dtype, torch.dtype)
        assert len(problem.label) <= 44, problem.label  # the width of the table's column
    assert len({problem.label for problem in problems}) == len(problems)


def test_suites_hold_what_they_promise():
    forward = {(p.dtype, p.D, p.M, p.mask) for p in SUITES["cpu-forward"] if p.M == p.N and p.Hkv == p.H}
    for dtype in ("float32", "bfloat16", "float16"):
        assert {(dtype, D, N, m) for D in (64, 128) for N in (64, 512, 4096) for m in ("none", "causal")} <= forward
    assert all(p.direction == "backward" for p in SUITES["cpu-backward"])
    assert {(p.H, p.Hkv, p.N) for p in SUITES["cpu-decode"]} == {
        (32, h, n) for h in (32, 8) for n in (1024, 4096, 16384)
    }
    assert Problem(1, 4, 16, 16, 64) in SUITES["overhead"]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("B", [1, 3])
def test_flops_agree_with_the_mask_the_peer_gets(mask, B):
    problem = Problem(B, 2, 300, 300, 8, mask=mask)
    seen = workload.make_workload(problem).peer_mask
    if mask == "causal":
        seen = torch.ones(300, 300, dtype=torch.bool).tril()
    if mask == "alibi":
        seen = seen.isfinite()[:, :1]
    if seen is None or seen.dtype != torch.bool or mask == "allowed":  # what only its reader knows counts in full
        seen = torch.ones((), dtype=torch.bool)
    assert problem.visible_pairs() == int(seen.expand(B, 1, 300, 300).sum())


@pytest.mark.parametrize(
    ("mask", "M", "N"), [("causal", 7, 7), ("causal", 9, 4), ("causal", 3, 8), ("window", 600, 600)]
)
def test_flops_count_what_is_visible(mask, M, N):
    problem = Problem(1, 2, M, N, 8, mask=mask)
    distance = torch.arange(M)[:, None] - torch.arange(N)
    seen = (distance >= 0) & (distance <= (WINDOW if mask == "window" else M))
    assert problem.flops() == 2 * int(seen.sum()) * 2 * (8 + 8)


class FakeClock:
    """A stopwatch on which every call takes the seconds it is known for."""

    def __init__(self, **seconds: float) -> None:
        self.seconds, self.log = seconds, []

    def __call__(self, call, repeats: int) -> float:
        self.log.append((call, repeats))
        return self.seconds[call] * repeats


def test_interleave_alternates_and_measures():
    clock = FakeClock(ours=1e-3, peer=4e-3)
    ours, peer = timing.interleave(("ours", "peer"), clock, rounds=40)
    assert math.isclose(ours.minimum, 1e-3) and math.isclose(peer.median, 4e-3) and ours.spread < 1e-9
    assert ours.repeats * ours.minimum >= timing.MIN_SAMPLE and peer.repeats == 1
    measured = [call for call, _ in clock.log[-80:]]
    rounds = [tuple(measured[n : n + 2]) for n in range(0, 80, 2)]
    assert set(rounds) == {("ours", "peer"), ("peer", "ours")}
    assert 10 <= rounds.count(("ours", "peer")) <= 30


def test_interleave_keeps_to_its_time():
    clock = FakeClock(a=0.5, b=0.5)
    assert len(timing.interleave(("a", "b"), clock, time_limit=20.0)[0].samples) == 20
    assert len(timing.interleave(("a", "b"), clock, time_limit=0.0)[0].samples) == timing.MIN_ROUNDS
    assert len(timing.interleave(("a",), FakeClock(a=1e-6), time_limit=1e9)[0].samples) == timing.MAX_ROUNDS


class NoisyClock(FakeClock):
    """Halfway through, the machine becomes quiet: samples are slower the earlier they are."""

    def __init__(self, quiet_after: int, **seconds: float) -> None:
        super().__init__(**seconds)
        self.quiet_after = quiet_after

    def __call__(self, call, repeats: int) -> float:
        return super().__call__(call, repeats) * 2.0 ** max(0, self.quiet_after - len(self.log))


def test_a_lonely_least_time_is_not_trusted():
    timed = timing.interleave(("a", "b"), NoisyClock(30, a=1.0, b=1.0), time_limit=0.0)
    assert [t.minimum for t in timed] == [1.0, 1.0] and len(timed[0].samples) < timing.PATIENCE * timing.MIN_ROUNDS
    restless = timing.interleave(("a", "b"), NoisyClock(1000, a=1.0, b=1.0), time_limit=0.0)
    assert len(restless[0].samples) == timing.PATIENCE * timing.MIN_ROUNDS


def test_calibrate_is_bounded():
    assert timing.calibrate("free", FakeClock(free=0.0)) == timing.MAX_REPEATS
    assert timing.calibrate("slow", FakeClock(slow=1.0)) == 1
    assert 2000 <= timing.calibrate("quick", FakeClock(quick=1e-6)) <= 4000


def test_spread_is_the_interquartile_range():
    assert timing.Timing((1.0,)).spread == 0.0
    assert math.isclose(timing.Timing((1.0, 2.0, 3.0)).spread, 1.0)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("mask", MASKS)
def test_ours_and_the_peer_are_asked_the_same(mask, direction):
    """Long enough that the window hides something; in float64 the agreement is exact enough to tell masks apart."""
    row = run.run_problem(Problem(2, 2, 300, 300, 8, "float64", mask, direction, Hkv=1), FAST)
    assert not row.error and not row.skipped, row
    assert row.ratio > 0 and row.kernel and row.backend in ("flash", "math")
    choice = sdpa.last_choice()
    assert choice.problem.direction == direction and row.kernel == choice.kernel.name


def test_wrong_result_is_an_error_and_not_a_time(monkeypatch):
    honest = workload.Workload.ours
    monkeypatch.setattr(workload.Workload, "ours", lambda self, kernel=None: honest(self, kernel) * 1.01)
    row = run.run_problem(TINY, FAST)
    assert row.error.startswith("wrong result: out") and row.ratio is None
    monkeypatch.setattr(workload.Workload, "ours", lambda self, kernel=None: honest(self, kernel) * torch.nan)
    assert run.run_problem(TINY, FAST).error
    assert record.summary("s", [row]) == "suite=s cells=0 geomean=nan worst=nan"


def test_wrong_gradient_is_an_error(monkeypatch):
    honest = workload.Workload.ours

    def wrong(self, kernel=None):
        out = honest(self, kernel)
        return out + 0.02 * (out - out.detach())

    monkeypatch.setattr(workload.Workload, "ours", wrong)
    assert run.run_problem(replace(TINY, direction="backward"), FAST).error.startswith("wrong result: grad_q")


def test_forced_kernel_is_forced_or_skipped_with_its_reasons():
    assert run.run_problem(TINY, replace(FAST, kernel="vendor_math")).kernel == "vendor_math"
    row = run.run_problem(replace(TINY, Dv=4), replace(FAST, kernel="vendor_cpu_flash"))
    assert "D == Dv" in row.skipped and row.ratio is None and not row.error


def test_an_exception_is_a_row():
    row = run.run_problem(replace(TINY, mask="nonsense"), FAST)
    assert row.error.startswith("ValueError: a problem's mask must be one of") and "nonsense" in row.error
    with pytest.raises(ValueError, match="peer must be one of torch, got 'x'"):
        run.run_problem(TINY, replace(FAST, peer="x"))


def test_last_line_and_json(tmp_path):
    rows = list(run.run_suite([TINY, replace(TINY, grad=True), replace(TINY, direction="backward")], FAST))
    line = record.summary("tiny", rows)
    assert LAST_LINE.fullmatch(line) and "cells=3" in line
    record.write_json(tmp_path / "rows.json", "tiny", "cpu", rows)
    data = json.loads((tmp_path / "rows.json").read_text())
    assert data["summary"] == line and data["versions"]["torch"] and data["command"] and data["date"] and data["device"]
    assert [set(row) for row in data["rows"]] == [
        {"problem", "ours", "peer", "ratio", "kernel", "backend", "skipped", "error"}
    ] * 3
    for row in data["rows"]:
        assert math.isclose(row["ratio"], row["peer"]["min_ms"] / row["ours"]["min_ms"])


def test_geomean():
    assert math.isclose(record.geomean([0.5, 2.0, 1.0]), 1.0)


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    from sdpa.bench.plots import plot

    rows = list(run.run_suite([TINY, replace(TINY, dtype="bfloat16")], FAST))
    plot(tmp_path / "tiny.png", "tiny", rows)
    assert (tmp_path / "tiny.png").stat().st_size > 5000
    with pytest.raises(ValueError, match="no timed cell"):
        plot(tmp_path / "none.png", "none", [])


def test_grid_covers_directions_dtypes_and_masks():
    cells = tuner.grid("cpu")
    assert max(Counter(map(tuner.entry_key, cells)).values()) == 1
    kinds = {(p.direction, p.dtype, tuner.mask_kind(p)) for p in cells}
    assert kinds == {
        (direction, dtype, mask)
        for direction in DIRECTIONS
        for dtype in ("float32", "bfloat16", "float16")
        for mask in ("none", "causal", "window", "dense", "structured")
    }
    assert {p.N for p in cells if p.M == 1} == set(tuner.DECODE_LENGTHS)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("mask", TUNED_MASKS)
def test_a_measured_entry_is_one_the_dispatcher_reads(mask, direction, tmp_path):
    problem = square(161, 16, dtype="float32", mask=mask, direction=direction)  # wider than the window
    entry = tuner.measure(problem, 0.0)
    assert tuner.entry_key_of(entry) == tuner.entry_key(problem)
    bucket = tuning.parse_entry(0, entry)
    assert "math" in bucket.ms and all(ms > 0 for ms in bucket.ms.values())
    asked = AttentionProblem.of(tuner.inputs_of(workload.make_workload(problem)), direction)
    assert tuning.nearest((bucket,), asked) is bucket


def test_ceilings(monkeypatch):
    """Every product and every word counts: loops that leave some out would be faster than any machine."""
    library = ceilings.compile_library()
    sums = library.operations_of_round() // 2  # each begins with its number
    totals = [library.multiply(rounds, 2.0, 1.0) for rounds in range(4)]
    assert totals == [2**n * sums * (sums - 1) / 2 + (2**n - 1) * sums for n in range(4)]
    words = torch.zeros(512, dtype=torch.int32)
    for place in range(512):
        words[place] = place + 1
        assert library.read_all(words.data_ptr(), 2048) == place + 1
        words[place] = 0
    monkeypatch.setattr(ceilings, "ROUNDS", 1000)
    forward, decode = Problem(1, 1, 96, 96, 32), Problem(1, 2, 1, 4096, 32)
    measured = list(ceilings.measure((forward, decode), 0.0))
    assert [problem for problem, _, _ in measured] == [forward, decode]
    assert all(ours > 0 and most > 0 for _, ours, most in measured)


def test_ceilings_say_what_is_missing(monkeypatch):
    monkeypatch.setattr(ceilings, "COMPILER", "no-such-compiler")
    with pytest.raises(SystemExit, match="sdpa: expected a C compiler of the name no-such-compiler"):
        ceilings.main()


def test_hopeless_kernels_are_not_measured_again():
    calls = {"fast": "fast", "slow": "slow"}
    clock = FakeClock(fast=1e-3, slow=0.5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuner, "stopwatch_for", lambda device: clock)
        seconds = tuner.race(calls, "cpu", 0.0)
    assert seconds == pytest.approx({"fast": 1e-3, "slow": 0.5})
    assert sum(call == "slow" for call, _ in clock.log) == 2
