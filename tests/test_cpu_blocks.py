"""The native CPU kernel over several blocks of keys and queries, as it cuts them, and few queries beside keys in place.

Runs of keys that no row of a group sees are left out of a block; every instruction set cuts and packs in its own way.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from cpu_cases import (
    DTYPES,
    Case,
    Sizes,
    check_forward,
    coins,
    expect,
    lay_out,
    lengths,
    make,
    random,
    run_forward,
    wanted_of,
)
from torch import Tensor

from sdpa.dense import visible
from sdpa.kernels.cpu import flash, library
from sdpa.problem import AttentionInputs, Results, Tile
from sdpa.testing import check_inputs, compare

if library.load_error() is not None:
    pytest.skip(library.load_error(), allow_module_level=True)

# Two blocks of 768 queries by four of 384 keys, neither filled; of AMX one of 1024 by three of 512. Values of 24 are a
# multiple of no vector but those of 32 bytes and less, so some instruction sets read them in place and some pack them.
LONG = Sizes(1, 2, 1, 805, 1223, 20, 24)
# Four heads of a key/value head are one task.
SHORT = Sizes(2, 4, 1, 23, 813, 33, 32)


def runs(rows: int, columns: int, length: int = 90) -> Tensor:
    """Booleans [rows, columns] in runs, longer than what is skipped of a block; each seventh row has none set."""
    starts = torch.rand(rows // 50 + 1, columns // length + 1) < 0.4
    seen = starts.repeat_interleave(50, 0).repeat_interleave(length, 1)[:rows, :columns]
    return seen & (torch.arange(rows) % 7 != 3)[:, None]


def takes_turns(B: int, length: int, run: int) -> Tensor:
    """Ids [B, length] of three documents whose parts lie between those of the others."""
    return (torch.arange(length) // run % 3).int().expand(B, -1).contiguous()


FEATURES = {
    "plain": lambda s: {},
    "causal": lambda s: {"right": 0},
    "causal_bottom_right": lambda s: {"right": 0, "bottom_right": True},
    "window": lambda s: {"left": 500, "right": 130},
    "narrow_window": lambda s: {"left": 20, "right": 0, "bottom_right": True},
    "lengths": lambda s: {
        "k_lengths": lengths(*[777] * s.B), "q_lengths": lengths(*[s.M - 6] * s.B), "right": 0, "bottom_right": True,
    },
    "segments": lambda s: {"q_segments": takes_turns(s.B, s.M, 150), "k_segments": takes_turns(s.B, s.N, 97)},
    "prefix_window": lambda s: {"left": 50, "right": 0, "bottom_right": True, "prefix": lengths(*[205] * s.B)},
    "allowed": lambda s: {"allowed": runs(s.M, s.N)[None, None]},
    "allowed_of_heads": lambda s: {"allowed": runs(s.H, s.N)[None, :, None], "right": 300},
    "allowed_scattered": lambda s: {"allowed": coins(1, 1, s.M, s.N), "left": 400},
    "sinks": lambda s: {
        "sinks": random(s.H).masked_fill(torch.arange(s.H) == 1, -torch.inf), "allowed": runs(s.M, s.N)[None, None],
    },
    "bias_alibi_softcap": lambda s: {
        "bias": random(1, s.H, s.M, s.N).masked_fill(~runs(s.M, s.N), -torch.inf),
        "alibi": torch.rand(1, s.H) / 50, "softcap": 3.0, "right": 100,
    },
    "dropout": lambda s: {"dropout_p": 0.3, "rng": torch.tensor([9, 2**33 + 1]), "left": 450, "right": 77},
}  # fmt: skip


@cache
def inputs_and_wanted(sizes: Sizes, name: str, dtype: torch.dtype) -> tuple[AttentionInputs, tuple[Results, Results]]:
    """Made once for all instruction sets: the reference takes longer than they do."""
    torch.manual_seed(4)
    inputs = make(Case(sizes, FEATURES[name](sizes)), dtype)
    return inputs, wanted_of(inputs)


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [LONG, SHORT], ids=["long", "heads_together"])
def test_features(sizes, dtype, name, isa):
    inputs, wanted = inputs_and_wanted(sizes, name, dtype)
    check_forward(inputs, wanted=wanted)


@pytest.mark.parametrize("name", ["window", "sinks"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_other_dtypes(dtype, name, isa):
    inputs, wanted = inputs_and_wanted(LONG, name, dtype)
    check_forward(inputs, wanted=wanted)


@pytest.mark.parametrize("N", [127, 383, 384, 385, 511, 512, 513, 769])
@pytest.mark.parametrize("M", [767, 769, 1023, 1025])
def test_sizes_around_blocks(isa, M, N):
    for dtype in (torch.float32, torch.bfloat16):
        check_forward(make(Case(Sizes(1, 1, 1, M, N, 8, 8), {"right": 60, "left": 300}), dtype))


# Rows of a group, and the one query that is left over, which stands beside those of other heads.
@pytest.mark.parametrize("tile", [*flash.TILES, Tile(7, 16), Tile(1, 1), Tile(96, 400), Tile(33, 48)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tiles_of_several_heads(isa, tile, dtype):
    sizes = Sizes(1, 8, 2, 97, 450, 33, 16)
    for features in ({"left": 90, "right": 170}, {"allowed": runs(1, sizes.N, 70)[None, None], "sinks": random(8)}):
        check_forward(make(Case(sizes, features), dtype), tile)


# Queries and heads whose product is what keys are read in place for, and one more.
FEW = ((1, 1), (1, 2), (1, 3), (1, 5), (1, 6), (1, 7), (1, 8), (2, 3), (2, 4), (3, 1), (4, 2), (5, 1), (7, 1), (8, 1))
HEAD_SIZES = ((1, 16), (31, 32), (33, 64), (64, 7), (95, 128), (98, 48))


@pytest.mark.parametrize(("M", "G"), [*FEW, (9, 1), (1, 9)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_few_rows(isa, M, G, dtype):
    for D, Dv in HEAD_SIZES:
        check_forward(make(Case(Sizes(1, 2 * G, 2, M, 277, D, Dv)), dtype))


@pytest.mark.parametrize("M", [1, 4])
@pytest.mark.parametrize("name", [name for name in FEATURES if name != "lengths"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_features_of_few_rows(isa, M, name, dtype):
    sizes = Sizes(2, 4, 2, M, 901, 33, 16)
    torch.manual_seed(5)
    check_forward(make(Case(sizes, FEATURES[name](sizes)), dtype))


@pytest.mark.parametrize("kind", ["bmhd", "strided", "unaligned"])
@pytest.mark.parametrize("M", [1, 4, 23])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_layouts_of_runs(isa, kind, M, dtype):
    sizes = Sizes(2, 4, 2, M, 901, 31, 16)
    inputs = make(Case(sizes, {"allowed": runs(1, sizes.N)[None, None], "k_lengths": lengths(500, 873)}), dtype)
    check_forward(inputs._replace(**{n: lay_out(getattr(inputs, n), kind) for n in "qkv"}))


HOLES = {
    "prefix_window": lambda s: {"left": 40, "right": 0, "bottom_right": True, "prefix": lengths(100, 205)},
    "segments": lambda s: {
        "q_segments": torch.ones(1, s.M, dtype=torch.int32), "k_segments": takes_turns(1, s.N, 101),
    },
    "scattered_segments": lambda s: {
        "q_segments": torch.ones(1, s.M, dtype=torch.int32), "k_segments": (torch.arange(s.N) % 5 % 2)[None].int(),
    },
    "lengths": lambda s: {"k_lengths": lengths(389, 701)},
}  # fmt: skip


@pytest.mark.parametrize("name", HOLES)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("M", [1, 4, 23])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_hidden_values_of_runs_do_not_leak(isa, name, poison, M, dtype):
    for Dv in (16, 9):
        sizes = Sizes(2, 4, 2, M, 901, 33, Dv)
        clean = make(Case(sizes, HOLES[name](sizes)), dtype)
        hidden = ~visible(clean).expand(sizes.B, 1, M, sizes.N).any(2).unsqueeze(-1)  # [B, 1, N, 1]
        assert hidden.any() and not hidden.all()
        found = run_forward(
            clean._replace(k=clean.k.masked_fill(hidden, poison), v=clean.v.masked_fill(hidden, poison))
        )
        exact, plain = wanted_of(clean)
        expect([compare(n, *r, sizes.N) for n, *r in zip(Results._fields, found, exact, plain, strict=True)])


@pytest.mark.parametrize("M", [1, 23])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_visible_nan_stays_through_later_blocks(isa, M, dtype):
    """In the first block of keys; the maximum of a later one is a number again."""
    inputs = make(Case(Sizes(1, 2, 1, M, 901, 33, 16)), dtype)
    for name in "kv":
        poisoned = getattr(inputs, name).clone()
        poisoned[:, :, 5] = torch.nan
        out, lse = run_forward(inputs._replace(**{name: poisoned}))
        assert out.isnan().all()
        assert name == "v" or lse.isnan().all()


@pytest.mark.parametrize("M", [1, 23])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_maximum_that_rises_from_block_to_block(isa, M, dtype):
    """By more than an exponential can hold, and back: earlier blocks count for nothing, then later ones."""
    sizes = Sizes(1, 2, 1, M, 901, 16, 16)
    inputs = make(Case(sizes), dtype)
    rising = torch.arange(sizes.N)[:, None].to(dtype) / 10
    for steps in (rising, rising.flip(0)):
        steep = inputs._replace(q=inputs.q.abs() + 0.5, k=inputs.k + steps)
        expect(check_inputs("cpu_flash", steep, torch.zeros(1, 2, M, 16, dtype=dtype))[:2])


@pytest.mark.parametrize("value", [-1e4, 0.0, 1e4])
@pytest.mark.parametrize("bias", [False, True])
def test_sinks_of_any_size(isa, value, bias):
    """Rows that see nothing have the sink as their log-sum-exp, and one that is large leaves nothing to keys."""
    features: dict[str, object] = {"sinks": torch.full((4,), value), "k_lengths": lengths(0, 800)}
    if bias:
        features["bias"] = torch.zeros(1, 1, 1, 1)
    inputs = make(Case(Sizes(M=13, N=901), features), torch.float32)
    check_forward(inputs)
    out, lse = run_forward(inputs)
    assert not out[0].any()
    torch.testing.assert_close(lse[0], torch.full_like(lse[0], value), rtol=2.0**-22, atol=0.0)


@pytest.mark.parametrize("M", [49, 769])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_threads_change_nothing_where_heads_share_keys(isa, two_threads, M, dtype):
    """The last query is alone in its block for some number of threads, and beside other heads' then."""
    inputs = make(Case(Sizes(1, 8, 2, M, 450, 32, 16), {"right": 0, "bottom_right": True}), dtype)
    together = run_forward(inputs)
    torch.set_num_threads(1)
    alone = run_forward(inputs)
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize("D", [64, 128, 129, 256, 1000])
def test_scores_are_summed_in_short_chains(isa, D):
    """Against products summed one after the other over the head and nothing else inexact."""
    torch.manual_seed(D)
    q, k, v = random(2, 3, 64, D), random(2, 3, 128, D), random(2, 3, 128, D)
    exact, chain = q.double() @ k.double().mT, torch.zeros(2, 3, 64, 128)
    for d in range(D):
        chain += q[..., d, None] * k[..., None, :, d]
    exact, chained = (torch.softmax(scores.double() / D**0.5, -1) @ v.double() for scores in (exact, chain))
    found = run_forward(AttentionInputs(q, k, v, D**-0.5)).out
    limit = 1.05 if D == 64 else 0.8  # in one chain 1.0 to 1.2
    assert (found - exact).norm() <= limit * (chained - exact).norm()
