"""A tuning table while it is measured: what makes two entries the same, who may write, what an interruption leaves."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from sdpa.bench import record
from sdpa.bench.problems import CALLS, WINDOW, Problem
from sdpa.dispatch import tables, tuning
from sdpa.dispatch.device import device_of
from sdpa.dispatch.select import clear_caches

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

# A problem's mask as the kind of a tuning table, where the words differ.
GPU_KINDS = {"padding": "rows", "allowed": "dense", "alibi": "causal", "lower_right": "causal"}
CPU_KINDS = {
    **dict.fromkeys(("padding", "allowed", "bias", "bias_grad"), "dense"),
    **dict.fromkeys(("lengths", "segments"), "structured"),
    **dict.fromkeys(("alibi", "lower_right"), "causal"),
}
# And back: the mask of each kind that the grids have.
GPU_MASKS = {"rows": "padding", "dense": "allowed"}
CPU_MASKS = {"dense": "padding", "structured": "lengths"}
# Seconds between two looks whether a table's lock is free.
PAUSE = 0.01
# And for how many seconds hosts that share a folder wait for one another, which write the same links at the same time.
PATIENCE = 10.0


class BookError(Exception):
    """A table that cannot be measured, resumed or written, and why, in one sentence."""


def entry_key(problem: Problem) -> tuple[Any, ...]:
    """What makes two entries of a table the same measurement."""
    sizes = tuple(getattr(problem, name) for name in tables.SIZES)
    return (problem.direction, dtype_name(problem), mask_kind(problem), *sizes, window_of(problem), *beside_of(problem))


def entry_key_of(entry: dict[str, Any]) -> tuple[Any, ...]:
    named = (entry[name] for name in ("direction", "dtype", "mask", *tables.SIZES))
    return (*named, entry.get("window", 0), *sorted(entry.get("beside", ())))


def about(problem: Problem) -> dict[str, Any]:
    """An entry without its figures."""
    sizes = {name: getattr(problem, name) for name in tables.SIZES}
    entry = {"direction": problem.direction, "dtype": dtype_name(problem), "mask": mask_kind(problem), **sizes}
    entry |= {"window": window} if (window := window_of(problem)) else {}
    return entry | ({"beside": beside} if (beside := beside_of(problem)) else {})


def problem_of(entry: dict[str, Any], device: str) -> Problem | None:
    """The problem of an entry, as far as a table tells: a mask of its kind, a window to the left, the layout (B, H, N,
    D). None where no problem asks what it does, and of a window whose width is not told."""
    dtype, precision = entry["dtype"], "highest"
    if dtype == "tfloat32":
        dtype, precision = "float32", "high"
    masks = CPU_MASKS if device.startswith("cpu") else GPU_MASKS
    mask = masks.get(entry["mask"], entry["mask"])
    if mask == "causal" and entry["M"] != entry["N"]:
        mask = "lower_right"
    call, *others = entry.get("beside") or ("",)
    if others or call not in CALLS:
        return None
    sizes = {name: entry[name] for name in tables.SIZES}
    problem = Problem(
        **sizes, dtype=dtype, mask=mask, direction=entry["direction"], device=device, precision=precision, call=call,
        window=entry.get("window", WINDOW),
    )  # fmt: skip
    return problem if entry_key(problem) == entry_key_of(entry) else None


def beside_of(problem: Problem) -> list[str]:
    """What a call asks beside its mask, in the tuning tables' words (tables.BESIDE)."""
    return [problem.call] if problem.call in tables.BESIDE else []


def window_of(problem: Problem) -> int:
    """The keys to the left that a window leaves; 0 of other masks, and of one wider than queries and keys together."""
    return problem.window if mask_kind(problem) == "window" else 0


def dtype_name(problem: Problem) -> str:
    """In the tuning tables' words (tuning.dtype_names)."""
    return "tfloat32" if problem.dtype == "float32" and problem.precision != "highest" else problem.dtype


def mask_kind(problem: Problem) -> str:
    """In the tuning tables' words (tuning.mask_kind)."""
    if problem.mask == "lower_right" and problem.visible_pairs() >= tuning.NEARLY_ALL * problem.M * problem.N:
        return "none"
    if problem.mask == "window" and problem.window >= problem.M + problem.N:  # as wide as that a call has none
        return "causal"
    kinds = CPU_KINDS if problem.device.startswith("cpu") else GPU_KINDS
    return kinds.get(problem.mask, problem.mask)


@contextmanager
def alone(path: Path, patience: float = 0.0) -> Iterator[None]:
    """While nobody else writes the same table: of two that did, the one that ended first would lose its figures. Who
    has it is waited for as many seconds as `patience` says."""
    if fcntl is None:
        yield
        return
    lock = path.with_name(path.name + ".lock")
    attempts = round(patience / PAUSE)
    while True:
        with lock.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                if attempts <= 0:
                    raise BookError(f"another `sdpa tune` is measuring {path}") from None
                attempts -= 1
                time.sleep(PAUSE)
                continue
            if not is_at(file, lock):  # whoever had it removed it meanwhile: another file has that name
                continue
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)
            return


def is_at(file: Any, path: Path) -> bool:
    """Whether an open file is the one that a path names now."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def require_writable(folder: Path) -> None:
    """Before hours of measuring. The folder is created private."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise BookError(f"cannot write a table to {folder}: {error.strerror}") from None


@dataclass
class Book:
    """A table being measured: its entries by key, its file, and the file beside it that an interrupted run leaves."""

    path: Path
    device: str
    kernels: tuple[str, ...] = ()  # those measured; none: all
    entries: dict[tuple[Any, ...], dict[str, Any]] = field(default_factory=dict)

    @property
    def partial(self) -> Path:
        return self.path.with_name(self.path.name + ".partial")

    def open(self) -> None:
        """Take over the table, and over it what an interrupted run measured."""
        for file in (self.path, self.partial):
            for entry in entries_of(file, self.path):
                self.entries[entry_key_of(entry)] = entry

    def has(self, problem: Problem) -> bool:
        """Whether there is an entry for `problem`, with a figure of every kernel asked for."""
        entry = self.entries.get(entry_key(problem))
        return entry is not None and set(self.kernels) <= set(entry["ms"])

    def problems(self) -> list[Problem]:
        """Of the entries with a figure of the kernels measured, those that took the least time first."""
        asked = [entry for entry in self.entries.values() if not self.kernels or set(self.kernels) & set(entry["ms"])]
        shortest = sorted(asked, key=lambda entry: min(entry["ms"].values()))
        found = (problem_of(entry, self.device) for entry in shortest)
        return [problem for problem in found if problem is not None]

    def add(self, entry: dict[str, Any]) -> None:
        """A new entry replaces the old one; where only some kernels were measured, their figures."""
        key = entry_key_of(entry)
        old = self.entries.get(key)
        if old is not None and self.kernels:
            tiles = {name: tile for name, tile in old.get("tile", {}).items() if name not in entry["ms"]}
            tiles |= entry.get("tile", {})
            entry = entry | {"ms": old["ms"] | entry["ms"]} | ({"tile": tiles} if tiles else {})
        self.entries[key] = entry

    def save(self) -> None:
        """Write down what there is, beside the table."""
        tables.save(self.partial, self.data())

    def publish(self) -> None:
        """Replace the table and make this process forget the old one."""
        tables.write(self.path, self.data())
        self.partial.unlink(missing_ok=True)
        clear_caches()

    def data(self) -> dict[str, Any]:
        return header(self.path, self.device) | kept(self.path) | {"entries": list(self.entries.values())}


def header(path: Path, device: str) -> dict[str, Any]:
    """What a table that is measured by this process says beside its entries."""
    head = {"schema": tables.SCHEMA, "device": path.stem} | origin(device, (*tables.ORIGIN, "description", "threads"))
    card = device_of(device)
    return head | ({"card": tables.card_of(card)} if card.architecture else {})


def origin(device: str, names: Sequence[str] = tables.ORIGIN) -> dict[str, Any]:
    """When, with what and by which command this process measures."""
    facts = record.about(device) | {"command": command()}
    return {name: facts[name] for name in names}


def command() -> str:
    """The command line as a user would type it, with torchrun where that started this process."""
    own, ranks, hosts = record.command(), os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("GROUP_WORLD_SIZE", "1")
    if ranks is None:
        return own
    own = f"-m sdpa.cli {own.removeprefix('sdpa ')}" if own.startswith("sdpa ") else own
    return f"torchrun {'' if hosts == '1' else f'--nnodes {hosts} '}--nproc-per-node {ranks} {own}"


def kept(path: Path) -> dict[str, Any]:
    """What a table says beside its entries that was not measured with them: of kernels that are built, and of links."""
    table = tables.read(str(path))
    if table is None:
        return {}
    preference = {} if table.prefer_built is None else {"prefer_built": table.prefer_built}
    return preference | ({"links": [one.data() for one in table.links]} if table.links else {})


def prefer_built(path: Path, device: str, ratio: float) -> None:
    """Write into a table how much longer a kernel that is built may take than one that a first call compiles."""
    change(path, device, lambda data: {"prefer_built": ratio})


def add_links(path: Path, device: str, found: Sequence[tables.LinkSpeed]) -> None:
    """Write into a table what links carry, in place of what it says of the same backend, hosts and ranks."""

    def changed(data: dict[str, Any]) -> dict[str, Any]:
        new = {one[:3]: one for one in found}
        old = [one for one in tables.parse_links(data.get("links", [])) if one[:3] not in new]
        return {"links": [one.data() for one in (*old, *new.values())]}

    change(path, device, changed, PATIENCE)


def require_changeable(path: Path) -> None:
    """Before links are measured: that the table, if there is one, can be read and is nobody else's."""
    require_writable(path.parent)
    with changing(path, PATIENCE):
        if path.exists():
            tables.parse(str(path), tables.load(path.read_text()))


def change(path: Path, device: str, fields: Callable[[dict[str, Any]], dict[str, Any]], patience: float = 0.0) -> None:
    """Replace what a table says beside its entries; there need be none yet."""
    with changing(path, patience):
        data = tables.load(path.read_text()) if path.is_file() else header(path, device) | {"entries": []}
        tables.write(path, {**data, **fields(data)})
    clear_caches()


@contextmanager
def changing(path: Path, patience: float) -> Iterator[None]:
    """Alone with a table; what is wrong with it is a sentence."""
    with alone(path, patience):
        try:
            yield
        except (OSError, UnicodeDecodeError, yaml.YAMLError, ValueError, TypeError) as error:
            raise BookError(f"cannot change {path}: {' '.join(str(error).split())}") from None


def entries_of(file: Path, table: Path) -> list[dict[str, Any]]:
    """The entries of a file to go on with."""
    data = opened(file, table)
    return [] if data is None else data["entries"]


def opened(file: Path, table: Path) -> dict[str, Any] | None:
    """What a file holds for a table, None where there is no file. Of another torch, or broken, it is not mixed with new
    figures."""
    if not file.is_file():
        return None
    try:
        data = tables.load(file.read_text())
        tables.parse(str(table), data)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValueError) as error:
        raise BookError(f"cannot resume {file}: {' '.join(str(error).split())}") from None
    measured, here = data["versions"].get("torch"), record.versions()["torch"]
    if measured != here:
        raise BookError(f"cannot resume {file}: expected torch {here}, measured with {measured}")
    return data
