"""What sdpa.warm_up leaves behind in a process, and what it says of functions that it cannot run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import sdpa

attention = sdpa.scaled_dot_product_attention


def qkv(*, grad: bool = False) -> list[Tensor]:
    return [torch.zeros(2, 4, 16, 8, requires_grad=grad) for _ in range(3)]


def directions(warmed):
    return [one.problem.split()[0] for one in warmed]


def test_autocast_keeps_no_fake_cast():
    """It holds the casts of parameters until its outermost block ends."""
    layer, x = torch.nn.Linear(8, 8), torch.ones(2, 4, 16, 8)
    with torch.autocast("cpu"):
        warmed = sdpa.warm_up(lambda x: attention(layer(x), layer(x), layer(x)), x)
        assert type(layer(x)) is Tensor
    assert directions(warmed) == ["forward", "backward"]


def test_a_frozen_part_and_a_backward_of_its_own():
    head, (q, k, v) = torch.nn.Linear(8, 1), qkv(grad=True)

    def train():
        with torch.no_grad():
            hidden = attention(q, k, v)
        loss = head(hidden).sum()
        loss.backward()
        return loss

    assert directions(sdpa.warm_up(train)) == ["forward"] and head.weight.grad is None


def test_fakes_that_a_function_keeps_raise_beside_real_tensors():
    kept = []

    def attend(q, k, v):
        kept.append(k)
        return attention(q, k, v)

    given = qkv()
    sdpa.warm_up(attend, *given)
    with pytest.raises(Exception, match=r"[Ff]ake"):
        kept[0] + given[1]


def test_an_operator_without_a_fake():
    library = torch.library.Library("sdpa_test", "FRAGMENT")
    library.define("no_fake(Tensor x) -> Tensor")
    library.impl("no_fake", torch.clone, "CPU")
    with pytest.raises(ValueError, match=r"calls sdpa_test.no_fake.default, which has no fake implementation"):
        sdpa.warm_up(lambda q, k, v: attention(torch.ops.sdpa_test.no_fake(q), k, v), *qkv())
