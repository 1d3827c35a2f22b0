"""Small kernels for the emulator's own tests: a body becomes the kernel `run`, whose body begins in line 7."""

from __future__ import annotations

import pytest
import torch
from metal.emulator import compile_shader

HEAD = """#include <metal_stdlib>
#include <metal_simdgroup>
#include <metal_simdgroup_matrix>
using namespace metal;
"""
IDS = (
    "uint3 group [[threadgroup_position_in_grid]], uint simdgroup [[simdgroup_index_in_threadgroup]], "
    "uint lane [[thread_index_in_simdgroup]], uint index [[thread_index_in_threadgroup]]"
)
COPY = "device const float* x [[buffer(0)]], device float* out [[buffer(1)]]"
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
BOTH = pytest.mark.parametrize("checked", [False, True], ids=["fast", "checked"])


def kernel(parameters: str, body: str, before: str = ""):
    """The kernel `run` of a library. Its parameters are in line 6, and the body begins in line 7."""
    return compile_shader(f"{HEAD}{before}\nkernel void run({parameters}, {IDS}) {{\n{body}\n}}").run


def outputs(body: str, threads: int = 32, dtype=torch.float32, inputs=(), element="float"):
    """What a body writes to out[index] for each thread of one threadgroup."""
    parameters = [f"device const float* in{i} [[buffer({i})]]" for i in range(len(inputs))]
    parameters.append(f"device {element}* out [[buffer({len(inputs)})]]")
    out = torch.full((threads,), 99, dtype=dtype)
    kernel(", ".join(parameters), body)(*inputs, out, threads=threads, group_size=threads)
    return out
