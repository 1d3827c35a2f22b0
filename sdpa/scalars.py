"""Numbers that are not Python's own, as NumPy's: which are taken for an integer, and how a wrong argument is named."""

from __future__ import annotations

import numbers
import operator
from typing import Any

import torch
from torch import Tensor

NUMPY_BOOLS = ("numpy.bool", "numpy.bool_")  # by NumPy's release


def type_name(value: object) -> str:
    """A type's name, with NumPy's module before its own: its bool is not Python's."""
    kind = type(value)
    return f"numpy.{kind.__name__}" if kind.__module__ == "numpy" else kind.__name__


def shown(value: object) -> str:
    """A wrong argument in a message. Arrays are named by their shape, because their numbers may take many lines."""
    if isinstance(value, Tensor) or type_name(value) == "numpy.ndarray":
        return f"a {type_name(value)} of shape {tuple(getattr(value, 'shape', ()))}"
    return repr(value)


def is_scalar(value: object) -> bool:
    """Whether torch takes a value for a float: a number of any library, a bool, a tensor without dimensions."""
    if isinstance(value, Tensor):
        return value.dim() == 0
    return isinstance(value, (numbers.Real, torch.SymFloat, torch.SymInt)) or type_name(value) in NUMPY_BOOLS


def as_int(value: Any) -> Any:
    """An integer of any library as Python's own, a SymInt as it is. None for what is none, for bools, and for tensors,
    which would have to be read from their device."""
    if isinstance(value, (int, torch.SymInt)):
        return None if isinstance(value, bool) else value
    if isinstance(value, Tensor) or type_name(value) in NUMPY_BOOLS:
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def conversion(name: str, value: object, wanted: type) -> str:
    """What to pass instead of a value that is a bool or a number, but not of the type that is wanted; or ""."""
    is_number = type_name(value) in NUMPY_BOOLS if wanted is bool else hasattr(value, "__int__")
    return f"; pass {wanted.__name__}({name})" if is_number else ""
