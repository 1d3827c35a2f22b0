"""Random packed documents, pages and layouts through the public functions, against each entry alone in float64."""

from __future__ import annotations

import random

import pytest
import torch

import sdpa
from helpers import int32
from sdpa import Mask

NAME = "metal_flash"
CASES = 70  # of a group
# Of a call: (mask, softcap, with sinks). A source is compiled for each.
GROUPS = {
    "plain": (None, None, False),
    "causal": (Mask(causal=True), None, False),
    "window": (Mask(window=(9, 4), align="bottom_right"), None, True),
    "bottom_right": (Mask(causal=True, align="bottom_right"), 2.0, False),
}
HEADS = ((1, 1), (4, 2), (6, 1))


def draw(rng, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rng.getrandbits(40)))


def placed(rng, tensor):
    """The same numbers elsewhere: at an odd element, with rows apart, or with dimensions in another order of memory."""
    kind = rng.choice(["plain", "offset", "apart", "turned"])
    if kind == "offset":
        begin = rng.randint(1, 5)
        return torch.empty(tensor.numel() + begin)[begin:].view(tensor.shape).copy_(tensor)
    if kind == "apart":
        wide = torch.empty(*tensor.shape[:-1], tensor.shape[-1] + rng.randint(1, 9))
        return wide[..., : tensor.shape[-1]].copy_(tensor)
    if kind == "turned":
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)
    return tensor


def options_of(group, rng, H):
    mask, softcap, with_sinks = GROUPS[group]
    sinks = draw(rng, H) if with_sinks else None
    return {"attn_mask": mask, "softcap": softcap, "sinks": sinks, "enable_gqa": True}


def alone(q, k, v, options):
    """One entry of (rows, heads, D), in float64, by the definition."""
    sinks = options["sinks"]
    options = options | {"sinks": None if sinks is None else sinks.double()}
    one = [t.double().transpose(0, 1).unsqueeze(0) for t in (q, k, v)]
    return sdpa.scaled_dot_product_attention(*one, **options, kernel="math")[0].transpose(0, 1)


def near(found, wanted, said):
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=2e-5, msg=lambda m: f"{said}: {m}")


def served_as(feature):
    choice = sdpa.last_choice()
    return choice.kernel.name == NAME and feature in choice.problem.features


@pytest.mark.parametrize("group", GROUPS)
def test_packed_documents(served, group):
    """Documents of 0 to 70 rows, as many queries as keys or not; rows behind the last document belong to none."""
    rng = random.Random(f"packed {group}")
    for index in range(CASES):
        H, Hkv = rng.choice(HEADS)
        same = rng.random() < 0.5
        q_lengths = [rng.choice([0, 1, rng.randint(2, 70)]) for _ in range(rng.randint(1, 5))]
        k_lengths = q_lengths if same else [rng.choice([0, 1, rng.randint(2, 70)]) for _ in q_lengths]
        cu_q, cu_k = (int32(0, *torch.tensor(lengths).cumsum(0).tolist()) for lengths in (q_lengths, k_lengths))
        rows = [int(cu[-1]) + rng.randint(0, 4) for cu in (cu_q, cu_k, cu_k)]
        rows[2] = rows[1]
        q, k, v = (placed(rng, draw(rng, n, heads, 16)) for n, heads in zip(rows, (H, Hkv, Hkv), strict=True))
        tensors = [t.requires_grad_() for t in (q, k, v)]
        options, most = options_of(group, rng, H), (max(q_lengths), max(k_lengths))
        got = sdpa.varlen_attention(*tensors, cu_q, cu_k, *most, **options, kernel=NAME)
        assert 0 in most or served_as("packed")  # where no document has queries, or keys, nothing is left for a kernel
        bounds = [list(zip(cu.tolist(), cu.tolist()[1:], strict=False)) for cu in (cu_q, cu_k)]
        parts = [alone(q[a:b], k[c:d], v[c:d], options) for (a, b), (c, d) in zip(*bounds, strict=True)]
        wanted = torch.cat([*parts, 0 * q[cu_q[-1] :].double()])
        grad_out = draw(rng, *got.shape)
        grads = torch.autograd.grad(got, tensors, grad_out)
        expected = torch.autograd.grad(wanted, tensors, grad_out.double())
        near([got, *grads], [wanted, *(g.double() for g in expected)], f"{group}, case {index}")


@pytest.mark.parametrize("group", ["plain", "window", "bottom_right"])  # queries are the last of their sequence
def test_pages(served, group):
    """Pages of 16 or 32 keys in any order, entries of 1 key up to all of their pages, 1 to 20 queries."""
    rng = random.Random(f"pages {group}")
    for index in range(CASES):
        H, Hkv = rng.choice(HEADS)
        B, M, size, blocks = rng.randint(1, 3), rng.choice([1, 1, rng.randint(2, 20)]), rng.choice([16, 32]), 4
        pages = B * blocks + 2
        keys, values = (placed(rng, draw(rng, pages, size, Hkv, 16)) for _ in range(2))
        table = torch.tensor(rng.sample(range(pages), B * blocks), dtype=torch.int32).view(B, blocks)
        lengths = int32(*(rng.randint(1, size * blocks) for _ in range(B)))
        query, options = placed(rng, draw(rng, B, M, H, 16)), options_of(group, rng, H)
        got = sdpa.paged_attention(query, keys, values, table, lengths, **options, kernel=NAME)
        assert served_as("paged")
        for b, length in enumerate(lengths.tolist()):
            rows = [cache[table[b]].flatten(0, 1)[:length] for cache in (keys, values)]
            near([got[b]], [alone(query[b], *rows, options)], f"{group}, case {index}, entry {b}")


@pytest.mark.parametrize("group", GROUPS)
def test_layouts(group):
    """Dense tensors anywhere in memory, in calls that were recorded and in calls that were not."""
    rng = random.Random(f"layouts {group}")
    for index in range(CASES):
        H, Hkv = rng.choice(HEADS)
        B, M, N = rng.randint(1, 2), rng.choice([5, 33]), rng.choice([33, 64])  # few sizes, so that forms come again
        shapes = ((B, H, M, 16), (B, Hkv, N, 16), (B, Hkv, N, 16))
        tensors = [placed(rng, draw(rng, *shape)).requires_grad_() for shape in shapes]
        options = options_of(group, rng, H)
        got = sdpa.scaled_dot_product_attention(*tensors, **options, kernel=NAME)
        entries = [alone(*(t[b].transpose(0, 1) for t in tensors), options).transpose(0, 1) for b in range(B)]
        wanted, grad_out = torch.stack(entries), placed(rng, draw(rng, *got.shape))
        grads = torch.autograd.grad(got, tensors, grad_out)
        expected = torch.autograd.grad(wanted, tensors, grad_out.double())
        near([got, *grads], [wanted, *(g.double() for g in expected)], f"{group}, case {index}")
