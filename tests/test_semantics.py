"""The public function against torch's own: shapes, scales, masks, NaN, heads, autocast, layouts and reproducibility."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.nn.attention.bias as torch_bias
import torch.nn.functional as F

import helpers
import sdpa
from helpers import qkv
from sdpa import Mask
from sdpa.dispatch.catalog import ALL_DTYPES
from sdpa.inputs import Options, build_inputs
from sdpa.reference import attention as reference
from sdpa.testing import compare

attention = sdpa.scaled_dot_product_attention
draw = partial(helpers.draw, dtype=torch.float32)
DTYPES = sorted(ALL_DTYPES, key=str)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


SHAPES = {
    "2d": ((5, 8), (7, 8), (7, 8)),
    "3d": ((3, 5, 8), (3, 7, 8), (3, 7, 8)),
    "4d": ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
    "5d": ((2, 2, 3, 5, 8), (2, 2, 3, 7, 8), (2, 2, 3, 7, 8)),
    "6d": ((2, 1, 2, 3, 5, 8), (2, 1, 2, 3, 7, 8), (2, 1, 2, 3, 7, 8)),
    "batch_of_query_is_1": ((1, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
    "batch_of_key_is_1": ((2, 3, 5, 8), (1, 3, 7, 8), (2, 3, 7, 8)),
    "batch_of_both_is_1": ((2, 3, 5, 8), (1, 3, 7, 8), (1, 3, 7, 8)),
    "5d_batches_broadcast": ((4, 1, 3, 5, 8), (1, 2, 3, 7, 8), (4, 2, 3, 7, 8)),
    "keys_of_lower_rank": ((2, 3, 5, 8), (3, 7, 8), (3, 7, 8)),
    "query_of_lower_rank": ((3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
    "2d_keys": ((2, 3, 5, 8), (7, 8), (7, 8)),
    "one_head_of_keys": ((2, 3, 5, 8), (2, 1, 7, 8), (2, 1, 7, 8)),
    "one_head_of_query": ((2, 1, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
    "one_head_of_key_only": ((2, 3, 5, 8), (2, 1, 7, 8), (2, 3, 7, 8)),
    "wider_values": ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 13)),
    "narrower_values": ((2, 3, 5, 16), (2, 3, 7, 16), (2, 3, 7, 1)),
    "single": ((1, 1, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1)),
}


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_ranks_and_broadcasting(shapes, matches_torch):
    out = matches_torch(*(draw(*shape, seed=i) for i, shape in enumerate(shapes)))
    assert out.is_contiguous()


EMPTY = {
    "no_keys": ((2, 3, 5, 8), (2, 3, 0, 8), (2, 3, 0, 8)),
    "no_queries": ((2, 3, 0, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
    "no_head_size": ((2, 3, 5, 0), (2, 3, 7, 0), (2, 3, 7, 0)),
    "no_head_size_of_value": ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 0)),
    "no_batch": ((0, 3, 5, 8), (0, 3, 7, 8), (0, 3, 7, 8)),
    "no_heads": ((2, 0, 5, 8), (2, 0, 7, 8), (2, 0, 7, 8)),
}


@pytest.mark.parametrize("shapes", EMPTY.values(), ids=EMPTY)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_zero_sizes_give_zeros_with_zero_gradients(shapes, causal):
    leaves = [draw(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
    out = attention(*leaves, is_causal=causal)
    if leaves[0].shape[1]:  # torch 2.10 divides by the number of heads, which ends the process
        wanted = F.scaled_dot_product_attention(*leaves, is_causal=causal)
        assert torch.equal(out, wanted)
    assert out.shape == (*leaves[0].shape[:3], leaves[2].shape[3]) and not out.any()
    for grad, leaf in zip(torch.autograd.grad(out.sum(), leaves), leaves, strict=True):
        assert grad.shape == leaf.shape and not grad.any()


def test_no_keys_has_an_lse_of_minus_infinity():
    q, k, v = qkv(N=0)
    out, lse = attention(q, k, v, return_lse=True)
    assert not out.any() and (lse == -math.inf).all() and lse.shape == q.shape[:3]


@pytest.mark.parametrize("kernel", [None, "math"], ids=str)
def test_without_a_head_size_the_softmax_is_uniform(kernel, matches_torch):
    q, k, v = qkv(D=0, Dv=4)
    assert torch.allclose(matches_torch(q, k, v, kernel=kernel), v.mean(2, keepdim=True))
    lse = attention(*qkv(D=0), return_lse=True)[1]
    assert torch.allclose(lse, torch.full_like(lse, math.log(11)))


SCALES = {"float": 0.3, "int": 2, "zero": 0, "zero_float": 0.0, "negative": -0.7, "large": 12.5}


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_scale(scale, causal, matches_torch):
    matches_torch(*qkv(), scale=scale, is_causal=causal)


@pytest.mark.parametrize(
    "scale", [torch.tensor(0.3), torch.tensor(2), torch.tensor(-0.5, dtype=torch.float64)], ids=str
)
def test_scale_may_be_a_tensor_of_no_dimensions(scale):
    assert torch.equal(attention(*qkv(), scale=scale), attention(*qkv(), scale=scale.item()))


@pytest.mark.parametrize("M,N", [(9, 9), (5, 11), (11, 5), (1, 7), (7, 1)], ids=str)
def test_causal_is_aligned_to_the_top_left(M, N, matches_torch):
    q, k, v = qkv(M=M, N=N)
    triangle = torch.ones(M, N, dtype=torch.bool).tril()
    matches_torch(q, k, v, triangle, ours=Mask(causal=True))
    matches_torch(q, k, v, is_causal=True)
    assert torch.equal(attention(q, k, v, is_causal=True), attention(q, k, v, Mask(causal=True)))


@pytest.mark.parametrize("M,N", [(9, 9), (5, 11), (11, 5), (1, 7), (7, 1)], ids=str)
def test_mask_aligned_to_the_bottom_right(M, N, matches_torch):
    triangle = torch.ones(M, N, dtype=torch.bool).tril(N - M)
    matches_torch(*qkv(M=M, N=N), triangle, ours=Mask(causal=True, align="bottom_right"))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_bool_as_dropout(compiled):
    """`training and p` is False in inference; torch takes it for 0."""
    tensors = qkv()
    call = torch.compile(attention, backend="eager", fullgraph=True) if compiled else attention
    for _ in range(3):
        assert torch.equal(call(*tensors, dropout_p=False), attention(*tensors))
        assert not call(*tensors, dropout_p=True).any()


@pytest.mark.filterwarnings("ignore:Lower right causal bias")
@pytest.mark.parametrize("M,N", [(9, 9), (5, 11), (11, 5)], ids=str)
@pytest.mark.parametrize("variant", ["causal_upper_left", "causal_lower_right"])
def test_causal_bias_of_torch(variant, M, N):
    bias = getattr(torch_bias, variant)(M, N)
    align = "top_left" if variant == "causal_upper_left" else "bottom_right"
    wanted = attention(*qkv(M=M, N=N), Mask(causal=True, align=align))
    for mask in (bias, Mask() & bias, bias & Mask()):
        assert torch.equal(attention(*qkv(M=M, N=N), mask), wanted)
    with pytest.raises(TypeError, match=r"Mask.bias must be numbers, got CausalBias; combine it with a Mask by &"):
        Mask(bias=bias)


MASKS = {
    "bool_MN": lambda: draw(9, 11) > 0,
    "bool_1N": lambda: draw(1, 11) > 0,
    "bool_M1": lambda: draw(9, 1) > 0,
    "bool_H": lambda: draw(3, 9, 11) > 0,
    "bool_padding": lambda: draw(2, 1, 1, 11) > 0,
    "bool_full": lambda: draw(2, 3, 9, 11) > 0,
    "bool_expanded": lambda: (draw(2, 1, 1, 11) > 0).expand(2, 3, 9, 11),
    "bool_transposed": lambda: (draw(2, 3, 11, 9) > 0).mT,
    "bool_strided": lambda: (draw(2, 3, 9, 22) > 0)[..., ::2],
    "bool_offset": lambda: (draw(9, 13) > 0)[:, 1:12],
    "bool_nothing": lambda: torch.zeros(9, 11, dtype=torch.bool),
    "float_MN": lambda: draw(9, 11),
    "float_padding": lambda: draw(2, 1, 1, 11),
    "float_full": lambda: draw(2, 3, 9, 11),
    "float_strided": lambda: draw(2, 3, 9, 22)[..., 1::2],
    "float_minus_infinity": lambda: draw(2, 1, 9, 11).masked_fill(draw(2, 1, 9, 11, seed=5) > 0, -math.inf),
    "float_dead_rows": lambda: draw(9, 11).masked_fill(draw(9, 1, seed=5) > 0, -math.inf),
    "float_lowest": lambda: draw(9, 11).masked_fill(draw(9, 1, seed=5) > 0, torch.finfo(torch.float32).min),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_dense_masks(mask, matches_torch):
    matches_torch(*qkv(), mask())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("mask_dtype", ["own", "float32"])
def test_float_mask_in_low_precision(dtype, mask_dtype, matches_torch):
    mask = draw(2, 1, 9, 11, dtype=dtype)
    matches_torch(*qkv(dtype=dtype), mask if mask_dtype == "own" else mask.float())


def test_5d_mask_broadcasts_over_batch_dimensions(matches_torch):
    q, k, v = draw(2, 4, 3, 5, 8), draw(2, 4, 3, 7, 8, seed=1), draw(2, 4, 3, 7, 8, seed=2)
    for shape in ((2, 1, 1, 5, 7), (4, 1, 1, 7), (2, 4, 3, 5, 7), (5, 7), (1, 1, 1, 1, 7)):
        matches_torch(q, k, v, draw(*shape) > 0)
        matches_torch(q, k, v, draw(*shape))


DEAD = {
    "bool": lambda dtype: torch.tensor([True, False]).repeat(5)[:9, None].expand(9, 11),
    "minus_infinity": lambda dtype: torch.zeros(9, 11, dtype=dtype).masked_fill(
        ~torch.tensor([True, False]).repeat(5)[:9, None], -math.inf
    ),
    "lengths": lambda dtype: Mask(lengths=torch.tensor([0, 0]), query_lengths=torch.tensor([9, 9])),
    "query_lengths": lambda dtype: Mask(query_lengths=torch.tensor([4, 0])),
    "window_bottom_right": lambda dtype: Mask(window=(3, 0), align="bottom_right", lengths=torch.tensor([3, 5])),
    "segments": lambda dtype: Mask(
        segments=(torch.tensor([7, 1, 7, 1, 7, 1, 7, 1, 7]), torch.ones(11, dtype=torch.int64))
    ),
}


@dtypes
@pytest.mark.parametrize("kind", DEAD)
def test_rows_that_see_no_key(kind, dtype):
    given = DEAD[kind](dtype)
    dense = (given if isinstance(given, Mask) else Mask.from_tensor(given)).dense(2, 3, 9, 11)
    seen = dense if dense.dtype == torch.bool else dense > -math.inf
    dead = ~seen.any(-1)
    assert dead.any()
    leaves = [t.requires_grad_() for t in qkv(dtype=dtype)]
    out, lse = attention(*leaves, given, return_lse=True)
    assert not out[dead].any() and (lse[dead] == -math.inf).all() and lse[~dead].isfinite().all()
    grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert all(g.isfinite().all() for g in grads) and not grads[0][dead].any()
    unseen = ~seen.any(2)
    assert not grads[1][unseen].any() and not grads[2][unseen].any()


STRUCTURED = {
    "lengths": lambda: Mask(lengths=torch.tensor([6, 2])),
    "lengths_causal": lambda: Mask(lengths=torch.tensor([6, 2]), causal=True),
    "causal": lambda: Mask(causal=True),
    "window": lambda: Mask(window=(2, 1)),
    "segments": lambda: Mask(segments=(torch.zeros(9, dtype=torch.int64), torch.tensor([0] * 6 + [1] * 5))),
}


def spoilt(mask, k, v, bad):
    """Keys and values with `bad` where no row sees them, or in the last key; and the rows that see none of it."""
    seen = mask.dense(2, 3, 9, 11)
    hidden = ~seen.any(2)
    if not hidden.any():
        hidden[..., -1] = True
    rows = ~(seen & hidden.unsqueeze(2)).any(-1)
    return k.masked_fill(hidden.unsqueeze(-1), bad), v.masked_fill(hidden.unsqueeze(-1), bad), rows


@dtypes
@pytest.mark.parametrize("kind", STRUCTURED)
def test_what_a_structured_mask_hides_changes_no_bit(kind, dtype):
    mask, (q, k, v) = STRUCTURED[kind](), qkv(dtype=dtype)
    wanted = attention(q, k, v, mask, return_lse=True)
    k, v, rows = spoilt(mask, k, v, 1e4)
    for got, want in zip(attention(q, k, v, mask, return_lse=True), wanted, strict=True):
        assert rows.any() and torch.equal(got[rows], want[rows])


@dtypes
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("kind", STRUCTURED)
def test_what_a_structured_mask_hides_may_be_infinite(kind, bad, dtype):
    """Within the budget of clean tensors: a kernel may compute in a wider type where it finds such values."""
    mask, (q, k, v) = STRUCTURED[kind](), qkv(dtype=dtype)
    wanted, plain = (reference(build_inputs(q, k, v, Options(mask)), wide) for wide in (torch.float64, dtype))
    k, v, rows = spoilt(mask, k, v, bad)
    got = attention(q, k, v, mask, return_lse=True)
    for name, ours, *others in zip(("out", "lse"), got, wanted, plain, strict=True):
        found = compare(name, ours[rows], *(t[rows] for t in others), 20)
        assert found.ok, found


SPOIL = {"query": 0, "key": 1, "value": 2}


@dtypes
@pytest.mark.parametrize("where", SPOIL)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_nan_in_a_visible_entry_reaches_exactly_the_rows_that_see_it(where, causal, dtype):
    tensors = list(qkv(dtype=dtype))
    tensors[SPOIL[where]][1, 2, 4, 3] = math.nan
    out = attention(*tensors, is_causal=causal)
    wanted = torch.zeros_like(out, dtype=torch.bool)
    if where == "query":
        wanted[1, 2, 4] = True
    else:
        wanted[1, 2, 4 if causal else 0 :, slice(3, 4) if where == "value" else slice(None)] = True
    assert torch.equal(out.isnan(), wanted)


@pytest.mark.parametrize("N", [1, 5, 15, 16])
@pytest.mark.parametrize("kernel", ["cpu_flash", "vendor_cpu_flash", "math"])
def test_nan_in_all_that_a_row_sees_of_few_keys(kernel, N):
    """torch's CPU flash looks for the maximum of fewer than 16 scores without NaN, and gives 0 where it finds none."""
    q, k, v = torch.randn(2, 4, 6, 8), torch.randn(2, 2, N, 8), torch.randn(2, 2, N, 8)
    q[0, 1, 2] = math.nan
    k[1, 1, 0] = math.nan  # of the heads 2 and 3, and under a causal mask all that their first row sees
    for is_causal in (False, True):
        out = sdpa.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True, kernel=kernel)
        wanted = torch.zeros(2, 4, 6, dtype=torch.bool)
        wanted[0, 1, 2] = wanted[1, 2:] = True
        assert torch.equal(out.isnan().all(-1), wanted) and torch.equal(out.isnan().any(-1), wanted)
    bias = torch.zeros(6, N)
    bias[1] = math.nan
    bias[2, 0] = -math.inf
    out = sdpa.scaled_dot_product_attention(
        torch.randn(2, 4, 6, 8), k[:1].expand_as(k), v, bias, enable_gqa=True, kernel=kernel
    )
    assert torch.equal(out.isnan().all(-1), torch.arange(6).eq(1).expand(2, 4, 6)) and not out[:, :, 2].isnan().any()
    zeros = torch.zeros(1, 1, 1, 8)
    out = sdpa.scaled_dot_product_attention(zeros, zeros, zeros, kernel=kernel)
    assert not out.any(), "a log-sum-exp of 0 may be right"


@dtypes
def test_nan_in_a_float_mask_reaches_its_row(dtype):
    bias = torch.zeros(9, 11, dtype=dtype)
    bias[5, 7] = math.nan
    out = attention(*qkv(dtype=dtype), bias)
    assert out[:, :, 5].isnan().all() and out[:, :, [0, 1, 2, 3, 4, 6, 7, 8]].isfinite().all()


@pytest.mark.parametrize("Hkv", [1, 2, 3, 6], ids=lambda h: f"Hkv{h}")
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@dtypes
def test_grouped_query_attention(Hkv, causal, dtype, matches_torch):
    matches_torch(*qkv(H=6, Hkv=Hkv, dtype=dtype), enable_gqa=True, is_causal=causal)


def test_grouped_query_attention_in_3_dimensions_and_with_a_mask(matches_torch):
    q, k, v = (t[0] for t in qkv(H=6, Hkv=2))
    matches_torch(q, k, v, enable_gqa=True)
    matches_torch(*qkv(H=6, Hkv=2), draw(2, 6, 9, 11) > 0, enable_gqa=True)


def test_key_and_value_heads_may_differ_under_gqa(matches_torch):
    q, k, v = draw(2, 6, 9, 8), draw(2, 2, 11, 8), draw(2, 3, 11, 8)
    matches_torch(q, k, v, enable_gqa=True)


def test_return_lse_is_the_logarithm_of_the_sum():
    q, k, v = qkv(dtype=torch.float64)
    out, lse = attention(q, k, v, is_causal=True, return_lse=True)
    scores = (q @ k.mT / math.sqrt(8)).masked_fill(~torch.ones(9, 11, dtype=torch.bool).tril(), -math.inf)
    assert torch.allclose(lse, scores.logsumexp(-1), rtol=1e-13, atol=1e-13)
    assert torch.equal(out, attention(q, k, v, is_causal=True, return_lse=True)[0])


@dtypes
def test_lse_dtype_and_shape(dtype):
    for tensors, shape in ((qkv(dtype=dtype), (2, 3, 9)), ([t[0] for t in qkv(dtype=dtype)], (3, 9))):
        out, lse = attention(*tensors, return_lse=True)
        assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert lse.shape == shape and out.dtype == dtype
    assert attention(*(t[0, 0] for t in qkv(dtype=dtype)), return_lse=True)[1].shape == (9,)


@pytest.mark.parametrize("kernel", ["math", "cpu_flash", None])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("M, N", [(4, 0), (0, 4), (0, 0)])
def test_segments_of_nothing(M, N, ids, kernel):
    """No keys: zeros, and gradients of zeros. No queries: nothing."""
    q, k, v = (draw(2, 3, rows, 8).requires_grad_() for rows in (M, N, N))
    pair = tuple(torch.zeros(2, rows, dtype=ids) for rows in (M, N))
    out = attention(q, k, v, Mask(segments=pair), kernel=kernel)
    assert out.shape == (2, 3, M, 8) and bool((out == 0).all())
    found = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(
        grad.shape == leaf.shape and bool((grad == 0).all()) for grad, leaf in zip(found, (q, k, v), strict=True)
    )


def test_alibi_of_no_heads():
    q = draw(2, 0, 4, 8)
    assert attention(q, q, q, Mask(causal=True, alibi=torch.zeros(0))).shape == (2, 0, 4, 8)


@pytest.mark.parametrize("mask", ["allowed", "bias", "lengths"])
def test_a_row_without_a_key_is_zero_beside_nan(mask):
    """In `math`, which defines what is right: NaN in its query, or in a value that nobody sees, reaches nobody."""
    q, k, v = (draw(1, 2, rows, 8) for rows in (5, 4, 4))
    q[:, :, 0] = torch.nan
    allowed = torch.ones(1, 1, 5, 4, dtype=torch.bool)
    allowed[:, :, 0] = False
    masks = {
        "allowed": allowed,
        "bias": torch.zeros(1, 1, 5, 4).masked_fill(~allowed, -torch.inf),
        "lengths": Mask(lengths=torch.tensor([0])),
    }
    rows = slice(0, 1) if mask != "lengths" else slice(None)
    if mask == "lengths":
        v[:, :, 1] = torch.nan
    if mask == "bias":
        q[:, :, 0] = 1.0  # NaN and -inf are NaN
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    out = attention(q, k, v, masks[mask], kernel="math")
    assert bool((out[:, :, rows] == 0).all()) and not bool(out.isnan().any())
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert bool((grads[0][:, :, rows] == 0).all()) and not any(bool(grad.isnan().any()) for grad in grads)


def test_a_value_of_nan_leaves_a_row_without_a_key_zero():
    q, k, v = (draw(1, 2, rows, 8) for rows in (5, 4, 4))
    v[:, :, 2] = torch.nan
    allowed = torch.ones(1, 1, 5, 4, dtype=torch.bool)
    allowed[:, :, 3] = False
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    out = attention(q, k, v, allowed, kernel="math")
    assert bool((out[:, :, 3] == 0).all()) and bool(out[:, :, 0].isnan().all())
    assert bool((torch.autograd.grad(out.sum(), q)[0][:, :, 3] == 0).all())
