"""Devices nobody has here: what is made of the properties torch tells, and what the estimate makes of the device."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sdpa.dispatch import apple, cost, device
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
    assert cost.masking(by_name()["vendor_efficient"], small._replace(**masked), cost.device_of("cuda")) > 0


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


HALVES = {"triton_flash", "triton_efficient", "vendor_cudnn", "vendor_flash", "vendor_efficient"}


@pytest.mark.parametrize("name", ["a100", "mi300"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("changes,fastest", [
    ({}, {"triton_flash", "vendor_cudnn"}),
    ({"features": frozenset({"band"}), "right": 0}, {"triton_flash", "vendor_cudnn"}),
    ({"features": frozenset({"allowed"})}, {"triton_efficient"}),
    ({"features": frozenset({"bias"}), "bias_matrices": 16}, {"triton_efficient"}),
])  # fmt: skip
def test_whom_estimates_choose_where_nothing_was_measured(name, direction, changes, fastest, monkeypatch):
    """On cards without Hopper's kernels: ours of large problems, or cuDNN where it is; ours under dense masks."""
    monkeypatch.setattr(cost, "device_of", lambda _: DEVICES[name])
    large = AttentionProblem("cuda:0", torch.bfloat16, 4, 16, 16, 4096, 4096, 128, 128, direction=direction, **changes)
    able = [kernel for kernel in map(by_name().get, HALVES) if large.features <= kernel.features]
    times = {k.name: cost.estimate(k, large) for k in able if name == "a100" or k.name != "vendor_cudnn"}
    assert min(times, key=times.get) in fastest, times


# Apple's specifications and reviews: TFLOP/s in float32, GB/s, GPU cores.
APPLE_SHEETS = {
    "M1": (2.6, 68, 8), "M1 Max": (10.4, 400, 32), "M1 Ultra": (21, 800, 64), "M2": (3.6, 100, 10),
    "M2 Max": (13.6, 400, 38), "M3 Ultra": (28.2, 819, 80), "M4": (4.1, 120, 10), "M4 Max": (16.2, 546, 40),
    "M5 Pro": (8.1, 307, 20),
}  # fmt: skip


@pytest.mark.parametrize("chip", APPLE_SHEETS)
def test_peaks_of_apples_gpus(chip):
    single, bandwidth, cores = APPLE_SHEETS[chip]
    found = device.device_of(f"mps:{chip}")
    assert (found.kind, found.vendor, found.cores, found.warp_size) == ("mps", "apple", cores, 32)
    assert found.float32_flops == found.half_flops == pytest.approx(single * 1e12, rel=0.05)
    assert found.bandwidth == pytest.approx(bandwidth * 1e9, rel=0.01)
    assert found.names == (f"apple_{chip.lower().replace(' ', '_')}",) and f"Apple {chip} (" in found.description


def test_the_table_of_users_is_ours():
    text = (Path(__file__).resolve().parent.parent / "docs/metal.md").read_text()
    for chip, (cores, bandwidth) in apple.CHIPS.items():
        assert f"| {chip} | {cores} | {apple.Gpu(chip, cores).flops * 1e-12:.1f} | {bandwidth * 1e-9:.0f} |" in text


def test_every_size_of_a_generation_is_larger():
    for generation in apple.CLOCKS:
        sizes = [apple.CHIPS[chip] for chip in apple.CHIPS if chip.split()[0] == generation]
        assert sizes == sorted(sizes) and len(sizes) >= 3


@pytest.mark.parametrize("text", ["m4 max", "M4-Max", "M4_MAX", "m4  max"])
def test_a_chip_as_users_write_it(text):
    assert apple.chip_of(text) == "M4 Max"


@pytest.mark.parametrize(
    ("told", "cores", "chip", "description"),
    [
        ("Apple M2 Max", 30, "M2 Max", "Apple M2 Max (30 GPU cores)"),
        ("Apple M2 Max", 0, "M2 Max", "Apple M2 Max (38 GPU cores)"),
        ("Apple M6 Pro", 0, "M5 Pro", "Apple M5 Pro (20 GPU cores, in place of Apple M6 Pro)"),
        ("Apple M6 Ultra", 0, "M3 Ultra", "Apple M3 Ultra (80 GPU cores, in place of Apple M6 Ultra)"),
        ("Apple processor", 0, "M2", "Apple M2 (10 GPU cores, in place of Apple processor)"),
        ("", 0, "M2", "Apple M2 (10 GPU cores, in place of an unknown chip)"),
    ],
)
def test_the_chip_that_is_here(told, cores, chip, description, monkeypatch):
    """By what macOS and torch say of it; a virtual machine's is none of Apple's names."""
    monkeypatch.setattr(apple, "processor", lambda: told)
    monkeypatch.setattr(apple, "core_count", lambda: cores)
    monkeypatch.setattr(apple, "is_available", lambda: True)
    apple.here.cache_clear()
    found = apple.gpu("mps:0")
    apple.here.cache_clear()
    assert (found.chip, found.description) == (chip, description)
    assert apple.why_estimated("mps") is None and apple.why_estimated("mps:M1") == "which was named"


@pytest.mark.skipif(torch.backends.mps.is_built(), reason="this torch has MPS")
def test_where_no_gpu_of_apples_is_a_chip_is_assumed():
    assert device.device_of("mps").description == "Apple M2 (10 GPU cores)" and apple.core_count() == 0
    told = "which is assumed, because this torch was built without MPS, which only torch for macOS has"
    assert apple.why_estimated("mps") == told


APPLE = {"D": 64, "Dv": 64, "dtype": torch.float16}


@pytest.mark.parametrize("chip", ["M1", "M2 Pro", "M4 Max", "M3 Ultra"])
def test_estimates_on_apples_gpus(chip):
    """torch's kernels count as the faster ones at plain attention, and read keys once for each query head, where ours
    read them once for a group."""
    rows = by_name()

    def seconds(name, **changes):
        return cost.estimate(rows[name], PROBLEM._replace(device=f"mps:{chip}", **{**APPLE, **changes}))

    long = {"B": 1, "M": 4096, "N": 4096}
    for direction in ("forward", "backward"):
        assert seconds("metal_flash", **long, direction=direction) < seconds("math", **long, direction=direction) / 4
    assert seconds("vendor_mps", **long) < seconds("metal_flash", **long) < 1.5 * seconds("vendor_mps", **long)
    decode = {"B": 1, "H": 32, "Hkv": 8, "M": 1, "N": 32768, "D": 128, "Dv": 128}
    assert seconds("metal_flash", **decode) < seconds("vendor_mps", **decode) < seconds("math", **decode)
    read = 2 * 8 * 32768 * 128 * 2 / device.device_of(f"mps:{chip}").bandwidth
    assert seconds("metal_flash", **decode) < 2 * read, "few rows are not paid for as a whole tile"
    small = {"B": 1, "H": 4, "Hkv": 4, "M": 16, "N": 16}
    assert seconds("vendor_mps", **small) < seconds("metal_flash", **small) < seconds("math", **small) < 1e-4


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
