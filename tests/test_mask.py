"""Mask: its fields against hand-written loops, how masks combine, what is recognised in a dense one, and its errors."""

from __future__ import annotations

import operator
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from sdpa import Mask, scaled_dot_product_attention, varlen_attention

B, H, M, N = 2, 3, 7, 9


def integers(*values):
    return torch.tensor(values)


LENGTHS, QUERY_LENGTHS, PREFIX = (6, 9), (7, 4), (0, 5)
DOCUMENTS = ([0, 0, 1, 1, 1, 2, 2], [0, 1, 1, 1, 2, 2, 2, 3, 3])
SLOPES = torch.tensor([0.5, 0.25, 0.125])
ALLOWED = torch.rand(B, 1, M, N, generator=torch.Generator().manual_seed(0)) > 0.4
BIAS = torch.randn(1, H, 1, N, generator=torch.Generator().manual_seed(1))


def by_rule(rule):
    """Bool (B, H, M, N) from a Python predicate of batch entry, head, query and key."""
    seen = [[[[rule(b, h, i, j) for j in range(N)] for i in range(M)] for h in range(H)] for b in range(B)]
    return torch.tensor(seen)


RULES = {
    "nothing": (Mask(), lambda b, h, i, j: True),
    "causal": (Mask(causal=True), lambda b, h, i, j: j <= i),
    "causal_bottom_right": (Mask(causal=True, align="bottom_right"), lambda b, h, i, j: j <= i + N - M),
    "window": (Mask(window=(2, 1)), lambda b, h, i, j: i - 2 <= j <= i + 1),
    "window_left": (Mask(window=(2, None)), lambda b, h, i, j: i - 2 <= j),
    "window_right": (Mask(window=(None, 1)), lambda b, h, i, j: j <= i + 1),
    "window_none": (Mask(window=(None, None)), lambda b, h, i, j: True),
    "window_bottom_right": (Mask(window=(2, 1), align="bottom_right"), lambda b, h, i, j: -2 <= j - i - N + M <= 1),
    "window_causal": (Mask(window=(2, 4), causal=True), lambda b, h, i, j: i - 2 <= j <= i),
    "lengths": (Mask(lengths=integers(*LENGTHS)), lambda b, h, i, j: j < LENGTHS[b]),
    "one_length": (Mask(lengths=torch.tensor(5)), lambda b, h, i, j: j < 5),
    "lengths_too_long": (Mask(lengths=integers(99, -3)), lambda b, h, i, j: b == 0),
    "query_lengths": (Mask(query_lengths=integers(*QUERY_LENGTHS)), lambda b, h, i, j: i < QUERY_LENGTHS[b]),
    "lengths_bottom_right": (
        Mask(causal=True, align="bottom_right", lengths=integers(*LENGTHS), query_lengths=integers(*QUERY_LENGTHS)),
        lambda b, h, i, j: (
            j <= i + LENGTHS[b] - QUERY_LENGTHS[b] and j < LENGTHS[b] and i < QUERY_LENGTHS[b]
        ),
    ),
    "segments": (
        Mask(segments=tuple(torch.tensor(ids) for ids in DOCUMENTS)),
        lambda b, h, i, j: DOCUMENTS[0][i] == DOCUMENTS[1][j],
    ),
    "cu_seqlens": (
        Mask(cu_seqlens=(integers(0, 2, 5, 7), integers(0, 1, 4, 9))),
        lambda b, h, i, j: (i >= 2) + (i >= 5) == (j >= 1) + (j >= 4),
    ),
    "segments_causal": (
        Mask(segments=tuple(torch.tensor(ids) for ids in DOCUMENTS), causal=True),
        lambda b, h, i, j: DOCUMENTS[0][i] == DOCUMENTS[1][j] and j <= i,
    ),
    "prefix": (Mask(causal=True, prefix=integers(*PREFIX)), lambda b, h, i, j: j <= i or j < PREFIX[b]),
    "prefix_number": (Mask(causal=True, prefix=3), lambda b, h, i, j: j <= i or j < 3),
    "prefix_and_lengths": (
        Mask(causal=True, prefix=3, lengths=integers(2, 9)),
        lambda b, h, i, j: (j <= i or j < 3) and j < (2, 9)[b],
    ),
    "prefix_huge": (Mask(causal=True, prefix=2**31), lambda b, h, i, j: True),
    "prefix_alone": (Mask(prefix=3), lambda b, h, i, j: True),
    "allowed": (Mask(allowed=ALLOWED), lambda b, h, i, j: bool(ALLOWED[b, 0, i, j])),
    "allowed_causal": (Mask(allowed=ALLOWED, causal=True), lambda b, h, i, j: j <= i and bool(ALLOWED[b, 0, i, j])),
}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_dense_is_the_rule(name):
    mask, rule = RULES[name]
    dense = mask.dense(B, H, M, N)
    assert dense.dtype == torch.bool and torch.equal(dense, by_rule(rule))


@pytest.mark.parametrize("align,shift", [("top_left", 0), ("bottom_right", N - M)])
def test_alibi_takes_distance_off(align, shift):
    dense = Mask(alibi=SLOPES, align=align).dense(B, H, M, N)
    for h in range(H):
        for i in range(M):
            for j in range(N):
                assert dense[1, h, i, j] == -SLOPES[h] * abs(i + shift - j)


def test_bias_is_added_and_hidden_entries_are_minus_infinity():
    dense = Mask(bias=BIAS, causal=True).dense(B, H, M, N)
    triangle = by_rule(lambda b, h, i, j: j <= i)
    assert torch.equal(dense > -torch.inf, triangle)
    assert torch.equal(dense[triangle], BIAS.expand(B, H, M, N)[triangle])
    assert Mask(bias=BIAS.double()).dense(B, H, M, N).dtype == torch.float64


PAIRS = [
    ("causal", "lengths"), ("causal", "window"), ("causal", "allowed"), ("lengths", "query_lengths"),
    ("segments", "causal"), ("window_left", "window_right"), ("window", "window_causal"), ("allowed", "allowed_causal"),
    ("lengths", "lengths_too_long"), ("cu_seqlens", "lengths"), ("nothing", "causal_bottom_right"),
    ("prefix", "prefix_number"), ("prefix", "lengths"),
    ("causal_bottom_right", "window_bottom_right"), ("one_length", "lengths"), ("prefix", "allowed"),
]  # fmt: skip


@pytest.mark.parametrize("a,b", PAIRS, ids="&".join)
def test_and_sees_what_both_see(a, b):
    for first, second in ((a, b), (b, a)):
        combined = RULES[first][0] & RULES[second][0]
        wanted = by_rule(lambda *at, f=RULES[first][1], s=RULES[second][1]: f(*at) and s(*at))
        assert torch.equal(combined.dense(B, H, M, N), wanted)


def test_and_with_tensors_from_either_side():
    triangle = by_rule(lambda b, h, i, j: j <= i)
    for combined in (Mask(causal=True) & ALLOWED, ALLOWED & Mask(causal=True)):
        assert torch.equal(combined.dense(B, H, M, N), triangle & ALLOWED)
    assert (Mask(causal=True) & BIAS).bias is BIAS
    assert torch.equal((Mask(bias=BIAS) & BIAS).bias, 2 * BIAS)
    assert torch.equal((Mask(alibi=SLOPES) & Mask(alibi=SLOPES)).alibi, 2 * SLOPES)


CLASHES = {
    "alignments": (Mask(causal=True), Mask(window=(1, 1), align="bottom_right"), "cannot be combined"),
    "segments": (Mask(segments=torch.zeros(7).long()), Mask(segments=torch.ones(7).long()), "one set of ids"),
    "segments_and_cu": (Mask(segments=torch.zeros(7).long()), Mask(cu_seqlens=integers(0, 7)), "one set of ids"),
    "prefix_and_window": (Mask(causal=True, prefix=3), Mask(window=(2, 2)), "prefix cannot be combined"),
}


@pytest.mark.parametrize("name", CLASHES)
def test_and_refuses_what_fields_cannot_say(name):
    a, b, text = CLASHES[name]
    for first, second in ((a, b), (b, a)):
        with pytest.raises(ValueError, match=text):
            first & second


def test_and_refuses_other_kinds():
    with pytest.raises(TypeError):
        Mask() & 3
    for other in (operator.or_, operator.add, torch.add):
        with pytest.raises(TypeError):
            other(ALLOWED, Mask())


# Under torch.compile

TENSORS = {
    "lengths": integers(*LENGTHS), "allowed": ALLOWED, "bias": BIAS, "slopes": SLOPES, "prefix": integers(*PREFIX),
    "queries": torch.tensor(DOCUMENTS[0]), "keys": torch.tensor(DOCUMENTS[1]), "cu": integers(0, 4, 7),
}  # fmt: skip
OUTER = Mask(causal=True)
BUILT = {
    "lengths & bool": lambda t: Mask(lengths=t["lengths"]) & t["allowed"],
    "bool & lengths": lambda t: t["allowed"] & Mask(lengths=t["lengths"]),
    "lengths & bias": lambda t: Mask(lengths=t["lengths"]) & t["bias"],
    "bias & lengths": lambda t: t["bias"] & Mask(lengths=t["lengths"]),
    "causal & bool": lambda t: Mask(causal=True) & t["allowed"],
    "outer & bool": lambda t: OUTER & t["allowed"],
    "bool & outer": lambda t: t["allowed"] & OUTER,
    "computed": lambda t: OUTER & (t["bias"] > 0),
    "bool & bool": lambda t: Mask() & t["allowed"] & ~t["allowed"] & t["bias"] & t["bias"],
    "in place": lambda t: operator.iand(operator.iand(Mask(lengths=t["lengths"]), t["allowed"]), t["bias"]),
    "tensor in place": lambda t: operator.iand(t["allowed"], Mask(lengths=t["lengths"])),
    "causal & lengths": lambda t: OUTER & Mask(lengths=t["lengths"]),
    "lengths & lengths": lambda t: Mask(lengths=t["lengths"]) & Mask(lengths=t["prefix"], query_lengths=t["prefix"]),
    "windows": lambda t: Mask(window=(3, 1)) & Mask(window=(2, None), causal=True),
    "segments": lambda t: Mask(segments=(t["queries"], t["keys"])) & Mask(lengths=t["lengths"]) & t["allowed"],
    "cu_seqlens": lambda t: OUTER & Mask(cu_seqlens=(t["cu"], t["cu"] + 2)) & t["allowed"],
    "prefixes": lambda t: Mask(causal=True, prefix=t["prefix"]) & Mask(causal=True, prefix=3) & t["allowed"],
    "alibi": lambda t: Mask(alibi=t["slopes"]) & Mask(alibi=t["slopes"]) & OUTER & t["allowed"],
    "from_tensor": lambda t: Mask.from_tensor(t["allowed"]) & Mask.from_tensor(t["bias"]),
    "replace": lambda t: (Mask(lengths=t["lengths"]) & t["allowed"]).replace(causal=True),
    "to": lambda t: (Mask(lengths=t["lengths"]) & t["allowed"]).to("cpu"),
}  # fmt: skip


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", BUILT)
def test_masks_are_built_and_combined_in_a_graph(name, backend):
    q, k = (torch.randn(B, H, size, 4, generator=torch.Generator().manual_seed(0)) for size in (M, N))

    def call(q, k, tensors):
        mask = BUILT[name](tensors)
        return mask.dense(B, H, M, N), scaled_dot_product_attention(q, k, k, mask)

    torch._dynamo.reset()
    for got, wanted in zip(
        torch.compile(call, fullgraph=True, backend=backend)(q, k, TENSORS), call(q, k, TENSORS), strict=True
    ):
        assert torch.equal(got, wanted)
    torch._dynamo.reset()


def test_a_graph_that_breaks_hands_masks_on():
    def call(q, lengths, allowed):
        mask = Mask(lengths=lengths) & allowed
        torch._dynamo.graph_break()
        return scaled_dot_product_attention(q, q, q, mask & Mask(causal=True))

    torch._dynamo.reset()
    args = (torch.randn(B, H, N, 4), integers(*LENGTHS), ALLOWED[:, :, :1])
    assert torch.equal(torch.compile(call, backend="eager")(*args), call(*args))
    torch._dynamo.reset()


def test_a_query_of_a_subclass_sees_the_call_and_the_mask_does_not():
    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            return Mask in types, function

    rows, cu = torch.randn(N, H, 4), integers(0, N).int()
    query, mask = torch.randn(B, H, N, 4).as_subclass(Own), Mask(causal=True)
    assert scaled_dot_product_attention(query, query, query, mask) == (False, scaled_dot_product_attention)
    assert varlen_attention(rows.as_subclass(Own), rows, rows, cu, cu, N, N, mask) == (False, varlen_attention)


@pytest.mark.parametrize("mask", [Mask(causal=True), Mask(allowed=ALLOWED)], ids=repr)
def test_torchs_function_says_where_a_mask_goes(mask):
    q = torch.randn(B, H, M, 4)
    told = "torch's scaled_dot_product_attention takes no sdpa.Mask; pass it to sdpa.scaled_dot_product_attention"
    with pytest.raises(TypeError, match=f"^{told}"):
        F.scaled_dot_product_attention(q, q, q, mask)
    with pytest.raises(
        TypeError, match=r"^torch's softmax takes no sdpa\.Mask; pass it to functions and layers of sdpa"
    ):
        F.softmax(mask, -1)
    subclass = q.as_subclass(type("Own", (torch.Tensor,), {}))
    with pytest.raises(TypeError, match=f"^{told}"):
        F.scaled_dot_product_attention(subclass, subclass, subclass, attn_mask=mask)


def test_an_alignment_with_nothing_to_align_hides_nothing():
    """As where a model's flag is the causal field: it may be False."""
    mask = Mask(causal=False, align="bottom_right")
    assert mask.dense(B, H, M, N).all() and (mask & Mask(causal=True)).align == "top_left"
    assert "nothing to align" in Mask.__doc__


def test_from_tensor_recognises_only_when_asked():
    triangle = torch.ones(5, 7, dtype=torch.bool).tril()
    assert Mask.from_tensor(triangle).allowed is triangle
    assert Mask.from_tensor(BIAS).bias is BIAS and Mask.from_tensor(BIAS, recognise=True).bias is BIAS


RECOGNISED = {
    "all": (torch.ones(2, 1, 5, 7, dtype=torch.bool), lambda m: m == Mask() or (not m.has_band and m.allowed is None)),
    "causal": (torch.ones(5, 7, dtype=torch.bool).tril(), lambda m: m.causal and m.align == "top_left"),
    "bottom_right": (torch.ones(5, 7, dtype=torch.bool).tril(2), lambda m: m.causal and m.align == "bottom_right"),
    "batched_causal": (torch.ones(2, 3, 5, 5, dtype=torch.bool).tril(), lambda m: m.causal and m.allowed is None),
    "padding": (
        (torch.arange(7) < torch.tensor([[3], [7]]))[:, None, None],
        lambda m: m.lengths.tolist() == [3, 7] and m.allowed is None,
    ),
    "scattered": (torch.eye(5, dtype=torch.bool), lambda m: m.allowed is not None and not m.has_band),
    "right_padding": ((torch.arange(7) >= torch.tensor([[3], [1]]))[:, None, None], lambda m: m.allowed is not None),
    "triangle_with_a_hole": (
        torch.ones(5, 5, dtype=torch.bool).tril().index_put((torch.tensor(4), torch.tensor(1)), torch.tensor(False)),
        lambda m: m.allowed is not None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RECOGNISED)
def test_recognition_never_changes_the_mask(name):
    tensor, holds = RECOGNISED[name]
    mask = Mask.from_tensor(tensor, recognise=True)
    assert holds(mask)
    shape = (2, 3, 5, tensor.shape[-1])
    assert torch.equal(mask.dense(*shape), tensor.expand(shape))


ERRORS = {
    "align": (lambda: Mask(align="middle"), ValueError, "one of .*got 'middle'"),
    "window_number": (lambda: Mask(window=3), ValueError, "each an integer >= 0 or None, got 3"),
    "window_three": (lambda: Mask(window=(1, 2, 3)), ValueError, r"got \(1, 2, 3\)"),
    "window_negative": (lambda: Mask(window=(-1, 0)), ValueError, r"got \(-1, 0\)"),
    "window_float": (lambda: Mask(window=(1.5, 0)), ValueError, r"got \(1.5, 0\)"),
    "lengths_float": (lambda: Mask(lengths=torch.ones(2)), TypeError, "lengths must be an integer.*float32"),
    "lengths_complex": (lambda: Mask(lengths=torch.ones(2) * 1j), TypeError, "an integer tensor, got torch.complex64"),
    "lengths_list": (lambda: Mask(lengths=[1, 2]), TypeError, r"lengths must be an integer tensor, got \[1, 2\]"),
    "query_lengths": (lambda: Mask(query_lengths=torch.ones(2)), TypeError, "query_lengths must be an integer tensor"),
    "segments_bool": (lambda: Mask(segments=torch.ones(2).bool()), TypeError, "segments.*got torch.bool"),
    "segments_pair": (lambda: Mask(segments=(integers(1), 2)), TypeError, "segments must be an integer tensor, got 2"),
    "both_segments": (lambda: Mask(segments=integers(1), cu_seqlens=integers(0, 1)), ValueError, "got both"),
    "prefix": (lambda: Mask(prefix=-1), TypeError, "prefix must be an integer >= 0 or an integer tensor, got -1"),
    "prefix_float": (lambda: Mask(prefix=1.5), TypeError, "integer >= 0 or an integer tensor, got 1.5"),
    "tensor": (lambda: Mask(ALLOWED), TypeError, "causal must be bool, got Tensor; a mask .* as allowed or bias"),
    "dense_integers": (lambda: Mask.from_tensor(integers(1)), TypeError, "a bool or floating .*, got torch.int64"),
    "and_integers": (lambda: Mask() & integers(1), TypeError, "^Mask & tensor expects a bool or .*, got torch.int64$"),
    "allowed": (lambda: Mask(allowed=torch.ones(2, 2)), TypeError, "allowed must be a bool tensor, got torch.float32"),
    "allowed_list": (lambda: Mask(allowed=[[True]]), TypeError, "allowed must be a bool tensor, got list"),
    "bias": (lambda: Mask(bias=torch.ones(2, 2).bool()), TypeError, "bias must be a floating.*torch.bool"),
    "alibi": (lambda: Mask(alibi=0.5), TypeError, "alibi must be a floating point tensor, got float"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_field_and_what_was_got(name):
    make, kind, text = ERRORS[name]
    with pytest.raises(kind, match=text):
        make()


def test_replace_and_device():
    assert Mask(causal=True).replace(window=(1, 0)).band == (1, 0)
    assert Mask().device() is None and Mask(lengths=integers(1)).device() == torch.device("cpu")


def test_repr_is_what_was_given():
    assert repr(Mask()) == "Mask()"
    mask = Mask(causal=True, window=(4, 0), lengths=integers(1, 2), bias=torch.ones(3, 4))
    assert repr(mask) == "Mask(causal=True, window=(4, 0), lengths=torch.int64(2,), bias=torch.float32(3, 4))"
    assert repr(Mask(segments=(integers(0, 1), integers(0)))) == "Mask(segments=(torch.int64(2,), torch.int64(1,)))"
    assert repr(pickle.loads(pickle.dumps(Mask(window=(1, None))))) == "Mask(window=(1, None))"


def test_two_prefixes_that_are_numbers_give_a_number():
    """A tensor would be on one device, whatever the call's is."""
    both = Mask(causal=True, prefix=3) & Mask(causal=True, prefix=5)
    assert both.prefix == 3 and type(both.prefix) is int


META = {"dtype": torch.int32, "device": "meta"}
# name: (mask, sizes, exception, what it says)
DENSE_ERRORS = {
    "float": (
        Mask(causal=True),
        (1, 2, 3.0, 4),
        TypeError,
        "Mask.dense(): argument 'M' must be int, not float; pass int(M)",
    ),
    "text": (Mask(causal=True), ("a", 2, 3, 4), TypeError, "Mask.dense(): argument 'B' must be int, not str"),
    "flag": (
        Mask(causal=True),
        (1, True, 3, 4),
        TypeError,
        "Mask.dense(): argument 'H' must be int, not bool; pass int(H)",
    ),
    "negative": (Mask(causal=True), (1, 2, 3, -4), RuntimeError, "Expected N to be 0 or more, but got -4."),
    "lengths": (
        Mask(lengths=integers(1, 2, 3)),
        (1, 1, 3, 4),
        RuntimeError,
        "Expected lengths to have shape (1,) or (), but got (3,) instead.",
    ),
    "lengths of rows": (
        Mask(lengths=integers(1, 2)[:, None]),
        (2, 1, 3, 4),
        RuntimeError,
        "Expected lengths to have shape (2,) or (1,) or (), but got (2, 1) instead.",
    ),
    "devices": (
        Mask(lengths=integers(1, 2), query_lengths=torch.zeros(2, **META)),
        (2, 1, 3, 4),
        RuntimeError,
        "Expected the tensors of a mask on one device, but got lengths on cpu and query_lengths on meta.",
    ),
    "sparse": (
        Mask(allowed=torch.ones(3, 4, dtype=torch.bool).to_sparse()),
        (2, 1, 3, 4),
        RuntimeError,
        "Expected allowed to be a dense tensor (torch.strided), but got torch.sparse_coo instead.",
    ),
}


@pytest.mark.parametrize("name", DENSE_ERRORS)
def test_dense_says_what_is_wrong(name):
    mask, sizes, error, text = DENSE_ERRORS[name]
    with pytest.raises(error) as caught:
        mask.dense(*sizes)
    assert str(caught.value) == text


def test_dense_takes_integers_of_other_libraries():
    sizes = np.array([1, 2, 3, 4])
    assert torch.equal(Mask(causal=True).dense(*sizes), Mask(causal=True).dense(1, 2, 3, 4))


@pytest.mark.parametrize("name", ["lengths", "segments"])
def test_calls_look_at_the_device_of_every_field(name):
    """And not at that of the first one alone."""
    far = {
        "lengths": {"query_lengths": torch.zeros(2, **META)},
        "segments": {"allowed": torch.ones(3, 4).bool().to("meta")},
    }
    own = {"lengths": integers(1, 2), "segments": (torch.zeros(3).int(), torch.zeros(4).int())}[name]
    q, k = torch.randn(2, 1, 3, 8), torch.randn(2, 1, 4, 8)
    (field,) = far[name]
    with pytest.raises(RuntimeError, match=f"Expected {field} to be on the query's device cpu, but got meta instead"):
        scaled_dot_product_attention(q, k, k, Mask(**{name: own}, **far[name]))


@pytest.mark.parametrize("kernel", ["math", "cpu_flash"])
def test_slopes_of_float64_calls_are_float64(kernel):
    q, k, v = (torch.randn(1, 2, 40, 8, dtype=torch.float64) for _ in range(3))
    slopes, index = torch.tensor([0.1, 0.7], dtype=torch.float64), torch.arange(40)
    bias = -(slopes[:, None, None] * (index[None] - index[:, None]).abs())[None]
    out = scaled_dot_product_attention(q, k, v, Mask(alibi=slopes), kernel=kernel)
    torch.testing.assert_close(out, scaled_dot_product_attention(q, k, v, bias), atol=1e-14, rtol=1e-14)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int64])
@pytest.mark.parametrize("kernel", ["math", None])
def test_integers_of_fewer_bits_than_the_keys(kernel, dtype):
    """Lengths and prefixes stand beside more keys than they count."""
    q, k = torch.randn(2, 2, 300, 16), torch.randn(2, 2, 300, 16)
    for name, value, others in (
        ("lengths", (100, 127), {}),
        ("query_lengths", (127, 3), {}),
        ("prefix", (90, 0), {"causal": True}),
        ("cu_seqlens", (0, 50, 100), {}),  # rows behind the last document are none's
        ("cu_seqlens", (0, 100, 127), {"causal": True}),
    ):
        masks = (Mask(**{name: torch.tensor(value, dtype=kind)}, **others) for kind in (dtype, torch.int32))
        found, expected = (scaled_dot_product_attention(q, k, k, mask, kernel=kernel) for mask in masks)
        assert torch.equal(found, expected), name


def test_cumulative_lengths_of_few_bits_by_hand():
    document = torch.bucketize(torch.arange(300), torch.tensor([50, 100]), right=True)
    expected = document[:, None] == document
    for dtype in (torch.int8, torch.uint8, torch.int16):
        mask = Mask(cu_seqlens=torch.tensor([0, 50, 100], dtype=dtype))
        assert torch.equal(mask.dense(1, 1, 300, 300)[0, 0], expected), dtype


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
@pytest.mark.parametrize("name", ["lengths", "query_lengths", "segments", "cu_seqlens", "prefix"])
def test_integers_that_torch_does_not_compute_with(name, dtype):
    told = rf"Mask.{name} must be an integer tensor, got {dtype}; of these there are uint8 and int8 to int64"
    with pytest.raises(TypeError, match=told):
        Mask(**{name: torch.tensor([0, 3], dtype=dtype)})


def test_fields_that_do_not_fit_each_other():
    a, b = Mask(lengths=integers(1, 2)), Mask(lengths=integers(1, 2, 3))
    with pytest.raises(ValueError, match=r"masks with lengths of shapes \(2,\) and \(3,\) cannot be combined"):
        operator.and_(a, b)
    assert (a & Mask(lengths=integers(1))).lengths.tolist() == [1, 1]


def test_a_union_says_how_it_is_written():
    one, other = Mask(causal=True), Mask(window=(1, 1))
    for make in (lambda: one | other, lambda: other | torch.ones(2, 2, dtype=torch.bool), lambda: ~one):
        with pytest.raises(TypeError, match=r"combined by &, and not by \| or ~: a union goes in as allowed=a.dense"):
            make()


def test_one_tensor_of_documents_is_for_as_many_queries_as_keys():
    q, k = torch.randn(1, 1, 16, 8), torch.randn(1, 1, 8, 8)
    cu = torch.tensor([0, 8, 16])
    with pytest.raises(RuntimeError, match="there are 16 queries and 8 keys; give a pair of tensors"):
        scaled_dot_product_attention(q, k, k, Mask(cu_seqlens=cu))
    assert scaled_dot_product_attention(q, k, k, Mask(cu_seqlens=(cu, cu // 2))).shape == q.shape
