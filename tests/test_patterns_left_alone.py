"""install(patterns=True): what looks like attention and is left alone."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from written_out import (
    SCALE,
    B,
    D,
    Graphs,
    H,
    M,
    N,
    draw,
    filled,
    hidden,
    inside,
    kept_where,
    left,
    qkv,
    results,
    same,
    scored,
    times,
)

from sdpa.patterns.reading import is_plain

pytestmark = pytest.mark.usefixtures("fresh_compiler")


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


@pytest.mark.parametrize(("method", "expected"), [("__eq__", True), ("__abs__", True), ("__iadd__", False)])
def test_methods_of_operators(method, expected):
    """torch 2.10 writes some operators as methods; those that write are no plain ones, and others are not known."""
    graph = torch.fx.Graph()
    assert is_plain(graph.call_method(method, (graph.placeholder("x"), 0))) == expected


@pytest.mark.parametrize("method", ["__setitem__", "__setattr__", "__reduce_ex__", "register_hook"])
def test_methods_that_are_no_operators(method):
    graph = torch.fx.Graph()
    assert not is_plain(graph.call_method(method, (graph.placeholder("x"), 0, 0)))
