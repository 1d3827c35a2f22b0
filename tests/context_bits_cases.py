"""What ranks do in the tests of bits: context parallelism rounds and drops as one process does."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import torch
from context_cases import close, mesh_of
from distributed_cases import B, D, randn, refused
from torch.distributed.device_mesh import init_device_mesh

import sdpa
from sdpa import Mask
from sdpa.distributed import Parts, context_parallel, modes, shard, unshard


def exact_rows(rank: int) -> None:
    """Gathered keys: rows are bit by bit those of one process, over several blocks of keys."""
    mesh, g = init_device_mesh("cpu", (2,)), torch.Generator().manual_seed(14)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        long = 1920 if dtype.itemsize == 2 else 512
        for parts in (
            Parts.even(128, 2),
            Parts.contiguous([250, 137]),
            Parts.zigzag(416, 2),
            Parts.contiguous([long, 393]),
            Parts.documents([long, 270, 123], 2, chunks=3),
        ):
            length = sum(parts.lengths)
            whole = [torch.randn(2, 2, length, 32, generator=g, dtype=dtype) for _ in range(3)]
            lengths, seen = torch.tensor([100, length]), torch.rand(length, length, generator=g) < 0.5
            ends = torch.tensor([0, 50, length - 261, length - 122, length])
            ids = torch.bucketize(torch.arange(length), ends[1:], right=True)
            for mask in (
                *(None, Mask(lengths=lengths), seen, Mask(causal=True), Mask(causal=True, lengths=lengths)),
                *(Mask(causal=True, window=(left, 0)) for left in (1, 20, 130, 400)),
                *(Mask(window=(75, 30)), Mask(window=(None, 7)), Mask(window=(7, None))),
                *(Mask(segments=ids), Mask(causal=True, cu_seqlens=ends), Mask(window=(40, 90), segments=ids)),
            ):
                expected = sdpa.scaled_dot_product_attention(*whole, mask)
                with context_parallel(mesh, "gather", parts):
                    found = sdpa.scaled_dot_product_attention(*(shard(t, mesh, 2, parts) for t in whole), mask)
                assert torch.equal(unshard(found, mesh, 2, parts), expected), (dtype, length, mask)


def exact_calls(rank: int) -> None:
    """The same for what a call has beside its mask, and where there are more keys than queries."""
    mesh, g = init_device_mesh("cpu", (2,)), torch.Generator().manual_seed(19)
    for dtype, (M, N) in itertools.product((torch.float32, torch.bfloat16), ((416, 416), (130, 1900))):
        parts = tuple(Parts.contiguous([size - size // 3, size // 3]) for size in (M, N))
        whole = [torch.randn(2, heads, rows, 32, generator=g, dtype=dtype) for heads, rows in ((6, M), (2, N), (2, N))]
        bias, sinks = (torch.randn(*shape, generator=g, dtype=dtype) for shape in ((1, 6, M, N), (6,)))
        own = [shard(t, mesh, 2, of) for t, of in zip(whole, (parts[0], parts[1], parts[1]), strict=True)]
        for mask, options in itertools.product(
            (
                None,
                Mask(causal=True, align="bottom_right"),
                Mask(window=(90, 0), align="bottom_right"),
                Mask(bias=bias),
            ),
            (dict[str, Any](), {"sinks": sinks}, {"softcap": 5.0, "scale": 0.3}),
        ):
            attend = partial(
                sdpa.scaled_dot_product_attention, attn_mask=mask, enable_gqa=True, return_lse=True, **options
            )
            with context_parallel(mesh, "gather"):
                found = attend(*own)
            for one, expected in zip(found, attend(*whole), strict=True):
                assert torch.equal(unshard(one, mesh, 2, parts[0]), expected), (dtype, M, N, mask, list(options))


def dropping(rank: int, world: int) -> None:
    """Dropout has the numbers of one process with the first rank's generator, whatever the others draw."""
    length, g = 64 * world, torch.Generator().manual_seed(15)
    whole = [randn(g, B, heads, length, D) for heads in (8, 4, 4)]
    upstream = torch.randn(B, 8, length, D, generator=g, dtype=torch.float64)
    cu = torch.tensor([0, 21, length - 30, length])
    masks = (
        *(None, Mask(causal=True), Mask(causal=True, cu_seqlens=cu), Mask(lengths=torch.tensor([length, 40, 5, 17]))),
        *(Mask(causal=True, window=(21, 0)), Mask(window=(13, 35), cu_seqlens=cu), Mask(window=(None, 7))),
    )
    for mask, p, (mode, parts) in itertools.product(
        masks,
        (0.3, 1.0),
        (
            ("ulysses", None),
            ("ulysses", Parts.contiguous([length - 3, 3, *[0] * (world - 2)])),
            ("gather", None),
            ("gather", Parts.zigzag(length, world)),
            ("ring", Parts.zigzag(length, world)),
            ("ring", None),
            *([("hybrid", Parts.even(length, world))] if world > 2 else []),
        ),
    ):
        modes.MESSAGE = 1 if parts is None else 32 << 20
        mesh = mesh_of(mode, world)
        attend = partial(
            sdpa.scaled_dot_product_attention, attn_mask=mask, dropout_p=p, enable_gqa=True, return_lse=True
        )
        own = [shard(t.detach(), mesh, 2, parts).clone().requires_grad_() for t in whole]
        torch.manual_seed(16)
        expected = []
        for _ in range(2):
            out, lse = attend(*whole)
            expected += [out, lse, *torch.autograd.grad(out, whole, upstream)]
        after = torch.get_rng_state()
        torch.manual_seed(16 + rank)
        found = []
        for _ in range(2):
            with context_parallel(mesh, mode, parts):
                out, lse = attend(*own)
            found += [out, lse, *torch.autograd.grad(out, own, shard(upstream, mesh, 2, parts))]
        assert rank or torch.equal(torch.get_rng_state(), after), "a call draws one seed"
        for one, wanted in zip(found, expected, strict=True):
            close(unshard(one.detach(), mesh, 2, parts), wanted, f"{mode} {mask} {p}")


def dropping_blocks(rank: int) -> None:
    """Dropout by keys: a document that begins inside of a period, and what is refused on every rank."""
    length, g = 128, torch.Generator().manual_seed(15)
    whole = [randn(g, B, heads, length, D).detach() for heads in (8, 4, 4)]
    attend, mesh = partial(sdpa.scaled_dot_product_attention, dropout_p=0.3, enable_gqa=True), mesh_of("ring", 2)
    documents = torch.tensor([0, 16, 32]), torch.tensor([0, 53, 64])  # keys of a document begin inside of a period
    mask = Mask(causal=True, align="bottom_right", cu_seqlens=documents)
    q, *keys = whole[0][:, :, :32], *(t[:, :, :64] for t in whole[1:])
    for mode in ("gather", "ring"):
        torch.manual_seed(17)
        wanted = attend(q, *keys, mask)
        torch.manual_seed(17)
        with context_parallel(mesh, mode):
            found = attend(*(shard(t, mesh, 2) for t in (q, *keys)), mask)
        close(unshard(found, mesh, 2), wanted, mode)
    parts = Parts.contiguous([length - 3, 3])
    with context_parallel(mesh, "ring", parts):
        own = [shard(t, mesh, 2, parts) for t in whole]
        told = "dropout, where parts begin elsewhere than at multiples of 16, is for mode='ulysses'"
        refused(lambda: attend(*own), told)
    with context_parallel(mesh, "gather"):
        even, lengths = [shard(t, mesh, 2) for t in whole], torch.full((B,), 100)
        mask = Mask(causal=True, window=(21, 0), lengths=lengths)
        refused(lambda: attend(*even, mask), "dropout with lengths and a window is for mode='ulysses'")
