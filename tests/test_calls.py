"""The one memory of calls: what is dropped and when, and that a call is never taken for another."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from itertools import permutations
from operator import itemgetter

import numpy as np
import pytest
import torch
from remembered import Other, remembered
from torch.utils.checkpoint import checkpoint

import sdpa
import sdpa.nn
from helpers import integers
from sdpa import calls as memory
from sdpa import entry
from sdpa import scaled_dot_product_attention as attend
from sdpa.calls import CALLS, Pass

pytestmark = pytest.mark.usefixtures("nothing_remembered")


@pytest.fixture
def made(monkeypatch):
    """The numbers of keys of the calls that were prepared."""
    sizes, prepare = [], entry.prepare

    def noted(request):
        sizes.append(request.call.key.shape[-2])
        return prepare(request)

    monkeypatch.setattr(entry, "prepare", noted)
    return sizes


def small_memory(monkeypatch, calls, states=memory.MAX_STATES):
    monkeypatch.setattr(memory, "MAX_CALLS", calls)
    monkeypatch.setattr(memory, "MAX_STATES", states)


def operators(query, key, value, **options):
    """The same call as the operator's, of which nothing is remembered."""
    CALLS.clear()
    return attend(query, key, value, Other(), **options)


def qkv(N=12, grad=False, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 4, n, 8, generator=generator).to(dtype).requires_grad_(grad) for n in (12, N, N)]


# -- what is dropped --------------------------------------------------------------------------------------------------


def test_the_least_recently_used_go_first(monkeypatch, made):
    """The latest of a state count as used until they leave these."""
    small_memory(monkeypatch, 20)
    first, second, new = range(1, 11), range(11, 21), range(21, 27)
    for N in (*first, *second, *first, *new, *first):
        attend(*qkv(N))
    assert made == [*first, *second, *new]  # the first ten were used again before the new ones came
    made.clear()
    for N in (*new, *first, 11):
        attend(*qkv(N))
    assert made == [11]


@pytest.mark.parametrize("apart", [False, True], ids=["of its state", "of other states"])
def test_a_call_in_use_is_never_dropped(apart, monkeypatch, made):
    small_memory(monkeypatch, 2 * memory.LATEST)
    used = qkv(50)
    for number in range(1, 30):
        attend(*qkv(number), scale=1.0 + number if apart else None)
        attend(*used)
    for number in range(1, 2 * memory.LATEST):
        attend(*qkv(number))
        attend(*used)
    assert made.count(50) == 1


def test_a_call_in_use_is_never_dropped_with_its_state(monkeypatch, made):
    """Also where more states than are kept come by."""
    small_memory(monkeypatch, 12, states=3)
    used = qkv(50)
    for number in range(1, 10):
        attend(*qkv(3), scale=1.0 + number)
        attend(*used)
    assert made.count(50) == 1


def test_memory_is_bounded(monkeypatch):
    """After many shapes and states of front-door calls and operators, forward and backward."""
    small_memory(monkeypatch, 8, states=5)
    for number in range(1, 40):
        attend(*qkv(number))
        attend(*qkv(number, grad=True), scale=1.0 + number % 7).sum().backward()
        attend(*qkv(number), sdpa.Mask(lengths=integers(number, 1)))
        torch.ops.sdpa.attention_forward(*qkv(number), 0.5)
    assert len(CALLS.known) == 8
    assert len(CALLS.recent) <= 5
    assert max(map(len, CALLS.recent.values())) <= memory.LATEST
    gc.collect()
    alive = sum(type(found) is Pass for found in gc.get_objects())
    assert alive <= 2 * (8 + 5 * memory.LATEST)  # a forward and a backward of each


def documents(alike=True):
    cu = integers(0, 4, 9)
    rows = [torch.randn(10, 4, 8) for _ in range(3)]
    return [*rows, cu, cu if alike else integers(0, 5, 9)]


def paged():
    caches = [torch.randn(4, 4, 2, 8) for _ in range(2)]
    return [torch.randn(2, 1, 4, 8), *caches, integers(0, 1, 2, 3).view(2, 2), integers(5, 7)]


KEPT = {
    "plain": lambda: (qkv(), {}),
    "training": lambda: (qkv(grad=True), {}),
    "dropout": lambda: (qkv(grad=True), {"dropout_p": 0.5}),
    "return_lse": lambda: (qkv(grad=True), {"return_lse": True}),
    "sinks": lambda: (qkv(), {"sinks": torch.randn(4)}),
    "bias": lambda: ([*qkv(), torch.randn(12, 12, requires_grad=True)], {}),
    "one tensor": lambda: (3 * qkv()[:1], {}),
    "three dimensions": lambda: ([t[0] for t in qkv()], {}),
    "bfloat16": lambda: (qkv(dtype=torch.bfloat16), {"kernel": "math"}),
}


@pytest.mark.parametrize("name", KEPT)
def test_no_tensors_are_kept(name):
    tensors, options = KEPT[name]()
    for _ in range(3):
        found = attend(*tensors, **options)
    assert remembered() == 1
    alive = [weakref.ref(t) for t in (*tensors, *options.values(), found) if isinstance(t, torch.Tensor)]
    del tensors, options, found
    gc.collect()
    assert not any(ref() is not None for ref in alive)


def test_no_tensors_of_packed_and_paged_calls_are_kept():
    for make, run in (
        (documents, lambda *given: sdpa.varlen_attention(*given, 7, 7)),
        (lambda: documents(False), lambda *given: sdpa.varlen_attention(*given, 7, 7)),
        (paged, lambda *given: sdpa.paged_attention(*given, enable_gqa=True)),
    ):
        tensors = make()
        for _ in range(3):
            run(*tensors)
        alive = [weakref.ref(t) for t in tensors]
        del tensors
        gc.collect()
        assert not any(ref() is not None for ref in alive)
    assert remembered("varlen_attention") == 2 and remembered("paged_attention") == 1


# -- Python calls of a repeated call ----------------------------------------------------------------------------------


def frames(call, own=False):
    """Python functions that a repeated call goes through; `own` leaves out torch's."""
    for _ in range(4):
        call()
    files = []

    def note(frame, event, _):
        if event == "call":
            files.append(frame.f_code.co_filename)

    gc.disable()  # a finaliser's frames are not the call's
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    return sum(not own or "/torch/" not in file for file in files) - 1  # `call` itself


def learned_call():
    tensors, upstream = qkv(grad=True), torch.randn(2, 4, 12, 8)
    return lambda: attend(*tensors).backward(upstream)


def dense_call(mask=None, make=qkv, **options):
    tensors = make()
    return lambda: attend(*tensors, mask, **options)


def varlen_call(alike):
    given = documents(alike)
    return lambda: sdpa.varlen_attention(*given, 7, 7)


def paged_call():
    given = paged()
    return lambda: sdpa.paged_attention(*given, enable_gqa=True)


COUNTED = {
    "plain": (6, dense_call),
    "Mask(causal)": (8, lambda: dense_call(sdpa.Mask(causal=True))),
    "Mask(lengths)": (16, lambda: dense_call(sdpa.Mask(lengths=integers(5, 9)))),
    "training": (16, learned_call),
    "dropout": (20, lambda: dense_call(dropout_p=0.5)),
    "softcap": (20, lambda: dense_call(softcap=2.0)),
    "numbers that are no floats": (20, lambda: dense_call(dropout_p=0, scale=1, softcap=np.float64(2.0))),
    "sinks": (20, lambda: dense_call(sinks=torch.randn(4))),
    "return_lse": (20, lambda: dense_call(return_lse=True)),
    "bool mask": (20, lambda: dense_call(torch.ones(12, 12, dtype=torch.bool))),
    "kernel": (20, lambda: dense_call(kernel="cpu_flash")),
    "Parameters": (20, lambda: dense_call(make=lambda: [torch.nn.Parameter(t) for t in qkv()])),
    "one tensor": (20, lambda: dense_call(make=lambda: itemgetter(0, 0, 0)(qkv()))),
    "keys as values": (20, lambda: dense_call(make=lambda: itemgetter(0, 1, 1)(qkv()))),
    "varlen": (20, lambda: varlen_call(True)),
    "varlen, other keys": (20, lambda: varlen_call(False)),
    "paged": (20, paged_call),
}


@pytest.mark.parametrize("name", COUNTED)
def test_python_calls_of_a_repeated_call(name):
    bar, make = COUNTED[name]
    assert frames(make(), own=name == "training") <= bar


def test_python_calls_under_autocast():
    call = dense_call()
    with torch.autocast("cpu", torch.bfloat16):
        assert frames(call) <= 20


def test_python_calls_of_a_module():
    module, x = sdpa.nn.MultiheadAttention(32, 4, batch_first=True).eval(), torch.randn(2, 5, 32)
    with torch.no_grad():
        assert frames(lambda: module(x, x, x, need_weights=False)) <= 20


# -- what a call is known by ------------------------------------------------------------------------------------------


def in_any_order(calls, same=torch.testing.assert_close):
    """Each call's results are right whichever came before: `calls` are (what is remembered, what is right)."""
    wanted = [right() for _, right in calls]
    for order in permutations(range(len(calls))):
        CALLS.clear()
        for number in 2 * order:
            same(calls[number][0](), wanted[number])


def with_gradients(out, leaves):
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)]


@pytest.mark.parametrize("grad", [False, True])
def test_one_tensor_in_several_roles(grad):
    q, k, v = qkv(grad=grad, dtype=torch.float64)
    roles = [(q, k, v), (q, q, q), (q, k, k), (q, q, v)]

    def run(given, function):
        out = function(*given)
        return with_gradients(out, list(dict.fromkeys(given))) if grad else out

    in_any_order([(lambda g=g: run(g, attend), lambda g=g: run(g, operators)) for g in roles])
    copies = [t.detach().clone() for t in (q, q, q)]
    torch.testing.assert_close(attend(q, q, q).detach(), attend(*copies))


@pytest.mark.parametrize("grad", [False, True])
def test_cumulative_lengths_of_one_tensor_and_of_two(grad):
    """Of the same values and of others, in any order."""
    rows = [t.transpose(1, 2)[0].clone().requires_grad_(grad) for t in qkv(dtype=torch.float64)]
    cu, equal, other = integers(0, 5, 12), integers(0, 5, 12), integers(0, 8, 12)
    segments = {id(c): torch.repeat_interleave(torch.arange(2), c.diff().long()) for c in (cu, equal, other)}

    def found(cu_q, cu_k):
        out = sdpa.varlen_attention(*rows, cu_q, cu_k, 12, 12)
        return with_gradients(out, rows) if grad else out

    def right(cu_q, cu_k):
        allowed = segments[id(cu_q)][:, None] == segments[id(cu_k)]
        scores = torch.einsum("mhd,nhd->hmn", rows[0], rows[1]) / 8**0.5
        out = torch.einsum("hmn,nhd->mhd", scores.masked_fill(~allowed, -torch.inf).softmax(-1), rows[2])
        return with_gradients(out, rows) if grad else out

    pairs = [(cu, cu), (cu, equal), (cu, other), (other, cu)]
    in_any_order([(lambda p=p: found(*p), lambda p=p: right(*p)) for p in pairs])


def test_autocast_and_its_dtypes():
    q, k, v = qkv()

    def under(dtype):
        with torch.autocast("cpu", dtype):
            return attend(q, k, v)

    def off():
        with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
            return attend(q, k, v)

    calls = [(lambda: attend(q, k, v), lambda: operators(q, k, v)), (off, lambda: operators(q, k, v))]
    for dtype in (torch.bfloat16, torch.float16):
        calls.append((lambda d=dtype: under(d), lambda d=dtype: operators(*(t.to(d) for t in (q, k, v)))))
    in_any_order(calls)
    assert [call().dtype for call, _ in calls] == [torch.float32, torch.float32, torch.bfloat16, torch.float16]


def test_gradients_reach_what_autocast_cast():
    leaves = qkv(grad=True)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            out = attend(*leaves)
        assert out.dtype == torch.bfloat16
        found = torch.autograd.grad(out.float().sum(), leaves)
        cast = [t.bfloat16() for t in leaves]
        wanted = torch.autograd.grad(operators(*cast).float().sum(), leaves)
        assert all(g.dtype == torch.float32 for g in found)
        torch.testing.assert_close(found, wanted)


MASKED = {
    "bias": lambda: torch.randn(5, 5),
    "bool": lambda: torch.rand(5, 5) > 0.3,
    "bias of a mask": lambda: sdpa.Mask(bias=torch.randn(5, 5)),
    "lengths": lambda: sdpa.Mask(causal=True, lengths=integers(3)),
    "none": lambda: None,
}


@pytest.mark.parametrize("shape", [(5, 8), (1, 5, 8), (1, 1, 5, 8), (1, 1, 1, 5, 8)], ids=str)
@pytest.mark.parametrize("mask", MASKED)
@pytest.mark.parametrize("options", [{}, {"dropout_p": 1.0}, {"return_lse": True}], ids=str)
def test_what_is_remembered_holds_no_tensor(shape, mask, options, others_frozen):
    """Of a call of any rank: not its mask, whose graph may be large, and not its sinks."""
    held = []
    for _ in range(3):
        tensors, given, sinks = [torch.randn(shape) for _ in range(3)], MASKED[mask](), torch.randn(1)
        attend(*tensors, given, sinks=sinks, **options)
        inside = (given.bias, given.lengths) if isinstance(given, sdpa.Mask) else (given,)
        held += [weakref.ref(t) for t in (*tensors, *inside, sinks) if t is not None]
        del tensors, given, sinks, inside
    gc.collect()
    assert not [ref for ref in held if ref() is not None]


def test_what_is_remembered_of_modules_and_documents_holds_no_tensor():
    module, held = sdpa.nn.MultiheadAttention(16, 2, batch_first=True), []
    for _ in range(3):
        x, mask, sinks = torch.randn(1, 4, 16), torch.randn(4, 4), torch.randn(2)
        module(x, x, x, attn_mask=mask, need_weights=True)
        rows, ends = torch.randn(7, 2, 8), integers(0, 3, 7)
        sdpa.varlen_attention(rows, rows, rows, ends, ends, 4, 4, sinks=sinks)
        held += [weakref.ref(t) for t in (x, mask, sinks, rows, ends)]
        del x, mask, sinks, rows, ends
    gc.collect()
    assert not [ref for ref in held if ref() is not None]


@pytest.mark.parametrize("shape", [(5, 8), (1, 2, 5, 8)], ids=str)
def test_gradients_that_are_enabled_inside_of_inference(shape):
    """Nothing is recorded there, as torch records nothing; calls outside are others."""
    q, k, v = (torch.randn(shape) for _ in range(3))
    for learned in (torch.nn.Parameter(q), q.clone().requires_grad_()):
        for _ in range(3):
            with torch.inference_mode(), torch.enable_grad():
                inside = attend(learned, k, v)
                with torch.inference_mode(False):
                    between = attend(learned, k, v)
            outside = attend(learned, k, v)
            assert [out.requires_grad for out in (inside, between, outside)] == [False, True, True]
            assert inside.is_inference() and torch.equal(inside, outside)


def test_requires_grad_and_modes_of_it():
    q, k, v = qkv()
    learned = q.clone().requires_grad_()
    parameter = torch.nn.Parameter(q.clone())
    frozen = torch.nn.Parameter(q.clone(), requires_grad=False)

    def inference():
        with torch.inference_mode():
            return attend(q, k, v)

    def made_in_inference():
        with torch.inference_mode():
            return attend(q.clone(), k.clone(), v.clone())

    calls = {
        "plain": (lambda: attend(q, k, v), False),
        "learned": (lambda: attend(learned, k, v), True),
        "parameter": (lambda: attend(parameter, k, v), True),
        "frozen": (lambda: attend(frozen, k, v), False),
        "no_grad": (lambda: torch.no_grad()(attend)(learned, k, v), False),
        "no_grad, parameter": (lambda: torch.no_grad()(attend)(parameter, k, v), False),
        "inference": (inference, False),
        "made in inference": (made_in_inference, False),
    }
    wanted = operators(q, k, v)
    for first in calls:
        CALLS.clear()
        for name in 2 * [first, *calls]:
            call, learns = calls[name]
            out = call()
            assert out.requires_grad == learns, (first, name)
            assert out.is_inference() == ("inference" in name)
            torch.testing.assert_close(out, wanted)
            if learns:
                leaf = learned if name == "learned" else parameter
                (found,) = torch.autograd.grad(out.sum(), leaf)
                assert found.isfinite().all() and found.shape == leaf.shape


# -- checkpointing and dropout ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("alike", [True, False])
def test_checkpointed_packed_calls_of_new_sizes(alike):
    """The first call of each size is prepared inside of the checkpoint, and saves what its repetition saves."""
    for T in (6, 9, 10, 7, 9):
        leaves = [torch.randn(T, 4, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
        cu_q = integers(0, 4, T)
        cu_k = cu_q if alike else integers(0, 2, T)

        def run(*given, cu_q=cu_q, cu_k=cu_k, T=T):
            return sdpa.varlen_attention(*given, cu_q, cu_k, T, T)

        out = checkpoint(run, *leaves, use_reentrant=False)
        found = torch.autograd.grad(out.square().sum(), leaves)
        torch.testing.assert_close(found, torch.autograd.grad(run(*leaves).square().sum(), leaves))


def test_a_padded_decoder_that_is_checkpointed(packed):
    torch.manual_seed(0)
    layer = sdpa.nn.TransformerDecoderLayer(16, 2, 32, 0.0, batch_first=True)
    decoder = sdpa.nn.TransformerDecoder(layer, 2).train()
    parameters = list(decoder.parameters())
    for M, N in ((5, 9), (7, 4), (6, 11), (5, 9)):
        tgt, source = torch.randn(3, M, 16), torch.randn(3, N, 16)
        padded = {
            "tgt_key_padding_mask": torch.arange(M) >= torch.tensor([[M], [2], [3]]),
            "memory_key_padding_mask": torch.arange(N) >= torch.tensor([[2], [N], [3]]),
        }

        def run(tgt, source, padded=padded):
            return decoder(tgt, source, **padded)

        seen = ~padded["tgt_key_padding_mask"][..., None]
        outs = checkpoint(run, tgt, source, use_reentrant=False), run(tgt, source)
        found, wanted = (torch.autograd.grad((out.square() * seen).sum(), parameters) for out in outs)
        torch.testing.assert_close(found, wanted)
    assert packed  # so that its layers call varlen_attention


DROPPING = {
    "dense": lambda: (lambda *t: attend(*t, dropout_p=0.4), qkv()),
    "masked": lambda: (lambda *t: attend(*t, sdpa.Mask(causal=True), dropout_p=0.4), qkv()),
    "learned": lambda: (lambda *t: attend(*t, dropout_p=0.4), qkv(grad=True)),
    "return_lse": lambda: (lambda *t: attend(*t, dropout_p=0.4, return_lse=True)[0], qkv()),
    "three dimensions": lambda: (lambda *t: attend(*t, dropout_p=0.4), [t[0] for t in qkv()]),
    "varlen": lambda: (lambda *t: sdpa.varlen_attention(*t, 7, 7, dropout_p=0.4), documents()),
    "varlen, other keys": lambda: (lambda *t: sdpa.varlen_attention(*t, 7, 7, dropout_p=0.4), documents(False)),
    "paged": lambda: (lambda *t: sdpa.paged_attention(*t, dropout_p=0.4, enable_gqa=True), paged()),
    "autocast": lambda: (lambda *t: torch.autocast("cpu", torch.bfloat16)(attend)(*t, dropout_p=0.4), qkv()),
    "all dropped": lambda: (lambda *t: attend(*t, dropout_p=1.0), qkv()),
}


@pytest.mark.parametrize("name", DROPPING)
def test_a_seed_is_drawn_once_by_each_call(name):
    """The same generator state gives the same result at the first call and at later ones, and is left the same."""
    run, tensors = DROPPING[name]()
    results, states = [], []
    for _ in range(3):
        torch.manual_seed(5)
        results.append(run(*tensors))
        states.append(torch.get_rng_state())
        following = run(*tensors)
    for result, state in zip(results[1:], states[1:], strict=True):
        assert torch.equal(result, results[0])
        assert torch.equal(state, states[0])
    assert torch.equal(following, results[0]) == (name == "all dropped")


def test_a_seed_is_that_of_the_operator():
    tensors = qkv()
    for _ in range(3):
        torch.manual_seed(5)
        found = attend(*tensors, dropout_p=0.4)
        torch.manual_seed(5)
        assert torch.equal(found, attend(*tensors, Other(), dropout_p=0.4))


# -- threads ----------------------------------------------------------------------------------------------------------


class Nesting:
    """A key during whose look-up another call is made, as by a finaliser."""

    def __init__(self):
        self.nested = []

    def __hash__(self):
        if self.nested:
            self.nested.pop()()
        return 1


@pytest.mark.parametrize("nested", ["call", "clear"])
def test_calls_inside_of_a_look_up(nested, monkeypatch):
    small_memory(monkeypatch, 3)
    for step in range(4):
        known = memory.Calls()
        key = (Nesting(),)
        for number in (key, (1,), (2,)):
            known.use(number, number)
        inner = known.clear if nested == "clear" else lambda known=known: known.use(("new",), 9)
        key[0].nested = [lambda: None] * step + [inner]
        known.use(key, "found")
        assert known.known[key] == "found" and len(known.known) <= 3


def test_threads_with_calls_of_their_own(monkeypatch):
    """More calls than are kept, so that each drops those of others."""
    small_memory(monkeypatch, 4, states=3)
    inputs = {N: qkv(N, dtype=torch.float64) for N in range(1, 8)}
    options = [{}, {"scale": 0.3}, {"softcap": 2.0}, {"kernel": "math"}, {"is_causal": True}]
    wanted = {(N, n): operators_of(inputs[N], given) for N in inputs for n, given in enumerate(options)}
    wrong = []

    def many(seed):
        try:
            for step in range(400):
                N, n = 1 + (step * seed) % 7, (step // 3 + seed) % len(options)
                out = attend(*inputs[N], **options[n])
                if not torch.allclose(out, wanted[N, n]):
                    wrong.append((N, n))
        except Exception as error:
            wrong.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=many, args=(seed,)) for seed in (1, 2, 3, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong
    assert len(CALLS.known) <= 4 and len(CALLS.recent) <= 3


def operators_of(tensors, options):
    if options.get("is_causal"):
        return attend(*tensors, Other(causal=True))
    return attend(*tensors, Other(), **options)
