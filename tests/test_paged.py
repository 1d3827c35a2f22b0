"""paged_attention against the plain function on the keys that its table names."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

import sdpa
from helpers import CLOSE, OPCHECKS, WIDE, draw, int32
from sdpa import Mask, sequences
from sdpa.dispatch.catalog import ALL_DTYPES, by_name
from sdpa.dispatch.select import clear_caches
from sdpa.inputs import Options
from sdpa.operators import FORWARD, call_forward, forward_arguments
from sdpa.problem import AttentionProblem
from sdpa.reference import attention as reference
from sdpa.sequences import Pages, build_paged

plain, paged = sdpa.scaled_dot_product_attention, sdpa.paged_attention
NAN = math.nan
dtypes = pytest.mark.parametrize("dtype", sorted(ALL_DTYPES, key=str), ids=lambda d: str(d).removeprefix("torch."))


@pytest.fixture(params=["gathered", "paged", "few"])
def form(request, monkeypatch):
    """How the front door passes a cache on: its keys in order where no fused kernel takes pages, else as it is.

    On a CPU cpu_flash takes few queries; math answers where many are passed on. "few" is what a CPU does."""
    if request.param == "gathered":
        monkeypatch.setattr(sequences, "SERVED", {**sequences.SERVED, "paged": frozenset()})
    if request.param == "paged":
        as_it_is(monkeypatch)
    clear_caches()
    yield
    clear_caches()  # of calls that were made where pages are passed on otherwise


def as_it_is(monkeypatch):
    monkeypatch.setattr(sequences, "keeps_pages", lambda inputs: True)
    clear_caches()  # of calls that were made where pages are put in order


SLOPES, SINKS = draw(4, dtype=torch.float32).abs(), draw(4)

# Three sequences of 5, 0 and 12 keys in pages of 4; the table has room for 3 pages each.
PAGE_SIZE, LENGTHS_PAGED = 4, int32(5, 0, 12)
TABLE = int32(6, 1, -1, -7, 2**31 - 1, 99, 0, 3, 5).view(3, 3)


def page_operands(M=2, H=4, Hkv=4, D=6, Dv=5, dtype=WIDE, spoilt=False):
    """(query, key_cache, value_cache, Pages), and keys and values (B, Hkv, N, .) in order.

    `spoilt` puts NaN wherever no valid key is.
    """
    pages = 8
    caches = [draw(pages, PAGE_SIZE, Hkv, size, dtype=dtype, seed=i) for i, size in enumerate((D, Dv))]
    ordered = []
    for i, cache in enumerate(caches):
        rows = cache[TABLE.clamp(0, pages - 1).long()].flatten(1, 2)  # [B, N, Hkv, .]
        ordered.append(rows.transpose(1, 2).clone())
        if spoilt:
            valid = torch.zeros(pages, PAGE_SIZE, dtype=torch.bool)
            for b, length in enumerate(LENGTHS_PAGED.tolist()):
                for j in range(length):
                    valid[TABLE[b, j // PAGE_SIZE], j % PAGE_SIZE] = True
            assert not valid.all()
            caches[i] = cache.masked_fill(~valid[..., None, None], NAN)
    return (draw(3, M, H, D, dtype=dtype, seed=9), *caches, Pages(TABLE, LENGTHS_PAGED)), ordered


PAGED_CASES = {
    "full": ({}, Mask()),
    "causal": ({"is_causal": True}, Mask(causal=True, align="bottom_right")),
    "window": ({"attn_mask": Mask(window=(3, 0), align="bottom_right")}, None),
    "prefix": ({"attn_mask": Mask(causal=True, align="bottom_right", prefix=int32(1, 2, 3))}, None),
    "alibi": ({"attn_mask": Mask(alibi=SLOPES, causal=True, align="bottom_right")}, None),
    "query_lengths": ({"attn_mask": Mask(causal=True, align="bottom_right", query_lengths=int32(1, 0, 2))}, None),
    "softcap": ({"softcap": 2.0}, Mask()),
    "scale": ({"scale": 0.7}, Mask()),
    "sinks": ({"sinks": SINKS}, Mask()),
}


@pytest.mark.parametrize("M", [1, 2, 7], ids=lambda m: f"M{m}")
@pytest.mark.parametrize("Hkv", [4, 2, 1], ids=lambda h: f"Hkv{h}")
@pytest.mark.parametrize("name", PAGED_CASES)
def test_paged_keys_are_those_of_the_table(name, Hkv, M, form):
    options, mask = PAGED_CASES[name]
    mask = mask or options["attn_mask"]
    if mask.query_lengths is not None and M == 1:
        mask = mask.replace(query_lengths=int32(1, 0, 1))
        options = {"attn_mask": mask}
    (query, keys, values, pages), (k, v) = page_operands(M=M, Hkv=Hkv)
    got = paged(query, keys, values, *pages[:2], enable_gqa=True, return_lse=True, **options)
    numbers = {name: value for name, value in options.items() if name not in ("attn_mask", "is_causal")}
    mask = mask.replace(lengths=LENGTHS_PAGED)
    wanted = plain(query.transpose(1, 2), k, v, mask, enable_gqa=True, return_lse=True, **numbers)
    assert got[0].shape == (3, M, 4, 5) and got[0].is_contiguous() and got[1].shape == (3, 4, M)
    assert torch.allclose(got[0], wanted[0].transpose(1, 2), **CLOSE)
    assert torch.allclose(got[1], wanted[1], **CLOSE)


# Of the four sequences, of 5, 0, 12 and 3 keys: 3 queries, 2 without a key, none, and 4, which are more than the keys.
# One row is before them, and two are behind.
LENGTHS_PACKED, CU_PAGED, MOST, PACKED_ROWS = int32(5, 0, 12, 3), int32(1, 4, 6, 6, 10), 4, 12
TABLE_PACKED = torch.cat([TABLE, int32(2, -1, 4).view(1, 3)])
PACKED = {"cu_q": CU_PAGED, "max_q": MOST}
PACKED_CASES = {
    **{name: options for name, (options, _) in PAGED_CASES.items()},
    "causal_bias": {"attn_mask": torch.nn.attention.bias.causal_lower_right(MOST, 12)},
    "prefix": {"attn_mask": Mask(causal=True, align="bottom_right", prefix=int32(1, 2, 3, 1))},
    "query_lengths": {"attn_mask": Mask(causal=True, align="bottom_right", query_lengths=int32(1, 2, 0, 4))},
}


def packed_operands(**given):
    """(query, key_cache, value_cache, block_table, lengths), with NaN in pages that no sequence has."""
    (_, *caches, _), _ = page_operands(**given)
    for cache in caches:
        cache[7] = NAN
    return draw(PACKED_ROWS, 4, 6, seed=9, **given), *caches, TABLE_PACKED, LENGTHS_PACKED


def alone(query, caches, pages, b, **options):
    """Sequence b of packed ones without the others."""
    begin, end = CU_PAGED[b : b + 2].tolist()
    mask = options.get("attn_mask")
    if isinstance(mask, Mask):
        own = {name: getattr(mask, name) for name in ("prefix", "query_lengths")}
        options["attn_mask"] = mask.replace(**{name: t[b : b + 1] for name, t in own.items() if t is not None})
    return paged(query[None, begin:end], *caches, *(t[b : b + 1] for t in pages), **options)


@pytest.mark.parametrize("most", [MOST, MOST + 9], ids=["most", "more"])
@pytest.mark.parametrize("name", PACKED_CASES)
def test_packed_queries_are_those_of_each_sequence_alone(name, most, form):
    query, *caches, table, lengths = packed_operands()
    options = {**PACKED_CASES[name], "return_lse": True}
    for _ in range(2):  # as a first call, and by what it came to
        out, lse = paged(query, *caches, table, lengths, cu_q=CU_PAGED, max_q=most, **options)
        assert out.shape == (PACKED_ROWS, 4, 5) and lse.shape == (4, PACKED_ROWS) and lse.is_contiguous()
        for b, (begin, end) in enumerate(pairwise(CU_PAGED.tolist())):
            if begin < end:
                own = PAGED_CASES["causal"][0] | {"return_lse": True} if name == "causal_bias" else options
                wanted = alone(query, caches, (table, lengths), b, **own)
                assert torch.allclose(out[begin:end], wanted[0][0], **CLOSE), b
                assert torch.allclose(lse[:, begin:end], wanted[1][0], **CLOSE), b
        outside = torch.ones(PACKED_ROWS, dtype=torch.bool)
        outside[CU_PAGED[0] : CU_PAGED[-1]] = False
        assert not out[outside].any() and (lse[:, outside] == -math.inf).all()


def test_a_sequence_of_packed_queries_does_not_see_the_others(form):
    """NaN in the rows around one: also where these are copied beside its own."""
    query, *rest = packed_operands()
    wanted = paged(query, *rest, is_causal=True, **PACKED)
    for begin, end in pairwise(CU_PAGED.tolist()):
        spoilt = torch.full_like(query, NAN)
        spoilt[begin:end] = query[begin:end]
        assert torch.equal(paged(spoilt, *rest, is_causal=True, **PACKED)[begin:end], wanted[begin:end])


def test_packed_queries_in_graphs_and_transforms(form):
    query, *rest = packed_operands()

    def function(query, cu_q, max_q):
        return paged(query, *rest, is_causal=True, cu_q=cu_q, max_q=max_q)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    for cu_q, most in ((CU_PAGED, MOST), (int32(0, 1, 1, 7, 12), 6)):
        assert torch.allclose(compiled(query, cu_q, most), function(query, cu_q, most), **CLOSE)
    torch._dynamo.reset()
    two = torch.stack([query, query + 1])
    batched = torch.vmap(lambda query: function(query, CU_PAGED, MOST))(two)
    assert all(torch.allclose(a, function(b, CU_PAGED, MOST), **CLOSE) for a, b in zip(batched, two, strict=True))


def test_packed_queries_are_one_call_for_who_intercepts():
    """torch.fx, and a mode of functions: with the arguments that the user gave."""
    query, *rest = packed_operands()
    traced = torch.fx.symbolic_trace(lambda query: paged(query, *rest, **PACKED))
    (node,) = [node for node in traced.graph.nodes if node.op == "call_function"]
    assert node.target is paged and {**node.kwargs}.keys() >= PACKED.keys()
    assert torch.equal(traced(query), paged(query, *rest, **PACKED))


def test_packed_queries_drop_the_weights_that_padded_ones_would():
    query, *rest = packed_operands()
    torch.manual_seed(5)
    got = paged(query, *rest, dropout_p=0.4, **PACKED)
    padded = torch.zeros(4, MOST, 4, 6, dtype=query.dtype)
    ends = CU_PAGED.tolist()
    for b, (begin, end) in enumerate(pairwise(ends)):
        padded[b, : end - begin] = query[begin:end]
    torch.manual_seed(5)
    wanted = paged(padded, *rest, Mask(query_lengths=CU_PAGED.diff()), 0.4)
    for b, (begin, end) in enumerate(pairwise(ends)):
        assert torch.allclose(got[begin:end], wanted[b, : end - begin], **CLOSE)


def test_packed_queries_under_autocast():
    query, keys, values, *pages = packed_operands(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = paged(query, keys, values, *pages, **PACKED)
    assert torch.equal(out, paged(*(t.bfloat16() for t in (query, keys, values)), *pages, **PACKED))


def test_no_packed_queries():
    query, *rest = packed_operands()
    none = {"cu_q": int32(0, 0, 0, 0, 0), "max_q": 5, "return_lse": True}
    out, lse = paged(query[:0], *rest, **none)
    assert out.shape == (0, 4, 5) and lse.shape == (4, 0)
    out, lse = paged(query, *rest, **none)
    assert not out.any() and (lse == -math.inf).all()
    assert not paged(query, *rest, cu_q=CU_PAGED, max_q=0).any()


PACKED_MISTAKES = {
    "no max_q": ({"max_q": None}, "Expected cu_q and max_q together, but got cu_q alone"),
    "no cu_q": ({"cu_q": None}, "Expected cu_q and max_q together, but got max_q alone"),
    "batch": ({"query": draw(4, 3, 4, 6)}, r"Expected query to have shape \(T, H, D\), but got \(4, 3, 4, 6\)"),
    "heads": ({"query": draw(PACKED_ROWS, 1, 6)}, r"Expected query of shape \(T, H, D\) to have as many heads"),
    "head size": ({"query": draw(PACKED_ROWS, 4, 7)}, r"query.shape: \(12, 4, 7\)"),
    "sequences": ({"cu_q": int32(0, 7)}, r"Expected cu_q to have shape \(5,\), but got \(2,\)"),
    "table": (
        {"block_table": int32(1)},
        r"Expected block_table to have shape \(B, pages per sequence\), but got \(1,\)",
    ),
    "dtype": ({"cu_q": CU_PAGED.long()}, "Expected cu_q to be int32"),
    "no tensor": ({"cu_q": [0, 3, 3, 5]}, "argument 'cu_q' must be Tensor, not list"),
    "negative": ({"max_q": -1}, "Expected max_q to be 0 or more, but got -1"),
    "no count": ({"max_q": "3"}, "argument 'max_q' must be int, not str"),
    "flag": ({"is_causal": 1}, "argument 'is_causal' must be bool, not int"),
    "two masks": ({"attn_mask": Mask(), "is_causal": True}, "Explicit attn_mask should not be set when is_causal=True"),
    "no mask": ({"attn_mask": 3}, "attn_mask must be a sdpa.Mask or None, not int"),
    "top left": ({"attn_mask": Mask(causal=True)}, "Expected a mask aligned to the bottom right"),
}


@pytest.mark.parametrize("name", PACKED_MISTAKES)
def test_wrong_packed_queries(name):
    given, told = PACKED_MISTAKES[name]
    names = ("query", "key_cache", "value_cache", "block_table", "lengths")
    with pytest.raises((RuntimeError, TypeError), match=told):
        paged(**{**dict(zip(names, packed_operands(), strict=True)), **PACKED, **given})


@pytest.mark.parametrize("Hkv", [4, 1], ids=lambda h: f"Hkv{h}")
def test_dropout_is_that_of_the_keys_in_order(Hkv, form):
    (query, keys, values, pages), (k, v) = page_operands(M=3, Hkv=Hkv, spoilt=True)
    options = {"dropout_p": 0.4, "enable_gqa": True}
    mask = Mask(causal=True, align="bottom_right", lengths=LENGTHS_PAGED)
    torch.manual_seed(5)
    got = paged(query, keys, values, *pages[:2], is_causal=True, **options)
    torch.manual_seed(5)
    wanted = plain(query.transpose(1, 2), k, v, mask, **options).transpose(1, 2)
    assert torch.allclose(got, wanted, **CLOSE)
    assert not torch.allclose(got, paged(query, keys, values, *pages[:2], is_causal=True, enable_gqa=True), **CLOSE)
    assert not paged(query, keys, values, *pages[:2], dropout_p=1.0, enable_gqa=True).any()


@dtypes
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_pages_beyond_the_lengths_may_be_nan(causal, dtype, form):
    results = []
    for spoilt in (False, True):
        (query, keys, values, pages), _ = page_operands(Hkv=2, dtype=dtype, spoilt=spoilt)
        results.append(paged(query, keys, values, *pages[:2], is_causal=causal, enable_gqa=True, return_lse=True))
    for clean, got in zip(*results, strict=True):
        # A kernel may compute in a wider type where it finds NaN: one rounding of numbers up to 8.
        assert torch.allclose(clean, got, rtol=0, atol=8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16])
def test_lengths_of_fewer_bits_than_the_cache(dtype):
    page_size = 20000 if dtype == torch.int16 else 50
    query, keys, values = draw(2, 1, 2, 6), draw(4, page_size, 2, 6), draw(4, page_size, 2, 5)
    table = torch.arange(8, dtype=torch.int32).reshape(2, 4) % 4
    found, expected = (paged(query, keys, values, table, int32(100, 7).to(kind)) for kind in (dtype, torch.int32))
    assert torch.equal(found, expected)
    with pytest.raises(RuntimeError, match=r"lengths to be integers, but got torch.uint16"):
        paged(query, keys, values, table, int32(100, 7).to(torch.uint16))


def test_reference_of_a_paged_cache_is_that_of_its_keys(form):
    (query, keys, values, pages), (k, v) = page_operands(spoilt=True)
    found = reference(build_paged(query, keys, values, pages, Options(is_causal=True)))
    mask = Mask(causal=True, align="bottom_right", lengths=LENGTHS_PAGED)
    wanted = plain(query.transpose(1, 2), k, v, mask)
    assert torch.allclose(found.out, wanted, **CLOSE)


@pytest.mark.parametrize("pages,page_size,per_sequence", [(0, 4, 3), (5, 4, 0), (5, 0, 3)], ids=str)
def test_cache_without_keys(pages, page_size, per_sequence, form):
    query, keys, values = draw(2, 1, 4, 6), draw(pages, page_size, 4, 6), draw(pages, page_size, 4, 5)
    table = torch.zeros(2, per_sequence, dtype=torch.int32)
    for sinks in (None, SINKS):
        out, lse = paged(query, keys, values, table, int32(0, 0), sinks=sinks, return_lse=True)
        assert out.shape == (2, 1, 4, 5) and not out.any()
        assert torch.equal(lse, torch.full((2, 4, 1), -math.inf, dtype=WIDE) if sinks is None else lse)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_paged_in_one_graph(form):
    torch._dynamo.reset()
    compiled = torch.compile(paged, backend="aot_eager", fullgraph=True, dynamic=True)
    for M in (2, 5):
        (query, keys, values, pages), _ = page_operands(M=M)
        arguments = (query, keys, values, *pages[:2], None, 0.0, True)
        assert torch.allclose(compiled(*arguments), paged(*arguments), **CLOSE)
    torch._dynamo.reset()


def test_paged_has_no_gradient_but_a_forward_mode(form):
    (query, keys, values, pages), _ = page_operands()
    with pytest.raises(RuntimeError, match=r"Expected no input of paged_attention to require a gradient.*query"):
        paged(query.requires_grad_(), keys, values, *pages[:2])
    with torch.no_grad():
        assert paged(query, keys, values, *pages[:2]).shape == (3, 2, 4, 5)
    query = query.detach()
    tangent = draw(*query.shape, seed=3)
    _, moved = torch.func.jvp(lambda x: paged(x, keys, values, *pages[:2], is_causal=True), (query,), (tangent,))
    step = 1e-6
    ahead, behind = (paged(query + s * tangent, keys, values, *pages[:2], is_causal=True) for s in (step, -step))
    assert torch.allclose(moved, (ahead - behind) / (2 * step), rtol=0, atol=1e-8)  # error of step^2 and eps / step


def test_backward_of_a_paged_cache_says_that_there_is_none(monkeypatch):
    as_it_is(monkeypatch)
    query, keys, values, pages = page_operands()[0]
    inputs = build_paged(query, keys, values, pages, Options())
    out = call_forward(inputs._replace(q=inputs.q.requires_grad_()), False, "")[0]
    with pytest.raises(RuntimeError, match="attention over a paged cache has none"):
        out.sum().backward()


def test_form_and_features(form, request):
    query, keys, values, pages = page_operands()[0]
    inputs = build_paged(query, keys, values, pages, Options())
    as_is = request.node.callspec.params["form"] == "paged"
    assert (sequences.served_form(inputs).block_table is not None) == as_is
    paged(query, keys, values, *pages[:2])
    assert sdpa.last_choice().kernel.name == "cpu_flash"
    problem = AttentionProblem.of(inputs)
    assert (problem.B, problem.M, problem.N) == (3, 2, 12) and problem.features == {"paged", "k_lengths"}
    assert not by_name()["cpu_flash"].why_not(problem) and not by_name()["math"].why_not(problem)
    many = problem._replace(M=9)
    told = ["reads pages for at most 8 queries of heads that share keys, got 9"]
    assert by_name()["cpu_flash"].why_not(many) == told
    assert by_name()["cpu_flash"].why_not(problem._replace(direction="backward")) == [
        "reads a paged cache in the forward only"
    ]


@pytest.mark.parametrize("short", [True, False])
@pytest.mark.parametrize("page_size", [1, 3, 16, 24, 64])
@pytest.mark.parametrize("order", ["scattered", "in order", "backwards"])
@dtypes
def test_pages_of_any_size_in_any_order(dtype, order, page_size, short, monkeypatch):
    """Few queries over 200 keys, which are read where they lie, short pages too where they are not copied: pages that
    follow one another as one piece, and windows and prefixes that begin inside of a page."""
    if short:
        monkeypatch.setattr(sequences, "SHORT_PAGES", 1)
        clear_caches()
    N, B, Hkv, D = 200, 2, 2, 20
    places = -(-N // page_size)
    number = torch.arange(B * places)
    number = {"scattered": number[torch.randperm(B * places)], "in order": number, "backwards": number.flip(0)}[order]
    table = number.to(torch.int32).view(B, places)
    caches = [draw(B * places, page_size, Hkv, D, dtype=dtype, seed=seed) for seed in (1, 2)]
    k, v = (cache[table.long()].reshape(B, -1, Hkv, D).transpose(1, 2) for cache in caches)
    lengths = int32(N, 77)
    for M, mask in ((1, Mask()), (2, Mask(causal=True, align="bottom_right", window=(30, 0))), (4, Mask(prefix=5))):
        query = draw(B, M, 4, D, dtype=dtype, seed=3)
        out = paged(query, *caches, table, lengths, mask, enable_gqa=True)
        assert sdpa.last_choice().kernel.name == "cpu_flash"
        assert ("paged" in sdpa.last_choice().problem.features) == (page_size >= sequences.SHORT_PAGES)
        expected = plain(query.transpose(1, 2), k, v, mask & Mask(lengths=lengths), enable_gqa=True)
        torch.testing.assert_close(out, expected.transpose(1, 2))
    clear_caches()


def test_views_are_passed_without_copies():
    query, keys, values, pages = page_operands()[0]
    inputs = build_paged(query, keys, values, pages, Options())
    assert [t.data_ptr() for t in inputs[:3]] == [t.data_ptr() for t in (query, keys, values)]


def test_nothing_is_read_on_the_host(form):
    """A fake tensor has no values to read: whatever asks for one raises."""
    mode = FakeTensorMode()
    *tensors, pages = page_operands()[0]
    fake = [mode.from_tensor(t) for t in (*tensors, *pages[:2])]
    with mode:
        assert paged(*fake, is_causal=True).shape == (3, 2, 4, 5)


@pytest.mark.parametrize("needs_lse", [False, True], ids=["out", "lse"])
def test_opcheck(needs_lse):
    inputs = build_paged(*page_operands(dtype=torch.float32)[0], Options())
    torch.library.opcheck(FORWARD, forward_arguments(inputs, needs_lse, ""), test_utils=OPCHECKS)


def test_autocast():
    *tensors, pages = page_operands(dtype=torch.float32)[0]
    with torch.autocast("cpu", torch.bfloat16):
        out = paged(*tensors, *pages[:2])
    assert torch.equal(out, paged(*(t.bfloat16() for t in tensors), *pages[:2]))


def test_torch_function_takes_the_whole_call():
    seen = []

    class Recorder(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(getattr(function, "__name__", ""))
            return function(*args, **(kwargs or {}))

    *tensors, pages = page_operands()[0]
    with Recorder():
        paged(*tensors, *pages[:2])
    assert seen[0] == "paged_attention"


def call_paged(**changes):
    (query, keys, values, pages), _ = page_operands()
    arguments = {"query": query, "key_cache": keys, "value_cache": values, **pages._asdict()}
    return paged(**arguments | changes)


PAGED_ERRORS = {
    "kind": ({"key_cache": None}, TypeError, "paged_attention(): argument 'key_cache' must be Tensor, not NoneType"),
    "query_kind": ({"query": [1.0]}, TypeError, "paged_attention(): argument 'query' must be Tensor, not list"),
    "dtypes": (
        {"value_cache": draw(8, 4, 4, 5, dtype=torch.float32)},
        RuntimeError,
        "Expected query, key_cache, and value_cache to have the same dtype, but got query.dtype: double "
        "key_cache.dtype: double and value_cache.dtype: float instead.",
    ),
    "devices": (
        {"key_cache": draw(8, 4, 4, 6).to("meta")},
        RuntimeError,
        "Expected query, key_cache, and value_cache to have the same device type, but got query.device: cpu "
        "key_cache.device: meta and value_cache.device: cpu instead.",
    ),
    "ranks": (
        {"key_cache": draw(8)},
        RuntimeError,
        "Expected query, key_cache, and value_cache to all be  at least 2 dimensional, but got query.dim: 4 "
        "key_cache.dim: 1 and value_cache.dim: 4 instead.",
    ),
    "layout": (
        {"key_cache": draw(8, 4, 4, 6).to_sparse()},
        RuntimeError,
        "Expected key_cache to be a dense tensor (torch.strided), but got torch.sparse_coo instead.",
    ),
    "heads": (
        {"query": draw(3, 2, 6, 6)},
        RuntimeError,
        "Expected query, key_cache and value_cache to have equal numbers of heads, or one that broadcasts, but got 6, "
        "4 and 4; enable_gqa=True allows fewer key and value heads.",
    ),
    "heads_gqa": (
        {"query": draw(3, 2, 6, 6), "enable_gqa": True},
        RuntimeError,
        "Number of heads in key_cache and value_cache must divide the number of heads in query, but got 6 query heads, "
        "4 key_cache heads and 4 value_cache heads.",
    ),
    "query": (
        {"query": draw(3, 4, 6)},
        RuntimeError,
        "Expected query to have shape (B, M, H, D), but got (3, 4, 6) instead.",
    ),
    "key_cache": (
        {"key_cache": draw(8, 4, 6)},
        RuntimeError,
        "Expected key_cache to have shape (pages, page_size, Hkv, D), but got (8, 4, 6) instead.",
    ),
    "heads_before_queries": (
        {"query": draw(3, 4, 1, 6)},
        RuntimeError,
        "Expected query of shape (B, M, H, D) to have as many heads as the caches of shape (pages, page_size, Hkv, D), "
        "or a multiple, but got query.shape: (3, 4, 1, 6) and key_cache.shape: (8, 4, 4, 6) instead.",
    ),
    "heads_before_queries_gqa": (
        {"query": draw(3, 4, 1, 6), "enable_gqa": True},
        RuntimeError,
        "Expected query of shape (B, M, H, D) to have as many heads as the caches",
    ),
    "heads_before_keys": (
        {"key_cache": draw(8, 5, 4, 6), "value_cache": draw(8, 5, 3, 5)},
        RuntimeError,
        "same pages, page size and heads, but got key_cache.shape: (8, 5, 4, 6) and value_cache.shape: (8, 5, 3, 5)",
    ),
    "head_size": (
        {"query": draw(3, 2, 4, 8)},
        RuntimeError,
        "same head size (last dimension), but got query.shape: (3, 2, 4, 8) and key_cache.shape: (8, 4, 4, 6) instead.",
    ),
    "caches": (
        {"value_cache": draw(8, 5, 4, 5)},
        RuntimeError,
        "same pages, page size and heads, but got key_cache.shape: (8, 4, 4, 6) and value_cache.shape: (8, 5, 4, 5)",
    ),
    "table_dtype": (
        {"block_table": TABLE.long()},
        RuntimeError,
        "Expected block_table to be int32, but got long int instead.",
    ),
    "table_shape": (
        {"block_table": TABLE[:2]},
        RuntimeError,
        "Expected block_table to have shape (B, pages per sequence) with B = 3, but got (2, 3) instead.",
    ),
    "table_device": (
        {"block_table": TABLE.to("meta")},
        RuntimeError,
        "Expected block_table to be on the query's device cpu, but got meta instead.",
    ),
    "lengths_kind": ({"lengths": 5}, TypeError, "paged_attention(): argument 'lengths' must be Tensor, not int"),
    "lengths_shape": (
        {"lengths": LENGTHS_PAGED[:2]},
        RuntimeError,
        "Expected lengths to have shape (3,), but got (2,) instead.",
    ),
    "lengths_dtype": (
        {"lengths": LENGTHS_PAGED.float()},
        RuntimeError,
        "Expected lengths to be integers, but got torch.float32 instead.",
    ),
    "lengths_complex": (
        {"lengths": LENGTHS_PAGED.to(torch.complex64)},
        RuntimeError,
        "Expected lengths to be integers, but got torch.complex64 instead.",
    ),
    "lengths_twice": (
        {"attn_mask": Mask(lengths=LENGTHS_PAGED)},
        RuntimeError,
        "prefix, alibi (lengths are an argument) in paged_attention, but got one with lengths.",
    ),
    "top_left": (
        {"attn_mask": Mask(causal=True)},
        RuntimeError,
        'aligned to the bottom right, because the queries of paged_attention are the last of their sequence, but got '
        'Mask(align="top_left").',
    ),
    "enable_gqa": ({"enable_gqa": 1}, TypeError, "paged_attention(): argument 'enable_gqa' must be bool, not int"),
}  # fmt: skip


@pytest.mark.parametrize("name", PAGED_ERRORS)
def test_errors_say_what_was_expected_and_what_was_got(name):
    changes, error, text = PAGED_ERRORS[name]
    with pytest.raises(error) as caught:
        call_paged(**changes)
    assert text in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("M", "packs", "kept"), [(8, False, True), (9, False, False), (8, True, True), (9, True, False)]
)
def test_pages_of_many_queries_are_copied_on_a_cpu(M, packs, kept):
    """They would be answered by math where they lay. Queries of sequences one after the other count likewise."""
    caches = [draw(4, 16, 2, 8, dtype=torch.float32, seed=seed) for seed in (1, 2)]
    table, lengths = torch.arange(4, dtype=torch.int32).view(2, 2), int32(32, 20)
    query = draw(2, M, 2, 8, dtype=torch.float32)
    rows = {"cu_q": int32(0, M, 2 * M), "max_q": M} if packs else {}
    out = paged(query.flatten(0, 1) if packs else query, *caches, table, lengths, **rows)
    assert sdpa.last_choice().kernel.name == "cpu_flash"
    assert ("paged" in sdpa.last_choice().problem.features) == kept
    k, v = (cache[table.long()].flatten(1, 2).transpose(1, 2) for cache in caches)
    expected = plain(query.transpose(1, 2), k, v, Mask(lengths=lengths)).transpose(1, 2)
    torch.testing.assert_close(out, expected.flatten(0, 1) if packs else expected)
