"""GPUs that tuning tables tell of, to ask about one that this machine has not: `sdpa explain --device cuda:H200`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sdpa.dispatch import device, tables
from sdpa.dispatch.device import Device, slug
from sdpa.kernels.triton import target

# Bytes of shared memory that one program may have, by architecture (NVIDIA's table of specifications).
SHARED_MEMORY = {"sm80": 163 << 10, "sm86": 99 << 10, "sm89": 99 << 10, "sm90": 227 << 10, "sm100": 227 << 10}


def is_named(name: str) -> bool:
    """Whether a device's name names a card, as "cuda:H200" does and "cuda:0" does not."""
    kind, _, index = name.partition(":")
    return kind == "cuda" and bool(index) and not index.isdigit()


def card_named(name: str) -> Device:
    """The card of "cuda:H200", by a part of its table's name. Raises ValueError with those there are."""
    wanted, known = slug(name.partition(":")[2]), cards()
    found = [card for table, card in known.items() if wanted and wanted in table]
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
    """Inside of it "cuda" is this card, for the choice of kernels and their tiles."""
    major, minor = device.compute_capability(card.architecture)
    shared = SHARED_MEMORY.get(card.architecture, device.DEFAULT_SHARED_MEMORY)
    token = device.ASSUMED.set(card)
    try:
        with target.assume(target.Target("cuda", 10 * major + minor, shared, card.cores, target.DEFAULT_L2)):
            yield
    finally:
        device.ASSUMED.reset(token)
