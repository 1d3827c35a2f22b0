"""Pruned tables: what stays, and that no choice changes for any problem that was measured."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import yaml

from helpers import CPU_TILES, DEVICE_NAME, call, complaint, entry, nearest, put, table
from sdpa.bench import prune
from sdpa.dispatch import select, tables, tuning
from sdpa.dispatch.context import ALL_TOGGLES

OURS = {"cpu_flash": 1.0, "vendor_cpu_flash": 2.0, "math": 3.0}
TORCHS = OURS | {"vendor_cpu_flash": 0.5}
SHIPPED = sorted(Path(tables.SHIPPED).glob("*.yaml"))
OF_CPUS = [path for path in SHIPPED if prune.is_of_cpu(path.stem)]


def grid(odd=()):
    """Entries over lengths and head sizes, of which torch's kernel wins those at `odd`."""
    sizes = itertools.product((64, 128, 256, 512, 1024, 2048), (64, 128))
    return [entry(TORCHS if size in odd else OURS, M=size[0], N=size[0], D=size[1], Dv=size[1]) for size in sizes]


def pruned(*entries):
    return prune.prune(f"{DEVICE_NAME}.yaml", table(*entries))["entries"]


def choices(entries):
    """What the dispatcher itself chooses for these entries' problems, by the table that is there."""
    problems = map(prune.problem_of, tables.parse(f"{DEVICE_NAME}.yaml", table(*entries)).buckets)
    select.clear_caches()
    chosen = [select.choose(problem, "", ALL_TOGGLES) for problem in problems]
    return [(choice.kernel.name, choice.tile) for choice in chosen]


def test_what_the_estimate_says_too_leaves(user):
    told = prune.prune(f"{DEVICE_NAME}.yaml", table(*grid()))
    assert told["entries"] == [] and told["measured"] == 12 and told["command"] == "sdpa tune"
    put(user, told)
    assert tables.read(str(user / f"{DEVICE_NAME}.yaml")).buckets == ()
    again = prune.prune(f"{DEVICE_NAME}.yaml", told)
    assert again == told, "how many were measured stays"


@pytest.mark.parametrize("odd", [((64, 128),), ((256, 64),), ((64, 64), (2048, 128))])
def test_no_choice_changes_for_what_was_measured(odd, user):
    whole = grid(odd)
    kept = pruned(*whole)
    assert len(odd) <= len(kept) <= len(whole) and [e for e in whole if e in kept] == kept, "in their order"
    assert all(e in kept for e in whole if e["ms"] is TORCHS)
    put(user, table(*whole))
    before = choices(whole)
    assert [kernel for kernel, _ in before].count("vendor_cpu_flash") == len(odd)
    put(user, table(*kept))
    assert choices(whole) == before
    put(user, table(*(e for e in whole if e["ms"] is TORCHS)))
    assert choices(whole) != before, "alone they would speak for their neighbours"


def test_what_is_far_from_an_odd_one_leaves():
    kept = pruned(*grid(((64, 64),)))
    assert {(e["M"], e["D"]) for e in kept} == set(itertools.product((64, 128, 256, 512), (64, 128)))
    assert len(pruned(*grid(((64, 64),)), entry(OURS, mask="causal"), entry(OURS, direction="backward"))) == len(kept)


def test_another_tile_is_another_choice(several_tiles):
    first, other = ({"cpu_flash": list(CPU_TILES[place])} for place in (0, 2))
    here, there = entry(OURS, tile=first), entry(OURS, M=64, N=64, tile=other)
    assert pruned(here) == [] and pruned(there) == [there] and pruned(here, there) == [there]
    near = entry(OURS, M=256, N=256, tile=first)
    assert pruned(near, there) == [near, there]


@pytest.mark.parametrize("mask", prune.MASK_FIELDS)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_an_entry_is_read_as_its_problem(mask, direction):
    (bucket,) = tables.parse("x.yaml", table(entry(OURS, mask=mask, direction=direction, Hkv=2), device="x")).buckets
    problem = prune.problem_of(bucket)
    assert (tuning.mask_kind(problem), problem.direction, problem.G) == (mask, direction, 4)
    assert "gqa" in problem.features and nearest((bucket,), problem) is bucket


def test_an_entry_with_dropout_is_read_with_it():
    """Without it the choice would be another kernel with the entry and without it, and the entry would leave."""
    dropped = entry({"math": 1.0, "cpu_flash": 9.0}, beside=["dropout"])
    assert pruned(dropped) == [dropped]
    (bucket,) = tables.parse("x.yaml", table(dropped, device="x")).buckets
    assert tuning.beside_of(prune.problem_of(bucket)) == bucket.beside == {"dropout"}


def test_shipped_tables_of_cpus_are_pruned():
    assert {path.stem for path in OF_CPUS} >= {"amd_zen4", "amd_zen5", "intel_sapphire_rapids"}
    for path in OF_CPUS:
        data = yaml.safe_load(path.read_text())
        assert prune.prune(str(path), data) == data and data["measured"] >= len(data["entries"]), path.name


def test_tune_prunes_a_file(own_surroundings, tmp_path):
    path = put(tmp_path, table(*grid(((64, 64),))))
    assert "12 entries, 8 needed" in call("tune", "--prune", str(path))
    assert len(tables.read(str(path)).buckets) == 8 and yaml.safe_load(path.read_text())["measured"] == 12
    before = path.read_text()
    assert "8 entries, 8 needed" in call("tune", "--prune", str(path)) and path.read_text() == before


def test_what_cannot_be_pruned_is_left_as_it_is(own_surroundings, tmp_path):
    foreign = put(tmp_path, table(device="nvidia_h200"), "nvidia_h200")
    said = complaint("tune", "--prune", str(foreign), code=1)
    assert "expected a table of a CPU, got one of 'nvidia_h200'" in said
    broken = put(tmp_path, "entries: [}")
    assert f"cannot prune {broken}: " in complaint("tune", "--prune", str(broken), code=1)
    assert broken.read_text() == "entries: [}"
    assert "does not exist" in complaint("tune", "--prune", str(tmp_path / "none.yaml"))
