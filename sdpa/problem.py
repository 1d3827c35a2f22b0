"""The types that every layer shares: a call without its tensors (AttentionProblem), its tensors, and its results.

Glossary: B batch, H query heads, Hkv key/value heads, M queries, N keys, D head size of q and k, Dv head size of v.
This file imports nothing of the package but alignment and torch_private, so every kernel may import it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sdpa.alignment import BULK_BYTES, placement_of
from sdpa.torch_private import float32_precision

UNLIMITED = -1

# From this softcap on, the error of a kernel's tanh near 0 (1e-7 of the softcap) shows beside bfloat16's rounding.
LARGE_SOFTCAP = 1000.0
# Every optional feature of a call, and its name in a refusal. A kernel's row in the catalog lists those it supports;
# `why_not` takes the difference of the two sets.
FEATURES = {
    "band": "a causal mask or a window",
    "bottom_right": "a diagonal aligned to the bottom right corner",
    "bias": "an additive attention bias",
    "allowed": "a boolean attention mask",
    "k_lengths": "key lengths per batch entry",
    "q_lengths": "query lengths per batch entry",
    "segments": "segments (packed documents)",
    "packed": "packed sequences (cu_q, cu_k)",
    "paged": "a paged key/value cache",
    "prefix": "a bidirectional prefix",
    "alibi": "ALiBi slopes",
    "softcap": "softcap",
    "large_softcap": "a softcap above 1000",
    "sinks": "attention sinks",
    "dropout": "dropout",
    "nonpositive_scale": "a scale of zero or less",
    "gqa": "fewer key/value heads than query heads",
    "lse": "the log-sum-exp as a result, which a backward needs, too",
    "backward": "a backward pass",
    "bias_grad": "the gradient of the bias",
    "lse_grad": "a gradient arriving at the log-sum-exp",
    "averaged": "weights averaged over heads",
}


class AttentionInputs(NamedTuple):
    """The tensors and numbers of one call, normalised: four dimensions, nothing expanded but by stride 0.

    A key j is visible to query i (both counted inside their batch entry) when all of these hold:
      - i - left <= j - shift <= i + right, where UNLIMITED (-1) lifts a side and shift is 0, or with
        `bottom_right` the key length minus the query length; or j < prefix[b];
      - i < q_lengths[b] and j < k_lengths[b];
      - q_segments[b, i] == k_segments[b, j];
      - allowed[b, h, i, j].
    The score is softcap(scale * q k^T) - alibi[b, h] * |i + shift - j| + bias[b, h, i, j].

    Packed sequences: with `cu_q` and `cu_k`, q is (1, H, T_q, D), k and v are (1, Hkv, T_k, .), results (1, H, T_q, .).
    Document b owns query rows cu_q[b] .. cu_q[b + 1] and key rows cu_k[b] .. cu_k[b + 1]; it is batch entry b of all
    fields (B,) and of what is said above. Rows outside of every document are 0, with log-sum-exp -inf.

    Paged keys: with `block_table`, k and v are (pages, Hkv, page_size, .) and block_table[b, p] is the page that holds
    keys p * page_size and following of batch entry b. `k_lengths` is there; entries beyond it may hold anything.
    """

    q: Tensor  # (B, H, M, D)
    k: Tensor  # (B, Hkv, N, D)
    v: Tensor  # (B, Hkv, N, Dv)
    scale: float
    left: int = UNLIMITED
    right: int = UNLIMITED
    bottom_right: bool = False
    bias: Tensor | None = None  # (B|1, H|1, M|1, N|1), float32 or the dtype of q
    allowed: Tensor | None = None  # (B|1, H|1, M|1, N|1), bool, True = attend
    q_lengths: Tensor | None = None  # (B,) int32
    k_lengths: Tensor | None = None  # (B,) int32
    q_segments: Tensor | None = None  # (B|1, M) int32
    k_segments: Tensor | None = None  # (B|1, N) int32
    prefix: Tensor | None = None  # (B,) int32
    alibi: Tensor | None = None  # (B|1, H) slopes, float32 (float64 for float64 inputs)
    sinks: Tensor | None = None  # (H,) float32 or the dtype of q: one more logit per head in the softmax's denominator
    softcap: float = 0.0  # 0 = none, else softcap * tanh(score / softcap)
    dropout_p: float = 0.0
    rng: Tensor | None = None  # (2,) int64: Philox key and offset; (4,) for a part of a call (sdpa.philox.of_part)
    cu_q: Tensor | None = None  # (B + 1,) int32: cumulative query lengths of packed sequences
    cu_k: Tensor | None = None  # (B + 1,) int32: cumulative key lengths
    block_table: Tensor | None = None  # (B, pages per sequence) int32
    max_q: int = 0  # no packed document has more queries than this
    max_k: int = 0  # nor more keys


def read_of(inputs: AttentionInputs, *rest: Results | Tensor) -> tuple[Tensor, ...]:
    """The tensors of a call in the order of their fields, each once where two fields hold the same (cu_k is cu_q).

    A call that a kernel recorded (`record`) is repeated with these. A backward's (inputs, results, upstream) are
    followed by out, lse, the gradient of out and, where there is one, that of lse; those of weights (inputs, lse) by
    lse.
    """
    own = {id(value): value for value in inputs if isinstance(value, Tensor)}.values()
    pairs = [(one,) if isinstance(one, Tensor) else one for one in rest]
    return (*own, *[tensor for pair in pairs for tensor in pair if tensor is not None])


def as_batch(rows: Tensor) -> Tensor:
    """(1, H, T, D) of packed rows (T, H, D), as which repeated calls are given them; others as they are."""
    return rows if rows.dim() == 4 else rows.transpose(0, 1).unsqueeze(0)


def refill_of(inputs: AttentionInputs) -> Callable[[Sequence[Tensor]], AttentionInputs]:
    """A function that makes inputs of other tensors, in the order of `read_of`, and of these numbers. It takes packed
    rows as (T, H, D), too, and keeps no tensor."""
    places = {id(tensor): place for place, tensor in enumerate(read_of(inputs))}
    fields = [(places.get(id(value)), None if isinstance(value, Tensor) else value) for value in inputs]

    def refill(given: Sequence[Tensor]) -> AttentionInputs:
        found = AttentionInputs._make([value if place is None else given[place] for place, value in fields])
        return (
            found
            if found.q.dim() == 4
            else found._replace(q=as_batch(found.q), k=as_batch(found.k), v=as_batch(found.v))
        )

    return refill


class Results(NamedTuple):
    """What a forward returns; also the gradients that arrive at it (`lse` is None where none arrives)."""

    out: Tensor  # (B, H, M, Dv)
    lse: Tensor | None  # (B, H, M), natural log, float32 (float64 for float64 inputs); -inf for a row that sees no key


class Gradients(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None  # in the shape of the bias given
    sinks: Tensor | None = None


class Tile(NamedTuple):
    """Sizes a kernel is built or run with; 0 where a number does not apply, as warps on a CPU."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int = 0
    num_stages: int = 0


class AttentionProblem(NamedTuple):
    """A call without its tensors: immutable, hashable, the key of every dispatch cache."""

    device: str  # "cpu", "cuda:0"
    dtype: torch.dtype
    B: int
    H: int
    Hkv: int
    M: int
    N: int
    D: int
    Dv: int
    left: int = UNLIMITED
    right: int = UNLIMITED
    bottom_right: bool = False
    features: frozenset[str] = frozenset()  # of FEATURES
    deterministic: bool = False
    tf32: bool = False  # float32 products may be rounded to TF32
    bias_dtype: torch.dtype | None = None
    direction: str = "forward"  # or "backward", or "weights": exp(score - lse) as a tensor
    row_mask: bool = False  # the dense masks given have one row, as a mask of padding has
    bias_matrices: int = 0  # how many M x N matrices the given bias has in memory; 0 where rows or columns repeat
    narrow_mask: bool = False  # the dense masks given repeat one column for all keys
    # Tensors (of PLACED) that do not lie at multiples of 16 bytes, and of how many bytes then; 0: the last dimension is
    # not the only one of stride 1 (`alignment.has_rows`).
    unaligned: tuple[tuple[str, int], ...] = ()
    zero_strides: bool = False  # q, k or v repeats along a dimension

    @classmethod
    def of(
        cls,
        inputs: AttentionInputs,
        direction: str = "forward",
        extra: frozenset[str] = frozenset(),
        others: tuple[Tensor | None, ...] = (),
    ) -> AttentionProblem:
        """Describe `inputs`. `extra` adds features that tensors do not show ("lse", "backward", "bias_grad",
        "lse_grad", "averaged"). `others` are the tensors that a backward reads in addition: out, lse and grad_out."""
        q, k, v = inputs.q, inputs.k, inputs.v
        H, D, Hkv, Dv = q.shape[1], q.shape[3], k.shape[1], v.shape[3]
        B, M, N = lengths_of(inputs)
        return cls(
            str(q.device),
            q.dtype,
            B,
            H,
            Hkv,
            M,
            N,
            D,
            Dv,
            inputs.left,
            inputs.right,
            inputs.bottom_right and has_band(inputs, M, N),
            features_of(inputs, H != Hkv) | extra,
            torch.are_deterministic_algorithms_enabled(),
            q.is_cuda and q.dtype == torch.float32 and float32_precision() == "tf32",
            None if inputs.bias is None else inputs.bias.dtype,
            direction,
            is_row_mask(inputs),
            bias_matrices_of(inputs),
            is_narrow_mask(inputs),
            *placement_of(inputs, others),
        )

    def width(self, length: int) -> int:
        """The rows, of a side of this length, that a band leaves to a row of the other side at most."""
        sides = self.left, self.right
        return length if UNLIMITED in sides else min(length, 1 + sum(sides))

    def asked_for(self, extra: frozenset[str], direction: str = "forward") -> AttentionProblem:
        """The problem with features that tensors do not show."""
        return self._replace(features=self.features | extra, direction=direction)

    def placed(self, names: Container[str]) -> AttentionProblem:
        """The problem where the tensors of these names lie at multiples of 16 bytes."""
        return self._replace(unaligned=tuple(pair for pair in self.unaligned if pair[0] not in names))

    def unaligned_at(self, name: str) -> int:
        """The alignment of a tensor in bytes: 16 where it is not among the unaligned ones."""
        return dict(self.unaligned).get(name, BULK_BYTES)

    @property
    def alignment(self) -> int:
        """The largest of 16, 8, 4, 2 and 1 bytes of which all tensors lie at multiples; 0: one has no rows."""
        return min((found for _, found in self.unaligned), default=BULK_BYTES)

    @property
    def device_type(self) -> str:
        return self.device.partition(":")[0]

    @property
    def G(self) -> int:
        """Query heads per key/value head."""
        return self.H // self.Hkv if self.Hkv else 1

    @property
    def causal(self) -> bool:
        return self.right == 0

    def visible_share(self) -> float:
        """The share of the M x N score matrix inside the causal or window band, from 0 to 1. All of it beside a prefix,
        which every row sees, however long it is."""
        if not self.M or not self.N:
            return 0.0
        if (self.left == UNLIMITED and self.right == UNLIMITED) or "prefix" in self.features:
            return 1.0
        return band_area(self) / (self.M * self.N)

    def flops(self) -> float:
        """Operations of the two (forward), five (backward) or one (weights) matrix products inside the band."""
        return self.dense_flops() * self.visible_share()

    def dense_flops(self) -> float:
        """The same where all of the M x N score matrix is computed."""
        pairs = self.B * self.H * self.M * self.N
        if self.direction == "weights":
            return pairs * 2 * self.D
        if self.direction == "backward":
            return pairs * (6 * self.D + 4 * self.Dv)
        return pairs * 2 * (self.D + self.Dv)

    def bytes(self) -> float:
        """Compulsory traffic: inputs read once and outputs written once."""
        if self.direction == "weights":
            rows = self.B * (self.H * self.M + self.Hkv * self.N)
            heads = 1 if "averaged" in self.features else self.H
            return (rows * self.D + self.B * heads * self.M * self.N) * self.dtype.itemsize
        queries = self.B * self.H * self.M * (self.D + self.Dv)
        keys = self.B * self.Hkv * self.N * (self.D + self.Dv)
        passes = 2 if self.direction == "backward" else 1
        return passes * (queries + keys) * self.dtype.itemsize


class Held(int):
    """Stands for a tensor: the number of the first field that holds it."""


class Description(NamedTuple):
    """All that kernels depend on of a call beside the numbers in its tensors."""

    problem: AttentionProblem
    fields: tuple[Any, ...]  # `fields_of` its inputs


def describe(inputs: AttentionInputs) -> Description | None:
    """The description of a forward; None where no query meets a key."""
    if is_empty(inputs):
        return None
    return Description(AttentionProblem.of(inputs), fields_of(inputs))


def fields_of(inputs: AttentionInputs) -> tuple[Any, ...]:
    """The fields without their tensors, in whose places there are `Held`."""
    first: dict[int, int] = {}
    return tuple(
        [Held(first.setdefault(id(v), place)) if isinstance(v, Tensor) else v for place, v in enumerate(inputs)]
    )


def lengths_of(inputs: AttentionInputs) -> tuple[int, int, int]:
    """B, M and N as positions are counted: documents and their largest lengths where packed, a whole table of pages."""
    q, k = inputs.q, inputs.k
    if inputs.cu_q is not None:
        return inputs.cu_q.shape[0] - 1, inputs.max_q, inputs.max_k
    if inputs.block_table is not None:
        return q.shape[0], q.shape[2], inputs.block_table.shape[1] * k.shape[2]
    return q.shape[0], q.shape[2], k.shape[2]


def is_empty(inputs: AttentionInputs) -> bool:
    """Whether no query meets a key. A head size of 0 is not empty: scores are 0, and the weights still sum to one."""
    (B, M, N), q, k = lengths_of(inputs), inputs.q, inputs.k
    keys = N and k.shape[0] and k.shape[2]
    return not (B and q.shape[1] and M and q.shape[2] and (keys or inputs.sinks is not None))


def is_row_mask(inputs: AttentionInputs) -> bool:
    """Whether there is a dense mask or bias, and each of them has one row for all queries."""
    given = [mask for mask in (inputs.bias, inputs.allowed) if mask is not None]
    return bool(given) and all(mask.shape[2] == 1 for mask in given)


def bias_matrices_of(inputs: AttentionInputs) -> int:
    """How many matrices of M x N a bias has in memory: one for each batch entry and head that do not share it. 0 where
    there is none, and where it repeats along rows or columns."""
    bias = inputs.bias
    if bias is None or bias.shape[2:] != (inputs.q.shape[2], inputs.k.shape[2]):
        return 0
    *heads, rows, columns = [1 if stride == 0 else n for n, stride in zip(bias.shape, bias.stride(), strict=True)]
    return math.prod(heads) if (rows, columns) == bias.shape[2:] else 0


def is_narrow_mask(inputs: AttentionInputs) -> bool:
    """Whether there is a dense mask or bias, and each repeats one column for all keys."""
    given = [mask for mask in (inputs.bias, inputs.allowed) if mask is not None]
    return bool(given) and inputs.k.shape[2] > 1 and all(m.shape[3] == 1 or m.stride(3) == 0 for m in given)


def has_band(inputs: AttentionInputs, M: int, N: int) -> bool:
    """Whether it matters to which corner the diagonal is aligned."""
    aligned = inputs.left != UNLIMITED or inputs.right != UNLIMITED or inputs.alibi is not None
    ragged = inputs.cu_q is not None or inputs.k_lengths is not None or inputs.q_lengths is not None
    return aligned and (M != N or ragged)


def features_of(inputs: AttentionInputs, gqa: bool) -> frozenset[str]:
    """The names in FEATURES that the tensors and numbers of a call ask for."""
    asked = (
        (inputs.left != UNLIMITED or inputs.right != UNLIMITED, "band"),
        (inputs.bottom_right and has_band(inputs, *lengths_of(inputs)[1:]), "bottom_right"),
        (inputs.bias is not None, "bias"),
        (inputs.allowed is not None, "allowed"),
        (inputs.k_lengths is not None, "k_lengths"),
        (inputs.q_lengths is not None, "q_lengths"),
        (inputs.q_segments is not None, "segments"),
        (inputs.cu_q is not None, "packed"),
        (inputs.block_table is not None, "paged"),
        (inputs.prefix is not None, "prefix"),
        (inputs.alibi is not None, "alibi"),
        (inputs.softcap != 0.0, "softcap"),
        (inputs.softcap > LARGE_SOFTCAP, "large_softcap"),
        (inputs.sinks is not None, "sinks"),
        (inputs.dropout_p != 0.0, "dropout"),
        (inputs.scale <= 0, "nonpositive_scale"),
        (gqa, "gqa"),
    )
    return frozenset(name for present, name in asked if present)


def band_area(problem: AttentionProblem) -> float:
    """Visible pairs of one M x N matrix under the band, summed over at most 256 evenly spaced rows."""
    M, N = problem.M, problem.N
    shift = N - M if problem.bottom_right else 0
    rows = range(0, M, max(1, M // 256))
    seen = 0
    for row in rows:
        first = 0 if problem.left == UNLIMITED else max(0, row + shift - problem.left)
        last = N - 1 if problem.right == UNLIMITED else min(N - 1, row + shift + problem.right)
        seen += max(0, last - first + 1)
    return seen * M / len(rows)
