"""What the emulator finds in kernels: memory out of bounds, races, divergence, undefined behaviour; and traffic."""

from __future__ import annotations

import pytest
import torch
from metal import emulator
from metal.emulator import Divergence, OutOfBounds, Race, ThreadgroupMemory, TimeLimit, Undefined
from metal.small import BARRIER, BOTH, COPY, kernel


def run_copy(body, n=32, threads=32, **settings):
    x, out = torch.arange(float(n)), torch.zeros(n)
    with emulator.configure(**settings):
        kernel(COPY, body)(x, out, threads=threads, group_size=32)
    return out


# -- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body, text",
    [
        ("out[index] = x[index + 1];", "read .*buffer 0: byte 128"),
        ("out[index] = x[int(index) - 1];", "read .*buffer 0: byte -4"),
        ("out[index + 1] = x[index];", "wrote .*buffer 1: byte 128"),
        ("out[int(index) - 1] = x[index];", "wrote .*buffer 1: byte -4"),
        ("out[index] = x[long(index) << 27];", "buffer 0"),
    ],
)
@BOTH
def test_out_of_bounds(body, text, checked):
    """Seeds of the fast build have memory at the one or the other end of a page."""
    seed = int("- 1" in body)
    with pytest.raises(OutOfBounds, match=text) as raised:
        run_copy(body, checked=checked, seed=seed)
    assert "lines 7" in str(raised.value)


def test_writes_less_than_a_page_away_are_found():
    for seed, body in ((1, "out[index + 1] = x[index];"), (0, "out[int(index) - 1] = x[index];")):
        with pytest.raises(OutOfBounds, match="less than a page"):
            run_copy(body, seed=seed)


def test_views_bound_checked_runs():
    storage, out = torch.zeros(64), torch.zeros(32)
    function = kernel(COPY, "out[index] = x[index + 1];")
    with emulator.configure(checked=True):
        function(storage[:32], out, threads=32, group_size=32)
        with emulator.configure(views=True), pytest.raises(OutOfBounds, match="buffer 0: byte 128"):
            function(storage[:32], out, threads=32, group_size=32)


def test_faults_leave_python_as_it_was():
    for _ in range(3):
        with pytest.raises(OutOfBounds):
            run_copy("out[index] = x[index + 100000];")
    assert torch.equal(run_copy("out[index] = x[index];"), torch.arange(32.0))


@BOTH
def test_threadgroup_arrays_have_bounds(checked):
    body = f"threadgroup float a[32]; threadgroup float b[32]; a[index] = 0.0f; b[index] = 1.0f; {BARRIER}"
    with emulator.configure(checked=checked), pytest.raises((OutOfBounds, Undefined), match=r"array"):
        run_copy(body + "threadgroup float* p = a; p[index + 1] = 2.0f;", checked=checked)


def test_threadgroup_memory_is_limited_and_measured():
    declared = (
        "threadgroup float a[4096]; threadgroup half b[{}]; a[index] = 1.0f; b[index] = 1; out[index] = a[index];"
    )
    emulator.traffic()
    run_copy(declared.format(8192))
    assert emulator.traffic()[-1].threadgroup_bytes == 32768
    with pytest.raises(ThreadgroupMemory, match="32770 bytes"):
        run_copy(declared.format(8193))


def test_threadgroup_memory_is_poisoned_for_each_threadgroup():
    out = run_copy(
        "threadgroup float a[32]; if (group.x == 0) a[index] = 1.0f; out[group.x * 32 + index] = a[index];", 64, 64
    )
    assert (out[:32] == 1).all() and out[32:].isnan().all()


@pytest.mark.parametrize(
    "body, text",
    [
        ("const int big = int(n) + int(index); out[index] = float(big);", "overflowed"),
        ("out[index] = float((int(n) >> 16) / int(index & 0));", "divided by zero"),
        ("out[index] = float(1 << (int(index) + 1));", "shift"),
        ("float y[4]; y[index] = 1.0f; out[index] = y[n % 4];", "outside of an array"),
        ("const float4 y = *(device const float4*)(out + index); out[index] = y.x;", "not aligned"),
    ],
)
def test_undefined_behaviour(body, text):
    with emulator.configure(checked=True), pytest.raises(Undefined, match=text):
        function = kernel("device float* out [[buffer(0)]], constant long& n [[buffer(1)]]", body)
        function(torch.zeros(64), 2**31 - 1, threads=32, group_size=32)


# -- meetings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body, text",
    [
        ("if (lane < 16) out[index] = simd_sum(1.0f);", r"simd_sum in line 7|have finished"),
        ("if (lane < 16) out[index] = simd_sum(1.0f); else out[index] = simd_max(1.0f);", "simd_sum|simd_max"),
        (
            "if (lane < 16) out[index] = simd_sum(1.0f);\nelse out[index] = simd_sum(2.0f);",
            "line 7.*line 8|line 8.*line 7",
        ),
        (f"if (lane == 3) return; {BARRIER}", "threadgroup_barrier"),
        (f"if (simdgroup == 1) return; {BARRIER}", "simdgroup 1 has finished"),
        (f"if (simdgroup == 1) {{ {BARRIER} }}\nelse {{ {BARRIER} }}", "line 7.*line 8|line 8.*line 7"),
        ("out[index] = simd_shuffle_xor(1.0f, ushort(lane / 16));", "differ in the parameter"),
        ("out[index] = simd_broadcast(1.0f, ushort(32));", "outside of the simdgroup"),
    ],
)
@pytest.mark.parametrize("schedule", ["greedy", "random"])
def test_divergence(body, text, schedule):
    out = torch.zeros(64)
    with emulator.configure(schedule=schedule), pytest.raises(Divergence, match=text) as raised:
        kernel("device float* out [[buffer(0)]]", body)(out, threads=64, group_size=64)
    assert "threadgroup (0, 0, 0)" in str(raised.value) and "run" in str(raised.value)


def test_a_kernel_without_end_is_stopped():
    body = "volatile int i = 0; while (n) ++i;"
    with emulator.configure(seconds=0.2), pytest.raises(TimeLimit, match=r"0\.2 s"):
        kernel("constant long& n [[buffer(0)]]", body)(1, threads=32, group_size=32)


# A simdgroup reads what the other wrote, then the tile is written again.
EXCHANGE = f"""
  threadgroup float tile[64];
  float sum = 0.0f;
  for (int i = 0; i < 4; ++i) {{
    tile[index] = float(index + i);
    {BARRIER}
    sum += tile[63 - index] * float(i + 1);
    {BARRIER}
  }}
  out[index] = sum;"""


def exchanged(body, **settings):
    out = torch.zeros(64)
    with emulator.configure(**settings):
        kernel("device float* out [[buffer(0)]]", body)(out, threads=64, group_size=64)
    return out


EXCHANGED = sum((63 - torch.arange(64.0) + i) * (i + 1) for i in range(4))


def without(text: str, part: str, number: int) -> str:
    """The text without one occurrence of a part."""
    pieces = text.split(part)
    return part.join(pieces[: number + 1]) + part.join(pieces[number + 1 :])


@pytest.mark.parametrize("schedule", ["greedy", "random"])
@pytest.mark.parametrize("seed", range(4))
def test_barriers(schedule, seed):
    assert torch.equal(exchanged(EXCHANGE, schedule=schedule, seed=seed), EXCHANGED)
    assert torch.equal(exchanged(EXCHANGE, schedule=schedule, seed=seed, checked=True), EXCHANGED)


@pytest.mark.parametrize("number", [0, 1])
def test_schedules_find_a_missing_barrier(number):
    body = without(EXCHANGE, BARRIER, number)
    assert any(not torch.equal(exchanged(body, seed=seed), EXCHANGED) for seed in range(3))


@pytest.mark.parametrize("number", [0, 1])
def test_checked_runs_find_a_missing_barrier_under_any_schedule(number):
    for seed in range(4):
        with pytest.raises(Race, match=r"tile.*no barrier.*lines (11|13), (11|13)"):
            exchanged(without(EXCHANGE, BARRIER, number), seed=seed, checked=True)


@pytest.mark.parametrize("barrier", ["mem_threadgroup", "mem_none", None])
def test_simdgroup_barriers_order_memory_only_if_asked(barrier):
    call = f"simdgroup_barrier(mem_flags::{barrier});" if barrier else "out[index] = simd_sum(1.0f);"
    body = f"threadgroup float tile[64]; tile[index] = float(index); {call} out[index] = tile[index ^ 1];"
    if barrier == "mem_threadgroup":
        assert torch.equal(exchanged(body, checked=True), (torch.arange(64) ^ 1).float())
    else:
        with pytest.raises(Race):
            exchanged(body, checked=True)
    if barrier:  # another simdgroup's memory wants the threadgroup's barrier
        with pytest.raises(Race):
            exchanged(body.replace("index ^ 1", "index ^ 32"), checked=True)


def test_races_between_threadgroups():
    for body in ("out[index] = 1.0f;", "out[group.x * 32 + index] = out[index];"):
        with pytest.raises(Race, match="buffer 1"):
            run_copy(body, 64, 64, checked=True)
    run_copy("out[group.x * 32 + index] = x[index] + x[63 - index];", 64, 64, checked=True)


# -- traffic ---------------------------------------------------------------------------------------------------------


def test_traffic_of_a_copy_is_exact():
    emulator.traffic()
    run_copy("out[group.x * 32 + index] = x[group.x * 32 + index];", 128, 128, checked=True)
    (record,) = emulator.traffic()
    assert (record.kernel, record.groups, record.group_size) == ("run", (4, 1, 1), (32, 1, 1))
    assert record.of("x") == (512, 0, 512, 512, 0)
    assert record.of("out") == (0, 512, 0, 0, 512)


def test_traffic_tells_repetition_from_size():
    emulator.traffic()
    body = """
      float sum = 0.0f;
      for (int i = 0; i < 3; ++i) sum += x[index] + simd_sum(x[index ^ 1]);
      const float4 y = *(device const float4*)(x + 4 * (index / 4));
      out[group.x * 32 + index] = sum + y.z;"""
    run_copy(body, 128, 128, checked=True)
    (record,) = emulator.traffic()
    x = record.of("x")
    assert (x.read_per_group, x.read_once) == (4 * 128, 128)
    assert x.read >= 128 * (3 * 4 + 16)
    assert emulator.traffic() == []


def test_unchecked_runs_count_nothing():
    emulator.traffic()
    run_copy("out[index] = x[index];")
    assert emulator.traffic()[0].buffers == {}
