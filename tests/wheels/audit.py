"""What auditwheel says of a wheel, in one word; run by the Python that has it: audit.py WHEEL."""

from __future__ import annotations

import sys
from pathlib import Path

from auditwheel.wheel_abi import analyze_wheel_abi
from auditwheel.wheeltools import get_wheel_architecture, get_wheel_libc

# Loaded by `import torch` before ours, and never copied into a wheel.
TORCH = frozenset({"libtorch_cpu.so", "libtorch_cuda.so"})


def main(path: Path) -> None:
    facts = analyze_wheel_abi(
        get_wheel_libc(path.name),
        get_wheel_architecture(path.name),
        path,
        TORCH,
        disable_isa_ext_check=False,
        allow_graft=False,
    )
    print(facts.overall_policy.name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
