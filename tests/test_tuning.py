"""Tuning tables: broken ones are named and ignored, the user's come first, writes are atomic, nearest bucket wins; and
what the tuner puts into them."""

from __future__ import annotations

import copy
import stat
import warnings
from dataclasses import replace

import pytest
import torch
import yaml

import sdpa
from sdpa.bench import tuner
from sdpa.bench.gpu_grid import Cell
from sdpa.bench.suites import GPU_SUITES
from sdpa.bench.timing import Timing
from sdpa.bench.workload import make_workload
from sdpa.dispatch import cost, device, select, tuning
from sdpa.dispatch.catalog import by_name
from sdpa.dispatch.context import ALL_TOGGLES
from sdpa.problem import AttentionProblem, Results, Tile

PROBLEM = AttentionProblem("cpu", torch.float32, 1, 8, 8, 1024, 1024, 64, 64)
NAME = device.device_of("cpu").names[0]


@pytest.fixture
def user(tmp_path, monkeypatch):
    """The user's folder, empty; no table is shipped."""
    folder = tmp_path / "user"
    monkeypatch.setenv("SDPA_TUNING_DIR", str(folder))
    monkeypatch.setattr(tuning, "SHIPPED", tmp_path / "shipped")
    (tmp_path / "shipped").mkdir()
    select.clear_caches()
    yield folder
    select.clear_caches()


def entry(ms, **changes):
    sizes = {"B": 1, "H": 8, "Hkv": 8, "M": 1024, "N": 1024, "D": 64, "Dv": 64}
    return {"direction": "forward", "dtype": "float32", "mask": "none", **sizes, **changes, "ms": ms}


def table(*entries, **changes):
    header = {
        "schema": 1,
        "device": NAME,
        "date": "2026-01-31",
        "versions": {"torch": "2.13.0"},
        "command": "sdpa tune",
    }
    return {**header, "entries": list(entries), **changes}


def put(folder, data, name=NAME):
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.yaml"
    path.write_text(data if isinstance(data, str) else yaml.safe_dump(data))
    return path


def test_a_table_decides(user):
    for winner, loser in (("vendor_math", "cpu_flash"), ("cpu_flash", "vendor_math")):
        put(user, table(entry({winner: 0.001, loser: 9.0, "vendor_cpu_flash": 5.0, "math": 7.0})))
        select.clear_caches()
        choice = select.choose(PROBLEM, "", 0b1111)
        assert choice.kernel.name == winner and f"{NAME}: measured at B1,H8" in choice.reason


def test_a_table_never_changes_what_is_able(user):
    put(user, table(entry({"vendor_flash": 1e-6, "math": 1.0})))
    assert select.choose(PROBLEM, "", 0b1111).kernel.name != "vendor_flash"


def test_times_show_in_explain(user):
    put(user, table(entry({"math": 3.0})))
    q = torch.ones(1, 8, 1024, 64)
    row = next(r for r in sdpa.explain(q, q, q).rows if r.kernel == "math")
    assert row.seconds == pytest.approx(3e-3) and row.source.startswith(f"{NAME}: measured at")


BROKEN = {
    "not_yaml": ("entries: [}", "while parsing"),
    "half_written": ("schema: 1\ndevice: amd", "expected 'device'|expected 'date'|expected a table"),
    "empty": ("", "expected a mapping, got NoneType"),
    "list": ("- 1\n- 2", "expected a mapping, got list"),
    "python_object": ("!!python/object/apply:os.system ['true']", "could not determine a constructor"),
    "schema": (table(schema=2), "expected schema 1, got 2"),
    "schema_text": (table(schema="1"), "expected 'schema' to be a int, got '1'"),
    "no_device": (table(device=None), "expected 'device' to be a str, got None"),
    "foreign": (table(device="nvidia_h200"), f"expected a table of device {NAME}, got one of 'nvidia_h200'"),
    "no_date": (table(date=None), "expected 'date'"),
    "versions": (table(versions=["torch"]), r"expected 'versions' to be a dict, got \['torch'\]"),
    "entries": (table(entries={}), "expected 'entries' to be a list"),
    "entry": (table(3), "entry 0: expected a mapping, got 3"),
    "direction": (table(entry({"math": 1.0}, direction=1)), "entry 0: expected direction, dtype and mask"),
    "size_text": (table(entry({"math": 1.0}, M="8")), "entry 0: expected positive integers for B, H, Hkv, M"),
    "size_zero": (table(entry({"math": 1.0}), entry({"math": 1.0}, N=0)), "entry 1: expected positive integers"),
    "no_times": (table(entry({})), "entry 0: expected ms to map kernels to positive milliseconds, got {}"),
    "negative": (table(entry({"math": -1.0})), "expected ms to map"),
    "infinite": (table(entry({"math": float("inf")})), "expected ms to map"),
    "text_time": (table(entry({"math": "fast"})), "expected ms to map"),
    "bool_time": (table(entry({"math": True})), "expected ms to map"),
    "tile_list": (table(entry({"math": 1.0}, tile=[1, 2])), "entry 0: expected tile to map kernels of ms to"),
    "tile_short": (table(entry({"math": 1.0}, tile={"math": [64, 64]})), r"to \[BLOCK_M, BLOCK_N, num_warps"),
    "tile_zero": (table(entry({"math": 1.0}, tile={"math": [64, 0, 4, 2]})), "expected tile to map"),
    "tile_float": (table(entry({"math": 1.0}, tile={"math": [64, 64, 4, 2.0]})), "expected tile to map"),
    "tile_without_time": (table(entry({"math": 1.0}, tile={"flash": [64, 64, 4, 2]})), "expected tile to map"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_table_is_named_and_ignored_as_a_whole(name, user):
    data, text = BROKEN[name]
    path = put(user, data)
    with pytest.warns(UserWarning, match=text) as caught:
        choice = select.choose(PROBLEM, "", 0b1111)
    assert str(path) in str(caught[0].message) and "is ignored" in str(caught[0].message)
    assert "measured" not in choice.reason


def test_bytes_that_are_no_text(user):
    put(user, "").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.warns(UserWarning, match="is ignored"):
        select.choose(PROBLEM, "", 0b1111)


def test_a_folder_in_place_of_a_table_is_no_table(user):
    (user / f"{NAME}.yaml").mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        select.choose(PROBLEM, "", 0b1111)


def test_a_broken_table_warns_once_and_the_shipped_one_serves(user):
    put(user, "entries: [}")
    put(tuning.SHIPPED, table(entry({"math": 0.001})))
    with pytest.warns(UserWarning) as caught:
        first = select.choose(PROBLEM, "", 0b1111)
        select.choose(PROBLEM._replace(M=1000), "", 0b1111)
    assert len(caught) == 1 and first.kernel.name == "math"


def test_the_users_table_comes_before_the_shipped(user):
    put(tuning.SHIPPED, table(entry({"math": 0.001})))
    assert select.choose(PROBLEM, "", 0b1111).kernel.name == "math"
    put(user, table(entry({"vendor_math": 0.0001, "math": 5.0})))
    select.clear_caches()
    assert select.choose(PROBLEM, "", 0b1111).kernel.name == "vendor_math"


def test_the_nearest_bucket_within_reach(user):
    put(user, table(
        entry({"math": 1.0}, M=256, N=256),
        entry({"math": 2.0}, M=2048, N=2048),
        entry({"math": 3.0}, mask="causal"),
        entry({"math": 4.0}, dtype="bfloat16"),
        entry({"math": 5.0}, direction="backward"),
    ))  # fmt: skip
    assert "M2048,N2048" in tuning.measured(PROBLEM._replace(M=1500, N=1500)).source
    assert "M256,N256" in tuning.measured(PROBLEM._replace(M=300, N=300)).source
    assert tuning.measured(PROBLEM._replace(M=16, N=16)) is None
    assert tuning.measured(PROBLEM._replace(D=1024, Dv=1024)) is None
    causal = PROBLEM._replace(right=0, features=frozenset({"band"}))
    assert "causal" in tuning.measured(causal).source
    assert tuning.measured(causal._replace(left=5)) is None
    assert tuning.measured(PROBLEM._replace(dtype=torch.float16)) is None
    assert tuning.measured(PROBLEM._replace(direction="backward")).seconds["math"] == pytest.approx(5e-3)


def test_times_scale_with_the_work(user):
    put(user, table(entry({"math": 1.0})))
    twice = tuning.measured(PROBLEM._replace(B=2)).seconds["math"]
    assert twice == pytest.approx(2e-3)


def test_writing_is_private_atomic_and_read_back(user):
    path = user / "deeper" / f"{NAME}.yaml"
    data = table(entry({"math": 1.5}))
    tuning.write(path, data)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert yaml.safe_load(path.read_text()) == data
    assert tuning.read(str(path)).buckets[0].ms == {"math": 1.5}
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_writing_refuses_what_reading_would_ignore(user):
    path = put(user, table(entry({"math": 1.0})))
    before = path.read_text()
    bad = copy.deepcopy(table(entry({"math": -1.0})))
    with pytest.raises(ValueError, match="positive milliseconds"):
        tuning.write(path, bad)
    assert path.read_text() == before


def test_a_failed_write_leaves_the_old_table_and_no_rest(user, monkeypatch):
    path = put(user, table(entry({"math": 1.0})))
    before = path.read_text()

    def half(data, file, **options):
        file.write("schema: 1\nent")
        raise OSError("disk full")

    monkeypatch.setattr(tuning.yaml, "safe_dump", half)
    with pytest.raises(OSError, match="disk full"):
        tuning.write(path, table(entry({"math": 2.0})))
    assert path.read_text() == before and [p.name for p in user.iterdir()] == [path.name]


def test_writing_forgets_what_was_read(user):
    path = put(user, table(entry({"math": 1.0})))
    assert tuning.read(str(path)).buckets[0].ms == {"math": 1.0}
    tuning.write(path, table(entry({"math": 2.0})))
    assert tuning.read(str(path)).buckets[0].ms == {"math": 2.0}


def test_shipped_tables_are_readable():
    for path in tuning.SHIPPED.glob("*.yaml"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert tuning.read(str(path)) is not None


# tiles


CPU_TILES = by_name()["cpu_flash"].load().TILES


def test_the_measured_tile_is_passed_as_the_kernel_offers_it(user):
    put(user, table(entry({"cpu_flash": 0.001, "math": 9.0}, tile={"cpu_flash": list(CPU_TILES[2])})))
    choice = select.choose(PROBLEM, "", ALL_TOGGLES)
    assert choice.kernel.name == "cpu_flash" and choice.tile is CPU_TILES[2]
    assert select.choose(PROBLEM._replace(dtype=torch.float64), "flash", ALL_TOGGLES).tile is CPU_TILES[0]


def test_a_tile_that_is_no_longer_offered_gives_way_to_the_first(user):
    put(user, table(entry({"cpu_flash": 0.001}, tile={"cpu_flash": [7, 7, 1, 1]})))
    assert select.choose(PROBLEM, "", ALL_TOGGLES).tile is CPU_TILES[0]


def test_a_kernel_says_which_tiles_make_sense_for_a_problem(user, monkeypatch):
    module = by_name()["cpu_flash"].load()
    offered = (Tile(16, 16, 1, 1), Tile(32, 32, 1, 1))
    monkeypatch.setattr(module, "tiles", lambda p: offered if p.D == 64 else offered[1:], raising=False)
    put(user, table(entry({"cpu_flash": 0.001}, tile={"cpu_flash": [32, 32, 1, 1]})))
    assert select.choose(PROBLEM, "", ALL_TOGGLES).tile is offered[1]
    assert select.choose(PROBLEM._replace(M=8, N=8), "flash", ALL_TOGGLES).tile is offered[0]
    put(user, table(entry({"cpu_flash": 0.001}, tile={"cpu_flash": list(CPU_TILES[0])})))
    select.clear_caches()
    assert select.choose(PROBLEM, "", ALL_TOGGLES).tile is offered[0]
    select.clear_caches()


# measured against estimated


def test_an_estimate_does_not_win_over_a_measurement(user):
    put(user, table(entry({"vendor_cpu_flash": 1e6, "math": 2e6})))
    choice = select.choose(PROBLEM, "", ALL_TOGGLES)
    assert choice.kernel.name == "vendor_cpu_flash" and "measured" in choice.reason
    assert select.choose(PROBLEM, "flash,math;p", ALL_TOGGLES).kernel.name == "vendor_cpu_flash"
    assert select.choose(PROBLEM, "cpu_flash,math;p", ALL_TOGGLES).kernel.name == "cpu_flash", "the order given holds"


def test_what_writes_out_the_scores_does_not_win_by_being_the_only_one_measured(user):
    put(user, table(entry({"vendor_math": 1e6, "math": 2e6})))
    assert select.choose(PROBLEM, "", ALL_TOGGLES).kernel.name in ("cpu_flash", "vendor_cpu_flash")


# buckets of a GPU

GPU = device.Device("cuda", "A GPU", ("nvidia_test",), 132, 9e14, 6e13, 3e13, 3e12)
ON_GPU = AttentionProblem("cuda:0", torch.bfloat16, 16, 16, 16, 1024, 1024, 128, 128)
SIZES = {"B": 16, "H": 16, "Hkv": 16, "M": 1024, "N": 1024, "D": 128, "Dv": 128}


@pytest.fixture
def gpu(monkeypatch):
    for module in (tuning, cost):
        monkeypatch.setattr(module, "device_of", lambda name: GPU)


def buckets(*changes):
    """Buckets whose only kernel is named by what makes them different."""
    made = []
    for number, change in enumerate(changes):
        name = ",".join(map(str, change.values()))
        options = {"dtype": "bfloat16", **SIZES, **change}
        made.append(tuning.parse_entry(number, entry({name: 1.0}, **options)))
    return tuple(made)


def answer(found, problem):
    bucket = tuning.nearest(found, problem)
    return bucket and next(iter(bucket.ms))


def features(*names, **changes):
    return ON_GPU._replace(features=frozenset(names), **changes)


KINDS = {
    "none": (features(), ["none"]),
    "dropout": (features("dropout", "lse"), ["none"]),
    "alibi": (features("alibi", "band", right=0), ["causal"]),
    "window": (features("band", left=64, right=0), ["window"]),
    "bias": (features("bias"), ["bias", "dense"]),
    "bias_causal": (features("bias", "band", right=0), ["bias", "dense"]),
    "bias_grad": (features("bias", "bias_grad", direction="backward"), ["bias_grad", "bias", "dense"]),
    "dense": (features("allowed"), ["dense", "bias"]),
    "lengths": (features("k_lengths"), ["lengths", "structured", "none"]),
    "lengths_causal": (features("k_lengths", "band", right=0), ["lengths", "structured", "causal"]),
    "packed_causal": (features("packed", "band", right=0), ["segments", "structured", "causal"]),
    "a_few_new_queries": (features("band", "bottom_right", right=0, bottom_right=True, M=8, N=4096), ["none"]),
}


@pytest.mark.parametrize("name", KINDS)
def test_kinds_of_masks_and_what_stands_in_for_them(name, gpu):
    problem, kinds = KINDS[name]
    assert list(tuning.mask_kinds(problem)) == kinds and tuning.mask_kind(problem) == kinds[0]
    sizes = {"M": problem.M, "N": problem.N, "direction": problem.direction}
    found = buckets(*({"mask": kind, **sizes} for kind in ("dense", "causal", "rows", *kinds, "window", "none")))
    for place, kind in enumerate(kinds):
        left = tuple(b for b in found if b.mask not in kinds[:place])
        assert tuning.nearest(left, problem).mask == kind
    assert tuning.nearest(tuple(b for b in found if b.mask not in kinds), problem) is None


def test_a_mask_of_one_row_is_told_from_one_of_many(gpu):
    class WithRows(AttentionProblem):
        row_mask = True

    assert tuning.mask_kinds(WithRows(*features("allowed"))) == ("rows", "dense", "bias")


def test_dtypes_of_a_gpu(gpu):
    found = buckets({"dtype": "bfloat16"}, {"dtype": "float32"}, {"dtype": "tfloat32"})
    half, single = ON_GPU._replace(dtype=torch.float16), ON_GPU._replace(dtype=torch.float32)
    assert answer(found, half) == "bfloat16" and answer(found, single) == "float32"
    assert answer(found, single._replace(tf32=True)) == "tfloat32"
    assert answer(found[:2], single._replace(tf32=True)) is None
    assert answer((*found, *buckets({"dtype": "float16"})), half) == "float16"


def test_a_gpu_that_is_not_full_is_another_problem(gpu):
    full, empty = {"B": 16}, {"B": 1, "H": 4, "Hkv": 4}
    found = buckets(full, empty)
    assert answer(found, ON_GPU._replace(B=2, H=2, Hkv=2)) == "1,4,4"
    assert answer(found, ON_GPU._replace(B=512)) == "16"
    assert answer(found[:1], ON_GPU._replace(B=1, H=1, Hkv=1)) is None, "8 programs say nothing of 264"
    assert answer(found[:1], ON_GPU._replace(B=4096)) == "16", "full is full"


def test_decoding_and_shared_heads(gpu):
    step = {"M": 1, "N": 8192}
    found = buckets({**step, "B": 1}, {**step, "B": 64}, {**step, "B": 64, "Hkv": 4}, {"N": 8192})
    decode = ON_GPU._replace(M=1, N=8192)
    assert answer(found, decode._replace(B=2)) == "1,8192,1"
    assert answer(found, decode._replace(B=32)) == "1,8192,64"
    assert answer(found, decode._replace(B=32, Hkv=4)) == "1,8192,64,4"
    assert answer(found, decode._replace(M=512)) == "8192"


# the tuner


def test_the_grid_of_a_gpu():
    cells = tuner.grid("cuda:1")
    keys = [tuner.entry_key(cell) for cell in cells]
    assert len(set(keys)) == len(keys) and len(keys) < 200 and all(cell.device == "cuda:1" for cell in cells)
    assert {key[2] for key in keys} == {
        "none", "causal", "window", "lengths", "segments", "bias", "bias_grad", "dense", "rows",
    }  # fmt: skip
    assert {key[1] for key in keys} == {"bfloat16", "float32", "tfloat32"}, "float16 takes the figures of bfloat16"
    assert {cell.D for cell in cells} == {32, 64, 96, 128, 192, 256}
    assert all(c.dtype == "bfloat16" and c.mask in ("none", "causal") for c in cells[:20])
    assert {tuner.entry_key(p) for cells in GPU_SUITES.values() for p in cells if p.mask != "alibi"} <= set(keys)
    assert {(c.M, c.B) for c in cells if c.M in (1, 8)} >= {(1, 1), (1, 16), (1, 64), (8, 1), (8, 16)}
    assert all(cell.H % cell.Hkv == 0 for cell in cells)


@pytest.mark.parametrize("mask", sorted({cell.mask for cell in tuner.grid("cuda")}))
def test_a_cell_is_the_problem_its_entry_answers_for(mask, gpu):
    cell = Cell(2, 2, 1100, 1100, 8, mask=mask)
    extra = frozenset({"bias_grad"} if mask == "bias_grad" else ())
    asked = AttentionProblem.of(tuner.inputs_of(make_workload(cell)), extra=extra)._replace(device="cuda:0")
    cell = replace(cell, device="cuda:0")
    rows_are_told = "row_mask" in AttentionProblem._fields
    expected = "dense" if mask == "padding" and not rows_are_told else tuner.mask_kind(cell)
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
    assert list(found["ms"]) == ["cpu_flash"] and tuning.parse_entry(0, found)
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
    split = replace(by_name()["vendor_flash"], splits_keys=True)
    monkeypatch.setattr(select, "consider", lambda asked: [select.Candidate(split, (), 1.0, "")])
    assert tuner.contestants(ON_GPU._replace(M=4, N=8192, H=32, Hkv=8), tuner.Contest()) == [split]
    assert tuner.contestants(ON_GPU._replace(M=1024), tuner.Contest()) == []


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
    assert tuner.worth_building(flash, cell, plain) and tuner.worth_building(by_name()["vendor_efficient"], cell, plain)


def test_float32_cells_say_whether_products_may_be_rounded():
    before = torch.get_float32_matmul_precision()
    exact, rounded = (Cell(1, 1, 8, 8, 8, precision=precision) for precision in ("highest", "high"))
    assert tuner.entry_key(exact)[1] == "float32" and tuner.entry_key(rounded)[1] == "tfloat32"
    for cell in (exact, rounded):
        with tuner.precision(cell):
            assert AttentionProblem.of(tuner.inputs_of(make_workload(cell))).tf32 == (cell is rounded)
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
