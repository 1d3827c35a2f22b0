"""What `make wheels` is made of: the stubs of an older glibc, compressed device code, and the checks of a wheel."""

from __future__ import annotations

import ctypes
import importlib
import re
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent / "wheels"
LINKS = sys.platform == "linux" and all(map(shutil.which, ("g++", "readelf")))
PLATFORM = "manylinux_2_28_x86_64"


def module(name: str):
    """A file of tests/wheels, which import each other by their bare names."""
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))


glibc, fatbin, check, install = map(module, ("glibc", "fatbin", "check", "install"))

SAID = """
   Num:    Value          Size Type    Bind   Vis      Ndx Name
     1: 0000000000000000     0 FUNC    GLOBAL DEFAULT  UND asked@GLIBC_2.2.5 (2)
     2: 0000000000000000     0 OBJECT  GLOBAL DEFAULT  ABS GLIBC_2.28@@GLIBC_2.28
     3: 0000000000010000   100 FUNC    GLOBAL DEFAULT   15 exp@GLIBC_2.2.5
     4: 0000000000010000   100 IFUNC   GLOBAL DEFAULT   15 exp@@GLIBC_2.29
     5: 0000000000010000   100 FUNC    GLOBAL DEFAULT   15 twice@GLIBC_2.2.5
     6: 0000000000010000   100 IFUNC   WEAK   DEFAULT   15 twice@@GLIBC_2.28
     7: 0000000000010000     1 OBJECT  GLOBAL DEFAULT   25 __libc_single_threaded@@GLIBC_2.32
     8: 0000000000010000     8 TLS     GLOBAL DEFAULT   20 errno@@GLIBC_PRIVATE
     9: 0000000000010000     8 TLS     GLOBAL DEFAULT   20 _ZSt15__once_callable@@GLIBCXX_3.4.11
    10: 0000000000010000    40 FUNC    GLOBAL DEFAULT [VARIANT_PCS] 15 marked@@GLIBC_2.17
    11: 0000000000010000    40 FUNC    GLOBAL DEFAULT   15 pthread_join@GLIBC_2.2.5
    12: 0000000000010000    40 FUNC    GLOBAL DEFAULT   15 pthread_join@@GLIBC_2.34
    13: 0000000000010000    40 FUNC    GLOBAL DEFAULT   15 pthread_self@@GLIBC_2.2.5
    14: 0000000000010000    40 FUNC    GLOBAL HIDDEN    15 inside@@GLIBC_2.2.5
"""


def test_of_each_symbol_the_newest_version_that_is_old_enough():
    found = {symbol.name: symbol for symbol in glibc.symbols(SAID)}
    assert {name: symbol.version for name, symbol in found.items()} == {
        "exp": "GLIBC_2.2.5", "twice": "GLIBC_2.28", "_ZSt15__once_callable": "GLIBCXX_3.4.11", "marked": "GLIBC_2.17",
        "pthread_join": "GLIBC_2.2.5", "pthread_self": "GLIBC_2.2.5",
    }  # fmt: skip
    assert {name for name, symbol in found.items() if symbol.moved} == {"exp", "pthread_join"}
    assert found["_ZSt15__once_callable"].kind == "tls_object" and found["twice"].kind == "function"


def test_what_moved_into_libc_is_in_its_library_of_old():
    own = {symbol.name: glibc.own_library(symbol) for symbol in glibc.symbols(SAID)}
    assert own["pthread_join"] == "libpthread.so.0" and own["exp"] is None
    assert own["pthread_self"] is None, "which libc.so.6 always had"


# Each line uses what manylinux_2_28 has in another version, in another library, or not at all.
SOURCE = """
#include <dlfcn.h>
#include <pthread.h>
#include <cmath>
#include <memory>
#include <sstream>
extern "C" double power(double x) { return std::exp(x); }
extern "C" int length(int number) { std::ostringstream out; out << number; return out.str().size(); }
extern "C" int refuses(long size) try { delete[] new int[size]; return 0; } catch (const std::bad_alloc&) { return 1; }
extern "C" int join(pthread_t thread) { return pthread_join(thread, nullptr); }
static void* opened() { return dlopen("nowhere", RTLD_NOW); }
static void* run(void* of) { return of; }
extern "C" int threads() {
  auto kept = std::make_shared<int>(3);
  auto other = kept;
  pthread_t thread;
  return pthread_create(&thread, nullptr, run, nullptr) + join(thread) + *other + (opened() != nullptr);
}
"""
FLAGS = ("-shared", "-fPIC", "-O1", "-Wl,--as-needed,-z,defs")


def link(folder: Path, source: str, *flags: str) -> subprocess.CompletedProcess:
    (folder / "library.cpp").write_text(source)
    command = ["g++", *FLAGS, folder / "library.cpp", "-o", folder / "library.so", "-lm", *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def too_new(path: Path) -> list[str]:
    said = subprocess.run(["readelf", "-W", "-V", path], capture_output=True, text=True, check=True).stdout
    needed = set(re.findall(r"\b((?:GLIBC|GLIBCXX|CXXABI)_[\d.]+)", said))
    return sorted(v for v in needed if glibc.number(v) > glibc.NEWEST[v.partition("_")[0]])


@pytest.fixture(scope="module")
def stubs(tmp_path_factory) -> str:
    if not LINKS:
        pytest.skip("links ELF files: no g++ or no readelf here")
    return glibc.make("g++", tmp_path_factory.mktemp("stubs"))


def test_a_library_that_is_linked_with_stubs_needs_nothing_newer(stubs, tmp_path):
    done = link(tmp_path, SOURCE, *stubs.split())
    assert done.returncode == 0, done.stderr
    assert too_new(tmp_path / "library.so") == []
    said = subprocess.run(["readelf", "-d", tmp_path / "library.so"], capture_output=True, text=True, check=True).stdout
    needed = set(re.findall(r"NEEDED.*\[(.*)\]", said))
    assert {"libstdc++.so.6", "libm.so.6", "libc.so.6"} <= needed
    if Path(stubs[2:], "libpthread.so.0").exists():
        assert {"libpthread.so.0", "libdl.so.2"} <= needed, "where glibc 2.28 has their functions"


def test_a_library_that_is_linked_with_stubs_runs(stubs, tmp_path):
    assert link(tmp_path, SOURCE, *stubs.split()).returncode == 0
    library = ctypes.CDLL(str(tmp_path / "library.so"))
    library.power.restype, library.power.argtypes = ctypes.c_double, [ctypes.c_double]
    library.refuses.argtypes = [ctypes.c_long]
    assert library.power(1.0) == pytest.approx(2.718281828459045, abs=1e-15)
    assert (library.length(12345), library.refuses(-1), library.threads()) == (5, 1, 3)


def test_without_stubs_it_would_need_the_glibc_that_is_here(stubs, tmp_path):
    newest = glibc.run("readelf", "--wide", "--dyn-syms", glibc.file_of("g++", "libc.so.6"))
    if "GLIBC_2.34" not in newest:
        pytest.skip("this glibc is older than 2.34")
    assert link(tmp_path, SOURCE).returncode == 0
    assert "GLIBC_2.34" in too_new(tmp_path / "library.so")


def test_what_an_older_glibc_has_not_fails_the_link(stubs, tmp_path):
    source = 'extern "C" int close_range(unsigned, unsigned, int); extern "C" int f() { return close_range(9, 9, 0); }'
    done = link(tmp_path, source, *stubs.split())
    assert done.returncode != 0 and "close_range" in done.stderr


def test_an_empty_link_takes_nothing_of_what_is_missing(stubs, tmp_path):
    assert link(tmp_path, 'extern "C" int f() { return 1; }', *stubs.split()).returncode == 0
    assert b"stringstream" not in (tmp_path / "library.so").read_bytes()


def fat_binary(code: bytes, kind: int = fatbin.ELF) -> bytes:
    image = fatbin.IMAGE.pack(kind, 0x101, fatbin.IMAGE.size, len(code)) + code
    return fatbin.HEADER.pack(fatbin.MAGIC, 1, fatbin.HEADER.size, len(image)) + image


def test_device_code_is_found_where_it_is_plain():
    code = b"\x7fELF" + b"machine code"
    assert fatbin.cubin(fat_binary(code)) == code
    assert fatbin.cubin(fat_binary(b"(\xb5/\xfd compressed")) is None, "already compressed"
    assert fatbin.cubin(fat_binary(code, kind=1)) is None, "PTX"
    longer = bytearray(fat_binary(code))
    struct.pack_into("<Q", longer, 8, len(longer))
    assert fatbin.cubin(bytes(longer)) is None, "more than one image"
    assert fatbin.cubin(b"") is None


FILES = ("sdpa/__init__.py", "sdpa/kernels/metal/mask.metal", *check.CPU_LIBRARIES)


def wheel(folder: Path, *more: str, without: str = "", library: bytes = b"code", tag: str = f"py3-none-{PLATFORM}"):
    path = folder / f"sdpa-0.1.0-py3-none-{PLATFORM}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in {*FILES, *more} - {without}:
            archive.writestr(name, library if name.endswith(".so") else b"text")
        archive.writestr("sdpa-0.1.0.dist-info/WHEEL", f"Wheel-Version: 1.0\nTag: {tag}\n")
    return path


def test_a_good_wheel_passes(tmp_path):
    good = wheel(tmp_path)
    assert check.contents(good) == "5 files; libsdpa_cpu.so, libsdpa_operators.so"
    assert check.tag(good) == f"py3-none-{PLATFORM}" and check.size(good) == "0.00 MB"
    assert check.no_paths(good) == "none in 2 libraries"


def test_a_wheel_to_be_published_has_the_cuda_library(tmp_path):
    with pytest.raises(check.Failed, match="has no CUDA library: it was built without nvcc"):
        check.with_cuda(wheel(tmp_path))
    whole = wheel(tmp_path, check.CUDA_LIBRARY)
    assert check.with_cuda(whole) == "the CUDA library is there"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"without": FILES[-1]}, "libsdpa_operators.so is missing"),
        ({"more": "sdpa/kernels/cpu/forward.cpp"}, "it holds sdpa/kernels/cpu/forward.cpp"),
        ({"more": "sdpa/kernels/cpu/libother.so"}, "it holds sdpa/kernels/cpu/libother.so"),
        ({"more": "sdpa/tests/test_a.py"}, "it holds sdpa/tests/test_a.py"),
        ({"more": "kernels/__init__.py"}, "it holds kernels/__init__.py"),
    ],
)
def test_contents_that_do_not_belong(tmp_path, changes, said):
    more = (changes.pop("more"),) if "more" in changes else ()
    with pytest.raises(check.Failed, match=said):
        check.contents(wheel(tmp_path, *more, **changes))


def test_paths_tags_and_sizes_that_do_not_fit(tmp_path, monkeypatch):
    for path in (b"/home/somebody/torch/include/x.h", bytes(check.ROOT) + b"/kernels/cpu/mask.h"):
        with pytest.raises(check.Failed, match="libraries name /"):
            check.no_paths(wheel(tmp_path, library=b"\0at " + path + b"\0"))
    with pytest.raises(check.Failed, match="its metadata say py3-none-linux_x86_64"):
        check.tag(wheel(tmp_path, tag="py3-none-linux_x86_64"))
    monkeypatch.setattr(check, "LARGEST", 10)
    with pytest.raises(check.Failed, match=r"MB, limit"):
        check.size(wheel(tmp_path))


def test_a_tag_may_promise_no_more_than_the_symbols_hold():
    assert check.honest(PLATFORM, "manylinux_2_27_x86_64") and check.honest(PLATFORM, PLATFORM)
    for found in ("manylinux_2_34_x86_64", "linux_x86_64", "manylinux_2_27_aarch64"):
        with pytest.raises(check.Failed, match=f"{PLATFORM}, and by its symbols it is {found}"):
            check.honest(PLATFORM, found)
    with pytest.raises(check.Failed):
        check.honest("linux_x86_64", "manylinux_2_27_x86_64")


def test_this_python_is_among_those_that_are_tried():
    there, missing = install.pythons()
    assert install.own() in {python.version for python in there}
    assert {python.version for python in there} | set(missing) == {f"3.{minor}" for minor in install.MINORS}


def test_links_lead_to_what_a_wheel_requires_and_nothing_else(tmp_path):
    path = tmp_path / f"sdpa-0.1.0-py3-none-{PLATFORM}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        wanted = "Requires-Dist: pytest\nRequires-Dist: ruff; extra == 'test'\n"
        archive.writestr(
            "sdpa-0.1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: sdpa\nVersion: 0.1.0\n{wanted}"
        )
    linked = {entry.name for entry in install.link_torch(path, tmp_path / "site").iterdir()}
    assert {"_pytest", "pluggy", "packaging"} <= linked, "what pytest requires, too"
    assert not {"ruff", "torch", "sdpa"} & linked
