"""What has to be there before anything else is imported: a torch that is new enough, and our libraries, whole."""

from __future__ import annotations

import re
import struct
import warnings
from importlib.util import find_spec
from pathlib import Path

OLDEST_TORCH = (2, 10)
NEEDED = "sdpa needs torch 2.10 or newer"
LIBRARIES = {
    "sdpa.kernels": ("cpu/libsdpa_cpu.so", "the CPU library"),
    "sdpa.repeated": ("_native.abi3.so", "the library of repeated calls"),
}
OPTIONAL = "sdpa.repeated"  # not built where there are no headers of Python's
ELF, HEADER = b"\x7fELF", 64  # bytes of a 64-bit file's header
# In it: where the table of sections is; the size of an entry and their number.
TABLE, ENTRIES = struct.Struct("<40xQ"), struct.Struct("<58xHH")


def require_torch(found: str | None) -> None:
    """Raises where torch is absent or older than our libraries can be loaded by."""
    if found is None:
        raise ImportError(f"{NEEDED}, and there is none: pip install 'torch>=2.10'")
    match = re.match(r"(\d+)\.(\d+)", found)
    if match is not None and tuple(map(int, match.groups())) < OLDEST_TORCH:
        raise ImportError(f"{NEEDED}, and got {found}: pip install --upgrade 'torch>=2.10'")


def require_mapped() -> None:
    """Raises in the folder of sources, where `sdpa.dispatch` and others lie beside `sdpa` until a build links them."""
    if find_spec("sdpa.dispatch") is None:
        sources = Path(__file__).resolve().parent
        raise ImportError(
            f"Python looks into the current folder first and found sdpa's sources, {sources}, in place of the "
            "installed package: start it in another folder, or run make there"
        )


def torch_version() -> str | None:
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return None
    return str(torch.__version__)


def cut_off(library: Path) -> bool:
    """Whether a file ends before its table of sections, which is the last thing in it: loading it would end the process
    by a bus error. What is no ELF file is left to the loader."""
    if not library.exists():
        return False
    with library.open("rb") as file:
        head = file.read(HEADER)
    if head[:4] != ELF[: len(head)]:
        return False
    if len(head) < HEADER:
        return True
    (start,), (size, count) = TABLE.unpack_from(head), ENTRIES.unpack_from(head)
    return library.stat().st_size < start + size * count


def broken(library: Path, name: str) -> str | None:
    """Why a library cannot be loaded, and what to do, in one sentence; None where it is whole as far as can be seen."""
    if not library.exists():
        return f"{name} was not built: {library} does not exist; {remedy()}"
    return f"{name} is not whole: {library} was cut off; {remedy()}" if cut_off(library) else None


def remedy() -> str:
    checkout = Path(__file__).resolve().parent.parent
    if (checkout / "setup.py").exists():
        return f"build it: python setup.py build_ext --inplace in {checkout}"
    return "install sdpa again: pip install --force-reinstall --no-deps sdpa"


def warn_of_broken() -> None:
    """Once, at the first import: without its libraries sdpa is right all the same, and slower."""
    for package, (file, name) in LIBRARIES.items():
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            continue
        library = Path(spec.origin).parent / file
        reason = broken(library, name)
        if reason is not None and (library.exists() or package != OPTIONAL):
            warnings.warn(f"sdpa is slower than it could be: {reason}", stacklevel=2)


require_mapped()
require_torch(torch_version())
warn_of_broken()
