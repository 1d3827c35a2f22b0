"""Compresses the device code in objects that nvcc made: zip's window is too narrow to see that kernels repeat."""

from __future__ import annotations

import os
import struct
import subprocess
from pathlib import Path

SECTION = ".nv_fatbin"
HEADER, IMAGE = struct.Struct("<IHHQ"), struct.Struct("<HHIQ")  # magic, version, size, length; kind, version, the same
MAGIC, ELF = 0xBA55ED50, 2


def cubin(fatbin: bytes) -> bytes | None:
    """The one ELF file in a fat binary; None where there is something else, or it is compressed already."""
    if len(fatbin) < HEADER.size + IMAGE.size:
        return None
    magic, _, start, length = HEADER.unpack_from(fatbin)
    kind, _, size, image = IMAGE.unpack_from(fatbin, start)
    code = fatbin[start + size : start + size + image]
    alone = magic == MAGIC and kind == ELF and length == size + image
    return code if alone and code[:4] == b"\x7fELF" else None


def compress(path: Path, tool: Path, architecture: str) -> None:
    """The object with its code compressed, as nvcc itself would with -compress-all. Its time stays: ninja would compile
    an object again that is newer than its record."""
    before = path.stat()
    raw, code, packed = (path.with_suffix(f".{end}") for end in ("raw", "cubin", "fatbin"))
    try:
        subprocess.run(["objcopy", "--dump-section", f"{SECTION}={raw}", path], check=True, capture_output=True)
        found = cubin(raw.read_bytes())
        if found is None:
            return
        code.write_bytes(found)
        image = f"--image3=kind=elf,sm={architecture},file={code}"
        command = [tool, "--64", f"--create={packed}", "--compress-all", image]
        done = subprocess.run([*command, "--compress-mode=size"], check=False, capture_output=True)
        if done.returncode:  # before CUDA 12.8 there is one way
            subprocess.run(command, check=True)
        subprocess.run(["objcopy", "--update-section", f"{SECTION}={packed}", path], check=True)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    finally:
        for left in (raw, code, packed):
            left.unlink(missing_ok=True)
