"""Hopper's forward kernel where there is no Hopper: compiled ahead, and what its launches are made of."""

from __future__ import annotations

import math
import re

import pytest
import torch

from sdpa.dispatch.catalog import by_name
from sdpa.problem import AttentionInputs, AttentionProblem, Results
from sdpa.reference import attention as reference

triton = pytest.importorskip("triton", reason="Triton has no package for this platform")

from ahead import H200, compiling_for, dump  # noqa: E402

from sdpa.kernels.triton import hopper  # noqa: E402
from sdpa.kernels.triton.hopper_primitives import WG_ROWS  # noqa: E402
from sdpa.kernels.triton.launch import Pass  # noqa: E402
from sdpa.kernels.triton.prepared import PREPARED  # noqa: E402

# Four cores, which the four heads of a problem here always fill; the rest is an H200's.
TARGET = H200._replace(cores=4)
HEADS = 4
SHORT, LONG = 1024, 16384  # keys: a persistent program, and one program per block
GROUP_THREADS = 128
RUNS = hopper.unseen_release(triton.__version__) is None  # else the kernel is refused
MAX_UNSEEN_STACK = 256  # bytes that a release of Triton may spill for which the registers were not counted


@pytest.fixture
def pretend(tmp_path):
    """Hopper in place of whatever is here; the true driver and cache come back."""
    PREPARED.clear()
    with compiling_for(TARGET, tmp_path / "cache"):
        yield


def problem_of(D, N, mask, M=None, bias=None):
    """Inputs of which only the addresses and shapes count, and their problem."""
    q, k, v = (torch.empty(1, HEADS, rows, D, dtype=torch.bfloat16) for rows in (M or N, N, N))
    bias = None if bias is None else torch.empty(1, 1, M or N, N, dtype=torch.bfloat16)
    right, bottom_right = -1 if mask == "none" else 0, mask == "bottom_right"
    inputs = AttentionInputs(q, k, v, D**-0.5, right=right, bottom_right=bottom_right, bias=bias)
    return inputs, AttentionProblem.of(inputs)


def hidden_exponentials(sass):
    """How many exponentials lie between a wait for all products but one and the next wait for all of them."""
    found = [[]]
    for wait, more in re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d)|(MUFU\.EX2)", sass):
        if more:
            found[-1].append(more)
        else:
            found.append([wait])
    return [len(after) - 1 for after in found if after and after[0] == "1"]


def product_loops(sass):
    """The instructions of each innermost loop that holds matrix products: a branch back that has a condition."""
    code = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", sass)]
    back = [(at, int(to, 16)) for at, text in code for to in re.findall(r"^@.*BRA.* 0x([0-9a-f]+)", text)]
    spans = sorted(((to, at) for at, to in back if to < at), key=lambda span: span[1] - span[0])
    found = []
    for first, last in spans:
        body = [text for at, text in code if first <= at <= last]
        inner = any(first <= a and b <= last for a, b, _ in found)
        if not inner and any("HGMMA" in text for text in body):
            found.append((first, last, body))
    return [body for _, _, body in found]


BUILDS = [
    *((D, SHORT, mask, bias) for D in (64, 128, 256) for mask in ("none", "causal") for bias in (None, "bias")),
    (64, LONG, "causal", None),
    (64, LONG, "none", "bias"),
    (128, LONG, "none", None),
    (128, LONG, "causal", "bias"),
    (256, LONG, "causal", None),
    (128, SHORT, "bottom_right", None),
    (64, SHORT, "bottom_right", "bias"),
]


@pytest.mark.parametrize("D,N,mask,bias", BUILDS)
def test_every_tile_compiles_to_hoppers_instructions(D, N, mask, bias, pretend, tmp_path):
    inputs, problem = problem_of(D, N, mask, M=N - 64 if mask == "bottom_right" else N, bias=bias)
    offered = hopper.tiles(problem)
    assert offered and set(offered) <= set(hopper.TILES)
    for tile in offered:
        _, launch = hopper.forward_launch(inputs, problem, tile)
        build = launch.args[-1]
        assert build.PERSISTENT == (N == SHORT) and build.CAUSAL == (mask != "none"), build
        assert build.BIAS == bool(bias) and build.POWER_OF_TWO_SCALE == (build.BIAS and D != 128), build
        compiled = launch.compile()
        assert compiled.metadata.shared <= TARGET.shared_memory, (tile, compiled.metadata.shared)
        sass = dump(compiled, tmp_path)
        groups = tile.BLOCK_M // WG_ROWS.value
        if not RUNS:
            assert all(int(stack) <= MAX_UNSEEN_STACK for stack in re.findall(r"STACK:(\d+)", sass)), tile
        elif bias and build.PERSISTENT and groups == 3:  # a few numbers are kept from block to block of queries
            loops = product_loops(sass)
            assert len(loops) == groups and not re.search(r"\b(LDL|STL)\b", str(loops)), tile
        else:
            assert re.findall(r"STACK:(\d+)", sass) == ["0"], tile
        for instruction in ("HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG", *(["LDSM"] if bias else [])):
            assert instruction in sass, (tile, instruction)
        own = tile.BLOCK_N * WG_ROWS.value // GROUP_THREADS  # exponentials of one thread
        counts = hidden_exponentials(sass)
        assert len(counts) == groups, (tile, counts)
        assert min(counts) >= own, f"{tile}: {counts} of {own} exponentials run beside the products"


@pytest.mark.parametrize("version,seen", [("3.4.0", True), ("3.6.0", True), ("3.9.0", False), ("3.10.1", False)])
def test_releases_of_triton_that_it_never_ran_with_are_refused(version, seen, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(triton, "__version__", version)
    assert hopper.unavailable() == (None if seen else f"needs Triton older than 3.9, got {version}")


def test_calls_alike_share_what_is_prepared(pretend):
    inputs, problem = problem_of(128, SHORT, "causal")
    tile = hopper.tiles(problem)[0]
    first, second = (hopper.forward_launch(inputs, problem, tile)[1] for _ in range(2))
    assert len(PREPARED) == 1 and first.args[-1] is second.args[-1]
    others, _ = problem_of(128, SHORT, "causal")
    moved = hopper.forward_launch(others, problem, tile)[1]
    assert moved.args[1].base is others.k
    moved.args[1].base = inputs.k
    assert vars(moved.args[1]) == vars(first.args[1])
    rows_first = inputs._replace(k=inputs.k.transpose(1, 2).contiguous().transpose(1, 2))
    assert hopper.forward_launch(rows_first, problem, tile)[1].args[1].strides != first.args[1].strides


def unreadable(name):
    """(1, 4, 32, 64) that the bulk copy engine cannot read, by what is wrong with it."""
    if name == "address":
        return torch.randn(HEADS * 32 * 64 + 1, dtype=torch.bfloat16)[1:].view(1, HEADS, 32, 64)
    if name == "strides":
        return torch.randn(1, HEADS, 32, 68, dtype=torch.bfloat16)[..., :64]
    return torch.randn(1, 1, 32, 64, dtype=torch.bfloat16).expand(1, HEADS, 32, 64)


@pytest.mark.parametrize("name", ["address", "strides", "expanded", "bias"])
def test_unreadable_tensors_go_to_the_plain_loop(name, monkeypatch):
    q = torch.randn(1, HEADS, 32, 64, dtype=torch.bfloat16)
    inputs = AttentionInputs(q, unreadable(name), q, 0.125)
    if name == "bias":  # rows 72 bytes apart
        inputs = inputs._replace(k=q, bias=torch.randn(1, 1, 32, 36, dtype=torch.bfloat16)[..., :32])
    problem, seen = AttentionProblem.of(inputs), []

    def forward_pass(given, problem, tile):
        seen.append((given, tile))
        return Pass([], (), (), (), lambda read, made: Results(*reference(given)))

    monkeypatch.setattr(hopper.plain, "forward_pass", forward_pass)
    tile = hopper.tiles(problem)[0]
    assert hopper.forward_launch(inputs, problem, tile) is None
    hopper.forward(inputs, problem, tile)
    assert seen[0][0] is inputs and seen[0][1] in hopper.plain_tiles(problem)


FULL_OR_NOT = {
    "own": (torch.empty(2, 4, 64, 128), True),
    "of all": (torch.empty(64, 128)[None, None], True),
    "expanded heads": (torch.empty(1, 1, 64, 128).expand(2, 4, -1, -1), True),
    "one row": (torch.empty(2, 1, 1, 128), False),
    "one column": (torch.empty(1, 4, 64, 1), False),
    "expanded rows": (torch.empty(1, 1, 1, 128).expand(1, 1, 64, 128), False),
}


@pytest.mark.parametrize("name", FULL_OR_NOT)
def test_biases_that_repeat_along_rows_or_columns_are_refused(name):
    bias, full = FULL_OR_NOT[name]
    q, k = torch.empty(2, 4, 64, 64), torch.empty(2, 4, 128, 64)
    problem = AttentionProblem.of(AttentionInputs(q, k, k, 0.125, bias=bias))
    reasons = by_name()["triton_hopper"].why_not(problem)
    assert any("repeats along them" in reason for reason in reasons) == (not full)
    assert not any("bias" in reason for reason in by_name()["triton_efficient"].why_not(problem))


def test_an_expanded_bias_is_described_once(pretend):
    inputs, problem = problem_of(64, SHORT, "none", bias="bias")
    inputs = inputs._replace(bias=inputs.bias.expand(-1, HEADS, -1, -1))
    _, launch = hopper.forward_launch(inputs, problem, hopper.tiles(problem)[0])
    assert launch.args[4].shape == [1, 1, SHORT, SHORT]


@pytest.mark.parametrize("scale", [1e-6, 0.1, 0.125, 1.0, 3.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_scale_is_a_power_of_two_and_a_rest(scale, dtype):
    """bfloat16's bias may be as large as float32 gets: times what is left of the scale it must not become larger."""
    problem = AttentionProblem("cpu", dtype, 1, 1, 1, 64, 64, 64, 64)
    power = hopper.power_of(problem, scale)
    assert math.frexp(power)[0] == 0.5
    if dtype == torch.bfloat16:
        assert power <= scale < 2 * power
    else:
        assert hopper.MIN_POWER <= power <= 1.0
