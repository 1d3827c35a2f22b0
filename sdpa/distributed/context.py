"""Context parallelism: each rank has a part of the sequence, and a block in which attention sees the whole of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextvars import Token
from functools import cache, wraps
from threading import Lock
from typing import Any
from zlib import crc32

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from sdpa import philox, sharded
from sdpa.autocast import autocast_dtype, cast_call
from sdpa.distributed.choosing import ONES, Way, rates_of, ways
from sdpa.distributed.links import Link, links_of, rank_of
from sdpa.distributed.modes import Heads, Keys, Mode, Part, Random, Results, Whole, of_length
from sdpa.distributed.parts import Parts
from sdpa.distributed.ring import Ring
from sdpa.entry import unrecognised
from sdpa.functional import scaled_dot_product_attention
from sdpa.inputs import dropped, drops, mask_of
from sdpa.mask import Mask, as_mask, is_integer, told
from sdpa.problem import Results as Attended
from sdpa.scalars import type_name
from sdpa.sharded import INSIDE
from sdpa.torch_private import TORCHS, compiler_is_imported, is_distributed
from sdpa.validate import Call, Options, check_dense
from sdpa.varlen import paged_attention, varlen_attention

MODES = {1: ("auto", "ulysses", "gather", "ring"), 2: ("auto", "hybrid")}  # by the dimensions of the mesh
LOCK = Lock()  # of the count of open blocks
# What would attend to this rank's part alone, and what to call instead.
REFUSED: dict[Callable[..., Any], str] = {
    varlen_attention: "varlen_attention is not supported; make it a call with Mask(segments=...)",
    paged_attention: "paged_attention is not supported",
    F.multi_head_attention_forward: "torch.nn.MultiheadAttention is not reached; take sdpa.nn.MultiheadAttention",
}
REFUSED |= {
    getattr(torch, name): "torch's fused layers of inference are not reached; take those of sdpa.nn"
    for name in ("_transformer_encoder_layer_fwd", "_native_multi_head_attention")
    if hasattr(torch, name)
}


class context_parallel:
    """A block in which calls of attention take this rank's part of each sequence, and the ranks of `mesh` the rest.

    Query, key and value are (B, heads, own length, head size). Masks and biases are those of the whole sequence;
    tensors of heads (slopes, sinks) have all heads. Results are this rank's part. It reaches
    `sdpa.scaled_dot_product_attention`, torch's function and the layers of `sdpa.nn`, plain or with is_causal=True, in
    this thread. Nothing else is reached: flex_attention, operators of torch.ops, other libraries and other threads see
    this rank's part alone.

    Under torch.compile calls of attention in the block are not compiled: the graph breaks at each. Activation
    checkpointing wants the block inside of the function that it calls again.

        with sdpa.distributed.context_parallel(mesh):
            out = sdpa.scaled_dot_product_attention(q, k, v, is_causal=True)

    Args:
        mesh: its ranks share the sequence. One dimension, or two: between nodes and inside of them.
        mode: how ranks attend to the whole sequence.
            "ulysses": they exchange parts of the sequence for heads, which all ranks have to divide (Jacobs et al.,
            2023). It takes every mask.
            "gather": each is given the keys and values that its queries see.
            "ring": the same, those of one rank after the other, which are not kept (Liu et al., 2023).
            "hybrid": on two dimensions, heads inside of nodes and keys between them.
            "auto": for each call the mode that should take least time by a model of the products and of the links, as
            `sdpa tune --distributed` or else the first call measured them. `choices` tells why.
        parts: which positions each rank has, of queries and keys alike. Without it ranks hold consecutive parts, in the
            order of their rank, and every call asks for their lengths, which takes a small collective and on a GPU
            waits for it. With it only the first call of a kind does, whether ranks agree.

    Dropout drops what one process would drop with the seed that the first rank draws; each call sends it. In the modes
    by keys every interval of a part has to begin at a multiple of 16 then, and lengths beside a window are refused,
    but for one to the right alone, of a multiple of 16.

    Gradients of query, key and value are those of this rank's part. A bias or sinks, which every rank has whole, get
    the part of what this rank computes: sum it over the mesh.

    Raises:
        ValueError: another mode for this mesh, heads that the ranks do not divide, other lengths.
        TypeError: no mesh, no parts.
        RuntimeError: packed or paged calls, weights, masks of layers, blocks inside of blocks, checkpointing
            inside of the block, gradients of gradients; tensors that are not (B, heads, length, head size); a mask
            that the mode cannot take.
    """

    def __init__(self, mesh: DeviceMesh, mode: str = "auto", parts: Parts | None = None) -> None:
        self.links = links_of(mesh)
        if mesh.ndim not in MODES:
            raise ValueError(f"context_parallel: expected a mesh of one or two dimensions, got {tuple(mesh.shape)}")
        if mode not in MODES[mesh.ndim]:
            raise ValueError(
                f"context_parallel: expected mode as one of {', '.join(MODES[mesh.ndim])} on a mesh of shape "
                f"{tuple(mesh.shape)}, got {mode!r}"
            )
        if parts is not None and not isinstance(parts, Parts):
            raise TypeError(f"context_parallel: expected parts as Parts or None, got {type_name(parts)}")
        if parts is not None and len(parts.intervals) != mesh.size():
            raise ValueError(
                f"context_parallel: expected parts of {mesh.size()} ranks, got those of {len(parts.intervals)}"
            )
        self.mode, self.parts = mode, parts
        self.kinds: set[int] = set()  # of calls of which ranks were asked whether theirs are the same
        self.opened: list[tuple[Token[Any], Inside]] = []
        self.choices: list[Way] = []  # of the last call by "auto", the chosen one first

    @property
    def sent(self) -> int:
        """The bytes that this rank sent to others, forward and backward."""
        return sum(link.sent for link in self.links)

    def __enter__(self) -> context_parallel:
        OPEN(self)
        return self

    def __exit__(self, *exception: Any) -> None:
        CLOSE(self)

    def open(self) -> None:
        """Enter the block. A function is not compiled beyond here."""
        if INSIDE.get():
            raise RuntimeError("context_parallel: blocks do not nest")
        inside = Inside(self)
        self.opened.append((INSIDE.set(self), inside))
        with LOCK:
            sharded.not_compiled = UNRECOGNISED
            sharded.open_blocks += 1
        inside.__enter__()

    def close(self) -> None:
        token, inside = self.opened.pop()
        inside.__exit__(None, None, None)
        with LOCK:
            sharded.open_blocks -= 1
        INSIDE.reset(token)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Any:
        """A call of this rank's parts."""
        if is_checkpointed(self.opened[-1][1].frame):
            raise RuntimeError(
                "context_parallel: checkpointing makes the call again outside of the block; open the block inside of "
                "the function that is checkpointed"
            )
        returns_lse, kernel = options.pop("return_lse", False), options.pop("kernel", None)
        call = Call(query, key, value, Options(attn_mask, dropout_p, is_causal, **options), None)
        part = self.part_of(call, returns_lse, kernel)
        mode = self.mode_of(part)
        if drops(call.options):
            part = part._replace(random=Random(self.seed(part.query.device), part.query.shape[1]))
        results = dropped(Attended(*mode(part)), dropout_p)
        return (results.out, results.lse) if returns_lse else results.out

    def local(self, call: Call, returns_lse: bool, kernel: str | None) -> tuple[Part, str]:
        """What stands for a kernel's call on this rank, and the mode with its reason. Every rank has to ask."""
        self.choices = []
        part = self.part_of(call, returns_lse, kernel)
        found = self.mode_of(part).local(part)
        return found, "; ".join(map(str, self.choices)) or f"{self.mode}: as asked"

    def part_of(self, call: Call, returns_lse: bool, kernel: str | None) -> Part:
        """The call, checked as one of the whole sequence."""
        if not all(isinstance(t, Tensor) and t.dim() == 4 for t in call[:3]):
            self.refuse("expected query, key and value as (B, heads, length, head size)")
        if any(map(is_distributed, call[:3])):
            self.refuse("expected each rank's own tensors, got DTensors; t.to_local() is a rank's part")
        queries, keys = self.parts_of(call, (returns_lse, kernel))
        if call.key.shape[2] != call.value.shape[2]:  # on every rank: it is a part of the call's kind
            raise RuntimeError(
                f"context_parallel: expected key and value of one length, got {call.key.shape[2]} and "
                f"{call.value.shape[2]}"
            )
        given, dtype = call.options.attn_mask, autocast_dtype(call.query)
        check_whole(given, queries.length, keys.length)
        call = call._replace(options=call.options._replace(attn_mask=as_mask(given)))
        if dtype is not None:
            call = cast_call(call, dtype)
        q, k, v = call[:3]
        try:
            check_dense(Call(of_length(q, queries), of_length(k, keys), of_length(v, keys), call.options, None))
        except RuntimeError as error:
            if call.options.attn_mask is None:
                raise
            reason = str(error).removesuffix(".")
            raise RuntimeError(f"{reason}; inside of context_parallel masks are those of the whole sequence") from None
        heads = [t.shape[1] for t in (q, k, v)]
        if len({t.shape[0] for t in (q, k, v)}) > 1 or not heads[0] >= heads[1] == heads[2] > 0:
            raise RuntimeError(
                "context_parallel: expected query, key and value of one batch, with as many heads of values as of "
                "keys, at least one and no more than of queries, got shapes "
                f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
            )
        options: dict[str, Any] = {name: getattr(call.options, name) for name in ("scale", "softcap", "enable_gqa")}
        options |= {"dropout_p": call.options.dropout_p} if drops(call.options) else {}
        options |= {} if kernel is None else {"kernel": kernel}
        return Part(q, k, v, mask_of(call.options), call.options.sinks, options, returns_lse, queries, keys)

    def seed(self, device: torch.device) -> Tensor:
        """Dropout's seed of a call: the one that the first rank draws."""
        found = philox.next_seed(device).to(self.links[0].device)
        for link in reversed(self.links):
            found = link.ask(found)
        return found.reshape(-1, 2)[0].to(device)

    def refuse(self, what: str) -> None:
        """Refuse on this rank what others may not, so that they do not wait: they are told that calls differ."""
        found = torch.zeros(3, dtype=torch.long, device=self.links[0].device)
        for link in reversed(self.links):
            found = link.ask(found)
        raise RuntimeError(f"context_parallel: {what}")

    def mode_of(self, part: Part) -> Mode:
        """The mode that a call takes."""
        if len(self.links) == 1:
            return self.one_of(self.mode, self.links[0], part)
        outer, inner = self.links
        groups = [list(range(first, first + inner.ranks)) for first in range(0, outer.ranks * inner.ranks, inner.ranks)]
        return Heads(inner, Between(self, outer), groups[outer.rank], groups)

    def one_of(self, mode: str, link: Link, part: Part) -> Mode:
        if mode in ("auto", "hybrid"):
            modes = MODES[1][1:] if len(self.links) == 1 else ONES
            found = ways(part, link.ranks, modes, rates_of(link))
            self.choices = sorted(found, key=lambda way: (bool(way.reason), way.seconds))
            if self.choices[0].reason:
                raise RuntimeError(f"context_parallel: no mode takes this call: {'; '.join(map(str, self.choices))}")
            mode = self.choices[0].mode
        elif mode == "ring":
            rates_of(link)  # NCCL wants all ranks in a group's first exchange
        if mode == "ulysses":
            everyone = list(range(link.ranks))
            return Heads(link, Whole(), everyone, [everyone])
        return Keys(link) if mode == "gather" else Ring(link)

    def parts_of(self, call: Call, others: tuple[Any, ...]) -> tuple[Parts, Parts]:
        """The positions that each rank has, of queries and of keys. All else has to be the same on all ranks, which is
        asked with the lengths, and where `parts` tells these for the first call of a kind."""
        M, N, parts = call.query.shape[2], call.key.shape[2], self.parts
        kind = kind_of(call, others)
        if parts is not None and kind in self.kinds and M == N == parts.lengths[rank_of(self.links)]:
            return parts, parts
        found = torch.tensor([M, N, kind], device=self.links[0].device)
        for link in reversed(self.links):
            found = link.ask(found)
        queries, keys, kinds = found.reshape(-1, 3).t().tolist()
        if len(set(kinds)) > 1:
            options = zip((*Options._fields, "return_lse", "kernel"), (*call.options, *others), strict=True)
            given = {name: told(value) for name, value in options if isinstance(value, Tensor) or value}
            raise ValueError(
                "context_parallel: ranks have tensors of different batch, heads, head size or dtype, or other options "
                "or masks (of these the shapes, and integers on the host); this one has "
                f"{', '.join([*map(told, call[:3]), *(f'{name}={value}' for name, value in given.items())])}"
            )
        if parts is not None and not queries == keys == list(parts.lengths):
            raise ValueError(
                f"context_parallel: ranks have {queries} queries and {keys} keys, where parts tells of "
                f"{list(parts.lengths)}"
            )
        self.kinds.add(kind)
        return (Parts.contiguous(queries), Parts.contiguous(keys)) if parts is None else (parts, parts)


def kind_of(call: Call, others: tuple[Any, ...]) -> int:
    """A number that is the same where calls are: by sizes and options, and by integers of masks that the host has."""
    sizes = [(*t.shape[:2], t.shape[3], t.dtype) for t in call[:3]] + [call.key.shape[2] == call.value.shape[2]]
    kind = crc32(f"{sizes} {', '.join(map(told, (*call.options, *others)))}".encode())
    mask = call.options.attn_mask
    for _, tensor in mask.tensors() if isinstance(mask, Mask) else ():
        if tensor.device.type == "cpu" and is_integer(tensor):
            kind = crc32(tensor.detach().contiguous().numpy().tobytes(), kind)
    return kind


class Inside(TorchFunctionMode):
    """What calls of attention are handed to while a block is open; `frame` is that of the function that opened it."""

    def __init__(self, block: context_parallel) -> None:
        super().__init__()
        self.block = block
        frame: Any = sys._getframe(1)
        while frame.f_globals.get("__name__") != __name__ or frame.f_code.co_name != "__enter__":
            frame = frame.f_back
        self.frame = frame.f_back

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in REFUSED:
            raise RuntimeError(f"context_parallel: {REFUSED[function]}")
        if function is not scaled_dot_product_attention and function is not TORCHS:
            return function(*args, **kwargs)
        return ATTEND(self.block, *args, **kwargs)


class Between:
    """Between nodes: of the modes by keys the faster one."""

    def __init__(self, block: context_parallel, link: Link) -> None:
        self.block, self.link = block, link

    def __call__(self, part: Part) -> Results:
        return self.block.one_of("hybrid", self.link, part)(part)

    def local(self, part: Part) -> Part:
        return self.block.one_of("hybrid", self.link, part).local(part)


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same without a compiler: a graph breaks where it is called. It imports the compiler only where that is used,
    because torch's, imported behind init_process_group, keeps the group and its threads to the end of the process."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)
        return (disabled(function) if compiler_is_imported() else function)(*args, **kwargs)

    return run


@cache
def disabled(function: Callable[..., Any]) -> Callable[..., Any]:
    found: Callable[..., Any] = torch.compiler.disable(function)
    return found


OPEN, CLOSE = uncompiled(context_parallel.open), uncompiled(context_parallel.close)
ATTEND, UNRECOGNISED = uncompiled(context_parallel.attend), uncompiled(unrecognised)


def is_checkpointed(outermost: Any) -> bool:
    """Whether torch's checkpointing called a function since a frame: it calls that again outside of the block."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame is not outermost:
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            return True
        frame = frame.f_back
    return False


def check_whole(mask: Any, M: int, N: int) -> None:
    """torch's CausalBias has the sizes of the matrix that it is made for."""
    if hasattr(mask, "seq_len_q") and (mask.seq_len_q, mask.seq_len_kv) != (M, N):
        raise RuntimeError(
            f"context_parallel: expected a mask of the whole sequence, {M} x {N}, got one of {mask.seq_len_q} x "
            f"{mask.seq_len_kv}"
        )
