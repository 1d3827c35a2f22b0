"""What `import sdpa` costs and loads, and that a broken library or a missing package is a reason and not a crash."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import sdpa

ROOT = Path(__file__).resolve().parent.parent
# `import sdpa` on top of torch; the README's promise. Several tries, because a busy machine is not the library's fault.
IMPORT_SECONDS = 0.15
TRIES = 5


def fresh(code: str, **environment: str) -> str:
    """Standard output of a fresh interpreter, with variables of the environment beside those of this process."""
    environ = os.environ | environment
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environ)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_is_quick(tmp_path):
    """As users import it, whose interpreter keeps the bytecode that the first import makes."""
    kept = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    code = "import torch, time; start = time.perf_counter(); import sdpa; print(time.perf_counter() - start)"
    assert min(float(fresh(code, **kept)) for _ in range(TRIES)) <= IMPORT_SECONDS


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads the loaded libraries from /proc")
def test_import_loads_no_library_but_torchs():
    code = "import torch; before = open('/proc/self/maps').read(); import sdpa\n"
    code += "print('libsdpa' in open('/proc/self/maps').read())"
    assert fresh(code) == "False"


def test_modules_are_imported_by_who_asks_for_them():
    code = "import sys, torch, sdpa; print(any(f'sdpa.{name}' in sys.modules for name in ('nn', 'bench')),\n"
    code += "{'accelerate', 'restore', 'warm_up'} <= set(dir(sdpa)))\n"
    code += "model = torch.nn.MultiheadAttention(8, 2); report = sdpa.accelerate(model)\n"
    code += "print(type(model).__module__, sdpa.restore(model), type(model).__module__)\n"
    code += "from sdpa import *; import sdpa.nn; print(accelerate is sdpa.nn.accelerate, restore is sdpa.nn.restore)\n"
    code += "print(hasattr(sdpa, 'accelerated'), warm_up is sdpa.warm_up is sdpa.bench.warm_up.warm_up)"
    first, swapped, same, other = fresh(code).splitlines()
    assert first == "False True" and swapped == "sdpa.nn.attention ['(the model)'] torch.nn.modules.activation"
    assert same == "True True" and other == "False True"


def test_names_that_are_listed_are_the_public_ones():
    code = "import sdpa; print([name for name in dir(sdpa) if not name.startswith('__')])"
    assert fresh(code) == str(sorted([*sdpa.__all__, "distributed", "integrations", "nn"]))
    assert "__version__" in dir(sdpa)


def test_packages_are_reached_by_their_names():
    """Without an import of their own, and not before."""
    code = "import sys, sdpa; names = ['nn', 'integrations', 'distributed']\n"
    code += "print(any(f'sdpa.{n}' in sys.modules for n in names), all(n in dir(sdpa) for n in names))\n"
    code += "print(sdpa.nn.MultiheadAttention(8, 2).embed_dim, sdpa.integrations.__name__, hasattr(sdpa, 'nnn'))\n"
    code += "from torch import nn; from sdpa import *; print(nn.__name__)"
    assert fresh(code).splitlines() == ["False True", "8 sdpa.integrations False", "torch.nn"]


def test_triton_is_not_needed():
    code = "import sys; sys.modules['triton'] = None; import torch, sdpa; q = torch.randn(1, 2, 5, 8)\n"
    code += "sdpa.scaled_dot_product_attention(q, q, q); print(sdpa.last_choice().kernel.name)"
    assert fresh(code) == "cpu_flash"


def test_nothing_of_other_devices_is_imported_for_a_cpu():
    """Not by the import, nor by calls and explanations on a CPU."""
    code = "import sys, torch, sdpa; q = torch.randn(1, 2, 5, 8, requires_grad=True)\n"
    code += "sdpa.scaled_dot_product_attention(q, q, q).sum().backward(); sdpa.explain(q, q, q)\n"
    code += "names = ('sdpa.kernels.metal', 'sdpa.kernels.vendor.mps', 'sdpa.kernels.triton', 'sdpa.kernels.cuda')\n"
    code += "print([name for name in sys.modules if name.startswith(names)])"
    assert fresh(code) == "[]"


@pytest.mark.parametrize("content", [None, b"not a library"], ids=["missing", "broken"])
def test_library_that_does_not_load_is_a_reason(tmp_path, content):
    path = tmp_path / "libsdpa_cpu.so"
    if content is not None:
        path.write_bytes(content)
    code = (
        "import torch, sdpa; from pathlib import Path; from sdpa.kernels.cpu import library\n"
        f"library.LIBRARY = Path({str(path)!r}); q = torch.randn(1, 2, 5, 8)\n"
        "sdpa.scaled_dot_product_attention(q, q, q); print(sdpa.last_choice().kernel.name)\n"
        "print(sdpa.explain(q, q, q))"
    )
    chosen, *explanation = fresh(code).splitlines()
    assert chosen != "cpu_flash"
    assert any("cpu_flash" in line and "refused" in line and path.name in line for line in explanation)


def test_an_instruction_set_that_is_not_there_is_an_error():
    """Each time, and not another kernel in silence."""
    code = (
        "import os; os.environ['SDPA_CPU_ISA'] = 'mmx'; import torch, sdpa; q = torch.randn(1, 2, 5, 8)\n"
        "for call in (sdpa.explain, sdpa.scaled_dot_product_attention, sdpa.scaled_dot_product_attention):\n"
        "    try: call(q, q, q)\n"
        "    except ValueError as error: print(error)"
    )
    lines = fresh(code).splitlines()
    assert len(lines) == 3
    assert all("SDPA_CPU_ISA" in line and "'mmx'" in line and "scalar" in line for line in lines)


def test_version_is_said_once():
    assert f'\nversion = "{sdpa.__version__}"\n' in (ROOT / "pyproject.toml").read_text()
