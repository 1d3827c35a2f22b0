"""Sizes around tiles, memory orders, packed sequences and gradients of the log-sum-exp, in the interpreter."""

from __future__ import annotations

import pytest
import torch

from sdpa import Mask
from sdpa.dispatch.catalog import by_name
from sdpa.inputs import Options
from sdpa.problem import Results, Tile
from sdpa.sequences import Documents, build_packed
from sdpa.testing import Case, Draw, make_inputs, problem_of

SIZES = {
    "one_of_all": {"B": 1, "H": 1, "Hkv": 1, "M": 1, "N": 1, "D": 8, "Dv": 8},
    "one_query": {"M": 1, "N": 47, "mask": "causal_bottom_right"},
    "one_key": {"M": 33, "N": 1, "mask": "causal"},
    "whole_tiles": {"M": 32, "N": 48, "mask": "causal"},
    "whole_tiles_square": {"M": 32, "N": 32, "mask": "causal"},
    "whole_tiles_window": {"M": 48, "N": 32, "mask": "window"},
    "whole_tiles_left_only": {"M": 48, "N": 32, "left": 20},
    "one_more_than_tiles": {"M": 33, "N": 49, "mask": "window"},
    "one_less_than_tiles": {"M": 31, "N": 47, "mask": "causal_bottom_right"},
    "less_than_a_tile": {"M": 5, "N": 7, "mask": "lengths"},
    "more_queries_than_keys": {"M": 43, "N": 17, "mask": "causal_bottom_right"},
    "primes": {"B": 3, "H": 3, "Hkv": 1, "M": 29, "N": 41, "D": 23, "Dv": 7, "mask": "window_bottom_right"},
    "head_size_one": {"M": 17, "N": 19, "D": 1, "Dv": 3},
    "odd_head_size": {"M": 17, "N": 35, "D": 33, "Dv": 33, "mask": "prefix"},
    "groups_of_three": {"H": 6, "Hkv": 2, "M": 18, "N": 20, "mask": "alibi"},
}
BASE = {"B": 2, "H": 2, "Hkv": 1, "D": 16, "Dv": 24}


@pytest.mark.parametrize("name", SIZES)
def test_sizes(name, judge, target):
    sizes = {**BASE, **SIZES[name]}
    left = sizes.pop("left", None)  # a window without an end on the right, which MASKS has not
    inputs = make_inputs(Case(**sizes), seed=1)
    judge(inputs if left is None else inputs._replace(left=left), target=target)


@pytest.mark.parametrize(
    "tile", [Tile(64, 64, 4, 1), Tile(16, 64, 4, 1), Tile(64, 16, 4, 1)], ids=lambda t: f"{t[0]}x{t[1]}"
)
def test_tiles_larger_than_the_problem(tile, judge):
    judge(make_inputs(Case(**{**BASE, "M": 37, "N": 53}, mask="window"), seed=1), tile=tile)


LAYOUTS = {
    "bmhd": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "expanded": lambda t: t[:1].expand(t.shape[0], -1, -1, -1),
    "every_other_row": lambda t: t.repeat_interleave(2, dim=2)[:, :, ::2],
    "unaligned": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape),
    "rows_apart": lambda t: torch.nn.functional.pad(t, (0, 3), value=float("nan"))[..., : t.shape[3]],
    "heads_backwards_in_memory": lambda t: t.permute(1, 0, 2, 3).contiguous().permute(1, 0, 2, 3),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, judge):
    inputs = make_inputs(Case(**{**BASE, "M": 21, "N": 35}, mask="causal"), seed=2)
    q, k, v = (LAYOUTS[layout](t) for t in inputs[:3])
    got = judge(inputs._replace(q=q, k=k, v=v))
    if layout == "bmhd":
        assert got.results.out.transpose(1, 2).is_contiguous()
        assert all(g.transpose(1, 2).is_contiguous() or g.shape[1] == 1 for g in got.grads[:3])


@pytest.mark.parametrize("name", ["triton_flash", "triton_efficient", "triton_decode"])
def test_a_stride_along_the_head_is_refused(name):
    kernel, strided = by_name()[name], make_inputs(Case(layout="strided"))
    reasons = [kernel.why_not(problem_of(inputs, "forward")) for inputs in (strided, make_inputs(Case()))]
    refused = [reason for reason in reasons[0] if "last stride" in reason]
    assert refused and not any("last stride" in reason for reason in reasons[1])


def test_gradient_that_arrives_with_strides(run_family):
    """grad_out of any strides, as autograd gives it for sums (stride 0) and for transposed results."""
    inputs = make_inputs(Case(**{**BASE, "M": 21, "N": 35}), seed=3)
    values = torch.randn(2, 2, 21, 24, generator=torch.Generator().manual_seed(1))
    whole = run_family(inputs, Results(values, None)).grads
    mixed = run_family(inputs, Results(values.mT.contiguous().mT, None)).grads
    ones = run_family(inputs, Results(torch.ones_like(values), None)).grads
    expanded = run_family(inputs, Results(torch.ones(1, 1, 1, 1).expand(2, 2, 21, 24), None)).grads
    for a, b in (*zip(whole[:3], mixed[:3], strict=True), *zip(ones[:3], expanded[:3], strict=True)):
        assert torch.equal(a, b)


@pytest.mark.parametrize("mask", ["none", "lengths", "window"])
def test_gradient_at_the_log_sum_exp(mask, judge, target):
    """Of rows that see no key as well, whose own is 0."""
    sinks = mask == "window"
    judge(make_inputs(Case(**{**BASE, "M": 21, "N": 35}, mask=mask, sinks=sinks), seed=3), target=target, lse_grad=True)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


# Documents of 5, 0, 19 and 33 queries and 4, 6, 0 and 45 keys, then rows that belong to none.
CU_Q, T_Q, MAX_Q = int32(0, 5, 5, 24, 57), 60, 33
CU_K, T_K, MAX_K = int32(0, 4, 10, 10, 55), 61, 45
INSIDE_Q, INSIDE_K = 57, 55
DOCUMENTS = {"own": (CU_Q, CU_Q, MAX_Q, MAX_Q), "cross": (CU_Q, CU_K, MAX_Q, MAX_K)}
SLOPES = torch.tensor([[0.1, 0.2], [0.3, 0.1], [0.5, 0.05], [0.2, 0.4]])
PACKED = {
    "full": {},
    "causal": {"is_causal": True},
    "bottom_right": {"attn_mask": Mask(causal=True, align="bottom_right")},
    "window": {"attn_mask": Mask(window=(7, 2))},
    "lengths": {"attn_mask": Mask(lengths=int32(2, 4, 0, 30))},
    "both_lengths": {
        "attn_mask": Mask(lengths=int32(9, 4, 3, 41), query_lengths=int32(4, 0, 7, 20))
        & Mask(causal=True, align="bottom_right")
    },
    "prefix": {"attn_mask": Mask(causal=True, prefix=int32(3, 0, 9, 20))},
    "alibi": {"attn_mask": Mask(alibi=SLOPES, causal=True)},
    "softcap_scale": {"softcap": 1.5, "scale": -0.4},
    "dropout": {"dropout_p": 0.4, "is_causal": True},
}  # fmt: skip


def packed_inputs(name, documents="cross", outside=True, sinks=None, seed=4):
    draw = Draw(Case(), seed)
    cu_q, cu_k, max_q, max_k = DOCUMENTS[documents]
    T_k = T_Q if documents == "own" else T_K
    rows = (T_Q if outside else INSIDE_Q), (T_k if outside else INSIDE_K)
    q, k, v = draw.normal(rows[0], 2, 16), draw.normal(rows[1], 1, 16), draw.normal(rows[1], 1, 24)
    options = Options(**{"enable_gqa": True, "sinks": sinks, **PACKED[name]})
    return build_packed(q, k, v, Documents(cu_q, cu_k, max_q, max_k), options)


@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences(name, judge, target):
    got = judge(packed_inputs(name), target=target)
    assert not got.results.out[:, :, INSIDE_Q:].any() and (got.results.lse[:, :, INSIDE_Q:] == -torch.inf).all()
    assert not got.grads.q[:, :, INSIDE_Q:].any() and not got.grads.k[:, :, INSIDE_K:].any()
    assert not got.grads.v[:, :, INSIDE_K:].any()


@pytest.mark.parametrize("name", ["full", "causal"])
def test_packed_self_attention(name, judge, target):
    judge(packed_inputs(name, "own"), target=target)


def test_packed_sequences_with_sinks_and_lse(judge):
    judge(packed_inputs("causal", outside=False, sinks=torch.tensor([0.3, -1.0])))
    judge(packed_inputs("window"), lse_grad=True)


@pytest.mark.parametrize("ends", [(0, 5, 9), (0, 9, 9), (0, 0)], ids=str)
def test_many_rows_behind_the_last_document(ends, judge, target):
    """More than its programs would cover at one block each; also where it, or all of them, have no rows."""
    draw = Draw(Case(), 5)
    q, k, v = draw.normal(301, 2, 16), draw.normal(9, 1, 16), draw.normal(9, 1, 24)
    cu = int32(*ends)
    got = judge(build_packed(q, k, v, Documents(cu, cu, 9, 9), Options(enable_gqa=True)), target=target)
    assert not got.results.out[:, :, ends[-1] :].any()
    assert (got.results.lse[:, :, ends[-1] :] == -torch.inf).all()


@pytest.mark.parametrize("spoilt", [float("nan"), 1e30])
def test_packed_documents_do_not_see_each_other(spoilt, run_family, target):
    """Another document's rows, and rows of none, may hold anything; here all but those of the last document."""
    inputs = packed_inputs("causal", "own")
    clean, first, last = run_family(inputs, target=target), int(CU_Q[-2]), int(CU_Q[-1])
    outside = torch.ones(T_Q, dtype=torch.bool)
    outside[first:last] = False
    dirty = inputs._replace(**{n: getattr(inputs, n).masked_fill(outside[:, None], spoilt) for n in ("q", "k", "v")})
    got = run_family(dirty, target=target)
    for a, b in zip((*clean.results, *clean.grads[:3]), (*got.results, *got.grads[:3]), strict=True):
        assert torch.equal(a[:, :, first:last], b[:, :, first:last])
