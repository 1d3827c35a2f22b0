"""Calls of every kind that a kernel's `record` serves: tensors drawn anew from a seed, in the same form each time."""

from __future__ import annotations

import torch

from sdpa.problem import AttentionInputs, AttentionProblem, Results, read_of

B, H, HKV, M, N, D = 2, 4, 2, 32, 64, 64
PAGE = 16


class Draw:
    """Tensors of one call, from a seed."""

    def __init__(self, seed, device="cpu", dtype=torch.float16):
        self.generator = torch.Generator().manual_seed(seed)
        self.device, self.dtype = device, dtype

    def normal(self, *shape, dtype=None):
        values = torch.randn(shape, generator=self.generator)
        return values.to(self.device, dtype or self.dtype)

    def integers(self, low, high, *shape, dtype=torch.int32):
        return torch.randint(low, high, shape, generator=self.generator).to(self.device, dtype)

    def booleans(self, *shape):
        return self.integers(0, 2, *shape, dtype=torch.bool)

    def ids(self, rows):
        return self.integers(0, 3, B, rows).sort(1).values

    def strided(self, values):
        """The same values, of which no two lie side by side."""
        return torch.stack([values, values], -1)[..., 0]

    def rng(self):
        return self.integers(0, 1 << 40, 2, dtype=torch.int64)


def packed(draw, lengths=False):
    """Two documents; with `lengths` each is valid up to its own."""
    q, k, v = (draw.normal(rows, heads, D).transpose(0, 1).unsqueeze(0) for rows, heads in ((80, H), (90, H), (90, H)))
    cu_q, cu_k = (torch.tensor([0, end // 2, end], dtype=torch.int32, device=draw.device) for end in (80, 90))
    more = {"q_lengths": draw.integers(1, 40, 2), "k_lengths": draw.integers(1, 45, 2)} if lengths else {}
    return {"q": q, "k": k, "v": v, "cu_q": cu_q, "cu_k": cu_k, "max_q": 40, "max_k": 45, **more}


def alike_packed(draw):
    fields = packed(draw)
    fields["k"], fields["v"] = (fields["q"] + n for n in (1, 2))
    return {**fields, "cu_k": fields["cu_q"], "max_k": 40}


def paged(draw):
    """Few queries over keys in pages."""
    pages = N // PAGE
    table = torch.randperm(B * pages, generator=draw.generator).view(B, pages).to(draw.device, torch.int32)
    k, v = (draw.normal(B * pages, HKV, PAGE, D) for _ in range(2))
    return {"q": draw.normal(B, H, 1, D), "k": k, "v": v, "block_table": table, "k_lengths": draw.integers(1, N, B)}


def one_id_tensor(draw):
    ids = draw.ids(N)
    return {"q": draw.normal(B, H, N, D), "q_segments": ids, "k_segments": ids}


def strided_ids(draw):
    ids = draw.strided(draw.ids(N))
    return {"q": draw.normal(B, H, N, D), "q_segments": ids, "k_segments": ids}


def unaligned(draw):
    """Rows that begin one element behind an aligned address, as slices of packed buffers do."""
    return {name: draw.normal(B, heads, rows, D + 8)[..., 1 : D + 1]
            for name, heads, rows in (("q", H, M), ("k", HKV, N), ("v", HKV, N))}  # fmt: skip


# By name, the fields that differ from those of a plain call.
KINDS = {
    "plain": lambda draw: {},
    "causal": lambda draw: {"right": 0, "bottom_right": True},
    "softcap": lambda draw: {"softcap": 5.0},
    "dropout": lambda draw: {"dropout_p": 0.25, "rng": draw.rng()},
    "sinks": lambda draw: {"sinks": draw.normal(H, dtype=torch.float32)},
    "sinks in half precision": lambda draw: {"sinks": draw.normal(H)},
    "strided sinks": lambda draw: {"sinks": draw.strided(draw.normal(H))},
    "key lengths": lambda draw: {"k_lengths": draw.integers(1, N, B)},
    "both lengths": lambda draw: {"q_lengths": draw.integers(1, M, B), "k_lengths": draw.integers(1, N, B)},
    "segments": lambda draw: {"q_segments": draw.ids(M), "k_segments": draw.ids(N)},
    "segments of one tensor": one_id_tensor,
    "strided segments": strided_ids,
    "alibi": lambda draw: {"alibi": draw.normal(1, H, dtype=torch.float32).abs()},
    "prefix": lambda draw: {"right": 0, "prefix": draw.integers(0, N, B)},
    "bias": lambda draw: {"bias": draw.normal(1, H, M, N)},
    "row bias": lambda draw: {"bias": draw.normal(B, 1, 1, N, dtype=torch.float32)},
    "allowed": lambda draw: {"allowed": draw.booleans(B, 1, M, N)},
    "padding": lambda draw: {"allowed": draw.booleans(B, 1, 1, N)},
    "everything": lambda draw: {"softcap": 5.0, "dropout_p": 0.25, "rng": draw.rng(), "bias": draw.normal(1, H, M, N),
                                "k_lengths": draw.integers(1, N, B), "sinks": draw.normal(H)},
    "packed": packed,
    "packed alike": alike_packed,
    "packed with lengths": lambda draw: packed(draw, lengths=True),
    "unaligned": unaligned,
}  # fmt: skip
DECODED = {"plain", "softcap", "dropout", "sinks", "strided sinks", "key lengths", "both lengths", "alibi", "bias",
           "padding", "everything"}  # fmt: skip


def inputs_of(kind, seed, device="cpu", rows=M, dtype=torch.float16):
    """A call of a kind; the same seed gives the same tensors. `rows` are the queries of dense calls."""
    draw = Draw(seed, device, dtype)
    fields = {"q": draw.normal(B, H, M, D), "k": draw.normal(B, HKV, N, D), "v": draw.normal(B, HKV, N, D)}
    make = paged if kind == "paged" else KINDS[kind]
    fields |= {"scale": D**-0.5} | make(draw)
    inputs = AttentionInputs(**fields)
    return inputs if rows == M else fewer_rows(inputs, rows)


def fewer_rows(inputs, rows):
    """The first queries of a dense call."""
    masks = {name: mask[:, :, :rows] if mask.shape[2] > 1 else mask
             for name in ("bias", "allowed") if (mask := getattr(inputs, name)) is not None}  # fmt: skip
    return inputs._replace(q=inputs.q[:, :, :rows].contiguous(), **{n: m.contiguous() for n, m in masks.items()})


def backward_of(inputs, seed, lse_grad=False, dtype=torch.float16):
    """(inputs, results, upstream): what a backward is given. Rows of the results that see no key have an lse of -inf
    in truth; here any number does."""
    draw = Draw(seed, inputs.q.device, dtype)
    shape = (*inputs.q.shape[:3], inputs.v.shape[3])
    results = Results(draw.normal(*shape), draw.normal(*shape[:3], dtype=torch.float32))
    upstream = draw.normal(*shape), draw.normal(*shape[:3], dtype=torch.float32) if lse_grad else None
    return inputs, results, Results(*upstream)


def problem_of(tensors, direction, extra=(), device=None):
    problem = AttentionProblem.of(tensors[0], direction, frozenset(extra))
    return problem if device is None else problem._replace(device=device)


def given_of(tensors):
    """What a recorded call is repeated with, for (inputs,), (inputs, results, upstream) or (inputs, lse)."""
    inputs, *rest = tensors
    more = [t for part in rest for t in (part if isinstance(part, tuple) else (part,)) if t is not None]
    return (*read_of(inputs), *more)


def tensors_in(found):
    """The tensors of results, gradients or weights that are there."""
    return [t for t in found if t is not None] if isinstance(found, tuple) else [found]
