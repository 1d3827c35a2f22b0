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
from sdpa.testing import Case, Draw, able, check_inputs, make_inputs

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
    """With uniform weights and values 1 a row's result is the number of kept keys over N, times their factor."""
    N, q = 4096, torch.zeros(1, 2, 8, 4, dtype=torch.float64)
    k, v = q.new_zeros(1, 2, N, 4), q.new_ones(1, 2, N, 4)
    torch.manual_seed(5)
    kept = attention(q, k, v, dropout_p=p, kernel=kernel) / philox.kept_factor(p)
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


def test_the_numbers_of_a_part():
    """Of some heads, queries and keys they are those that the whole call draws."""
    rng = torch.tensor([2**61 + 12345, 2**40 + 77])
    whole = philox.keep_mask(rng, 0.3, (2, 5, 100, 90))
    part = philox.of_part(rng, 5, 2, 48, 32)
    assert torch.equal(philox.keep_mask(part, 0.3, (2, 3, 52, 58)), whole[:, 2:, 48:, 32:])
    streams = philox.streams_of(part, torch.tensor([[1]]), torch.arange(1, 3), 3)
    assert torch.equal(philox.keep_mask(part, 0.3, (1, 2, 52, 58), streams)[0], whole[1, 3:, 48:, 32:])


PARTS = {
    "plain": {"dropout_p": 0.3},
    "causal": {"dropout_p": 0.5, "mask": "causal", "M": 70},
    "few rows": {"dropout_p": 0.3, "M": 3},
}


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("kernel", OURS)
def test_kernels_draw_the_numbers_of_a_part(kernel, name):
    for dtype in (torch.float32, torch.bfloat16):
        case = Case(**{"N": 90} | PARTS[name], dtype=dtype)
        if able(kernel, case):
            continue
        inputs = helpers.of_part(make_inputs(case, 4))
        grad_out = Draw(case, 1).normal(case.B, case.H, case.M, case.Dv)
        found = check_inputs(kernel, inputs, grad_out)
        assert all(one.ok for one in found), [str(one) for one in found if not one.ok]


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
    """The published vectors of Philox4x32, for the generator that the kernels are compared with."""
    ones, words = 0xFFFFFFFF, lambda *values: tuple(torch.tensor(v) for v in values)
    for rounds, zero, full in (
        ({}, "5f6fb709 0d893f64 4f121f81 4f730a48", "5207ddc2 45165e59 4d8ee751 8c52f662"),
        ({"rounds": 10}, "6627e8d5 e169c58d bc57ac4c 9b00dbd8", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ):
        for word, wanted in ((0, zero), (ones, full)):
            found = philox.philox(words(*[word] * 4), words(*[word] * 2), **rounds)
            assert " ".join(f"{int(w):08x}" for w in found) == wanted


def place(i, j):
    """(counter words 0 and 1, word, half) of a pair, by the definition."""
    return j // 16 * 4 + j % 8 // 2, i // 16 * 8 + i % 8, i // 8 % 2 * 2 + j // 8 % 2, j % 2


def test_no_two_pairs_share_a_number():
    places = {place(i, j) for i in range(64) for j in range(64)}
    assert len(places) == 64 * 64
    calls = {where[:2] for where in places}
    assert len(calls) == 64 * 64 // 8  # each serves eight pairs


def test_mask_is_made_of_those_numbers():
    rng, p = torch.tensor([0x0123456789ABCDEF, 42]), 0.3
    mask = philox.keep_mask(rng, p, (2, 3, 37, 53))
    i, j = (t.flatten() for t in torch.meshgrid(torch.arange(37), torch.arange(53), indexing="ij"))
    c0, c1, word, half = place(i, j)
    for stream in range(6):
        counter = c0, c1, torch.full_like(i, stream), torch.full_like(i, 42)
        key = torch.tensor(0x89ABCDEF), torch.tensor(0x01234567)
        words = torch.stack(philox.philox(counter, key))
        numbers = words.gather(0, word[None])[0] >> 16 * half & 0xFFFF
        assert torch.equal(mask.flatten(0, 1)[stream].flatten(), numbers >= philox.threshold(p))


def test_threshold_and_factor():
    """The mean is kept to the last bit, the rate within half of a number's share."""
    assert philox.threshold(0.1) == 6554 and philox.threshold(0.5) == 32768 and philox.kept_factor(0.5) == 2.0
    for p in (0.0, 1e-9, 2**-17, 2**-16, 0.1, 1 / 3, 0.9, 1 - 2**-17, 1 - 1e-12):
        threshold = philox.threshold(p)
        assert 0 <= threshold <= 65535 and abs(threshold / 65536 - min(p, 1 - 2**-16)) <= 2**-17
        assert philox.kept_factor(p) * (1 - threshold / 65536) == pytest.approx(1.0, rel=1e-15)


def test_numbers_of_neighbours_are_independent():
    """At p = 0.1: the share of what is dropped, and what a pair has to do with others of its call."""
    shape = 1, 4, 512, 512
    dropped = ~philox.keep_mask(torch.tensor([77, 5]), 0.1, shape)[0]
    share = 6554 / 65536
    noise = dropped.double() - share
    deviation = (share * (1 - share)) ** 0.5
    assert noise.mean().abs() < 5 * deviation / noise.numel() ** 0.5
    for rows, keys in ((0, 1), (0, 8), (8, 0), (0, 9), (8, 1), (8, 8), (1, 0), (0, 2), (16, 0), (0, 16)):
        products = noise[:, : 512 - rows, : 512 - keys] * noise[:, rows:, keys:]
        assert products.mean().abs() < 5 * deviation**2 / products.numel() ** 0.5, (rows, keys)
    between = noise[0] * noise[1]  # of two heads
    assert between.mean().abs() < 5 * deviation**2 / between.numel() ** 0.5


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


CPU = torch.device("cpu")


def test_pooled_seeds_follow_the_generators_state():
    made = []
    pools = philox.SeedPools(lambda key, device: made.append(key) or philox.make_pool(key, CPU))
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


def test_seeds_of_a_pool_differ_and_so_do_what_they_drop():
    pool = philox.make_pool(philox.mixed(5, 3), CPU)
    assert pool.shape == (philox.SEEDS, 2) and pool.is_contiguous() and len(pool.flatten().unique()) == pool.numel()
    sizes, p = (2, 2, 128, 128), 0.3
    kept = torch.stack([philox.keep_mask(seed, p, sizes) for seed in pool[:9]]).double() - (1 - p)
    count = kept[0].numel()
    for step in (1, 2, 8):  # each pair's product has variance (p (1 - p))^2
        together = (kept[step:] * kept[:-step]).flatten(1).sum(1) / (count**0.5 * p * (1 - p))
        assert together.abs().max() < 5, step
    assert ((kept.flatten(1).sum(1) / (count * p * (1 - p)) ** 0.5).abs() < 5).all()


def test_keys_of_pools_differ():
    keys = {philox.mixed(seed, block) for seed in range(64) for block in range(64)}
    assert len(keys) == 64 * 64 and all(0 <= key < 2**62 for key in keys)
    assert philox.mixed(2**64 - 1, 0) != philox.mixed(0, 0)
