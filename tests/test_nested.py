"""Nested tensors with holes and of torch's strided layout, entry by entry against dense calls."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import sdpa
from helpers import CLOSE, draw

attention = sdpa.scaled_dot_product_attention
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
H, D, DV = 3, 8, 6
QUERIES, KEYS = (3, 5, 0, 2), (4, 1, 3, 6)
STARTS = (0, 2, 1, 3)


def entries(lengths, heads=H, D=D, seed=0):
    return [draw(heads, L, D, seed=seed + n) for n, L in enumerate(lengths)]


def strided(tensors):
    return torch.nested.nested_tensor(tensors, layout=torch.strided, requires_grad=True)


def wanted(q, k, v, **options):
    """Results and gradients of each entry by itself."""
    leaves = [[t.clone().requires_grad_() for t in side] for side in (q, k, v)]
    outs = [attention(*(t[None] for t in one), **options)[0] for one in zip(*leaves, strict=True)]
    sum(out.square().sum() for out in outs).backward()
    return outs, [[torch.zeros_like(t) if t.grad is None else t.grad for t in side] for side in leaves]


def close(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


def holed(lengths, D, seed):
    """Rows of a dense tensor, of which each entry takes some; and those rows (H, L, D)."""
    rows = draw(4, 10, H, D, seed=seed).requires_grad_()
    nested = torch.nested.narrow(rows, 1, torch.tensor(STARTS), torch.tensor(lengths), layout=torch.jagged)
    alone = [rows[b, s : s + L].transpose(0, 1) for b, (s, L) in enumerate(zip(STARTS, lengths, strict=True))]
    return rows, nested.transpose(1, 2), [t.detach() for t in alone]


@pytest.mark.parametrize("is_causal", [False, True])
def test_holes(is_causal):
    """Rows that belong to no entry are no keys of the entry before them."""
    lengths = (3, 5, 2, 4)
    rows, nested, alone = holed(lengths, D, 0)
    outs, grads = wanted(alone, alone, alone, is_causal=is_causal)
    got = attention(nested, nested, nested, is_causal=is_causal)
    assert got.is_nested and got.layout == torch.jagged
    close(got.unbind(), outs)
    (gradient,) = torch.autograd.grad(got.values().square().sum(), rows)
    of_entries = [sum(sides) for sides in zip(*grads, strict=True)]
    for b, (s, L) in enumerate(zip(STARTS, lengths, strict=True)):
        torch.testing.assert_close(gradient[b, s : s + L].transpose(0, 1), of_entries[b], **CLOSE)
        assert not gradient[b, :s].any() and not gradient[b, s + L :].any()


def test_holes_of_keys_alone():
    keys, values = ((3, 5, 2, 4), D, 1), ((3, 5, 2, 4), DV, 2)
    (_, k, alone_k), (_, v, alone_v) = holed(*keys), holed(*values)
    q = entries(QUERIES)
    rows = torch.nested.as_nested_tensor([t.transpose(0, 1) for t in q], layout=torch.jagged).transpose(1, 2)
    close(attention(rows, k, v).unbind(), wanted(q, alone_k, alone_v)[0])


@pytest.mark.parametrize("is_causal", [False, True])
def test_strided(is_causal):
    given = [entries(QUERIES), entries(KEYS, seed=9), entries(KEYS, D=DV, seed=20)]
    if is_causal:
        given = [entries(QUERIES, D=size, seed=seed) for size, seed in ((D, 0), (D, 9), (DV, 20))]
    outs, grads = wanted(*given, is_causal=is_causal)
    leaves = [strided(side) for side in given]
    got = attention(*leaves, is_causal=is_causal)
    assert got.is_nested and got.layout == torch.strided
    close(got.unbind(), outs)
    found = torch.autograd.grad(sum(t.square().sum() for t in got.unbind()), leaves)
    for side, expected in zip(found, grads, strict=True):
        close(side.unbind(), expected)


def test_strided_as_torch_answers():
    q, k, v = (strided(entries((3, 5, 2), seed=seed)) for seed in (0, 9, 20))
    close(attention(q, k, v).unbind(), F.scaled_dot_product_attention(q, k, v).unbind())


def test_strided_of_other_forms():
    """Heads of other numbers, three dimensions, fewer heads of keys, a scale, autocast."""
    ragged = [draw(h, L, D) for h, L in ((2, 3), (4, 5))]
    close(attention(*[strided(ragged)] * 3, scale=0.3).unbind(), wanted(ragged, ragged, ragged, scale=0.3)[0])
    flat = [draw(L, D) for L in (3, 5)]
    close(attention(*[strided(flat)] * 3).unbind(), wanted(flat, flat, flat)[0])
    many, few = entries(QUERIES, heads=4), entries(KEYS, heads=2)
    got = attention(strided(many), strided(few), strided(few), enable_gqa=True)
    close(got.unbind(), wanted(many, few, few, enable_gqa=True)[0])
    with torch.autocast("cpu", torch.bfloat16):
        single = [t.float() for t in entries(QUERIES)]
        assert attention(*[strided(single)] * 3).dtype == torch.bfloat16


def test_strided_is_refused_in_sentences():
    q, k = strided(entries(QUERIES)), strided(entries(KEYS)[:3])
    with pytest.raises(RuntimeError, match="not supported when an explicit attn_mask is set"):
        attention(q, q, q, torch.ones(5, 5, dtype=torch.bool))
    with pytest.raises(RuntimeError, match="same batch size, but got 4, 3 and 3 nested tensors"):
        attention(q, k, k)
    with pytest.raises(RuntimeError, match="return_lse=True is not supported with nested tensors"):
        attention(q, q, q, return_lse=True)
    with pytest.raises(RuntimeError, match=r"4 dimensions .* but got 3, 4 and 4"):
        attention(strided([draw(3, D)]), strided([draw(H, 3, D)]), strided([draw(H, 3, D)]))
    with pytest.raises(RuntimeError, match=r"jagged nested tensors together, but query is torch\.strided"):
        attention(q, draw(4, H, 3, D), draw(4, H, 3, D))
