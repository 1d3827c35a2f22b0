"""What ranks do in the tests of DTensors: a call on whole tensors, and the same call on sharded ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import sdpa
from sdpa import Mask
from sdpa.distributed.sharding import DIMENSIONS

B, H, M, N, D = 4, 4, 12, 12, 8
Make = Callable[[torch.Generator, int], Mask]


def integers(g: torch.Generator, low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=g)


MASKS: dict[str, Make] = {
    "none": lambda g, heads: Mask(),
    "causal": lambda g, heads: Mask(causal=True),
    "window": lambda g, heads: Mask(window=(3, 1)),
    "lengths": lambda g, heads: Mask(lengths=integers(g, 1, N, B), query_lengths=integers(g, 1, M, B)),
    "segments": lambda g, heads: Mask(segments=integers(g, 0, 3, B, M)),
    "shared segments": lambda g, heads: Mask(causal=True, segments=integers(g, 0, 3, 1, M).expand(B, M)),
    "prefix": lambda g, heads: Mask(causal=True, prefix=integers(g, 1, N, B)),
    "alibi": lambda g, heads: Mask(alibi=torch.rand(heads, generator=g, dtype=torch.float64)),
    "alibi of entries": lambda g, heads: Mask(alibi=torch.rand(B, heads, generator=g, dtype=torch.float64)),
    "allowed": lambda g, heads: Mask(allowed=torch.rand(B, 1, M, N, generator=g) < 0.7),
    "bias": lambda g, heads: Mask(bias=torch.randn(1, heads, M, N, generator=g, dtype=torch.float64)),
    "bias of rows": lambda g, heads: Mask(bias=torch.randn(B, 1, 1, N, generator=g, dtype=torch.float64)),
}


def randn(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=g, dtype=torch.float64, requires_grad=True)


def refused(call: Callable[[], Any], told: str) -> None:
    try:
        call()
    except (RuntimeError, ValueError, TypeError) as error:
        assert told in str(error), error
    else:
        raise AssertionError(f"not refused: {told}")


def sharded(mesh: DeviceMesh, tensor: Tensor, batch: int | None, heads: int | None, ways: list[str]) -> DTensor:
    """A tensor of which the dimensions `batch` and `heads` are sharded as far as they have more than one entry."""
    dims = {"batch": batch, "heads": heads}
    placements: list[Placement] = []
    for way in ways:
        dim = 2 if way == "sequence" and tensor.dim() == 4 and heads == 1 else dims.get(way)
        placements.append(Replicate() if dim is None or tensor.shape[dim] == 1 else Shard(dim))
    found = distribute_tensor(tensor.detach(), mesh, placements)
    return found.requires_grad_(tensor.requires_grad)


def of_mask(mesh: DeviceMesh, mask: Mask, ways: list[str]) -> Mask:
    """The same mask of DTensors. Of the sequence they are whole."""
    ways = ["" if way == "sequence" else way for way in ways]
    names = {"lengths": "k_lengths", "query_lengths": "q_lengths", "segments": "q_segments"}
    fields: dict[str, Any] = {}
    for name in ("lengths", "query_lengths", "segments", "prefix", "alibi", "allowed", "bias"):
        value = getattr(mask, name)
        if value is not None:
            batch, heads = DIMENSIONS[names.get(name, name)]
            if value.dim() == 1 and heads is not None:
                batch, heads = None, 0  # slopes of heads alone
            fields[name] = sharded(mesh, value, batch, heads, ways)
    return mask.replace(**fields)


def dense(rank: int, shape: tuple[int, ...], names: tuple[str, ...], heads: tuple[int, int], ways: list[str]) -> None:
    """Each mask of `names` on a mesh, each of whose dimensions shards the tensors in one of `ways`."""
    mesh = init_device_mesh("cpu", shape)
    for name in names:
        g = torch.Generator().manual_seed(1)
        tensors = [randn(g, B, heads[0], M, D), randn(g, B, heads[1], N, D), randn(g, B, heads[1], N, D + 4)]
        sinks, mask = randn(g, heads[0]), MASKS[name](g, heads[0])
        options: dict[str, Any] = {"enable_gqa": heads[0] != heads[1], "softcap": 5.0, "return_lse": True}
        if mask.bias is not None:
            mask.bias.requires_grad_()
        learned = [*tensors, sinks] + ([] if mask.bias is None else [mask.bias])
        out, lse = sdpa.scaled_dot_product_attention(*tensors, mask, sinks=sinks, **options)
        upstream = torch.randn(out.shape, generator=g, dtype=out.dtype), torch.randn(lse.shape, generator=g).to(lse)
        torch.autograd.backward((out, lse), upstream)

        given = [sharded(mesh, t, 0, 1, ways) for t in tensors]
        given_sinks, given_mask = sharded(mesh, sinks, None, 0, ways), of_mask(mesh, mask, ways)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            results = sdpa.scaled_dot_product_attention(*given, given_mask, sinks=given_sinks, **options)
        ours = [str(one.message) for one in told if "context_parallel" in str(one.message)]
        assert bool(ours) == ("sequence" in ways and name == names[0]), (name, ours)
        torch.autograd.backward(
            results, [distribute_tensor(t, mesh, r.placements) for t, r in zip(upstream, results, strict=True)]
        )
        found = [*given, given_sinks] + ([] if mask.bias is None else [given_mask.bias])
        for one, expected in zip(results, (out, lse), strict=True):
            assert torch.equal(one.full_tensor(), expected), name
            if "sequence" not in ways:
                assert list(one.placements) == list(given[0].placements), (name, one.placements)
        for one, expected in zip(found, learned, strict=True):
            torch.testing.assert_close(one.grad.full_tensor(), expected.grad, rtol=1e-12, atol=1e-12, msg=name)


def uneven(rank: int) -> None:
    """Three heads on two ranks are two and one. Heads that share keys stay together, or all are gathered."""
    mesh = init_device_mesh("cpu", (2,))
    g = torch.Generator().manual_seed(2)
    for H, Hkv, stays in ((3, 3, True), (6, 3, False), (8, 4, True), (8, 1, False)):
        whole = [randn(g, 2, H, M, D), randn(g, 2, Hkv, N, D), randn(g, 2, Hkv, N, D)]
        given = [distribute_tensor(t.detach(), mesh, [Shard(1)]) for t in whole[:1]]
        given += [distribute_tensor(t.detach(), mesh, [Shard(1) if Hkv > 1 else Replicate()]) for t in whole[1:]]
        out = sdpa.scaled_dot_product_attention(*given, is_causal=True, enable_gqa=True)
        expected = sdpa.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
        assert torch.equal(out.full_tensor(), expected), (H, Hkv)
        assert out.placements == ((Shard(1),) if stays else (Replicate(),)), (H, Hkv, out.placements)


def beyond(rank: int) -> None:
    """torch's function where it is patched, a compiled call, weights, packed documents, pages, and what is refused."""
    mesh = init_device_mesh("cpu", (2,))
    g = torch.Generator().manual_seed(3)
    whole = [randn(g, B, H, M, D) for _ in range(3)]
    given = [distribute_tensor(t.detach(), mesh, [Shard(1)]) for t in whole]
    expected = sdpa.scaled_dot_product_attention(*whole, is_causal=True)
    with sdpa.patch():
        out = F.scaled_dot_product_attention(*given, is_causal=True)
    assert torch.equal(out.full_tensor(), expected) and out.placements == (Shard(1),)
    attend = torch.compile(sdpa.scaled_dot_product_attention, backend="aot_eager", fullgraph=True)
    assert torch.equal(attend(*given, is_causal=True).full_tensor(), expected)

    q, k, v = (t.transpose(1, 2).reshape(B * M, H, D).detach() for t in whole)
    places = torch.arange(0, B * M + 1, M, dtype=torch.int32)
    expected = sdpa.varlen_attention(q, k, v, places, places, M, M, is_causal=True)
    rows = [distribute_tensor(t, mesh, [Shard(1)]) for t in (q, k, v)]
    at = distribute_tensor(places, mesh, [Replicate()])
    out = sdpa.varlen_attention(*rows, at, at, M, M, is_causal=True)
    assert torch.equal(out.full_tensor(), expected) and out.placements == (Shard(1),)

    table, lengths = (
        torch.arange(B * 3, dtype=torch.int32).reshape(B, 3),
        torch.tensor([12, 5, 9, 1], dtype=torch.int32),
    )
    pages = [torch.randn(B * 3, 4, H, D, generator=g) for _ in range(2)]
    query = torch.randn(B, 1, H, D, generator=g)
    expected = sdpa.paged_attention(query, *pages, table, lengths)
    for of_queries, of_pages, of_places in ((2, Shard(2), Replicate()), (0, Replicate(), Shard(0))):
        out = sdpa.paged_attention(
            distribute_tensor(query, mesh, [Shard(of_queries)]),
            *(distribute_tensor(t, mesh, [of_pages]) for t in pages),
            *(distribute_tensor(t, mesh, [of_places]) for t in (table, lengths)),
        )
        assert torch.equal(out.full_tensor(), expected) and out.placements == (Shard(of_queries),)

    torch.manual_seed(4 + rank)  # ranks need not agree
    out = sdpa.scaled_dot_product_attention(*given, dropout_p=0.5)
    torch.manual_seed(4)
    assert torch.equal(out.full_tensor(), sdpa.scaled_dot_product_attention(*whole, dropout_p=0.5))
    prefix = Mask(causal=True, prefix=3)  # becomes a tensor
    out = sdpa.scaled_dot_product_attention(*given, prefix)
    assert torch.equal(out.full_tensor(), sdpa.scaled_dot_product_attention(*whole, prefix))
    for mixed, mask in (((given[0], whole[1], whole[2]), None), (given, Mask(lengths=lengths))):
        try:
            sdpa.scaled_dot_product_attention(*mixed, mask)
        except RuntimeError as error:
            assert "got mixed torch.Tensor and DTensor, need to convert all" in str(error), error
        else:
            raise AssertionError("a mixture was taken")


def documents(rank: int) -> None:
    """Gradients of packed documents by heads, with masks that have one entry a document or a head."""
    mesh = init_device_mesh("cpu", (2,))
    g = torch.Generator().manual_seed(5)
    places = torch.tensor([0, 5, 5, 12, 20], dtype=torch.int32)
    whole = [randn(g, 20, heads, D) for heads in (4, 2, 2)]
    sinks, slopes = randn(g, 4), torch.rand(4, generator=g, dtype=torch.float64)
    lengths = torch.tensor([4, 0, 7, 3])
    mask = Mask(causal=True, lengths=lengths, alibi=slopes)
    out, lse = sdpa.varlen_attention(*whole, places, places, 8, 8, mask, sinks=sinks, enable_gqa=True, return_lse=True)
    upstream = torch.randn(out.shape, generator=g, dtype=out.dtype)
    out.backward(upstream)
    for placement, of_heads in ((Shard(1), Shard(0)), (Replicate(), Replicate())):
        given = [distribute_tensor(t.detach(), mesh, [placement]).requires_grad_() for t in whole]
        given_sinks = distribute_tensor(sinks.detach(), mesh, [of_heads]).requires_grad_()
        at = distribute_tensor(places, mesh, [Replicate()])
        of_mesh = mask.replace(
            lengths=distribute_tensor(lengths, mesh, [Replicate()]),
            alibi=distribute_tensor(slopes, mesh, [Replicate()]),
        )
        found, found_lse = sdpa.varlen_attention(
            *given, at, at, 8, 8, of_mesh, sinks=given_sinks, enable_gqa=True, return_lse=True
        )
        found.backward(distribute_tensor(upstream, mesh, found.placements))
        assert torch.equal(found.full_tensor(), out) and torch.equal(found_lse.full_tensor(), lse)
        assert found.placements == (placement,) and found_lse.placements == (of_heads,)
        for one, expected in zip([*given, given_sinks], [*whole, sinks], strict=True):
            torch.testing.assert_close(one.grad.full_tensor(), expected.grad, rtol=1e-12, atol=1e-12)
    try:
        sdpa.varlen_attention(*given, at, at, 8, 8, dropout_p=0.5, enable_gqa=True)
    except RuntimeError as error:
        assert "Dropout of packed or paged DTensors is not supported" in str(error)
    else:
        raise AssertionError("dropout was taken")


def modules(rank: int) -> None:
    """Layers under DistributedDataParallel and FSDP2: two steps of training are those of one process."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    mesh = init_device_mesh("cpu", (2,))

    def make() -> torch.nn.Module:
        torch.manual_seed(6)
        layer = sdpa.nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, dtype=torch.float64)
        return sdpa.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    x = torch.randn(4, 10, 16, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    padding = torch.arange(10) >= torch.tensor([[10], [7], [4], [9]])

    def train(model: torch.nn.Module, x: Tensor, padding: Tensor, parts: int) -> list[float]:
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        for _ in range(2):
            optimizer.zero_grad()
            out = model(x, src_key_padding_mask=padding)
            loss = out.masked_fill(padding[..., None], 0.0).square().sum() / 100
            (loss * parts).backward()  # gradients are means over ranks
            optimizer.step()
            losses.append(loss.item())
        return losses

    expected = make()
    losses = torch.tensor(train(expected, x, padding, 1), dtype=torch.float64)
    own = slice(2 * rank, 2 * rank + 2)
    for name in ("DDP", "FSDP2"):
        model = make()
        if name == "DDP":
            wrapped = DistributedDataParallel(model)
        else:
            for layer in model.layers:
                fully_shard(layer, mesh=mesh)
            wrapped = fully_shard(model, mesh=mesh)
        found = torch.tensor(train(wrapped, x[own], padding[own], 2), dtype=torch.float64)
        dist.all_reduce(found)
        torch.testing.assert_close(found, losses, rtol=1e-10, atol=1e-10, msg=name)
        for key, value in model.state_dict().items():
            value = value.full_tensor() if isinstance(value, DTensor) else value
            torch.testing.assert_close(value, expected.state_dict()[key], rtol=1e-10, atol=1e-10, msg=f"{name} {key}")


def edges(rank: int) -> None:
    """DTensors: sequences of pages that ranks do not divide, documents in a mask, and torch's own switch."""
    from torch.distributed.tensor.experimental import implicit_replication

    mesh = init_device_mesh("cpu", (2,))
    g = torch.Generator().manual_seed(13)
    table, lengths = torch.arange(6, dtype=torch.int32).reshape(3, 2), torch.tensor([8, 5, 2], dtype=torch.int32)
    pages = [torch.randn(6, 4, 4, D, generator=g) for _ in range(2)]
    query = torch.randn(3, 4, 4, D, generator=g)
    expected, expected_lse = sdpa.paged_attention(query, *pages, table, lengths, return_lse=True)
    found, found_lse = sdpa.paged_attention(
        distribute_tensor(query, mesh, [Shard(0)]),
        *(distribute_tensor(t, mesh, [Replicate()]) for t in pages),
        *(distribute_tensor(t, mesh, [Shard(0)]) for t in (table, lengths)),
        return_lse=True,
    )
    assert found.shape == expected.shape and torch.equal(found.full_tensor(), expected)
    assert found_lse.shape == expected_lse.shape and torch.equal(found_lse.full_tensor(), expected_lse)

    whole = [randn(g, 1, 4, 12, D).detach() for _ in range(3)]
    given = [distribute_tensor(t, mesh, [Shard(1)]) for t in whole]
    cu = torch.tensor([0, 5, 12])
    expected = sdpa.scaled_dot_product_attention(*whole, Mask(cu_seqlens=cu))
    for mask in (Mask(cu_seqlens=distribute_tensor(cu, mesh, [Replicate()])),):
        assert torch.equal(sdpa.scaled_dot_product_attention(*given, mask).full_tensor(), expected)
    with implicit_replication():
        sdpa.scaled_dot_product_attention(*given, is_causal=True)
        assert torch.equal((given[0] + whole[0]).full_tensor(), 2 * whole[0]), "torch's block is still open"
