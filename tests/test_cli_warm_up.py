"""The command `sdpa warm-up`: what it prints, its JSON, and one sentence for what is wrong."""

from __future__ import annotations

import json

import pytest
import torch

from helpers import call, complaint

pytest.importorskip("click")
pytest.importorskip("rich")

from sdpa.bench.problems import MASKS
from sdpa.cli.common import compiling_kernels

pytestmark = pytest.mark.usefixtures("own_surroundings")


@pytest.fixture
def as_if_compiled(monkeypatch):
    """The CPU as a device whose first calls compile, which stands here for a GPU."""
    monkeypatch.setattr("sdpa.cli.warm_up.compiling_kernels", lambda device: ("cpu_flash",))


SHAPE = ("warm-up", "--device", "cpu", "--shape", "2,4,40,40,8")


def test_on_a_cpu_nothing_is_run(monkeypatch):
    monkeypatch.setattr("sdpa.cli.warm_up.warm", lambda *_, **__: pytest.fail("ran"))
    said = call(*SHAPE)
    assert said.startswith("nothing to compile on cpu: its kernels were built") and "sdpa explain" in said
    assert len(said.splitlines()) == 1 and json.loads(call(*SHAPE, "--json")) == []
    assert compiling_kernels("cpu") == () and "triton_flash" in compiling_kernels("cuda:1")
    assert compiling_kernels("mps") == ("metal_flash",)


@pytest.mark.usefixtures("as_if_compiled")
def test_it_prints_who_answers():
    text = call(*SHAPE, "--shape", "1,4,1,24,8", "--kv-heads", "2", "--dv", "16", "--mask", "none", "--mask", "causal")
    for words in ("problem", "kernel", "first run", "B=2 H=4 Hkv=2 M=40 N=40 D=8 Dv=16 bfloat16 on cpu: gqa"):
        assert words in text
    assert text.count("cpu_flash") == 4 and text.count("M=1 N=24") == 2 and "backward" not in text


@pytest.mark.usefixtures("as_if_compiled")
def test_json():
    found = json.loads(call(*SHAPE, "--dtype", "float32", "--training", "--json", "--jobs", "2"))
    assert [set(one) for one in found] == [{"problem", "kernel", "seconds"}] * 2
    assert [one["problem"].split()[0] for one in found] == ["forward", "backward"]
    assert {one["kernel"] for one in found} == {"cpu_flash"} and all(one["seconds"] > 0 for one in found)


@pytest.mark.usefixtures("as_if_compiled")
def test_every_mask():
    masks = [option for mask in MASKS for option in ("--mask", mask)]
    found = json.loads(call(*SHAPE, *masks, "--training", "--json"))
    asked = {one["problem"].partition(": ")[2] for one in found if one["problem"].startswith("forward")}
    assert asked == {
        "lse",
        "causal, lse",
        "k_lengths, lse",
        "allowed, lse",
        "bias, lse",
        "alibi, causal, lse",
        "causal, lse, segments",
    }
    backwards = {one["problem"].partition(": ")[2] for one in found if one["problem"].startswith("backward")}
    assert {"bias", "bias, bias_grad", "causal, segments", "no mask"} <= backwards


def test_it_complains_in_one_sentence():
    assert "expected --kv-heads to divide the 4 heads, got 3" in complaint(*SHAPE, "--kv-heads", "3")
    said = "--mask segments needs as many queries as keys, got M=4 and N=8"
    assert said in complaint("warm-up", "--shape", "1,4,4,8,8", "--mask", "segments")
    assert "expected B,H,M,N,D as 5 integers >= 1, got '1,2,3'" in complaint("warm-up", "--shape", "1,2,3")
    assert "Missing option '--shape'. For example: --shape 1,32,4096,4096,128" in complaint("warm-up")
    assert "as integers up to 1099511627776" in complaint("warm-up", "--shape", "1,8,64,64," + 23 * "9")
    assert "got 'meta': it computes nothing" in complaint("warm-up", "--shape", "1,4,4,8,8", "--device", "meta")
    assert "'--jobs'" in complaint(*SHAPE, "--jobs", "0")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_it_on_a_gpu_that_is_not_there():
    assert "expected a device of this machine, got 'cuda'" in complaint(
        "warm-up", "--shape", "1,4,4,8,8", "--device", "cuda"
    )
