"""Devices nobody has here: what is made of the properties torch tells, and what the estimate makes of the device."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from sdpa.dispatch import cost, device
from sdpa.dispatch.catalog import by_name
from sdpa.dispatch.kernel import Kernel
from sdpa.kernels.cpu import library
from sdpa.problem import AttentionProblem, Tile


def properties(name, major, minor, units, clock_mhz, memory_mhz, bus, shared_kib, **rest):
    return SimpleNamespace(
        name=name, major=major, minor=minor, multi_processor_count=units, clock_rate=clock_mhz * 1000,
        memory_clock_rate=memory_mhz * 1000, memory_bus_width=bus, shared_memory_per_block_optin=shared_kib << 10,
        warp_size=32, **rest,
    )  # fmt: skip


CARDS = {
    "a100": (properties("NVIDIA A100-SXM4-80GB", 8, 0, 108, 1410, 1593, 5120, 163), False),
    "h200": (properties("NVIDIA H200", 9, 0, 132, 1980, 3201, 6144, 227), False),
    "laptop": (properties("NVIDIA GeForce RTX 3050 Laptop GPU", 8, 6, 16, 1500, 6001, 128, 99), False),
    "mi300": (properties("AMD Instinct MI300X", 9, 4, 304, 2100, 1300, 8192, 64, gcnArchName="gfx942:sramecc+:xnack-"),
              True),
}  # fmt: skip
DEVICES = {name: device.gpu(facts, hip) for name, (facts, hip) in CARDS.items()}
# Vendors' data sheets: TFLOP/s in bfloat16 and float32, TB/s.
SHEETS = {"a100": (312, 19.5, 2.04), "h200": (1071, 67, 4.9), "laptop": (25, 6.1, 0.19), "mi300": (1307, 163, 5.3)}


@pytest.mark.parametrize("name", SHEETS)
def test_peaks_are_those_of_the_data_sheets(name):
    half, single, bandwidth = SHEETS[name]
    found = DEVICES[name]
    assert found.half_flops == pytest.approx(half * 1e12, rel=0.05)
    assert found.float32_flops == pytest.approx(single * 1e12, rel=0.05)
    assert found.bandwidth == pytest.approx(bandwidth * 1e12, rel=0.05)


def test_names_of_tables():
    assert DEVICES["h200"].names == ("nvidia_h200", "nvidia_sm90")
    assert DEVICES["a100"].names == ("nvidia_a100_sxm4_80gb", "nvidia_sm80")
    assert DEVICES["laptop"].names[0] == "nvidia_geforce_rtx_3050_laptop_gpu"
    assert DEVICES["mi300"].names == ("amd_instinct_mi300x", "amd_gfx942")
    assert (
        device.gpu(SimpleNamespace(name="../NVIDIA/x (y)", major=9, minor=0, multi_processor_count=1), False).names[0]
        == "nvidia_x_y"
    )


def test_what_torch_does_not_tell_is_assumed():
    bare = device.gpu(SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132), False)
    assert bare.half_flops > 5e14 and bare.bandwidth > 1e12 and bare.shared_memory > 0 and bare.warp_size == 32
    zero = device.gpu(properties("New", 13, 7, 8, 0, 0, 0, 0), False)
    assert zero.architecture == "sm137" and zero.half_flops > 0 and zero.bandwidth > 0


def test_tf32_counts_where_it_is_allowed():
    h200 = DEVICES["h200"]
    assert h200.peak(torch.float32, tf32=True) == pytest.approx(h200.half_flops / 2)
    assert h200.peak(torch.float32) == h200.float32_flops
    assert h200.peak(torch.bfloat16, tf32=True) == h200.half_flops
    assert h200.peak(torch.float64) == h200.float32_flops / 2 and DEVICES["laptop"].float64_flops < 1e12


def row(name, **changes):
    options = {"efficiency": 0.6, "overhead": 10e-6, **changes}
    return Kernel(name, "flash", "none", ("cuda",), frozenset({torch.bfloat16}), frozenset(), "", **options)


FUSED = row("fused")
MATH = row("math", efficiency=0.08, overhead=60e-6, materialises=True)


DECODE = dataclasses.replace(FUSED, splits_keys=True)
PROBLEM = AttentionProblem("cuda:0", torch.bfloat16, 4, 16, 16, 2048, 2048, 128, 128)


@pytest.fixture(params=DEVICES)
def gpu(request, monkeypatch):
    monkeypatch.setattr(cost, "device_of", lambda name: DEVICES[request.param])
    return DEVICES[request.param]


def grows(times):
    """Never falls, but for the rounding of the estimate itself."""
    return all(later >= earlier * (1 - 1e-9) for earlier, later in pairwise(times))


@pytest.mark.parametrize("direction", ["forward", "backward", "weights"])
@pytest.mark.parametrize("kernel", [FUSED, MATH, DECODE], ids=["fused", "math", "splits"])
def test_longer_takes_longer(gpu, kernel, direction):
    for B, H in ((1, 1), (1, 16), (64, 32)):
        sizes = [PROBLEM._replace(B=B, H=H, Hkv=H, M=n, N=n, direction=direction) for n in range(64, 4097, 96)]
        times = [cost.estimate(kernel, p) for p in sizes]
        assert grows(times) and times[-1] > times[0] > 0
        keys = [cost.estimate(kernel, PROBLEM._replace(B=B, H=H, Hkv=H, M=1, N=n)) for n in range(64, 65537, 1024)]
        assert grows(keys)


def test_few_programs_are_slower_than_their_operations_say(gpu):
    one = PROBLEM._replace(B=1, H=1, Hkv=1, M=128, N=8192)
    full = one._replace(M=128 * gpu.cores)
    spread = cost.estimate(FUSED, full) - FUSED.overhead
    alone = cost.estimate(FUSED, one) - FUSED.overhead
    assert alone >= 0.99 * spread, "one program on one multiprocessor takes as long as one on each"
    just_over = cost.estimate(FUSED, full._replace(M=full.M + 1)) - FUSED.overhead
    assert just_over == pytest.approx(2 * spread, rel=0.02), "a second wave for one program"


def test_masks_that_torch_converts_are_paid_for(gpu):
    """Each operation beside the kernel is a launch, and on large masks memory."""
    torchs = dataclasses.replace(FUSED, mask_launches=5)
    small, masked = PROBLEM._replace(B=1, H=1, Hkv=1, M=16, N=16), {"features": frozenset({"allowed"})}
    assert cost.estimate(torchs, small) == cost.estimate(FUSED, small)
    beside = cost.estimate(torchs, small._replace(**masked)) - cost.estimate(FUSED, small._replace(**masked))
    assert beside == pytest.approx(5 * cost.GPU_COPY_OVERHEAD, rel=0.01)
    large = PROBLEM._replace(B=8, H=16, M=4096, N=4096, **masked)
    assert cost.estimate(torchs, large) - cost.estimate(FUSED, large) > 10 * beside
    assert cost.masking(by_name()["vendor_efficient"], small._replace(**masked)) > 0


def test_padded_rows_are_paid_for(gpu):
    whole = PROBLEM._replace(B=64, M=128, N=65536)
    assert cost.arithmetic(FUSED, whole, gpu) > 10 * cost.arithmetic(FUSED, whole._replace(M=1), gpu)
    one_row = whole._replace(M=1, Hkv=1)
    wide, narrow = (cost.grid_of(FUSED, one_row, gpu, tile) for tile in (None, Tile(16, 64, 4, 2)))
    assert (wide.padded, narrow.padded) == (64, 16)
    grouped = one_row._replace(H=16, Hkv=4)
    packed = cost.grid_of(DECODE, grouped, gpu, Tile(16, 64, 4, 2))
    assert packed.padded == 4, "the heads of a group share the rows of a tile"


def test_math_never_wins_a_large_problem(gpu):
    for N in (1024, 4096, 16384):
        for direction in ("forward", "backward", "weights"):
            large = PROBLEM._replace(B=max(1, 16384 // N), M=N, N=N, direction=direction)
            assert cost.estimate(FUSED, large) < cost.estimate(MATH, large)


def test_splitting_wins_one_query_against_many_keys(gpu):
    step = PROBLEM._replace(B=1, H=8, Hkv=8, M=1, N=131072)
    assert cost.estimate(DECODE, step) < 0.8 * cost.estimate(FUSED, step)
    assert cost.estimate(DECODE, step) < cost.estimate(MATH, step)
    crowd = step._replace(B=2 * gpu.cores, N=512)
    assert cost.estimate(DECODE, crowd) == cost.estimate(FUSED, crowd), "enough to do without splitting"


def test_a_tile_too_large_for_the_device_comes_last(monkeypatch):
    wide = PROBLEM._replace(D=256, Dv=256)
    large, small = Tile(128, 128, 8, 2), Tile(64, 32, 4, 2)
    estimates = {}
    for name in ("laptop", "h200"):
        monkeypatch.setattr(cost, "device_of", lambda _, name=name: DEVICES[name])
        estimates[name] = [cost.estimate(FUSED, wide, tile) for tile in (large, small)]
    assert estimates["laptop"][0] > 2 * estimates["laptop"][1]
    assert estimates["h200"][0] <= estimates["h200"][1]


def test_unknown_accelerators_are_estimated_too():
    for name in ("mps", "xpu:0"):
        assert 0 < cost.estimate(FUSED, PROBLEM._replace(device=name)) < 60


@pytest.mark.parametrize(
    ("vendor", "family", "model", "name"),
    [
        ("AuthenticAMD", "25", "17", "amd_zen4"), ("AuthenticAMD", "25", "97", "amd_zen4"),
        ("AuthenticAMD", "25", "1", None), ("AuthenticAMD", "26", "2", "amd_zen5"),
        ("AuthenticAMD", "26", "68", "amd_zen5"), ("AuthenticAMD", "26", "80", None),
        ("GenuineIntel", "6", "143", "intel_sapphire_rapids"), ("GenuineIntel", "6", "85", None),
        ("AuthenticAMD", "6", "143", None),
    ],
)  # fmt: skip
def test_microarchitectures_that_tables_are_of(monkeypatch, vendor, family, model, name):
    """Milan, a Zen 6 and a Skylake are none of them: their tables would be those of the instruction set."""
    told = {"vendor_id": vendor, "cpu family": family, "model": model}
    monkeypatch.setattr(device, "cpu_info", lambda: told)
    monkeypatch.setattr(device, "cpu_isa", lambda: "avx512")
    assert device.cpu_table_name() == (name or "cpu_avx512")


def test_processors_that_tell_nothing(monkeypatch):
    monkeypatch.setattr(device, "cpu_info", lambda: {})
    monkeypatch.setattr(device, "cpu_isa", lambda: "neon")
    assert device.cpu_table_name() == "cpu_neon"


def test_unknown_instruction_set():
    assert library.load_error() is None
    available = ",".join(library.isas())
    with pytest.raises(RuntimeError, match=f"'sse9' is not available on this machine, which has {available}"):
        library.set_isa("sse9")
