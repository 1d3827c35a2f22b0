"""Inside of torch's context_parallel a tensor is one rank's shard: calls are torch's, or refused, and never ours."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel

import sdpa
from sdpa import sharded, torch_private

MASKS = {
    "mask": {"attn_mask": sdpa.Mask(window=(2, 2))},
    "softcap": {"softcap": 2.0},
    "return_lse": {"return_lse": True},
    "kernel": {"kernel": "math"},
}


@pytest.fixture(scope="module")
def mesh():
    """Of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture
def qkv():
    return [torch.randn(2, 4, 16, 8) for _ in range(3)]


@pytest.fixture
def calls(monkeypatch):
    """What stands in the place of torch's function, as its context_parallel puts one there; the calls that it gets."""
    seen = []

    def inner(*args, **options):
        seen.append((args, options))
        return "torch's"

    inner.__module__ = "torch.distributed.tensor.experimental._context_parallel._attention"
    yield lambda: monkeypatch.setattr(F, "scaled_dot_product_attention", inner) or seen


def test_calls_are_torchs(qkv, calls):
    """Also a call that was remembered before, by our function, and by a layer that keeps it."""
    attend = torch.compile(sdpa.scaled_dot_product_attention, backend="eager", fullgraph=True)
    for _ in range(3):
        sdpa.scaled_dot_product_attention(*qkv, is_causal=True)
        attend(*qkv)
    seen = calls()
    assert sdpa.scaled_dot_product_attention(*qkv, is_causal=True, dropout_p=0.5, scale=0.1) == "torch's"
    assert sdpa.scaled_dot_product_attention(*qkv, sdpa.Mask(causal=True)) == "torch's"
    assert attend(*qkv) == "torch's"
    causal = {"scale": None, "enable_gqa": False}
    assert [args[3:] for args, _ in seen] == [(None, 0.5, True), (None, 0.0, True), (None, 0.0, False)]
    assert [options for _, options in seen] == [causal | {"scale": 0.1}, causal, causal]
    assert all(given is tensor for args, _ in seen for given, tensor in zip(args[:3], qkv, strict=True))


@pytest.mark.parametrize("name", MASKS)
def test_what_torch_does_not_take_is_refused(qkv, calls, name):
    sdpa.scaled_dot_product_attention(*qkv, **MASKS[name])
    seen = calls()
    with pytest.raises(RuntimeError, match=f"which has no {name} there. Here a call would attend to this rank's shard"):
        sdpa.scaled_dot_product_attention(*qkv, **MASKS[name])
    assert not seen


def test_other_functions_and_layers_are_refused(qkv, calls):
    places = torch.tensor([0, 16], dtype=torch.int32)
    packed = [t[0].transpose(0, 1) for t in qkv]
    layer, x = sdpa.nn.MultiheadAttention(32, 4, batch_first=True).eval(), torch.randn(2, 16, 32)
    varlen = lambda: sdpa.varlen_attention(*packed, places, places, 16, 16)  # noqa: E731
    with torch.no_grad():
        ours = [varlen(), layer(x, x, x)]
        calls()
        for call, name in ((varlen, "varlen_attention"), (lambda: layer(x, x, x), "attention with weights there")):
            with pytest.raises(RuntimeError, match=rf"torch answers, which has no {name}"):
                call()
        with pytest.raises((TypeError, AttributeError)):  # torch's answer is no tensor here
            layer(x, x, x, need_weights=False)
    assert len(ours) == 2


def test_another_function_in_its_place_changes_nothing(qkv, monkeypatch):
    expected = sdpa.scaled_dot_product_attention(*qkv)
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args: None)
    assert torch.equal(sdpa.scaled_dot_product_attention(*qkv), expected)
    with sdpa.patch():
        assert torch.equal(sdpa.scaled_dot_product_attention(*qkv), expected)


def test_the_block_of_this_torch_is_recognised(mesh, qkv):
    """Its wrapper, and what calls our function again with DTensors where torch was patched before."""
    assert sharded.function_of(tuple(qkv)) is None and not torch_private.handles_attention()
    with context_parallel(mesh, buffers=qkv, buffer_seq_dims=[2, 2, 2]):
        assert sharded.function_of(tuple(qkv)) is F.scaled_dot_product_attention is not torch_private.TORCHS
        with pytest.raises(RuntimeError, match="no softcap"):
            sdpa.scaled_dot_product_attention(*qkv, softcap=1.0)
        of_shards = tuple(DTensor.from_local(t, mesh, [Shard(2)]) for t in qkv)
        assert sharded.function_of(of_shards) is torch_private.TORCHS
        with sdpa.patch(), pytest.raises(RuntimeError, match="no softcap"):
            sdpa.scaled_dot_product_attention(*qkv, softcap=1.0)
    assert sharded.function_of(tuple(qkv)) is sharded.function_of(of_shards) is None
    with sdpa.patch(), context_parallel(mesh, buffers=qkv, buffer_seq_dims=[2, 2, 2]):
        assert sharded.function_of(tuple(qkv)) is F.scaled_dot_product_attention
        assert F.scaled_dot_product_attention is not sdpa.scaled_dot_product_attention
