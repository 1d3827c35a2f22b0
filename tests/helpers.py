"""What several test files share: calls of the command, tables of tuning, rows of contests, tensors, packed documents.

pytest finds it by `pythonpath` in pyproject.toml; fixtures are in conftest.py.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext

import torch
import yaml
from torch.autograd.graph import saved_tensors_hooks

from sdpa import philox
from sdpa.bench.contest import Entry, Row
from sdpa.bench.suites import SUITES
from sdpa.bench.timing import Timing
from sdpa.dispatch import device, tables, tuning
from sdpa.dispatch.catalog import by_name
from sdpa.problem import AttentionProblem, Tile

# the command


def invoke(arguments: tuple[str, ...], code: int):
    """What click's runner makes of a command that must end with `code`."""
    from click.testing import CliRunner

    from sdpa.cli.app import app

    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, (result.exit_code, result.output, result.exception)
    return result


def call(*arguments: str, code: int = 0) -> str:
    """Standard output of a command that must end with `code`."""
    return invoke(arguments, code).stdout


def complete_output(*arguments: str, code: int = 0) -> str:
    """Standard output and standard error of a command that must end with `code`."""
    result = invoke(arguments, code)
    return result.stdout + result.stderr


def complaint(*arguments: str, code: int = 2) -> str:
    """The one line on standard error of a command that must refuse."""
    result = invoke(arguments, code)
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("sdpa"), result.stderr
    return lines[0]


def python_calls(function) -> int:
    """How many Python functions one call enters, itself not counted: an overhead that no load changes."""
    entered = 0

    def count(frame, event, argument):
        nonlocal entered
        entered += event == "call"

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return entered - 1


# tensors of integers


def integers(*numbers: int, dtype: torch.dtype = torch.int32, device: str = "cpu") -> torch.Tensor:
    return torch.tensor(numbers, dtype=dtype, device=device)


# contests


def some_rows(suite: str = "gpu-forward", kernel: str = "triton_flash", few: int = 36) -> list[Row]:
    rows = []
    for number, problem in enumerate(SUITES[suite][:few]):
        fast, slow = Timing((1e-3 * (number + 1),)), Timing((2e-3 * (number + 1),))
        own = Entry(kernel, kernel, fast, fast.median, 1e-3, 1e-4, 4096)
        beside = (
            Entry("cudnn", "", slow, slow.median, 2e-3, 2e-4, 8192),
            Entry("fa4", "", fast, fast.median, 3e-3, 3e-4, 1024),
            Entry("math", reason="expected scores below 8 GB; got 9"),
        )
        rows.append(Row(suite, problem, own, beside))
    return rows


# tuning tables

PROBLEM = AttentionProblem("cpu", torch.float32, 1, 8, 8, 1024, 1024, 64, 64)
ON_GPU = AttentionProblem("cuda:0", torch.bfloat16, 16, 16, 16, 1024, 1024, 128, 128)
DEVICE_NAME = device.device_of("cpu").names[0]
# More than cpu_flash offers, for `several_tiles`.
CPU_TILES = (*by_name()["cpu_flash"].load().TILES, Tile(96, 64), Tile(192, 128), Tile(384, 512))


def entry(ms, **changes):
    sizes = {"B": 1, "H": 8, "Hkv": 8, "M": 1024, "N": 1024, "D": 64, "Dv": 64}
    return {"direction": "forward", "dtype": "float32", "mask": "none", **sizes, **changes, "ms": ms}


def table(*entries, **changes):
    header = {
        "schema": 1,
        "device": DEVICE_NAME,
        "date": "2026-01-31",
        "versions": {"torch": "2.13.0"},
        "command": "sdpa tune",
    }
    return {**header, "entries": list(entries), **changes}


def nearest(buckets, problem):
    """The bucket that speaks first for a problem, or None."""
    found = tuning.near(tables.Table("", "", buckets), problem)
    return min(found, key=lambda near: near.distance).bucket if found else None


def put(folder, data, name=DEVICE_NAME):
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.yaml"
    path.write_text(data if isinstance(data, str) else yaml.safe_dump(data))
    return path


# tensors, and documents packed one after the other

WIDE = torch.float64
# Sums of a few dozen float64 numbers of size 1, in another order.
CLOSE = {"rtol": 0.0, "atol": 1e-13}
OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def draw(*shape, dtype=WIDE, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=WIDE).to(dtype)


def qkv(
    B=2, H=3, M=9, N=11, D=8, *, Hkv=None, Dv=None, dtype=torch.float32, device="cpu", grad=False, seed=0, offset=0
):
    """query, key, value: the same numbers for the same sizes and seed; `offset` elements of memory lie before each.

    A file of tests that wants other sizes in all its calls binds them: `partial(helpers.qkv, B=1, H=2)`.
    """

    def drawn(number, *shape):
        values = draw(*shape, dtype=dtype, seed=3 * seed + number).to(device)
        if offset:
            values = torch.cat([values.new_zeros(offset), values.flatten()])[offset:].view(shape)
        return values.requires_grad_(grad)

    heads = H if Hkv is None else Hkv
    return [drawn(0, B, H, M, D), drawn(1, B, heads, N, D), drawn(2, B, heads, N, D if Dv is None else Dv)]


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


# Documents of 5, 0, 1 and 7 queries, 2 rows that belong to none, and other numbers of keys.
CU_Q, T_Q, MAX_Q = int32(0, 5, 5, 6, 13), 15, 7
CU_K, T_K, MAX_K = int32(0, 3, 7, 7, 16), 17, 9


def operands(own=False, H=4, Hkv=4, D=6, Dv=5, dtype=WIDE):
    """query, key, value, cu_q, cu_k, max_q, max_k; `own` is self-attention."""
    cu_k, T, longest = (CU_Q, T_Q, MAX_Q) if own else (CU_K, T_K, MAX_K)
    q, k, v = draw(T_Q, H, D), draw(T, Hkv, D, seed=1), draw(T, Hkv, Dv, seed=2)
    return [t.to(dtype).requires_grad_() for t in (q, k, v)], (CU_Q, cu_k, MAX_Q, longest)


def elsewhere(tensor):
    """The same numbers at an odd address."""
    return (
        torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)[1:].view(tensor.shape).copy_(tensor)
    )


# What hooks of saved tensors may do to where a tensor lies: name -> function.
MOVES = {
    "clone": torch.clone,
    "packed": lambda t: t.contiguous().clone(),
    "odd address": elsewhere,
    "apart": lambda t: torch.nn.functional.pad(t, (0, 8))[..., : t.shape[-1]],
    "every second": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "turned": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1) if t.dim() > 1 else t.clone(),
}


def hooked_gradients(attend, move, packed, grad_out):
    """Gradients of packed (B, rows, 3, H, D), without hooks, with hooks that move what is saved, without."""
    found = []
    for hook in (None, None, MOVES[move], MOVES[move], None, None):
        leaf = packed.clone().requires_grad_()
        with nullcontext() if hook is None else saved_tensors_hooks(lambda t: t, hook):
            out = attend(*(t.transpose(1, 2) for t in leaf.unbind(2)))
        out.backward(grad_out)
        found.append(leaf.grad)
    return found


def of_part(inputs):
    """The inputs with dropout's numbers of some heads, queries and keys of a larger call."""
    return inputs._replace(rng=philox.of_part(inputs.rng, inputs.q.shape[1] + 3, 2, 48, 32))
