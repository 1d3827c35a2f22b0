"""`sdpa bench` without a GPU: its files, exit codes, and one sentence for what is wrong."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers import complete_output

pytest.importorskip("click")
pytest.importorskip("rich")

from sdpa.bench import calls, contest, peers, plots, record
from sdpa.bench.problems import Problem
from sdpa.bench.suites import SUITES

LAST_LINE = re.compile(r"suite=tiny cells=\d+ geomean=\d+\.\d{3} worst=\d+\.\d{3}")
pytestmark = pytest.mark.usefixtures("threads_restored")


@pytest.fixture
def tiny_gpu_suite(monkeypatch):
    problems = (Problem(1, 2, 9, 9, 8, device="cuda"), Problem(1, 2, 9, 9, 8, mask="causal", device="cuda"))
    monkeypatch.setitem(SUITES, "tiny-gpu", problems)


def call(*arguments: str, code: int = 0) -> str:
    return complete_output("bench", *arguments, code=code)


def test_bench_writes_every_form(tiny_gpu_suite, tmp_path):
    pytest.importorskip("matplotlib")
    csv, out, picture = (tmp_path / name for name in ("r.csv", "r.json", "r.png"))
    arguments = ("--suite", "tiny-gpu", "--device", "cpu", "--repeat", "2", "--kernel", "default", "--kernel", "math")
    text = call(*arguments, "--csv", str(csv), "--json", str(out), "--plot", str(picture))
    last = text.splitlines()[-1]
    assert last.startswith("suite=tiny-gpu cells=2 geomean=") and "kernel=math torch_cells=2 " in last
    comments, records = record.read(csv)
    assert [record["asked"] for record in records] == ["default", "math"] * 2 and f"# {last}" in comments
    data = json.loads(out.read_text())
    assert [{k: v for k, v in row.items() if k != "timings"} for row in data["rows"]] == records
    assert data["summaries"][-1] == data["summary"] == last and data["driver"] == {} and data["suite"] == "tiny-gpu"
    for row in data["rows"]:
        assert set(row["timings"]) == {row["asked"], "torch"}
        times = row["timings"][row["asked"]]
        assert (
            times["min_ms"] <= times["median_ms"]
            and times["samples"] == 2
            and float(row["ms"]) == pytest.approx(times["min_ms"], rel=1e-4)
        )
    assert picture.stat().st_size > 5000
    again = call(*arguments, "--csv", str(csv), "--merge", "--cells", "causal")
    assert again.splitlines()[-1].startswith("suite=tiny-gpu cells=1 ")
    assert len(record.read(csv)[1]) == 4 and len(record.read(csv)[0]) > len(comments)
    call("--from-csv", str(csv), "--plot", str(tmp_path / "again.png"))
    assert (tmp_path / "again.png").stat().st_size > 5000


def test_bench_of_several_suites(tiny_gpu_suite, monkeypatch, tmp_path):
    monkeypatch.setitem(SUITES, "tiny", (Problem(1, 2, 9, 9, 8),))
    text = call("--suite", "tiny-gpu", "--suite", "tiny", "--device", "cpu", "--repeat", "1", "--peer", "flash")
    assert [line.split()[0] for line in text.splitlines()[-2:]] == ["suite=tiny-gpu", "suite=tiny"]
    assert "flash=" in text and "torch=" not in text
    plain = call("--suite", "tiny", "--repeat", "1", "--json", str(tmp_path / "r.json"))
    assert LAST_LINE.fullmatch(plain.splitlines()[-1]) and "torch=" in plain
    assert json.loads((tmp_path / "r.json").read_text())["summary"] == plain.splitlines()[-1]


def without_columns(text: str, names: tuple[str, ...]) -> str:
    """A CSV as it was before it had these columns."""
    rows = list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))
    kept = io.StringIO()
    writer = csv.DictWriter(kept, [name for name in rows[0] if name not in names], extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    return kept.getvalue()


def that_puts(work):
    """A peer with an operation of torch's that has no deterministic implementation."""
    honest = calls.torch_call(work)
    return peers.contestant("flash", lambda: (torch.zeros(1).put_(torch.tensor([0]), torch.ones(1)), honest())[1], work)


def test_deterministic_rows_are_cells_of_their_own(tiny_gpu_suite, monkeypatch, tmp_path):
    """Beside those of an older file, which has no root mean square errors. A peer that raises is not timed."""
    monkeypatch.setitem(peers.PEERS, "flash", that_puts)
    path, out = tmp_path / "r.csv", tmp_path / "r.json"
    arguments = ("--suite", "tiny-gpu", "--device", "cpu", "--repeat", "1", "--peer", "torch", "--peer", "flash")
    call(*arguments, "--csv", str(path))
    first = record.read(path)[1]
    assert all(set(record.unpaired(row["peer_rms_errors"])) == {"torch", "flash"} for row in first)
    assert all(0 < float(row["our_rms_error"]) < 1e-6 for row in first)
    path.write_text(without_columns(path.read_text(), record.LATER))
    for _ in range(2):
        call(*arguments, "--csv", str(path), "--json", str(out), "--merge", "--deterministic")
    assert not torch.are_deterministic_algorithms_enabled()
    records = record.read(path)[1]
    assert records[:2] == [row | dict.fromkeys(record.LATER, "") for row in first]
    assert [row["problem"] for row in records[2:]] == [row["problem"] + "+deterministic" for row in first]
    assert [row["problem"] for row in json.loads(out.read_text())["rows"]] == [row["problem"] for row in records[2:]]
    for row in records[2:]:
        assert record.unpaired(row["refused"])["flash"].startswith("RuntimeError: put_ does not have a deterministic")
        assert row["ratio"] and set(record.unpaired(row["peers"])) == {"torch"} and record.problem_of(row).deterministic
    titles = [title.partition(" float32")[0] for title, _ in plots.panels_of(records)]
    assert titles == ["forward", "forward deterministic"]


def test_bench_fails_where_ours_is_wrong(tiny_gpu_suite, monkeypatch, tmp_path):
    honest = calls.FORMS[""]
    wrong = replace(honest, ours=lambda *given: lambda: honest.ours(*given)() * 1.1)
    monkeypatch.setitem(calls.FORMS, "", wrong)
    path = tmp_path / "r.csv"
    text = call("--suite", "tiny-gpu", "--device", "cpu", "--repeat", "1", "--csv", str(path), code=1)
    assert "wrong result: out" in text and "cells=0 geomean=nan" in text
    records = record.read(path)[1]
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
    assert "float32 1,2,9,8 none forward" in text and len(record.read(path)[1]) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--suite", "tiny-gpu", "--merge"), "--merge needs --csv FILE"),
        (("--from-csv", "x.csv"), "--from-csv needs --plot FILE or --race FILE"),
        (("--from-json", "x.json"), "--from-json needs --plot FILE"),
        (
            ("--from-csv", "x.csv", "--race", "p.html", "--threads", "1"),
            "--from-csv measures nothing, and does not go with",
        ),
        (("--from-csv", "x.csv", "--race", "p.html", "--device", "cpu"), "does not go with --device"),
        (
            ("--from-json", "x.json", "--plot", "p.png", "--kernel", "math"),
            "--from-json measures nothing, and does not go",
        ),
        (("--from-csv", "x.csv", "--from-csv", "y.csv", "--plot", "p.png"), "--plot draws one CSV, got 2"),
        (("--suite", "tiny-gpu", "--csv", "/no/such/folder/f.csv"), "expected a file in a folder that exists"),
        (("--suite", "tiny-gpu", "--device", "cpu", "--kernel", "x"), "unknown kernel or backend 'x'"),
        (("--suite", "tiny-gpu", "--suite", "nope"), "unknown suite 'nope'"),
        (("--suite", "models", "--deterministic"), "suite models runs alone"),
        (
            ("--suite", "tiny-gpu", "--device", "cpu", "--kernel", "cuda_flash"),
            "cuda_flash runs on cuda, got --device cpu",
        ),
        (("--suite", "tiny-gpu", "--device", "cpu", "--plot", "x.foo"), "expected a picture that ends in one of"),
        (("--suite", "distributed", "--simulate", "5000"), "5000 is not in the range 2<=x<=4096"),
        (("--suite", "models", "--race", "p.html"), "suite models runs alone"),
        (("--suite", "cold", "--race", "p.html"), "suite cold runs alone"),
    ],
)
def test_bench_complains_in_one_sentence(tiny_gpu_suite, arguments, said):
    assert said in call(*arguments, code=2)


@pytest.mark.parametrize("option", ["--json", "--csv", "--race", "--plot"])
def test_files_that_cannot_be_written_are_refused_before_anything_is_measured(
    option, tiny_gpu_suite, monkeypatch, tmp_path
):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(contest, "measure_cell", None)
    refused = {"/no/such/folder/f": "expected a file in a folder that exists", str(tmp_path): "is a directory"}
    refused[str(tmp_path / ("f" * 300))] = "cannot write"
    if Path("/proc/self").is_dir():  # which takes no file, whoever asks
        refused["/proc/self/f"] = "cannot write '/proc/self/f': No such file or directory"
    for path, said in refused.items():
        text = call("--suite", "tiny-gpu", "--device", "cpu", option, path, code=2)
        assert said in text and len(text.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_file_is_not_replaced_by_a_csv(tiny_gpu_suite, monkeypatch, tmp_path):
    monkeypatch.setattr(contest, "measure_cell", None)
    path = tmp_path / "pipe"
    os.mkfifo(path)
    said = call("--suite", "tiny-gpu", "--device", "cpu", "--csv", str(path), code=2)
    assert "expected a file, got" in said and path.is_fifo()


def test_a_file_that_is_there_is_kept_until_it_is_written(tiny_gpu_suite, tmp_path):
    for option in ("--json", "--csv", "--race"):
        path = tmp_path / option
        path.write_text("before")
        call("--suite", "tiny-gpu", "--device", "cpu", option, str(path), "--kernel", "x", code=2)
        assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]
        path.unlink()


def test_a_race_of_a_run_and_of_its_csv(tiny_gpu_suite, tmp_path):
    rows, run, again = (tmp_path / name for name in ("r.csv", "run.html", "again.html"))
    call("--suite", "tiny-gpu", "--device", "cpu", "--repeat", "1", "--csv", str(rows), "--race", str(run))
    call("--from-csv", str(rows), "--from-csv", str(rows), "--race", str(again))
    texts = [path.read_text() for path in (run, again)]
    for text in texts:
        assert "In 2 cells the default choice has" in text and "float32 1,2,9,8 causal forward" in text
        assert "suite=tiny-gpu cells=2 geomean=" in text and "cpu_flash" in text
    assert str(rows) in texts[1] and str(rows) not in texts[0].split("<h2>How to repeat it</h2>")[0]
    call("--from-csv", str(rows), "--race", str(again), "--only", "causal")
    assert "In 1 cell the default choice has" in again.read_text()
    call("--suite", "random", "--seed", "3", "--problems", "1", "--device", "cpu", "--repeat", "1", "--race", str(run))
    assert "<h3" in run.read_text() and "random" in run.read_text()


def test_a_race_complains_of_a_csv(tiny_gpu_suite, tmp_path):
    page, file = ("--race", str(tmp_path / "p.html")), tmp_path / "r.csv"

    def said(text: str, *arguments: str) -> str:
        file.write_text(text)
        told = call("--from-csv", str(file), *page, *arguments, code=1)
        assert len(told.splitlines()) == 1 and not (tmp_path / "p.html").exists()
        return told

    titles = ",".join(record.COLUMNS) + "\n"
    assert "without the column suite" in said("a,b\n1,2\n")
    assert "without rows" in said(titles)
    assert "as many cells as columns" in said(titles + "tiny,cut\n")
    assert "No such file" in call("--from-csv", str(tmp_path / "none.csv"), *page, code=1)
    call("--suite", "tiny-gpu", "--device", "cpu", "--repeat", "1", "--csv", str(file))
    good = file.read_text()
    for told in ("torch", "torch:0", "torch:nan", "flash:1"):
        assert " in row 1 of " in said(re.sub(",torch:[^,]*", f",{told}", good, count=1))
    assert "expected a number, got 'fast' as ms in row 1" in said(
        re.sub("cpu_flash,[^,]*", "cpu_flash,fast", good, count=1)
    )
    assert "one of tiny-gpu, got 'tiny'" in said(good, "--suite", "tiny")
    assert "no problem of suite tiny-gpu contains 'alibi'" in said(good, "--only", "alibi")


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
