"""What runs a repeated call, in C++: from its arguments to the driver, or to the CPU's library.

    recognise   finds what was prepared for a call like one before    entry.py, calls.py, derivatives.py
    Repeated    one direction of a prepared call                      calls.py
    Launches    its recorded launches, by addresses                   kernels/triton/recorded.py
    LibraryCall the same, recorded by a library of ours               kernels/cpu/flash.py, kernels/cuda/flash.py
    Operator    torch's own operator, where the kernel is one         calls.py

Everything that they do is done in Python, too, where a call is not recognised. Without `_native` (`BUILT` is false)
that is so for every call: slower, never wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from sdpa.installed import cut_off


class Recording(NamedTuple):
    """What `Launches` are made of."""

    given: int  # how many tensors it is called with
    device: int  # of the tensors made; -1: a CPU
    forms: tuple[tuple[Any, ...], ...]  # of the tensors made, as `empty` takes them
    empty: Callable[..., Tensor]
    # For each launch: another way of (tensors, addresses, stream), or None; and the launch itself, or None. That is
    # (function, handle), both addresses, for a library's function of (handle, addresses of all tensors, stream); or
    # what `driver_launch` makes for the driver.
    steps: tuple[tuple[Callable[..., object] | None, tuple[Any, ...] | None], ...]
    # (read, made) -> what the call returns; or the numbers of tensors made, -1 for None.
    finish: tuple[int, ...] | Callable[[Sequence[Tensor], Sequence[Tensor]], Any]
    watched: Callable[[], bool]  # whether somebody wants to see launches
    low: int  # below this address a tensor may have no memory
    check_memory: Callable[[Sequence[Tensor]], object]  # raises, or returns false, where it has none
    unseen: tuple[list[Any], ...] = ()  # somebody wants to see launches where one is not empty
    copy: Callable[[Sequence[Tensor]], Sequence[Tensor]] | None = None  # those given, as kernels read them
    fills: tuple[tuple[int, float], ...] = ()  # numbers of tensors made, and what they hold before the first launch
    unaligned: tuple[bool, ...] | bool | None = None  # of all tensors; None: all aligned; False: wherever they lie
    stream_of: Callable[[int], int] | None = None  # the current stream of a device
    # Where parts of the last tensor made begin, in bytes: each is one tensor more. Launches then have no other way.
    parts: tuple[int, ...] = ()


if TYPE_CHECKING:
    BUILT: bool
    MAX_TENSORS: int  # of recorded launches
    MAX_WORDS: int  # of 8 bytes, in the arguments of one launch
    MAX_MAPS: int  # tensor maps among them

    class Launches:
        """Recorded launches, for tensors of the form of those that they were recorded with."""

        def __init__(self, recording: Recording) -> None: ...

        def __call__(self, *given: Tensor) -> Any:
            """What the call returns; None where the ordinary way must be taken."""

    class Operator:
        """One of torch's own operators with fixed options."""

        def __init__(
            self,
            function: Callable[..., Sequence[Any]],  # its first result is the output
            options: tuple[Any, ...],
            keywords: dict[str, Any],
            /,
        ) -> None: ...

        def __call__(self, *tensors: Tensor) -> tuple[Tensor]:
            """(output,)."""

    class Repeated:
        """One direction of a prepared call. It runs `again` where that is there and returns something, else
        `first_time`. An exception goes to `recovered`."""

        again: Callable[..., Any] | None
        choice: Any  # which becomes the thread's last choice

        def __call__(self, *tensors: Tensor) -> Any: ...

        def first_time(self, tensors: Sequence[Tensor]) -> Any:
            raise NotImplementedError

        def recovered(self, error: Exception, tensors: Sequence[Tensor]) -> Any:
            raise NotImplementedError

    def recognise(*call: Any) -> Any:
        """The results of a call like one before, else NotImplemented. `call` is (kind, (query, key, value), options,
        returns_lse, kernel, places)."""

    def recognise_backward(
        call: Any, saved: Sequence[Tensor], grad_out: Tensor, grad_lse: Tensor | None, bias: int | None
    ) -> Any:
        """The gradients of what `derivatives.Attention` was given, where the backward is like one before, else None.
        `call` is a `prepared.Prepared`; `saved` are the tensors of its form, out and lse. Those of q, k and v alone are
        returned, and that of the tensor in place `bias`."""

    def configure(**parts: Any) -> None:
        """Hand over what the four are made of, by name."""

else:
    try:
        if cut_off(Path(__file__).with_name("_native.abi3.so")):
            raise ImportError
        from sdpa.repeated._native import (
            MAX_MAPS,
            MAX_TENSORS,
            MAX_WORDS,
            Launches,
            Operator,
            Repeated,
            configure,
            recognise,
            recognise_backward,
        )

        BUILT = True
    except ImportError:  # not built, not whole, or for another machine
        from sdpa.repeated.in_python import (  # noqa: F401
            MAX_MAPS,
            MAX_TENSORS,
            MAX_WORDS,
            Launches,
            Operator,
            Repeated,
            configure,
            recognise,
            recognise_backward,
        )

        BUILT = False


class LibraryCall(Launches):
    """A call that a library of ours recorded, and keeps until this object is gone: it is run again by addresses. The
    operator itself is called where a profiler watches, for tensors without memory, and for its errors."""

    __slots__ = ("address", "forget")

    def __init__(self, recording: Recording, address: int, forget: Callable[[int], object]) -> None:
        self.address, self.forget = address, forget
        super().__init__(recording)

    def __del__(self) -> None:
        self.forget(self.address)


configure(data_ptr=Tensor.data_ptr, get_device=Tensor.get_device)
