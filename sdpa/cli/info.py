"""sdpa info: the machine, the libraries and every kernel, with each probe guarded so that one failing hides nothing."""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from rich.markup import escape
from rich.table import Table

import sdpa
from sdpa import repeated
from sdpa.cli.common import as_json, console, print_json
from sdpa.dispatch import apple, tables
from sdpa.dispatch import device as devices
from sdpa.dispatch.catalog import KERNELS
from sdpa.dispatch.context import environment_text
from sdpa.torch_private import ABSENT

Section = dict[str, object]
OURS = ("SDPA_KERNEL", "SDPA_CPU_ISA", "SDPA_TUNING_DIR")
VARIABLES = (*OURS, "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES")


def probe(ask: Callable[[], object]) -> object:
    """What `ask` returns, or its error in words; warnings count as part of the answer."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = ask()
        except Exception as error:
            return f"error: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    told = "; ".join(str(warning.message) for warning in caught)
    return f"{found} ({told})" if told else found


def machine() -> Section:
    return {
        "system": probe(platform.platform),
        "processor": probe(devices.cpu_model),
        "logical processors": probe(os.cpu_count),
        "torch threads": probe(torch.get_num_threads),
        "memory": probe(memory),
        "instruction sets (torch)": probe(torch.backends.cpu.get_cpu_capability),
        "instruction sets (sdpa)": probe(instruction_sets),
    } | {f"GPU {name}".strip(): facts for name, facts in gpus().items()}


def memory() -> str:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"{total / 2**30:.1f} GiB"


def instruction_sets() -> str:
    from sdpa.kernels.cpu import library

    if (reason := library.load_error()) is not None:
        return f"unknown: {reason}"
    return f"{', '.join(library.isas())}; in use: {library.isa()}"


def gpus() -> Section:
    if apple.is_available():
        return {"": probe(lambda: apple.here().description)}
    count = probe(torch.cuda.device_count)
    if not isinstance(count, int) or not count:
        return {"": count if isinstance(count, str) else "none"}
    return {f"{index}": probe(partial(gpu, index)) for index in range(count)}


def gpu(index: int) -> str:
    facts = torch.cuda.get_device_properties(index)
    size = f"{facts.multi_processor_count} multiprocessors, {facts.total_memory / 2**30:.0f} GiB"
    return f"{facts.name}, sm_{facts.major}{facts.minor}, {size}"


def libraries() -> Section:
    return {
        "sdpa": probe(lambda: Path(sdpa.__file__).parent),
        "CPU library": probe(cpu_library),
        "operators for C++": probe(sdpa.operators_library),
        "repeated calls": "in C++" if repeated.BUILT else "in Python, which takes longer: sdpa/repeated was not built",
        "torch's private parts": private_parts(),
    }


def private_parts() -> str:
    """Which are absent; those of CUDA count where there is a device for them."""
    absent = [path for path in ABSENT if "cuda" not in path or torch.cuda.is_available()]
    return f"absent: {', '.join(absent)}: calls take longer" if absent else "all there"


def cpu_library() -> str:
    from sdpa.kernels.cpu import library

    reason = library.load_error()
    return f"not loaded: {reason}" if reason else f"loaded: {library.LIBRARY}"


def versions() -> Section:
    from sdpa.bench.record import versions as installed

    return installed() | {"torch build": probe(torch_build)}


def torch_build() -> str:
    cuda, hip = torch.version.cuda, torch.version.hip
    if torch.backends.mps.is_built():
        return "CPU and MPS"
    return f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "CPU only"


def table_files() -> Section:
    """Every file a tuning table is looked for in, the first found first; and where none of a device's is there."""
    names = ["cpu"] + [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    names += ["mps"] if apple.is_available() else []
    found: Section = {}
    for name in names:
        facts = probe(partial(devices.device_of, name))
        paths = [folder / f"{table}.yaml" for table in getattr(facts, "names", ()) for folder in tables.folders()]
        found |= {str(path): probe(partial(table_state, path)) for path in paths}
        if not isinstance(facts, devices.Device):
            found[name] = str(facts)
        elif not any(map(tables.stamp_of, paths)):
            near = tables.related(facts)
            source = f"scaled from {near[0].device}" if near else "estimated"
            found[name] = f"no tuning table for this device; times are {source}"
    return found


def table_state(path: Path) -> str:
    stamp = tables.stamp_of(path)
    if stamp is None:
        return f"not there: {path.parent} is not a folder" if tables.is_no_folder(path.parent) else "not there"
    table = tables.read_once.__wrapped__(str(path), stamp)  # past the cache, so that a broken one is told of every time
    if table is None:
        return "ignored"
    # `sdpa tune --prune` leaves none where the estimate is right for all that was measured.
    if not table.buckets:
        return "there, without entries; times are estimated"
    return f"{len(table.buckets)} measured {'entry' if len(table.buckets) == 1 else 'entries'}"


def variables() -> Section:
    return {name: os.environ.get(name, "not set") for name in VARIABLES}


def kernels() -> list[dict[str, Any]]:
    rows = []
    for kernel in KERNELS:
        reason = probe(kernel.unavailable)
        rows.append({
            "kernel": kernel.name, "family": kernel.family, "devices": ", ".join(kernel.devices) or "any",
            "available": reason is None, "reason": reason or "", "summary": kernel.summary,
        })  # fmt: skip
    return rows


SECTIONS: dict[str, Callable[[], object]] = {
    "machine": machine,
    "libraries": libraries,
    "versions": versions,
    "tuning tables": table_files,
    "environment": variables,
    "kernels": kernels,
}


@click.command(short_help="The machine, the libraries and every kernel.")
@as_json
def info(json_out: bool) -> None:
    """The machine, instruction sets, libraries, versions, tuning tables, environment, and every kernel: available, or
    why not. Paste it into a bug report. Exit code 2 where SDPA_KERNEL or SDPA_CPU_ISA has an unknown value."""
    found = {name: probe(section) for name, section in SECTIONS.items()}
    if json_out:
        print_json(found)
    else:
        show(found)
    refuse_variables()  # at the end, so that a report of the wrong value has all the rest


def show(found: dict[str, object]) -> None:
    out = console()
    for name, section in found.items():
        out.print(kernel_table(section) if name == "kernels" and isinstance(section, list) else pairs(name, section))


def refuse_variables() -> None:
    """Raises VariableError where a variable has a value that no call would take, with those there are."""
    from sdpa.kernels.cpu import library

    environment_text()
    library.load_error()


def pairs(name: str, section: object) -> Table:
    table = Table(title=name, title_justify="left", title_style="bold", show_header=False, box=None, pad_edge=False)
    for key, value in (section if isinstance(section, dict) else {"": section}).items():
        table.add_row(escape(key), escape(str(value)))
    return table


def kernel_table(rows: list[dict[str, Any]]) -> Table:
    columns = ("kernel", "family", "devices", "available", "what it is, or why not")
    table = Table(*columns, title="kernels", title_justify="left", title_style="bold")
    for row in rows:
        yes = "[green]yes" if row["available"] else "[red]no"
        table.add_row(row["kernel"], row["family"], row["devices"], yes, escape(row["reason"] or row["summary"]))
    return table
