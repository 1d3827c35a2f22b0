"""A module of sdpa.nn beside torch's: built from one seed, called with the same inputs, their results compared."""

from __future__ import annotations

import copy
import warnings

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map_only

import sdpa.nn
from sdpa.testing import ERROR_FACTOR, largest

PAD = torch.tensor([[0, 0, 0, 0, 1], [0, 1, 0, 1, 1], [0, 0, 0, 0, 0]]).bool()  # somewhere, not only on the right
CAUSAL = torch.ones(5, 5).bool().triu(1)
SMALL = {"dim_feedforward": 16, "dropout": 0.0, "activation": "gelu"}
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
DTYPES = [torch.float32, torch.bfloat16]


def built(name, *args, **kwargs):
    """Ours and torch's, from the same random numbers."""
    pair = []
    for package in (sdpa.nn, torch.nn):
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="enable_nested_tensor is True")
            pair.append(getattr(package, name)(*args, **kwargs))
    return pair


def encoders(layers=2, norm=None, **options):
    """Stacks of layers, ours and torch's, with one state_dict and parameters unlike their initial values."""
    layer = torch.nn.TransformerEncoderLayer(8, 2, **{**SMALL, **options})
    return stirred(built("TransformerEncoder", layer, layers, norm))


def decoders(layers=2, norm=None, **options):
    layer = torch.nn.TransformerDecoderLayer(8, 2, **{**SMALL, **options})
    return stirred(built("TransformerDecoder", layer, layers, norm))


def stirred(pair):
    """Biases and norms of random values, which a forgotten one would show."""
    generator = torch.Generator().manual_seed(1)
    ours, theirs = pair
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def additive(hidden):
    return torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)


def rows_of(mask, batch_first=True):
    """A padding mask (B, L) or (L,) as it lies over rows."""
    return (mask.t() if mask.dim() == 2 and not batch_first else mask).unsqueeze(-1)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def is_learned(value):
    return isinstance(value, torch.Tensor) and value.is_floating_point() and bool(value.isfinite().all())


def outcome(module, args, kwargs, hidden=None):
    """What a module returns and, in training, the gradients of its inputs, learned masks and parameters, by name.

    `hidden` marks rows of the result that nobody reads. In eval nothing is recorded: torch then takes its fast path.
    """
    leaves = {}
    given = []
    for i, value in enumerate(args):
        same = next((j for j in range(i) if args[j] is value), i)
        given.append(given[same] if same < i else value.detach().clone().requires_grad_())
        leaves[f"input {same}"] = given[same]
    learned = {n: t.detach().clone().requires_grad_() for n, t in kwargs.items() if is_learned(t)}
    leaves |= learned | dict(module.named_parameters())
    with torch.set_grad_enabled(module.training):
        returned = module(*given, **kwargs | learned)
    outs = [t for t in (returned if isinstance(returned, tuple) else (returned,)) if t is not None]
    if hidden is not None:
        outs = [t.masked_fill(hidden, 0.0) for t in outs]
    found = {f"result {i}": t.detach() for i, t in enumerate(outs)}
    if not module.training:
        return found
    loss = sum((t * randn(*t.shape, seed=5 + i).to(t.dtype)).sum() for i, t in enumerate(outs))
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return found | {n: torch.zeros_like(t) if g is None else g for (n, t), g in zip(leaves.items(), grads, strict=True)}


class Ledger:
    """Errors of ours and torch's against torch's in float64, of many calls: the worst of ours may be ERROR_FACTOR times
    the worst of torch's and a rounding. One call's worst would be luck: a ReLU at its kink, a sum that cancels."""

    def __init__(self, dtype=torch.float32):
        self.dtype, self.ours, self.theirs = dtype, {}, {}

    def add(self, label, pair, args, kwargs, hidden=None):
        """Call both; returns what ours gave. `args` are tensors, and what is one tensor twice stays one."""
        ours, theirs = (copy.deepcopy(module).to(self.dtype) for module in pair)
        wide = copy.deepcopy(theirs).double()
        args, kwargs = rounded(args, self.dtype), rounded(kwargs, self.dtype)
        got, plain = outcome(ours, args, kwargs, hidden), outcome(theirs, args, kwargs, hidden)
        wanted = outcome(wide, rounded(args, torch.float64), rounded(kwargs, torch.float64), hidden)
        self.ours[label], self.theirs[label] = worst(got, wanted), worst(plain, wanted)
        return got

    def check(self, at_least=1):
        assert len(self.ours) >= at_least
        budget = ERROR_FACTOR * max(self.theirs.values()) + torch.finfo(self.dtype).eps
        over = {label: error for label, error in self.ours.items() if not error <= budget}
        assert not over, f"budget {budget:.3g}: {over}"


def worst(found, wanted):
    """The largest error beside the largest value: of results, and of gradients together."""
    assert found.keys() == wanted.keys()
    errors = []
    for is_result in (True, False):
        names = [name for name in wanted if name.startswith("result") == is_result]
        scale = max((largest(wanted[name].abs()) for name in names), default=0.0)
        errors += [largest((found[name].double() - wanted[name]).abs()) / (scale or 1.0) for name in names]
    return float(torch.tensor(errors).max())  # NaN stays one


def rounded(values, dtype):
    """Floating tensors in `values` as new leaves of a dtype; what was one tensor stays one."""
    casts = {}

    def cast(tensor):
        if not tensor.is_floating_point():
            return tensor
        return casts.setdefault(id(tensor), tensor.detach().to(dtype))

    return tree_map_only(torch.Tensor, cast, values)


def is_routed():
    """Whether what is called as torch's function changes our last choice."""
    x = torch.zeros(1, 1, 2, 4)
    sdpa.scaled_dot_product_attention(x, x, x, kernel="math")
    F.scaled_dot_product_attention(x, x, x)
    return sdpa.last_choice().kernel.name != "math"
