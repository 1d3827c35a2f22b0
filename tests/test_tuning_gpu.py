"""The nearest bucket on a GPU: kinds of masks, dtypes, how full the device is, decoding and shared heads."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from helpers import ON_GPU, entry, nearest, table
from sdpa.dispatch import candidates, cost, select, tables, tuning
from sdpa.dispatch.context import Setting
from sdpa.kernels.triton import target
from sdpa.problem import AttentionProblem

SIZES = {"B": 16, "H": 16, "Hkv": 16, "M": 1024, "N": 1024, "D": 128, "Dv": 128}


def buckets(*changes):
    """Buckets whose only kernel is named by what makes them different."""
    made = []
    for number, change in enumerate(changes):
        name = ",".join(map(str, change.values()))
        options = {"dtype": "bfloat16", **SIZES, **change}
        made.append(tables.parse_entry(number, entry({name: 1.0}, **options)))
    return tuple(made)


def answer(found, problem):
    bucket = nearest(found, problem)
    return bucket and next(iter(bucket.ms))


def features(*names, **changes):
    return ON_GPU._replace(features=frozenset(names), **changes)


KINDS = {
    "none": (features(), ["none"]),
    "dropout": (features("dropout", "lse"), ["none"]),
    "alibi": (features("alibi", "band", right=0), ["causal"]),
    "window": (features("band", left=64, right=0), ["window"]),
    "bias": (features("bias"), ["bias", "dense"]),
    "bias_causal": (features("bias", "band", right=0), ["bias", "dense"]),
    "bias_grad": (features("bias", "bias_grad", direction="backward"), ["bias_grad", "bias", "dense"]),
    "dense": (features("allowed"), ["dense", "bias"]),
    "lengths": (features("k_lengths"), ["lengths", "structured", "none"]),
    "lengths_causal": (features("k_lengths", "band", right=0), ["lengths", "structured", "causal"]),
    "packed_causal": (features("packed", "band", right=0), ["lengths", "structured", "causal"]),
    "a_few_new_queries": (features("band", "bottom_right", right=0, bottom_right=True, M=8, N=4096), ["none"]),
}


def test_rows_of_queries_count_more_than_keys(gpu):
    """By as large a factor: a bucket of the same queries is nearer than one of the same keys."""
    found = buckets({"M": 1024, "N": 2048, "mask": "none"}, {"M": 2048, "N": 1024, "mask": "none"})
    assert nearest(found, features(**SIZES)) is found[0]
    assert nearest(found[::-1], features(**SIZES)) is found[0]


@pytest.mark.parametrize(("direction", "wanted"), [("forward", 1), ("backward", 0)])
def test_a_backward_of_one_block_of_keys_is_another_program(direction, wanted, gpu):
    found = buckets(*({"M": N, "N": N, "direction": direction, "mask": "none"} for N in (80, 200)))
    problem = features(direction=direction, **{**SIZES, "M": 100, "N": 100})
    assert nearest(found, problem) is found[wanted]


@pytest.mark.parametrize(("direction", "wanted"), [("forward", 0), ("backward", 1)])
def test_a_backward_of_heads_that_share_keys_is_another_program(direction, wanted, gpu):
    lengths = ({"M": 150, "N": 150}, {"M": 140, "N": 140, "Hkv": 4})
    found = buckets(*({**change, "direction": direction, "mask": "none"} for change in lengths))
    problem = features(direction=direction, **{**SIZES, "M": 150, "N": 150, "Hkv": 8})
    assert nearest(found, problem) is found[wanted]


@pytest.mark.parametrize("name", KINDS)
def test_kinds_of_masks_and_what_stands_in_for_them(name, gpu):
    problem, kinds = KINDS[name]
    assert list(tuning.mask_kinds(problem)) == kinds and tuning.mask_kind(problem) == kinds[0]
    sizes = {"M": problem.M, "N": problem.N, "direction": problem.direction}
    found = buckets(*({"mask": kind, **sizes} for kind in ("dense", "causal", "rows", *kinds, "window", "none")))
    for place, kind in enumerate(kinds):
        left = tuple(b for b in found if b.mask not in kinds[:place])
        assert nearest(left, problem).mask == kind
    assert nearest(tuple(b for b in found if b.mask not in kinds), problem) is None


def test_a_mask_of_one_row_is_told_from_one_of_many(gpu):
    class WithRows(AttentionProblem):
        row_mask = True

    assert tuning.mask_kinds(WithRows(*features("allowed"))) == ("rows", "dense", "bias")


def test_dtypes_of_a_gpu(gpu):
    found = buckets({"dtype": "bfloat16"}, {"dtype": "float32"}, {"dtype": "tfloat32"})
    half, single = ON_GPU._replace(dtype=torch.float16), ON_GPU._replace(dtype=torch.float32)
    assert answer(found, half) == "bfloat16" and answer(found, single) == "float32"
    assert answer(found, single._replace(tf32=True)) == "tfloat32"
    assert answer(found[:2], single._replace(tf32=True)) is None
    assert answer((*found, *buckets({"dtype": "float16"})), half) == "float16"


def test_a_gpu_that_is_not_full_is_another_problem(gpu):
    full, empty = {"B": 16}, {"B": 1, "H": 4, "Hkv": 4}
    found = buckets(full, empty)
    assert answer(found, ON_GPU._replace(B=2, H=2, Hkv=2)) == "1,4,4"
    assert answer(found, ON_GPU._replace(B=512)) == "16"
    assert answer(found[:1], ON_GPU._replace(B=1, H=1, Hkv=1)) is None, "8 programs say nothing of 264"
    assert answer(found[:1], ON_GPU._replace(B=4096)) == "16", "full is full"


def test_decoding_and_shared_heads(gpu):
    step = {"M": 1, "N": 8192}
    found = buckets({**step, "B": 1}, {**step, "B": 64}, {**step, "B": 64, "Hkv": 4}, {"N": 8192})
    decode = ON_GPU._replace(M=1, N=8192)
    assert answer(found, decode._replace(B=2)) == "1,8192,1"
    assert answer(found, decode._replace(B=32)) == "1,8192,64"
    assert answer(found, decode._replace(B=32, Hkv=4)) == "1,8192,64,4"
    assert answer(found, decode._replace(M=512)) == "8192"


def told(problem, *found):
    """What buckets of one table say of a problem, in milliseconds."""
    near = tuning.near(tables.Table("", "a_table", found), problem)
    measured = tuning.combined(near, problem)
    return measured and {name: 1e3 * seconds for name, seconds in measured.seconds.items()}


def bucket(ms, **changes):
    return tables.parse_entry(0, entry(ms, **{"dtype": "bfloat16", **SIZES, **changes}))


def test_near_buckets_speak_together(gpu):
    """Between two of the same distance that disagree, a kernel that is good in both comes first."""
    short = bucket({"cuda_flash": 1.0, "triton_flash": 1.2, "vendor_flash": 2.0}, M=512)
    long = bucket({"cuda_flash": 8.0, "triton_flash": 4.4, "vendor_flash": 4.0}, M=2048)
    found = told(ON_GPU, short, long)
    assert min(found, key=found.get) == "triton_flash"
    assert found["triton_flash"] == pytest.approx(2.0 * (1.2 * 1.1) ** 0.5, rel=0.01), "twice the rows of the nearest"


def test_the_problem_itself_outweighs_what_is_near(gpu):
    itself = bucket({"cuda_flash": 1.0, "triton_flash": 1.1})
    others = [bucket({"cuda_flash": 8.0, "triton_flash": 4.0}, M=M) for M in (512, 2048, 4096)]
    found = told(ON_GPU, *others, itself)
    assert found["cuda_flash"] < found["triton_flash"] and found["cuda_flash"] == pytest.approx(1.0, rel=0.05)


def test_a_kernel_that_the_nearest_lacks_stays_behind(gpu):
    """It was not able there, or so slow that nobody measured it."""
    found = told(ON_GPU, bucket({"cuda_flash": 1.0}), bucket({"cuda_flash": 2.0, "triton_decode": 0.1}, M=256))
    assert 1.0 <= found["cuda_flash"] < 1.1 < found["triton_decode"]


def test_what_was_asked_beside_the_mask_tells_buckets_apart(gpu):
    plain, dropped = bucket({"cuda_flash": 1.0, "math": 9.0}), bucket({"triton_efficient": 2.0}, beside=["dropout"])
    both = bucket({"triton_flash": 3.0}, beside=["softcap", "sinks"])
    dropping, capped = features("dropout"), features("softcap")
    assert set(told(ON_GPU, plain, dropped, both)) == {"cuda_flash", "math"}
    assert nearest((plain, dropped, both), dropping) is dropped and nearest((plain, both), dropping) is plain
    assert nearest((plain, both), features("softcap", "sinks")) is both and nearest((plain, both), capped) is plain
    found = told(dropping, plain, dropped)
    assert min(found, key=found.get) == "triton_efficient", "that of plain calls is far away"
    assert tuning.describe(both).endswith("none with sinks and softcap")
    for wrong in ("dropout", ["causal"], [1]):
        with pytest.raises(ValueError, match="expected beside to list some of dropout, sinks, softcap, got"):
            bucket({"math": 1.0}, beside=wrong)


def test_one_bucket_tells_its_own_times(gpu):
    assert told(ON_GPU, bucket({"cuda_flash": 1.0, "math": 70.0})) == pytest.approx({"cuda_flash": 1.0, "math": 70.0})
    assert told(ON_GPU) is None


def test_groups_beyond_sixteen_are_alike(gpu):
    step = {"M": 1, "N": 8192, "H": 64}
    found = [bucket({"triton_decode": 1.0}, **step, Hkv=4)]
    falcon = ON_GPU._replace(M=1, N=8192, H=71, Hkv=1)
    assert told(falcon, *found) is not None and told(falcon._replace(H=1), *found) is None


def test_on_a_cpu_the_nearest_bucket_speaks_alone():
    """Shipped tables of CPUs have only what a choice by the nearest bucket needs (sdpa tune --prune)."""
    problem = AttentionProblem("cpu", torch.float32, 1, 8, 8, 1024, 1024, 64, 64)
    found = told(
        problem, *(tables.parse_entry(0, entry({name: 1.0}, M=M)) for name, M in (("math", 900), ("cpu_flash", 700)))
    )
    assert list(found) == ["math"]


@pytest.fixture(params=["nvidia_h200", "nvidia_h100_80gb_hbm3"])
def hopper(request, monkeypatch):
    """A card that has a shipped table."""
    card = tables.read(str(tables.SHIPPED / f"{request.param}.yaml")).card
    device = replace(card, names=(request.param,), shared_memory=227 << 10, warp_size=32)
    for module in (tuning, cost):
        monkeypatch.setattr(module, "device_of", lambda name: device)
    with target.assume(target.Target("cuda", 90, 227 << 10, device.cores, 50 << 20)):
        yield device


@pytest.mark.parametrize("length", [64, 200, 512, 1024, 3000])
@pytest.mark.parametrize("name", KINDS)
def test_shipped_tables_never_choose_what_writes_out_the_scores(name, length, hopper):
    """With dropout, too, which no table has: there most of the kernels that a bucket names are not able."""
    problem, _ = KINDS[name]
    directions = ["backward"] if "bias_grad" in problem.features else ["forward", "backward"]
    for direction, extra, D in product(directions, ((), ("dropout",)), (64, 128)):
        asked = problem._replace(
            **{"direction": direction, "features": problem.features.union(extra), "M": length, "N": length},
            **{"D": D, "Dv": D},
        )
        able = [c for c in candidates.consider_elsewhere(asked) if c.able]
        first = min(able, key=candidates.ranking(able))
        assert not first.kernel.materialises, f"{asked}: {first}"


@pytest.mark.parametrize("ratio, chosen", [(None, "triton_flash"), (1.2, "triton_flash"), (1.3, "vendor_flash")])
def test_kernels_that_are_built_may_be_preferred(ratio, chosen, gpu, own_surroundings, tmp_path):
    """Where a table says so, over another that a first call compiles, and the reason says so, too."""
    problem = ON_GPU._replace(device="cuda:0")
    sizes = {name: getattr(problem, name) for name in tables.SIZES}
    times = {"triton_flash": 1.0, "triton_efficient": 1.1, "vendor_flash": 1.25, "vendor_efficient": 1.28, "math": 20.0}
    name = tuning.device_of("cuda:0").names[0]
    said = {} if ratio is None else {"prefer_built": ratio}
    entries = table(entry(times, **sizes, dtype="bfloat16"), device=name, **said)
    tables.save(tmp_path / "tables" / f"{name}.yaml", entries)
    assert tuning.prefer_built(problem) == (ratio or 1.0)
    with target.assume(target.Target("cuda", 90, 227 << 10, 132, 50 << 20)):
        able = [c for c in candidates.consider_elsewhere(problem) if c.able]
    best = min(able, key=candidates.ranking(able))
    assert best.kernel.name == chosen
    reason = select.why(problem, best, able, Setting())
    built = "built already, 1.25 times as long as triton_flash, which a first call compiles"
    assert reason.startswith(built if chosen == "vendor_flash" else f"fastest of {len(able)} able kernels")


def test_a_head_size_that_a_kernel_fills_up(gpu):
    """From 128 columns for 128 to 256 for 160: twice the time in float32, where torch's kernel takes a quarter more."""
    ms = {"triton_flash": 1.0, "vendor_efficient": 1.3}
    for dtype, torchs in (("float32", True), ("bfloat16", False)):
        sizes = {**SIZES, "dtype": dtype, "mask": "none", "direction": "forward"}
        near = tuning.near(tables.Table("", "", (tables.parse_entry(0, entry(ms, **sizes)),)), problem_of(160, dtype))
        seconds = tuning.combined(near, problem_of(160, dtype)).seconds
        assert (min(seconds, key=seconds.get) == "vendor_efficient") == torchs
        assert seconds["triton_flash"] / seconds["vendor_efficient"] == pytest.approx(
            (1.6 if torchs else 1.6**0.5) / 1.3, rel=1e-3
        )


def problem_of(head_size, dtype):
    return features(**{**SIZES, "D": head_size, "Dv": head_size, "dtype": getattr(torch, dtype)})
