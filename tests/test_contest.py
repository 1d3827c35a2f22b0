"""GPU suites without a GPU: their shapes and conventions, contests with fake peers and clocks, tables, pictures."""

from __future__ import annotations

import json
import math
import sys
import time
import types
from dataclasses import replace

import pytest
import torch

pytest.importorskip("click")
pytest.importorskip("rich")

from click.testing import CliRunner

from sdpa.bench import contest, peers, race, record, table, truth, workload
from sdpa.bench.contest import Entry, Options, Row
from sdpa.bench.problems import DIRECTIONS, MASKS, Problem
from sdpa.bench.suites import GPU_SUITES, SUITES
from sdpa.bench.timing import Timing
from sdpa.cli.app import app
from sdpa.cli.contest import line

TINY = Problem(2, 4, 40, 40, 8, Hkv=2)
FAST = Options(repeat=1)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# suites


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
    assert {(p.H, p.Hkv, p.N) for p in GPU_SUITES["gpu-gqa"]} == {(h, 8, n) for h in (32, 64) for n in (2048, 8192)}
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


# what is right


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("mask", MASKS)
def test_ours_and_torch_agree_with_float64(mask, direction, monkeypatch):
    """Tight enough to tell masks from each other; more rows than a chunk of the gradients."""
    monkeypatch.setattr(truth, "CHUNK", 128)
    monkeypatch.setitem(workload.TOLERANCE, torch.float64, 1e-9)
    problem = Problem(2, 4, 300, 300, 8, "float64", mask, direction, Hkv=2)
    (row,) = contest.measure_cell("s", problem, FAST)
    assert row.own.seconds and row.own.error < 1e-9 and row.own.kernel, row.own
    (peer,) = row.peers
    assert peer.name == "torch" and peer.seconds and peer.error < 1e-9, peer
    assert row.ratio() == row.torch_ratio == peer.seconds / row.own.seconds


@pytest.mark.parametrize("mask", [m for m in MASKS if m != "none"])
def test_flex_is_asked_the_same(mask):
    problem = Problem(2, 4, 300, 300, 16, mask=mask, Hkv=2)
    (row,) = contest.measure_cell("s", problem, replace(FAST, peers=("flex",)))
    assert row.peers[0].seconds and row.peers[0].error < 1e-5, row.peers[0]


def test_window_size_is_the_problems():
    assert Problem(1, 1, 50, 50, 8, mask="window", window=4).visible_pairs() == 5 * 50 - 10
    (row,) = contest.measure_cell("s", replace(TINY, mask="window", window=4), replace(FAST, peers=("flex", "torch")))
    assert all(entry.seconds for entry in (row.own, *row.peers)), row


# peers that are not timed


class Faulty:
    """A peer whose output or gradients are spoiled."""

    def __init__(self, spoil) -> None:
        self.spoil = spoil

    def __call__(self, work):
        return peers.Contestant("fake", lambda: self.spoil(work.peer()), work.leaves, work.grad_out)


def with_nan(out):
    return out.clone().index_fill(2, torch.tensor([17]), torch.nan)


def with_wrong_gradient(out):
    return out + 0.02 * (out - out.detach())


def that_raises(out):
    raise RuntimeError("no kernel; try another\nand more")


@pytest.mark.parametrize(
    ("spoil", "direction", "reason"),
    [
        (lambda out: out * 1.01, "forward", "wrong result: out: relative distance to float64 0.01"),
        (with_nan, "forward", "wrong result: out: not finite in 64 of 2560 places"),
        (lambda out: out[:, :, :-1], "forward", "wrong result: out: expected (2, 4, 40, 8)"),
        (lambda out: out.double(), "forward", "torch.float64"),
        (with_wrong_gradient, "backward", "wrong result: grad_q: relative distance to float64 0.02"),
        (that_raises, "backward", "RuntimeError: no kernel; try another"),
    ],
)
def test_a_peer_that_is_wrong_is_never_timed(spoil, direction, reason, monkeypatch):
    monkeypatch.setitem(peers.PEERS, "fake", Faulty(spoil))
    (row,) = contest.measure_cell("s", replace(TINY, direction=direction), replace(FAST, peers=("fake", "torch")))
    fake, honest = row.peers
    assert fake.seconds is None and reason in fake.reason and fake.failed, fake
    assert honest.seconds and row.best() == honest and row.own.seconds


def test_peers_refuse_in_a_sentence(monkeypatch):
    asked = replace(FAST, peers=("fa4", "math"))
    monkeypatch.setattr(peers, "MOST_SCORES", 1e4)
    (row,) = contest.measure_cell("s", replace(TINY, Hkv=4), asked)
    assert "flash_attn" in row.peers[0].reason
    assert row.peers[1].reason == "expected scores below 0 GB, got 0" and row.best() is None and row.ratio() is None
    (row,) = contest.measure_cell("s", replace(TINY, mask="window"), asked)
    assert "asked for the masks none and causal, got window" in row.peers[0].reason
    (row,) = contest.measure_cell("s", replace(TINY, M=4, mask="causal"), asked)
    assert "M=4 and N=40" in row.peers[0].reason


@pytest.mark.parametrize("pair", [True, False])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_flash4_gets_its_own_layout(direction, pair, monkeypatch):
    seen = []

    def flash_attn_func(q, k, v, causal):
        seen.append((tuple(q.shape), q.is_contiguous()))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        out = out.transpose(1, 2)
        return (out, None) if pair else out

    package = types.ModuleType("flash_attn")
    package.cute = types.ModuleType("flash_attn.cute")
    package.cute.flash_attn_func = flash_attn_func
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", package.cute)
    problem = replace(TINY, mask="causal", direction=direction)
    (row,) = contest.measure_cell("s", problem, replace(FAST, peers=("fa4",)))
    assert row.peers[0].seconds and set(seen) == {((2, 40, 4, 8), True)}, row.peers


def test_which_peers_take_part():
    plain = replace(TINY, device="cuda", Hkv=4)
    assert peers.peers_for(TINY) == ("torch",)
    for mask in ("none", "causal"):
        assert peers.peers_for(replace(plain, mask=mask)) == ("cudnn", "flash", "efficient", "math", "fa4")
    assert "flex" in peers.peers_for(replace(plain, mask="window")) and "flex" in peers.peers_for(replace(plain, Hkv=2))
    host = peers.peers_for(replace(plain, mask="padding", host=True))
    assert "torch" in host and "flex" not in host
    assert peers.peers_for(plain, ("flex",)) == ("flex",)


def test_kernels_beside_each_other_and_what_they_cannot():
    rows = contest.measure_cell("s", replace(TINY, Dv=4), Options(("default", "math", "vendor_cpu_flash"), repeat=1))
    assert [row.own.name for row in rows] == ["default", "math", "vendor_cpu_flash"]
    assert rows[0].own.kernel and rows[1].own.kernel == "math" and rows[0].peers == rows[2].peers
    assert "D == Dv" in rows[2].own.reason and rows[2].own.seconds is None and not rows[2].own.failed
    (row,) = contest.measure_cell("s", replace(TINY, mask="nonsense"), FAST)
    assert row.own.failed and row.own.reason.startswith("ValueError: a problem's mask must be one of")


def test_the_best_of_our_own(monkeypatch):
    """The names allowed decide, in a forward and, without the context, in its backward; the one chosen is told."""
    assert contest.OWN_KERNELS and all(name.startswith("triton_") for name in contest.OWN_KERNELS)
    (row,) = contest.measure_cell("s", TINY, Options(("triton",), repeat=1))
    assert "runs on cuda, got cpu" in row.own.reason and not row.own.failed and row.own.kernel == ""
    for direction in DIRECTIONS:
        problem = replace(TINY, Hkv=4, direction=direction)
        (row,) = contest.measure_cell("s", problem, FAST)
        other = "cpu_flash" if row.own.kernel != "cpu_flash" else "vendor_cpu_flash"
        monkeypatch.setattr(contest, "OWN_KERNELS", (other, "triton_flash"))
        rows = contest.measure_cell("s", problem, Options(("default", "triton"), repeat=1))
        assert [(r.own.name, r.own.kernel) for r in rows] == [("default", row.own.kernel), ("triton", other)]
        record_of = table.as_record(rows[1])
        assert rows[1].own.seconds and (record_of["asked"], record_of["kernel"]) == ("triton", other)


def test_a_kernel_without_a_backward_is_not_timed_by_another(monkeypatch):
    asked = Options(("triton_hopper", "triton_decode"), repeat=1)
    for row in contest.measure_cell("s", replace(TINY, direction="backward"), asked):
        assert row.own.reason == "has no backward pass" and not row.own.failed and row.own.seconds is None


def test_who_was_lost_while_compiling_does_not_run(monkeypatch):
    monkeypatch.setitem(peers.PEERS, "fake", lambda work: pytest.fail("asked again"))
    (row,) = contest.measure_cell("s", TINY, replace(FAST, peers=("fake",), lost={(TINY, "fake"): "hangs"}))
    assert row.own.seconds and row.peers[0].failed and row.peers[0].reason == "hangs"


def test_precision_is_the_problems_and_put_back(monkeypatch):
    seen = []

    def note(work):
        seen.append(torch.get_float32_matmul_precision())
        raise peers.Refusal("only looks")

    monkeypatch.setitem(peers.PEERS, "fake", note)
    before = torch.get_float32_matmul_precision()
    contest.measure_cell("s", replace(TINY, precision="high"), replace(FAST, peers=("fake",)))
    contest.measure_cell("s", TINY, replace(FAST, peers=("fake",)))
    assert seen == ["high", "highest"] and torch.get_float32_matmul_precision() == before


def test_a_device_that_is_lost_ends_the_run(monkeypatch):
    def unusable(device):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setitem(peers.PEERS, "fake", Faulty(that_raises))
    monkeypatch.setattr(contest, "recover", unusable)
    with pytest.raises(contest.DeviceLost, match="after fake the device is unusable: RuntimeError: no kernel"):
        contest.measure_cell("s", TINY, replace(FAST, peers=("fake",)))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_extra_bytes_are_the_peak_over_what_was_there(direction, monkeypatch):
    state = types.SimpleNamespace(peak=500)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: state.peak)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: setattr(state, "peak", 100))
    work = workload.make_workload(replace(TINY, direction=direction))

    def forward():
        state.peak += 40
        return work.peer()

    class Counting(peers.Contestant):
        def gradients(self, out, retain=True):
            state.peak += 7
            return super().gradients(out, retain)

    contestant = Counting("fake", forward, work.leaves, work.grad_out)
    problem = replace(TINY, direction=direction, device="cuda")
    assert contest.extra_bytes(contestant, problem) == (40 if direction == "forward" else 47)
    assert contest.extra_bytes(contestant, TINY) is None


# time


class FakeClock:
    """A device on which each call takes the seconds it is known for, the first sample of each much longer."""

    def __init__(self, **seconds: float) -> None:
        self.seconds, self.log = seconds, []

    def queue(self, racer):
        self.log.append(racer.call)
        return self.seconds[racer.call]

    def read(self, span):
        return span


def test_device_race_alternates_and_gives_the_hopeless_few():
    clock = FakeClock(ours=1e-2, peer=2e-2, math=1.0)
    racers = [race.Racer(name) for name in clock.seconds]
    timings = race.device_race(racers, clock, time_limit=0.25)
    assert [len(t.samples) for t in timings] == [25, 12, race.HOPELESS_SAMPLES]
    assert clock.log[:6] == ["ours", "peer", "math"] * 2 and clock.log[-1] == "ours"
    assert [t.median for t in timings] == [1e-2, 2e-2, 1.0]


def test_sample_counts_are_bounded():
    assert race.sample_counts([1e-6, 0.1], None, 0.25)[0] == race.MAX_SAMPLES
    assert race.sample_counts([0.1, 0.2], None, 0.25) == [race.MIN_SAMPLES] * 2
    assert race.sample_counts([0.1, 9.0], 4, 0.25) == [4, 4]
    assert race.sample_counts([0.1], None, 0.25, fewest=5) == [5]
    assert race.race([], "cuda", False) == []


# tables


def some_rows(suite: str = "gpu-forward", kernel: str = "triton_flash", few: int = 36) -> list[Row]:
    rows = []
    for number, problem in enumerate(SUITES[suite][:few]):
        fast, slow = Timing((1e-3 * (number + 1),)), Timing((2e-3 * (number + 1),))
        own = Entry(kernel, kernel, fast, fast.median, 1e-3, 4096)
        beside = (
            Entry("cudnn", "", slow, slow.median, 2e-3, 8192),
            Entry("fa4", "", fast, fast.median, 3e-3, 1024),
            Entry("math", reason="expected scores below 8 GB; got 9"),
        )
        rows.append(Row(suite, problem, own, beside))
    return rows


HEADER = {
    "date": "2030-01-02T03:04:05+00:00", "device": "nvidia_h200", "description": "NVIDIA H200",
    "versions": {"torch": "2.11.0", "flash-attn-4": "4.0"}, "command": "sdpa bench --suite gpu-forward",
    "driver": {"driver": "580.1", "sm_clock_max": "1980", "cudnn": "91900"},
}  # fmt: skip


def test_csv_round_trip(tmp_path):
    path = tmp_path / "h200.csv"
    written = table.Table(path, HEADER)
    for row in some_rows(few=3):
        written.add([row])
    comments, records = table.read(path)
    for fact in ("2030-01-02", "NVIDIA H200", "580.1", "sm_clock_max 1980", "cudnn 91900", "torch 2.11.0", "4.0"):
        assert fact in comments[0]
    assert comments[1] == "# sdpa bench --suite gpu-forward" and len(records) == 3
    first, problem = records[0], SUITES["gpu-forward"][0]
    assert table.problem_of(first) == problem and first["suite"] == "gpu-forward"
    assert first["kernel"] == "triton_flash" and float(first["ms"]) == 1.0 and first["unit"] == "TFLOP/s"
    assert float(first["tflops_or_gbs"]) == pytest.approx(problem.operations() * 1e-9, rel=1e-3)
    assert (first["best_peer"], first["ratio"], first["best_torch"], first["torch_ratio"]) == ("fa4", "1", "cudnn", "2")
    assert float(first["best_peer_value"]) == pytest.approx(2 * float(first["best_torch_value"]), rel=1e-3)
    assert (first["our_error"], first["peer_error"], first["our_bytes"]) == ("0.001", "0.003", "4096")
    assert table.unpaired(first["peers"]) == {"cudnn": "2", "fa4": "1"}
    assert table.unpaired(first["peer_bytes"]) == {"cudnn": "8192", "fa4": "1024"}
    assert table.unpaired(first["refused"]) == {"math": "expected scores below 8 GB, got 9"}
    assert [p.name for p in tmp_path.iterdir()] == ["h200.csv"]


def test_merge_replaces_what_is_measured_again(tmp_path):
    path = tmp_path / "h200.csv"
    table.Table(path, HEADER).add(some_rows(few=4))
    again = replace(some_rows(few=1)[0], peers=())
    table.Table(path, HEADER | {"command": "second"}, merge=True).add([again])
    comments, records = table.read(path)
    assert len(records) == 4 and "# second" in comments and len(comments) == 4
    assert [record["best_peer"] for record in records] == ["", "fa4", "fa4", "fa4"]
    table.Table(path, HEADER).add([again])
    assert len(table.read(path)[1]) == 1


def test_an_interrupted_write_leaves_the_table(tmp_path, monkeypatch):
    path = tmp_path / "h200.csv"
    written = table.Table(path, HEADER)
    written.add(some_rows(few=1))
    before = path.read_text()
    monkeypatch.setattr(table, "as_csv", lambda records: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        written.add(some_rows(few=2))
    assert path.read_text() == before


def test_a_csv_of_something_else_is_refused(tmp_path):
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"expected a CSV of `sdpa bench --csv`.*without the column suite"):
        table.read(path)


def test_summary_of_a_kernel():
    text = record.contest_summary("gpu-forward", "triton_flash", some_rows())
    assert text == (
        "suite=gpu-forward cells=36 geomean=1.000 worst=1.000 kernel=triton_flash "
        "torch_cells=36 torch_geomean=2.000 torch_worst=2.000"
    )
    none = replace(some_rows(few=1)[0], peers=())
    assert "cells=0 geomean=nan worst=nan" in record.contest_summary("s", "k", [none])


def test_lines_name_every_peer():
    (row,) = some_rows(few=1)
    text = line(row)
    for word in (row.problem.label, "triton_flash", "1 ms", "TFLOP/s", "cudnn=2 ms", "fa4=1 ms", "math=no"):
        assert word in text
    refused = replace(row, own=Entry("triton_decode", reason="has no backward pass"))
    assert "[yellow]" in line(refused) and "has no backward pass" in line(refused)
    assert "[red]" in line(replace(row, own=Entry("default", reason="wrong result", failed=True)))


def test_driver_facts(monkeypatch):
    asked = []

    def smi(command, **_):
        asked.append(command)
        return types.SimpleNamespace(stdout="580.95, 1980, 345\n")

    assert record.driver_facts("cpu") == {}
    monkeypatch.setattr(record.subprocess, "run", smi)
    facts = record.driver_facts("cuda:1")
    assert (facts["driver"], facts["sm_clock_max"], facts["sm_clock"]) == ("580.95", "1980", "345")
    assert "--id=1" in asked[0]
    monkeypatch.setattr(record.subprocess, "run", lambda *_, **__: (_ for _ in ()).throw(FileNotFoundError()))
    assert record.driver_facts("cuda:0") == {}


# pictures


@pytest.mark.parametrize("suite", GPU_SUITES)
def test_pictures_of_every_suite(suite, tmp_path):
    pytest.importorskip("matplotlib")
    from sdpa.bench import plots

    records = [table.as_record(row) for kernel in ("default", "triton_flash") for row in some_rows(suite, kernel)]
    plots.plot_contest(tmp_path / "p.png", suite, records)
    assert (tmp_path / "p.png").stat().st_size > 5000


def test_a_picture_has_a_panel_per_head_size_and_mask():
    pytest.importorskip("matplotlib")
    from sdpa.bench import plots

    records = [table.as_record(row) for kernel in ("default", "triton_flash") for row in some_rows(kernel=kernel)]
    panels = plots.panels_of(records)
    assert [title.split("head size ")[1] for title, _ in panels] == [
        f"{D} mask {mask}" for D in (64, 128, 256) for mask in ("none", "causal")
    ]
    for groups in panels.values():
        assert [place for place, _ in groups] == ["512", "1024", "2048", "4096", "8192", "16384"]
        assert all(set(bars) == {"sdpa (default)", "sdpa triton_flash", "cudnn", "fa4"} for _, bars in groups)
    masks = plots.panels_of([table.as_record(row) for row in some_rows("gpu-mask")])
    assert sorted(len(groups) for groups in masks.values()) == [3, 3, 3, 4]
    with pytest.raises(ValueError, match="no timed cell"):
        plots.plot_contest("p.png", "gpu-mask", records)


# the command


@pytest.fixture
def tiny_gpu_suite(monkeypatch):
    problems = (Problem(1, 2, 9, 9, 8, device="cuda"), Problem(1, 2, 9, 9, 8, mask="causal", device="cuda"))
    monkeypatch.setitem(SUITES, "tiny-gpu", problems)
    monkeypatch.setitem(GPU_SUITES, "tiny-gpu", problems)


def call(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == code, (result.exit_code, result.output, result.exception)
    return result.stdout + result.stderr


def test_bench_writes_every_form(tiny_gpu_suite, tmp_path):
    pytest.importorskip("matplotlib")
    csv, out, picture = (tmp_path / name for name in ("r.csv", "r.json", "r.png"))
    arguments = ("--suite", "tiny-gpu", "--device", "cpu", "--repeat", "2", "--kernel", "default", "--kernel", "math")
    text = call(*arguments, "--csv", str(csv), "--json", str(out), "--plot", str(picture))
    last = text.splitlines()[-1]
    assert last.startswith("suite=tiny-gpu cells=2 geomean=") and "kernel=math torch_cells=2 " in last
    comments, records = table.read(csv)
    assert [record["asked"] for record in records] == ["default", "math"] * 2 and f"# {last}" in comments
    data = json.loads(out.read_text())
    assert data["rows"] == records and data["summaries"][-1] == last and data["driver"] == {}
    assert picture.stat().st_size > 5000
    again = call(*arguments, "--csv", str(csv), "--merge", "--cells", "causal")
    assert again.splitlines()[-1].startswith("suite=tiny-gpu cells=1 ")
    assert len(table.read(csv)[1]) == 4 and len(table.read(csv)[0]) > len(comments)
    call("--from-csv", str(csv), "--plot", str(tmp_path / "again.png"))
    assert (tmp_path / "again.png").stat().st_size > 5000


def test_bench_of_several_suites(tiny_gpu_suite, monkeypatch, tmp_path):
    monkeypatch.setitem(SUITES, "tiny", (Problem(1, 2, 9, 9, 8),))
    text = call("--suite", "tiny-gpu", "--suite", "tiny", "--device", "cpu", "--repeat", "1", "--peer", "flash")
    assert [line.split()[0] for line in text.splitlines()[-2:]] == ["suite=tiny-gpu", "suite=tiny"]
    assert "flash=" in text and "torch=" not in text
    plain = call("--suite", "tiny", "--repeat", "1", "--json", str(tmp_path / "r.json"))
    assert "peer's backend" in plain and json.loads((tmp_path / "r.json").read_text())["suite"] == "tiny"


def test_bench_fails_where_ours_is_wrong(tiny_gpu_suite, monkeypatch, tmp_path):
    honest = workload.Workload.ours
    monkeypatch.setattr(workload.Workload, "ours", lambda self, kernel=None: honest(self, kernel) * 1.1)
    path = tmp_path / "r.csv"
    text = call("--suite", "tiny-gpu", "--device", "cpu", "--repeat", "1", "--csv", str(path), code=1)
    assert "wrong result: out" in text and "cells=0 geomean=nan" in text
    records = table.read(path)[1]
    assert all(r["ms"] == "" and "wrong result" in r["note"] and "torch:" in r["peers"] for r in records)


def test_rows_are_written_as_they_come(tiny_gpu_suite, monkeypatch, tmp_path):
    """A run that is killed leaves what it had."""
    path, measured = tmp_path / "r.csv", contest.measure_cell

    def dies_at_the_second(suite, problem, options):
        if problem.mask == "causal":
            raise KeyboardInterrupt
        return measured(suite, problem, options)

    monkeypatch.setattr(contest, "measure_cell", dies_at_the_second)
    text = call("--suite", "tiny-gpu", "--device", "cpu", "--repeat", "1", "--csv", str(path), code=130)
    assert "float32 1,2,9,8 none forward" in text and len(table.read(path)[1]) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--suite", "tiny-gpu", "--merge"), "--merge needs --csv FILE"),
        (("--from-csv", "x.csv"), "--from-csv needs --plot FILE"),
        (("--suite", "tiny-gpu", "--csv", "/no/such/folder/f.csv"), "expected a file in a folder that exists"),
        (("--suite", "tiny-gpu", "--device", "cpu", "--kernel", "x"), "unknown kernel or backend 'x'"),
        (("--suite", "tiny-gpu", "--suite", "nope"), "unknown suite 'nope'"),
    ],
)
def test_bench_complains_in_one_sentence(tiny_gpu_suite, arguments, said):
    assert said in call(*arguments, code=2)


def test_bench_complains_of_a_csv(tiny_gpu_suite, tmp_path):
    pytest.importorskip("matplotlib")
    picture = str(tmp_path / "p.png")
    assert "No such file" in call("--from-csv", str(tmp_path / "none.csv"), "--plot", picture, code=1)
    other = tmp_path / "other.csv"
    other.write_text("a,b\n")
    assert "without the column suite" in call("--from-csv", str(other), "--plot", picture, code=1)
    merged = ("--suite", "tiny-gpu", "--device", "cpu", "--csv", str(other), "--merge")
    assert "without the column suite" in call(*merged, code=1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_gpu_suite_without_a_gpu():
    assert "expected a device of this machine, got 'cuda'" in call("--suite", "gpu-forward", code=2)


def test_geomean_of_ratios_is_what_the_rows_say():
    rows = some_rows(few=2)
    assert math.isclose(record.geomean([row.torch_ratio for row in rows]), 2.0)


# on a device


@pytest.mark.gpu
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("mask", MASKS)
def test_every_mask_has_a_contest_on_a_gpu(mask, direction):
    """Ours is right and timed, and so is one of torch's backends."""
    problem = Problem(2, 8, 256, 256, 64, "bfloat16", mask, direction, device="cuda")
    (row,) = contest.measure_cell("s", problem, replace(FAST, peers=tuple(peers.TORCH_BACKENDS)))
    assert row.own.seconds and row.own.kernel and row.own.bytes, row.own
    assert any(peer.seconds and peer.bytes for peer in row.peers), row.peers


@pytest.mark.gpu
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("mask", ["window", "alibi", "segments", "lengths", "bias_grad"])
def test_flex_is_compiled_on_a_gpu(mask, direction):
    problem = Problem(2, 8, 256, 256, 64, "bfloat16", mask, direction, device="cuda")
    (row,) = contest.measure_cell("s", problem, replace(FAST, peers=("flex",)))
    assert row.peers[0].seconds and row.peers[0].bytes, row.peers


@pytest.mark.gpu
def test_a_device_race_hides_the_host():
    """A call that takes the host long is timed as short as it is on the device."""
    small = torch.zeros(1024, device="cuda")

    def slow():
        end = time.perf_counter() + 2e-4
        while time.perf_counter() < end:
            pass
        small.zero_()

    timing, _ = race.race([race.Racer(slow), race.Racer(small.zero_)], "cuda", False, rounds=20)
    assert timing.median < 5e-5
    assert race.race([race.Racer(slow)], "cuda", True, rounds=5)[0].median >= 2e-4
