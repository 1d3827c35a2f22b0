"""Dropout: its share and scale, one mask in forward, backward, checkpointing and every kernel, reproducible."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import helpers
import sdpa
from sdpa import philox
from sdpa.dispatch.catalog import KERNELS
from sdpa.testing import Case, able

attention = sdpa.scaled_dot_product_attention
qkv = partial(helpers.qkv, grad=True, seed=3)
OURS = [k.name for k in KERNELS if "dropout" in k.features and not able(k.name, Case(dropout_p=0.5))]


def run(seed, q, k, v, p=0.4, **options):
    """Result and gradients after seeding torch."""
    torch.manual_seed(seed)
    out = attention(q, k, v, dropout_p=p, **options)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_none_and_all():
    q, k, v = qkv(2, 3, 9, 9)
    assert torch.equal(attention(q, k, v, dropout_p=0.0), attention(q, k, v))
    out, *grads = run(0, q, k, v, p=1.0)
    assert not out.any() and not any(g.any() for g in grads)
    assert all(g.shape == q.shape for g in grads)


def test_seed_decides():
    tensors = qkv(2, 3, 9, 9)
    assert equal(run(1, *tensors), run(1, *tensors))
    assert not equal(run(1, *tensors), run(2, *tensors))


def test_consecutive_calls_differ():
    q, k, v = qkv(2, 3, 9, 9)
    torch.manual_seed(0)
    assert not torch.equal(attention(q, k, v, dropout_p=0.4), attention(q, k, v, dropout_p=0.4))


@pytest.mark.parametrize("kernel", OURS)
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9], ids=lambda p: f"p{p}")
def test_share_and_scale(kernel, p):
    """With uniform weights and values 1 a row's result is the number of kept keys over (1 - p) N."""
    N, q = 4096, torch.zeros(1, 2, 8, 4, dtype=torch.float64)
    k, v = q.new_zeros(1, 2, N, 4), q.new_ones(1, 2, N, 4)
    torch.manual_seed(5)
    kept = attention(q, k, v, dropout_p=p, kernel=kernel) * (1 - p)
    deviation = (p * (1 - p) / N) ** 0.5
    assert (kept - (1 - p)).abs().max() < 5 * deviation  # 16 rows: five sigma happen once in 10^5 runs
    assert torch.allclose(kept * N, (kept * N).round())
    assert kept[..., 0].unique().numel() > 1


@pytest.mark.parametrize("kernel", OURS)
def test_forward_and_backward_drop_the_same_pairs(kernel):
    """With v one-hot the result is the dropped weights themselves, and the gradient of v their transpose."""
    q, k, _ = qkv(2, 3, 13, 13, 13)
    v = torch.eye(13).expand(2, 3, 13, 13).clone().requires_grad_()
    torch.manual_seed(5)
    weights = attention(q, k, v, dropout_p=0.4, kernel=kernel)
    rows = torch.eye(13).expand(2, 3, 13, 13)
    (grad_v,) = torch.autograd.grad(weights, v, rows)
    assert torch.equal(grad_v == 0, weights.mT == 0) and (weights == 0).any()


def test_seeds_of_apples_gpus_are_drawn_in_halves(monkeypatch):
    """MPS draws integers of 32 bits alone: a larger bound is cut to them. Seeds are as large as elsewhere."""
    honest, bounds = torch.randint, []

    def draw(low, high, shape, *, dtype, device):
        bounds.append((low, high, str(device)))
        return honest(low, high, shape, dtype=dtype)

    monkeypatch.setattr(torch, "randint", draw)
    torch.manual_seed(5)
    seeds = torch.stack([philox.next_seed(torch.device("mps")) for _ in range(64)])
    assert set(bounds) == {(0, 2**30, "mps")} and seeds.dtype == torch.int64 and seeds.shape == (64, 2)
    assert 0 <= seeds.min() and 2**50 < seeds.max() < 2**62 and len(set(seeds.flatten().tolist())) == 128
    torch.manual_seed(5)
    assert torch.equal(philox.next_seed(torch.device("mps")), seeds[0])


@pytest.mark.parametrize("kernel", OURS)
def test_kernels_agree_on_the_mask(kernel):
    q, k, _ = qkv(2, 4, 33, 33, 32)
    v = torch.eye(33, 33).expand(2, 4, 33, 33)
    torch.manual_seed(7)
    rng = philox.draw_seed(torch.device("cpu"))
    wanted = philox.keep_mask(rng, 0.3, (2, 4, 33, 33))
    k = torch.cat([k, k[:, :, :0]], 2)
    torch.manual_seed(7)
    out = attention(q[:, :, :33], k, v, dropout_p=0.3, kernel=kernel)
    assert torch.equal(out != 0, wanted)


@pytest.mark.parametrize("reentrant", [False, True], ids=["plain", "reentrant"])
def test_checkpointing_draws_the_same(reentrant):
    tensors = qkv(2, 3, 9, 9)

    def block(q, k, v):
        return attention(q, k, v, dropout_p=0.4)

    torch.manual_seed(11)
    out = checkpoint(block, *tensors, use_reentrant=reentrant)
    out.sum().backward()
    found = [out.detach(), *(t.grad for t in tensors)]
    assert equal(found, run(11, *tensors))


def test_works_with_masks_and_groups():
    q, k, v = (t.detach() for t in qkv(2, 6, 9, 9))
    mask = sdpa.Mask(causal=True) & (torch.rand(2, 1, 1, 9, generator=torch.Generator().manual_seed(0)) > 0.3)
    for kernel in OURS:
        torch.manual_seed(1)
        out = attention(q, k[:, :2], v[:, :2], mask, 0.3, enable_gqa=True, kernel=kernel)
        torch.manual_seed(1)
        wanted = attention(*(t.double() for t in (q, k[:, :2], v[:, :2])), mask, 0.3, enable_gqa=True, kernel="math")
        assert torch.allclose(out.double(), wanted, atol=1e-5)


def test_rows_of_torch_refuse_dropout():
    explanation = sdpa.explain(*(t.detach() for t in qkv(2, 3, 9, 9)), dropout_p=0.3)
    for row in explanation.rows:
        if row.kernel.startswith("vendor_"):
            assert row.status == "refused" and any("dropout" in reason for reason in row.reasons)


def test_philox_known_answer():
    """The published vectors of Philox4x32-10, for the generator that the kernels are compared with."""
    ones, words = 0xFFFFFFFF, lambda *values: tuple(torch.tensor(v) for v in values)
    zero = philox.philox(words(0, 0, 0, 0), words(0, 0))
    full = philox.philox(words(ones, ones, ones, ones), words(ones, ones))
    assert [int(w) for w in zero] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert [int(w) for w in full] == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


class Generator:
    """What SeedPools asks of a CUDA generator."""

    def __init__(self, seed, offset=0):
        self.seed, self.offset = seed, offset

    def initial_seed(self):
        return self.seed

    def get_offset(self):
        return self.offset

    def set_offset(self, offset):
        self.offset = offset


def host_pool(key, index):
    return torch.stack((torch.full((philox.SEEDS,), key), torch.arange(philox.SEEDS)), 1)


def test_pooled_seeds_follow_the_generators_state():
    made = []
    pools = philox.SeedPools(lambda key, index: made.append(key) or host_pool(key, index))
    generator = Generator(7)
    first = [pools.draw(generator, 0, 0).tolist() for _ in range(3)]
    assert len(set(map(tuple, first))) == 3 and generator.offset == 12 and len(made) == 1
    generator.offset = 4  # as set_rng_state and checkpointing leave it
    assert pools.draw(generator, 0, 0).tolist() == first[1]
    assert pools.draw(Generator(7), 0, 0).tolist() == first[0]
    assert pools.draw(Generator(8), 0, 0).tolist() != first[0]
    later = Generator(7, 4 * philox.SEEDS)
    assert pools.draw(later, 0, 0).tolist()[0] != first[0][0]
    before = len(made)
    for seed in range(40):
        pools.draw(Generator(100 + seed), 0, 0)
        pools.draw(Generator(7), 0, 0)  # a pool in use stays
    assert len(pools.pools) == philox.MAX_POOLS and len(made) == before + 40
    assert pools.draw(Generator(7), 0, 1).tolist() == first[0] and len(made) == before + 41  # another stream's
    assert pools.draw(Generator(7), 1, 0).tolist() == first[0] and len(made) == before + 42  # another device's


def test_keys_of_pools_differ():
    keys = {philox.mixed(seed, block) for seed in range(64) for block in range(64)}
    assert len(keys) == 64 * 64 and all(0 <= key < 2**63 for key in keys)
    assert philox.mixed(2**64 - 1, 0) != philox.mixed(0, 0)
