"""Stub libraries of an older glibc and libstdc++: what is linked with them runs where manylinux_2_28 does."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

# The newest versions of symbols that manylinux_2_28 promises.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11)}
# Until 2.34 glibc had these in libraries of their own, by the beginnings of their names. An older loader looks there.
OWN_LIBRARIES = {
    "pthread_": "libpthread.so.0",
    "sem_": "libpthread.so.0",
    "dl": "libdl.so.2",
    "shm_": "librt.so.1",
    "aio_": "librt.so.1",
    "mq_": "librt.so.1",
    "timer_": "librt.so.1",
}
SYMBOL = re.compile(
    r"^ *\d+: \w+ +\w+ (?P<kind>FUNC|IFUNC|OBJECT|NOTYPE|TLS) +(?:GLOBAL|WEAK|UNIQUE) +DEFAULT +(?:\[.*?\] +)?"
    r"(?:\d+|ABS) (?P<name>[^@\s]+)@@?(?P<version>[A-Z]+_[\d.]+)$",
    re.M,
)
KINDS = {"FUNC": "function", "IFUNC": "function", "TLS": "tls_object"}
SECTIONS = {"function": ".text", "object": ".data", "tls_object": '.section .tbss,"awT",%nobits'}
WORD = 8  # bytes for each symbol; nobody reads them

# What newer headers of GCC and glibc call and manylinux_2_28 has not, hidden in each library that calls it.
SINCE = """
#include <new>
#include <sstream>
extern "C" { __attribute__((visibility("hidden"))) char __libc_single_threaded = 0; }  // counts by atomic operations
namespace std {
void __throw_bad_array_new_length() { throw bad_array_new_length(); }
}
template std::basic_stringstream<char>::basic_stringstream();
template std::basic_ostringstream<char>::basic_ostringstream();
"""
# As C23 has them, these read binary numbers, too; nobody of ours writes any.
SINCE_C23 = """
extern "C" {{ {type} plain_{name}(const char*, char**, int) __asm__("{name}");
__attribute__((visibility("hidden"))) {type} __isoc23_{name}(const char* text, char** end, int base) {{
  return plain_{name}(text, end, base);
}} }}
"""
C23 = {"strtol": "long", "strtoll": "long long", "strtoul": "unsigned long", "strtoull": "unsigned long long"}
SINCE_NAMES = (
    "_ZSt28__throw_bad_array_new_lengthv",
    *(f"_ZNSt7__cxx11{name}IcSt11char_traitsIcESaIcEEC{number}Ev"
      for name in ("18basic_stringstream", "19basic_ostringstream") for number in (1, 2)),
)  # fmt: skip


class Symbol(NamedTuple):
    """A symbol of a shared library, in its newest version that is old enough."""

    name: str
    kind: str  # a key of SECTIONS
    version: str  # "GLIBC_2.2.5"
    moved: bool  # it has a version that is too new as well


def run(*command: object) -> str:
    return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout


def number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.rpartition("_")[2].split("."))


def symbols(said: str) -> list[Symbol]:
    """Of what readelf says of a library, the symbols that manylinux_2_28 has."""
    found: dict[str, Symbol] = {}
    too_new = set()
    for match in SYMBOL.finditer(said):
        name, version = match["name"], match["version"]
        limit = NEWEST.get(version.partition("_")[0])
        if limit is None or name == version:  # glibc's own affairs, and the versions themselves
            continue
        if number(version) > limit:
            too_new.add(name)
        elif name not in found or number(version) > number(found[name].version):
            found[name] = Symbol(name, KINDS.get(match["kind"], "object"), version, False)
    return [symbol._replace(moved=name in too_new) for name, symbol in found.items()]


def own_library(symbol: Symbol) -> str | None:
    """The library that had a symbol of libc.so.6 before glibc 2.34."""
    if not symbol.moved:
        return None
    return next((name for begin, name in OWN_LIBRARIES.items() if symbol.name.startswith(begin)), None)


def assembler(found: Iterable[Symbol]) -> str:
    lines = ['.section .note.GNU-stack,"",%progbits']
    for symbol in found:
        lines += [SECTIONS[symbol.kind], f".globl {symbol.name}", f".type {symbol.name}, %{symbol.kind}"]
        lines += [f"{symbol.name}:", f".zero {WORD}"]
    return "\n".join([*lines, ""])


def version_script(found: Iterable[Symbol]) -> str:
    nodes: dict[str, list[str]] = {}
    for symbol in found:
        nodes.setdefault(symbol.version, []).append(symbol.name)
    return "".join(f"{version} {{ global: {'; '.join(names)}; }};\n" for version, names in nodes.items())


def stub(compiler: str, path: Path, found: list[Symbol]) -> Path:
    """A shared library of that name that has nothing but the symbols."""
    source, script = path.with_name(f"{path.name}.s"), path.with_name(f"{path.name}.map")
    source.write_text(assembler(found))
    script.write_text(version_script(found))
    names = (f"-Wl,-soname,{path.name}", f"-Wl,--version-script={script}")
    run(*compiler.split(), "-shared", "-nostdlib", *names, source, "-o", path)
    return path


def file_of(compiler: str, name: str) -> Path:
    """A file that the compiler's linker would find."""
    return Path(run(*compiler.split(), f"-print-file-name={name}").strip())


def archive(compiler: str, folder: Path) -> Path:
    """SINCE as an archive, of which the linker takes nothing where nothing is called."""
    source, made = folder / "since.cpp", folder / "libsince.a"
    hidden = "".join(f'asm(".hidden {name}");\n' for name in SINCE_NAMES)
    source.write_text(SINCE + hidden + "".join(SINCE_C23.format(name=name, type=C23[name]) for name in C23))
    run(*compiler.split(), "-std=c++17", "-O2", "-fPIC", "-c", source, "-o", source.with_suffix(".o"))
    made.unlink(missing_ok=True)
    run(run(*compiler.split(), "-print-prog-name=ar").strip(), "rcs", made, source.with_suffix(".o"))
    return made


def make(compiler: str, folder: Path) -> str:
    """Fills a folder with stubs of the libraries that this compiler links with. Returns the flags of a link by them."""
    folder.mkdir(parents=True, exist_ok=True)
    of = {
        name: symbols(run("readelf", "--wide", "--dyn-syms", file_of(compiler, name)))
        for name in ("libc.so.6", "libm.so.6", "libstdc++.so.6")
    }
    own: dict[str, list[Symbol]] = {}
    for symbol in of["libc.so.6"]:
        own.setdefault(own_library(symbol) or "libc.so.6", []).append(symbol)
    made = {name: stub(compiler, folder / name, found) for name, found in (of | own).items()}
    loader = re.findall(r"AS_NEEDED \( (\S+) \)", file_of(compiler, "libc.so").read_text())
    where_used = [*(made[name] for name in sorted(set(own) - {"libc.so.6"})), *loader]
    grouped = {
        "libstdc++.so": [made["libstdc++.so.6"], archive(compiler, folder)],
        "libm.so": [made["libm.so.6"]],
        "libc.so": [made["libc.so.6"], file_of(compiler, "libc_nonshared.a"), "AS_NEEDED (", *where_used, ")"],
    }
    for name, parts in grouped.items():
        (folder / name).write_text(f"GROUP ( {' '.join(map(str, parts))} )\n")
    return f"-L{folder}"
