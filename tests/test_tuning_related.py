"""A GPU without a table of its own: the nearest card of its architecture answers, its times scaled."""

from __future__ import annotations

import pytest
import torch

from helpers import ON_GPU, entry, put, table
from sdpa.dispatch import candidates, cost, select, tables, tuning
from sdpa.dispatch.catalog import by_name
from sdpa.dispatch.device import Device

HERE = Device("cuda", "A card", ("nvidia_card", "nvidia_sm90"), 132, 1e15, 6e13, 3e13, 3e12, "nvidia", "sm90")
CARD = {"kind": "cuda", "vendor": "nvidia", "architecture": "sm90", "cores": 132, "half_flops": 1e15,
        "float32_flops": 6e13, "float64_flops": 3e13, "bandwidth": 3e12}  # fmt: skip
TIMES = {"cuda_flash": 1.0, "vendor_flash": 2.0}
SIZES = {"B": 16, "H": 16, "Hkv": 16, "D": 128, "Dv": 128, "dtype": "bfloat16"}


@pytest.fixture
def here(monkeypatch, user):
    for module in (tuning, cost):
        monkeypatch.setattr(module, "device_of", lambda name: HERE)
    return user


def shipped(name, ms=TIMES, card=CARD, **sizes):
    data = table(entry(ms, **SIZES, **sizes), device=name)
    return put(tables.SHIPPED, data | {"card": card} if card else data, name)


def seconds_of(name, problem=ON_GPU):
    kernel = by_name()[name]
    return candidates.timed(kernel, problem, tuning.measured(problem), ()).seconds


def test_the_nearest_card_of_the_architecture_answers(here):
    shipped("nvidia_far", {"cuda_flash": 7.0}, CARD | {"half_flops": 5e14})
    shipped("nvidia_near", {"cuda_flash": 3.0}, CARD | {"bandwidth": 3.3e12})
    shipped("nvidia_other", {"cuda_flash": 9.0}, CARD | {"architecture": "sm80"})
    shipped("nvidia_unknown", {"cuda_flash": 9.0}, None)
    shipped("amd_other", {"cuda_flash": 9.0})
    found = tuning.measured(ON_GPU)
    assert found.seconds == {"cuda_flash": pytest.approx(3e-3)}
    assert found.source.startswith("scaled from nvidia_near, a card of its architecture: measured at B16,H16")
    assert [t.device for t in tables.related(HERE)] == ["nvidia_near", "nvidia_far"]


def test_a_table_of_its_own_comes_first_where_it_has_a_bucket(here):
    shipped("nvidia_near", M=64, N=64)
    shipped("nvidia_card", {"cuda_flash": 5.0}, M=1024, N=1024)
    own, other = tuning.measured(ON_GPU), tuning.measured(ON_GPU._replace(M=64, N=64))
    assert own.source.startswith("nvidia_card: measured")
    assert other.source.startswith("scaled from nvidia_near")


def test_what_was_measured_here_is_not_asked_of_another_card(here):
    """Another card speaks only of problems that its own tables lack."""
    shipped("nvidia_card", {"cuda_flash": 1.0, "vendor_flash": 1.05}, M=1024, N=1024)
    shipped("nvidia_near", {"cuda_flash": 2.0, "vendor_flash": 1.0}, M=1024, N=1024)
    assert tuning.measured(ON_GPU).seconds == pytest.approx({"cuda_flash": 1e-3, "vendor_flash": 1.05e-3})
    select.clear_caches()
    shipped("nvidia_near", {"cuda_flash": 20.0, "vendor_flash": 1.0}, M=1024, N=1030)
    found = tuning.measured(ON_GPU).seconds
    assert found["vendor_flash"] < 1.05e-3 and found["cuda_flash"] > 1e-3, "a problem nearby is heard, too"


def test_the_users_table_adds_to_the_shipped_one_of_the_same_device(here):
    """An entry of the user's replaces the shipped one of the same problem and hides no other."""
    shipped("nvidia_card", {"cuda_flash": 1.0, "vendor_flash": 9.0}, M=1024, N=1024)
    mine = (entry({"cuda_flash": 3.0, "vendor_flash": 2.0}, **SIZES, M=512, N=512), entry(TIMES, **SIZES, M=64, N=64))
    put(here, table(*mine, device="nvidia_card"), "nvidia_card")
    source, least = tuning.measured(ON_GPU).source, tuning.measured(ON_GPU).seconds
    assert "M1024,N1024" in source and "1 near it" in source and min(least, key=least.get) == "cuda_flash"
    again = entry({"cuda_flash": 2.0, "vendor_flash": 1.0}, **SIZES, M=1024, N=1024)
    put(here, table(*mine, again, device="nvidia_card"), "nvidia_card")
    select.clear_caches()
    found = tuning.measured(ON_GPU).seconds
    assert min(found, key=found.get) == "vendor_flash", "the shipped figure of this problem counts no longer"


def test_the_users_table_of_another_card_serves_too(here):
    put(here, table(entry(TIMES, **SIZES), device="nvidia_mine") | {"card": CARD}, "nvidia_mine")
    assert tuning.measured(ON_GPU).source.startswith("scaled from nvidia_mine")


@pytest.mark.parametrize("peaks, factor", [({"half_flops": 2e15}, 2.0), ({"bandwidth": 9e12}, 1.0)])
def test_products_scale_by_the_peak(here, peaks, factor):
    long = ON_GPU._replace(M=4096, N=4096)
    shipped("nvidia_near")
    alike = seconds_of("cuda_flash", long)
    select.clear_caches()
    shipped("nvidia_near", card=CARD | peaks)
    assert seconds_of("cuda_flash", long) == pytest.approx(alike * factor, rel=0.02)


@pytest.mark.parametrize("peaks, factor", [({"half_flops": 2e15}, 1.0), ({"bandwidth": 9e12}, 3.0)])
def test_a_step_of_generation_scales_by_the_bandwidth(here, peaks, factor):
    shipped("nvidia_near", {"vendor_flash": 1.0}, CARD | peaks, M=1, N=65536)
    step = ON_GPU._replace(M=1, N=65536)
    assert seconds_of("vendor_flash", step) == pytest.approx(1e-3 * factor, rel=0.05)


def test_what_the_host_takes_does_not_scale(here):
    shipped("nvidia_near", {"vendor_flash": 0.01}, CARD | {"half_flops": 2e15, "bandwidth": 6e12}, M=8, N=8)
    tiny = ON_GPU._replace(M=8, N=8, B=16)
    assert seconds_of("vendor_flash", tiny) == pytest.approx(1e-5, rel=0.1)


def test_a_cpu_takes_no_other_table(user):
    shipped("nvidia_near")
    shipped("nvidia_nameless", card=CARD)
    assert tables.related(Device("cpu", "", ("cpu",), 1, 1.0, 1.0, 1.0, 1.0, "nvidia", "")) == []


BROKEN = {
    "list": [1, 2],
    "nothing": {},
    "no_cores": {name: fact for name, fact in CARD.items() if name != "cores"},
    "text_peak": CARD | {"half_flops": "much"},
    "zero": CARD | {"bandwidth": 0.0},
    "nan": CARD | {"half_flops": float("nan")},
    "half_a_core": CARD | {"cores": 1.5},
    "bool": CARD | {"cores": True},
    "empty": CARD | {"architecture": ""},
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_card_is_named_and_its_table_ignored(here, name):
    data = table(entry(TIMES, **SIZES), device="nvidia_near") | {"card": BROKEN[name]}
    path = put(tables.SHIPPED, data, "nvidia_near")
    with pytest.warns(UserWarning, match="expected card to map kind, vendor, architecture, cores") as caught:
        assert tuning.measured(ON_GPU) is None
    assert str(path) in str(caught[0].message)


def test_a_card_is_read_as_it_was_written():
    assert tables.parse_card(tables.card_of(HERE), "nvidia_card") == Device(
        "cuda", "nvidia_card", ("nvidia_card",), 132, 1e15, 6e13, 3e13, 3e12, "nvidia", "sm90"
    )


def test_the_shipped_tables_of_gpus_say_what_they_were_measured_on():
    select.clear_caches()
    found = [tables.read(str(path)) for path in tables.SHIPPED.glob("nvidia_*.yaml")]
    assert found and all(table.card is not None and table.card.vendor == "nvidia" for table in found)


def test_a_bucket_of_another_head_size_is_further_than_one_of_another_length(here):
    both = table(
        entry({"cuda_flash": 5.0}, **SIZES, M=4096, N=1024),
        entry({"vendor_flash": 5.0}, **SIZES | {"D": 64, "Dv": 64}, M=1024, N=1024),
        device="nvidia_card",
    )
    put(tables.SHIPPED, both | {"card": CARD}, "nvidia_card")
    assert "cuda_flash" in tuning.measured(ON_GPU).seconds
    assert "vendor_flash" in tuning.measured(ON_GPU._replace(D=72, Dv=72)).seconds


@pytest.mark.parametrize("length, first", [(1100, "cuda_flash"), (2048, "vendor_flash")])
def test_a_card_of_the_architecture_is_a_step_behind_a_table_of_its_own(length, first, here):
    """Of the same problem on another card and one of `length` queries and keys on this card."""
    shipped("nvidia_card", {"cuda_flash": 5.0}, M=length, N=length)
    shipped("nvidia_near", {"vendor_flash": 5.0}, M=1024, N=1024)
    assert tuning.measured(ON_GPU).source.startswith({"cuda_flash": "nvidia_card", "vendor_flash": "scaled"}[first])


@pytest.mark.parametrize("own", [True, False], ids=["with", "without"])
def test_without_a_table_of_its_own_the_nearest_card_is_no_step_behind(own, here):
    """A second bucket weighs more where that of the problem itself is behind."""
    if own:
        shipped("nvidia_card", {"cuda_flash": 5.0}, M=4096, N=4096)
    both = entry({"cuda_flash": 1.0, "vendor_flash": 2.0}, **SIZES), entry({"vendor_flash": 1.0}, **SIZES, M=1200)
    put(tables.SHIPPED, table(*both, device="nvidia_near") | {"card": CARD}, "nvidia_near")
    distances = [one.distance for one in tuning.near(tables.related(HERE)[0], ON_GPU)]
    assert min(distances) == 0.0
    ratio = tuning.measured(ON_GPU).seconds["vendor_flash"] / tuning.measured(ON_GPU).seconds["cuda_flash"]
    assert (ratio > 1.8) != own


def test_a_block_that_is_empty_in_part_is_further_than_a_longer_full_one(here):
    """256 rows fill two blocks of 128 as 128 fill one; of 129 rows the second block is nearly empty."""
    both = table(
        entry({"cuda_flash": 5.0}, **SIZES, M=256, N=1024),
        entry({"vendor_flash": 5.0}, **SIZES, M=129, N=1024),
        device="nvidia_card",
    )
    put(tables.SHIPPED, both | {"card": CARD}, "nvidia_card")
    assert "M256" in tuning.measured(ON_GPU._replace(M=128)).source
    assert "M129" in tuning.measured(ON_GPU._replace(M=130)).source


def test_an_h100_takes_the_h200s_table(monkeypatch, tmp_path):
    """Where its own has nothing as near."""
    monkeypatch.setenv("SDPA_TUNING_DIR", str(tmp_path))
    names = ("nvidia_h100_80gb_hbm3", "nvidia_sm90")
    card = Device("cuda", "NVIDIA H100", names, 132, 1.07e15, 6.7e13, 3.3e13, 3.35e12, "nvidia", "sm90")
    for module in (tuning, cost):
        monkeypatch.setattr(module, "device_of", lambda name: card)
    nearest = {1024: "scaled from nvidia_h200", 577: "nvidia_h100_80gb_hbm3: measured at"}
    for length, source in nearest.items():
        problem = ON_GPU._replace(dtype=torch.bfloat16, M=length, N=length)
        assert tuning.measured(problem).source.startswith(source)
