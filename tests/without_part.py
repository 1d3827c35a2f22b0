"""Run by test_torch_private.py: for each path given, calls in a process where torch lacks that private part.

Prints a line of JSON for each: the path, what `ABSENT` names, and what went wrong ("" where all calls were right).
"""

from __future__ import annotations

import builtins
import importlib.util
import json
import os
import sys
import traceback
from pathlib import Path

import torch
import torch._decomp.decompositions_for_jvp  # calls come to import these two: once, and not in every child
import torch.fx.experimental.symbolic_shapes
import torch.nn.functional as F
from torch.nn.attention import SDPBackend
from torch.nn.attention import sdpa_kernel as torch_kernel
from torch.utils.checkpoint import checkpoint

SOURCE = Path(__file__).parents[1] / "sdpa" / "torch_private.py"


def import_without(path: str) -> list[str]:
    """sdpa, whose torch_private does not find `path`; returns ABSENT."""
    name = path.rpartition(".")[2]

    def hiding(owner, attribute, *default):
        if attribute == name:
            raise AttributeError(attribute)
        return builtins.getattr(owner, attribute, *default)

    spec = importlib.util.spec_from_file_location("sdpa.torch_private", SOURCE)
    module = importlib.util.module_from_spec(spec)
    module.getattr = hiding  # found before the builtin
    sys.modules["sdpa.torch_private"] = module
    spec.loader.exec_module(module)
    return module.ABSENT


def close(found, wanted) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def qkv(N: int = 7, grad: bool = False) -> list[torch.Tensor]:
    return [torch.randn(2, 4, n, 8, requires_grad=grad) for n in (6, N, N)]


def plain(sdpa) -> None:
    attend = sdpa.scaled_dot_product_attention
    for N in (7, 5, 7, 9, 1, 2, 3, 7):
        tensors = qkv(N)
        for options in ({}, {"is_causal": True}, {"scale": 0.3}):
            close(attend(*tensors, **options), F.scaled_dot_product_attention(*tensors, **options))
    q, k, v = qkv(6)
    close(attend(q, q, q), F.scaled_dot_product_attention(q, q, q))
    close(attend(q.double(), k.double(), v.double()).float(), F.scaled_dot_product_attention(q, k, v))
    swapped = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    close(attend(*swapped), F.scaled_dot_product_attention(q, k, v))


def masked(sdpa) -> None:
    attend, tensors = sdpa.scaled_dot_product_attention, qkv()
    for shift in range(3):
        lengths = torch.tensor([3, 6]) - shift
        seen = (torch.arange(7) < lengths[:, None])[:, None, None]
        bias = torch.randn(6, 7)
        wanted = F.scaled_dot_product_attention(*tensors, seen)
        close(attend(*tensors, sdpa.Mask(lengths=lengths)), wanted)
        close(attend(*tensors, seen), wanted)
        close(attend(*tensors, sdpa.Mask(bias=bias)), F.scaled_dot_product_attention(*tensors, bias))


def training(sdpa) -> None:
    attend = sdpa.scaled_dot_product_attention
    for _ in range(3):
        tensors = qkv(grad=True)
        upstream = torch.randn(2, 4, 6, 8)
        wanted = torch.autograd.grad(F.scaled_dot_product_attention(*tensors), tensors, upstream)
        for run in (attend, lambda *t: checkpoint(attend, *t, use_reentrant=False)):
            close(torch.autograd.grad(run(*tensors), tensors, upstream), wanted)
        with torch.no_grad():
            assert not attend(*tensors).requires_grad
        first = torch.autograd.grad(attend(*tensors).square().sum(), tensors, create_graph=True)
        assert all(t.isfinite().all() for t in torch.autograd.grad(sum(g.square().sum() for g in first), tensors))


def packed(sdpa) -> None:
    cu = torch.tensor([0, 2, 6], dtype=torch.int32)
    for _ in range(3):
        rows = [torch.randn(6, 4, 8, requires_grad=True) for _ in range(3)]
        found = sdpa.varlen_attention(*rows, cu, cu, 4, 4)
        parts = [[t[a:b].transpose(0, 1) for t in rows] for a, b in ((0, 2), (2, 6))]
        wanted = torch.cat([F.scaled_dot_product_attention(*p).transpose(0, 1) for p in parts])
        close(found, wanted)
        close(torch.autograd.grad(found.sum(), rows), torch.autograd.grad(wanted.sum(), rows))


def switched(sdpa) -> None:
    """Switches, precision and autocast hold between calls of one form."""
    attend, tensors = sdpa.scaled_dot_product_attention, qkv()
    wanted = F.scaled_dot_product_attention(*tensors)
    for _ in range(2):
        close(attend(*tensors), wanted)
        assert sdpa.last_choice().kernel.name == "cpu_flash"
        with torch_kernel(SDPBackend.MATH):
            close(attend(*tensors), wanted)
            assert sdpa.last_choice().kernel.family == "math"
        with sdpa.sdpa_kernel("math"):
            close(attend(*tensors), wanted)
            assert sdpa.last_choice().kernel.family == "math"
        with torch.autocast("cpu", torch.bfloat16):
            out = attend(*tensors)
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.float(), wanted, rtol=3e-2, atol=3e-2)
        for deterministic in (True, False):
            learned = [t.clone().requires_grad_() for t in tensors]
            torch.use_deterministic_algorithms(deterministic)
            attend(*learned).sum().backward()
            assert sdpa.last_choice().problem.deterministic == deterministic


def transformed(sdpa) -> None:
    attend, tensors = sdpa.scaled_dot_product_attention, qkv()
    stacked = [torch.stack([t, t + 1]) for t in tensors]
    close(torch.vmap(attend)(*stacked)[1], F.scaled_dot_product_attention(*(t + 1 for t in tensors)))
    found = torch.func.grad(lambda q: attend(q, *tensors[1:]).sum())(tensors[0])
    close(found, torch.func.grad(lambda q: F.scaled_dot_product_attention(q, *tensors[1:]).sum())(tensors[0]))
    _, found = torch.func.jvp(lambda v: attend(*tensors[:2], v), (tensors[2],), (tensors[2],))
    close(found, F.scaled_dot_product_attention(*tensors))


CHECKS = (plain, masked, training, packed, switched, transformed)


def result_of(path: str) -> dict:
    absent: list[str] = []
    try:
        absent = import_without(path)
        import sdpa

        torch.manual_seed(0)
        for check in CHECKS:
            check(sdpa)
        return {"path": path, "absent": absent, "wrong": ""}
    except Exception:
        return {"path": path, "absent": absent, "wrong": traceback.format_exc()}


def main(paths: list[str]) -> None:
    torch.set_num_threads(1)
    for path in paths:
        child = os.fork()
        if child == 0:
            print(json.dumps(result_of(path)), flush=True)
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(sys.argv[1:])
