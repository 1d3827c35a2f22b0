"""Suite `distributed`: ranks one after the other, processes of this machine, and the model."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

from sdpa.bench import distributed
from sdpa.bench.scaling import RANKS, Machine, modelled
from sdpa.bench.torch_context import torchs
from sdpa.cli.app import app

CASE = distributed.Case("causal", 64, "causal", H=4, D=32, dtype=torch.float32)


def test_shares_of_ranks():
    """What ranks send is what processes send, and in zigzag they compute the same."""
    found = {(one.mode, one.order): one for one in distributed.simulate(CASE, 2, "cpu")}
    assert set(found) == {(m, o) for m in ("ulysses", "gather", "ring") for o in ("even", "zigzag")}
    measured = {(one.mode, one.order): one for one in distributed.measure(CASE, 2)}
    for key, one in measured.items():
        assert one.distance < 1e-5
        assert one.sent == {direction: found[key].sent(direction) for direction in distributed.DIRECTIONS}, key
    shares = found["gather", "even"].shares["forward"]
    assert [share.sent for share in shares] == [64 * 4 * 2 * 32 * 4, 0]
    assert all(share.seconds > 0 and share.attention > 0 for share in shares)


def test_a_window_sends_little():
    """A window of 1,024 over 64k positions on 4 ranks: 5 % at most of what a causal mask sends."""
    for mode in ("gather", "ring"):
        sent = []
        for mask in ("causal", "window"):
            case = replace(CASE, each=16384, mask=mask, H=1, Hkv=1, D=8)
            link = distributed.Alone(4, 0, "cpu")
            parts = case.orders(4)["even"]
            tensors = [torch.randn(1, 1, 16384, 8) for _ in range(3)]
            given = case.mask_of(4, "cpu"), None, {}, False, parts, parts
            distributed.mode_of(mode, link)(distributed.Part(*tensors, *given))
            sent.append(link.sent)
        assert 0 < sent[1] <= 0.05 * sent[0], (mode, sent)


def test_torchs_own_is_refused_where_it_cannot_run():
    """Its block takes no CPU's kernel: cuDNN is not there, and torch's CPU flash has no sharding strategy. The fake
    process group is gone afterwards."""
    cudnn, flash = torchs(CASE, 2, "cpu")
    assert (cudnn.backend, cudnn.seconds, flash.backend, flash.seconds) == ("cudnn", {}, "flash", {})
    assert "No viable backend" in cudnn.refused and "sharding strategy" in flash.refused, (cudnn, flash)
    assert not torch.distributed.is_initialized()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_torchs_own_on_a_gpu():
    found = list(torchs(replace(CASE, each=256, D=64, dtype=torch.bfloat16), 2, "cuda"))
    assert all(not peer.refused and len(peer.seconds["backward"]) == 2 for peer in found), found


def test_the_model():
    by_line = {(one.mode, one.direction, one.ranks): one.tflops for one in modelled()}
    assert {ranks for _, _, ranks in by_line} == set(RANKS)
    assert by_line["ulysses", "forward", 8] and by_line["ulysses", "forward", 16] is None  # there are 8 key heads
    assert all(flops is None or 0 < flops * 1e12 <= Machine().forward for flops in by_line.values())
    slow = {(one.mode, one.direction, one.ranks): one.tflops for one in modelled(Machine(network=1e9))}
    assert slow["gather", "forward", 64] < by_line["gather", "forward", 64]


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr("sdpa.cli.distributed.cases", lambda device: [CASE])
    for options in ((), ("--simulate", "2", "--threads", "1")):
        path = tmp_path / "distributed.json"
        done = CliRunner().invoke(app, ["bench", "--suite", "distributed", *options, "--json", str(path)])
        assert done.exit_code == 0 and "gather" in done.output, done.output
        assert ("MagiAttention" in done.output) == bool(options)
        rows = json.loads(path.read_text())["rows"]
        assert {row["mode"] for row in rows} == {"ulysses", "gather", "ring"}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--repeat", "3"), "suite distributed runs alone"),
        (("--suite", "overhead"), "suite distributed runs alone"),
        (("--only", "nothing of it"), "no problem of suite distributed contains 'nothing of it'"),
        (("--device", "cuda"), "it takes --simulate RANKS"),
        (("--simulate", "1"), "1 is not in the range 2<=x<=4096"),
    ],
)
def test_wrong_options(options, sentence):
    done = CliRunner().invoke(app, ["bench", "--suite", "distributed", *options])
    assert done.exit_code == 2 and sentence in done.output and len(done.output.splitlines()) == 1, done.output


def test_simulate_is_of_this_suite():
    done = CliRunner().invoke(app, ["bench", "--suite", "overhead", "--simulate", "2"])
    assert done.exit_code == 2 and "--simulate is of suite distributed" in done.output, done.output
