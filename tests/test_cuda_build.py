"""The CUDA library: what the build makes of its list, and the machine code of what is shipped."""

from __future__ import annotations

import itertools
import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest
import setuptools
import torch

from helpers import ON_GPU
from sdpa.dispatch.catalog import by_name
from sdpa.dispatch.rules import LARGEST_PLAIN

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "kernels/cuda/libsdpa_cuda.so"
LOGS = ROOT / "build/native/cuda"
MAX_BYTES = 40 << 20
PLAIN_SIZES = {64, 128}  # head sizes of instances with dropout or a bias
INSTANCES = re.findall(
    r"^INSTANCE\((\w+), (\w+), (\d+), (\d+), (\w+), (\d), ([\d.]+)\)$",
    (ROOT / "kernels/cuda/instances.def").read_text(),
    re.M,
)
BACKWARD_INSTANCES = re.findall(
    r"^INSTANCE\((\w+), (\w+), (\d+), (\d+), (\w+)\)$",
    (ROOT / "kernels/cuda/backward_instances.def").read_text(),
    re.M,
)


@pytest.fixture
def setup(monkeypatch):
    """The names of setup.py, which builds nothing."""
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    return runpy.run_path(str(ROOT / "setup.py"))


@pytest.fixture(scope="module")
def sass():
    """Machine code by name of the kernel."""
    triton = pytest.importorskip("triton", reason="no disassembler: Triton has no package for this platform")
    if not LIBRARY.exists():
        pytest.skip("the CUDA library was not built: no nvcc, or no CUTLASS")
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    said = subprocess.run([tool, "-sass", LIBRARY], capture_output=True, text=True, check=False).stdout
    return {part.split()[0]: part for part in said.split("Function : ")[1:]}


def instances_of(names, direction="forward"):
    """Without what looks for segments before an instance begins, and for rows before and after a backward."""
    return [name for name in names if f"flash_{direction}" in name]


def test_the_list_is_what_the_catalog_promises():
    kernel = by_name()["cuda_flash"]
    assert len({name for name, *_ in INSTANCES}) == len(INSTANCES) and max(PLAIN_SIZES) == LARGEST_PLAIN
    elements = {"kBFloat16": torch.bfloat16, "kFloat16": torch.float16}
    assert {elements[element] for _, element, *_ in INSTANCES} == kernel.dtypes
    for element, mask in itertools.product(elements, ("kNone", "kCausal", "kBand", "kSegments")):
        pairs = {(int(size), int(values)) for _, e, size, values, m, *_ in INSTANCES if (e, m) == (element, mask)}
        both = {size for size, values in pairs if size == values}
        assert both == {64, 96, 128, 192, 256} and max(both) == kernel.max_head_size
        others = set() if mask in ("kBand", "kSegments") else {(192, 128)}
        assert pairs - {(size, size) for size in both} == others
        assert {int(s) for _, e, s, _, m, *_ in INSTANCES if (e, m) == (element, "kDropout")} == PLAIN_SIZES


def test_the_list_of_backwards_has_every_head_size_and_mask():
    found = {(element, int(size), int(values), mask) for _, element, size, values, mask in BACKWARD_INSTANCES}
    masks, sizes = (
        ("kNone", "kCausal", "kBand", "kSegments"),
        ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)),
    )
    elements = ("kBFloat16", "kFloat16")
    plain = {(e, size, size, mask) for e in elements for size in PLAIN_SIZES for mask in ("kDropout", "kBias")}
    assert found == plain | {(e, *size, mask) for e in elements for size in sizes for mask in masks}
    assert len({name for name, *_ in BACKWARD_INSTANCES}) == len(BACKWARD_INSTANCES) == len(found)


def test_the_estimate_knows_from_where_on_the_backward_sums():
    bindings = (ROOT / "kernels/cuda/bindings.cpp").read_text()
    assert re.findall(r"kRowsToSum = (\d+);", bindings) == [str(by_name()["cuda_flash"].sums_groups)]


def test_kernels_that_are_launched_early_wait_for_the_one_in_front():
    """Else they read what it has not written yet, which shows on few cards and rarely."""
    text = "".join(path.read_text() for path in sorted((ROOT / "kernels/cuda/sm90").glob("*.cuh")))
    early = set(re.findall(r"launch_early\((\w+)<", text))
    for name, launch in re.findall(r"auto kernel = (\w+)<.*?;(.*?)\n}\n", text, re.DOTALL):
        early |= {name} if "launch_early(kernel," in launch else set()
    assert len(early) == text.count("launch_early(") - 1, early  # less its definition
    for name in early:
        [body] = re.findall(rf"__global__[^;{{]*?\b{name}\(.*?\n}}\n", text, re.DOTALL)
        assert "wait_for_kernel_in_front();" in body, name


def test_what_ptxas_keeps_in_memory_ends_the_build(setup):
    faults = setup["faults"]
    fine = "ptxas info: Function properties for f\n    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"
    assert faults(fine) == []
    assert faults(fine.replace("0 bytes spill loads", "8 bytes spill loads")) == ["8 bytes spill loads"]
    serial = "ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to"
    assert faults(f"{fine}\n{serial}") == [serial]


def test_of_cutes_products_ours_are_left(setup):
    kept = "struct MMA_64x80x16_F32BF16BF16_SS\n{\n  int a;\n};\n"
    other = "template <GMMA::Major tnspA>\nstruct MMA_64x80x32_S32S8S8_SS_TN\n{\n  int a;\n};\n"
    chosen = "".join(
        f"        return SM90::GMMA::MMA_64x8x{end}<A>{{}};\n" for end in ("16_F32F16F16_SS", "8_F32TF32TF32_SS_TN")
    )
    text = f"#pragma once\n{other}{kept}{other}{chosen}struct Other\n{{\n}};\n"
    left = setup["without_others_products"](text)
    assert left == f"#pragma once\n{kept}{chosen.splitlines(keepends=True)[0]}struct Other\n{{\n}};\n"


def test_neither_library_nor_object_stays_of_what_is_refused(setup, tmp_path):
    made = tmp_path / "build/native/cuda"
    made.mkdir(parents=True)
    library = tmp_path / "kernels/cuda/libsdpa_cuda.so"
    library.parent.mkdir(parents=True)
    for path in (library, made / "flash_64.o", made / "flash_128.o"):
        path.touch()
    (made / "flash_64.o.log").write_text("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads")
    (made / "flash_128.o.log").write_text("8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads")
    setup["refuse_faults"].__globals__["ROOT"] = tmp_path
    with pytest.raises(SystemExit, match="flash_128 is not shipped so: 8 bytes stack frame; 4 bytes spill stores"):
        setup["refuse_faults"]()
    assert not library.exists() and not (made / "flash_128.o").exists() and (made / "flash_64.o").exists()


def test_the_logs_of_what_was_built_have_no_faults(setup):
    logs = sorted(LOGS.glob("*.log"))
    if not LIBRARY.exists() or not logs:
        pytest.skip("the CUDA library was not built here: no nvcc, or no CUTLASS")
    kernels = [name for log in logs for name in re.findall(r"Compiling entry function '(\w+)'", log.read_text())]
    assert len(instances_of(kernels)) == len(INSTANCES)
    assert len(instances_of(kernels, "backward")) == len(BACKWARD_INSTANCES)
    assert [setup["faults"](log.read_text()) for log in logs] == [[]] * len(logs)


def test_every_instance_multiplies_and_copies_by_hoppers_engines(sass):
    instances, backwards = instances_of(sass), instances_of(sass, "backward")
    assert len(instances) == len(INSTANCES) and len(backwards) == len(BACKWARD_INSTANCES)
    for name, code in sass.items():
        assert name not in instances + backwards or ("HGMMA" in code and "UTMALDG" in code), name
        assert not re.search(r"HGMMA\.64x(8|16|24|32)x", code), f"{name} multiplies in narrow pieces"
        if name in backwards and "pair" in name:
            assert "UTMALDG.4D.MULTICAST" in code and "UBLKCP.S.S" in code, f"{name} shares neither rows nor dS"
        elif name in backwards:
            assert "UBLKRED" in code, f"{name} adds up grad_q by other means than bulk reductions"
        assert not re.findall(r"\b(?:LDL|STL)\b", code), f"{name} keeps registers in memory"


def test_softmax_runs_beside_a_product(sass):
    """The wait for all products comes after the exponentials that follow the wait for all but one."""
    for name in instances_of(sass):
        found = [[]]
        for wait, more in re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d)|(MUFU\.EX2)", sass[name]):
            found[-1].append(more) if more else found.append([wait])
        beside = [len(after) - 1 for after in found if after and after[0] == "1"]
        assert beside and min(beside) >= 16, (name, beside)


def test_size_and_what_it_needs():
    if not LIBRARY.exists():
        pytest.skip("the CUDA library was not built: no nvcc, or no CUTLASS")
    assert LIBRARY.stat().st_size < MAX_BYTES
    assert re.findall(rb"\bPy[A-Z_]\w+", LIBRARY.read_bytes()) == [], "no Python's own interface"
    needed = subprocess.run([shutil.which("readelf"), "-d", LIBRARY], capture_output=True, text=True, check=True).stdout
    names = set(re.findall(r"NEEDED.*\[(.*?)\]", needed))
    assert not any("cudart" in name or "libcuda.so" in name for name in names), "both are found when it is loaded"


def test_strides_of_no_sixteen_bytes_are_a_reason():
    kernel = by_name()["cuda_flash"]
    problem = ON_GPU._replace(unaligned=(("k", 8),))
    assert any("16 bytes" in reason for reason in kernel.why_not(problem))
    assert not any("16 bytes" in reason for reason in kernel.why_not(ON_GPU))


def test_segments_beside_packed_sequences_are_a_reason():
    kernel = by_name()["cuda_flash"]
    for features, expected in (({"segments", "packed"}, True), ({"segments"}, False), ({"packed"}, False)):
        reasons = kernel.why_not(ON_GPU._replace(features=frozenset(features)))
        assert any("packed sequences or segments" in reason for reason in reasons) == expected
        assert not any("does not support" in reason for reason in reasons)


def test_head_sizes_of_zero_are_a_reason():
    kernel = by_name()["cuda_flash"]
    for sizes in ({"D": 0}, {"Dv": 0}, {"D": 20}, {"Dv": 20}):
        assert any("positive multiples of 8" in reason for reason in kernel.why_not(ON_GPU._replace(**sizes)))


def test_without_a_device_there_is_one_sentence(monkeypatch):
    from sdpa.kernels.cuda import library

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(library, "LIBRARY", Path("nowhere/libsdpa_cuda.so"))
    library.load_error.cache_clear()
    assert "was not built" in library.load_error() and "nvcc" in library.load_error()
    library.load_error.cache_clear()
