"""What ranks do in the tests of context parallelism: a call in parts of a sequence, and that of one process."""

from __future__ import annotations

import itertools
import re
import time
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed_cases import MASKS, B, D, Make, randn, refused
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import sdpa
from sdpa import Mask
from sdpa.distributed import Parts, context_parallel, modes, shard, unshard


def whole_masks() -> dict[str, Make]:
    """Those of whole sequences, which a call in parts takes as they are."""
    return MASKS | {"bottom right": lambda g, heads: Mask(causal=True, align="bottom_right", window=(5, 0))}


def mesh_of(mode: str, world: int) -> DeviceMesh:
    return init_device_mesh("cpu", (2, world // 2) if mode == "hybrid" else (world,))


def parts_of(order: str, length: int, world: int) -> Any:
    """None for what every call asks for; with any other order sequences of queries and keys are one."""
    return {
        "asked": None,
        "zigzag": Parts.zigzag(length, world),
        "documents": Parts.documents([3, length - 5, 2], world, chunks=3),
    }[order]


def in_parts(rank: int, world: int, sizes: tuple[int, int], mode: str, order: str = "asked") -> None:
    """Each mask that the mode takes: output and log-sum-exp of one process, gradients too, each of this rank's part."""
    (M, N), mesh = sizes, mesh_of(mode, world)
    parts = parts_of(order, M, world)
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
            call = partial(sdpa.scaled_dot_product_attention, *own, mask, sinks=sinks, **options)
            if name in REFUSED.get(mode, ()):
                refused(call, "mode='ulysses'")
                continue
            found, found_lse = call()
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


def every_mode(rank: int, world: int) -> None:
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
            assert "ranks have [4, 4] queries and [4, 4] keys, where parts tells of [5, 5]" in str(error), error
        else:
            raise AssertionError("other lengths were taken")
        part = shard(x, mesh, 1)
        torch.testing.assert_close(unshard(layer(part, part, part, need_weights=False)[0], mesh, 1), layer_expected)
        cu = torch.tensor([0, 5], dtype=torch.int32)
        for call, told in (
            (lambda: layer(part, part, part), "attention with weights is not supported"),
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

    import_module("sdpa.integrations.transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 50}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    mesh, zigzag = init_device_mesh("cpu", (2,)), Parts.zigzag(32, 2)
    ids = torch.randint(0, 50, (2, 32), generator=torch.Generator().manual_seed(17))
    places = torch.arange(32)[None].expand(2, -1)
    padding = shard((torch.arange(32) >= 3).expand(2, -1), mesh, 1)
    for name in ("sdpa", "sdp_kernels"):
        torch.manual_seed(18)
        model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, attn_implementation=name)).eval()
        with torch.no_grad():
            expected = model(ids, position_ids=places, use_cache=False).logits
            for mode in ("ulysses", "gather", "ring"):
                with context_parallel(mesh, mode):
                    own = model(shard(ids, mesh, 1), position_ids=shard(places, mesh, 1), use_cache=False).logits
                torch.testing.assert_close(unshard(own, mesh, 1), expected, rtol=1e-5, atol=1e-5)
            own = shard(ids, mesh, 1)
            with context_parallel(mesh, "gather"):
                refused(lambda model=model, own=own: model(own, attention_mask=padding, use_cache=False), "mask")
            own, at = (shard(t, mesh, 1, zigzag) for t in (ids, places))
            with context_parallel(mesh, "ulysses", zigzag):  # it takes the jump in one rank's positions for documents
                refused(
                    lambda model=model, own=own, at=at: model(own, position_ids=at, use_cache=False),
                    "mask",
                )


def told_on_every_rank(rank: int) -> None:
    """What is wrong on one rank, or on all, is a sentence on each, and the next exchange goes on."""
    mesh, q = init_device_mesh("cpu", (2,)), torch.randn(1, 2, 32, 8)
    short = q[:, :, :31]
    for mode in ("ulysses", "gather", "ring", "auto"):
        for call, told in (
            (lambda: sdpa.scaled_dot_product_attention(q, q, short), "expected key and value of one length, got 32"),
            (lambda: sdpa.scaled_dot_product_attention(q, q, short if rank else q), "or other options"),
            (lambda: sdpa.scaled_dot_product_attention(*([q[0]] * 3 if rank else [q] * 3)), ""),
            (lambda: sdpa.scaled_dot_product_attention(q, q, q, dropout_p=0.1 + rank), f"dropout_p={0.1 + rank}"),
            (lambda: sdpa.scaled_dot_product_attention(q, q, q, scale=1.0 + rank), f"scale={1.0 + rank}"),
            (lambda: sdpa.scaled_dot_product_attention(q, q, q, kernel="vendor_flash"), "vendor_flash"),
        ):
            with context_parallel(mesh, mode):
                refused(call, told)
            dist.barrier()
    refused(lambda: shard(None, mesh, 2), "shard: expected a Tensor, got NoneType")
    refused(lambda: unshard(q, mesh, "2"), "unshard: expected dim as a dimension of (1, 2, 32, 8), got '2'")
    dist.barrier()


def alone(rank: int, mode: str) -> None:
    """A rank that is gone is an error of the others, at once."""
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
    """What a rank sends, forward and backward, is each mode's formula; gathered keys begin at a multiple."""
    world, m, heads, Hkv, Dv = 4, 6, 8, 4, D + 4
    key = B * Hkv * (D + Dv) * 8  # bytes of a key and its value
    g = torch.Generator().manual_seed(11 + rank)
    far, of_block = 2 * modes.KEYS_OF_BLOCKS[8], modes.KEYS_OF_BLOCKS[8]
    window = Mask(causal=True, window=(4, 0))
    lines = {
        "ulysses": (m, None, (B * m * heads * (D + Dv) * 8 + m * key) * 3 // 4),
        "gather": (m, None, 3 * m * key),
        "gather, causal": (m, Mask(causal=True), (3 - rank) * m * key),  # to the ranks behind
        "gather, window": (far, window, of_block * key if rank < 3 else 0),
        "ring": (m, None, 3 * m * key),
        "ring, causal": (m, Mask(causal=True), (3 - rank) * m * key),
        "ring, window": (m, window, 4 * key if rank < 3 else 0),
    }
    for name, (m, mask, forward) in lines.items():
        own = [randn(g, B, heads, m, D), randn(g, B, Hkv, m, D), randn(g, B, Hkv, m, Dv)]
        mode, _, kind = name.partition(", ")
        with context_parallel(init_device_mesh("cpu", (world,)), mode, Parts.even(world * m, world)) as block:
            out = sdpa.scaled_dot_product_attention(*own, mask, enable_gqa=True)
        assert block.sent == forward, (name, block.sent, forward)
        out.sum().backward()
        # Gradients come back: of all that was sent to others by Ulysses, else of the keys that were taken.
        of_window = (of_block if mode == "gather" else 4) if rank else 0
        taken = {"": 3 * m, "causal": rank * m, "window": of_window}[kind] * key
        backward = {"ulysses": forward, "gather": taken, "ring": forward + taken}[mode]
        assert block.sent == forward + backward, (name, block.sent, forward, backward)


def ulysses_edges(rank: int) -> None:
    """What would attend to a rank's own part without a word, and what would let other ranks wait."""
    from torch.nn.attention.bias import causal_lower_right
    from torch.utils.checkpoint import checkpoint

    mesh, g = init_device_mesh("cpu", (2,)), torch.Generator().manual_seed(12)
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
        refused(
            lambda: encoder(x, src_key_padding_mask=padding),
            "layers take no mask but a causal one, said",
        )
        refused(lambda: context_parallel(mesh).__enter__(), "blocks do not nest")
        of_part = causal_lower_right(4, 4)
        refused(lambda: sdpa.scaled_dot_product_attention(*own, of_part), "CausalBias is not supported; take sdpa.Mask")
        refused(lambda: F.scaled_dot_product_attention(*own, of_part), "expected a mask of the whole sequence, 8 x 8")
        few = [t[: 1 + rank] for t in own]
        refused(lambda: sdpa.scaled_dot_product_attention(*few), "ranks have tensors of different batch, heads")
        learning = [t.clone().requires_grad_() for t in own]
        for reentrant in (True, False):
            again = lambda r=reentrant: checkpoint(sdpa.scaled_dot_product_attention, *learning, use_reentrant=r)  # noqa: E731
            refused(again, "open the block inside of the function that is checkpointed")
        empty = [shard(t[:, :, :1], mesh, 2) for t in whole]  # the second rank has none
        one = unshard(sdpa.scaled_dot_product_attention(*empty), mesh, 2)
    assert torch.equal(one, sdpa.scaled_dot_product_attention(*(t[:, :, :1] for t in whole)))
    assert torch.equal(attend(*whole), expected) and torch.equal(whole_graph(*whole), expected)

    def inside(*tensors: Tensor) -> Tensor:
        with context_parallel(mesh, "ulysses"):
            return sdpa.scaled_dot_product_attention(*tensors)

    upstream = shard(torch.randn(2, 4, 8, D, generator=g, dtype=torch.float64), mesh, 2)
    expected = torch.autograd.grad(inside(*learning), learning, upstream)
    for reentrant in (True, False):
        for t in learning:
            t.grad = None
        checkpoint(inside, *learning, use_reentrant=reentrant).backward(upstream)
        assert all(torch.equal(t.grad, gradient) for t, gradient in zip(learning, expected, strict=True))


REFUSED: dict[str, set[str]] = {  # by mode the masks of `whole_masks` that it cannot take
    "gather": {"alibi", "alibi of entries"},
    "ring": {"alibi", "alibi of entries", "prefix"},
    "hybrid": {"alibi", "alibi of entries"},
}


def odd_parts(rank: int) -> None:
    """Parts of other lengths, some empty, in messages by heads; rows that see nothing; and the backward of math."""
    mesh, g = init_device_mesh("cpu", (2,)), torch.Generator().manual_seed(19)
    orders = {
        "odd": Parts.even(11, 2), "empty": Parts.contiguous([7, 0]), "short": Parts.zigzag(3, 2),
        "nothing": Parts.even(0, 2),
    }  # fmt: skip
    masks = {
        "none": Mask(), "window": Mask(causal=True, window=(2, 0)), "unseen": Mask(lengths=torch.tensor([0, 2])),
        "alibi": Mask(causal=True, alibi=torch.rand(4, generator=g, dtype=torch.float64)),
        "prefix": Mask(causal=True, prefix=2),
    }  # fmt: skip
    for message in (1, 32 << 20):
        modes.MESSAGE = message
        for order, parts in orders.items():
            whole = [randn(g, 2, heads, parts.length, D) for heads in (4, 2, 2)]
            for (name, mask), mode in itertools.product(masks.items(), ("ulysses", "gather", "ring")):
                call = partial(sdpa.scaled_dot_product_attention, enable_gqa=True, return_lse=True, kernel="math")
                out, lse = call(*whole, mask)
                own = [shard(t.detach(), mesh, 2, parts).clone().requires_grad_() for t in whole]
                with context_parallel(mesh, mode, parts):
                    if mode == "ring" and name in ("alibi", "prefix"):
                        refused(partial(call, *own, mask), "slopes and a prefix are for mode='gather' and mode='uly")
                        continue
                    found, found_lse = call(*own, mask)
                upstream = [torch.randn(t.shape, generator=g, dtype=t.dtype) for t in (out, lse)]
                close(unshard(found, mesh, 2, parts), out, f"{mode} {order} {name}")
                close(unshard(found_lse, mesh, 2, parts), lse, f"{mode} {order} {name}")
                for results, expected, given in ((found, out, upstream[0]), (found_lse, lse, upstream[1])):
                    if parts.length == 0:
                        continue
                    wanted = torch.autograd.grad(expected, whole, given, retain_graph=True)
                    gradients = torch.autograd.grad(results, own, shard(given, mesh, 2, parts), retain_graph=True)
                    for one, of_whole in zip(gradients, wanted, strict=True):
                        close(unshard(one, mesh, 2, parts), of_whole, f"{mode} {order} {name}")


def misuse(rank: int) -> None:
    """What was silently wrong or let others wait: one sentence on every rank, or the right result."""
    mesh, g = init_device_mesh("cpu", (2,)), torch.Generator().manual_seed(20)
    whole = [randn(g, 1, 4, 8, D).detach() for _ in range(3)]
    own = [shard(t, mesh, 2).clone().requires_grad_() for t in whole]
    attend = sdpa.scaled_dot_product_attention
    for mode in ("ulysses", "gather", "ring"):
        with context_parallel(mesh, mode):
            out = attend(*own)
            for mask in (Mask(lengths=torch.tensor([3 + rank])), Mask(cu_seqlens=torch.tensor([0, 3 + rank, 8]))):
                refused(partial(attend, *own, mask), "masks")
        told = "gradients of gradients (create_graph=True) are not supported"
        refused(lambda out=out: torch.autograd.grad(out.sum(), own, create_graph=True), told)
        block = context_parallel(mesh, mode)

        def opened(q: Tensor, k: Tensor, v: Tensor, block: context_parallel = block) -> Tensor:
            with block:
                return sdpa.scaled_dot_product_attention(q, k, v, is_causal=True)

        compiled = torch.compile(opened, backend="eager")
        close(unshard(compiled(*own), mesh, 2), attend(*whole, is_causal=True), f"compiled {mode}")
        counts = torch.tensor([0, 3, 8], dtype=torch.int32)
        mask = Mask(causal=True, cu_seqlens=counts)
        for end in (3, 5):
            counts.numpy()[1] = end  # counts as no write
            with context_parallel(mesh, mode):
                found = attend(*own, mask)
            close(unshard(found, mesh, 2), attend(*whole, mask), f"{mode} {end}")
    for mode in ("auto", "ulysses", "gather", "ring"):
        with context_parallel(mesh, mode):
            assert attend(*(t[:, :, :0] for t in own), is_causal=True).shape == (1, 4, 0, D)
            refused(partial(attend, *(t[:, :0] for t in own)), "at least one and no more than of queries")
    for mode, told in (("ring", "ring: as asked"), ("auto", r"\w+: \S+ ms expected, .*")):
        with context_parallel(mesh, mode):
            reason = sdpa.explain(*own, is_causal=True).reason
        assert re.match(f"mode: {told}; kernel: ", reason), reason
    prefix = Mask(causal=True, prefix=2)
    with context_parallel(mesh, "ring"):
        for asked in (attend, sdpa.explain):
            refused(partial(asked, *own, prefix), "slopes and a prefix are for mode='gather'")
            refused(partial(asked, *own, dropout_p=0.5), "at multiples of 16, is for mode='ulysses'")
            refused(
                partial(asked, *(distribute_tensor(t, mesh, [Shard(2)]) for t in whole)), "t.to_local() is a rank's"
            )
    for make, told in (
        (lambda: context_parallel("cpu"), "expected mesh as a DeviceMesh, got str"),
        (lambda: context_parallel(mesh, parts=[4, 4]), "expected parts as Parts or None, got list"),
        (
            lambda: shard(whole[0], mesh, 2, Parts.even(9, 2)),
            "expected parts of 8 positions for 2 ranks, got those of 9",
        ),
        (lambda: unshard(own[0], mesh, 2, Parts.even(9, 2)), "expected parts of 8 positions for 2 ranks"),
    ):
        refused(make, told)


def uneven_hybrid(rank: int) -> None:
    """On two dimensions, with ranks that have nothing."""
    mesh, g = init_device_mesh("cpu", (2, 2)), torch.Generator().manual_seed(21)
    for lengths in ([3, 2, 0, 0], [0, 0, 0, 5], [1, 1, 1, 1]):
        parts = Parts.contiguous(lengths)
        whole = [randn(g, 1, 4, parts.length, D) for _ in range(3)]
        expected = sdpa.scaled_dot_product_attention(*whole, is_causal=True)
        own = [shard(t.detach(), mesh, 2, parts).clone().requires_grad_() for t in whole]
        with context_parallel(mesh, "hybrid", parts):
            found = sdpa.scaled_dot_product_attention(*own, is_causal=True)
        close(unshard(found, mesh, 2, parts), expected, f"{lengths}")
        found.sum().backward()
        for one, of_whole in zip(own, torch.autograd.grad(expected.sum(), whole), strict=True):
            close(unshard(one.grad, mesh, 2, parts), of_whole, f"{lengths}")


def on_one_gpu(rank: int) -> None:
    """Each mode and DTensors on NCCL. There is nobody else, so that results are those of a call, merged or not."""
    torch.cuda.set_device(0)
    mesh, rounding = init_device_mesh("cuda", (1,)), torch.finfo(torch.bfloat16).eps
    q, k, v = (
        torch.randn(2, heads, 200, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2)
    )
    upstream = torch.randn_like(q)

    def answer(*tensors: Tensor) -> Any:
        return sdpa.scaled_dot_product_attention(*tensors, Mask(causal=True), enable_gqa=True)

    expected = answer(q, k, v)
    wanted = (expected, *torch.autograd.grad(expected, (q, k, v), upstream))
    for mode in ("auto", "ulysses", "gather", "ring"):
        with context_parallel(mesh, mode):
            out = answer(q, k, v)
        found = (out, *torch.autograd.grad(out, (q, k, v), upstream))
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=2 * rounding, atol=2 * rounding * other.abs().max().item())
    sharded = [distribute_tensor(t.detach(), mesh, [Shard(1)]) for t in (q, k, v)]
    assert torch.equal(answer(*sharded).to_local(), expected)
