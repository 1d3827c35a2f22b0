"""Small cases that together reach every line of the Metal kernels, for run_mutations.py."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple
from unittest.mock import patch

import torch
from metal import emulator

import helpers
from sdpa import Mask
from sdpa.dispatch.catalog import by_name
from sdpa.inputs import Options, build_inputs
from sdpa.kernels.metal import flash, launch, source
from sdpa.philox import HALF, NUMBERS, WORD, philox
from sdpa.problem import AttentionInputs, AttentionProblem, Results
from sdpa.reference import attention as reference
from sdpa.testing import (
    Case,
    Comparison,
    Draw,
    check_inputs,
    compare,
    compare_weights,
    differentiate,
    lse_of,
    make_inputs,
    reference_weights,
)

ALL = ("primitives", "mask", "rows", "scores")
BACKWARD = ("forward", "backward_q", "backward_kv")


class Checked(NamedTuple):
    name: str
    files: tuple[str, ...]  # whose kernels it runs
    run: Callable[[], list[Comparison]]

    @property
    def checked(self) -> bool:
        """Whether it is among the few that run with every access checked."""
        return self.name in SELECTED

    def concerns(self, file: str) -> bool:
        return file in self.files or file in ALL


@contextmanager
def emulated():
    """The Metal path on CPU tensors; memory that nobody wrote is NaN."""
    row = by_name()["metal_flash"]
    devices = row.devices
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    object.__setattr__(row, "devices", (*devices, "cpu"))
    try:
        with (
            patch.object(torch.mps, "compile_shader", emulator.compile_shader),
            patch.object(torch.mps, "synchronize", lambda: None),
            patch.object(flash, "unavailable", lambda: None),
        ):
            yield
    finally:
        object.__setattr__(row, "devices", devices)
        torch.use_deterministic_algorithms(before)


def dense(**options) -> Callable[[], list[Comparison]]:
    """Forward and backward of a case of sdpa.testing."""
    case = Case(**options)

    def run():
        grad_out = Draw(case, 1).normal(case.B, case.H, case.M, case.Dv)
        return check_inputs("metal_flash", make_inputs(case), grad_out, case.requires_bias_grad)

    return run


def given(make: Callable[[], AttentionInputs], bias_grad: bool = False) -> Callable[[], list[Comparison]]:
    """Forward and backward of inputs. The gradient that arrives has rows of its own in memory."""

    def run():
        inputs = make()
        (B, H, M, _), Dv = inputs.q.shape, inputs.v.shape[3]
        grad_out = torch.randn(B, H + 1, M + 2, Dv + 4, generator=torch.Generator().manual_seed(1))[:, 1:, 2:, 4:]
        return check_inputs("metal_flash", inputs, grad_out.to(inputs.q.dtype), bias_grad)

    return run


def tiled(M: int, N: int, run: Callable[[], list[Comparison]]) -> Callable[[], list[Comparison]]:
    """In tiles of such sizes; the kernel of keys takes them the other way round."""

    def run_tiled():
        with patch.object(source, "BLOCKS", ((M, N),)):
            return run()

    return run_tiled


def in_parts(run: Callable[[], list[Comparison]]) -> Callable[[], list[Comparison]]:
    """Each kernel in several dispatches."""

    def run_in_parts():
        with patch.object(launch, "MOST_FLOPS", 1e4):
            return run()

    return run_in_parts


def apart(mask: Mask | None = None, **options) -> Callable[[], AttentionInputs]:
    """Inputs of which no two have the same strides."""

    def make():
        draw = Draw(Case(), 6)
        q = draw.normal(2, 41, 5, 24)[:, :, 1:, :16].transpose(1, 2)
        k = draw.normal(2, 3, 60, 20)[:, 1:, 3:56, 4:]
        v = draw.normal(2, 55, 2, 32)[:, 2:, :, 8:].transpose(1, 2)
        return build_inputs(q, k, v, Options(mask, enable_gqa=True, **options))

    return make


def columns(rows: int, *widths: int) -> torch.Tensor:
    """Ascending numbers of documents of such widths, for each of some rows."""
    return torch.cat([torch.full((rows, width), i) for i, width in enumerate(widths)], 1)


def uneven(factor: float = 1.0) -> AttentionInputs:
    """Rows whose largest scores are further apart than float32 has exponents, over keys in several parts."""
    draw = Draw(Case(), 12)
    q = draw.normal(1, 2, 3, 16) * factor * torch.tensor([1e-2, 50.0, 1.0]).view(3, 1)
    return build_inputs(q, draw.normal(1, 1, 800, 16), draw.normal(1, 1, 800, 16), Options(enable_gqa=True))


def biased(inputs: AttentionInputs, *shape: int) -> AttentionInputs:
    return inputs._replace(bias=Draw(Case(), 11).normal(*shape))


def documents() -> AttentionInputs:
    """Documents that end elsewhere in each batch entry, with whole blocks of other documents."""
    draw = Draw(Case(), 7)
    q, k, v = draw.normal(2, 4, 90, 16), draw.normal(2, 2, 110, 16), draw.normal(2, 2, 110, 16)
    queries = torch.cat([columns(1, 32, 40, 18), columns(1, 8, 12, 70)])
    keys = torch.cat([columns(1, 30, 70, 10), columns(1, 5, 17, 88)])
    return build_inputs(q, k, v, Options(Mask(segments=(queries, keys)), enable_gqa=True))


def last_row_apart() -> AttentionInputs:
    """A document of the last query alone, whose keys fill blocks of their own."""
    draw = Draw(Case(), 7)
    q, k, v = draw.normal(1, 2, 32, 16), draw.normal(1, 2, 128, 16), draw.normal(1, 2, 128, 16)
    return build_inputs(q, k, v, Options(Mask(segments=(columns(1, 31, 1), columns(1, 64, 64)))))


def drawn_probability() -> AttentionInputs:
    """A probability of dropout that is exactly a random number of one of the pairs, which is then kept."""
    inputs = make_inputs(Case(**SIZES, dropout_p=0.4))
    assert inputs.rng is not None
    (key, counter), zero = inputs.rng.unbind(), torch.zeros((), dtype=torch.int64)
    words = torch.stack(philox((zero, zero, zero, counter & WORD), (key & WORD, key >> 32 & WORD)))
    return inputs._replace(dropout_p=int((words & HALF).median()) / NUMBERS)


def behind_lengths(*bias: int, **options) -> Callable[[], list[Comparison]]:
    """What lies behind the lengths changes nothing: not the bits, and no NaN comes from there. With the gradient of a
    bias of those sizes."""

    def run():
        draw = Draw(Case(), 10)
        q, k, v, grad_out = (draw.normal(3, 2, rows, 16) for rows in (50, 90, 90, 50))
        ends, rows = torch.tensor([40, 64, 7]), torch.tensor([50, 33, 20])
        extra = {"bias": draw.normal(*bias), "query_lengths": rows} if bias else {}
        hidden = (torch.arange(90) >= ends[:, None])[:, None, :, None]
        unseen = (torch.arange(50) >= rows[:, None])[:, None, :, None] & bool(bias)
        found = []
        for value in (0.0, torch.nan):
            keys, values = k.masked_fill(hidden, value), v.masked_fill(hidden, value)
            queries, upstream = q.masked_fill(unseen, value), grad_out.masked_fill(unseen, value)
            inputs = build_inputs(queries, keys, values, Options(Mask(lengths=ends, **extra, **options)))
            asked = frozenset({"lse"} | ({"bias_grad"} if bias else set()))
            forward, backward = (AttentionProblem.of(inputs, d, asked) for d in ("forward", "backward"))
            results = flash.forward(inputs, forward._replace(features=forward.features - {"bias_grad"}))
            gradients = flash.backward(inputs, results, Results(upstream, None), backward)
            found.append((*results, *(t for t in gradients if t is not None)))
        names = ("out", "lse", "grad_q", "grad_k", "grad_v", *(("grad_bias",) if bias else ()))
        return [
            Comparison(f"{name} behind lengths", 0.0 if torch.equal(a, b) else float("inf"), 0.0)
            for name, a, b in zip(names, *found, strict=True)
        ]

    return run


def hidden_of_heads() -> AttentionInputs:
    """A dense mask of a row for each head, which hides whole blocks of keys."""
    draw = Draw(Case(), 8)
    q, k, v = draw.normal(2, 4, 40, 16), draw.normal(2, 2, 110, 16), draw.normal(2, 2, 110, 16)
    ends = torch.tensor([[110, 3, 20, 70], [40, 90, 32, 33]]).view(2, 4, 1, 1)
    return build_inputs(q, k, v, Options(Mask(allowed=torch.arange(110) < ends), enable_gqa=True))


def sparse_memory(rows: int) -> AttentionInputs:
    """A dense mask whose neighbours are two elements apart in memory; one row hides whole blocks of early keys."""
    draw = Draw(Case(), 11)
    q, k, v = draw.normal(2, 2, 40, 16), draw.normal(2, 2, 110, 16), draw.normal(2, 2, 110, 16)
    seen = torch.arange(220) >= 120 if rows == 1 else draw.normal(220) < 0.5
    allowed = (seen & (draw.normal(2, 1, rows, 220) < 0.5))[..., ::2]
    return build_inputs(q, k, v, Options(Mask(allowed=allowed)))


def weights(mask: str, average: bool, **options) -> Callable[[], list[Comparison]]:
    def run():
        case = {"H": 4, "Hkv": 2, "mask": mask, "D": 16, "Dv": 16, "dropout_p": 0.2, "softcap": 2.0} | options
        inputs = make_inputs(Case(**case))
        problem = AttentionProblem.of(inputs, "weights", frozenset({"averaged"} if average else ()))
        got = flash.weights(inputs, lse_of(reference(inputs)).float(), problem)
        return [compare_weights(got, inputs, average)]

    return run


def weights_of_keys_before() -> list[Comparison]:
    """A window that cuts the keys before its queries alone."""
    draw = Draw(Case(), 5)
    mask = Mask(window=(9, 400), align="bottom_right")
    inputs = build_inputs(*(draw.normal(1, 2, rows, 16) for rows in (37, 70, 70)), Options(mask))
    got = flash.weights(inputs, lse_of(reference(inputs)).float(), AttentionProblem.of(inputs, "weights", frozenset()))
    return [compare_weights(got, inputs, False)]


def packed(H: int, Hkv: int, queries: tuple[int, ...], keys: tuple[int, ...], mask=None) -> AttentionInputs:
    """Documents in a row, with rows of none behind them."""
    draw = Draw(Case(), 4)
    q, k, v = (
        draw.normal(1, sum(rows) + extra, heads, 16).transpose(1, 2)
        for heads, rows, extra in ((H, queries, 3), (Hkv, keys, 1), (Hkv, keys, 1))
    )
    inputs = build_inputs(q, k, v, Options(mask, enable_gqa=True))
    cu_q, cu_k = (torch.tensor([0, *rows]).cumsum(0).int() for rows in (queries, keys))
    return inputs._replace(cu_q=cu_q, cu_k=cu_k, max_q=max(queries), max_k=max(keys))


def pages(M: int) -> list[Comparison]:
    """Keys in pages, in the order of a table."""
    draw = Draw(Case(), 5)
    q, k, v = draw.normal(2, 4, M, 16), draw.normal(7, 2, 8, 16), draw.normal(7, 2, 8, 16)
    table = torch.tensor([[6, 1, -1, -1, -1], [4, 0, 2, 5, 3]], dtype=torch.int32)
    lengths = torch.tensor([13, 37], dtype=torch.int32)
    inputs = build_inputs(q, k[:2], v[:2], Options(enable_gqa=True))
    inputs = inputs._replace(k=k, v=v, k_lengths=lengths, block_table=table)
    got = flash.forward(inputs, AttentionProblem.of(inputs, "forward", frozenset({"lse"})))
    wanted, plain = reference(inputs), reference(inputs, torch.float32)
    return [
        compare(name, getattr(got, name), getattr(wanted, name), getattr(plain, name), 60, 1e-6)
        for name in ("out", "lse")
    ]


def values_of_nothing() -> list[Comparison]:
    """The log-sum-exp of keys that are split, of which there is no output."""
    draw = Draw(Case(), 3)
    inputs = build_inputs(draw.normal(1, 2, 3, 16), draw.normal(1, 2, 1024, 16), torch.empty(1, 2, 1024, 0), Options())
    got = flash.forward(inputs, AttentionProblem.of(inputs, "forward", frozenset({"lse"}))).lse
    assert got is not None
    error = (got.double() - lse_of(reference(inputs))).abs().max()
    return [Comparison("lse", float(error), 1e-5)]


def of_lse() -> list[Comparison]:
    """Gradients that arrive at the log-sum-exp, too."""
    case = Case(H=2, Hkv=1, M=21, N=35, D=16, Dv=8, mask="causal", sinks=True)
    inputs, draw = make_inputs(case), Draw(case, 5)
    upstream = Results(draw.normal(2, 2, 21, 8), draw.normal(2, 2, 21))
    learned = [t.double().requires_grad_() for t in (*inputs[:3], inputs.sinks)]
    q, k, v, sinks = learned
    wanted = torch.autograd.grad(
        reference(inputs._replace(q=q, k=k, v=v, sinks=sinks)), learned, [t.double() for t in upstream]
    )
    forward, backward = (AttentionProblem.of(inputs, d, frozenset({"lse"})) for d in ("forward", "backward"))
    got = flash.backward(inputs, flash.forward(inputs, forward), upstream, backward)
    pairs = zip(("q", "k", "v", "sinks"), (*got[:3], got.sinks), wanted, strict=True)
    return [compare(name, g, w, w.float(), 100, 1e-5 * float(w.abs().max())) for name, g, w in pairs]


def bias_of(*shape: int) -> Callable[[], AttentionInputs]:
    def make():
        draw = Draw(Case(), 3)
        q, k, v = draw.normal(2, 4, 40, 16), draw.normal(2, 2, 45, 16), draw.normal(2, 2, 45, 16)
        return build_inputs(q, k, v, Options(Mask(bias=draw.normal(*shape)), enable_gqa=True))

    return make


def coarse(mask: Mask | None = None, **options) -> AttentionInputs:
    """Inputs some rows of which have a bias so low that their log-sum-exp is coarse, though scores still count."""
    inputs = apart(mask, **options)()
    bias = Draw(Case(), 11).normal(2, 4, inputs.q.shape[2], inputs.k.shape[2])
    bias[0, :, 3:9] -= 3000.0
    bias[1, :, 33:38] -= 5000.0
    return inputs._replace(bias=bias)


def hidden_rows() -> AttentionInputs:
    """Queries 3 to 20 have a bias of -1e9 for every key. Beside it float32 has no room for a score, so these are 0."""
    draw = Draw(Case(), 14)
    bias = draw.normal(1, 1, 40, 50)
    bias[:, :, 3:21] = -1e9
    q, k, v = torch.zeros(2, 4, 40, 24), draw.normal(2, 2, 50, 24), draw.normal(2, 2, 50, 8)
    return build_inputs(q, k, v, Options(bias, enable_gqa=True))


def packed_far_from_keys() -> AttentionInputs:
    """ALiBi of documents with fewer keys than queries: most rows have no key near, and a log-sum-exp below -1024."""
    slopes = torch.tensor([2000.0, 3000.0, 0.5, 1500.0])
    return packed(4, 2, (5, 8, 40), (11, 3, 6), Mask(alibi=slopes))


def of_coarse_rows(mask: Mask | None = None, **options) -> list[Comparison]:
    return of_rows(coarse(mask, **options))


def of_rows(inputs: AttentionInputs) -> list[Comparison]:
    """Forward, backward and weights. The budget of sdpa.testing grows with scores: here it is what float32 rounds a
    score of 5000 by, some times."""
    draw, learn = Draw(Case(), 12), inputs.sinks is not None
    grad_out = draw.normal(*inputs.q.shape[:3], inputs.v.shape[3])
    wanted, grads = differentiate(inputs, grad_out, torch.float64)
    forward, backward, weights_of = (
        AttentionProblem.of(inputs, d, frozenset(extra))
        for d, extra in (("forward", {"lse"}), ("backward", {"bias_grad"}), ("weights", ()))
    )
    results = flash.forward(inputs, forward)
    got = flash.backward(inputs, results, Results(grad_out, None), backward)
    pairs = [("out", results.out, wanted.out), *zip(grads._fields[: 4 + learn], got, grads, strict=False)]
    pairs.append(
        ("weights", flash.weights(inputs, lse_of(wanted).float(), weights_of), reference_weights(inputs, False))
    )
    return [
        Comparison(name, float((g.double() - w).abs().max().nan_to_num(nan=float("inf"))), 8e-4 * float(w.abs().max()))
        for name, g, w in pairs
    ]


def edges(N: int, mask: Mask, B: int = 1) -> Callable[[], AttentionInputs]:
    def make():
        draw = Draw(Case(), 9)
        return build_inputs(draw.normal(B, 1, 70, 8), draw.normal(B, 1, N, 8), draw.normal(B, 1, N, 8), Options(mask))

    return make


NEAR = torch.tensor([31, 32, 33])
SLOPES = torch.tensor([0.1, 0.2, 0.4, 0.8])
SIZES = {"B": 2, "H": 4, "Hkv": 2, "M": 37, "N": 53, "D": 16, "Dv": 40}
ODD = {"B": 2, "H": 2, "Hkv": 2, "M": 41, "N": 35, "D": 19, "Dv": 11, "layout": "bmhd"}
EVERYTHING = {"mask": "bias_causal", "sinks": True, "softcap": 2.0, "dropout_p": 0.3, "requires_bias_grad": True}
SELECTED = {
    "apart, causal",
    "odd",
    "few queries",
    "split",
    "tiles of 32 x 8",
    "packed apart",
    "documents",
    "bias of (1, 4, 1, 45)",
    "bias of (2, 1, 40, 1)",
    "bias apart",
    "weights of window",
    "weights of both_lengths on average",
    "few keys",
    "coarse rows",
    "pages",
}
CASES = [
    Checked("apart", BACKWARD, given(apart())),
    Checked("apart, causal", BACKWARD, given(apart(Mask(causal=True)))),
    *(
        Checked(f"tiles of {M} x {N}", (*BACKWARD, "bias_grad"), tiled(M, N, dense(**SIZES, **EVERYTHING)))
        for M, N in ((16, 32), (32, 16), (8, 32), (32, 8))
    ),
    Checked("plain", BACKWARD, dense(**SIZES)),
    Checked("causal", BACKWARD, dense(**SIZES, mask="causal")),
    Checked("odd", BACKWARD, dense(**ODD, mask="causal_bottom_right")),
    Checked("float32 of 64", BACKWARD, dense(B=1, H=2, Hkv=1, M=50, N=70, D=64, Dv=72)),
    Checked("half", BACKWARD, dense(**SIZES, dtype=torch.float16, mask="window")),
    Checked("few queries", BACKWARD, dense(B=2, H=6, Hkv=2, M=9, N=45, D=16, Dv=24, mask="causal_bottom_right")),
    Checked("one query", BACKWARD, dense(B=2, H=8, Hkv=1, M=1, N=41, D=32, Dv=16, mask="lengths")),
    Checked("split", ("forward",), dense(B=2, H=4, Hkv=2, M=3, N=780, D=8, Dv=40, mask="lengths", sinks=True)),
    Checked("split of half", ("forward",), dense(B=1, H=2, Hkv=2, M=5, N=1100, D=16, Dv=8, dtype=torch.float16)),
    Checked("everything", ALL, dense(**SIZES, **EVERYTHING)),
    *(
        Checked(mask, BACKWARD, dense(**SIZES, mask=mask))
        for mask in ("window_bottom_right", "both_lengths", "segments", "prefix", "alibi", "allowed", "padding")
    ),
    Checked("shared segments", BACKWARD, dense(**{**SIZES, "M": 61, "N": 61}, mask="segments_causal")),
    Checked("heads' masks", BACKWARD, dense(**ODD, mask="allowed_heads")),
    *(
        Checked(f"mask of every second element, {rows}", BACKWARD, given(partial(sparse_memory, rows)))
        for rows in (40, 1)
    ),
    Checked("sinks", BACKWARD, dense(**SIZES, sinks=True, mask="both_lengths")),
    Checked("dropout", BACKWARD, dense(**SIZES, dropout_p=0.4)),
    Checked("dropout of a part", BACKWARD, given(lambda: helpers.of_part(make_inputs(Case(**SIZES, dropout_p=0.4))))),
    Checked("drawn probability", BACKWARD, given(drawn_probability)),
    Checked("window of late keys", BACKWARD, dense(**{**SIZES, "M": 93, "N": 40}, mask="window_bottom_right")),
    Checked("alibi, late", BACKWARD, given(apart(Mask(causal=True, align="bottom_right", alibi=SLOPES)))),
    Checked("log-sum-exp", BACKWARD, of_lse),
    *(
        Checked(f"bias of {shape}", (*BACKWARD, "bias_grad"), given(bias_of(*shape), True))
        for shape in ((1, 1, 1, 1), (2, 1, 40, 1), (1, 4, 1, 45), (2, 4, 1, 1), (1, 1, 40, 45), (2, 4, 40, 45))
    ),
    Checked("bias_causal", ("bias_grad",), dense(**ODD, mask="bias_causal", requires_bias_grad=True, dropout_p=0.2)),
    Checked("bias_float32", ("bias_grad",), dense(**SIZES, mask="bias_float32", requires_bias_grad=True, softcap=1.0)),
    *(
        Checked(f"weights of {mask}{' on average' * average}", ("weights",), weights(mask, average, M=37, N=70))
        for mask in ("none", "window", "both_lengths", "segments")
        for average in (False, True)
    ),
    *(
        Checked(f"weights of {mask} in tiles of {M} x {N}", ("weights",), tiled(M, N, weights(mask, False, **sizes)))
        for M, N in ((16, 32), (32, 8))
        for mask, sizes in (
            ("window", {"D": 24, "M": 37, "N": 70}),
            ("causal", {"M": 70, "N": 70}),
            ("both_lengths", {"M": 70, "N": 70}),
        )
    ),
    Checked("weights of keys before", ("weights",), tiled(16, 32, weights_of_keys_before)),
    *(
        Checked(f"window {a}, {b}", BACKWARD, given(edges(70, Mask(window=(a, b)))))
        for a, b in ((30, 32), (31, 31), (32, 30), (33, 29))
    ),
    *(
        Checked(f"diagonal {n}", BACKWARD, given(edges(70 + n, Mask(causal=True, align="bottom_right"))))
        for n in (-33, -32, -31, -1, 1, 31, 32)
    ),
    Checked("lengths", BACKWARD, given(edges(70, Mask(lengths=NEAR + 32, query_lengths=NEAR), 3))),
    Checked("prefix and window", BACKWARD, given(edges(70, Mask(window=(31, 0), prefix=NEAR), 3))),
    Checked("long prefix", BACKWARD, given(edges(140, Mask(causal=True, prefix=torch.tensor([100]))))),
    Checked("packed", BACKWARD, given(lambda: packed(4, 2, (5, 0, 33, 40), (5, 0, 33, 40), Mask(causal=True)))),
    Checked("packed, few", BACKWARD, given(lambda: packed(4, 2, (5, 0, 3, 9), (5, 0, 3, 9)))),
    Checked("packed apart", BACKWARD, given(lambda: packed(4, 2, (5, 8, 40), (11, 37, 6)))),
    Checked("documents", BACKWARD, given(documents)),
    Checked("last row apart", BACKWARD, given(last_row_apart)),
    Checked("hidden of heads", BACKWARD, given(hidden_of_heads)),
    Checked("behind lengths", BACKWARD, behind_lengths()),
    *(
        Checked(
            f"behind lengths, bias of {sizes}",
            ("row_base", *BACKWARD, "bias_grad"),
            behind_lengths(*sizes, window=(9, 5)),
        )
        for sizes in ((3, 1, 50, 90), (1, 2, 1, 90))
    ),
    Checked("values of size 0, split", ("forward",), values_of_nothing),
    *(
        Checked(f"bias of a row in tiles of {M} x {N}", ("bias_grad",), tiled(M, N, given(bias_of(1, 4, 1, 45), True)))
        for M, N in ((16, 32), (32, 16))
    ),
    *(
        Checked(
            f"bias of a column in tiles of {M} x {N}",
            ("bias_grad",),
            tiled(M, N, given(lambda: biased(apart()(), 2, 1, 41, 1), True)),
        )
        for M, N in ((8, 32), (32, 8))
    ),
    Checked(
        "bias of whole tiles",
        ("bias_grad",),
        tiled(16, 32, dense(B=2, H=2, Hkv=1, M=32, N=64, D=8, Dv=8, mask="bias", requires_bias_grad=True)),
    ),
    *(
        Checked(f"coarse rows{name}", ("row_base", "weights", *BACKWARD, "bias_grad"), partial(of_coarse_rows, *given_))
        for name, given_ in (
            ("", ()),
            (" of lengths", (Mask(causal=True, lengths=torch.tensor([50, 31])),)),
            (" of a window", (Mask(window=(9, 4), align="bottom_right"),)),
            (" of keys before", (Mask(window=(9, 60), align="bottom_right"),)),
        )
    ),
    Checked(
        "coarse rows and sinks",
        ("row_base", *BACKWARD),
        partial(of_coarse_rows, sinks=torch.tensor([-3000.0, -3001.0, -2999.0, -3002.0])),
    ),
    Checked("rows that a bias hides", ("row_base", "weights", *BACKWARD, "bias_grad"), lambda: of_rows(hidden_rows())),
    Checked("packed far from keys", ("row_base", *BACKWARD), given(packed_far_from_keys)),
    Checked("coarse rows in tiles", ("row_base", *BACKWARD), tiled(16, 8, of_coarse_rows)),
    Checked("coarse rows in wide tiles", ("row_base", *BACKWARD), tiled(8, 32, of_coarse_rows)),
    Checked("bias apart", ("bias_grad",), given(lambda: biased(apart(Mask(window=(9, 4)))(), 2, 4, 41, 53), True)),
    *(
        Checked(
            f"bias and window in tiles of {M} x {N}",
            ("bias_grad",),
            tiled(M, N, given(lambda: biased(edges(90, Mask(window=(11, 2)))(), 1, 1, 70, 90), True)),
        )
        for M, N in ((16, 32), (32, 8))
    ),
    *(
        Checked(
            f"weights in parts{' on average' * average}", ("weights",), in_parts(weights("none", average, M=37, N=70))
        )
        for average in (False, True)
    ),
    Checked("in parts", ("row_base", *BACKWARD, "bias_grad"), in_parts(dense(**SIZES, **EVERYTHING))),
    Checked("no head", BACKWARD, dense(B=1, H=2, Hkv=1, M=9, N=11, D=0, Dv=8)),
    Checked("no head of values", BACKWARD, dense(B=1, H=2, Hkv=1, M=9, N=11, D=8, Dv=0)),
    Checked("split, uneven", ("forward",), given(uneven)),
    Checked("split of zeros", ("forward",), given(lambda: uneven(0.0))),
    Checked("few keys of lengths", BACKWARD, dense(B=3, H=2, Hkv=2, M=50, N=13, D=16, Dv=8, mask="both_lengths")),
    Checked("few keys", BACKWARD, dense(B=1, H=2, Hkv=2, M=50, N=13, D=16, Dv=8, mask="causal")),
    Checked("pages", ("forward",), lambda: pages(3)),
    Checked("pages of many queries", ("forward",), lambda: pages(37)),
]
