"""install(patterns=True): attention that models write out, in the graphs that Inductor compiles."""

from __future__ import annotations

import logging
import math
import pickle
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.utils.checkpoint import checkpoint

import sdpa
from sdpa.patterns import hook

B, H, M, N, D = 2, 4, 9, 11, 16
SCALE = D**-0.5
INF = float("inf")
TORCHS = F.scaled_dot_product_attention
OURS = torch.ops.sdpa.attention_forward.default


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    torch.manual_seed(0)
    before = config.pre_grad_custom_pass
    yield
    assert config.pre_grad_custom_pass is before
    assert F.scaled_dot_product_attention is TORCHS


def draw(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def qkv(dtype=torch.float32, learn=True, heads=H, rows=M, keys=N):
    shapes = (B, H, rows, D), (B, heads, keys, D), (B, heads, keys, D)
    return [draw(*shape, dtype=dtype, seed=seed).requires_grad_(learn) for seed, shape in enumerate(shapes)]


class Graphs:
    """A backend of torch.compile that runs the pass on each graph and then the graph itself, operation by operation."""

    def __init__(self):
        self.replaced, self.graphs = 0, []

    def __call__(self, module, inputs):
        self.replaced += hook.replace(module.graph)
        self.graphs.append(module.graph)
        module.recompile()
        return module

    @property
    def targets(self):
        return [node.target for graph in self.graphs for node in graph.nodes]


def results(function, args, learned):
    """(the output, the gradients of what is learned) of a loss that weighs every number of the output by another."""
    out = function(*args)
    upstream = draw(*out.shape, dtype=out.dtype, seed=9)
    return out, *torch.autograd.grad(out, learned, upstream)


def wide(args):
    return [t.detach().double().requires_grad_(t.requires_grad) if torch.is_tensor(t) and t.is_floating_point() else t
            for t in args]  # fmt: skip


def same(function, args, expected=1):
    """The function with our attention is no further from the truth than as it is written; returns the graphs."""
    graphs = Graphs()
    learned = [t for t in args if torch.is_tensor(t) and t.requires_grad]
    written = results(function, args, learned)
    found = results(torch.compile(function, backend=graphs, fullgraph=True), args, learned)
    assert graphs.replaced == expected
    assert graphs.targets.count(OURS) == expected
    exact = wide(args)
    truth = results(function, exact, [t for t in exact if torch.is_tensor(t) and t.requires_grad])
    assert found[0].stride() == written[0].stride()
    for ours, theirs, true in zip(found, written, truth, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        rounding = torch.finfo(ours.dtype).eps * true.abs().max()
        assert (ours - true).abs().max() <= 2 * (theirs - true).abs().max() + 2 * rounding
    return graphs


def left(function, args):
    """The graph stays as it was, node by node, but for what nobody reads."""
    graphs = Graphs()
    expected = function(*args)
    torch.testing.assert_close(torch.compile(function, backend=graphs)(*args), expected)
    assert graphs.replaced == 0 and OURS not in graphs.targets
    return graphs


# -- forms that are replaced ------------------------------------------------------------------------------------------


def times(q, k, v):
    return (torch.matmul(q, k.transpose(-2, -1)) * SCALE).softmax(dim=-1) @ v


def over(q, k, v):
    return torch.softmax(q @ k.mT / math.sqrt(D), -1).matmul(v)


def before(q, k, v):
    return F.softmax(torch.matmul(q * SCALE, k.permute(0, 1, 3, 2)), dim=3).matmul(v)


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


def inside(tensors):
    """The same numbers as (B, M, H, D) in memory."""
    return [t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_(t.requires_grad) for t in tensors]


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
    assert "contiguous" not in after
    methods = same(strides_asked, inside(qkv())).targets
    assert "contiguous" in methods[methods.index(OURS) :]


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


# -- masks ------------------------------------------------------------------------------------------------------------


def scored(q, k):
    return q @ k.transpose(-2, -1) * SCALE


def added(q, k, v, mask):
    return (scored(q, k) + mask).softmax(-1) @ v


def added_first(q, k, v, mask):
    return (mask + scored(q, k)).softmax(-1) @ v


def added_in_place(q, k, v, mask):
    scores = scored(q, k)
    scores += mask
    return scores.softmax(-1) @ v


def filled(q, k, v, mask):
    return scored(q, k).masked_fill(mask, -INF).softmax(-1) @ v


def filled_in_place(q, k, v, mask):
    scores = scored(q, k)
    scores.masked_fill_(mask.expand_as(scores), -INF)
    return scores.softmax(-1) @ v


def filled_low(q, k, v, mask):
    scores = scored(q, k)
    return scores.masked_fill(mask, torch.finfo(scores.dtype).min).softmax(-1) @ v


def filled_billion(q, k, v, mask):
    return scored(q, k).masked_fill(mask, -1e9).softmax(-1) @ v


def kept_where(q, k, v, mask):
    return torch.where(~mask, scored(q, k), -INF).softmax(-1) @ v


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


def hidden(shape):
    """Some keys of every row are hidden, never all."""
    mask = draw(*shape, seed=5) > 0.3
    mask[..., 0] = False
    return mask


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


# -- heads that share keys, dropout, autocast, sizes that change ------------------------------------------------------


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
    """Keys as values of one-hot rows give the weights away: 0, or what softmax says over 1 - p."""

    def attend(q, k, v):
        return F.dropout((q @ k.transpose(-2, -1) * SCALE).softmax(-1), 0.4) @ v

    q, k, _ = qkv(learn=False)
    v = torch.eye(N).expand(B, H, N, N)
    found, weights = torch.compile(attend, backend=Graphs())(q, k, v), times(q, k, v)
    kept = found != 0
    torch.testing.assert_close(found[kept], weights[kept] / 0.6)
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


# -- what is left alone -----------------------------------------------------------------------------------------------


def weights_too(q, k, v):
    weights = (q @ k.transpose(-2, -1) * SCALE).softmax(-1)
    return weights @ v, weights


def scores_too(q, k, v):
    scores = q @ k.transpose(-2, -1) * SCALE
    return scores.softmax(-1) @ v, scores.amax()


def other_dimension(q, k, v):
    return (q @ k.transpose(-2, -1) * SCALE).softmax(-2) @ v


def learned_scale(q, k, v):
    return (q @ k.transpose(-2, -1) * q.mean()).softmax(-1) @ v


def no_product(q, k, v):
    return k.softmax(-1) @ v.transpose(-2, -1)


def weights_changed(q, k, v):
    return ((q @ k.transpose(-2, -1) * SCALE).softmax(-1) * 0.5) @ v


def weights_on_the_right(q, k, v):
    return v.transpose(-2, -1) @ (q @ k.transpose(-2, -1) * SCALE).softmax(-1).transpose(-2, -1)


def mask_broadens(q, k, v):
    return (q @ k.transpose(-2, -1) + q.new_ones(3, 1, 1, 1, 1)).softmax(-1) @ v


def filled_with_a_weight(q, k, v):
    return (q @ k.transpose(-2, -1)).masked_fill(k.new_ones(M, N).bool(), -1.0).softmax(-1) @ v


def masked_before_a_scale(q, k, v):
    return ((q @ k.transpose(-2, -1) + q.new_ones(M, N).tril()) * SCALE).softmax(-1) @ v


def queries_are_overwritten(q, k, v):
    q = q + 0
    scores = q @ k.transpose(-2, -1)
    q.zero_()
    return scores.softmax(-1) @ v + q.sum()


def mask_is_overwritten(q, k, v):
    mask = q.new_zeros(M, N)
    scores = q @ k.transpose(-2, -1)
    mask += scores[0, 0]
    return scores.softmax(-1) @ v + mask.sum()


def mask_takes_the_sum(q, k, v):
    mask = q.new_zeros(B, H, M, N)
    mask += q @ k.transpose(-2, -1)
    return mask.softmax(-1) @ v


def without_gradients_in_part(q, k, v):
    with torch.no_grad():
        weights = (q @ k.transpose(-2, -1)).softmax(-1)
    return weights @ v


def autocast_off_in_part(q, k, v):
    with torch.autocast("cpu", enabled=False):
        scores = q @ k.transpose(-2, -1)
    return scores.softmax(-1) @ v


def all_dropped(q, k, v):
    return F.dropout((q @ k.transpose(-2, -1)).softmax(-1), 1.0) @ v


def five_dimensions(q, k, v):
    q, k, v = (t.unsqueeze(0) for t in (q, k, v))
    return (q @ k.transpose(-2, -1)).softmax(-1) @ v


LEFT = [weights_too, scores_too, other_dimension, learned_scale, no_product, weights_changed, weights_on_the_right]
LEFT += [mask_broadens, filled_with_a_weight, masked_before_a_scale, queries_are_overwritten, mask_is_overwritten]
LEFT += [mask_takes_the_sum, without_gradients_in_part, autocast_off_in_part, all_dropped, five_dimensions]


@pytest.mark.parametrize("function", LEFT, ids=lambda f: f.__name__)
def test_left_alone(function):
    left(function, qkv(learn=function is without_gradients_in_part))


def test_masks_that_broaden_the_scores_are_left_alone():
    def where_filled(q, k, v, mask):
        return torch.where(mask, -1e9, scored(q, k)).softmax(-1) @ v

    q, k, v = (t[:1] for t in qkv(learn=False))
    for function in (filled, filled_in_a_new_one, where_filled, kept_where):
        left(function, [q, k, v, hidden((3, 1, M, N))])
        torch.compiler.reset()
        left(function, [q[:, :, :1], k, v, hidden((M, N))])
        torch.compiler.reset()


def test_heads_that_are_dealt_out_anew_are_left_alone():
    def attend(q, k, v, mask):
        scores = scored(q, k).view(H, B, M, N) + mask
        return scores.view(B, H, M, N).softmax(-1) @ v

    left(attend, [*qkv(learn=False), draw(H, 1, M, N, seed=4)])


def filled_in_a_new_one(q, k, v, mask):
    return torch.masked_fill(scored(q, k), mask, torch.finfo(q.dtype).min).softmax(-1) @ v


# Each turns a tensor in place that a view was taken of, or that is multiplied.


def keys_turned(q, k, v):
    k = torch.relu(k)
    k.transpose_(1, 2)
    return times(q, k, v)


def keys_turned_at_once(q, k, v):
    return times(q, torch.relu(k).transpose_(1, 2), v)


def keys_turned_behind_a_view(q, k, v):
    k = torch.relu(k)
    rows = k.mT
    k.swapaxes_(1, 2)
    return (q @ rows * SCALE).softmax(-1) @ v + k.sum()


def values_turned(q, k, v):
    return times(q, k, torch.relu(v).swapdims_(2, 3))


def queries_turned(q, k, v):
    q = torch.relu(q)
    q.swapaxes_(1, 2)
    return times(q, k, v)


def result_turned(q, k, v):
    return times(q, k, v).transpose_(1, 2)


TURNED = [keys_turned, keys_turned_at_once, keys_turned_behind_a_view, values_turned, queries_turned, result_turned]


@pytest.mark.parametrize("function", TURNED, ids=lambda f: f.__name__)
def test_tensors_turned_in_place_are_left_alone(function):
    if function is values_turned:
        left(function, [draw(2, 7, 5, 8), draw(2, 7, 7, 8, seed=1), draw(2, 7, 8, 7, seed=2)])
    else:
        left(function, [draw(2, 4, 4, 8, seed=seed) for seed in range(3)])


def test_values_turned_in_place_among_equal_sizes():
    left(lambda q, k, v: times(q, k, torch.relu(v).transpose_(1, 2)),
         [draw(2, 7, 5, 8), draw(2, 7, 7, 8, seed=1), draw(2, 7, 7, 8, seed=2)])  # fmt: skip


# Each writes behind an attention, as torch's own backward of what is written allows.


def result_written(q, k, v, mask):
    out = times(q, k, v)
    out += 1
    return out


def view_of_the_result_written(q, k, v, mask):
    out = times(q, k, v)
    out.transpose(1, 2)[:, 0].mul_(2.0)
    return out


def folded_result_written(q, k, v, mask):
    """A copy, which it is no longer where the result lies in memory as the queries."""
    out = times(q, k, v).transpose(1, 2).reshape(B, M, H * D)
    out += 1
    return out


def result_written_by_a_function(q, k, v, mask):
    return F.relu(times(q, k, v), inplace=True)


def queries_written(q, k, v, mask):
    x = q + 0.0
    out = (x * 0.3 @ k.transpose(-2, -1)).softmax(-1) @ v
    x.add_(1.0)
    return out


def view_of_the_keys_written(q, k, v, mask):
    x = k + 0.0
    out = (q @ (x * 0.3).transpose(-2, -1)).softmax(-1) @ v
    x[:, 0] = 1.0
    return out


def mask_written(q, k, v, mask):
    bias = mask * 2
    out = (scored(q, k) + bias).softmax(-1) @ v
    bias.zero_()
    return out


WRITTEN = [result_written, view_of_the_result_written, folded_result_written, result_written_by_a_function]
WRITTEN += [queries_written, view_of_the_keys_written, mask_written]


@pytest.mark.parametrize("lay", [list, inside], ids=["outside", "inside"])
@pytest.mark.parametrize("function", WRITTEN, ids=lambda f: f.__name__)
def test_training_where_something_is_written_behind(function, lay):
    """Left as it is where it learns; replaced where nothing does, since nothing is saved then."""
    args = [*lay(qkv()), draw(M, N, seed=4).requires_grad_(function is mask_written)]
    same(function, args, expected=0)
    torch.compiler.reset()
    graphs = Graphs()
    given = [t.detach() for t in args]
    torch.testing.assert_close(torch.compile(function, backend=graphs)(*given), function(*given))
    assert graphs.replaced == 1


@pytest.mark.parametrize("function", WRITTEN, ids=lambda f: f.__name__)
def test_inductor_trains_where_something_is_written_behind(installed, function):
    args = [*inside(qkv()), draw(M, N, seed=4)]
    learned = args[:3]
    torch.testing.assert_close(results(torch.compile(function), args, learned), results(function, args, learned))


def test_what_is_written_behind_elsewhere_does_not_matter():
    def attend(q, k, v, x):
        x = x * 2
        x += times(q, k, v)
        return x

    same(attend, [*qkv(), draw(B, H, M, D, seed=4)])


def test_copies_that_are_written_into_stay_copies():
    def attend(q, k, v):
        out = times(q, k, v).transpose(1, 2)
        one, other = out.reshape(B, M, H * D), out.reshape(B, M, H * D)
        one.add_(1.0)
        return one * 2, other * 2

    q, k, v = inside(qkv(learn=False))
    graphs = Graphs()
    torch.testing.assert_close(torch.compile(attend, backend=graphs)(q, k, v), attend(q, k, v))
    assert graphs.replaced == 1


# Keys hidden by two finite numbers: in a row that has no others the larger number wins.


def two_fills(q, k, v, one, other):
    return scored(q, k).masked_fill(one, -1e4).masked_fill(other, -1e9).softmax(-1) @ v


def fill_and_sum(q, k, v, one, other):
    bias = torch.zeros_like(other, dtype=q.dtype).masked_fill(other, -1e9)
    return (scored(q, k).masked_fill(one, -1e4) + bias).softmax(-1) @ v


def sum_and_fill(q, k, v, one, other):
    bias = torch.zeros_like(other, dtype=q.dtype).masked_fill(other, -1e9)
    return (scored(q, k) + bias).masked_fill(one, -1e4).softmax(-1) @ v


def gpt2(q, k, v, one, other):
    scores, low = scored(q, k), torch.finfo(q.dtype).min
    scores = torch.where(~one, scores, torch.full([], low, dtype=q.dtype))
    padding = torch.zeros_like(other, dtype=q.dtype).masked_fill(other, low)
    return (scores + padding).softmax(-1) @ v


def padding_first(q, k, v, one, other):
    scores, low = scored(q, k), torch.finfo(q.dtype).min
    padding = torch.zeros_like(other, dtype=q.dtype).masked_fill(other, low)
    return (scores + padding).masked_fill(one, low).softmax(-1) @ v


def lowest_fills(q, k, v, one, other):
    return scored(q, k).masked_fill(one, torch.finfo(q.dtype).min).masked_fill(other, -1e31).softmax(-1) @ v


def hidden_twice():
    """Two masks that overlap; together they hide all keys of one row in the middle."""
    one, other = hidden((B, 1, M, N)), draw(B, 1, M, N, seed=6) > 0.3
    other[..., 0] = False
    one[:, :, 3], other[:, :, 3] = torch.arange(N) < 8, torch.arange(N) > 4
    return one, other


@pytest.mark.parametrize("function", [two_fills, fill_and_sum, sum_and_fill], ids=lambda f: f.__name__)
def test_two_finite_numbers_are_left_alone(function):
    left(function, [*qkv(learn=False), *hidden_twice()])


@pytest.mark.parametrize("function", [gpt2, padding_first], ids=lambda f: f.__name__)
def test_two_lowest_numbers_of_float16_are_left_alone(function):
    left(function, [*qkv(torch.float16, learn=False), *hidden_twice()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("function", [gpt2, padding_first, lowest_fills], ids=lambda f: f.__name__)
def test_two_numbers_that_absorb_the_scores(function, dtype):
    """Each is kept, so that it is known which is larger."""
    q, k, v = qkv(dtype, learn=False)
    graphs, masks = Graphs(), hidden_twice()
    found = torch.compile(function, backend=graphs)(q, k, v, *masks)
    assert graphs.replaced == 1
    tolerance = {} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(found, function(q, k, v, *masks), **tolerance)


def test_float64_is_left_alone():
    left(times, qkv(torch.float64, learn=False))


def test_batched_transforms_are_left_alone():
    left(torch.vmap(times), [t.unsqueeze(0) for t in qkv(learn=False)])


def test_the_reason_is_logged(caplog):
    with caplog.at_level(logging.DEBUG, logger="sdpa.patterns"):
        left(weights_too, qkv(learn=False))
        torch.compiler.reset()
        same(times, qkv())
    told = [record.getMessage() for record in caplog.records if record.name == "sdpa.patterns"]
    assert told == [
        "weights is left as it is: its weights are read by something else than one product with values",
        "attention of sdpa in place of 1 written out",
    ]


# -- Inductor ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def installed():
    sdpa.install(patterns=True)
    yield config.pre_grad_custom_pass
    sdpa.uninstall()


def model(x, weight, mask):
    """An encoder's attention, with the projection around it."""
    q, k, v = F.linear(x, weight).view(B, M, 3, H, D).permute(2, 0, 3, 1, 4)
    weights = F.softmax(q @ k.transpose(-2, -1) * SCALE + mask, dim=-1, dtype=torch.float32).to(q.dtype)
    return (weights @ v).transpose(1, 2).reshape(B, M, H * D)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_inductor_trains_and_infers(installed, dtype, caplog):
    counters.clear()
    caplog.set_level(logging.INFO, "sdpa.patterns")
    x, weight = draw(B, M, H * D, dtype=dtype), draw(3 * H * D, H * D, dtype=dtype, seed=1) / 8
    mask = draw(M, M, dtype=dtype, seed=2)
    args = [x.requires_grad_(), weight.requires_grad_(), mask]
    expected = results(model, args, args[:2])
    compiled = torch.compile(model)
    sdpa.scaled_dot_product_attention(*qkv(learn=False), kernel="math")
    found = results(compiled, args, args[:2])
    assert sdpa.last_choice().problem.direction == "backward"
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 6e-2}
    torch.testing.assert_close(found, expected, **tolerance)
    with torch.no_grad(), sdpa.sdpa_kernel("vendor_cpu_flash"):
        torch.testing.assert_close(compiled(*args), expected[0], **tolerance)
    assert sdpa.last_choice().kernel.name == "vendor_cpu_flash"  # chosen where it runs
    if counters["aot_autograd"]["autograd_cache_hit"] == 0:
        assert caplog.text.count("1 written out") == 2  # the graph with gradients and the one without


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_activation_checkpointing(installed, p, caplog):
    """The graph of a checkpoint is one inside of another; what is dropped is the same when it is computed again."""

    def inner(q, k, v):
        return F.dropout((q @ k.transpose(-2, -1) * SCALE).softmax(-1), p) @ v

    caplog.set_level(logging.INFO, "sdpa.patterns")
    args = [*qkv()[:2], torch.eye(N).expand(B, H, N, N).clone().requires_grad_()]
    compiled = torch.compile(lambda *a: checkpoint(inner, *a, use_reentrant=False), fullgraph=True)
    with torch._functorch.config.patch(enable_autograd_cache=False):
        out = compiled(*args)
    assert caplog.text.count("attention of sdpa in place of 1 written out") == 1
    # With one-hot values the output is the weights, and the sum over its columns is linear in what was kept.
    (grad,) = torch.autograd.grad(out.sum(), args[2])
    torch.testing.assert_close(grad, out.sum(-2).unsqueeze(-1).expand_as(grad).detach())


class Noted(CustomGraphPass):
    def __init__(self):
        self.graphs = 0

    def __call__(self, graph):
        self.graphs += 1

    def uuid(self):
        return "noted"


def run_inductor(number):
    """Compiles a graph that no cache knows, and runs it."""
    compiled = torch.compile(lambda q, k, v: times(q, k, v) + number)
    with (
        torch.no_grad(),
        config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        torch.testing.assert_close(compiled(*qkv(learn=False)), times(*qkv(learn=False)) + number)


def chosen(number):
    sdpa.scaled_dot_product_attention(*qkv(learn=False), kernel="math")
    run_inductor(number)
    return sdpa.last_choice().kernel.name


def test_uninstall_gives_back_and_keeps_a_users_pass():
    assert chosen(1.0) == "math"  # nothing of ours ran since
    with config.patch(pre_grad_custom_pass=(mine := Noted())):
        sdpa.install(patterns=True)
        assert chosen(2.0) == "cpu_flash" and mine.graphs == 1
        sdpa.install()
        sdpa.uninstall()
        assert config.pre_grad_custom_pass is not mine
        sdpa.uninstall()
        assert config.pre_grad_custom_pass is mine
        torch.compiler.reset()
        assert chosen(3.0) == "math" and mine.graphs == 2
    assert config.pre_grad_custom_pass is None


def targets_after(run):
    """What a graph calls after a pass."""
    targets = []

    def backend(module, inputs):
        run(module.graph)
        targets.extend(node.target for node in module.graph.nodes)
        return module

    torch.compiler.reset()
    torch.compile(times, backend=backend)(*qkv(learn=False))
    return targets


def test_who_replaced_the_pass_meanwhile_has_the_last_word():
    sdpa.install(patterns=True)
    ours, mine = config.pre_grad_custom_pass, Noted()
    config.pre_grad_custom_pass = mine
    sdpa.uninstall()
    assert config.pre_grad_custom_pass is mine
    config.pre_grad_custom_pass = None
    assert isinstance(ours, hook.WrittenOut)
    assert OURS in targets_after(hook.WrittenOut(None))
    assert OURS not in targets_after(ours)  # kept somewhere, it does nothing any more


def test_without_patterns_nothing_of_inductor_is_touched():
    sdpa.install()
    assert config.pre_grad_custom_pass is None
    sdpa.uninstall()


def test_the_pass_is_known_to_inductors_cache(installed):
    assert isinstance(installed, CustomGraphPass) and installed.uuid() == (hook.fingerprint(),)
    assert pickle.loads(pickle.dumps(installed)).uuid() == installed.uuid()
    assert hook.WrittenOut(Noted()).uuid() == (hook.fingerprint(), "noted")
    assert hook.WrittenOut([Noted(), Noted()]).uuid() == (hook.fingerprint(), "noted", "noted")
    assert hook.WrittenOut(print).uuid() is None
    counters.clear()
    for _ in range(2):
        torch.compiler.reset()
        with torch.no_grad():
            torch.compile(times)(*qkv(learn=False))
    assert counters["aot_autograd"]["autograd_cache_hit"] >= 1
    assert sdpa.last_choice().kernel.name == "cpu_flash"


def test_inductor_is_imported_by_who_asks():
    code = (
        "import sys, sdpa; sdpa.install(); loaded = lambda: any(m.startswith('torch._inductor') for m in sys.modules)\n"
    )
    code += "print(loaded(), 'sdpa.patterns' in sys.modules); sdpa.install(patterns=True); print(loaded())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "True"]


@pytest.mark.parametrize("missing", ["torch._inductor.config", "torch._inductor.custom_graph_pass"])
def test_a_torch_without_the_hook_says_so(missing):
    code = "import sys, sdpa, torch.nn.functional as F; own = F.scaled_dot_product_attention\n"
    code += f"sys.modules[{missing!r}] = None\n"
    code += "try: sdpa.install(patterns=True)\n"
    code += "except RuntimeError as error: print(error, F.scaled_dot_product_attention is own)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(
        "install(patterns=True) needs torch._inductor.config.pre_grad_custom_pass, which torch "
    )
    assert done.stdout.endswith("does not have. True\n")
