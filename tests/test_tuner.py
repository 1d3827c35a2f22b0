"""The tuner: its grid on a GPU, who takes part, which tiles are tried, and what it puts into tables."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from helpers import CPU_TILES, ON_GPU, PROBLEM
from sdpa.bench import book, tuner
from sdpa.bench.gpu_grid import Cell
from sdpa.bench.suites import GPU_SUITES
from sdpa.bench.timing import Timing
from sdpa.bench.workload import make_workload
from sdpa.dispatch import placing, select, tables, tuning
from sdpa.dispatch.catalog import by_name
from sdpa.inputs import Options, build_inputs
from sdpa.problem import AttentionProblem, Results, Tile
from sdpa.torch_private import float32_precision

pytestmark = pytest.mark.usefixtures("several_tiles")


def test_the_grid_of_a_gpu():
    cells = tuner.grid("cuda:1")
    keys = [book.entry_key(cell) for cell in cells]
    assert len(set(keys)) == len(keys) and len(keys) < 290 and all(cell.device == "cuda:1" for cell in cells)
    assert {key[2] for key in keys} == {
        "none", "causal", "window", "lengths", "segments", "bias", "bias_grad", "dense", "rows",
    }  # fmt: skip
    assert {key[1] for key in keys} == {"bfloat16", "float32", "tfloat32"}, "float16 takes the figures of bfloat16"
    assert {cell.D for cell in cells} == {32, 40, 64, 72, 80, 96, 128, 160, 192, 256}
    assert {name for cell in cells for name in book.beside_of(cell)} == {"dropout", "softcap"}
    assert all(c.dtype == "bfloat16" and c.mask in ("none", "causal") for c in cells[:20])
    measured = [p for cells in GPU_SUITES.values() for p in cells if p.mask != "alibi" and not p.call]
    assert {book.entry_key(p) for p in measured} <= set(keys)
    assert {(c.M, c.B) for c in cells if c.M in (1, 8)} >= {(1, 1), (1, 16), (1, 64), (8, 1), (8, 16)}
    assert all(cell.H % cell.Hkv == 0 for cell in cells)


@pytest.mark.parametrize("mask", sorted({cell.mask for cell in tuner.grid("cuda")}))
def test_a_cell_is_the_problem_its_entry_answers_for(mask, gpu):
    cell = Cell(2, 2, 1100, 1100, 8, mask=mask)
    extra = frozenset({"bias_grad"} if mask == "bias_grad" else ())
    asked = AttentionProblem.of(tuner.inputs_of(make_workload(cell)), extra=extra)._replace(device="cuda:0")
    cell = replace(cell, device="cuda:0")
    rows_are_told = "row_mask" in AttentionProblem._fields
    expected = "dense" if mask == "padding" and not rows_are_told else book.mask_kind(cell)
    assert tuning.mask_kind(asked) == expected


def test_all_tiles_are_tried_where_a_cell_explores(user, monkeypatch):
    seen = []
    module = by_name()["cpu_flash"].load()
    honest = module.forward
    monkeypatch.setattr(module, "forward", lambda i, p, tile: (seen.append(tile), honest(i, p, tile))[1])
    monkeypatch.setattr(tuner, "TILE_REACH", float("inf"))
    cell = Cell(1, 2, 40, 40, 16)
    contest = tuner.Contest(("cpu_flash",))
    found = tuner.measure(replace(cell, explore=True), 0.0, contest)
    assert set(seen) == set(CPU_TILES) and Tile(*found["tile"]["cpu_flash"]) in CPU_TILES
    assert list(found["ms"]) == ["cpu_flash"] and tables.parse_entry(0, found)
    seen.clear()
    tuner.measure(cell, 0.0, contest)
    assert set(seen) == {CPU_TILES[0]}, "nothing learnt: the first guess alone"
    seen.clear()
    learnt = [
        {**found, "tile": {"cpu_flash": list(CPU_TILES[3])}},
        {**found, "M": 4, "tile": {"cpu_flash": [1, 1, 0, 0]}},
    ]
    tuner.measure(cell, 0.0, tuner.Contest(("cpu_flash",), learnt))
    assert set(seen) == {CPU_TILES[0], CPU_TILES[3]}, "and what was best nearby"


def test_a_tile_or_kernel_that_fails_is_told_of_and_left_out(user, monkeypatch):
    module = by_name()["cpu_flash"].load()
    honest, told = module.forward, []

    def picky(inputs, problem, tile):
        if tile is CPU_TILES[0]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return honest(inputs, problem, tile)

    monkeypatch.setattr(module, "forward", picky)
    cell = Cell(1, 2, 40, 40, 16, explore=True)
    found = tuner.measure(cell, 0.0, tuner.Contest((), [], told.append))
    assert Tile(*found["tile"]["cpu_flash"]) in CPU_TILES[1:] and "math" in found["ms"]
    assert len(told) == 1 and "cpu_flash" in told[0] and "OutOfMemoryError: CUDA out of memory" in told[0]
    monkeypatch.setattr(module, "forward", lambda *_: 1 / 0)
    found = tuner.measure(cell, 0.0, tuner.Contest((), [], told.append))
    assert "cpu_flash" not in found["ms"] and "tile" not in found and len(told) == 1 + len(CPU_TILES)


@pytest.mark.parametrize("M,B,measured", [(64, 64, True), (1024, 1, True), (1024, 3, False), (4096, 1, False)])
def test_keys_are_split_where_rows_or_programs_are_few(M, B, measured, monkeypatch):
    monkeypatch.setattr(tuner, "device_of", lambda name: SimpleNamespace(cores=132))
    problem = PROBLEM._replace(device="cuda:0", B=B, M=M, N=16384)
    decode, flash = (by_name()[name] for name in ("triton_decode", "triton_flash"))
    assert tuner.worth_timing({decode: 1e-3, flash: 1e-3}, problem) == [decode, flash][not measured :]


def test_slow_tiles_are_dropped_after_one_sample():
    a, b, c = (("flash", Tile(n, n)) for n in (1, 2, 3))
    first = {a: 1.0, b: tuner.TILE_SLACK * 1.01, c: tuner.TILE_SLACK, ("other", None): 9.0}
    assert set(tuner.without_slow_tiles(first)) == {a, c, ("other", None)}
    ms = tuner.figures({a: 2e-3, c: 1e-3, ("math", None): 5e-3}, PROBLEM, by_name() | {"flash": by_name()["cpu_flash"]})
    assert ms == {"ms": {"math": 5.0, "flash": 1.0}, "tile": {"flash": [3, 3, 0, 0]}}


def test_a_launch_that_takes_the_host_longer_costs_a_share_of_it(monkeypatch):
    device_times = {"slow_host": 1e-5, "slow_device": 4e-5}
    host_times = {"slow_host": 5e-5, "slow_device": 1e-5}
    limits = []

    def race(racers, device, time_limit):
        limits.append(time_limit)
        return [Timing((9.0, device_times[racer.call], 0.0)) for racer in racers]

    monkeypatch.setattr(tuner, "device_race", race)
    monkeypatch.setattr(tuner, "queue_seconds", lambda racer: host_times[racer.call])
    calls = {name: name for name in device_times}
    expected = {"slow_host": pytest.approx(1e-5 + tuner.HOST_SHARE * 4e-5), "slow_device": 4e-5}
    assert tuner.gpu_race(calls, "cuda", 0.5) == expected
    assert limits == [0.5], "seconds of each"
    first = {"slow_host": 1.0, "slow_device": 1.0, "hopeless": 1.0 + tuner.HOPELESS}
    raced = tuner.race({**calls, "hopeless": "hopeless"}, "cuda", 0.5, first)
    assert raced == {**expected, "hopeless": 1.0 + tuner.HOPELESS}


def test_a_call_that_had_to_wait_is_not_hopeless():
    waited = iter((2e-3, 1.4e-3, 1.3e-3, 1e-4, 1.2e-3, 1.1e-3))
    assert tuner.warm_sample("call", lambda call, repeats: next(waited)) == 1e-4
    waited_twice = iter((2e-2, 4e-3, 3e-3, 3e-4, 4e-4, 5e-4))
    assert tuner.warm_sample("call", lambda call, repeats: next(waited_twice)) == 3e-4
    slow = iter((0.5, 0.4))
    assert tuner.warm_sample("call", lambda call, repeats: next(slow)) == 0.4, "long ones are called twice"
    slowest = iter((1.5,))
    assert tuner.warm_sample("call", lambda call, repeats: next(slowest)) == 1.5


def test_the_host_does_not_matter_to_long_calls(monkeypatch):
    long = tuner.HOST_MATTERS * 1.01
    monkeypatch.setattr(tuner, "device_race", lambda *_: [Timing((long,))])
    monkeypatch.setattr(tuner, "queue_seconds", lambda racer: pytest.fail("asked the host"))
    assert tuner.gpu_race({"call": "call"}, "cuda", 0.5) == {"call": long}


def test_what_is_not_ready_is_not_run(user, monkeypatch):
    seen = []
    module = by_name()["cpu_flash"].load()
    honest = module.forward
    monkeypatch.setattr(module, "forward", lambda i, p, tile: (seen.append(tile), honest(i, p, tile))[1])
    monkeypatch.setattr(tuner, "TILE_REACH", float("inf"))
    cell = Cell(1, 2, 40, 40, 16, explore=True)
    contest = tuner.Contest(("cpu_flash", "math"), ready=lambda kernel, tile, asked: tile in (None, CPU_TILES[1]))
    found = tuner.measure(cell, 0.0, contest)
    assert set(seen) == {CPU_TILES[1]} and Tile(*found["tile"]["cpu_flash"]) == CPU_TILES[1] and "math" in found["ms"]
    seen.clear()
    contest.ready = lambda kernel, tile, asked: tile is None
    assert set(tuner.measure(cell, 0.0, contest)["ms"]) == {"math"} and not seen


def test_the_same_code_is_measured_once(gpu):
    flash = by_name()["cpu_flash"]
    assert tuner.without_twins([flash, by_name()["math"], replace(flash, name="twin")], PROBLEM) == [
        flash, by_name()["math"],
    ]  # fmt: skip


def test_kernels_that_split_keys_are_for_few_queries(gpu, monkeypatch):
    split = replace(by_name()["vendor_flash"], splits_keys=True, directions=("forward",))
    both = replace(split, directions=("forward", "backward"))  # a kernel that also splits keys
    monkeypatch.setattr(select, "consider", lambda asked: [select.Candidate(k, (), 1.0, "") for k in (split, both)])
    assert tuner.contestants(ON_GPU._replace(M=4, N=8192, H=32, Hkv=8), tuner.Contest()) == [split, both]
    assert tuner.contestants(ON_GPU._replace(M=1024), tuner.Contest()) == [both]


def test_who_is_left_out_on_a_gpu(gpu, monkeypatch):
    math = replace(by_name()["math"], efficiency=0.3)
    fused, slow = by_name()["vendor_flash"], replace(by_name()["vendor_efficient"], efficiency=0.01)
    monkeypatch.setattr(
        select, "consider", lambda asked: [select.Candidate(k, (), 1.0, "") for k in (math, fused, slow)]
    )
    assert tuner.contestants(ON_GPU, tuner.Contest()) == [math, fused], "its estimate is hopeless"
    assert tuner.contestants(ON_GPU._replace(N=65536), tuner.Contest()) == [fused], "64 GiB of scores"
    assert tuner.contestants(ON_GPU, tuner.Contest(("math", slow.name))) == [math]
    on_cpu = ON_GPU._replace(device="cpu", N=65536)
    assert tuner.contestants(on_cpu, tuner.Contest()) == [math, fused, slow]


def test_who_is_worth_a_compilation():
    flash, efficient = replace(by_name()["cpu_flash"]), replace(by_name()["cpu_flash"], family="efficient")
    plain, dense = PROBLEM, PROBLEM._replace(features=frozenset({"bias"}))
    cell, usual = Cell(1, 1, 8, 8, 8), Cell(1, 1, 8, 8, 8, explore=True)
    assert not tuner.worth_building(efficient, cell, plain)
    assert tuner.worth_building(efficient, usual, plain) and tuner.worth_building(efficient, cell, dense)
    assert tuner.worth_building(efficient, cell, PROBLEM._replace(features=frozenset({"dropout"})))
    assert tuner.worth_building(flash, cell, plain) and tuner.worth_building(by_name()["vendor_efficient"], cell, plain)


def test_float32_cells_say_whether_products_may_be_rounded():
    before = torch.get_float32_matmul_precision()
    exact, rounded = (Cell(1, 1, 8, 8, 8, precision=precision) for precision in ("highest", "high"))
    assert book.entry_key(exact)[1] == "float32" and book.entry_key(rounded)[1] == "tfloat32"
    for cell in (exact, rounded):
        with tuner.precision(cell):
            assert (float32_precision() == "tf32") == (cell is rounded)  # which a problem on a GPU reads
    assert torch.get_float32_matmul_precision() == before


def test_backwards_run_on_the_results_of_one_forward(user, monkeypatch):
    module = by_name()["cpu_flash"].load()
    honest, seen = module.backward, []

    def backward(inputs, results, upstream, problem, tile):
        assert isinstance(results, Results) and results.lse is not None and upstream.out.shape == results.out.shape
        seen.append(id(results.out))
        return honest(inputs, results, upstream, problem, tile)

    monkeypatch.setattr(module, "backward", backward)
    found = tuner.measure(Cell(1, 2, 24, 24, 16, direction="backward"), 0.0)
    assert {"cpu_flash", "math"} <= set(found["ms"]) and len(set(seen)) == 1


def test_kernels_that_need_copies_share_them(monkeypatch):
    """They are timed on the copies, whose making is estimated for any kernel."""
    monkeypatch.setattr("sdpa.alignment.lies_on_gpu", lambda tensor: True)
    made, seen = [], []
    monkeypatch.setattr(tuner, "placed", lambda names, *tensors: made.append(names) or placing.placed(names, *tensors))
    monkeypatch.setattr(tuner, "repeated", lambda kernel, tile, asked, *tensors: seen.append((asked, *tensors)))
    q, bias = torch.randn(1, 2, 13, 8), torch.randn(1, 2, 13, 13)
    inputs = build_inputs(q, q, q, Options(bias))
    asked = AttentionProblem.of(inputs, "backward")
    rows = frozenset({"bias", "bias_rows"})
    needs, reads = (replace(by_name()["cpu_flash"], alignment=n, aligned=rows) for n in (16, 1))
    call = tuner.caller(inputs, asked, torch.randn_like(q))
    for kernel, tile in ((needs, None), (needs, Tile(1, 2)), (reads, None)):
        call(kernel, tile)
    assert made == [rows] and seen[0][1] is seen[1][1] and seen[2][1] is inputs
    assert seen[0][0].unaligned == () and seen[2][0] == asked and asked.unaligned == (("bias_rows", 4),)
    assert seen[0][1].bias.stride() == (2 * 13 * 16, 13 * 16, 16, 1) and torch.equal(seen[0][1].bias, bias)
