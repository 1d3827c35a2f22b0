"""What ranks do in the tests of DTensors: a call on whole tensors, and the same call on sharded ones."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
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


def whole_masks() -> dict[str, Make]:
    """Those of whole sequences, which a call in parts takes as they are."""
    return MASKS | {"bottom right": lambda g, heads: Mask(causal=True, align="bottom_right", window=(5, 0))}


def mesh_of(mode: str, world: int) -> DeviceMesh:
    return init_device_mesh("cpu", (2, world // 2) if mode == "hybrid" else (world,))


def parts_of(order: str, length: int, world: int) -> Any:
    """None for what every call asks for; with any other order sequences of queries and keys are one."""
    from sdpa.distributed import Parts

    return {
        "asked": None,
        "zigzag": Parts.zigzag(length, world),
        "documents": Parts.documents([3, length - 5, 2], world, chunks=3),
    }[order]


def in_parts(rank: int, world: int, sizes: tuple[int, int], mode: str, order: str = "asked") -> None:
    """Each mask that the mode takes: output and log-sum-exp of one process, gradients too, each of this rank's part."""
    from sdpa.distributed import context_parallel, shard, unshard

    (M, N), mesh = sizes, mesh_of(mode, world)
    parts, taken = parts_of(order, M, world), 0
    for name, make in whole_masks().items():
        if (M, N) != (12, 12) and name not in ("none", "causal", "window", "bias", "bottom right"):
            continue
        g = torch.Generator().manual_seed(8)
        heads = (8, 4)
        whole = [randn(g, B, heads[0], M, D), randn(g, B, heads[1], N, D), randn(g, B, heads[1], N, D + 4)]
        sinks, mask = randn(g, heads[0]), make(g, 8)
        if name == "bias":
            bias = torch.randn(1, heads[0], M, N, generator=g, dtype=torch.float64)
            mask = Mask(bias=bias)
        if mask.bias is not None:
            mask.bias.requires_grad_()
        options: dict[str, Any] = {"enable_gqa": True, "softcap": 4.0, "return_lse": True}
        out, lse = sdpa.scaled_dot_product_attention(*whole, mask, sinks=sinks, **options)
        upstream = torch.randn(out.shape, generator=g, dtype=out.dtype)
        of_lse = torch.randn(lse.shape, generator=g, dtype=lse.dtype)
        torch.autograd.backward((out, lse), (upstream, of_lse))
        expected = [t.grad for t in (*whole, sinks)] + ([] if mask.bias is None else [mask.bias.grad])
        for t in (*whole, sinks, mask.bias):
            if t is not None:
                t.grad = None
        own = [shard(t.detach(), mesh, 2, parts).clone().requires_grad_() for t in whole]
        with context_parallel(mesh, mode, parts):
            try:
                found, found_lse = sdpa.scaled_dot_product_attention(*own, mask, sinks=sinks, **options)
            except RuntimeError as error:
                assert "ulysses" in str(error) and mode not in ("ulysses", "auto"), (name, error)
                continue
        taken += 1
        torch.autograd.backward((found, found_lse), (shard(upstream, mesh, 2, parts), shard(of_lse, mesh, 2, parts)))
        for one, wanted in ((found, out), (found_lse, lse)):
            one = unshard(one, mesh, 2, parts)
            if mode == "ulysses":
                assert torch.equal(one, wanted), (mode, order, name, (one - wanted).abs().max())
            close(one, wanted, f"{mode} {order} {name}")
        for t, wanted in zip(own, expected, strict=False):
            close(unshard(t.grad, mesh, 2, parts), wanted, f"{mode} {order} {name}")
        for t, wanted in zip([sinks, *([] if mask.bias is None else [mask.bias])], expected[3:], strict=True):
            total = torch.zeros_like(t) if t.grad is None else t.grad.clone()
            dist.all_reduce(total)
            close(total, wanted, f"{mode} {order} {name}")
    assert taken >= (4 if (M, N) != (12, 12) else 9), (mode, taken)


def exact_rows(rank: int) -> None:
    """Gathered keys: where every query sees all of them, rows are bit by bit those of one process."""
    from sdpa.distributed import context_parallel, shard, unshard

    mesh, g = init_device_mesh("cpu", (2,)), torch.Generator().manual_seed(14)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        whole = [torch.randn(2, 4, 128, 32, generator=g, dtype=dtype) for _ in range(3)]
        for mask in (None, Mask(lengths=torch.tensor([100, 128])), torch.rand(128, 128, generator=g) < 0.5):
            expected = sdpa.scaled_dot_product_attention(*whole, mask)
            with context_parallel(mesh, "gather"):
                found = sdpa.scaled_dot_product_attention(*(shard(t, mesh, 2) for t in whole), mask)
            assert torch.equal(unshard(found, mesh, 2), expected), (dtype, mask)


def every_mode(rank: int, world: int) -> None:
    from sdpa.distributed import modes

    for mode in ("ulysses", "gather", "ring", "auto", *(["hybrid"] if world > 2 else [])):
        for order in ("asked", "zigzag", "documents"):
            modes.MESSAGE = 1 if order == "zigzag" else 32 << 20  # with 1 each key head has a message of its own
            in_parts(rank, world, (12, 12), mode, order)
        for sizes in ((11, 7), (9, 13)):
            in_parts(rank, world, sizes, mode)


def close(found: Tensor, wanted: Tensor, name: str) -> None:
    def said(text: str) -> str:
        return f"{name}: {text}"

    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11, msg=said)


def ulysses_elsewhere(rank: int) -> None:
    """torch's function, our layers, a compiled call, known lengths; and what is refused on every rank."""
    from sdpa.distributed import Parts, context_parallel, shard, unshard

    mesh = init_device_mesh("cpu", (2,))
    g = torch.Generator().manual_seed(9)
    whole = [randn(g, 2, 4, 10, D).detach() for _ in range(3)]
    own = [shard(t, mesh, 2).contiguous() for t in whole]
    expected = sdpa.scaled_dot_product_attention(*whole, is_causal=True)
    attend = torch.compile(lambda *t: F.scaled_dot_product_attention(*t, is_causal=True), backend="eager")
    torch.manual_seed(10)
    layer = sdpa.nn.MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64)
    x = torch.randn(2, 10, 16, generator=g, dtype=torch.float64)
    layer_expected, _ = layer(x, x, x, need_weights=False)
    with context_parallel(mesh, "ulysses", Parts.even(10, 2)):
        assert torch.equal(unshard(F.scaled_dot_product_attention(*own, None, 0.0, True), mesh, 2), expected)
        assert torch.equal(unshard(attend(*own), mesh, 2), expected)
        try:
            sdpa.scaled_dot_product_attention(*(t[:, :, :4] for t in own))
        except ValueError as error:
            assert "this rank has 4 queries and 4 keys, where parts tells of 5" in str(error), error
        else:
            raise AssertionError("other lengths were taken")
        part = shard(x, mesh, 1)
        torch.testing.assert_close(unshard(layer(part, part, part, need_weights=False)[0], mesh, 1), layer_expected)
        cu = torch.tensor([0, 5], dtype=torch.int32)
        for call, told in (
            (lambda: layer(part, part, part), "attention with weights is not supported"),
            (lambda: sdpa.scaled_dot_product_attention(*own, dropout_p=0.5), "dropout is not supported"),
            (
                lambda: sdpa.varlen_attention(*(t[0].transpose(0, 1) for t in own), cu, cu, 5, 5),
                "varlen_attention is not",
            ),
            (lambda: torch.nn.MultiheadAttention(16, 4, dtype=torch.float64)(part, part, part), "is not reached; take"),
            (lambda: sdpa.scaled_dot_product_attention(*(t[0] for t in own)), "expected query, key and value as"),
            (lambda: sdpa.scaled_dot_product_attention(*(t[:, :3] for t in own)), "3 query heads and 3 key heads"),
        ):
            try:
                call()
            except (RuntimeError, ValueError) as error:
                assert told in str(error), error
            else:
                raise AssertionError(f"not refused: {told}")
    assert torch.equal(sdpa.scaled_dot_product_attention(*whole, is_causal=True), expected)
    for options, told in (
        ({"mode": "rings"}, "expected mode as one of auto, ulysses, gather, ring on a mesh of shape (2,), got 'rings'"),
        ({"parts": Parts.even(1, 1)}, "expected parts of 2 ranks, got those of 1"),
    ):
        try:
            context_parallel(mesh, **options)
        except ValueError as error:
            assert told in str(error), error
        else:
            raise AssertionError(f"not refused: {told}")


def training(rank: int) -> None:
    """A small GPT learns from parts of a row: the losses are those of one process within 1e-5 in float32."""
    from sdpa.distributed import Parts, context_parallel, shard

    length, mesh = 96, init_device_mesh("cpu", (2,))
    g = torch.Generator().manual_seed(15)
    texts = torch.randint(0, 50, (1, 1, length + 1), generator=g).expand(6, -1, -1)

    def losses(mode: str | None, parts: Parts | None) -> list[float]:
        torch.manual_seed(16)
        layer = sdpa.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        model = torch.nn.ModuleDict(
            {
                "tokens": torch.nn.Embedding(50, 32),
                "places": torch.nn.Embedding(length, 32),
                "layers": sdpa.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
                "head": torch.nn.Linear(32, 50),
            }
        )
        optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), []
        for text in texts:
            row = text[:, :-1], text[:, 1:], torch.arange(length)[None]
            given, following, places = row if mode is None else [shard(t, mesh, 1, parts) for t in row]
            optimizer.zero_grad()
            with nullcontext() if mode is None else context_parallel(mesh, mode, parts):
                x = model["tokens"](given) + model["places"](places)
                own = torch.nn.Transformer.generate_square_subsequent_mask(x.shape[1])
                logits = model["head"](model["layers"](x, own, is_causal=True))
                loss = F.cross_entropy(logits[0], following[0], reduction="sum") / length
                loss.backward()
            total = loss.detach().clone()
            if mode is not None:
                dist.all_reduce(total)
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
            optimizer.step()
            found.append(total.item())
        return found

    expected = losses(None, None)
    assert expected[-1] < expected[0] - 0.1, expected
    for mode in ("ulysses", "gather", "ring"):
        for parts in (None, Parts.zigzag(length, 2)):
            found = losses(mode, parts)
            assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 1e-5, (mode, found, expected)


def models(rank: int) -> None:
    """transformers' Llama, by torch's function and by ours; where it makes masks of a rank's positions, all refuse."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from sdpa.distributed import Parts, context_parallel, shard, unshard

    import_module("sdpa.integrations.transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 50}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    mesh, zigzag = init_device_mesh("cpu", (2,)), Parts.zigzag(32, 2)
    ids = torch.randint(0, 50, (2, 32), generator=torch.Generator().manual_seed(17))
    places = torch.arange(32)[None].expand(2, -1)
    for name in ("sdpa", "sdp_kernels"):
        torch.manual_seed(18)
        model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, attn_implementation=name)).eval()
        with torch.no_grad():
            expected = model(ids, position_ids=places, use_cache=False).logits
            for mode in ("ulysses", "gather", "ring"):
                with context_parallel(mesh, mode):
                    own = model(shard(ids, mesh, 1), position_ids=shard(places, mesh, 1), use_cache=False).logits
                torch.testing.assert_close(unshard(own, mesh, 1), expected, rtol=1e-5, atol=1e-5)
            own, at = (shard(t, mesh, 1, zigzag) for t in (ids, places))
            with context_parallel(mesh, "ulysses", zigzag):  # it takes the jump in one rank's positions for documents
                refused(
                    lambda model=model, own=own, at=at: model(own, position_ids=at, use_cache=False),
                    "or other options or masks",
                )


def alone(rank: int, mode: str) -> None:
    """A rank that is gone is an error of the others, at once."""
    from sdpa.distributed import context_parallel

    mesh = init_device_mesh("cpu", (2,))
    q = torch.randn(1, 2, 4, 8)
    dist.barrier()
    if rank == 1:
        return
    begin = time.monotonic()
    try:
        with context_parallel(mesh, mode):
            sdpa.scaled_dot_product_attention(q, q, q)
    except RuntimeError as error:
        assert "gloo" in str(error).lower() or "closed" in str(error).lower(), error
        assert time.monotonic() - begin < 30
    else:
        raise AssertionError("a call without its other rank ended")


def volume(rank: int) -> None:
    """What a rank sends, forward and backward, is each mode's formula; keys that no query sees are not sent."""
    from sdpa.distributed import Parts, context_parallel

    world, m, heads, Hkv, Dv = 4, 6, 8, 4, D + 4
    M, key = world * m, B * Hkv * (D + Dv) * 8  # bytes of a key and its value
    g = torch.Generator().manual_seed(11 + rank)
    own = [randn(g, B, heads, m, D), randn(g, B, Hkv, m, D), randn(g, B, Hkv, m, Dv)]
    lines = {
        "ulysses": (None, (B * m * heads * (D + Dv) * 8 + m * key) * 3 // 4),
        "gather": (None, 3 * m * key),
        "gather, causal": (Mask(causal=True), (3 - rank) * m * key),  # to the ranks behind
        "gather, window": (Mask(causal=True, window=(4, 0)), 4 * key if rank < 3 else 0),
        "ring": (None, 3 * m * key),
        "ring, causal": (Mask(causal=True), (3 - rank) * m * key),
        "ring, window": (Mask(causal=True, window=(4, 0)), 4 * key if rank < 3 else 0),
    }
    for name, (mask, forward) in lines.items():
        mode = name.split(",", maxsplit=1)[0]
        with context_parallel(init_device_mesh("cpu", (world,)), mode, Parts.even(M, world)) as block:
            out = sdpa.scaled_dot_product_attention(*own, mask, enable_gqa=True)
        assert block.sent == forward, (name, block.sent, forward)
        out.sum().backward()
        # Gradients come back: of all that was sent to others by Ulysses, else of the keys that were taken.
        taken = {"": 3 * m, " causal": rank * m, " window": 4 if rank else 0}[name.partition(",")[2]] * key
        backward = {"ulysses": forward, "gather": taken, "ring": forward + taken}[mode]
        assert block.sent == forward + backward, (name, block.sent, forward, backward)


def refused(call: Callable[[], Any], told: str) -> None:
    try:
        call()
    except (RuntimeError, ValueError, TypeError) as error:
        assert told in str(error), error
    else:
        raise AssertionError(f"not refused: {told}")


def ulysses_edges(rank: int) -> None:
    """What would attend to a rank's own part without a word, and what would let other ranks wait."""
    from torch.nn.attention.bias import causal_lower_right
    from torch.utils.checkpoint import checkpoint

    from sdpa.distributed import context_parallel, shard, unshard

    mesh = init_device_mesh("cpu", (2,))
    g = torch.Generator().manual_seed(12)
    whole = [randn(g, 2, 4, 8, D).detach() for _ in range(3)]
    own = [shard(t, mesh, 2).contiguous() for t in whole]
    expected = sdpa.scaled_dot_product_attention(*whole)
    attend = torch.compile(sdpa.scaled_dot_product_attention, backend="eager")
    whole_graph = torch.compile(
        lambda q, k, v: sdpa.scaled_dot_product_attention(q, k, v, dropout_p=0.0), backend="eager", fullgraph=True
    )
    for compiled in (attend, whole_graph):  # made outside of the block
        compiled(*own)
    bias, sinks = torch.randn(2, 2, 8, 8, generator=g, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
    encoder = sdpa.nn.TransformerEncoder(
        sdpa.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dtype=torch.float64), 1, enable_nested_tensor=False
    )
    x, padding = torch.randn(2, 4, 8, generator=g, dtype=torch.float64), torch.zeros(2, 4, dtype=torch.bool)
    padding[0, 2:] = rank == 1  # on one rank alone
    with context_parallel(mesh, "ulysses"):
        assert torch.equal(unshard(attend(*own), mesh, 2), expected)
        refused(lambda: whole_graph(*own), "torch.compiler.disable")
        refused(
            lambda: sdpa.scaled_dot_product_attention(*own, bias), "(2, 2, 8, 8) does not broadcast to (..., H, M, N)"
        )
        refused(lambda: sdpa.scaled_dot_product_attention(*own, sinks=sinks), "Expected sinks to have shape (4,)")
        refused(lambda: sdpa.scaled_dot_product_attention(*own, sinks=[0.0]), "sinks must be a Tensor of shape (H,)")
        refused(lambda: sdpa.scaled_dot_product_attention(1, 2, 3), "expected query, key and value as")
        refused(lambda: encoder(x, src_key_padding_mask=padding), "layers take no mask but a causal one")
        refused(lambda: context_parallel(mesh).__enter__(), "blocks do not nest")
        of_part = causal_lower_right(4, 4)
        refused(lambda: sdpa.scaled_dot_product_attention(*own, of_part), "CausalBias is not supported; take sdpa.Mask")
        refused(lambda: F.scaled_dot_product_attention(*own, of_part), "expected a mask of the whole sequence, 8 x 8")
        few = [t[: 1 + rank] for t in own]
        refused(lambda: sdpa.scaled_dot_product_attention(*few), "ranks have tensors of different batch, heads")
        learning = [t.clone().requires_grad_() for t in own]
        again = lambda: checkpoint(sdpa.scaled_dot_product_attention, *learning, use_reentrant=True)  # noqa: E731
        refused(again, "take use_reentrant=False, with the block inside")
        empty = [shard(t[:, :, :1], mesh, 2) for t in whole]  # the second rank has none
        one = unshard(sdpa.scaled_dot_product_attention(*empty), mesh, 2)
    assert torch.equal(one, sdpa.scaled_dot_product_attention(*(t[:, :, :1] for t in whole)))
    assert torch.equal(attend(*whole), expected) and torch.equal(whole_graph(*whole), expected)

    def inside(*tensors: Tensor) -> Tensor:
        with context_parallel(mesh, "ulysses"):
            return sdpa.scaled_dot_product_attention(*tensors)

    upstream = shard(torch.randn(2, 4, 8, D, generator=g, dtype=torch.float64), mesh, 2)
    checkpoint(inside, *learning, use_reentrant=False).backward(upstream)
    gradients = [t.grad.clone() for t in learning]
    for t in learning:
        t.grad = None
    inside(*learning).backward(upstream)
    assert all(torch.equal(t.grad, gradient) for t, gradient in zip(learning, gradients, strict=True))


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
