"""The walk of a call's query: through which files it is handed on the way to its kernel, and how often back up."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

import sdpa

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = tuple(str(ROOT / folder) + os.sep for folder in ("sdpa", "dispatch", "kernels"))
MAX_FILES, MAX_CLIMBS = 8, 4  # of a call that is prepared; one climb more where a mask is fitted or a seed drawn

pytestmark = pytest.mark.usefixtures("nothing_remembered")


def walk(query: torch.Tensor, call) -> tuple[list[str], int]:
    """The files that `call` walks through, a file as often as it is entered, and the climbs.

    A frame counts where it has the query itself, in a tuple or list, or in an object of ours; a climb is a return into
    another file, or several in a row.
    """
    frames, stays, climbs, climbing = [], [], 0, False

    def file_of(frame) -> str:
        return os.path.realpath(frame.f_code.co_filename)

    def move(path: str, up: bool) -> None:
        nonlocal climbs, climbing
        if not stays or stays[-1] != path:
            climbs += up and not climbing
            climbing = up
            stays.append(path)

    def profile(frame, event: str, _: object) -> None:
        path = file_of(frame)
        if event == "call" and path.startswith(FOLDERS) and any(holds(v, query) for v in frame.f_locals.values()):
            frames.append(frame)
            move(path, up=False)
        elif event == "return" and frames and frames[-1] is frame:
            frames.pop()
            if frames:
                move(file_of(frames[-1]), up=True)

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return [path.removeprefix(str(ROOT) + os.sep) for path in stays], climbs


def holds(value: object, query: torch.Tensor, depth: int = 3) -> bool:
    if value is query:
        return True
    if not depth:
        return False
    if isinstance(value, (tuple, list)):
        return any(holds(item, query, depth - 1) for item in value)
    ours = type(value).__module__.startswith("sdpa")
    return ours and any(getattr(value, name, None) is query for name in ("q", "query"))


CALLS = {
    "plain": {},
    "bool mask": {"attn_mask": torch.ones(24, 24, dtype=torch.bool).tril()},
    "lengths": {"attn_mask": sdpa.Mask(lengths=torch.tensor([7, 24]))},
    "dropout": {"dropout_p": 0.1},
    "softcap": {"softcap": 3.0, "return_lse": True},
}


@pytest.mark.parametrize("name", CALLS)
def test_a_query_is_handed_straight_to_its_kernel(name):
    query, key, value = (torch.randn(2, 4, 24, 32) for _ in range(3))

    def call() -> object:
        return sdpa.scaled_dot_product_attention(query, key, value, **CALLS[name])

    # What is imported at the first call of a process is no part of the walk.
    sdpa.scaled_dot_product_attention(query.double(), key.double(), value.double())
    stays, climbs = walk(query, call)
    assert stays[0] == stays[-1] == "sdpa/functional.py" and "kernels/cpu/flash.py" in stays, stays
    assert stays.count("sdpa/validate.py") == 1, f"checked once, and not in turns with what is normalised: {stays}"
    gathers = name not in ("plain", "softcap")
    assert len(set(stays)) <= MAX_FILES and climbs <= MAX_CLIMBS + gathers, (len(set(stays)), climbs, stays)
    query.requires_grad_()  # by way of derivatives.py, which has the node
    stays, climbs = walk(query, call)
    assert len(set(stays)) <= MAX_FILES + 1 and climbs <= MAX_CLIMBS + gathers, (len(set(stays)), climbs, stays)


def test_a_query_that_is_recognised_stays_above():
    query, key, value = (torch.randn(2, 4, 24, 32) for _ in range(3))
    for _ in range(3):
        sdpa.scaled_dot_product_attention(query, key, value)
    stays, climbs = walk(query, lambda: sdpa.scaled_dot_product_attention(query, key, value))
    assert stays == ["sdpa/functional.py", "sdpa/entry.py", "sdpa/functional.py"] and climbs == 1
