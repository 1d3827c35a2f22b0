"""What a mask hides: behind lengths nothing is seen, and blocks outside of masks are not loaded; in the interpreter."""

from __future__ import annotations

import math

import pytest
import torch

from sdpa import Mask, dense
from sdpa.inputs import Options, build_inputs
from sdpa.kernels.triton.block_ranges import Ids, find_block_ranges
from sdpa.kernels.triton.launch import run
from sdpa.problem import Results
from sdpa.testing import Case, Draw, make_inputs, problem_of

BLOCK = 16  # the tile of these tests, both ways
SIZES = {"B": 1, "H": 1, "Hkv": 1, "M": 40, "N": 67, "D": 16, "Dv": 16}


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def inputs_of(mask, M=40, N=67, B=1):
    draw = Draw(Case(**{**SIZES, "B": B}), 0)
    q, k, v = draw.normal(B, 1, M, 16), draw.normal(B, 1, N, 16), draw.normal(B, 1, N, 16)
    return build_inputs(q, k, v, Options(mask))


def ids_of(*lengths):
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).unsqueeze(0)


MASKS = {
    "causal": Mask(causal=True),
    "causal_bottom_right": Mask(causal=True, align="bottom_right"),
    "window": Mask(window=(5, 3)),
    "window_bottom_right": Mask(window=(9, 0), align="bottom_right"),
    "prefix": Mask(causal=True, prefix=19),
    "lengths": Mask(lengths=int32(37), query_lengths=int32(21)),
    "lengths_window": Mask(lengths=int32(50), window=(6, 2), align="bottom_right"),
    "documents": Mask(segments=(ids_of(3, 14, 16, 7), ids_of(18, 2, 30, 17))),
    "documents_causal": Mask(segments=(ids_of(3, 14, 16, 7), ids_of(3, 14, 16, 34)), causal=True),
    "documents_without_partner": Mask(segments=(ids_of(0, 10, 30), ids_of(37, 0, 20, 10))),
    "padding": Mask(allowed=(torch.arange(67).view(1, 1, 1, -1) >= 18) & (torch.arange(67).view(1, 1, 1, -1) < 41)),
    "padding_causal": Mask(allowed=torch.arange(67).view(1, 1, 1, -1) >= 21) & Mask(causal=True),
}


def hull(seen):
    """Positions of whole blocks from the first to the last that any row of `seen` [rows, positions] sees."""
    places = seen.any(0).nonzero().flatten()
    inside = torch.zeros(seen.shape[1], dtype=torch.bool)
    if len(places):
        inside[int(places[0]) // BLOCK * BLOCK : (int(places[-1]) // BLOCK + 1) * BLOCK] = True
    return inside


def blocks(length):
    return [slice(start, min(start + BLOCK, length)) for start in range(0, length, BLOCK)]


@pytest.mark.parametrize("name", MASKS)
def test_key_blocks_outside_of_the_mask_are_not_loaded(name, run_family, target):
    """NaN in every key and value outside the blocks that a block of queries may meet: its rows are as before."""
    inputs = inputs_of(MASKS[name])
    seen = dense.visible(inputs).expand(1, 1, 40, 67)[0, 0]
    clean, hidden_once = run_family(inputs, target=target), False
    for rows in blocks(40):
        hidden = ~hull(seen[rows])
        hidden_once |= bool(hidden.any())
        spoilt = inputs._replace(k=spoil(inputs.k, hidden), v=spoil(inputs.v, hidden))
        got = run_family(spoilt, target=target)
        for a, b in zip(clean.results, got.results, strict=True):
            assert torch.equal(a[:, :, rows], b[:, :, rows]), rows
        grads = run_family(spoilt, target=target, results=clean.results).grads
        assert torch.equal(grads.q[:, :, rows], clean.grads.q[:, :, rows]), rows
    assert hidden_once


@pytest.mark.parametrize("name", MASKS)
def test_query_blocks_outside_of_the_mask_are_not_loaded(name, run_family):
    """The same from the other side: dK and dV of a block of keys, with NaN in all queries that it cannot meet."""
    inputs = inputs_of(MASKS[name])
    seen = dense.visible(inputs).expand(1, 1, 40, 67)[0, 0]
    clean, hidden_once = run_family(inputs), False
    grad_out = torch.randn(1, 1, 40, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64).float()
    for keys in blocks(67):
        hidden = ~hull(seen[:, keys].T)
        hidden_once |= bool(hidden.any())
        spoilt = inputs._replace(q=spoil(inputs.q, hidden))
        got = run_family(spoilt, Results(spoil(grad_out, hidden), None), results=clean.results).grads
        for a, b in ((clean.grads.k, got.k), (clean.grads.v, got.v)):
            assert torch.equal(a[:, :, keys], b[:, :, keys]), keys
    assert hidden_once or name == "padding"  # which every query meets


def spoil(values, hidden):
    """NaN in the rows of (1, 1, rows, size) that `hidden` names."""
    return values.masked_fill(hidden[:, None], math.nan)


@pytest.mark.parametrize("spoilt", [math.nan, math.inf, 1e30], ids=str)
@pytest.mark.parametrize("mask", [{}, {"causal": True, "align": "bottom_right"}], ids=["full", "causal"])
def test_what_lies_behind_lengths_is_not_seen(mask, spoilt, run_family, target):
    """Neither in results nor in gradients; gradients of hidden rows are 0, whatever arrives at them."""
    k_lengths, q_lengths = int32(0, 21, 67), int32(40, 17, 0)
    inputs = inputs_of(Mask(lengths=k_lengths, query_lengths=q_lengths, **mask), B=3)
    beyond_k = (torch.arange(67) >= k_lengths[:, None]).view(3, 1, 67, 1)
    beyond_q = (torch.arange(40) >= q_lengths[:, None]).view(3, 1, 40, 1)
    clean = run_family(inputs, target=target)
    keys = {name: getattr(inputs, name).masked_fill(beyond_k, spoilt) for name in "kv"}
    got = run_family(inputs._replace(q=inputs.q.masked_fill(beyond_q, spoilt), **keys), target=target)
    for a, b in zip((*clean.results, *clean.grads[:3]), (*got.results, *got.grads[:3]), strict=True):
        assert torch.equal(a, b)
    assert not got.grads.q.masked_select(beyond_q).any()
    assert not got.grads.k.masked_select(beyond_k).any() and not got.grads.v.masked_select(beyond_k).any()


NOTHING = {
    "no_keys": Mask(lengths=int32(0, 67)),
    "no_queries": Mask(query_lengths=int32(0, 40)),
    "diagonal_above_all": Mask(causal=True, align="bottom_right", lengths=int32(5, 67)),
    "other_documents": Mask(segments=(ids_of(40).expand(2, -1), ids_of(1, 66) + int32(1, 0)[:, None])),
    "allowed_nowhere": Mask(allowed=torch.tensor([False, True]).view(2, 1, 1, 1)),
    "padding_everywhere": Mask(allowed=torch.tensor([False, True]).view(2, 1, 1, 1).expand(2, 1, 1, 67).contiguous()),
    "bias_of_minus_infinity": Mask(bias=torch.tensor([-math.inf, 0.0]).view(2, 1, 1, 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", NOTHING)
def test_rows_that_see_nothing(name, judge, target):
    """0, -inf and gradients of 0 in the first entry, or some of its rows; the reference says which."""
    got = judge(inputs_of(NOTHING[name], B=2), target=target)
    dead = got.results.lse == -torch.inf
    assert dead.any() and not dead.all()
    assert not got.results.out[dead].any() and not got.grads.q[dead].any()
    if dead[0].all():
        assert not got.grads.k[0].any() and not got.grads.v[0].any()


def expected_span(own, other):
    """(first, one past the last, whether all between match) of the positions whose id lies in the range of `own`."""
    match = (other >= own.min()) & (other <= own.max())
    places = match.nonzero().flatten()
    if not len(places):
        return None
    first, last = int(places[0]), int(places[-1]) + 1
    return first, last, int(own.min() == own.max() and len(places) == last - first)


@pytest.mark.parametrize("length", [1, 40, 1024, 1100, 2048], ids=lambda n: f"N{n}")
@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "any"])
def test_spans_of_segments(ordered, length):
    """Against a search in Python: blocks of one id and of several, ids without partner, several steps of search."""
    generator = torch.Generator().manual_seed(length)
    own = torch.randint(-3, 9, (2, 50), generator=generator, dtype=torch.int32)
    other = torch.randint(-1, 7, (2, length), generator=generator, dtype=torch.int32)
    if ordered:
        own, other = own.sort(1).values, other.sort(1).values
    spans, launch = find_block_ranges(Ids(own, 50, 0, 50), Ids(other, length, 0, length), (2, 1), BLOCK, own.device)
    run([launch], problem_of(make_inputs(Case()), "forward"))
    assert spans.pointer.shape == (2, 1, 4, 4) and (spans.batch, spans.head, spans.block) == (16, 0, 4)
    for b in range(2):
        for i, rows in enumerate(blocks(50)):
            got, wanted = spans.pointer[b, 0, i, :3].tolist(), expected_span(own[b, rows], other[b])
            assert tuple(got) == wanted if wanted else got[0] == got[1], (b, i)


def test_spans_of_a_mask_of_keys():
    """Every query block shares one span, and one is whole where no key between its ends is hidden."""
    allowed = torch.zeros(2, 3, 67, dtype=torch.uint8)
    allowed[0, :, 5:40] = 1
    allowed[1, 0, ::7], allowed[1, 1, 66] = 1, 1
    queries, keys = Ids(None, 0, 0, 40), Ids(allowed, allowed.stride(0), allowed.stride(1), 67)
    spans, launch = find_block_ranges(queries, keys, (2, 3), BLOCK, allowed.device)
    run([launch], problem_of(make_inputs(Case()), "forward"))
    assert spans.block == 0 and spans.pointer.shape == (2, 3, 1, 4)
    found = spans.pointer[:, :, 0, :3].tolist()
    assert found[0] == [[5, 40, 1]] * 3 and found[1][:2] == [[0, 64, 0], [66, 67, 1]]
    assert found[1][2][0] == found[1][2][1]


@pytest.mark.parametrize("mask", ["causal", "bias", "segments"])
def test_the_same_bits_twice(mask, run_family):
    """Whatever memory held before: once poisoned, once not."""
    inputs = make_inputs(Case(B=1, H=2, Hkv=1, M=21, N=35, D=24, Dv=24, mask=mask))
    first = run_family(inputs, bias_grad=mask == "bias")
    torch.use_deterministic_algorithms(False)
    second = run_family(inputs, bias_grad=mask == "bias")
    for a, b in zip((*first.results, *first.grads), (*second.results, *second.grads), strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
