"""Whether a recorded call does what Triton's launcher did: tried on the device once for each compiled kernel, where the
recorded launches of a release of Triton were never seen on a GPU.

A trial runs the recorded call on the tensors of the call that was just made, waits for the device, and compares bits.
Kernels give the same bits twice. Where they differ, no further call is recorded in this process: slower, never wrong.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor


class Trials:
    """What came out of them."""

    def __init__(self) -> None:
        self.passed: WeakSet[Any] = WeakSet()  # compiled kernels
        self.failed = False

    def allow(self, again: Any, given: Sequence[Tensor], results: Any) -> bool:
        """Whether `again`, which was recorded of the call of `given`, may be kept; `results` are that call's."""
        if self.failed:
            return False
        if all(kernel in self.passed for kernel in again.kernels):
            return True
        if torch.cuda.is_current_stream_capturing():  # into a graph, where nothing can be compared
            return False
        try:
            found = again(*given)
        except torch.OutOfMemoryError:  # for two results at a time
            return False
        except Exception:  # of a launcher that is called otherwise
            found = ()
        if found is None:  # somebody watches the launches
            return False
        if not same_bits(found, results):
            self.failed = True
            warnings.warn(
                "a launch that was recorded gave other results than Triton's own; Triton launches every call",
                stacklevel=2,
            )
            return False
        self.passed.update(again.kernels)
        return True


def same_bits(found: Any, wanted: Any) -> bool:
    """Whether two tensors, or the tensors of two tuples, are alike bit by bit."""
    if isinstance(found, tuple) and isinstance(wanted, tuple):
        return len(found) == len(wanted) and all(map(same_bits, found, wanted))
    if isinstance(found, Tensor) and isinstance(wanted, Tensor):
        return same_tensor(found, wanted)
    return found is None and wanted is None


def same_tensor(one: Tensor, other: Tensor) -> bool:
    if (one.shape, one.stride(), one.dtype) != (other.shape, other.stride(), other.dtype):
        return False
    return torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))


TRIALS = Trials()
