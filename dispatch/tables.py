"""Tuning tables: measured times of each device, the user's tables over the shipped ones; read, checked and written.

A table is one YAML file named after its device (`device.names`):

    schema: 1
    device: amd_zen4
    date: 2026-01-31
    versions: {torch: 2.13.0, sdpa: 0.1.0}
    command: sdpa tune
    card: {kind: cuda, vendor: nvidia, architecture: sm90, cores: 132, half_flops: 1.07e+15,
      float32_flops: 6.7e+13, float64_flops: 3.3e+13, bandwidth: 4.9e+12}
    entries:
    - {"direction": "forward", "dtype": "bfloat16", "mask": "causal", "B": 1, "H": 8, "Hkv": 8, "M": 1024, "N": 1024,
      "D": 64, "Dv": 64, "ms": {"cpu_flash": 1.2, "vendor_cpu_flash": 3.4}, "tile": {"cpu_flash": [768, 384, 0, 0]}}

Entries are written as JSON, each on a line of its own and behind all else, because a first call waits for them: JSON is
read in a twenty-fifth of YAML's time. Other YAML is read, too.

`tile` is optional: the tile each kernel reached its figure with, as BLOCK_M, BLOCK_N, num_warps, num_stages. So are
`beside`, what was asked beside the mask, as [dropout] (BESIDE), and `window`, how many keys beside one a query of the
mask "window" sees. `card` is what a GPU reports of itself (`device.Device`). `prefer_built: 1.3` beside the entries
prefers kernels that are built already to ones that a first call compiles, where they take up to 1.3 times as long
(`sdpa tune --prefer-built`). `links` beside them lists what `sdpa tune --distributed` measured (LinkSpeed), as
[{backend: nccl, hosts: 1, ranks: 4, latency: 3.0e-05, bandwidth: 1.5e+11}], each with date, versions and command of its
own, which older tables lack.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import warnings
from functools import lru_cache
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any, NamedTuple, TypeGuard

import yaml

from sdpa.dispatch.device import Device
from sdpa.environment import tuning_dir
from sdpa.problem import Tile

SCHEMA = 1
SHIPPED = Path(__file__).resolve().parent.parent / "tuning_tables"
HEADER = {"schema": int, "device": str, "date": object, "versions": dict, "command": str, "entries": list}
# How a message names these types.
NOUNS = {int: "an integer", str: "a str", object: "a date", dict: "a dict", list: "a list"}
TEXTS = ("direction", "dtype", "mask")
SIZES = ("B", "H", "Hkv", "M", "N", "D", "Dv")
BESIDE = frozenset({"dropout", "softcap", "sinks"})  # features of a problem that decide which kernels are able
PEAKS = ("half_flops", "float32_flops", "float64_flops", "bandwidth")
CARD = {"kind": str, "vendor": str, "architecture": str, "cores": int, **dict.fromkeys(PEAKS, float)}
LINK = {"backend": str, "hosts": int, "ranks": int, "latency": float, "bandwidth": float}
ORIGIN = ("date", "versions", "command")  # of HEADER: where figures come from
LARGEST = 2**62  # of what a table counts: sizes, numbers of a tile, milliseconds
# The loader in C takes half the time of the one in Python, which the first call in a process waits for.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
ENTRIES, ENTRY = "\nentries:\n", "- "


class Bucket(NamedTuple):
    """One measured problem: its sizes, and milliseconds by kernel."""

    direction: str
    dtype: str
    mask: str
    sizes: tuple[int, ...]  # in the order of SIZES
    ms: dict[str, float]
    tile: dict[str, Tile]  # of the kernels that were measured with more than one
    beside: frozenset[str] = frozenset()  # of BESIDE
    window: int = 0  # keys beside one that a query of the mask "window" sees; 0: not said


class LinkSpeed(NamedTuple):
    """What the links between some ranks carry."""

    backend: str  # torch.distributed's
    hosts: int
    ranks: int
    latency: float  # seconds of a collective
    bandwidth: float  # bytes/s that a rank sends
    date: object = None  # this and what follows: None in older tables
    versions: dict[str, str] | None = None
    command: str | None = None

    def data(self) -> dict[str, Any]:
        """In the form that `parse_links` reads."""
        return {name: value for name, value in self._asdict().items() if value is not None}


class Table(NamedTuple):
    path: str
    device: str
    buckets: tuple[Bucket, ...]
    card: Device | None = None  # the device, where the table says what it is
    prefer_built: float | None = None  # how much longer a built kernel may take; None where the table says nothing
    links: tuple[LinkSpeed, ...] = ()


def of(names: tuple[str, ...]) -> list[list[Table]]:
    """The readable tables for a device, by name, the specific one before the general one; the user's table of a name
    before the shipped one."""
    found = ([read(str(folder / f"{name}.yaml")) for folder in folders()] for name in names)
    return [[table for table in tables if table is not None] for tables in found]


def related(device: Device) -> list[Table]:
    """The tables of other GPUs of a device's architecture, the nearest in peaks and bandwidth first."""
    if not device.architecture:
        return []
    paths = (path for folder in folders() for path in files_in(folder, f"{device.vendor}_*.yaml"))
    found = [t for path in paths if path.stem not in device.names and (t := read(str(path))) is not None]
    near = [(distance(t.card, device), t) for t in found if t.card and t.card.architecture == device.architecture]
    return [table for _, table in sorted(near, key=lambda pair: pair[0])]


def distance(card: Device, device: Device) -> float:
    pairs = ((card.half_flops, device.half_flops), (card.bandwidth, device.bandwidth), (card.cores, device.cores))
    return sum(abs(math.log(a / b)) for a, b in pairs)


def files_in(folder: Path, pattern: str) -> list[Path]:
    """The files of a folder, in one order. A folder that this user may not search has none."""
    try:
        return sorted(folder.glob(pattern))
    except OSError:
        return []


def folders() -> list[Path]:
    """Where tables are looked for, the first first."""
    own = tuning_dir()
    return [SHIPPED] if own is None else [own, SHIPPED]


def is_no_folder(path: Path) -> bool:
    """Whether a file stands where a folder of tables should be."""
    try:
        return not S_ISDIR(path.stat().st_mode)
    except OSError as error:
        return isinstance(error, NotADirectoryError)  # the file stands further up


def stamp_of(path: Path) -> tuple[int, ...] | None:
    """What tells one state of a file from another, or None where there is no such file. A folder that this user may not
    search has none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_ino, found.st_mtime_ns, found.st_size) if S_ISREG(found.st_mode) else None


def read(path: str) -> Table | None:
    """A table, or None where there is no file; a broken one is named in a warning and ignored as a whole."""
    stamp = stamp_of(Path(path))
    return None if stamp is None else read_once(path, stamp)


@lru_cache(maxsize=64)
def read_once(path: str, stamp: tuple[int, ...]) -> Table | None:
    """The same of a file as it is now: only one that was written since is read again."""
    try:
        return parse(path, load(Path(path).read_text()))
    except (OSError, yaml.YAMLError, ValueError) as error:
        warnings.warn(f"tuning table {path} is ignored: {' '.join(str(error).split())}", stacklevel=2)
        return None


def load(text: str) -> Any:
    """The data of a YAML text. Raises ValueError or YAMLError, also where PyYAML raises what its look-ups do."""
    head, mark, rest = text.partition(ENTRIES)
    try:
        if mark and (lines := rest.splitlines()) and all(line.startswith(ENTRY) for line in lines):
            return from_yaml(head) | {"entries": [json.loads(line.removeprefix(ENTRY)) for line in lines]}
    except (ValueError, TypeError, RecursionError):  # YAML, but no JSON
        pass
    return from_yaml(text)


def from_yaml(text: str) -> Any:
    try:
        return yaml.load(text, Loader=LOADER)
    except (LookupError, AttributeError) as error:
        raise ValueError(f"a value is none of its tag's ({type(error).__name__}: {error})") from None
    except RecursionError:
        raise ValueError("its lists are nested too deep") from None


def parse(path: str, data: object) -> Table:
    """Check `data` against the schema. Raises ValueError that names what is wrong."""
    if not isinstance(data, dict):
        raise ValueError(f"expected a mapping, got {type(data).__name__}")
    for key, kind in HEADER.items():
        value = data.get(key)
        if not isinstance(value, kind) or value is None or isinstance(value, bool):
            raise ValueError(f"expected '{key}' to be {NOUNS[kind]}, got {data.get(key)!r}")
    if data["schema"] != SCHEMA:
        raise ValueError(f"expected schema {SCHEMA}, got {data['schema']}")
    if data["device"] != Path(path).stem:
        raise ValueError(f"expected a table of device {Path(path).stem}, got one of {data['device']!r}")
    ratio = data.get("prefer_built")
    if ratio is not None and not (is_time("", ratio) and ratio >= 1):
        raise ValueError(f"expected prefer_built to be a number from 1 on, got {ratio!r}")
    buckets = tuple(parse_entry(number, entry) for number, entry in enumerate(data["entries"]))
    card, links = parse_card(data.get("card"), data["device"]), parse_links(data.get("links", []))
    return Table(path, data["device"], buckets, card, ratio, links)


def card_of(device: Device) -> dict[str, Any]:
    """What a table says of a GPU, in the form that `parse_card` reads."""
    return {name: kind(getattr(device, name)) for name, kind in CARD.items()}


def parse_card(card: object, name: str) -> Device | None:
    """The device of a table. Raises ValueError where a fact is missing or no fact of a device."""
    if card is None:
        return None
    if not isinstance(card, dict) or not all(is_fact(card.get(key), kind) for key, kind in CARD.items()):
        raise ValueError(f"expected card to map {', '.join(CARD)} to what they are, got {card!r}")
    return Device(description=name, names=(name,), **{key: card[key] for key in CARD})


def parse_links(links: object) -> tuple[LinkSpeed, ...]:
    if not isinstance(links, list) or not all(
        isinstance(one, dict) and all(is_fact(one.get(key), kind) for key, kind in LINK.items()) for one in links
    ):
        raise ValueError(f"expected links to list mappings of {', '.join(LINK)} to what they are, got {links!r}")
    for key, told in ((key, one.get(key)) for one in links for key in ORIGIN):
        if told is not None and not isinstance(told, HEADER[key]):
            raise ValueError(f"expected '{key}' of links to be {NOUNS[HEADER[key]]}, got {told!r}")
    return tuple(LinkSpeed(*(one[key] for key in LINK), *(one.get(key) for key in ORIGIN)) for one in links)


def is_fact(value: object, kind: type) -> bool:
    """A text that is not empty, a positive integer, or a positive finite number."""
    if kind is str:
        return isinstance(value, str) and value != ""
    return is_size(value) if kind is int else is_time("", value)


def parse_entry(number: int, entry: object) -> Bucket:
    if not isinstance(entry, dict):
        raise ValueError(f"entry {number}: expected a mapping, got {entry!r}")
    named = [entry.get(key) for key in TEXTS]
    texts = [text for text in named if isinstance(text, str)]
    if len(texts) < len(TEXTS):
        raise ValueError(f"entry {number}: expected direction, dtype and mask, got {named!r}")
    given = tuple(entry.get(name) for name in SIZES)
    sizes = tuple(size for size in given if is_size(size))
    if len(sizes) < len(SIZES):
        raise ValueError(f"entry {number}: expected positive integers for {', '.join(SIZES)}, got {given!r}")
    ms = entry.get("ms")
    if not isinstance(ms, dict) or not ms or not all(is_time(name, value) for name, value in ms.items()):
        raise ValueError(f"entry {number}: expected ms to map kernels to positive milliseconds, got {ms!r}")
    times = {name: float(value) for name, value in ms.items()}
    direction, dtype, mask = texts
    tiles, beside = parse_tiles(number, entry.get("tile", {}), times), entry.get("beside", [])
    if not isinstance(beside, list) or not all(isinstance(name, str) and name in BESIDE for name in beside):
        raise ValueError(f"entry {number}: expected beside to list some of {', '.join(sorted(BESIDE))}, got {beside!r}")
    window = entry.get("window", 0)
    if "window" in entry and not (is_size(window) and mask == "window"):
        raise ValueError(f"entry {number}: expected window to be a positive integer of a mask 'window', got {window!r}")
    return Bucket(direction, dtype, mask, sizes, times, tiles, frozenset(beside), window)


def parse_tiles(number: int, tiles: object, times: dict[str, float]) -> dict[str, Tile]:
    """Tiles by kernel. Raises ValueError where one is no tile, or of a kernel without a time."""
    if not isinstance(tiles, dict) or not all(name in times and is_tile(value) for name, value in tiles.items()):
        fields = ", ".join(Tile._fields)
        raise ValueError(f"entry {number}: expected tile to map kernels of ms to [{fields}], got {tiles!r}")
    return {name: Tile(*value) for name, value in tiles.items()}


def is_size(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= LARGEST


def is_tile(value: object) -> bool:
    """Four integers, the blocks positive, warps and stages not negative."""
    if not isinstance(value, list) or len(value) != len(Tile._fields):
        return False
    whole = all(isinstance(number, int) and not isinstance(number, bool) for number in value)
    return whole and min(value[:2]) > 0 and min(value[2:]) >= 0 and max(value) <= LARGEST


def is_time(name: object, value: object) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return isinstance(name, str) and 0 < value <= LARGEST


def write(path: Path, data: dict[str, Any]) -> None:
    """Replace a table that has been checked."""
    parse(str(path), data)
    save(path, data)


def save(path: Path, data: dict[str, Any]) -> None:
    """Replace a file atomically: a reader sees the old one or the new one. The folder is created private."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    try:
        with os.fdopen(handle, "w") as file:
            head = {name: value for name, value in data.items() if name != "entries" or not value}
            yaml.safe_dump(head, file, sort_keys=False, width=160, default_flow_style=None)
            if data.get("entries"):
                file.writelines(["entries:\n", *(f"{ENTRY}{json.dumps(entry)}\n" for entry in data["entries"])])
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
