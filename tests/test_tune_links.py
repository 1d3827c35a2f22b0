"""`sdpa tune --distributed`: what links carry, in the table of a host, and the block of ranks that reads it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import link_cases as cases
import pytest
from ranks import run

from helpers import complaint

pytest.importorskip("click")
pytest.importorskip("rich")

from sdpa.bench import book
from sdpa.cli.links import show
from sdpa.dispatch import tables
from sdpa.dispatch.device import device_of
from sdpa.dispatch.tables import LinkSpeed

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
NAME = device_of("cpu").names[0]


def tuned(ranks: int, *options: str) -> subprocess.CompletedProcess[str]:
    command = [*TORCHRUN, str(ranks), "-m", "sdpa.cli", "tune", "--distributed", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_ranks_that_torchrun_started(tmp_path):
    """The figures of two ranks are written beside what the table has, and replace those of before."""
    path, slow = tmp_path / f"{NAME}.yaml", LinkSpeed("gloo", 1, 2, 9.0, 1.0)
    other = LinkSpeed("nccl", 2, 16, 1e-5, 1e11)
    book.prefer_built(path, "cpu", 1.5)
    book.add_links(path, "cpu", [slow, other])
    dry = tuned(2, "--out", str(tmp_path), "--dry-run")
    assert dry.returncode == 0 and dry.stdout.count("gloo, 2 ranks on 1 host: ") == 1, dry.stderr
    assert tables.read(str(path)).links == (slow, other) and "written" not in dry.stdout
    done = tuned(2, "--out", str(tmp_path))
    assert done.returncode == 0 and f"written: {path}, on each host" in done.stdout, done.stderr
    table = tables.read(str(path))
    kept, new = table.links
    assert kept == other and new[:3] == slow[:3] and table.prefer_built == 1.5
    assert 0 < new.latency < 1 < 1e6 < new.bandwidth


def test_a_table_that_is_measured_again_keeps_links(tmp_path):
    path, link = tmp_path / f"{NAME}.yaml", LinkSpeed("gloo", 1, 2, 1e-4, 1e9)
    book.add_links(path, "cpu", [link])
    mine = book.Book(path, "cpu", ())
    mine.publish()
    assert tables.read(str(path)).links == (link,)


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo"])
def test_a_block_takes_the_figures_of_tables(backend, tmp_path):
    for rank, link in enumerate((LinkSpeed("gloo", 1, 2, 1e-4, 1e9), LinkSpeed("gloo", 1, 2, 2e-4, 3e9))):
        (tmp_path / str(rank)).mkdir()
        book.add_links(tmp_path / str(rank) / f"{NAME}.yaml", "cpu", [LinkSpeed("gloo", 2, 2, 1.0, 1.0), link])
    run(2, cases.figures_of_tables, str(tmp_path), backend=backend)


def test_what_is_wrong_is_a_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    assert "start them by torchrun --nproc-per-node" in complaint("tune", "--distributed", code=2)
    for options in (("--again",), ("--kernel", "math"), ("--prefer-built", "1.2"), ("--problems", "3")):
        assert "measures links and no kernels: give it alone" in complaint("tune", "--distributed", *options, code=2)
    alone = tuned(1, "--out", str(tmp_path))
    assert alone.returncode and "expects at least two ranks" in alone.stderr and not list(tmp_path.iterdir())
    monkeypatch.setenv("RANK", "0")  # and nothing else that torchrun sets
    assert "start them by torchrun --nproc-per-node" in complaint("tune", "--distributed", code=2)
    path = tmp_path / f"{NAME}.yaml"
    path.write_text(f"schema: 1\ndevice: {NAME}\nlinks: 3\n")
    broken = tuned(2, "--out", str(tmp_path))
    assert broken.returncode and broken.stderr.count(f"sdpa: cannot change {path}: expected links") == 1
    assert "sdpa/cli" not in broken.stderr, "a traceback of the other rank"
    file = tmp_path / "file"
    file.touch()
    wrong = tuned(2, "--out", str(Path(file) / "below"))
    assert wrong.returncode and "cannot write a table" in wrong.stderr, wrong.stderr
    assert "sdpa/cli" not in wrong.stderr, wrong.stderr
    show([LinkSpeed("nccl", 2, 16, 3e-5, 1.5e11)], "")
    assert "nccl, 16 ranks on 2 hosts: 30 us a collective, 150.0 GB/s sent by a rank" in capsys.readouterr().out
