"""Every Triton kernel compiled ahead for devices that are not here, with a driver that only tells their name.

What a kernel takes of shared memory must fit the device it is compiled for, and the figures are the compiler's own.
"""

from __future__ import annotations

import re
import subprocess

import pytest
import torch

from sdpa.inputs import Options
from sdpa.problem import AttentionProblem, Results
from sdpa.sequences import Documents, Pages, build_packed, build_paged
from sdpa.testing import Case, Draw, make_inputs, problem_of

triton = pytest.importorskip("triton", reason="Triton has no package for this platform")

from ahead import CUOBJDUMP, FakeDriver  # noqa: E402

from helpers import of_part  # noqa: E402
from sdpa.kernels.triton import backward, cast, decode, forward, merge, tiles  # noqa: E402
from sdpa.kernels.triton import weights as weights_pass  # noqa: E402
from sdpa.kernels.triton.order import AFTER  # noqa: E402
from sdpa.kernels.triton.target import AMD_SHARED_MEMORY, Target, assume  # noqa: E402
from sdpa.kernels.triton.triton_private import VERSION  # noqa: E402

# Bytes of shared memory that one program may have, from NVIDIA's table of specifications by compute capability.
DATACENTER = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
CONSUMER = 99 << 10  # 8.6, 8.9 and 12.0
MI250, MI300 = "gfx90a", "gfx942"
L2 = 50 << 20
# Loop-invariant pointers and a few accumulators of masked variants are spilled by ptxas without a cost that shows; a
# tile that does not fit the registers spills kilobytes. Triton 3.9 spills 376 bytes of float32 at D = 256.
MAX_STACK = 256 if VERSION < (3, 9) else 384
WGMMA_ROWS = 64  # of queries, from which on Triton takes a warpgroup's products


def target_named(name):
    if isinstance(name, str):
        return Target("hip", name, AMD_SHARED_MEMORY, 104, 8 << 20)
    return Target("cuda", name, DATACENTER.get(name, CONSUMER), 132, L2)


TARGETS = {str(name): target_named(name) for name in (80, 90, 100, MI300, MI250)}


@pytest.fixture(scope="module", autouse=True)
def fresh_cache(tmp_path_factory):
    """Nothing compiled before may answer."""
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path_factory.mktemp("triton"))
        yield


@pytest.fixture
def pretend(monkeypatch):
    """A function that makes a target the one Triton compiles for; the driver that was there comes back."""
    from triton.runtime import driver

    def use(target):
        monkeypatch.setattr(driver, "_active", FakeDriver(target))
        return target

    return use


def name_of(launch):
    return launch.kernel.fn.__name__


def launches_for(inputs, problem, tile):
    """The launches of a forward or a backward by the family's own functions, under the target assumed."""
    if problem.direction == "forward":
        return forward.forward_launches(inputs, problem, tile)[1]
    q = inputs.q
    results = Results(q.new_empty(*q.shape[:3], inputs.v.shape[3]), torch.empty(q.shape[:3]))
    return backward.backward_launches(inputs, results, Results(torch.empty_like(results.out), None), problem, tile)[1]


def checked(launch, target):
    """The compiled kernel, which fits the shared memory of `target`."""
    compiled = launch.compile()
    shared = compiled.metadata.shared
    assert shared <= target.shared_memory, f"{name_of(launch)} {launch.tile}: {shared} bytes, {target} has fewer"
    return compiled


def sized(D, N=256, **more):
    return Case(**{"B": 1, "H": 2, "Hkv": 2, "M": N, "N": N, "D": D, "Dv": D, "dtype": torch.bfloat16, **more})


def packed_inputs():
    draw, cu = Draw(sized(64), 0), torch.tensor([0, 100, 500], dtype=torch.int32)
    q, k, v = (draw.normal(500, heads, 64) for heads in (4, 2, 2))
    return build_packed(q, k, v, Documents(cu, cu, 400, 400), Options(is_causal=True, enable_gqa=True))


def paged_inputs(dropout_p=0.0):
    draw = Draw(sized(128), 0)
    keys, values = draw.normal(64, 16, 2, 128), draw.normal(64, 16, 2, 128)
    table, lengths = torch.zeros(1, 64, dtype=torch.int32), torch.tensor([1000])
    options = Options(enable_gqa=True, dropout_p=dropout_p)
    return build_paged(draw.normal(1, 1, 8, 128), keys, values, Pages(table, lengths), options)


BOTH = {"forward_kernel", "delta_kernel", "dkdv_kernel", "dq_kernel"}
LONGER = tiles.FEW_ROWS + 48  # queries and keys for which a backward's usual tiles are offered
# Cases that between them launch every kernel of a forward and a backward, and which they launch.
EVERYWHERE = {
    "causal_float32": (lambda: make_inputs(sized(64, dtype=torch.float32, mask="causal")), {*BOTH, "split_kernel"}),
    "bias_float32": (
        lambda: make_inputs(sized(72, dtype=torch.float32, mask="bias")),
        {*BOTH, "split_kernel", "bias_grad_kernel"},
    ),
    "bias": (lambda: make_inputs(sized(64, N=LONGER, mask="bias_causal", dropout_p=0.1)), {*BOTH, "bias_grad_kernel"}),
    "segments": (
        lambda: make_inputs(sized(64, N=LONGER, mask="segments", dtype=torch.float16)),
        {*BOTH, "block_ranges_kernel"},
    ),
    "few_keys": (
        lambda: make_inputs(sized(64, N=LONGER, H=8, Hkv=1, mask="causal")),
        {*BOTH, "sum_heads_kernel"},
    ),
    "few_rows": (lambda: make_inputs(sized(64, mask="bias_causal", dropout_p=0.1)), {*BOTH, "bias_grad_kernel"}),
    "windows": (
        lambda: make_inputs(sized(32, N=49, mask="bias")),
        {"forward_kernel", "one_block_kernel"},
    ),
}


def check_order(launch, ptx, overlap):
    """Launches that overlap wait for the one before and let the next one begin: the AFTER ones in this order, before
    they read. That of dK and dV loads its own keys first."""
    places = [ptx.find(f"griddepcontrol.{part}") for part in ("wait", "launch_dependents")]
    assert [place >= 0 for place in places] == [overlap, overlap], name_of(launch)
    if overlap and launch.args[-1] == AFTER.value:
        assert places[0] < places[1], name_of(launch)
        if name_of(launch) != "dkdv_kernel":
            assert not re.search(r"ld\.global|cp\.async", ptx[: places[0]]), name_of(launch)


# Parts of a bias' gradient on one device that reads them by descriptors and one that has none; others compile the rest.
ON_TWO = ("bias_float32", "few_rows", "few_keys")
ON_TARGETS = [
    (arch, name)
    for arch in TARGETS
    for name in EVERYWHERE
    if name not in ON_TWO or arch in ("90", MI300 if name == "bias_float32" else "100")
]


@pytest.mark.parametrize("arch,name", ON_TARGETS)
def test_every_kernel_compiles_for_every_target(arch, name, pretend):
    target, seen = pretend(TARGETS[arch]), set()
    make, kernels = EVERYWHERE[name]
    inputs = make()
    with assume(target):
        for direction in ("forward", "backward"):
            problem = problem_of(inputs, direction, inputs.bias is not None and direction == "backward")
            launches = launches_for(inputs, problem, tiles.tiles(problem)[0])
            overlap = target.has_pdl and len(launches) > 1
            assert [launch.pdl for launch in launches] == [overlap and launch is not launches[0] for launch in launches]
            for launch in launches:
                check_order(launch, checked(launch, target).asm.get("ptx", ""), overlap)
                seen.add(name_of(launch))
    assert seen == (kernels - {"split_kernel"} if target.backend == "hip" else kernels)


ONE_BLOCK = [{"D": 64, "N": 128}, {"D": 96, "N": 100, "M": 64, "B": 60}, {"D": 256, "N": 61}]
ONE_BLOCK += [{"D": D, "N": N, "dtype": torch.float32} for D, N in ((64, 64), (128, 49))]


@pytest.mark.parametrize("sizes", ONE_BLOCK, ids=str)
def test_backwards_of_one_block_of_keys_compile(sizes, pretend):
    """Their tiles fit shared memory beside ids of documents, a dense mask and dropout."""
    target = pretend(TARGETS["90"])
    dense = {"mask": "allowed", "dropout_p": 0.1}, {"mask": "bias", "Hkv": 1}
    dropping = {"dropout_p": 0.1}, {"dropout_p": 0.1, "H": 1, "Hkv": 1}
    for number, more in enumerate(({"mask": "causal"}, {"mask": "segments"}, *dense, *dropping)):
        inputs = make_inputs(sized(**{"B": target.cores, **sizes, **more}))
        inputs = of_part(inputs) if number == 5 else inputs
        with assume(target):
            problem = problem_of(inputs, "backward")
            (launch,) = launches_for(inputs, problem, tiles.tiles(problem)[0])
            checked(launch, target)
            assert name_of(launch) == "one_block_kernel"


@pytest.mark.parametrize("arch", ["90", MI300])
def test_packed_sequences_compile(arch, pretend):
    target, inputs = pretend(TARGETS[arch]), packed_inputs()
    with assume(target):
        for direction in ("forward", "backward"):
            problem = problem_of(inputs, direction)
            for launch in launches_for(inputs, problem, tiles.tiles(problem)[0]):
                checked(launch, target)


@pytest.mark.parametrize("arch", TARGETS)
def test_casts_compile_for_every_target(arch, pretend):
    target, inputs = pretend(TARGETS[arch]), make_inputs(sized(64, dtype=torch.float32))
    with assume(target):
        for dtype in (torch.float16, torch.bfloat16):
            (launch,) = cast.cast_pass(inputs[:3], dtype).launches
            checked(launch, target)


@pytest.mark.parametrize("arch", TARGETS)
def test_merging_compiles_for_every_target(arch, pretend):
    target, out, lse = pretend(TARGETS[arch]), torch.empty(2, 3, 70, 80), torch.empty(2, 3, 70)
    with assume(target):
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            checked(merge.merge_launch(out, lse, out.to(dtype), lse), target)
        checked(merge.merge_launch(out.double(), lse.double(), out.double(), lse.double()), target)


@pytest.mark.parametrize("arch", TARGETS)
def test_decode_compiles_for_every_target(arch, pretend):
    target = pretend(TARGETS[arch])
    with assume(target):
        for inputs in (make_inputs(sized(128, N=2048, M=1, H=8)), paged_inputs(), paged_inputs(dropout_p=0.1)):
            problem = problem_of(inputs, "forward")
            _, launches = decode.forward_launches(inputs, problem, decode.tiles(problem)[0])
            assert [name_of(launch) for launch in launches] == ["decode_kernel", "combine_kernel"]
            for launch in launches:
                checked(launch, target)


def test_a_boolean_mask_of_one_block_is_read_by_blocks(pretend):
    """By heads that share it, from a copy whose rows begin at multiples of 16 bytes; a bias is read once."""
    target = pretend(TARGETS["90"])
    with assume(target):
        for mask, bits in (("allowed", 8), ("bias", 16)):
            inputs = make_inputs(sized(64, N=83, B=20, H=8, Hkv=8, mask=mask))
            problem = problem_of(inputs, "backward")
            q, lse = inputs.q, torch.empty(inputs.q.shape[:3])
            results, upstream = Results(torch.empty_like(q), lse), Results(torch.empty_like(q), None)
            work = backward.backward_pass(inputs, results, upstream, problem, tiles.tiles(problem)[0])
            (launch,) = work.launches
            ptx = checked(launch, target).asm["ptx"]
            assert name_of(launch) == "one_block_kernel"
            assert (f"ld.global.b{bits}" in ptx) == (mask == "bias"), mask


@pytest.mark.parametrize("D", [40, 72, 120])
@pytest.mark.parametrize("layout", ["bhmd", "bmhd"])
def test_rows_of_an_odd_multiple_of_16_bytes_are_moved_by_vectors(D, layout, pretend):
    """Triton by itself sees multiples of 16 numbers alone. It then moves numbers one by one, and spills."""
    target = pretend(TARGETS["90"])
    with assume(target):
        launches = []
        for N, direction in ((LONGER, "forward"), (LONGER, "backward"), (77, "backward")):
            inputs = make_inputs(sized(D, N=N, H=4, Hkv=4, layout=layout))
            problem = problem_of(inputs, direction)
            launches += launches_for(inputs, problem, tiles.tiles(problem)[0])
        inputs = make_inputs(sized(D, N=2048, M=3, H=8, layout=layout))
        problem = problem_of(inputs, "forward")
        launches += decode.forward_launches(inputs, problem, decode.tiles(problem)[0])[1]
        found = {name_of(launch): checked(launch, target).asm["ptx"] for launch in launches}
    del found["combine_kernel"]  # it has a thread for each number of a row
    assert found.keys() == {*BOTH, "one_block_kernel", "decode_kernel"}
    for name, ptx in found.items():
        assert not re.search(r"(ld|st)\.global\S*\.b16", ptx), name


WEIGHTS = {
    "none": sized(64, N=512),
    "padding": sized(64, N=512, mask="padding", dropout_p=0.1),
    "bias": sized(128, N=512, mask="bias_causal", Hkv=1),
    "bias_without_descriptor": sized(64, N=500, mask="bias_causal"),
    "float32": sized(64, mask="lengths", dtype=torch.float32),
    "large": sized(256, mask="segments"),
    "one": sized(64, N=1, H=1, Hkv=1, mask="both_lengths"),
}


def weights_launch(case, average=True):
    inputs = make_inputs(case)
    problem = AttentionProblem.of(inputs, "weights", frozenset({"averaged"}) if average else frozenset())
    offered = tiles.tiles(problem)
    assert set(offered) <= set(tiles.TILES)
    return weights_pass.weights_launch(inputs, torch.empty(inputs.q.shape[:3]), problem, offered[0])[1]


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("arch", ["80", "90", "100", MI300])
def test_weights_compile(arch, name, average, pretend):
    target = pretend(TARGETS[arch])
    with assume(target):
        checked(weights_launch(WEIGHTS[name], average), target)


@pytest.mark.parametrize("name", ["none", "padding", "bias"])
def test_weights_on_hopper(name, pretend, tmp_path):
    """Products on the matrix units, tiles by the copy engine, and registers for the scores twice."""
    target = pretend(TARGETS["90"])
    with assume(target):
        launch = weights_launch(WEIGHTS[name])
        compiled = checked(launch, target)
        assert (launch.tile.BLOCK_M, launch.tile.BLOCK_N) == (128, 128)
        assert spilt(compiled, tmp_path) == 0
        assert "wgmma.mma_async" in compiled.asm["ptx"] and "cp.async.bulk.tensor" in compiled.asm["ptx"]


# Head sizes and dtypes of the lists of tiles.
LISTED = {
    "D64": (64, torch.bfloat16),
    "D128": (128, torch.bfloat16),
    "D256": (256, torch.float16),
    "D512": (512, torch.bfloat16),
    "D64-float32": (64, torch.float32),
    "D128-float32": (128, torch.float32),
}
LIMITS = {**TARGETS, **{str(name): target_named(name) for name in (86, 120)}}
# Every list on a small and on a large device; the rest of the product takes minutes and tells little more.
PAIRS = [
    *(("86", name) for name in ("D64", "D256", "D512", "D128-float32")),
    *(("90", name) for name in ("D256", "D512", "D128-float32")),
    ("80", "D128"),
    *(("120", name) for name in ("D128", "D64-float32")),
    *((MI300, name) for name in ("D128", "D128-float32")),
]


@pytest.mark.parametrize("arch,listed", PAIRS)
def test_offered_tiles_fit(arch, listed, pretend):
    """Of the tiles offered the one that should take most of the device's shared memory; that takes part of it only."""
    target, (D, dtype) = pretend(LIMITS[arch]), LISTED[listed]
    inputs = make_inputs(sized(D, N=LONGER, dtype=dtype, mask="causal"))
    with assume(target):
        for direction in ("forward", "backward"):
            problem = problem_of(inputs, direction)
            offered = tiles.tiles(problem)
            assert offered and set(offered) <= set(tiles.TILES)
            largest = max(offered, key=lambda tile: tiles.shared_memory(problem, tile, target))
            for launch in launches_for(inputs, problem, largest):
                checked(launch, target)


@pytest.mark.parametrize("arch,D", [("90", 128), ("90", 256), ("80", 256), ("86", 128)])
def test_gradients_of_a_bias_in_float16_parts_fit(arch, D, pretend):
    """Whatever tile the backward has, that of the bias' gradient is its own: four blocks stream in it."""
    target, inputs = pretend(LIMITS[arch]), make_inputs(sized(D, dtype=torch.float32, mask="bias"))
    with assume(target):
        problem = problem_of(inputs, "backward", True)
        every = [launches_for(inputs, problem, tile)[-1] for tile in tiles.tiles(problem)]
        assert {name_of(launch) for launch in every} == {"bias_grad_kernel"} and len({one.tile for one in every}) == 1
        checked(every[0], target)


def test_smaller_devices_are_offered_fewer_tiles(pretend):
    """A tile for 227 KiB is not offered where there are 99, and the smallest is offered to everybody."""
    problem = problem_of(make_inputs(sized(128)), "forward")
    offered = {}
    for name in ("86", "90"):
        with assume(pretend(LIMITS[name])):
            offered[name] = tiles.tiles(problem)
    assert set(offered["86"]) < set(offered["90"])
    with assume(LIMITS["90"]._replace(shared_memory=1)):
        assert tiles.tiles(problem) == offered["90"][-1:]


def spilt(compiled, folder, usage="STACK"):
    """Bytes of stack per thread, or another usage of it, as the tool of CUDA reads them from the binary."""
    path = folder / "kernel.cubin"
    path.write_bytes(compiled.asm["cubin"])
    said = subprocess.run([CUOBJDUMP, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    return int(re.search(rf"{usage}:(\d+)", said)[1])


def test_large_heads_take_the_registers_there_are(pretend, tmp_path):
    """Where ptxas is not told so, it takes 32 in these, and keeps thousands of bytes of a thread in memory."""
    target, inputs = pretend(TARGETS["90"]), make_inputs(sized(512, N=300))
    step = make_inputs(sized(512, N=300, M=1, dtype=torch.float32))
    with assume(target):
        problem = problem_of(inputs, "backward")
        _, middle, small = tiles.tiles(problem)
        *_, dq = launches_for(inputs, problem, middle)
        _, dkdv, _ = launches_for(inputs, problem, small)
        problem = problem_of(step, "forward")
        _, (split, *_) = decode.forward_launches(step, problem, decode.tiles(problem)[0])
        for launch in (dq, dkdv, split, weights_launch(sized(512, N=300, dtype=torch.float32))):
            assert spilt(checked(launch, target), tmp_path, "REG") > 128, name_of(launch)


@pytest.mark.parametrize("D,dtype", [(64, torch.bfloat16), (128, torch.bfloat16), (64, torch.float32)])
def test_heads_that_share_keys_stay_in_registers(D, dtype, pretend, tmp_path):
    """Loops in a loop over the heads kept 800 to 1,800 bytes of a thread's registers in memory."""
    target, inputs = pretend(TARGETS["90"]), make_inputs(sized(D, N=600, B=4, H=16, Hkv=8, mask="causal", dtype=dtype))
    with assume(target):
        problem = problem_of(inputs, "backward")
        for launch in launches_for(inputs, problem, tiles.tiles(problem)[0]):
            assert spilt(checked(launch, target), tmp_path) == 0, name_of(launch)


@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("D", [64, 128], ids=lambda D: f"D{D}")
def test_default_tiles_on_hopper(D, mask, pretend, tmp_path):
    """Products on the matrix units of Hopper, tiles by its copy engine, and registers for what a tile holds."""
    target = pretend(TARGETS["90"])
    inputs = make_inputs(sized(D, N=512, mask=mask))
    with assume(target):
        for direction in ("forward", "backward"):
            problem = problem_of(inputs, direction)
            for launch in launches_for(inputs, problem, tiles.tiles(problem)[0]):
                compiled = checked(launch, target)
                stack = spilt(compiled, tmp_path)
                assert stack <= MAX_STACK, f"{name_of(launch)} {launch.tile}: {stack} bytes of stack"
                if name_of(launch) != "delta_kernel":
                    assert "wgmma.mma_async" in compiled.asm["ptx"], name_of(launch)
                    assert "cp.async.bulk.tensor" in compiled.asm["ptx"], name_of(launch)


@pytest.mark.parametrize("D", [64, 128, 256, 512], ids=lambda D: f"D{D}")
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_float32_on_hopper(mask, D, pretend, tmp_path):
    """Products of float16 parts, two programs of small heads per core, and a kernel for what the parts do not hold."""
    target = pretend(TARGETS["90"])
    inputs = make_inputs(sized(D, N=512, mask=mask, dtype=torch.float32))
    with assume(target):
        problem = problem_of(inputs, "forward")
        parts, careful = launches_for(inputs, problem, tiles.tiles(problem)[0])
        compiled = checked(parts, target)
        assert spilt(compiled, tmp_path) <= MAX_STACK
        products = "wgmma.mma_async" if parts.tile.BLOCK_M >= WGMMA_ROWS else "mma.sync"
        assert re.search(rf"{products}[^\n]*\.f32\.f16\.f16", compiled.asm["ptx"])
        assert "bf16" not in compiled.asm["ptx"]
        assert (parts.registers == 128) == (D == 64)
        assert careful.tile.BLOCK_M <= parts.tile.BLOCK_M
        if D <= 128:  # above, the exact products spill kilobytes
            assert "bf16" in checked(careful, target).asm["ptx"]


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("D", [64, 128], ids=lambda D: f"D{D}")
def test_float32_backwards_on_hopper(D, tf32, pretend, tmp_path):
    """Parts go from memory to the matrix units by the copy engine, and sums stay in registers."""
    target = pretend(TARGETS["90"])
    inputs = make_inputs(sized(D, N=512, dtype=torch.float32))
    with assume(target):
        problem = problem_of(inputs, "backward")._replace(tf32=tf32)
        _, split, *loops = launches_for(inputs, problem, tiles.tiles(problem)[0])
        assert name_of(split) == "split_kernel" and spilt(checked(split, target), tmp_path) == 0
        for launch in loops:
            compiled = checked(launch, target)
            assert spilt(compiled, tmp_path) <= MAX_STACK, f"{name_of(launch)} {launch.tile}"
            assert re.search(r"wgmma.mma_async[^\n]*\.f32\.f16\.f16", compiled.asm["ptx"]), name_of(launch)
            assert "cp.async.bulk.tensor" in compiled.asm["ptx"] and "bf16" not in compiled.asm["ptx"]


@pytest.mark.parametrize("D", [64, 128], ids=lambda D: f"D{D}")
def test_default_tiles_on_ampere(D, pretend, tmp_path):
    target = pretend(TARGETS["80"])
    inputs = make_inputs(sized(D, N=512, mask="causal"))
    with assume(target):
        for direction in ("forward", "backward"):
            problem = problem_of(inputs, direction)
            for launch in launches_for(inputs, problem, tiles.tiles(problem)[0]):
                stack = spilt(checked(launch, target), tmp_path)
                assert stack <= MAX_STACK, f"{name_of(launch)} {launch.tile}: {stack} bytes of stack"
