"""install(patterns=True): forms of written-out attention that are replaced."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from written_out import (
    INF,
    OURS,
    SCALE,
    TORCHS,
    B,
    D,
    Graphs,
    H,
    M,
    N,
    before,
    draw,
    filled,
    hidden,
    inside,
    kept_where,
    qkv,
    same,
    scored,
    times,
)

from sdpa.patterns.rewriting import CONTIGUOUS
from sdpa.philox import kept_factor

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def over(q, k, v):
    return torch.softmax(q @ k.mT / math.sqrt(D), -1).matmul(v)


def both(q, k, v):
    return ((q * 0.5) @ (k / 2.0).transpose(2, 3)).softmax(-1) @ v


def no_scale(q, k, v):
    return nn.Softmax(dim=-1)(q @ k.swapaxes(-1, -2)) @ v


def constant_scale(q, k, v):
    scores = torch.matmul(q, k.transpose(-1, -2))
    scores = scores / torch.full([], k.size(-1) ** 0.5, dtype=scores.dtype, device=scores.device)
    return torch.matmul(F.softmax(scores, dim=-1), v)


def in_place(q, k, v):
    scores = q @ k.transpose(-2, -1)
    scores *= SCALE
    scores.mul_(0.5)
    return scores.softmax(-1) @ v


def hugging_face(q, k, v):
    weights = torch.matmul(q, k.transpose(2, 3)) * SCALE
    weights = F.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
    weights = F.dropout(weights, p=0.1, training=False)
    return torch.matmul(weights, v).transpose(1, 2).contiguous()


def upcast(q, k, v):
    """T5's, and GPT-J's, whose scores are computed in float32."""
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2))
    return torch.matmul(F.softmax(scores * SCALE, dim=-1).type_as(v), v)


def einsum(q, k, v):
    return torch.einsum("bhij,bhjd->bihd", torch.einsum("bhid,bhjd->bhij", q, k).mul(SCALE).softmax(-1), v)


def einsum_of_rows(q, k, v):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    weights = torch.einsum("blhe,bshe->bhls", q, k).div(4).softmax(dim=-1)
    return torch.einsum("bhls,bshd->blhd", weights, v).flatten(2)


def rows_inside(q, k, v):
    """The result turned back: no copy of it is needed where the queries lie in memory as it then does."""
    return times(q, k, v).transpose(1, 2).reshape(B, M, H * D)


def strides_asked(q, k, v):
    return times(q, k, v).view(B * H, M, D)


def cloned(q, k, v):
    return times(q, k, v).clone().view(B * H, M, D)


def split(q, k, v):
    return times(q, k, v).reshape(B, H, M, 2, D // 2).flatten().view(B * H, -1)


def turned_and_split(q, k, v):
    return times(q, k, v).transpose(1, 2).reshape(B, M, H, 2, D // 2).transpose(1, 2)


def batched(q, k, v):
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    return torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(dim=-1), v)


def softcap(q, k, v):
    scores = torch.matmul(q, k.transpose(2, 3)) * SCALE
    return F.softmax(torch.tanh(scores / 5.0) * 5.0, dim=-1) @ v


def weights_thrown_away(q, k, v):
    weights = (q @ k.transpose(-2, -1) * SCALE).softmax(-1)
    weights.mean(dim=1)
    return weights @ v


def twice(q, k, v):
    return times(times(q, k, v), k, v)


PLAIN = [times, over, before, both, no_scale, constant_scale, in_place, hugging_face, upcast, einsum, einsum_of_rows]


PLAIN += [batched, softcap, weights_thrown_away]


@pytest.mark.parametrize("function", PLAIN, ids=lambda f: f.__name__)
def test_forms(function):
    same(function, qkv())


@pytest.mark.parametrize("lay", [list, inside], ids=["outside", "inside"])
@pytest.mark.parametrize("function", [times, rows_inside, strides_asked, cloned, split], ids=lambda f: f.__name__)
def test_forms_whose_memory_is_asked_for(function, lay):
    same(function, lay(qkv()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("function", [times, before, hugging_face, upcast], ids=lambda f: f.__name__)
def test_half_precision(function, dtype):
    same(function, qkv(dtype))


def test_two_in_one_graph():
    same(twice, qkv(), expected=2)


def test_scales_and_softcap_reach_the_operator():
    def operator_of(function):
        nodes = [n for n in same(function, qkv()).graphs[0].nodes if n.target is OURS]
        return nodes[0].args

    assert operator_of(before)[3] == SCALE and operator_of(both)[3] == 0.25
    assert operator_of(in_place)[3] == SCALE / 2
    assert 5.0 in operator_of(softcap)


def test_a_result_that_was_turned_and_split():
    """Its dimensions lie in another order than before, in which every view is possible."""
    q, k, v = inside(qkv(learn=False))
    graphs = Graphs()
    found = torch.compile(turned_and_split, backend=graphs)(q, k, v)
    torch.testing.assert_close(found, turned_and_split(q, k, v))
    assert graphs.replaced == 1 and found.transpose(1, 2).is_contiguous()


def test_the_layout_of_the_queries_saves_a_copy():
    methods = same(rows_inside, inside(qkv())).targets
    after = methods[methods.index(OURS) :]
    assert CONTIGUOUS not in after and "contiguous" not in after
    methods = same(strides_asked, inside(qkv())).targets
    assert CONTIGUOUS in methods[methods.index(OURS) :]


def test_causal_buffer_of_a_model():
    """nanoGPT's: a buffer of ones below the diagonal, cut to the length of the call."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("bias", torch.tril(torch.ones(32, 32)).view(1, 1, 32, 32))
            self.c_attn, self.dropout = nn.Linear(64, 192), nn.Dropout(0.5)

        def forward(self, x):
            L = x.size(1)
            q, k, v = (t.view(B, L, 4, 16).transpose(1, 2) for t in self.c_attn(x).split(64, dim=2))
            scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            weights = F.softmax(scores.masked_fill(self.bias[:, :, :L, :L] == 0, float("-inf")), dim=-1)
            return (self.dropout(weights) @ v).transpose(1, 2).contiguous().view(B, L, 64)

    model = Model().eval()
    graphs, x = Graphs(), draw(B, 7, 64)
    torch.testing.assert_close(torch.compile(model, backend=graphs)(x), model(x))
    assert graphs.replaced == 1 and torch.randint not in graphs.targets
    model.train()
    graphs = Graphs()
    torch.compile(model, backend=graphs)(x)
    assert graphs.replaced == 1 and graphs.targets.count(torch.randint) == 1


def added(q, k, v, mask):
    return (scored(q, k) + mask).softmax(-1) @ v


def added_first(q, k, v, mask):
    return (mask + scored(q, k)).softmax(-1) @ v


def added_in_place(q, k, v, mask):
    scores = scored(q, k)
    scores += mask
    return scores.softmax(-1) @ v


def filled_in_place(q, k, v, mask):
    scores = scored(q, k)
    scores.masked_fill_(mask.expand_as(scores), -INF)
    return scores.softmax(-1) @ v


def filled_low(q, k, v, mask):
    scores = scored(q, k)
    return scores.masked_fill(mask, torch.finfo(scores.dtype).min).softmax(-1) @ v


def filled_billion(q, k, v, mask):
    return scored(q, k).masked_fill(mask, -1e9).softmax(-1) @ v


def hidden_where(q, k, v, mask):
    scores = scored(q, k)
    low = torch.full((), torch.finfo(scores.dtype).min, dtype=scores.dtype)
    return torch.where(mask, low, scores).softmax(-1) @ v


def where_method(q, k, v, mask):
    scores = scored(q, k)
    return scores.where(~mask, torch.full_like(scores, -INF)).softmax(-1) @ v


def scaled_after(q, k, v, mask):
    return ((q @ k.transpose(-2, -1)).masked_fill(mask, -INF) / 4.0).softmax(-1) @ v


SHAPES = [(M, N), (1, 1, 1, N), (B, 1, 1, N), (B, 1, M, N), (1, H, M, N), (B, H, M, N)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("learn", [False, True], ids=["given", "learned"])
def test_added(shape, learn):
    same(added, [*qkv(), draw(*shape, seed=4).requires_grad_(learn)])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_hidden(shape):
    same(filled, [*qkv(), hidden(shape)])


@pytest.mark.parametrize("function", [added_first, added_in_place], ids=lambda f: f.__name__)
def test_ways_to_add(function):
    same(function, [*qkv(), draw(M, N, seed=4)])


WAYS = [filled_in_place, filled_low, filled_billion, kept_where, hidden_where, where_method, scaled_after]


@pytest.mark.parametrize("function", WAYS, ids=lambda f: f.__name__)
def test_ways_to_hide(function):
    same(function, [*qkv(), hidden((B, 1, 1, N))])


def test_an_expanded_mask_is_not_laid_out():
    graph = same(filled_in_place, [*qkv(), hidden((B, 1, 1, N))]).graphs[0]
    (call,) = [node for node in graph.nodes if node.target is OURS]
    allowed = next(a for a in reversed(call.args) if a is not None)
    assert allowed.target is torch.logical_not and allowed.args[0].op == "placeholder"


@pytest.mark.parametrize("mask", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_masks_of_another_dtype(dtype, mask):
    """As Hugging Face's, of the lowest number where a key is hidden."""

    def attend(q, k, v, mask):
        return F.softmax(scored(q, k) + mask, dim=-1, dtype=torch.float32).to(q.dtype) @ v

    bias = torch.zeros(B, 1, M, N, dtype=mask).masked_fill(hidden((B, 1, M, N)), torch.finfo(mask).min)
    same(attend, [*qkv(dtype), bias])


def test_several_masks():
    def attend(q, k, v, bias, mask, other):
        scores = scored(q, k).masked_fill(other, torch.finfo(torch.float32).min) + bias
        return scores.masked_fill(mask, -INF).softmax(-1) @ v

    same(attend, [*qkv(), draw(H, 1, N, seed=4).requires_grad_(), hidden((M, N)), hidden((B, 1, 1, N))])


def test_rows_in_which_all_keys_are_hidden():
    """A finite number leaves the mean of the values, infinity leaves 0 where the written form has NaN."""
    q, k, v = qkv(learn=False)
    mask = hidden((M, N))
    mask[3] = True
    for function in (filled_low, filled_billion):
        found = torch.compile(function, backend=Graphs())(q, k, v, mask)
        torch.testing.assert_close(found, function(q, k, v, mask))
        torch.testing.assert_close(found[:, :, 3], v.mean(2))
    graphs = Graphs()
    found, written = torch.compile(filled, backend=graphs)(q, k, v, mask), filled(q, k, v, mask)
    assert graphs.replaced == 1 and written[:, :, 3].isnan().all() and (found[:, :, 3] == 0).all()
    torch.testing.assert_close(found.index_fill(2, torch.tensor(3), 0.0), written.index_fill(2, torch.tensor(3), 0.0))


def test_baddbmm():
    def attend(q, k, v, bias):
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        return torch.baddbmm(bias, q, k.transpose(1, 2), beta=1.0, alpha=SCALE).softmax(-1) @ v

    same(attend, [*qkv(), draw(B * H, 1, N, seed=4)])


def test_heads_folded_into_the_batch():
    """BART's: products of three dimensions, a mask of four."""

    def attend(q, k, v, mask):
        q, k, v = (t.reshape(B * H, -1, D) for t in (q, k, v))
        scores = torch.bmm(q * SCALE, k.transpose(1, 2)).view(B, H, M, N) + mask
        weights = F.softmax(scores.view(B * H, M, N), dim=-1)
        return torch.bmm(weights, v).view(B, H, M, D)

    same(attend, [*qkv(), draw(B, 1, M, N, seed=4)])


def repeated(x):
    """Hugging Face's repeat_kv."""
    batch, heads, length, size = x.shape
    return x[:, :, None, :, :].expand(batch, heads, 2, length, size).reshape(batch, heads * 2, length, size)


@pytest.mark.parametrize("repeat", [repeated, lambda x: x.repeat_interleave(2, dim=1)], ids=["view", "interleave"])
def test_repeated_heads_are_not_repeated(repeat):
    def attend(q, k, v):
        return (q @ repeat(k).transpose(2, 3) * SCALE).softmax(-1) @ repeat(v)

    graph = same(attend, qkv(heads=H // 2)).graphs[0]
    (call,) = [node for node in graph.nodes if node.target is OURS]
    k, v = call.args[1], call.args[2]
    assert v.op == "placeholder" and "permute" not in str(k.target)


@pytest.mark.parametrize("dropout", [F.dropout, lambda x, p: torch.dropout(x, p, True)], ids=["functional", "torch"])
def test_dropout(dropout):
    """Other random numbers, the same share: the mean over many calls is what it is without."""

    def attend(q, k, v):
        return dropout((q @ k.transpose(-2, -1) * SCALE).softmax(-1), 0.25) @ v

    q, k, v = qkv(learn=False, keys=64)
    graphs = Graphs()
    compiled = torch.compile(attend, backend=graphs)
    with torch.no_grad():
        mean = torch.stack([compiled(q, k, v) for _ in range(600)]).mean(0)
    assert graphs.replaced == 1
    expected = times(q, k, v)
    spread = math.sqrt(0.25 / 0.75 / 600) * ((q @ k.mT * SCALE).softmax(-1).square() @ v.square()).sqrt()
    assert ((mean - expected).abs() <= 6 * spread).all()
    torch.manual_seed(1)
    once = compiled(q, k, v)
    torch.manual_seed(1)
    assert torch.equal(once, compiled(q, k, v)) and not torch.equal(once, compiled(q, k, v))


def test_dropout_that_is_seen_through_the_values():
    """Keys as values of one-hot rows give the weights away: 0, or what softmax says times the kept ones' factor."""

    def attend(q, k, v):
        return F.dropout((q @ k.transpose(-2, -1) * SCALE).softmax(-1), 0.4) @ v

    q, k, _ = qkv(learn=False)
    v = torch.eye(N).expand(B, H, N, N)
    found, weights = torch.compile(attend, backend=Graphs())(q, k, v), times(q, k, v)
    kept = found != 0
    torch.testing.assert_close(found[kept], weights[kept] * kept_factor(0.4))
    assert 0.5 < kept.float().mean() < 0.7


def test_autocast():
    q, k, v = qkv()
    graphs = Graphs()
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = times(q, k, v), torch.compile(times, backend=graphs)(q, k, v)
    assert graphs.replaced == 1 and found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), times(q, k, v), rtol=2e-2, atol=2e-2)


def test_sizes_that_change():
    graphs = Graphs()

    def attend(q, k, v, mask):
        return (q @ k.transpose(-2, -1) / math.sqrt(q.size(-1)) + mask).softmax(-1) @ v

    compiled = torch.compile(attend, backend=graphs, dynamic=True)
    for rows in (M, M + 3, 2 * M):
        args = [*qkv(rows=rows, keys=rows + 1), draw(rows, rows + 1, seed=4)]
        torch.testing.assert_close(compiled(*args), attend(*args))
    assert graphs.replaced == len(graphs.graphs) == 1


def test_torchs_own_function_where_it_is_called_by_a_reference():
    for options in ({}, {"is_causal": True}, {"scale": 0.3}, {"dropout_p": 0.0}):
        same(lambda q, k, v, options=options: TORCHS(q, k, v, **options), qkv())
    same(TORCHS_MASKED, [*qkv(), hidden((B, 1, 1, N)).logical_not()])
    same(TORCHS_MASKED, [*qkv(), draw(M, N, seed=4)])
    same(lambda q, k, v: TORCHS(q, k, v, enable_gqa=True), qkv(heads=2))


def TORCHS_MASKED(q, k, v, mask):
    return TORCHS(q, k, v, mask)
