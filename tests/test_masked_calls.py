"""Prepared calls with masks: results, derivatives and errors as by the operator, which they do not take."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from remembered import Other, forwards, remembered

import sdpa
from helpers import integers
from sdpa import entry
from sdpa import scaled_dot_product_attention as attend
from sdpa.calls import CALLS
from sdpa.inputs import Options, build_inputs
from sdpa.kernels.math import composite as math

pytestmark = pytest.mark.usefixtures("nothing_remembered")

B, H, M, N = 2, 4, 12, 15
BANDS = {
    "empty": sdpa.Mask(),
    "causal": sdpa.Mask(causal=True),
    "bottom_right": sdpa.Mask(causal=True, align="bottom_right"),
    "window": sdpa.Mask(window=(4, 0)),
    "sides": sdpa.Mask(window=(None, 3), align="bottom_right"),
}

IDS = [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3, 3]


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


# Masks with tensors, made anew for each test, because some change them.
MASKS = {
    "lengths": lambda: sdpa.Mask(lengths=integers(9, 14)),
    "lengths of 64 bits": lambda: sdpa.Mask(lengths=integers(9, 40, dtype=torch.int64)),
    "one length": lambda: sdpa.Mask(lengths=integers(9)),
    "lengths apart": lambda: sdpa.Mask(lengths=integers(9, 0, 14, 0)[::2]),
    "query_lengths": lambda: sdpa.Mask(query_lengths=integers(5, 12)),
    "both lengths": lambda: sdpa.Mask(
        causal=True, align="bottom_right", lengths=integers(9, 14), query_lengths=integers(5, 12)
    ),
    "segments": lambda: sdpa.Mask(segments=(integers(*IDS[:M]), integers(*IDS))),
    "segments of 64 bits": lambda: sdpa.Mask(segments=(integers(*IDS[:M], dtype=torch.int64), integers(*IDS))),
    "cu_seqlens": lambda: sdpa.Mask(cu_seqlens=(integers(0, 4, M), integers(0, 7, N))),
    "prefix": lambda: sdpa.Mask(causal=True, prefix=3),
    "prefix without a band": lambda: sdpa.Mask(prefix=3),
    "prefixes": lambda: sdpa.Mask(causal=True, prefix=integers(3, 5)),
    "alibi": lambda: sdpa.Mask(alibi=noise(H).abs()),
    "allowed": lambda: sdpa.Mask(allowed=noise(B, 1, M, N) > 0),
    "bias": lambda: sdpa.Mask(bias=noise(M, N)),
    "all": lambda: sdpa.Mask(
        window=(6, 2),
        lengths=integers(9, 14),
        segments=(integers(*IDS[:M]), integers(*IDS)),
        prefix=integers(3, 5),
        alibi=noise(B, H).abs(),
        allowed=noise(H, 1, N) > 0,
        bias=noise(H, M, N),
    ),
}


@pytest.fixture
def ways(monkeypatch):
    """The calls that went to the operator."""
    taken, way = [], entry.operator_results

    def counted(*given):
        taken.append(given)
        return way(*given)

    monkeypatch.setattr(entry, "operator_results", counted)
    return taken


def qkv(grad: bool = False, dtype: torch.dtype = torch.float64, keys: int = N):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(B, H, n, 8, generator=generator, dtype=dtype).requires_grad_(grad) for n in (M, keys, keys)]


def ordinary(*given, **options):
    """The same call as the operator's."""
    mask = given[3]
    if type(mask) is torch.Tensor:
        mask = sdpa.Mask(allowed=mask) if mask.dtype == torch.bool else sdpa.Mask(bias=mask)
    return attend(*given[:3], Other(**vars(mask)), **options)


@pytest.mark.parametrize("keys", [M, N])
@pytest.mark.parametrize("name", BANDS)
def test_bands(name, keys, ways):
    tensors = qkv(keys=keys)
    wanted, chosen = ordinary(*tensors, BANDS[name]), sdpa.last_choice().kernel
    for _ in range(3):
        assert torch.equal(attend(*tensors, BANDS[name]), wanted)
        assert torch.equal(attend(*tensors, BANDS[name].replace()), wanted)
        assert sdpa.last_choice().kernel is chosen
    assert len(ways) == remembered() == 1


@pytest.mark.parametrize("name", BANDS)
def test_derivatives_of_bands(name, ways):
    check_derivatives(BANDS[name])
    assert len(ways) == remembered() == 1


def check_derivatives(mask):
    """First derivatives of a remembered call, and second ones."""
    tensors = qkv(grad=True)
    wanted = ordinary(*tensors, mask)
    upstream = torch.randn_like(wanted)
    first = torch.autograd.grad(wanted, tensors, upstream, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), tensors)
    for _ in range(2):
        out = attend(*tensors, mask)
        assert type(out.grad_fn).__name__ == "AttentionBackward"
        torch.testing.assert_close(torch.autograd.grad(out, tensors, upstream, retain_graph=True), first)
        found = torch.autograd.grad(out, tensors, upstream, create_graph=True)
        torch.testing.assert_close(torch.autograd.grad(sum(g.square().sum() for g in found), tensors), second)


def test_a_call_is_known_by_its_band_and_settings(ways):
    tensors = qkv()
    calls = [lambda mask=mask: attend(*tensors, mask) for mask in BANDS.values()]
    calls += [lambda: attend(*tensors), lambda: attend(*tensors, is_causal=True)]
    calls += [lambda: attend(*tensors, sdpa.Mask(window=(4, 1))), lambda: attend(*tensors, BANDS["window"], scale=2.0)]
    calls += [lambda: attend(*tensors, BANDS["window"], kernel="math")]
    results = [call() for call in calls]
    assert remembered() == len(calls)
    for call, wanted in zip(calls, results, strict=True):
        assert torch.equal(call(), wanted)
    assert remembered() == len(calls) and not ways
    with sdpa.sdpa_kernel("math"):
        attend(*tensors, BANDS["window"])
        assert sdpa.last_choice().kernel.name == "math"
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        attend(*tensors, BANDS["window"])
        assert sdpa.last_choice().kernel.name == "math"
    attend(*tensors, BANDS["window"])
    assert sdpa.last_choice().kernel.name == "cpu_flash"


def test_a_mask_beside_is_causal_is_refused_at_any_call():
    tensors = qkv()
    for mask in (sdpa.Mask(), BANDS["window"], torch.ones(M, N, dtype=torch.bool)):
        for _ in range(2):
            with pytest.raises(RuntimeError, match="Explicit attn_mask should not be set when is_causal=True"):
                attend(*tensors, mask, is_causal=True)
            attend(*tensors, mask)


def tensors_of(mask: sdpa.Mask) -> list[torch.Tensor]:
    fields = [item for field in vars(mask).values() for item in (field if isinstance(field, tuple) else (field,))]
    return [field for field in fields if isinstance(field, torch.Tensor)]


@pytest.mark.parametrize("name", MASKS)
def test_masks_with_tensors(name, ways):
    """Also of other numbers: those of another mask of the same form, and in place."""
    tensors, mask, other = qkv(), MASKS[name](), MASKS[name]()
    for tensor in tensors_of(other):
        tensor.copy_(tensor.flip(-1))
    wanted = [ordinary(*tensors, given) for given in (mask, other)]
    chosen = sdpa.last_choice().kernel
    for _ in range(2):
        assert torch.equal(attend(*tensors, mask), wanted[0])
        assert torch.equal(attend(*tensors, other), wanted[1])
        assert sdpa.last_choice().kernel is chosen
    for tensor, changed in zip(tensors_of(mask), tensors_of(other), strict=True):
        tensor.copy_(changed)
    assert torch.equal(attend(*tensors, mask), wanted[1])
    assert len(ways) == 2 and remembered() == 1


@pytest.mark.parametrize("name", MASKS)
def test_derivatives_beside_masks_with_tensors(name, ways):
    check_derivatives(MASKS[name]())
    assert len(ways) == remembered() == 1


def test_lengths_may_change_before_the_backward():
    tensors, lengths = qkv(grad=True), integers(9, 14)
    wanted = torch.autograd.grad(ordinary(*tensors, sdpa.Mask(lengths=lengths)).sum(), tensors)
    for _ in range(2):
        out = attend(*tensors, sdpa.Mask(lengths=lengths))
        before = lengths.clone()
        lengths.fill_(1)
        torch.testing.assert_close(torch.autograd.grad(out.sum(), tensors), wanted)
        lengths.copy_(before)


def test_a_prefix_is_read_at_every_call(ways):
    tensors = qkv()
    for prefix in (0, 3, 5, 40):
        mask = sdpa.Mask(causal=True, prefix=prefix)
        assert torch.equal(attend(*tensors, mask), ordinary(*tensors, mask))
    assert remembered() == 1 and len(ways) == 4


def test_a_call_is_known_by_the_form_of_its_mask(ways):
    """Which fields there are, their sizes, strides and dtypes, and the band."""
    tensors = qkv()
    masks = [make() for make in MASKS.values()]
    masks += [masks[0].replace(causal=True), masks[0].replace(window=(3, 3)), masks[0].replace(align="bottom_right")]
    masks += [sdpa.Mask(bias=noise(N, M).T), sdpa.Mask(bias=noise(1, N)), sdpa.Mask(bias=noise(M, N).float())]
    wanted = [ordinary(*tensors, mask) for mask in masks]
    for number, (mask, want) in enumerate(zip(masks, wanted, strict=True), 1):
        assert torch.equal(attend(*tensors, mask), want)
        assert remembered() == number
    for mask, want in zip(masks, wanted, strict=True):
        assert torch.equal(attend(*tensors, mask), want)
    few = qkv(keys=9)
    assert torch.equal(attend(*few, masks[0]), ordinary(*few, masks[0]))
    assert remembered() == len(masks) + 1
    assert len(ways) == len(masks) + 1


def test_recorded_launches_are_given_the_tensors_of_each_call(monkeypatch):
    """What a mask's tensors hold is no part of a recording, whichever fields they are."""
    given = []

    def record(nouns, problem, tile):
        fields = nouns[0]

        def again(*tensors):
            given.append(tensors)
            values = iter(tensors)
            inputs = fields._make(next(values) if isinstance(f, torch.Tensor) else f for f in fields)
            return math.forward(inputs, problem, tile)

        return math.forward(*nouns, problem, tile), again

    monkeypatch.setattr(math, "record", record, raising=False)
    tensors = qkv()
    for name in ("lengths", "prefixes", "segments", "allowed", "all"):
        given.clear()
        for shift in range(3):
            mask = MASKS[name]()
            for tensor in tensors_of(mask):
                tensor.copy_(tensor.roll(shift, -1))
            assert torch.equal(attend(*tensors, mask, kernel="math"), ordinary(*tensors, mask, kernel="math"))
        assert len(given) >= 2 and all(len(g) == 3 + len(tensors_of(mask)) for g in given)
        assert all(a is b for g in given for a, b in zip(g[:3], tensors, strict=True))


@pytest.mark.parametrize("grad", [False, True])
def test_no_tensors_are_kept(grad):
    tensors, mask = qkv(grad=grad), MASKS["all"]()
    for _ in range(2):
        attend(*tensors, mask)
    assert remembered() == 1 and CALLS.recent
    kept = [weakref.ref(tensor) for tensor in (*tensors, *tensors_of(mask))]
    del tensors, mask
    gc.collect()
    assert not any(ref() is not None for ref in kept)


def test_wrong_masks_are_refused_at_any_call():
    tensors, right = qkv(), MASKS["all"]()
    wrong = {
        r"Expected lengths to have shape \(2,\) or \(1,\) or \(\), but got \(3,\)": {"lengths": integers(1, 2, 3)},
        r"Expected query segments to have shape": {"segments": integers(*IDS)},
        r"Expected alibi slopes to have shape": {"alibi": noise(H + 1)},
        r"Mask.allowed of shape \(4, 4\) does not broadcast": {"allowed": noise(4, 4) > 0},
        r"Expected Mask.bias dtype to be bool or float or to match": {"bias": noise(M, N).half()},
        r"Expected lengths to be on the query's device cpu, but got meta": {"lengths": integers(9, 14).to("meta")},
        r"Expected alibi slopes without requires_grad": {"alibi": noise(H).requires_grad_()},
    }
    for _ in range(2):
        for message, fields in wrong.items():
            with pytest.raises(RuntimeError, match=message):
                attend(*tensors, right.replace(**fields))
        with pytest.raises(RuntimeError, match="Explicit attn_mask should not be set when is_causal=True"):
            attend(*tensors, right, is_causal=True)
        attend(*tensors, right)


def test_a_kernel_that_cannot_start_is_replaced(monkeypatch):
    tensors, mask = qkv(), MASKS["lengths"]()
    wanted = attend(*tensors, mask)
    (run,) = forwards()

    def refused(*_):
        raise RuntimeError("cannot read addresses that are not aligned")

    monkeypatch.setattr(run, "again", refused)
    with pytest.warns(UserWarning, match="math answers instead"):
        torch.testing.assert_close(attend(*tensors, mask), wanted)
    assert sdpa.last_choice().kernel.name == "math"


def differing_options(q, k, v):
    """Calls that say more than query, key, value and a mask without gradients, each remembered from its first time."""
    learned = torch.zeros(M, N, dtype=q.dtype, requires_grad=True)
    return [
        lambda: attend(q, k, v, sdpa.Mask(causal=True), softcap=2.0),
        lambda: attend(q, k, v, learned),
        lambda: attend(q[0], k[0], v[0], sdpa.Mask(causal=True)),
        lambda: attend(q, k, v, sdpa.Mask(bias=learned)),
        lambda: attend(q, k, v, sdpa.Mask(alibi=torch.nn.Parameter(torch.ones(H), requires_grad=False))),
        lambda: attend(q, k, v, sdpa.Mask(causal=True), sinks=noise(H)),
        lambda: attend(q, k, v, sdpa.Mask(causal=True), return_lse=True)[1],
        lambda: torch.autocast("cpu", torch.bfloat16)(attend)(q.float(), k.float(), v.float(), sdpa.Mask(causal=True)),
    ]


def test_what_else_a_call_says_is_remembered_too(ways):
    for number, call in enumerate(differing_options(*qkv()), 1):
        assert torch.equal(call(), call())
        assert remembered() == number
    assert not ways


def test_what_goes_to_the_operator(ways):
    q, k, v = qkv()
    calls = [
        lambda: attend(q, k, v, Other(causal=True)),
        lambda: attend(q[:, :, :0], k, v, sdpa.Mask(causal=True)),
        lambda: torch.func.vmap(lambda q: attend(q, q, q, sdpa.Mask(causal=True)))(q),
        lambda: torch.func.vmap(lambda n: attend(q, k, v, sdpa.Mask(lengths=n)))(integers(9, 5, 14)),
    ]
    for number, call in enumerate(calls, 1):
        assert torch.equal(call(), call())
        assert len(ways) == 2 * number
    assert not remembered()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("field", ["segments", "cu_seqlens"])
def test_ids_of_self_attention_are_one_tensor(field, dtype):
    """Launches are recorded by addresses, of which two tensors in one place would leave it open which is which."""
    q = torch.zeros(1, 2, 6, 8)
    ids = integers(*((0, 0, 1, 1, 1, 2) if field == "segments" else (0, 2, 5, 6)), dtype=dtype)
    same = build_inputs(q, q, q, Options(sdpa.Mask(**{field: ids})))
    assert same.q_segments is same.k_segments
    apart = build_inputs(q, q, q, Options(sdpa.Mask(**{field: (ids, ids.clone())})))
    assert apart.q_segments is not apart.k_segments
    for ours in (same, apart):
        assert (ours.q_segments[0, :, None] == ours.k_segments[0]).sum().item() == 2 * 2 + 3 * 3 + 1
