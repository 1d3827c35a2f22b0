"""GPUs that tuning tables tell of, to ask about one that this machine has not: `sdpa explain --device cuda:H200`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sdpa.dispatch import device, tables
from sdpa.dispatch.device import Device, slug


def is_named(name: str) -> bool:
    """Whether a device's name names a card, as "cuda:H200" does, and "cuda:0" and "cuda:-1" do not."""
    kind, _, index = name.partition(":")
    return kind == "cuda" and bool(index) and not index.removeprefix("-").isdigit()


def card_named(name: str) -> Device:
    """The card of "cuda:H200", by whole words of its table's name. Raises ValueError with those there are."""
    wanted, known = slug(name.partition(":")[2]), cards()
    found = [card for table, card in known.items() if f"_{wanted}_" in f"_{table}_"]
    if len(found) == 1:
        return found[0]
    raise ValueError(
        f"expected cuda:N, or a card that a tuning table tells of, one of {', '.join(known)}, got {name!r}"
    )


def cards() -> dict[str, Device]:
    """NVIDIA's by the names of their tables, the user's before the shipped ones."""
    paths = (path for folder in reversed(tables.folders()) for path in tables.files_in(folder, "nvidia_*.yaml"))
    found = (table for path in paths if (table := tables.read(str(path))) is not None)
    return {table.device: table.card for table in found if table.card is not None}


@contextmanager
def assumed(card: Device) -> Iterator[None]:
    """Inside of it "cuda" is this card for the choice of kernels. What their tiles are for is told to them apart
    (sdpa.kernels.triton.target)."""
    token = device.ASSUMED.set(card)
    try:
        yield
    finally:
        device.ASSUMED.reset(token)
