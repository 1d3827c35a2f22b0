"""Which pairs the CUDA kernels drop, by their own source on the host, beside sdpa.philox."""

from __future__ import annotations

import shutil
import subprocess

import pytest
import torch
from test_cuda_segments import ROOT, SOURCES, headers

from sdpa import philox

# What only a device's compiler knows.
ON_THE_HOST = {
    'asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(key.x), "=r"(key.y) : "l"(p.rng));': "",
    'asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(offset) : "l"(p.rng + 1));': "",
    'asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(keys), "=r"(rows) : "l"(rng + 3));': (
        "keys = uint32_t(rng[3]), rows = uint32_t(rng[3] >> 32);"
    ),
}
FAULTS = {
    "rows eight apart have one number": ("{call.z, call.w}}", "{call.x, call.y}}"),
    "odd keys have the even keys' numbers": ("if (words[i][h] < p.dropped)", "if (words[i][h] << 16 < p.dropped)"),
    "lanes keep what is their partner's": ("is_odd ? low : high, kPartnerLane", "is_odd ? high : low, kPartnerLane"),
    "blocks of 16 rows have one number": ("row + 8 * t", "row"),
    "a part's queries are the first": ("rows / 2);", "0);"),
    "a part's keys are the first": ("make_uint2(keys / 4,", "make_uint2(0,"),
    "a part's heads are the first": ("int(uint32_t(part)) + head", "head"),
}
PART = 9, 3, 80, 4112  # heads, and the first head, query and key
CASES = {  # columns, the first query, the first key
    "queries": [(64, 0, 0), (128, 0, 0), (128, 192, 384), (64, 1024, 448)],
    "keys": [(64, 0, 0), (128, 0, 0), (64, 1024, 448), (128, 384, 192)],
}


def built(folder, *faults):
    """The player of the source with faults put in."""
    shutil.copytree(SOURCES, folder, ignore=shutil.ignore_patterns("*.so", "__pycache__"), dirs_exist_ok=True)
    text = (SOURCES / "dropout.cuh").read_text()
    for old, new in (*ON_THE_HOST.items(), *faults):
        assert old in text, old
        text = text.replace(old, new)
    (folder / "dropout.cuh").write_text(text)
    words = ["g++", "-std=c++17", "-O1", "-w", f"-I{folder}", *headers(), str(ROOT / "tests/dropout_host.cpp")]
    subprocess.run([*words, "-o", str(folder / "player")], check=True)
    return folder / "player"


def played(player, rows, columns, row0, key0, p, part=None):
    """(queries, keys) bool of what the player keeps, and the same of sdpa.philox."""
    stream, seed, offset = 5, 2**61 + 12345678901, 2**33 + 77
    rng = torch.tensor([seed, offset])
    rng = rng if part is None else philox.of_part(rng, *part)
    numbers = (columns, row0, key0, stream, seed, offset, philox.threshold(p), *(rng[2:].tolist() or (0, 0)))
    said = subprocess.run([player, rows, *map(str, numbers)], capture_output=True, text=True, check=True)
    found = torch.tensor([[digit == "0" for digit in line] for line in said.stdout.split()])
    found = found if rows == "queries" else found.T
    M, N = found.shape
    all_kept = philox.keep_mask(rng, p, (1, stream + 1, row0 + M, key0 + N))
    return found, all_kept[0, stream, row0:, key0:]


@pytest.fixture(scope="module")
def player(tmp_path_factory):
    return built(tmp_path_factory.mktemp("dropout"))


@pytest.mark.parametrize("rows", CASES)
def test_fragments_drop_what_every_kernel_drops(player, rows):
    for case in CASES[rows]:
        for p in (0.1, 0.5):
            for part in (None, PART):
                found, wanted = played(player, rows, *case, p, part)
                assert torch.equal(found, wanted), (case, part)
                assert 0 < (~found).sum() < found.numel()


@pytest.mark.parametrize("fault", FAULTS)
def test_the_player_sees_a_source_that_is_wrong(tmp_path, fault):
    player = built(tmp_path, FAULTS[fault])
    runs = [played(player, rows, *case, 0.5, PART) for rows, cases in CASES.items() for case in cases]
    assert not all(torch.equal(*run) for run in runs), fault
