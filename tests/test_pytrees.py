"""Mask, Results and a decoder's cache taken apart by torch: export, save and load, vmap, torch.func."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
import torch
from torch.utils import _pytree as pytree

import sdpa
from helpers import draw
from sdpa import Mask, nn

attention = sdpa.scaled_dot_product_attention
B, H, L, D, SAMPLES = 2, 3, 5, 8, 4
MASKS = {
    "causal": Mask(causal=True),
    "window": Mask(causal=True, align="bottom_right", window=(2, None), lengths=torch.tensor([3, 5])),
    "query_lengths": Mask(query_lengths=torch.tensor([3, 5])),
    "segments": Mask(segments=torch.tensor([0, 0, 1, 1, 1])),
    "pair": Mask(segments=(torch.tensor([0, 0, 1, 1, 1]), torch.tensor([0, 1, 1, 1, 0]))),
    "cu_seqlens": Mask(cu_seqlens=torch.tensor([0, 2, 5])),
    "number": Mask(causal=True, prefix=2),
    "prefix": Mask(causal=True, prefix=torch.tensor([1, 3])),
    "alibi": Mask(alibi=torch.tensor([0.5, 0.25, 0.125])),
    "allowed": Mask(allowed=torch.ones(L, L, dtype=torch.bool).tril(1)),
    "bias": Mask(bias=draw(L, L)),
}


class Attention(torch.nn.Module):
    def forward(self, q, k, v, mask):
        return attention(q, k, v, mask, return_lse=True)


def saved(program):
    """A program written and read again."""
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("strict", [False, True], ids=["traced", "strict"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_mask_is_an_input_of_export(mask, strict, caplog):
    q, k, v = draw(3, B, H, L, D)
    program = saved(torch.export.export(Attention(), (q, k, v, mask), strict=strict))
    warned = [record for record in caplog.records if record.levelname == "WARNING"]
    assert not warned  # torch.load trusts what is in the file
    got, want = program.module()(q, k, v, mask), attention(q, k, v, mask, return_lse=True)
    assert type(got) is type(want) is tuple and same(got, want)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_mask_comes_back_from_its_leaves(mask):
    leaves, spec = pytree.tree_flatten(mask)
    again = pytree.tree_unflatten(leaves, spec)
    assert type(again) is Mask and again is not mask
    assert all(
        getattr(again, name) is getattr(mask, name) for name in ("lengths", "prefix", "alibi", "allowed", "bias")
    )
    assert repr(again) == repr(mask)
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec
    odd = pytree.tree_unflatten([object()] * len(leaves), spec)  # as torch does to compare two trees
    assert pytree.tree_structure(odd) == spec
    keyed, _ = pytree.tree_flatten_with_path(mask)
    assert len(keyed) == len(leaves) and all(str(path[0]).startswith(".") for path, _ in keyed)


@pytest.mark.parametrize("name", ["lengths", "segments", "allowed", "bias"])
def test_vmap_maps_a_mask(name):
    """Every sample with a mask of its own, beside one by one."""
    integers = torch.Generator().manual_seed(0)
    fields = {
        "lengths": torch.randint(0, L + 1, (SAMPLES, B), generator=integers),
        "segments": torch.randint(0, 3, (SAMPLES, B, L), generator=integers),
        "allowed": draw(SAMPLES, B, 1, L, L) > 0,
        "bias": draw(SAMPLES, B, 1, L, L),
    }
    q, k, v = draw(3, SAMPLES, B, H, L, D)
    got = torch.vmap(attention)(q, k, v, Mask(causal=True, **{name: fields[name]}))
    for s in range(SAMPLES):
        torch.testing.assert_close(got[s], attention(q[s], k[s], v[s], Mask(causal=True, **{name: fields[name][s]})))


def test_vmap_leaves_a_mask_alone():
    q, k, v = draw(3, SAMPLES, B, H, L, D)
    mask = Mask(causal=True, prefix=2, lengths=torch.tensor([3, 5]))
    got = torch.vmap(attention, in_dims=(0, 0, 0, None))(q, k, v, mask)
    torch.testing.assert_close(got, torch.stack([attention(*one, mask) for one in zip(q, k, v, strict=True)]))


def test_gradient_of_a_mask_is_a_mask():
    q, k, v = draw(3, B, H, L, D)
    bias = draw(L, L).requires_grad_()
    given = torch.func.grad(lambda mask: attention(q, k, v, mask).square().sum())(Mask(bias=bias.detach()))
    attention(q, k, v, bias).square().sum().backward()
    assert type(given) is Mask
    torch.testing.assert_close(given.bias, bias.grad)


class Step(torch.nn.Module):
    def __init__(self, decoder):
        super().__init__()
        self.decoder = decoder

    def forward(self, x, cache):
        return self.decoder.step(x, cache), cache


@pytest.fixture
def decoder():
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(24, 3, 32, 0.0, batch_first=True, dtype=torch.float64)
    return nn.TransformerDecoder(layer, 2).eval()


HIDDEN = torch.arange(6) >= torch.tensor([6, 4])[:, None]


@pytest.mark.parametrize("hidden", [None, HIDDEN], ids=["whole", "padded"])
def test_step_is_exported_with_its_cache(decoder, hidden):
    x, memory = draw(B, 3, 24), draw(B, 6, 24)
    program = saved(torch.export.export(Step(decoder), (x, decoder.new_cache(memory, 8, hidden))))
    ours, theirs = (decoder.new_cache(memory, 8, hidden) for _ in range(2))
    for _ in range(2):  # the lengths of all layers are one tensor, in the program as here
        (want, _), (got, kept) = Step(decoder)(x, ours), program.module()(x, theirs)
        assert torch.equal(got, want) and torch.equal(theirs.lengths, ours.lengths)
    assert type(kept) is type(ours) and kept.own[0].lengths is kept.own[1].lengths is kept.lengths


def test_step_under_vmap(decoder):
    x, memory = draw(SAMPLES, B, 3, 24), draw(SAMPLES, B, 6, 24)

    def generated(x, memory):
        cache = decoder.new_cache(memory, 8)
        return torch.stack([decoder.step(x, cache), decoder.step(x, cache)])

    want = torch.stack([generated(*one) for one in zip(x, memory, strict=True)])
    torch.testing.assert_close(torch.vmap(generated)(x, memory), want)
    caches = torch.vmap(lambda memory: decoder.new_cache(memory, 8))(memory)
    steps = [torch.vmap(decoder.step)(x, caches) for _ in range(2)]
    torch.testing.assert_close(torch.stack(steps, 1), want)


def test_step_under_vmap_with_a_shared_cache_is_refused(decoder):
    cache = decoder.new_cache(draw(B, 6, 24), 8)
    with pytest.raises(RuntimeError, match="call new_cache inside of the mapped function"):
        torch.vmap(lambda x: decoder.step(x, cache))(draw(SAMPLES, B, 3, 24))
    memory = draw(B, 6, 24)
    with pytest.raises(RuntimeError, match="with a memory that is mapped"):
        torch.vmap(lambda x: decoder.step(x, decoder.new_cache(memory, 8)))(draw(SAMPLES, B, 3, 24))


def test_nothing_is_imported_for_it():
    code = "import sys, torch; before = set(sys.modules); import sdpa\n"
    code += "print([m for m in set(sys.modules) - before if m.startswith(('optree', 'torch.export', 'torch._dynamo'))])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
