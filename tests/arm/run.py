"""`make test-arm`: the CPU library for AArch64, cross-built, run in an emulator and modelled; a skip has its reason."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import model
import prepare
from prepare import EMULATOR, PYTHON, SITE, SYSTEM, TREE, Missing

CPU_TESTS = "tests/test_cpu_flash.py"
EMULATED_AT_ONCE = 2  # processors, each of which takes one of ours for minutes


class Machine(NamedTuple):
    """A processor of QEMU's, the instruction sets that must be found on it, and what is run there."""

    name: str
    instruction_sets: str
    check: str  # options of `sdpa check`; empty: not run
    tests: str  # pytest's -k


# Every instruction set is tested once; every branch of the choice is taken. Torch's own vectors of SVE, which the tests
# compare with, are emulated several times slower than those of NEON.
MACHINES = (
    Machine("neoverse-n1", "scalar,neon", "--quick --kernel cpu_flash", "neon"),
    Machine(
        "max,sve=off", "scalar,neon,neonbf16", "--quick --kernel cpu_flash --only bfloat16", "neonbf16 and bfloat16"
    ),
    Machine("max", "scalar,neon,neonbf16", "", "neonbf16 and test_sizes and bfloat16"),
)


def emulate(machine: Machine) -> None:
    environment = {"PYTHONPATH": f"{TREE}:{SITE}", "PYTHONHOME": f"{SYSTEM}/usr"}
    given = [part for name, value in environment.items() for part in ("-E", f"{name}={value}")]
    python = (EMULATOR, "-cpu", machine.name, "-L", SYSTEM, *given, SYSTEM / f"usr/bin/python{PYTHON}")
    prepare.run(
        *python,
        "tests/arm/inside.py",
        machine.instruction_sets,
        machine.check,
        CPU_TESTS,
        "-k",
        machine.tests,
        cwd=TREE,
    )


def stage(name: str, job: Callable[[], None]) -> None:
    start = time.monotonic()
    job()
    print(f"arm: {name}: {time.monotonic() - start:.0f} s", flush=True)


def main() -> None:
    prepares = sys.argv[1:] == ["--prepare"]
    try:
        stage("tools", prepare.install_tools)
        stage("downloads", prepare.download)
    except Missing as missing:
        print(f"arm: skipped: {missing}")
        sys.exit(1 if prepares else 0)
    if prepares:
        return
    try:
        stage("cross build", prepare.build)
        stage("inner loops, modelled by llvm-mca", model.check)
        with ThreadPoolExecutor(EMULATED_AT_ONCE) as pool:
            list(pool.map(lambda machine: stage(f"emulated {machine.name}", lambda: emulate(machine)), MACHINES))
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"arm: failed: {' '.join(map(str, error.cmd))}") from error


if __name__ == "__main__":
    sys.exit(main())
