"""The Metal emulator itself: arithmetic, simdgroup operations, arguments, and what does not compile."""

from __future__ import annotations

import math
import shutil

import pytest
import torch
from metal import build, emulator
from metal.emulator import Race, compile_shader
from metal.small import BOTH, COPY, HEAD, IDS, kernel, outputs

# -- arithmetic ------------------------------------------------------------------------------------------------------


MATRICES = """
  const uint quad = lane / 4, row = (quad & 4) + (lane / 2) % 4, col = (quad & 2) * 2 + (lane % 2) * 2;
  simdgroup_matrix<float, 8, 8> a, b, c, d = make_filled_simdgroup_matrix<float, 8, 8>(0.5f);
  for (int i = 0; i < 2; ++i) {
    a.thread_elements()[i] = in0[row * 8 + col + i];
    b.thread_elements()[i] = in1[row * 8 + col + i];
    c.thread_elements()[i] = in2[row * 8 + col + i];
  }
"""


@pytest.mark.parametrize("schedule", ["greedy", "random"])
@pytest.mark.parametrize("operation", ["simdgroup_multiply_accumulate(d, a, b, c)", "simdgroup_multiply(d, a, b)"])
def test_matrix_product_with_the_lane_map_of_the_hardware(operation, schedule):
    a, b, c, out = (torch.randn(8, 8) for _ in range(4))
    store = "for (int i = 0; i < 2; ++i) out[row * 8 + col + i] = d.thread_elements()[i];"
    parameters = ", ".join(f"device const float* in{i} [[buffer({i})]]" for i in range(3))
    function = kernel(f"{parameters}, device float* out [[buffer(3)]]", f"{MATRICES}{operation};\n{store}")
    with emulator.configure(schedule=schedule):
        function(a, b, c, out, threads=32, group_size=32)
    wanted = a.double() @ b.double() + (c.double() if "accumulate" in operation else 0)
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=1e-5)


def test_matrices_may_be_the_result_and_an_operand():
    a, b, c, out = (torch.randn(8, 8) for _ in range(4))
    body = f"{MATRICES}simdgroup_multiply_accumulate(c, a, b, c); simdgroup_multiply_accumulate(a, c, a, b);"
    store = "for (int i = 0; i < 2; ++i) out[row * 8 + col + i] = a.thread_elements()[i];"
    parameters = ", ".join(f"device const float* in{i} [[buffer({i})]]" for i in range(3))
    kernel(f"{parameters}, device float* out [[buffer(3)]]", body + store)(a, b, c, out, threads=32, group_size=32)
    torch.testing.assert_close(out, (a @ b + c) @ a + b, rtol=1e-5, atol=1e-4)


def test_simdgroup_operations():
    x = torch.randn(64)
    first, second = x[:32], x[32:]

    def both(function):
        return torch.cat([function(part).expand(32) for part in (first, second)])

    load = "const float x = in0[index];"
    for body, wanted in {
        "out[index] = simd_sum(x);": both(torch.sum),
        "out[index] = simd_max(x);": both(torch.amax),
        "out[index] = simd_min(x);": both(torch.amin),
        "out[index] = simd_any(x > 1.5f) ? 1.0f : 0.0f;": both(lambda part: (part > 1.5).any().float()),
        "out[index] = simd_all(x > -9.0f) ? 1.0f : 0.0f;": torch.ones(64),
        "out[index] = simd_broadcast(x, ushort(7));": both(lambda part: part[7]),
        "out[index] = simd_shuffle_xor(x, ushort(9));": x[torch.arange(64) ^ 9],
        "out[index] = float(simd_sum(int(index)) + simd_max(index));": both(lambda part: part[0] * 0)
        + torch.tensor([31 * 16 + 31.0, 31 * 16 + 1024 + 63]).repeat_interleave(32),
    }.items():
        torch.testing.assert_close(outputs(load + body, 64, inputs=[x]), wanted, msg=lambda m, b=body: f"{b}\n{m}")


def test_two_shuffles_in_a_row_do_not_mix():
    body = (
        "float x = float(index); for (int i = 0; i < 5; ++i) x += simd_shuffle_xor(x, ushort(1 << i)); out[index] = x;"
    )
    with emulator.configure(schedule="random", seed=5):
        assert outputs(body, 64).tolist() == [496.0] * 32 + [496.0 + 32 * 32] * 32


@pytest.mark.parametrize("element, dtype", [("bfloat", torch.bfloat16), ("half", torch.float16)])
def test_conversions_round_to_nearest_even(element, dtype):
    x = torch.cat(
        [torch.randn(1000) * torch.logspace(-9, 5, 1000), torch.tensor([math.inf, -math.inf, math.nan, 0, -0.0])]
    )
    ties = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 3.4e38, 65519.9, 65520.0])
    x = torch.cat([x, ties, torch.zeros(-(len(x) + len(ties)) % 32)])
    out = torch.empty(len(x), dtype=dtype)
    function = kernel(
        f"device const float* x [[buffer(0)]], device {element}* out [[buffer(1)]]",
        f"out[group.x * 32 + index] = {element}(x[group.x * 32 + index]);",
    )
    function(x, out, threads=len(x), group_size=32)
    assert torch.equal(out.nan_to_num(7), x.to(dtype).nan_to_num(7))


def test_each_operation_of_low_precision_rounds():
    body = "const bfloat a = bfloat(1.0f), b = bfloat(0.00390625f); out[index] = float(a + b + b);"
    assert outputs(body)[0] == 1.0
    body = "out[index] = float(half(1) + half(0.0003f)) + float(bfloat(1.0f) + bfloat(0.0078125f));"
    assert outputs(body)[0] == 2.0078125


def test_functions():
    body = """
      const float x = float(index) - 15.5f;
      out[index] = exp2(x) + fabs(x) + min(x, 2.0f) + max(-x, 1.0f) + clamp(x, -1.0f, 1.0f) +
          select(x, 1.0f, x > 0.0f) + fma(x, x, 1.0f) + precise::tanh(x) + floor(x) +
          float(mulhi(uint(index) * 0x10000000u, 64u)) + float(as_type<uint>(2.0f) >> 30) +
          (isinf(x * INFINITY) ? 1.0f : 0.0f) + (isnan(NAN) ? 2.0f : 0.0f);"""
    x = torch.arange(32) - 15.5
    mulhi = torch.tensor([float((i * 0x10000000 % 2**32) * 64 >> 32) for i in range(32)])
    wanted = x.exp2() + x.abs() + x.clamp(max=2) + (-x).clamp(min=1) + x.clamp(-1, 1) + torch.where(x > 0, 1.0, x)
    wanted += x * x + 1 + x.tanh() + x.floor() + mulhi + 1 + 1 + 2
    torch.testing.assert_close(outputs(body), wanted)


def test_vectors():
    body = """
      const float4 a = float4(1.0f, 2.0f, 3.0f, 4.0f);
      const half4 b = half4(a * 2.0f);
      const uint2 c = uint2(index, 3u) + uint2(1u);
      const float2 d = a.zw + float2(b.x, b.w);
      out[index] = float(c.x * c.y) + d.x + d.y * a[index % 4];"""
    wanted = [(i + 1) * 4 + 5 + 12 * (1 + i % 4) for i in range(32)]
    assert outputs(body).tolist() == wanted


def test_uninitialised_locals_are_nan():
    assert outputs("float x, y[4]; out[index] = simd_max(lane) ? y[2] : x;").isnan().all()


def test_flushed_subnormals():
    x = torch.full((32,), 1e-40)
    assert outputs("out[index] = in0[index] * 2.0f;", inputs=[x])[0] > 0
    with emulator.configure(flush=True):
        assert outputs("out[index] = in0[index] * 2.0f;", inputs=[x])[0] == 0
    assert (x * 1.0)[0] > 0


# -- arguments -------------------------------------------------------------------------------------------------------


ALL_ARGUMENTS = """device const float* x [[buffer(0)]], device float* out [[buffer(1)]], constant long& n [[buffer(2)]],
    constant float& s [[buffer(3)]], constant long* many [[buffer(4)]], constant float* some [[buffer(5)]],
    constant int& low [[buffer(6)]]"""


@BOTH
def test_arguments(checked):
    storage, result = torch.arange(200.0), torch.full((100,), -1.0)
    view, out = storage[10:170].view(32, 5)[:, 1], result[20:84:2]
    with emulator.configure(checked=checked, views=checked):
        function = kernel(
            ALL_ARGUMENTS, "out[2 * index] = x[index * n] * s + float(many[1] * 2) + some[2] + float(low);"
        )
        function(view, out, 5, 0.5, [3, 1 << 40], [1.0, 2.0, 0.25], -7, threads=(32, 1, 1), group_size=(32, 1, 1))
    assert torch.equal(out, view * 0.5 + float(1 << 41) + 0.25 - 7)
    assert (result[:20] == -1).all() and (result[84:] == -1).all() and (result[21:84:2] == -1).all()


@BOTH
def test_views_of_one_storage_are_one_memory(checked):
    body = "out[index] += 1.0f; threadgroup_barrier(mem_flags::{}); const float y = x[63 - index]; out[index + 32] = y;"
    for flag in ("mem_device", "mem_threadgroup"):
        storage = torch.arange(128.0)
        with emulator.configure(checked=checked):
            function = kernel(COPY, body.format(flag))
            if checked and flag == "mem_threadgroup":
                with pytest.raises(Race, match="buffer 0"):
                    function(storage, storage[32:], threads=32, group_size=32)
                continue
            function(storage, storage[32:], threads=32, group_size=32)
        wanted = torch.arange(128.0)
        wanted[32:64] += 1
        wanted[64:96] = wanted[32:64].flip(0)
        assert torch.equal(storage, wanted)


def test_grid_and_ids():
    out = torch.zeros(2, 3, 4, 64, dtype=torch.int32)
    function = kernel(
        "device int* out [[buffer(0)]]",
        "const uint number = (group.z * 3 + group.y) * 4 + group.x;"
        "out[number * 64 + index] = int(simdgroup * 100 + lane) + int(group.z * 1000);",
    )
    for seed in range(3):
        out.zero_()
        with emulator.configure(seed=seed):
            function(out, threads=(4 * 32, 3 * 2, 2), group_size=(32, 2, 1))
        wanted = torch.cat([torch.arange(32), torch.arange(32) + 100]).int() + torch.tensor([0, 1000]).view(2, 1, 1, 1)
        assert torch.equal(out, wanted.expand(2, 3, 4, 64))


@pytest.mark.parametrize(
    "args, options, error, text",
    [
        ((torch.zeros(32),), {}, TypeError, r"out \[\[buffer\(1\)\]\]"),
        ((torch.zeros(32), torch.zeros(32).half()), {}, TypeError, "float16"),
        ((torch.zeros(32), 5), {}, TypeError, "writes there"),
        ((torch.zeros(32), None), {}, TypeError, "None"),
        ((torch.zeros(32), [1, 0.5]), {}, TypeError, "0.5"),
        ((torch.zeros(32), torch.zeros(32), 1 << 63), {}, TypeError, "int64"),
        ((torch.zeros(32), torch.zeros(32)), {"threads": 33}, ValueError, "no multiple of group_size"),
        ((torch.zeros(32), torch.zeros(32)), {"threads": 48, "group_size": 16}, ValueError, "a multiple of 32"),
        ((torch.zeros(32), torch.zeros(32)), {"threads": 2048, "group_size": 2048}, ValueError, "up to 1024"),
        ((torch.zeros(32), torch.zeros(32)), {"threads": None}, ValueError, "threads="),
        ((torch.zeros(32), torch.zeros(32), *[0] * 30), {}, ValueError, "31 buffers"),
        ((torch.zeros(32), torch.zeros(32), [0] * 513), {}, ValueError, "4096"),
    ],
)
def test_wrong_arguments(args, options, error, text):
    function = kernel(COPY, "out[index] = x[index];")
    with pytest.raises(error, match=text):
        function(*args, **{"threads": 32, "group_size": 32} | options)


def test_library():
    library = compile_shader(
        f"{HEAD}[[max_total_threads_per_threadgroup(64)]] kernel void a({COPY}, {IDS}) {{}}\nkernel void b({COPY}) {{}}"
    )
    assert dir(library) == ["a", "b"]
    assert (library.a.max_threads_per_threadgroup, library.b.max_threads_per_threadgroup) == (64, 1024)
    assert library.a.thread_execution_width == 32
    with pytest.raises(RuntimeError, match="nothing"):
        library.nothing  # noqa: B018
    with pytest.raises(ValueError, match="up to 64"):
        library.a(torch.zeros(1), torch.zeros(1), threads=128, group_size=128)


# -- what does not compile -------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    "text",
    [
        "device float* p = tile;",
        "threadgroup float* p = out;",
        "threadgroup float* p = tile; device float* q = p;",
        "float y[2]; out[0] = first(y);",
        "constant float* p = out;",
        "float y = nothing;",
        "x[0] = 1.0f;",
        "threadgroup float one;",
        "out[0] = min(1, 2u);",
    ],
)
def test_compile_errors_name_the_line(text, checked):
    before = "inline float first(device const float* x) { return x[0]; }"
    with emulator.configure(checked=checked), pytest.raises(SyntaxError, match="program_source:8:"):
        kernel(COPY, f"threadgroup float tile[32];\n{text}", before)


@pytest.mark.parametrize(
    "parameters, text",
    [
        ("device float* x", "no attribute"),
        ("device float* x [[buffer(31)]]", "from 0 to 30"),
        ("device float* x [[buffer(0)]], device float* y [[buffer(0)]]", "different numbers"),
        ("float x [[buffer(0)]]", "neither a pointer nor a reference"),
        ("const float* x [[buffer(0)]]", "address space"),
        ("uint x [[thread_position_of_nothing]]", "does not know"),
    ],
)
def test_wrong_parameters(parameters, text):
    with pytest.raises(SyntaxError, match=text):
        kernel(parameters, "")


def test_without_a_compiler_the_package_is_named(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(build.NoCompiler, match="apt-get install clang-19"):
        build.clang.__wrapped__()
