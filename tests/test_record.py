"""What is written of a run: rows as tables and pictures: what is written, read back, merged and drawn."""

from __future__ import annotations

import math
import types
from dataclasses import replace
from pathlib import Path

import pytest

from helpers import some_rows

pytest.importorskip("click")
pytest.importorskip("rich")

from sdpa.bench import plots, record
from sdpa.bench.contest import Entry
from sdpa.bench.suites import GPU_SUITES, SUITES
from sdpa.cli.rows import line, speed

RESULTS = Path(record.__file__).parent / "results"
HEADER = {
    "date": "2030-01-02T03:04:05+00:00", "device": "nvidia_h200", "description": "NVIDIA H200", "threads": 8,
    "versions": {"torch": "2.11.0", "flash-attn-4": "4.0"}, "command": "sdpa bench --suite gpu-forward",
    "driver": {"driver": "580.1", "sm_clock_max": "1980", "cudnn": "91900"},
}  # fmt: skip


def test_csv_round_trip(tmp_path):
    path = tmp_path / "h200.csv"
    written = record.Table(path, HEADER)
    for row in some_rows(few=3):
        written.add([row])
    comments, records = record.read(path)
    for fact in ("2030-01-02", "NVIDIA H200", "580.1", "sm_clock_max 1980", "cudnn 91900", "torch 2.11.0", "4.0"):
        assert fact in comments[0]
    assert comments[1] == "# sdpa bench --suite gpu-forward" and len(records) == 3
    first, problem = records[0], SUITES["gpu-forward"][0]
    assert record.problem_of(first) == problem and first["suite"] == "gpu-forward"
    assert first["kernel"] == "triton_flash" and float(first["ms"]) == 1.0 and first["unit"] == "TFLOP/s"
    assert float(first["tflops_or_gbs"]) == pytest.approx(problem.operations() * 1e-9, rel=1e-3)
    assert (first["best_peer"], first["ratio"], first["best_torch"], first["torch_ratio"]) == ("fa4", "1", "cudnn", "2")
    assert float(first["best_peer_value"]) == pytest.approx(2 * float(first["best_torch_value"]), rel=1e-3)
    assert (first["our_error"], first["peer_error"], first["our_bytes"]) == ("0.001", "0.003", "4096")
    assert first["our_rms_error"] == "0.0001"
    assert record.unpaired(first["peer_rms_errors"]) == {"cudnn": "0.0002", "fa4": "0.0003"}
    assert record.unpaired(first["peers"]) == {"cudnn": "2", "fa4": "1"}
    assert record.unpaired(first["peer_bytes"]) == {"cudnn": "8192", "fa4": "1024"}
    assert record.unpaired(first["refused"]) == {"math": "expected scores below 8 GB, got 9"}
    assert [p.name for p in tmp_path.iterdir()] == ["h200.csv"]


def test_comments_say_again_what_runs_they_are_of(tmp_path):
    path, later = tmp_path / "h200.csv", HEADER | {"date": "2030-02-03T00:00:00+00:00", "driver": {}}
    record.Table(path, HEADER).remark("suite=gpu-forward cells=36")
    record.Table(path, later, merge=True).remark("suite=gpu-mask cells=1")
    first, second = record.runs_of(record.read(path)[0])
    assert first == record.Run(
        HEADER["date"], "NVIDIA H200 (nvidia_h200)", "driver 580.1, sm_clock_max 1980, cudnn 91900",
        "torch 2.11.0, flash-attn-4 4.0", HEADER["command"], ("suite=gpu-forward cells=36",),
    )  # fmt: skip
    assert second.conditions == "threads 8" and second.remarks == ("suite=gpu-mask cells=1",)
    (older,) = record.runs_of(["# a remark of no run", "# 2026-11-23T15:29:43+00:00; AMD EPYC (amd_zen5); python 3.11"])
    assert (older.device, older.conditions, older.versions, older.command) == (
        "AMD EPYC (amd_zen5)",
        "",
        "python 3.11",
        "",
    )


def test_merge_replaces_what_is_measured_again(tmp_path):
    path = tmp_path / "h200.csv"
    record.Table(path, HEADER).add(some_rows(few=4))
    again = replace(some_rows(few=1)[0], peers=())
    record.Table(path, HEADER | {"command": "second"}, merge=True).add([again])
    comments, records = record.read(path)
    assert len(records) == 4 and "# second" in comments and len(comments) == 4
    assert [record["best_peer"] for record in records] == ["", "fa4", "fa4", "fa4"]
    record.Table(path, HEADER).add([again])
    assert len(record.read(path)[1]) == 1


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.csv")), ids=lambda path: path.stem)
def test_committed_rows_are_read_and_drawn(path):
    """Their problems are those of today's suites, so that pictures have all of them."""
    _, records = record.read(path)
    assert len(records) >= 20 and all(record.problem_of(row) is not None for row in records)
    timed = {row["problem"] for row in records if row["suite"] == records[0]["suite"] and (row["ms"] or row["peers"])}
    panels = plots.panels_of([row for row in records if row["suite"] == records[0]["suite"]])
    assert sum(map(len, panels.values())) == len(timed)


def test_an_interrupted_write_leaves_the_table(tmp_path, monkeypatch):
    path = tmp_path / "h200.csv"
    written = record.Table(path, HEADER)
    written.add(some_rows(few=1))
    before = path.read_text()
    monkeypatch.setattr(record, "as_csv", lambda records: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        written.add(some_rows(few=2))
    assert path.read_text() == before


def test_a_csv_of_something_else_is_refused(tmp_path):
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"expected a CSV of `sdpa bench --csv`.*without the column suite"):
        record.read(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="is not what sdpa bench --csv writes"):
        record.read(path)
    for row in ("gpu-forward,cut short", "x," * len(record.COLUMNS)):
        path.write_text(",".join(record.COLUMNS) + "\n" + row + "\n")
        with pytest.raises(ValueError, match="expected as many cells as columns, got others in row 1 of"):
            record.read(path)


def test_summary_of_a_kernel():
    text = record.summary("gpu-forward", "triton_flash", some_rows())
    assert text == (
        "suite=gpu-forward cells=36 geomean=1.000 worst=1.000 kernel=triton_flash "
        "torch_cells=36 torch_geomean=2.000 torch_worst=2.000"
    )
    none = replace(some_rows(few=1)[0], peers=())
    assert "cells=0 geomean=nan worst=nan kernel=triton_flash" in record.summary("s", "triton_flash", [none])
    both = some_rows(few=2) + some_rows(kernel="default", few=3)
    assert record.summary("s", "default", both).startswith("suite=s cells=3 geomean=1.000 worst=1.000 kernel=default ")


def test_the_line_of_our_default_beside_torch_alone_is_short():
    rows = [replace(row, peers=(replace(row.peers[0], name="torch"),)) for row in some_rows(kernel="default")]
    assert record.summary("overhead", "default", rows) == "suite=overhead cells=36 geomean=2.000 worst=2.000"


def test_small_speeds_are_shown_in_smaller_units():
    """On the terminal; a CSV keeps its unit."""
    (row,) = some_rows(few=1)
    work = row.problem.operations()
    assert speed(row.problem, work / 2.5e12) == ("2.5", "TFLOP/s")
    assert speed(row.problem, work / 96.3e9) == ("96.3", "GFLOP/s")
    slow = replace(row, own=replace(row.own, seconds=work / 96.3e9))
    assert " 96.3 GFLOP/s " in line(slow)
    kept = record.as_record(slow)
    assert kept["unit"] == "TFLOP/s" and float(kept["tflops_or_gbs"]) == pytest.approx(0.0963)
    decode, host = replace(row.problem, M=1, N=4096), replace(row.problem, host=True)
    assert speed(decode, 1.0)[1] == "GB/s" and speed(host, 1e-6) == ("1.0", "us")


def test_lines_name_every_peer():
    (row,) = some_rows(few=1)
    text = line(row)
    for word in (row.problem.label, "triton_flash", "1 ms", "TFLOP/s", "cudnn=2 ms", "fa4=1 ms", "math=no"):
        assert word in text
    refused = replace(row, own=Entry("triton_decode", reason="has no backward pass"))
    assert "[yellow]" in line(refused) and "has no backward pass" in line(refused)
    assert "[red]" in line(replace(row, own=Entry("default", reason="wrong result", failed=True)))


def test_our_version_is_that_of_the_code_and_not_of_what_is_installed(monkeypatch):
    def nothing(package):
        raise record.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(record.metadata, "version", nothing)
    assert record.versions() == {"python": record.platform.python_version(), "sdpa": record.sdpa.__version__}


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
    records = [record.as_record(row) for kernel in ("default", "triton_flash") for row in some_rows(suite, kernel)]
    plots.plot(tmp_path / "p.png", suite, records)
    assert (tmp_path / "p.png").stat().st_size > 5000


def test_a_picture_has_a_panel_per_head_size_and_mask():
    pytest.importorskip("matplotlib")
    records = [record.as_record(row) for kernel in ("default", "triton_flash") for row in some_rows(kernel=kernel)]
    panels = plots.panels_of(records)
    assert [title.split("head size ")[1] for title, _ in panels] == [
        f"{D} mask {mask}" for D in (64, 128, 256) for mask in ("none", "causal")
    ]
    for groups in panels.values():
        assert [place for place, _ in groups] == ["512", "1024", "2048", "4096", "8192", "16384"]
        assert all(set(bars) == {"sdpa (default)", "sdpa triton_flash", "cudnn", "fa4"} for _, bars in groups)
    masks = plots.panels_of([record.as_record(row) for row in some_rows("gpu-mask")])
    assert sorted(len(groups) for groups in masks.values()) == [3, 3, 4, 5]
    with pytest.raises(ValueError, match="no timed cell"):
        plots.plot("p.png", "gpu-mask", records)


def test_geomean_of_ratios_is_what_the_rows_say():
    rows = some_rows(few=2)
    assert math.isclose(record.geomean([row.torch_ratio for row in rows]), 2.0)
