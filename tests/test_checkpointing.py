"""save_attention: a block under selective checkpointing computes its attention once."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import sdpa
from helpers import draw, int32
from sdpa import Mask

attention = sdpa.scaled_dot_product_attention
B, H, L, D = 2, 3, 6, 8
CU = int32(0, 2, 6)


def packed(q):
    rows = q.transpose(1, 2)
    return torch.stack([sdpa.varlen_attention(one, one, one, CU, CU, 4, 4) for one in rows]).transpose(1, 2)


CALLS = {
    "plain": lambda q: attention(q, q, q, is_causal=True),
    "mask": lambda q: attention(q, q, q, Mask(lengths=torch.tensor([3, 6]))),
    "bias": lambda q: attention(q, q, q, (q @ q.mT).tanh()),
    "dropout": lambda q: attention(q, q, q, dropout_p=0.3),
    "softcap": lambda q: attention(q, q, q, softcap=2.0, return_lse=True)[0],
    "packed": packed,
    "torch's": lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True),
}


class Counting(TorchDispatchMode):
    """How often attention is computed."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        self.calls += "attention" in name and "backward" not in name
        return function(*args, **(kwargs or {}))


def learned(call, x, **options):
    """Gradients of a block, and how often it computed attention."""
    torch.manual_seed(0)
    x = x.detach().requires_grad_()
    with Counting() as counting:
        out = checkpoint(lambda x: call(x.sin()).cos(), x, use_reentrant=False, **options)
        (gradient,) = torch.autograd.grad(out.square().sum(), x)
    return gradient, counting.calls


def saving(*otherwise):
    return partial(create_selective_checkpoint_contexts, sdpa.save_attention(*otherwise))


@pytest.mark.parametrize("name", CALLS)
def test_attention_is_computed_once(name):
    x, call = draw(B, H, L, D), CALLS[name]
    want, twice = learned(call, x)
    got, once = learned(call, x, context_fn=saving())
    torch.testing.assert_close(got, want)
    assert twice == 2 * once > 0


OLD = torch.__version__.startswith("2.10.")
TAKES_NEW = pytest.mark.skipif(OLD, reason="Dynamo of torch 2.10 takes no context_fn that is made while it traces")


@pytest.mark.parametrize("made", ["before", pytest.param("inside", marks=TAKES_NEW)])
@pytest.mark.parametrize("name", [name for name in CALLS if name != "packed"])
def test_in_compiled_code(name, made):
    x, call, before = draw(B, H, L, D), CALLS[name], saving()
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: learned_inside(call, x), backend="aot_eager", fullgraph=True)

    def learned_inside(call, x):
        contexts = before if made == "before" else saving()
        return checkpoint(lambda x: call(x.sin()).cos(), x, use_reentrant=False, context_fn=contexts)

    leaf = x.requires_grad_()
    torch.manual_seed(0)
    (got,) = torch.autograd.grad(compiled(leaf).square().sum(), leaf)
    if name != "dropout":
        torch.testing.assert_close(got, learned(call, x)[0])


def test_other_operators_are_asked_for():
    asked = []

    def otherwise(context, operator, *args, **options):
        asked.append(str(operator))
        return CheckpointPolicy.MUST_SAVE

    _, once = learned(CALLS["plain"], draw(B, H, L, D), context_fn=saving(otherwise))
    assert once == 1 and any("sin" in name for name in asked) and not any("attention" in name for name in asked)


def test_a_policy_is_called():
    with pytest.raises(TypeError, match="takes a policy, which is called, or None, got int"):
        sdpa.save_attention(3)
