"""The kernels keep to the Metal that dialect.py allows, and dialect.py refuses what it should."""

from __future__ import annotations

from pathlib import Path

import pytest
from metal import emulator
from metal.dialect import violations

KERNELS = sorted((Path(__file__).resolve().parents[2] / "kernels" / "metal").glob("*.metal"))

GOOD = """
#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;
#define UNROLL _Pragma("clang loop unroll(full)")
#define BLOCK 32

constant constexpr float kLog2E = 1.44269504088896340736f;
constexpr constant int kTable[2] = {1, 2};

struct Rows {
  device const float *q, *k;
  int first;
  int number(int row) const { return first + row * 2 & 7; }
};

template <typename T, int N>
inline float total(device const T* from, threadgroup T* to, thread const Rows& rows, constant long& stride) {
  float sum = 0.0f, many[N];
  UNROLL
  for (int i = 0; i < N; ++i) many[i] = float(from[i * stride + rows.number(i)]);
#pragma unroll
  for (int i = 0; i < N; ++i) sum += many[i] * kLog2E;
  *to = T(sum);
  return metal::precise::exp2(fast::log2(sum)) + simd_sum(sum) * sum;
}

[[max_total_threads_per_threadgroup(BLOCK)]] kernel void run(
    device const half* q [[buffer(0)]], device float* out [[buffer(1)]], constant long& n [[buffer(2)]],
    uint3 group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup half tile[BLOCK * 2];
  threadgroup float more[BLOCK];
  Rows rows = {nullptr, nullptr, 1};
  simdgroup_matrix<float, 8, 8> a = make_filled_simdgroup_matrix<float, 8, 8>(0.0f), b = a;
  simdgroup_multiply_accumulate(a, a, b, a);
  thread float2& pair = reinterpret_cast<thread float2&>(a.thread_elements());
  more[lane] = pair.x + a.thread_elements()[1] + float(kTable[lane & 1]);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  simdgroup_barrier(mem_flags::mem_none);
  const float4 four = float4(1e-3f, 2.0f, more[lane ^ 1], INFINITY);
  if (lane < 4 && four.x > 0.0f) out[lane] = total<half, 4>(q, tile, rows, n) + four[lane % 4];
}
"""

BODY = "kernel void f(device float* x [[buffer(0)]], uint lane [[thread_index_in_simdgroup]]) {\n%s\n}"
BAD = {
    "a lambda": BODY % "float y = [&](float z) { return z; }(x[0]);",
    "a lambda by value": BODY % "x[0] = apply([=] { return 1.0f; });",
    "the word static": BODY % "static int count = 0;",
    "the word double": BODY % "double y = 0;",
    "the word goto": BODY % "goto end; end: return;",
    "the word virtual": "struct A { virtual void f(); };",
    "the word auto": BODY % "auto y = x[0];",
    "the word new": BODY % "x[0] = *new float;",
    "the word switch": BODY % "switch (lane) { case 1: return; }",
    "the word this": "struct A { int b; int c() const { return this->b; } };",
    "the word atomic_uint": BODY % "device atomic_uint* y;",
    "the word texture2d": "kernel void f(texture2d<float> t [[texture(0)]]) {}",
    "std::": BODY % "x[0] = std::max(x[0], 1.0f);",
    "the function pow": BODY % "x[0] = pow(x[0], 2.0f);",
    "the function simd_prefix_inclusive_sum": BODY % "x[0] = simd_prefix_inclusive_sum(x[0]);",
    "the method get": BODY % "x[0] = y.get();",
    "precise::pow": BODY % "x[0] = metal::precise::pow(x[0], 2.0f);",
    "the attribute function_constant": "constant int N [[function_constant(0)]];",
    "the attribute thread_position_in_grid": "kernel void f(uint i [[thread_position_in_grid]]) {}",
    "the attribute host_name": '[[host_name("g")]] kernel void f() {}',
    "the literal 0.5,": BODY % "x[0] = 0.5 * x[0];",
    "the literal 1e3,": BODY % "x[0] = 1e3;",
    "the literal 1.0h": BODY % "half y = 1.0h;",
    "without an address space: float*": "inline float f(float* x) { return *x; }",
    "without an address space: const float&": "inline float f(const float& x) { return x; }",
    "without an address space: ELEMENT const*": "inline float f(const ELEMENT* x) { return *x; }",
    "without an address space: Row&": "struct Row { int a; };\ninline int f(Row& r) { return r.a; }",
    "without an address space: T*": "template <typename T> inline T f(T* x) { return *x; }",
    "without an address space: float4": BODY % "float4 y = *reinterpret_cast<float4*>(x);",
    "without an address space: float2": BODY % "float2 y = *(float2*)(x);",
    "without an address space: const vec*": BODY % "const vec<float, 4>* y = 0;",
    "a reference to an rvalue": "inline float f(thread float&& x) { return x; }",
    "the parameter x is an array": "inline float f(float x[4]) { return x[0]; }",
    "a threadgroup array of simdgroup_matrix": BODY % "threadgroup simdgroup_matrix<float, 8, 8> tile[2];",
    "a threadgroup array of half4x4": BODY % "threadgroup half4x4 tile[2];",
    "a threadgroup array of Row": "struct Row { int a; };\n" + BODY % "threadgroup Row tile[2];",
    "threadgroup memory that is no array": BODY % "threadgroup float one;",
    "not at the top of a kernel": BODY % "if (lane) {\nthreadgroup float tile[2];\n}",
    "that is not at the top of a kernel": "inline void f() {\n;threadgroup float tile[2];\n}",
    "f calls itself": "inline int f(int x) { return x ? f(x - 1) : 0; }",
    "g calls itself": "inline int g();\ninline int h() { return g(); }\ninline int g() { return h(); }",
    "the name divide": "inline float divide(float x, float y) { return x / y; }",
    "the name level": "struct level { int a; };",
    "the word fragment": "inline float fragment(float x) { return x; }",
    "the header": "#include <metal_atomic>",
    "the directive #ifdef": "#ifdef FAST\n#endif",
    "#pragma once": "#pragma once",
    "_Pragma": '#define UNROLL _Pragma("omp parallel")',
}


def test_allowed_constructs_pass_and_compile():
    assert violations(GOOD) == []
    assert dir(emulator.compile_shader(GOOD)) == ["run"]


@pytest.mark.parametrize("reason", BAD)
def test_others_are_refused(reason):
    found = violations(BAD[reason])
    assert any(reason.removesuffix(" by value") in sentence for sentence in found), found


def test_violations_name_their_line():
    assert violations("// one\n\nconstant int a = 1;\nconstant double b = 1;\n") == ["line 4: the word double"]


def test_words_in_comments_are_free():
    assert violations("// static double goto std::max, [=]\n/* new\n virtual */\nconstant int a = 1;\n") == []


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.name)
def test_kernels(path):
    beside = "\n".join(other.read_text() for other in KERNELS if other != path)
    assert violations(path.read_text(), beside) == []
