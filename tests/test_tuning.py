"""Tuning tables: broken ones are named and ignored, the user's come first, writes are atomic, nearest bucket wins."""

from __future__ import annotations

import copy
import json
import stat
import warnings

import pytest
import torch
import yaml

import sdpa
from helpers import CPU_TILES, DEVICE_NAME, PROBLEM, entry, put, table
from sdpa import environment
from sdpa.dispatch import select, tables, tuning
from sdpa.dispatch.catalog import by_name
from sdpa.dispatch.context import ALL_TOGGLES
from sdpa.problem import Tile


def test_a_table_decides(user):
    for winner, loser in (("vendor_math", "cpu_flash"), ("cpu_flash", "vendor_math")):
        put(user, table(entry({winner: 0.001, loser: 9.0, "vendor_cpu_flash": 5.0, "math": 7.0})))
        select.clear_caches()
        choice = select.choose(PROBLEM, "", 0b1111)
        assert choice.kernel.name == winner and f"{DEVICE_NAME}: measured at B1,H8" in choice.reason


def test_a_table_never_changes_what_is_able(user):
    put(user, table(entry({"vendor_flash": 1e-6, "math": 1.0})))
    assert select.choose(PROBLEM, "", 0b1111).kernel.name != "vendor_flash"


def test_times_show_in_explain(user):
    put(user, table(entry({"math": 3.0})))
    q = torch.ones(1, 8, 1024, 64)
    row = next(r for r in sdpa.explain(q, q, q).rows if r.kernel == "math")
    assert row.seconds == pytest.approx(3e-3) and row.source.startswith(f"{DEVICE_NAME}: measured at")


BROKEN = {
    "not_yaml": ("entries: [}", "while parsing"),
    "half_written": ("schema: 1\ndevice: amd", "expected 'device'|expected 'date'|expected a table"),
    "empty": ("", "expected a mapping, got NoneType"),
    "list": ("- 1\n- 2", "expected a mapping, got list"),
    "python_object": ("!!python/object/apply:os.system ['true']", "could not determine a constructor"),
    "schema": (table(schema=2), "expected schema 1, got 2"),
    "schema_bool": (table(schema=True), "expected 'schema' to be an integer, got True"),
    "tag_bool": ("schema: !!bool 12", "a value is none of its tag's .KeyError: '12'"),
    "tag_int": ("schema: !!int x", "is ignored: invalid literal"),
    "tag_timestamp": ("date: !!timestamp x", "a value is none of its tag's .AttributeError"),
    "digits": ("schema: " + 5000 * "9", "is ignored: Exceeds the limit"),
    "nested": (2000 * "[", "is ignored"),
    "nested_blocks": (200_000 * "- ", "is ignored"),
    "size_huge": (table(entry({"math": 1.0}, M=10**400)), "entry 0: expected positive integers for B, H, Hkv, M"),
    "time_huge": (table(entry({"math": 10**400})), "entry 0: expected ms to map"),
    "time_nan": (table(entry({"math": float("nan")})), "expected ms to map"),
    "tile_huge": (table(entry({"math": 1.0}, tile={"math": [10**400, 64, 4, 2]})), "expected tile to map"),
    "schema_text": (table(schema="1"), "expected 'schema' to be an integer, got '1'"),
    "no_device": (table(device=None), "expected 'device' to be a str, got None"),
    "foreign": (table(device="nvidia_h200"), f"expected a table of device {DEVICE_NAME}, got one of 'nvidia_h200'"),
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
    "prefer_less": (table(prefer_built=0.5), "expected prefer_built to be a number from 1 on, got 0.5"),
    "prefer_bool": (table(prefer_built=True), "expected prefer_built to be a number from 1 on, got True"),
    "prefer_nan": (table(prefer_built=float("nan")), "expected prefer_built to be a number from 1 on, got nan"),
    "links": (table(links={"ranks": 2}), "expected links to list mappings of backend, hosts, ranks, latency"),
    "links_zero": (table(links=[{"backend": "gloo", "hosts": 1, "ranks": 2, "latency": 0, "bandwidth": 1e9}]), "links"),
    "links_name": (table(links=[{"hosts": 1, "ranks": 2, "latency": 1e-5, "bandwidth": 1e9}]), "expected links"),
    "tile_list": (table(entry({"math": 1.0}, tile=[1, 2])), "entry 0: expected tile to map kernels of ms to"),
    "tile_short": (table(entry({"math": 1.0}, tile={"math": [64, 64]})), r"to \[BLOCK_M, BLOCK_N, num_warps"),
    "tile_zero": (table(entry({"math": 1.0}, tile={"math": [64, 0, 4, 2]})), "expected tile to map"),
    "tile_float": (table(entry({"math": 1.0}, tile={"math": [64, 64, 4, 2.0]})), "expected tile to map"),
    "window_zero": (table(entry({"math": 1.0}, mask="window", window=0)), "entry 0: expected window to be .*, got 0"),
    "window_mask": (table(entry({"math": 1.0}, window=8)), "expected window to be .* of a mask 'window', got 8"),
    "window_text": (table(entry({"math": 1.0}, mask="window", window="8")), "expected window to be .*, got '8'"),
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
    (user / f"{DEVICE_NAME}.yaml").mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        select.choose(PROBLEM, "", 0b1111)


def test_a_folder_that_may_not_be_searched_has_no_table(user, monkeypatch):
    """Another user's home, as where HOME=/root stays behind."""
    put(user, table(entry({"math": 0.001})))
    stat_of = tables.Path.stat

    def refusing(path, **options):
        if user in path.parents:
            raise PermissionError(13, "Permission denied", str(path))
        return stat_of(path, **options)

    monkeypatch.setattr(tables.Path, "stat", refusing)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "measured" not in select.choose(PROBLEM, "", 0b1111).reason


@pytest.mark.parametrize("path", sorted(tables.SHIPPED.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_entries_are_json_and_yaml(path):
    """The quick way reads them, and nobody else reads anything else."""
    text = path.read_text()
    assert tables.load(text) == yaml.safe_load(text)
    entries = text.partition(tables.ENTRIES)[2].splitlines()
    assert all(json.loads(line.removeprefix(tables.ENTRY)) for line in entries)


@pytest.mark.parametrize("end", ["# a remark\n", "- {direction: forward}\n", '- {"direction": \n'])
def test_entries_that_are_not_json_are_read_as_yaml(end):
    text = 'schema: 1\nentries:\n- {"direction": "forward"}\n' + end
    if end.endswith(": \n"):
        with pytest.raises(yaml.YAMLError):
            tables.load(text)
    else:
        assert tables.load(text) == yaml.safe_load(text)


def test_a_user_without_a_home_has_the_shipped_tables(user, homeless):
    put(tables.SHIPPED, table(entry({"math": 0.001})))
    assert environment.tuning_dir() is None
    assert select.choose(PROBLEM, "", 0b1111).kernel.name == "math"


def test_a_broken_table_warns_once_and_the_shipped_one_serves(user):
    put(user, "entries: [}")
    put(tables.SHIPPED, table(entry({"math": 0.001})))
    with pytest.warns(UserWarning) as caught:
        first = select.choose(PROBLEM, "", 0b1111)
        select.choose(PROBLEM._replace(M=1000), "", 0b1111)
    assert len(caught) == 1 and first.kernel.name == "math"


def test_the_users_table_comes_before_the_shipped(user):
    put(tables.SHIPPED, table(entry({"math": 0.001})))
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


def test_the_nearest_window(user):
    """A window is a size, too: it decides how many blocks of keys are visited."""
    told = (entry({"math": ms}, mask="window", window=width) for ms, width in ((1.0, 15), (2.0, 511)))
    put(user, table(entry({"math": 3.0}, mask="window"), *told))  # the first does not tell how wide
    window = PROBLEM._replace(left=399, right=0, features=frozenset({"band"}))
    near = tuning.measured(window)
    assert "window of 511" in near.source and near.seconds["math"] == pytest.approx(2e-3 * 400 / 512)
    assert "window of 15" in tuning.measured(window._replace(left=20)).source
    assert tuning.measured(window._replace(left=3)).seconds["math"] == pytest.approx(1e-3 / 4)
    assert 0 < tuning.measured(window._replace(left=0)).seconds["math"] < 1e-2
    # How far the widths are apart never leaves a problem without a bucket.
    assert "window of 511" in tuning.measured(window._replace(left=900, M=4096, N=4096)).source
    assert tuning.window_of(window) == 399 and tuning.window_of(PROBLEM) == 0


def test_times_scale_with_the_work(user):
    put(user, table(entry({"math": 1.0})))
    twice = tuning.measured(PROBLEM._replace(B=2)).seconds["math"]
    assert twice == pytest.approx(2e-3)


def test_writing_is_private_atomic_and_read_back(user):
    path = user / "deeper" / f"{DEVICE_NAME}.yaml"
    data = table(entry({"math": 1.5}))
    tables.write(path, data)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert yaml.safe_load(path.read_text()) == data
    assert tables.read(str(path)).buckets[0].ms == {"math": 1.5}
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_writing_refuses_what_reading_would_ignore(user):
    path = put(user, table(entry({"math": 1.0})))
    before = path.read_text()
    bad = copy.deepcopy(table(entry({"math": -1.0})))
    with pytest.raises(ValueError, match="positive milliseconds"):
        tables.write(path, bad)
    assert path.read_text() == before


def test_a_failed_write_leaves_the_old_table_and_no_rest(user, monkeypatch):
    path = put(user, table(entry({"math": 1.0})))
    before = path.read_text()

    def half(data, file, **options):
        file.write("schema: 1\nent")
        raise OSError("disk full")

    monkeypatch.setattr(tables.yaml, "safe_dump", half)
    with pytest.raises(OSError, match="disk full"):
        tables.write(path, table(entry({"math": 2.0})))
    assert path.read_text() == before and [p.name for p in user.iterdir()] == [path.name]


def test_writing_forgets_what_was_read(user):
    path = put(user, table(entry({"math": 1.0})))
    assert tables.read(str(path)).buckets[0].ms == {"math": 1.0}
    tables.write(path, table(entry({"math": 2.0})))
    assert tables.read(str(path)).buckets[0].ms == {"math": 2.0}


def test_shipped_tables_are_readable():
    for path in tables.SHIPPED.glob("*.yaml"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert tables.read(str(path)) is not None


# tiles


def test_the_measured_tile_is_passed_as_the_kernel_offers_it(user, several_tiles):
    put(user, table(entry({"cpu_flash": 0.001, "math": 9.0}, tile={"cpu_flash": list(CPU_TILES[2])})))
    choice = select.choose(PROBLEM, "", ALL_TOGGLES)
    assert choice.kernel.name == "cpu_flash" and choice.tile is CPU_TILES[2]
    assert select.choose(PROBLEM._replace(dtype=torch.float64), "flash", ALL_TOGGLES).tile is CPU_TILES[0]


def test_a_tile_is_one_for_as_many_columns(user, several_tiles):
    """Head sizes are rounded up to powers of two: 64 and 33 have as many columns, 65 has twice as many."""
    put(user, table(entry({"cpu_flash": 0.001}, tile={"cpu_flash": list(CPU_TILES[2])})))
    assert PROBLEM.D == PROBLEM.Dv == 64
    for size, tile in ((33, CPU_TILES[2]), (65, CPU_TILES[0]), (32, CPU_TILES[0])):
        assert select.choose(PROBLEM._replace(D=size, Dv=size), "", ALL_TOGGLES).tile is tile
    assert select.choose(PROBLEM._replace(Dv=65), "", ALL_TOGGLES).tile is CPU_TILES[0]


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
