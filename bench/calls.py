"""The calls that are measured, in our words and in torch's: plain attention, and each of what a call may ask beyond it.

Where torch has no such call, its maker raises Refusal. The tensors are bound before: nothing is timed but the call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as torch_attention

import sdpa
import sdpa.nn
from sdpa.bench.timing import Call
from sdpa.bench.workload import Refusal, Workload, pack, unpack

DROPOUT = 0.1
SOFTCAP = 2.0  # near the scores of random tensors, so that who leaves it out is wrong
# The kernel that a "kernel" problem names, by the kind of device.
NAMED = {"cpu": "cpu_flash", "cuda": "triton_flash", "mps": "metal_flash"}


def as_it_is(out: Tensor) -> Tensor:
    return out


def leaves_of(work: Workload) -> tuple[Tensor, ...]:
    return work.leaves


@dataclass(frozen=True)
class Form:
    """How a call is made; `read` brings what ours or torch's returns into one form for both. `leaves` are what its
    backward gives gradients of, `upstream` brings the gradient of (B, H, M, Dv) into the form of its output, and
    `standard` gradients into that of q, k and v."""

    ours: Callable[[Workload, str | None], Call]
    torch: Callable[[Workload], Call]
    read: Callable[[Any], Tensor] = as_it_is
    leaves: Callable[[Workload], tuple[Tensor, ...]] = leaves_of
    upstream: Callable[[Tensor], Tensor] = as_it_is
    standard: Callable[[Tensor], Tensor] = as_it_is


def our_call(work: Workload, kernel: str | None = None) -> Call:
    return FORMS[work.problem.call].ours(work, kernel)


def torch_call(work: Workload) -> Call:
    return FORMS[work.problem.call].torch(work)


def has_varlen(work: Workload) -> bool:
    """torch's varlen_attn takes half precisions on a GPU."""
    return work.q.is_cuda and work.q.dtype != torch.float32


def torch_has(work: Workload) -> bool:
    """Whether torch has such a call; where it has not, its closest one stands beside ours, if there is one."""
    call = work.problem.call
    return has_varlen(work) if call == "varlen" else call not in ("softcap", "return_lse", "kernel")


def plain(work: Workload, kernel: str | None, **more: Any) -> Call:
    given = masked(work.our_mask) | work.options | named(kernel) | more
    return partial(sdpa.scaled_dot_product_attention, *work.qkv, **given)


def torch_plain(work: Workload, **more: Any) -> Call:
    given = masked(work.torch_mask) | work.options | more
    return partial(torch_attention, *work.qkv, **given)


def masked(mask: sdpa.Mask | Tensor | None) -> dict[str, Any]:
    return {} if mask is None else {"attn_mask": mask}


def named(kernel: str | None) -> dict[str, Any]:
    return {} if kernel is None else {"kernel": kernel}


def by_name(work: Workload, kernel: str | None) -> Call:
    """torch's closest call is its plain one: its context manager is entered around many calls."""
    return plain(work, kernel or NAMED[torch.device(work.problem.device).type])


def no_softcap(work: Workload) -> Call:
    raise Refusal("torch has no softcap")


def torch_with_lse(work: Workload) -> Call:
    """The operators behind torch's call: the call itself keeps the log-sum-exp for its backward."""
    if work.q.device.type == "mps":
        raise Refusal("torch has no log-sum-exp on MPS")
    if not work.q.is_cuda:
        return partial(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, *work.qkv)
    if work.q.dtype == torch.float32:
        return partial(torch.ops.aten._scaled_dot_product_efficient_attention, *work.qkv, None, True)
    return partial(torch.ops.aten._scaled_dot_product_flash_attention, *work.qkv)


def joined(results: tuple[Tensor, ...]) -> Tensor:
    """The output with the log-sum-exp as one more column, (B, H, M, Dv + 1); torch pads the rows of the latter."""
    out, lse = results[:2]
    return torch.cat((out, lse[..., : out.shape[2], None].to(out.dtype)), -1)


def packed(work: Workload) -> tuple[Any, ...]:
    """q, k and v as (T, heads, D), cu_q, cu_k, max_q, max_k."""
    rows = work.packed
    return (*rows.leaves, rows.ends, rows.ends, rows.longest, rows.longest)


def packed_leaves(work: Workload) -> tuple[Tensor, ...]:
    return work.packed.leaves


def varlen(work: Workload, kernel: str | None) -> Call:
    given = {"is_causal": True} | work.options | named(kernel)
    return partial(sdpa.varlen_attention, *packed(work), **given)


def torch_varlen(work: Workload) -> Call:
    """torch's varlen_attn; where it takes no such tensors, the closest call has the documents as a mask."""
    if not has_varlen(work):
        if work.problem.differentiates:
            raise Refusal(f"torch's varlen_attn takes half precisions on a GPU, got {work.q.dtype} on {work.q.device}")
        return torch_plain(work)
    from torch.nn.attention.varlen import varlen_attn

    told = "is_causal" in inspect.signature(varlen_attn).parameters
    return partial(varlen_attn, *packed(work), **({"is_causal": True} if told else {"window_size": (-1, 0)}))


def unpacked(out: Tensor) -> Tensor:
    """(T, heads, D) -> (1, heads, T, D)"""
    return out if out.dim() == 4 else unpack(out, 1)


def module_of(kind: type[torch.nn.Module], work: Workload) -> torch.nn.Module:
    """A module of the problem's width, with the same parameters for every kind."""
    p = work.problem
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return kind(p.H * p.D, p.H, batch_first=True).to(p.device, p.torch_dtype).eval()


def module_input(work: Workload) -> Tensor:
    """(B, M, H * D)"""
    return work.q.detach().transpose(1, 2).flatten(2).requires_grad_(work.problem.needs_grad)


def module_call(
    kind: type[torch.nn.Module], work: Workload, kernel: str | None = None, need_weights: bool = False
) -> Call:
    if kernel is not None:
        raise Refusal("a module takes no kernel by name")
    x = module_input(work)
    return partial(module_of(kind, work), x, x, x, need_weights=need_weights)


def beside_weights(results: tuple[Tensor, Tensor]) -> Tensor:
    """(B, M, H * D + N)"""
    return torch.cat(results, -1)


def first_of(results: tuple[Tensor, Any]) -> Tensor:
    """A module's output, without its weights."""
    return results[0]


FORMS = {
    **dict.fromkeys(("", "parameter", "autocast"), Form(plain, torch_plain)),
    "dropout": Form(partial(plain, dropout_p=DROPOUT), partial(torch_plain, dropout_p=DROPOUT)),
    "softcap": Form(partial(plain, softcap=SOFTCAP), no_softcap),
    "return_lse": Form(partial(plain, return_lse=True), torch_with_lse, joined),
    "kernel": Form(by_name, torch_plain),
    "varlen": Form(varlen, torch_varlen, unpacked, packed_leaves, pack, unpacked),
    "module": Form(
        partial(module_call, sdpa.nn.MultiheadAttention),
        partial(module_call, torch.nn.MultiheadAttention),
        first_of,
    ),
    "weights": Form(
        partial(module_call, sdpa.nn.MultiheadAttention, need_weights=True),
        partial(module_call, torch.nn.MultiheadAttention, need_weights=True),
        beside_weights,
    ),
}
