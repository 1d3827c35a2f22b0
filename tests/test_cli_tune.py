"""`sdpa tune`: the table it writes, what it resumes, and what an interruption leaves."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import yaml

from helpers import call, complaint

pytest.importorskip("click")
pytest.importorskip("rich")

from sdpa.bench import book, gpu_grid, tuner
from sdpa.bench.book import alone
from sdpa.bench.drawn import drawn
from sdpa.bench.problems import Problem
from sdpa.dispatch import tables
from sdpa.dispatch.catalog import by_name
from sdpa.dispatch.device import device_of

pytestmark = pytest.mark.usefixtures("own_surroundings")


@pytest.fixture
def tiny_grid(monkeypatch, few_cases):
    problems = (Problem(1, 2, 9, 9, 8), Problem(1, 2, 9, 9, 8, direction="backward"), Problem(1, 2, 1, 32, 8, Hkv=1))
    monkeypatch.setattr(tuner, "grid", lambda device: problems)
    monkeypatch.setattr("sdpa.cli.tune.SECONDS_PER_PROBLEM", 0.0)
    return problems


def table_in(folder):
    return folder / f"{device_of('cpu').names[0]}.yaml"


def test_tune_writes_a_table_that_explain_reads(tiny_grid, tmp_path):
    text = call("tune", "--threads", "1")
    path = table_in(tmp_path / "tables")
    assert "3 problems measured" in text and str(path) in text
    table = tables.read(str(path))
    assert len(table.buckets) == 3 and all("math" in bucket.ms for bucket in table.buckets)
    assert "measured at" in call("explain", "--shape", "1,2,9,9,8")
    assert "3 measured entries" in json.loads(call("info", "--json"))["tuning tables"][str(path)]


def test_tune_into_a_pipe_says_how_far_it_is(tiny_grid, monkeypatch):
    assert call("tune").count("measuring: ") == 1  # another line after 10 seconds
    monkeypatch.setattr("sdpa.cli.common.LINE_SECONDS", 0.0)
    lines = call("tune").splitlines()
    told = [re.sub(r"\d+ s;", "0 s;", line) for line in lines if line.startswith("measuring")]
    assert told == [f"measuring: {n} of 3 done, 0 s; now {problem.label}" for n, problem in enumerate(tiny_grid)]
    checks = [line for line in lines if line.startswith("checking: ")]
    assert len(checks) == 3 and checks[0].startswith("checking: 0 of 2 done") and "2 of 2" in checks[-1]


def test_a_folder_that_nothing_can_be_written_to(tiny_grid, tmp_path, monkeypatch):
    """Said before anything is measured."""
    monkeypatch.setattr(tuner, "measure", lambda *_: pytest.fail("measured"))
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "tables"
    assert f"cannot write a table to {folder}: it is not a folder" in complaint("tune", "--out", str(folder), code=1)
    said = complaint("tune", "--out", str(tmp_path / "none.yaml"))
    assert "--out is the folder of a table, which is called after the device" in said
    assert not (tmp_path / "none.yaml").exists()
    monkeypatch.setenv("SDPA_TUNING_DIR", str(tmp_path / "file"))
    assert f"cannot write a table to {tmp_path / 'file'}: it is not a folder" in complaint("tune", code=1)


def test_of_two_at_once_the_second_says_so(tiny_grid, tmp_path):
    (tmp_path / "tables").mkdir()
    path = table_in(tmp_path / "tables")
    with alone(path):
        assert f"another `sdpa tune` is measuring {path}" in complaint("tune", code=1)
        assert "3 problems to measure" in call("tune", "--dry-run")
    assert "3 problems measured" in call("tune", "--threads", "1")
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_lock_that_was_removed_meanwhile_is_none(tmp_path, monkeypatch):
    """Its name may be another file's by the time that it is locked."""
    path, honest = tmp_path / "table.yaml", book.fcntl.flock
    lock = tmp_path / "table.yaml.lock"

    def flock(file, how):
        monkeypatch.setattr(book.fcntl, "flock", honest)
        lock.unlink()  # as by the one who had it
        lock.touch()
        return honest(file, how)

    monkeypatch.setattr(book.fcntl, "flock", flock)
    with alone(path):
        with pytest.raises(book.BookError, match="another `sdpa tune` is measuring"), alone(path):
            pass
        assert lock.exists()
    assert not lock.exists()


def test_tune_without_a_home(tiny_grid, homeless):
    assert "home is not known" in complaint("tune", code=2)
    paths = json.loads(call("info", "--json"))["tuning tables"]
    assert all(str(tables.SHIPPED) in path for path in paths if path.endswith(".yaml"))


def test_tune_resumes(tiny_grid, tmp_path, monkeypatch):
    call("tune", "--out", str(tmp_path))
    before = table_in(tmp_path).read_text()
    monkeypatch.setattr(tuner, "measure", lambda *_: pytest.fail("measured again"))
    text = call("tune", "--out", str(tmp_path), "--resume")
    assert "0 problems to measure, 3 kept" in text
    assert table_in(tmp_path).read_text().split("entries:")[1] == before.split("entries:")[1]


def test_tune_measures_what_it_has_again(tiny_grid, tmp_path, monkeypatch):
    """The shortest first; of kernels by name what these have a figure of, and no other figure changes."""
    call("tune", "--out", str(tmp_path))
    entries = tables.load(table_in(tmp_path).read_text())["entries"]
    for number, entry in enumerate(entries):
        entry["ms"] = dict.fromkeys(set(entry["ms"]) - {"vendor_math"}, 9.0 - number)
    del entries[0]["ms"]["cpu_flash"]
    tables.write(table_in(tmp_path), tables.load(table_in(tmp_path).read_text()) | {"entries": entries})
    monkeypatch.setattr(tuner, "grid", lambda device: pytest.fail("the grid is not asked"))
    honest, order = tuner.measure, []
    monkeypatch.setattr(tuner, "measure", lambda *a: (order.append(a[0].label), honest(*a))[1])
    text = call("tune", "--out", str(tmp_path), "--again", "--kernel", "cpu_flash")
    assert "2 problems to measure, 3 kept" in text and "2 problems measured" in text
    assert order == [tiny_grid[2].label, tiny_grid[1].label]
    first, *others = tables.load(table_in(tmp_path).read_text())["entries"]
    assert set(first["ms"].values()) == {9.0}
    for number, entry in enumerate(others, 1):
        assert entry["ms"].pop("cpu_flash") < 1.0 and set(entry["ms"].values()) == {9.0 - number}
    assert "--again measures what the table has" in complaint("tune", "--again", "--resume", code=2)
    assert "--again measures, --prune and" in complaint("tune", "--again", "--prefer-built", "1.3", code=2)
    told = complaint("tune", "--out", str(tmp_path), "--again", "--kernel", "vendor_math", code=1)
    assert told.endswith("has no figures of vendor_math that could be measured again")
    assert "has no figures that could be" in complaint("tune", "--out", str(tmp_path / "none"), "--again", code=1)


@pytest.mark.parametrize("table", sorted(tables.SHIPPED.glob("*.yaml")), ids=lambda path: path.stem)
def test_entries_are_problems_again(table):
    device = "cuda:0" if table.stem.startswith("nvidia") else "cpu"
    for entry in tables.load(table.read_text())["entries"]:
        problem = book.problem_of(entry, device)
        assert problem is not None and book.entry_key(problem) == book.entry_key_of(entry), entry
    asked = {"direction": "forward", "dtype": "bfloat16", "mask": "window", "beside": ["softcap"], "window": 128}
    asked |= dict.fromkeys(tables.SIZES, 256)
    assert book.problem_of(asked, "cuda").call == "softcap"
    for more in ({"beside": ["sinks"]}, {"beside": ["dropout", "softcap"]}, {"mask": "structured"}):
        assert book.problem_of(asked | more, "cuda") is None
    del asked["window"]
    assert book.problem_of(asked, "cuda") is None, "not told how wide"


def test_tune_stops_at_its_time_limit(tiny_grid, tmp_path, monkeypatch):
    ticks = iter([0.0, 1.0, 59.0, 61.0])
    monkeypatch.setattr("sdpa.cli.tune.time.monotonic", lambda: next(ticks, 99.0))
    text = call("tune", "--out", str(tmp_path), "--time-limit", "1")
    assert "1 left: run again with --resume" in text and len(tables.read(str(table_in(tmp_path))).buckets) == 2


def test_tune_refuses_a_wrong_kernel(tiny_grid, tmp_path, monkeypatch):
    module = by_name()["math"].load()
    honest = module.forward
    monkeypatch.setattr(module, "forward", lambda *a: (r := honest(*a))._replace(out=r.out * 1.1))
    assert "failed, in math; nothing was measured" in complaint("tune", "--out", str(tmp_path), code=1)
    assert not table_in(tmp_path).exists()


def test_tune_interrupted_leaves_the_old_table(tiny_grid, tmp_path, monkeypatch):
    call("tune", "--out", str(tmp_path))
    before = table_in(tmp_path).read_text()

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(tuner, "measure", interrupted)
    assert complaint("tune", "--out", str(tmp_path), code=130) == "sdpa: interrupted"
    assert table_in(tmp_path).read_text() == before and len(list(tmp_path.iterdir())) == 1


def partial_in(folder):
    return folder / f"{table_in(folder).name}.partial"


def interrupt_after(monkeypatch, count):
    """Make the tuner stop, as by Ctrl-C, in the problem after `count`."""
    honest, calls = tuner.measure, []

    def measure(*arguments):
        calls.append(arguments[0])
        if len(calls) > count:
            raise KeyboardInterrupt
        return honest(*arguments)

    monkeypatch.setattr(tuner, "measure", measure)
    return calls


def test_tune_goes_on_from_what_an_interruption_left(tiny_grid, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt_after(patch, 2)
        assert complaint("tune", "--out", str(tmp_path), code=130) == "sdpa: interrupted"
    assert not table_in(tmp_path).exists() and partial_in(tmp_path).is_file()
    calls = interrupt_after(monkeypatch, 1)
    text = call("tune", "--out", str(tmp_path), "--resume")
    assert "1 problems to measure, 2 kept" in text and calls == [tiny_grid[2]]
    assert len(tables.read(str(table_in(tmp_path))).buckets) == 3 and not partial_in(tmp_path).exists()


def test_tune_starts_anew_without_resume(tiny_grid, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt_after(patch, 2)
        complaint("tune", "--out", str(tmp_path), code=130)
    assert "3 problems to measure, 0 kept" in call("tune", "--out", str(tmp_path))
    assert not partial_in(tmp_path).exists()


def test_tune_keeps_what_was_measured_where_it_is_killed(tiny_grid, tmp_path, monkeypatch):
    """Nothing after the kill runs, so what is there then was written while measuring."""
    monkeypatch.setattr("sdpa.cli.tune.SAVE_EVERY", 1)
    monkeypatch.setattr(tuner, "grid", lambda device: tiny_grid[:2])
    states = []
    honest = tuner.measure

    def measure(*arguments):
        path = partial_in(tmp_path)
        states.append(len(yaml.safe_load(path.read_text())["entries"]) if path.exists() else None)
        return honest(*arguments)

    monkeypatch.setattr(tuner, "measure", measure)
    call("tune", "--out", str(tmp_path))
    assert states == [None, 1]


def test_tune_of_one_kernel_leaves_the_figures_of_the_others(tiny_grid, several_tiles, tmp_path):
    call("tune", "--out", str(tmp_path))
    path = table_in(tmp_path)
    before = yaml.safe_load(path.read_text())
    for entry in before["entries"]:
        entry["ms"] = dict.fromkeys(entry["ms"], 12345.0)
        entry["tile"] = {"cpu_flash": [7, 7, 0, 0]}
    path.write_text(yaml.safe_dump(before))
    assert "3 problems to measure, 3 kept" in call("tune", "--out", str(tmp_path), "--kernel", "cpu_flash")
    for entry in yaml.safe_load(path.read_text())["entries"]:
        assert entry["ms"].pop("cpu_flash") < 12345.0 and set(entry["ms"].values()) == {12345.0}
        assert entry["tile"]["cpu_flash"] != [7, 7, 0, 0]


def test_tune_resumes_a_kernel_that_has_no_figures(tiny_grid, tmp_path):
    call("tune", "--out", str(tmp_path), "--kernel", "math")
    text = call("tune", "--out", str(tmp_path), "--kernel", "math", "--kernel", "cpu_flash", "--resume")
    assert "3 problems to measure, 3 kept" in text
    table = tables.read(str(table_in(tmp_path)))
    assert all(set(bucket.ms) == {"math", "cpu_flash"} for bucket in table.buckets)
    assert "0 problems to measure" in call("tune", "--out", str(tmp_path), "--kernel", "math", "--resume")


def test_tune_tells_of_a_kernel_that_fails(tiny_grid, tmp_path, monkeypatch):
    monkeypatch.setattr("sdpa.cli.tune.refuse_wrong_kernels", lambda *_: None)
    module = by_name()["math"].load()
    monkeypatch.setattr(module, "forward", lambda *_: 1 / 0)
    text = call("tune", "--out", str(tmp_path))
    assert f"{tiny_grid[0].label}: math [] fails: ZeroDivisionError" in text
    assert not any("math" in b.ms for b in tables.read(str(table_in(tmp_path))).buckets if b.direction == "forward")


def test_tune_of_an_unknown_kernel():
    assert "unknown kernel 'warp'; known kernels: " in complaint("tune", "--kernel", "warp")


def test_tune_of_a_kernel_of_another_device():
    """Told before minutes are spent on a check after which nothing can be measured."""
    assert "kernel cuda_flash runs on cuda, got --device cpu" in complaint("tune", "--kernel", "cuda_flash")


def test_tune_without_a_clock():
    assert "expected a number >= 0, got 'nan'" in complaint("tune", "--time-limit", "nan")
    assert "expected --threads up to 4096, got 99999999999" in complaint("tune", "--threads", "99999999999")


def test_tune_does_not_mix_torch_versions(tiny_grid, tmp_path):
    call("tune", "--out", str(tmp_path))
    path = table_in(tmp_path)
    path.write_text(re.sub(r"torch: [^,}]+", "torch: 1.0.0", path.read_text()))
    assert "measured with 1.0.0" in complaint("tune", "--out", str(tmp_path), "--resume", code=1)
    path.write_text("nonsense")
    assert "cannot resume" in complaint("tune", "--out", str(tmp_path), "--resume", code=1)


def test_tune_dry_run_writes_nothing(tiny_grid, tmp_path):
    text = call("tune", "--out", str(tmp_path), "--dry-run")
    assert tiny_grid[0].label in text and not table_in(tmp_path).exists()


def test_tune_adds_drawn_problems(tiny_grid, tmp_path, monkeypatch):
    """The table keeps what it has, and no other problem of the grid is measured."""
    call("tune", "--out", str(tmp_path))
    before = tables.read(str(table_in(tmp_path))).buckets
    small = Problem(2, 2, 9, 9, 8, mask="causal")
    monkeypatch.setattr(gpu_grid, "drawn", lambda seed, count, device: (small,) if seed == 7 else ())
    told = call("tune", "--out", str(tmp_path), "--problems", "3", "--seed", "7")
    assert "1 problems to measure" in told
    after = tables.read(str(table_in(tmp_path))).buckets
    assert after[: len(before)] == before and after[-1].sizes == (2, 2, 2, 9, 9, 8, 8)
    assert "0 problems to measure" in call("tune", "--out", str(tmp_path), "--problems", "3", "--seed", "7")


def test_drawn_problems_are_those_that_a_table_can_tell():
    every = drawn(3, 200, "cuda")
    cells = gpu_grid.drawn_grid(3, 200, "cuda:0")
    assert {cell.device for cell in cells} == {"cuda:0"} and not any(cell.explore for cell in cells)
    assert {problem.call for problem in every} == {cell.call for cell in cells} == {"", "dropout"}
    assert "alibi" in {problem.mask for problem in every} and "alibi" not in {cell.mask for cell in cells}


def test_rows_behind_a_cache_are_measured_as_what_they_see():
    few, many = (Problem(1, 8, M, 4096, 64, mask="lower_right", device="cuda") for M in (8, 2048))
    assert (book.mask_kind(few), book.mask_kind(many)) == ("none", "causal")


def test_windows_are_told_by_their_width():
    narrow, wide = (Problem(1, 8, 100, 100, 64, mask="window", window=width, device="cuda") for width in (128, 4096))
    assert book.mask_kind(narrow) == "window" and book.about(narrow)["window"] == 128
    assert book.mask_kind(wide) == "causal" and "window" not in book.about(wide)
    assert book.entry_key_of(book.about(narrow)) == book.entry_key(narrow) != book.entry_key(replace(narrow, window=64))


def test_a_seed_of_nothing():
    assert "--seed says which problems --problems draws; give --problems K, too" in complaint("tune", "--seed", "3")


def test_a_preference_for_kernels_that_are_built(tiny_grid, tmp_path, monkeypatch):
    """Written without measuring, before there is a table as after, and kept by what measures later."""
    path = table_in(tmp_path / "tables")
    said = "--prefer-built has no effect on cpu, where no first call compiles a kernel"
    assert said in complaint("tune", "--prefer-built", "2", code=2) and not path.exists()
    monkeypatch.setattr("sdpa.cli.tune.compiling_kernels", lambda device: ("cpu_flash",))  # as a GPU has them
    with monkeypatch.context() as patch:
        patch.setattr(tuner, "measure", lambda *_: pytest.fail("measured"))
        assert f"written: {path}" in call("tune", "--prefer-built", "1.3")
    assert tables.read(str(path)).prefer_built == 1.3 and tables.read(str(path)).buckets == ()
    for more in ((), ("--resume",)):
        call("tune", "--threads", "1", *more)
        assert tables.read(str(path)).prefer_built == 1.3 and len(tables.read(str(path)).buckets) == 3
    call("tune", "--prefer-built", "1")
    assert tables.read(str(path)).prefer_built == 1.0 and len(tables.read(str(path)).buckets) == 3
    assert "0.5 is not in the range x>=1" in complaint("tune", "--prefer-built", "0.5")
    path.write_text("entries: [")
    assert f"cannot change {path}" in complaint("tune", "--prefer-built", "1.3", code=1)
    assert path.read_text() == "entries: ["
