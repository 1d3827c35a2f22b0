"""The CUDA kernel's mask of segments, by its own source on the host: what is visited, and what of it is hidden.

The source is built for a CPU with warps of one lane: an element of a warp's loop after the other, sums over nothing.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "kernels/cuda"
ONE_LANE = {
    "kWarpLanes = 32, kMaxWarps = 32": "kWarpLanes = 1, kMaxWarps = 1",
    "kClusterSize = 8": "kClusterSize = 1",
    "__cluster_dims__(kClusterSize, 1, 1) ": "",
    "__grid_constant__ ": "",
    "<<<kClusterSize * p.B, warps * kWarpLanes, 0, stream>>>": "",
    "#include <cooperative_groups.h>\n": "",
    "  cooperative_groups::this_cluster().sync();\n": "",
}
FAULTS = {
    "the last block of a consumer is left out": ("found.end = n + 1;\n", "found.end = n;\n"),
    "the band is forgotten where ids are one": (" || n < first || n >= end", ""),
    "blocks between those without a mask count": ("|| found.unmasked_end - found.unmasked_begin != unmasked", ""),
    "ids are read from the first key on": ("ids[key - band.pad]", "ids[key]"),
}


def headers():
    """Those of CUTLASS and CUDA, in the compiler's words; skips where there are none."""
    import runpy

    import setuptools

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setuptools, "setup", lambda **_: None)
        names = runpy.run_path(str(ROOT / "setup.py"))
    compiler, cutlass = names["nvcc"](), names["cutlass"]()
    if compiler is None or cutlass is None or shutil.which("g++") is None:
        pytest.skip("no nvcc, no CUTLASS or no g++")
    home = names["cuda_home"](compiler)
    return [word for folder in (cutlass, home / "include", home / "include/cccl") for word in ("-isystem", str(folder))]


def play(folder, rounds, *faults):
    """What the player says, of the source with faults put in."""
    shutil.copytree(SOURCES, folder, ignore=shutil.ignore_patterns("*.so", "__pycache__"), dirs_exist_ok=True)
    text = (SOURCES / "segments.cuh").read_text()
    for old, new in (*ONE_LANE.items(), *faults):
        assert old in text, old
        text = text.replace(old, new)
    (folder / "segments.cuh").write_text(text)
    player = folder / "player"
    words = ["g++", "-std=c++17", "-O1", "-w", f"-I{folder}", *headers(), str(ROOT / "tests/segments_host.cpp")]
    subprocess.run([*words, "-o", str(player)], check=True)
    return subprocess.run([player, str(rounds)], capture_output=True, text=True, check=False)


def test_every_consumer_sees_what_the_mask_says(tmp_path):
    """Each visible pair in one visited block, inside what is loaded; some blocks without a mask."""
    said = play(tmp_path, 200)
    assert said.returncode == 0, said.stdout + said.stderr
    visited, unmasked = map(int, said.stdout.split())
    assert visited > unmasked > 0


@pytest.mark.parametrize("fault", FAULTS)
def test_the_player_sees_a_source_that_is_wrong(tmp_path, fault):
    said = play(tmp_path, 200, FAULTS[fault])
    assert said.returncode != 0, fault
