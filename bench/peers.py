"""Who is measured beside us: torch's backends one by one, FlexAttention, FlashAttention-3 and -4, FlashInfer, and on
CPUs ZenTorch and OpenVINO; each in its best form.

A maker takes a Workload and returns a Contestant, or raises Refusal in a sentence; whatever else it or its calls raise
is told as its refusal too.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from sdpa.bench.calls import FORMS, our_call, torch_call
from sdpa.bench.problems import MODULES, Problem
from sdpa.bench.timing import Call
from sdpa.bench.workload import Refusal, Workload, alibi_slopes, pack, unpack

FLASHINFER_WORKSPACE = 128 << 20  # bytes, as its documentation has them
# The math backend writes scores out in float32; more than this takes its time without winning.
MOST_SCORES = 8e9


def same(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class Contestant:
    """One implementation on one problem. `read` makes out (B, H, M, Dv) of what `forward` returns; `leaves` are q, k, v
    and a bias that learns in the layout this contestant likes best, and `standard` brings their gradients into ours."""

    name: str
    forward: Callable[[], Any]
    leaves: tuple[Tensor, ...]
    grad_out: Tensor
    around: Callable[[], AbstractContextManager[Any]] = nullcontext  # what forces it, entered outside of what is timed
    standard: Callable[[Tensor], Tensor] = same
    read: Callable[[Any], Tensor] = same

    def gradients(self, out: Tensor, retain: bool = True) -> tuple[Tensor, ...]:
        """In the order and layout of `leaves`; `out` keeps its graph, so that a backward alone can be repeated."""
        return torch.autograd.grad(out, self.leaves, self.grad_out, retain_graph=retain)

    def step(self) -> tuple[Tensor, ...]:
        """A forward and its backward, as training has them."""
        return self.gradients(self.forward(), retain=False)


def contestant(name: str, call: Call, work: Workload) -> Contestant:
    form = FORMS[work.problem.call]
    upstream = form.upstream(work.grad_out)
    return Contestant(name, call, form.leaves(work), upstream, read=form.read, standard=form.standard)


def ours(work: Workload, kernel: str | None) -> Contestant:
    return contestant(kernel or "default", our_call(work, kernel), work)


def torch_default(work: Workload) -> Contestant:
    return contestant("torch", torch_call(without_tensor(work)), work)


def without_tensor(work: Workload) -> Workload:
    """The workload with the mask that torch's flash and efficient kernels know without a tensor. Elsewhere torch would
    make the tensor anew in each call."""
    p = work.problem
    served = work.q.is_cuda and (work.q.dtype != torch.float32 or p.H == p.Hkv)
    if p.mask != "lower_right" or not served:
        return work
    return replace(work, torch_mask=causal_lower_right(p.M, p.N))


def torch_backend(name: str, backend: SDPBackend, work: Workload) -> Contestant:
    p = work.problem
    scores = p.B * p.H * p.M * p.N * torch.float32.itemsize
    if backend == SDPBackend.MATH and scores >= MOST_SCORES:
        raise Refusal(f"expected scores below {MOST_SCORES / 1e9:.0f} GB, got {scores / 1e9:.0f}")
    fused = backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
    call = torch_call(without_tensor(work) if fused else work)
    return replace(contestant(name, call, work), around=partial(sdpa_kernel, backend))


def flex(work: Workload) -> Contestant:
    """FlexAttention (Dong et al., 2024), compiled; block masks are made once, as a model would for all its layers.
    Packed sequences get a mask made of their documents' ids."""
    from torch.nn.attention.flex_attention import create_block_mask

    p = work.problem
    if (p.call, p.mask) != ("varlen", "segments"):
        require_plain(p)
    score, seen, batches = flex_terms(work)
    mask = None if seen is None else create_block_mask(seen, batches, None, p.M, p.N, device=p.device)
    options = {"score_mod": score, "block_mask": mask, "enable_gqa": p.Hkv != p.H}
    return Contestant("flex", partial(compiled_flex(p.device), *work.qkv, **options), work.leaves, work.grad_out)


def require_plain(p: Problem) -> None:
    if p.call:
        raise Refusal(f"asked for plain attention, got a call of the kind {p.call}")


def flex_terms(work: Workload) -> tuple[Callable[..., Any] | None, Callable[..., Any] | None, int | None]:
    """score_mod, mask_mod, and the batch size of the block mask (None: the same for all)."""
    p, mask = work.problem, work.problem.mask
    given: Any = work.torch_mask  # (1, H, M, N) of a bias, else (B, 1, M, N) or (B, 1, 1, N)
    if mask == "none":
        return None, None, None
    if mask in ("bias", "bias_grad"):
        bias = given[0]  # torch 2.10 takes no plain number among a function's indices
        return (lambda score, b, h, i, j: score + bias[h, i, j]), None, None
    if mask == "allowed":
        allowed = given[:, 0]
        return None, (lambda b, h, i, j: allowed[b, i, j]), p.B
    if mask in ("padding", "lengths"):
        keys = given[:, 0, 0]
        return None, (lambda b, h, i, j: keys[b, j]), p.B
    if mask == "window":
        window = p.window
        return None, (lambda b, h, i, j: (i >= j) & (i - j <= window)), None
    if mask == "segments":
        ours: Any = work.our_mask
        ids = ours.segments  # (N,)
        return None, (lambda b, h, i, j: (i >= j) & (ids[i] == ids[j])), None
    if mask == "alibi":
        slopes = alibi_slopes(p.H, p.device)
        return (lambda score, b, h, i, j: score - slopes[h] * (i - j)), (lambda b, h, i, j: i >= j), None
    behind = p.N - p.M if mask == "lower_right" else 0
    return None, (lambda b, h, i, j: i + behind >= j), None


def compiled_flex(device: str) -> Callable[..., Any]:
    """On a CPU it is not compiled: that needs a C++ compiler and minutes, and only tests ask for it."""
    from torch.nn.attention.flex_attention import flex_attention

    if not device.startswith("cuda"):
        return flex_attention
    from torch._functorch import config

    config.donated_buffer = False  # a backward that takes saved tensors as scratch could not be run again
    torch._dynamo.reset()  # each problem is compiled for its sizes; past 8 of them Dynamo would give up silently
    return torch.compile(flex_attention, dynamic=False)


def flash_attention(name: str, module: str, work: Workload) -> Contestant:
    """FlashAttention-3, or FlashAttention-4 in CuTe DSL; tensors are (B, N, H, D), and documents packed sequences."""
    p = work.problem
    if p.call not in ("", "varlen"):
        require_plain(p)
    if p.mask not in ("none", "causal", "window", "segments"):
        raise Refusal(f"asked for the masks none, causal, window and segments, got {p.mask}")
    if p.mask != "none" and p.M != p.N:
        raise Refusal(f"its causal mask is aligned to the bottom right, got M={p.M} and N={p.N}")
    package = import_module(module)
    return flash_packed(name, package, work) if p.mask == "segments" else flash_batched(name, package, work)


def flash_batched(name: str, package: Any, work: Workload) -> Contestant:
    p = work.problem
    masked: dict[str, dict[str, Any]] = {"window": {"window_size": (p.window, 0)}, "causal": {"causal": True}}

    def swap(tensor: Tensor) -> Tensor:
        return tensor.transpose(1, 2)

    q, k, v = (swap(t.detach()).contiguous().requires_grad_(p.needs_grad) for t in work.qkv)
    grad_out = swap(swap(work.grad_out).contiguous())
    forward = partial(package.flash_attn_func, q, k, v, **masked.get(p.mask, {}), **in_order(p))
    return Contestant(name, lambda: swap(first(forward())), (q, k, v), grad_out, standard=swap)


def flash_packed(name: str, package: Any, work: Workload) -> Contestant:
    rows = work.packed
    options = {
        **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), rows.ends),
        **dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), rows.longest),
        "causal": True,
        **in_order(work.problem),
    }
    read = partial(unpack, B=work.problem.B)
    forward = partial(package.flash_attn_varlen_func, *rows.leaves, **options)
    return Contestant(name, lambda: first(forward()), rows.leaves, pack(work.grad_out), standard=read, read=read)


def in_order(p: Problem) -> dict[str, bool]:
    """They have an argument and do not read torch's mode."""
    return {"deterministic": True} if p.deterministic else {}


def flashinfer(work: Workload) -> Contestant:
    """FlashInfer's attention for prefill, of batch entries one after the other. What it plans for these sizes is made
    once, as a model does for all its layers."""
    p = work.problem
    require_plain(p)
    if p.differentiates:
        raise Refusal("FlashInfer's attention has no backward")
    if p.mask not in ("none", "lower_right") and (p.mask not in ("causal", "window") or p.M != p.N):
        told = f"got {p.mask}, M={p.M} and N={p.N}"
        raise Refusal(f"FlashInfer is asked for no mask, or a causal one or a window at the bottom right, {told}")
    package = import_module("flashinfer")
    workspace = torch.empty(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=p.device)
    ends = [length * torch.arange(p.B + 1, dtype=torch.int32, device=p.device) for length in (p.M, p.N)]
    planned = package.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    options = {"causal": p.mask != "none", "window_left": p.window if p.mask == "window" else -1}
    planned.plan(*ends, p.H, p.Hkv, p.D, p.Dv, q_data_type=work.q.dtype, **options)
    rows = tuple(pack(t.detach()) for t in work.qkv)
    read = partial(unpack, B=p.B)
    return Contestant("flashinfer", partial(planned.run, *rows), rows, work.grad_out, standard=read, read=read)


def first(results: Tensor | tuple[Tensor, ...]) -> Tensor:
    """The output of a call that returns more in some versions."""
    return results[0] if isinstance(results, tuple) else results


def require_forward(p: Problem, name: str) -> None:
    """For peers that infer, and have one number of heads."""
    require_plain(p)
    if p.differentiates:
        raise Refusal(f"{name}'s attention has no backward")
    if p.Hkv != p.H:
        raise Refusal(f"{name}'s attention has no grouped heads, got H={p.H} and Hkv={p.Hkv}")
    if torch.device(p.device).type != "cpu":
        raise Refusal(f"{name}'s attention is asked for CPUs, got {p.device}")


def zentorch(work: Workload) -> Contestant:
    """The operator that AMD's ZenTorch puts into graphs in the place of torch's attention on a CPU."""
    require_forward(work.problem, "ZenTorch")
    import_module("zentorch")  # registers the operator

    mask = work.torch_mask
    if mask is not None and mask.dtype == torch.bool:  # what torch's own call makes of it in each call
        mask = torch.zeros(mask.shape, dtype=work.q.dtype).masked_fill_(~mask, -torch.inf)
    given = {"is_causal": work.problem.mask == "causal", "attn_mask": mask}
    attend: Callable[..., tuple[Tensor, Tensor]] = partial(torch.ops.zentorch.zentorch_sdpa, *work.qkv, **given)
    return Contestant("zentorch", lambda: attend()[0], work.leaves, work.grad_out)


# What OpenVINO is told that it computes in; by itself it takes bfloat16 for float32 where the CPU multiplies that.
OPENVINO_PRECISION = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


def openvino(work: Workload) -> Contestant:
    """A graph of one node for these sizes, on as many threads as torch has. It reads and writes torch's memory."""
    require_forward(work.problem, "OpenVINO")
    if work.problem.M == 1:
        raise Refusal("OpenVINO decodes with stateful models, whose caches are its own")
    if work.q.dtype not in OPENVINO_PRECISION:
        raise Refusal(f"OpenVINO computes in float32, bfloat16 and float16, got {work.problem.dtype}")
    from openvino import Core, Model, opset13

    out = work.q.new_empty(*work.q.shape[:3], work.v.shape[3])
    given = [t.contiguous() for t in (*work.qkv, work.torch_mask) if t is not None]
    views, written = [openvino_view(t) for t in given], openvino_view(out)
    inputs = [opset13.parameter(view.shape, view.element_type) for view in views]
    node = opset13.scaled_dot_product_attention(*inputs, causal=work.problem.mask == "causal")
    options = {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "INFERENCE_PRECISION_HINT": OPENVINO_PRECISION[work.q.dtype],
    }
    request = Core().compile_model(Model([node], inputs), "CPU", options).create_infer_request()
    for place, view in enumerate(views):
        request.set_input_tensor(place, view)
    request.set_output_tensor(0, written)

    def infer(held: Any = given) -> Tensor:  # OpenVINO's views keep no tensor alive
        request.infer()
        return out

    return Contestant("openvino", infer, work.leaves, work.grad_out)


def openvino_view(tensor: Tensor) -> Any:
    """A contiguous tensor's memory as an openvino.Tensor; numpy has no bfloat16 and hands on its bits."""
    from openvino import Shape, Type
    from openvino import Tensor as View

    if tensor.dtype == torch.bfloat16:
        return View(tensor.detach().view(torch.int16).numpy(), Shape(tensor.shape), Type.bf16)
    return View(tensor.detach().numpy(), shared_memory=True)


TORCH_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
Maker = Callable[[Workload], Contestant]
PEERS: dict[str, Maker] = {
    "torch": torch_default,
    **{name: partial(torch_backend, name, backend) for name, backend in TORCH_BACKENDS.items()},
    "flex": flex,
    "fa3": partial(flash_attention, "fa3", "flash_attn_interface"),
    "fa4": partial(flash_attention, "fa4", "flash_attn.cute"),
    "flashinfer": flashinfer,
    "zentorch": zentorch,
    "openvino": openvino,
}
# Inference on a CPU; they take part where they are installed.
CPU_PEERS = ("zentorch", "openvino")
# Of a GPU, they take part where they are installed, too.
GPU_PACKAGES = {"fa3": "flash_attn_interface", "flashinfer": "flashinfer"}
PACKAGES = {**GPU_PACKAGES, "fa4": "flash_attn.cute", **{name: name for name in CPU_PEERS}}
# Where a peer runs that does not run everywhere.
KINDS = {
    **dict.fromkeys(("cudnn", "efficient", "fa3", "fa4", "flashinfer"), ("cuda",)),
    **dict.fromkeys(("flash", "flex"), ("cpu", "cuda")),
    **dict.fromkeys(CPU_PEERS, ("cpu",)),
}
# Calls that torch makes in one way, whatever its backends.
ONE_WAY = ("softcap", "return_lse", "varlen", *MODULES)
# Those that are torch's: the bar of most suites is the best of them.
TORCH_PEERS = ("torch", *TORCH_BACKENDS)


def peers_for(problem: Problem, asked: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The peers of a problem unless a user asks for others. torch's own choice is one of its backends and would be
    timed twice; on the host it is another way, and on a CPU its only one. FlexAttention takes seconds to compile and
    is left out where others are made for the problem, or where nothing but the host counts."""
    if asked:
        return asked
    if problem.device == "cpu" and not (problem.call or problem.differentiates):
        return ("torch", *(name for name in CPU_PEERS if is_installed(name)))
    if not problem.device.startswith("cuda") or problem.call in ONE_WAY:
        return ("torch",)
    plain = problem.mask in ("none", "causal") and problem.H == problem.Hkv
    missing = (name for name, package in GPU_PACKAGES.items() if not is_installed(package))
    others = (*({"flex"} if plain or problem.host else ()), *(() if problem.host else ("torch",)))
    left_out = {*CPU_PEERS, *missing, *others}
    return tuple(name for name in PEERS if name not in left_out)


def is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # what holds a part of it
        return False


def why_absent(name: str, device: str) -> str | None:
    """Why a peer cannot run on a device of this machine, as a clause, or None."""
    kinds, package = KINDS.get(name), PACKAGES.get(name)
    if kinds and torch.device(device).type not in kinds:
        return f"expected a device of kind {' or '.join(kinds)}, where it runs, got {device}"
    return f"the package {package} is not installed" if package and not is_installed(package) else None
