"""`sdpa tune --distributed`: what links carry, in the table of a host, and the block of ranks that reads it."""

from __future__ import annotations

import subprocess
import sys
from datetime import date
from threading import Thread

import pytest
import torch
import yaml
from ranks import run

from helpers import complaint

pytest.importorskip("click")
pytest.importorskip("rich")

import click
import link_cases as cases

from sdpa.bench import book, record
from sdpa.cli.links import MEANT, STARTED, show, tune_links
from sdpa.cli.tune import tune
from sdpa.dispatch import tables
from sdpa.dispatch.device import device_of
from sdpa.dispatch.tables import LinkSpeed

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
NAME = device_of("cpu").names[0]
# What is given for options that take another value than 2.
VALUES = {"time_limit": "10", "problems": "0", "kernels": "math", "table": __file__}


def tuned(ranks: int, *options: str) -> subprocess.CompletedProcess[str]:
    command = [*TORCHRUN, str(ranks), "-m", "sdpa.cli", "tune", "--distributed", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_ranks_that_torchrun_started(tmp_path):
    """The figures of four ranks, and of two of them as a mesh (2, 2) has them, are written beside what the table has,
    and replace those of before. Each says where it is from."""
    path, slow = tmp_path / f"{NAME}.yaml", LinkSpeed("gloo", 1, 2, 9.0, 1.0)
    other = LinkSpeed("nccl", 2, 16, 1e-5, 1e11)
    book.prefer_built(path, "cpu", 1.5)
    book.add_links(path, "cpu", [slow, other])
    done = tuned(4, "--out", str(tmp_path))
    assert done.returncode == 0 and f"written: {path}, on each host" in done.stdout, done.stderr
    assert all(done.stdout.count(f"gloo, {ranks} ranks on 1 host: ") == 1 for ranks in (2, 4))
    table = tables.read(str(path))
    kept, *new = table.links
    assert kept == other and table.prefer_built == 1.5
    assert {one[:3] for one in new} == {("gloo", 1, 2), ("gloo", 1, 4)} and len(new) == 2
    for one in new:
        assert 0 < one.latency < 1 < 1e6 < one.bandwidth
        assert date.fromisoformat(one.date[:10]) >= date(2026, 1, 1) and one.versions == record.versions()
        assert one.command == f"torchrun --nproc-per-node 4 -m sdpa.cli tune --distributed --out {tmp_path}"


def test_a_table_that_is_measured_again_keeps_links(tmp_path):
    path, old = tmp_path / f"{NAME}.yaml", LinkSpeed("gloo", 1, 4, 1e-4, 1e9)
    link = LinkSpeed("gloo", 1, 2, 1e-4, 1e9, **book.origin("cpu"))
    book.add_links(path, "cpu", [link, old])
    mine = book.Book(path, "cpu", ())
    mine.publish()
    assert tables.read(str(path)).links == (link, old)
    assert [sorted(one) for one in yaml.safe_load(path.read_text())["links"]] == [
        sorted({*tables.LINK, *tables.ORIGIN}),
        sorted(tables.LINK),
    ]


def test_groups_of_two_hosts():
    run(4, cases.speeds_of_two_hosts)


def test_hosts_that_share_a_folder_write_one_after_the_other(tmp_path, monkeypatch):
    path, link = tmp_path / f"{NAME}.yaml", LinkSpeed("gloo", 2, 2, 1e-4, 1e9)
    other = Thread(target=book.add_links, args=(path, "cpu", [link]))
    with book.alone(path):
        other.start()
        other.join(10 * book.PAUSE)
        assert other.is_alive() and not path.exists()
    other.join()
    assert tables.read(str(path)).links == (link,)
    monkeypatch.setattr(book, "PATIENCE", 0.0)
    with book.alone(path), pytest.raises(book.BookError, match="another `sdpa tune` is measuring"):
        book.require_changeable(path)


@pytest.mark.parametrize(("hosts", "nodes"), [("1", ""), ("2", "--nnodes 2 ")])
def test_a_new_table_says_what_started_the_ranks(hosts, nodes, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/sdpa/cli/__main__.py", "tune", "--distributed"])
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert book.command() == "sdpa tune --distributed"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setenv("GROUP_WORLD_SIZE", hosts)
    path = tmp_path / f"{NAME}.yaml"
    book.add_links(path, "cpu", [LinkSpeed("gloo", 1, 2, 1e-4, 1e9)])
    written = yaml.safe_load(path.read_text())["command"]
    assert written == f"torchrun {nodes}--nproc-per-node 8 -m sdpa.cli tune --distributed"


@pytest.mark.parametrize(("key", "value"), [("versions", "2.13"), ("command", 3)])
def test_what_links_say_of_themselves_is_checked(key, value):
    link = dict(zip(tables.LINK, ("gloo", 1, 2, 1e-4, 1e9), strict=True))
    with pytest.raises(ValueError, match=f"expected '{key}' of links to be .*, got {value!r}"):
        tables.parse_links([link | {key: value}])


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo"])
def test_a_block_takes_the_figures_of_tables(backend, tmp_path):
    for rank, link in enumerate((LinkSpeed("gloo", 1, 2, 1e-4, 1e9), LinkSpeed("gloo", 1, 2, 2**-12, 3e9))):
        (tmp_path / str(rank)).mkdir()
        book.add_links(tmp_path / str(rank) / f"{NAME}.yaml", "cpu", [LinkSpeed("gloo", 2, 2, 1.0, 1.0), link])
    run(2, cases.figures_of_tables, str(tmp_path), backend=backend)


def test_a_broken_table_ends_all_ranks_where_it_is_an_error(tmp_path):
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / f"{NAME}.yaml").write_text("links: 3\n")
    run(2, cases.broken_table, str(tmp_path), NAME)


def test_what_cannot_be_written_is_refused_before_links_are_measured(tmp_path):
    path, file = tmp_path / f"{NAME}.yaml", tmp_path / "file"
    path.write_text("links: 3\n")
    file.touch()
    complaints = {path: f"cannot change {path}: expected 'schema'", file / NAME: f"cannot write a table to {file}"}
    run(2, cases.refused_before, complaints)


@pytest.mark.parametrize("option", [option for option in tune.params if option.name not in MEANT], ids=lambda o: o.name)
def test_options_that_say_nothing_of_links_are_refused(option):
    """Also where they are given their default."""
    given = option.opts[:1] if option.is_flag else (option.opts[0], VALUES.get(option.name, "2"))
    said = complaint("tune", "--distributed", *given, "--device", "cpu", "--out", "nowhere")
    assert said.endswith(f"expected only --device and --out beside it, got {option.opts[0]}")


def test_several_options_are_refused_at_once():
    said = complaint("tune", "--seed", "3", "--distributed", "--problems", "0", "--dry-run")
    assert said.endswith("got --problems, --seed, --dry-run")


def test_more_ranks_than_gpus(tmp_path, monkeypatch):
    """Each rank refuses before it waits for others."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, value in dict.fromkeys(STARTED, "0").items():
        monkeypatch.setenv(name, value)
    for rank in range(4):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
        with pytest.raises(click.UsageError, match="a GPU for each rank: expected up to 2 ranks on this host, got 4"):
            tune_links("cuda", tmp_path / f"{NAME}.yaml")
    assert not list(tmp_path.iterdir())


def test_what_is_wrong_is_a_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    assert "start them by torchrun --nproc-per-node" in complaint("tune", "--distributed", code=2)
    alone = tuned(1, "--out", str(tmp_path))
    assert alone.returncode and "expects at least two ranks" in alone.stderr and not list(tmp_path.iterdir())
    monkeypatch.setenv("RANK", "0")  # and nothing else that torchrun sets
    assert "start them by torchrun --nproc-per-node" in complaint("tune", "--distributed", code=2)
    for name, value in (("RANK", "x"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    said = complaint("tune", "--distributed", code=2)
    assert said.endswith("expected RANK to be a number, as torchrun sets it, got 'x'")
    path = tmp_path / f"{NAME}.yaml"
    path.write_text(f"schema: 1\ndevice: {NAME}\nlinks: 3\n")
    broken = tuned(2, "--out", str(tmp_path))
    assert broken.returncode and broken.stderr.count(f"sdpa: cannot change {path}: expected 'date'") == 1, broken.stderr
    assert "sdpa/cli" not in broken.stderr, "a traceback of the other rank"
    show([LinkSpeed("nccl", 2, 16, 3e-5, 1.5e11)], "")
    assert "nccl, 16 ranks on 2 hosts: 30 us a collective, 150.0 GB/s sent by a rank" in capsys.readouterr().out
