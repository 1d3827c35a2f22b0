"""Suites as data, their figures by the conventions of the papers they come from, timing on a fake clock, ceilings."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

import sdpa
from helpers import nearest
from sdpa.bench import book, ceilings, contest, peers, timing, truth, tuner, workload, written_out
from sdpa.bench.problems import CALLS, DIRECTIONS, MASKS, WINDOW, Problem, square
from sdpa.bench.suites import GPU_SUITES, SUITES
from sdpa.dispatch import kernel, tables
from sdpa.problem import AttentionProblem

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
        assert len(problem.label) <= 48, problem.label  # the width of the table's column
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


@pytest.mark.parametrize("name", ["overhead", "gpu-overhead"])
def test_the_way_to_a_kernel_is_measured_of_every_call(name):
    assert {p.call for p in SUITES[name]} == set(CALLS)
    assert {"none", "causal", "padding", "allowed", "lengths"} <= {p.mask for p in SUITES[name] if not p.call}
    assert {(p.direction, p.grad) for p in SUITES[name]} >= {("forward", True), ("backward", False)}


@pytest.mark.parametrize("name", ["gpu-forward", "gpu-backward"])
def test_the_papers_grid(name):
    cells = GPU_SUITES[name]
    assert {(p.D, p.N, p.mask) for p in cells} == {
        (D, N, mask)
        for D in (64, 128, 256)
        for N in (512, 1024, 2048, 4096, 8192, 16384)
        for mask in ("none", "causal")
    }
    for p in cells:
        assert (p.B * p.N, p.H * p.D, p.M, p.dtype) == (16384, 2048, p.N, "bfloat16")
        assert p.direction == name.removeprefix("gpu-")


def test_gpu_suites_hold_what_they_promise():
    assert all(p.device == "cuda" for cells in GPU_SUITES.values() for p in cells)
    heads = {(p.H, p.Hkv, p.N) for p in GPU_SUITES["gpu-gqa"] if p.D == p.Dv}
    full = {(h, 8, n) for h in (32, 64) for n in (2048, 8192)}
    assert heads == full | {(*h, n) for h in ((32, 8), (28, 4)) for n in (2000, 3333)}
    latent = [(p.D, p.Dv, p.direction) for p in GPU_SUITES["gpu-gqa"] if p.D != p.Dv]
    assert latent == [(192, 128, "forward"), (192, 128, "backward")]
    assert {p.direction for p in GPU_SUITES["gpu-mask"] if p.call == "varlen"} == {"forward", "backward"}
    assert {(p.B, p.M, p.N) for p in GPU_SUITES["gpu-decode"] if p.Hkv == 8} == {
        (1, 1, 8192), (1, 1, 131072), (16, 1, 8192), (64, 1, 4096), (1, 4, 8192), (16, 4, 8192),
    }  # fmt: skip
    masks = {(p.mask, p.direction) for p in GPU_SUITES["gpu-mask"]}
    for mask in ("bias", "lengths", "padding", "window", "alibi", "segments", "allowed"):
        assert (mask, "forward") in masks
    assert {("bias_grad", "backward"), ("window", "backward")} <= masks
    assert {p.window for p in GPU_SUITES["gpu-mask"] if p.mask == "window"} == {1024}
    assert {(p.precision, p.direction) for p in GPU_SUITES["gpu-fp32"]} == {
        (precision, d) for precision in ("highest", "high") for d in DIRECTIONS
    }
    assert all(p.host and p.unit == "us" for p in GPU_SUITES["gpu-overhead"])
    assert {replace(p, device="cuda", host=True) for p in SUITES["overhead"]} <= set(GPU_SUITES["gpu-overhead"])


def test_figures_by_the_papers_convention():
    plain = Problem(2, 16, 8192, 8192, 128)
    whole = 4 * 2 * 16 * 8192**2 * 128
    assert plain.operations() == whole and plain.unit == "TFLOP/s"
    for mask in ("causal", "alibi"):
        assert replace(plain, mask=mask).operations() == whole / 2
    assert replace(plain, mask="causal", direction="backward").operations() == whole / 2 * 2.5
    assert plain.figure(1e-3) == pytest.approx(whole * 1e-9)
    assert replace(plain, host=True).figure(2e-6) == pytest.approx(2.0)


def test_decode_is_told_in_bytes_of_keys_and_values():
    decode = Problem(1, 32, 1, 8192, 128, Hkv=8, dtype="bfloat16")
    assert decode.unit == "GB/s" and decode.figure(1e-3) == pytest.approx(2 * 8 * 8192 * 128 * 2 * 1e3 * 1e-9)
    assert replace(decode, M=4).unit == "GB/s" and replace(decode, M=8192).unit == "TFLOP/s"


def test_documents_fill_a_row():
    for N in (300, 8192):
        lengths = Problem(1, 1, N, N, 8).document_lengths()
        assert sum(lengths) == N and min(lengths) > 0 and len(set(lengths)) > 1
    assert len(Problem(2, 16, 8192, 8192, 128).document_lengths()) == 8


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("B", [1, 3])
def test_flops_agree_with_the_mask_the_peer_gets(mask, B):
    problem = Problem(B, 2, 300, 300, 8, mask=mask)
    seen = workload.make_workload(problem).torch_mask
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


def test_host_races_have_their_pace(monkeypatch):
    seen = []
    monkeypatch.setattr(timing, "interleave", lambda *arguments: seen.append(arguments))
    racers = [timing.Racer("ours"), timing.Racer("torch")]
    timing.race(racers, "cpu", pace=timing.Pace(7, 0.2, True))
    timing.race(racers, "cpu")
    timing.race(racers, "mps")
    timing.race(racers, "mps", host=True)
    assert [arguments[2:] for arguments in seen] == [
        (7, 0.4, True, timing.MIN_SAMPLE),
        (None, 2 * timing.HOST_SECONDS, False, timing.MIN_SAMPLE),
        (None, 2 * timing.DEVICE_SECONDS, False, timing.MPS_SAMPLE),
        (None, 2 * timing.DEVICE_SECONDS, False, timing.MIN_SAMPLE),
    ]


@pytest.mark.parametrize("host", [False, True])
def test_apples_gpu_is_waited_for_inside_of_what_is_timed(host, monkeypatch):
    """Where the host's own time is asked for, outside of it."""
    told: list[str] = []
    monkeypatch.setattr(torch.mps, "synchronize", lambda: told.append("wait"))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: told.append("clock") or float(len(told)))
    timing.race([timing.Racer(lambda: told.append("call"))], "mps", host, timing.Pace(rounds=1))
    asked = ["clock", "call", "clock", "wait"] if host else ["wait", "clock", "call", "wait", "clock", "wait"]
    assert told[: len(asked)] == asked


def test_the_suite_of_apples_gpus():
    cells = SUITES["mps"]
    assert len(set(cells)) == len(cells) == len({cell.label for cell in cells})
    assert {cell.device for cell in cells} == {"mps"} and {cell.direction for cell in cells} == set(DIRECTIONS)
    assert {"window", "segments", "alibi", "padding", "bias_grad"} <= {cell.mask for cell in cells}
    assert any(cell.M == 1 and cell.H == 8 * cell.Hkv for cell in cells)
    assert max(cell.flops() for cell in cells) < 5e11, "the smallest of these GPUs computes 2.6e12 in a second"
    grid = tuner.grid("mps")
    keys = [book.entry_key(cell) for cell in grid]
    assert len(set(keys)) == len(keys) and {cell.device for cell in grid} == {"mps"}
    assert {key[1] for key in keys} == {"float16", "bfloat16", "float32"}


def test_what_is_right_is_found_where_float64_is(monkeypatch):
    work = workload.make_workload(Problem(1, 2, 9, 9, 8, mask="bias_grad", direction="backward"))
    assert truth.host_work(work) is work
    work = replace(work, problem=replace(work.problem, device="mps"))
    there = truth.host_work(work)
    assert there.problem.device == "cpu" and there.torch_mask.device.type == "cpu"
    assert [g.shape for g in truth.right_gradients(there)] == [(1, 9, 8), (9, 8), (9, 8), (1, 9, 9)]


def test_root_mean_square_errors_are_relative_and_the_largest():
    """Of dQ, dK and dV; of an output of the heads that are compared."""
    problem = Problem(1, 2, 9, 9, 8, direction="backward")
    work = workload.make_workload(problem)
    out, right = truth.right_out(work), truth.right_gradients(work)
    off = [1 + share * 1e-4 for share in (1, 3, 2)]
    gradients = tuple((g * share).float().expand(1, 2, 9, 8) for g, share in zip(right, off, strict=True))
    found = truth.gradient_error(work, gradients, right)
    assert found.rms == pytest.approx(3e-4, rel=1e-2)
    apart = (g[0, -1].double() - r.reshape(9, 8) for g, r in zip(gradients, right, strict=True))
    assert found.largest == max(float(t.abs().max()) for t in apart)
    heads = torch.cat([part for _, part in out]) * torch.tensor([1 + 1e-4, 1 + 2e-4]).double()[:, None, None]
    assert truth.out_error(work, heads.float()[None], out).rms == pytest.approx(2e-4, rel=1e-2)


def test_deterministic_mode_is_the_contestants_and_put_back(monkeypatch):
    """Whatever they raise. What is right is found without it, which products by cuBLAS may refuse."""
    seen, attend = [], truth.Slice.attend

    def mode():
        return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()

    def right(*given):
        seen.append(("right", *mode()))
        return attend(*given)

    def stopped(work):
        seen.append(("peer", *mode()))
        raise KeyboardInterrupt

    monkeypatch.setattr(truth.Slice, "attend", right)
    monkeypatch.setitem(peers.PEERS, "fake", stopped)
    problem = Problem(1, 2, 9, 9, 8, direction="backward", deterministic=True)
    options = contest.Options(peers=("fake",), pace=timing.Pace(rounds=1))
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for asked in (problem, replace(problem, deterministic=False)):
            with pytest.raises(KeyboardInterrupt):
                contest.measure_cell("s", asked, options)
            assert mode() == (True, True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert {entry[1:] for entry in seen if entry[0] == "right"} == {(False, False)}
    assert [entry[1:] for entry in seen if entry[0] == "peer"] == [(True, False), (False, False)]
    (row,) = contest.measure_cell("s", replace(problem, mask="nonsense"), options)
    assert row.own.failed and mode() == (False, False)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_kernel_that_is_refused_in_deterministic_mode_says_so(direction, own_surroundings, monkeypatch):
    """Its backward too, which the library leaves to another kernel."""

    def in_any_order(asked_of, problem):
        varies = asked_of.name == "cpu_flash" and problem.deterministic and problem.direction == direction
        return "adds in any order" if varies else None

    monkeypatch.setattr(kernel, "CHECKS", (*kernel.CHECKS, in_any_order))
    options = contest.Options(("cpu_flash", "math"), pace=timing.Pace(rounds=1))
    for mode in (False, True):
        own, other = contest.measure_cell("s", Problem(1, 2, 9, 9, 8, direction=direction, deterministic=mode), options)
        assert (own.own.seconds is None, own.own.reason) == (mode, "adds in any order" if mode else "")
        assert other.own.seconds and not own.own.failed and own.own.kernel == "cpu_flash"


def test_calibrate_is_bounded():
    assert timing.calibrate("free", FakeClock(free=0.0)) == timing.MAX_REPEATS
    assert timing.calibrate("slow", FakeClock(slow=1.0)) == 1
    assert 2000 <= timing.calibrate("quick", FakeClock(quick=1e-6)) <= 4000


def test_spread_is_the_interquartile_range():
    assert timing.Timing((1.0,)).spread == 0.0
    assert math.isclose(timing.Timing((1.0, 2.0, 3.0)).spread, 1.0)


def test_grid_covers_directions_dtypes_and_masks():
    cells = tuner.grid("cpu")
    assert max(Counter(map(book.entry_key, cells)).values()) == 1
    kinds = {(p.direction, p.dtype, book.mask_kind(p)) for p in cells}
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
    assert book.entry_key_of(entry) == book.entry_key(problem)
    bucket = tables.parse_entry(0, entry)
    assert "math" in bucket.ms and all(ms > 0 for ms in bucket.ms.values())
    asked = AttentionProblem.of(tuner.inputs_of(workload.make_workload(problem)), direction)
    assert nearest((bucket,), asked) is bucket


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


def test_written_out_attention_is_ours_in_one_of_the_two(monkeypatch):
    q = torch.randn(1, 1, 4, 4)
    chosen = []

    def run_each(calls, time_limit):
        for call in calls:
            sdpa.scaled_dot_product_attention(q, q, q, kernel="math")
            call()
            chosen.append(sdpa.last_choice().kernel.name)
        return [timing.Timing((1.0,))] * 2

    monkeypatch.setattr(written_out, "interleave", run_each)
    assert [form for form, _ in written_out.measure(8, torch.float32, False)] == ["plain", "masked", "added"]
    assert chosen == ["math", "cpu_flash"] * 3


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
