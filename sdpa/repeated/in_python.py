"""What stands for `repeated._native` where that was not built: no call is recognised, and no launch is recorded."""

from __future__ import annotations

from typing import Any

from torch import Tensor

PARTS: dict[str, Any] = {}
MAX_TENSORS = MAX_WORDS = MAX_MAPS = 0  # there is no room for any launch


def configure(**parts: Any) -> None:
    PARTS.update(parts)


def recognise(*_: object) -> Any:
    return NotImplemented


def recognise_backward(*_: object) -> Any:
    return None


class Launches:
    """Never made: `repeated.BUILT` is asked before."""


class Operator:
    """One of torch's own operators, as `repeated.Operator` has it."""

    def __init__(self, function: Any, options: Any, keywords: Any) -> None:
        self.function, self.options, self.keywords = function, options, keywords

    def __call__(self, *tensors: Tensor) -> Any:
        return (self.function(*tensors, *self.options, **self.keywords)[0],)


class Repeated:
    """One direction of a prepared call, as `repeated.Repeated` has it."""

    again: Any = None
    choice: Any = None

    def __call__(self, *tensors: Tensor) -> Any:
        if self.choice is not None:
            PARTS["last"].choice = self.choice
        try:
            found = None if self.again is None else self.again(*tensors)
        except Exception as error:
            return self.recovered(error, tensors)
        return self.first_time(tensors) if found is None else found

    def first_time(self, tensors: Any) -> Any:
        raise NotImplementedError

    def recovered(self, error: Exception, tensors: Any) -> Any:
        raise NotImplementedError
