"""Hugging Face diffusers: the attention processors of a model with our attention inside.

    import sdpa.integrations.diffusers
    print(sdpa.integrations.diffusers.accelerate(pipeline.unet))  # or .transformer, .vae: any of its models

diffusers computes attention in processors, some by `F.scaled_dot_product_attention`, some by its own
`dispatch_attention_fn`, whose native backend is that function. Here a processor becomes an object of a class derived
from its own, whose call is routed here. So everything around attention is diffusers' own code: norms, residuals,
masks, adapters, whatever a model's processor does. Under torch.compile the graph stays whole.

diffusers has no list of backends that others may add to, which is why this is no backend's name.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from sdpa.integrations import told

try:
    from diffusers.models.attention_dispatch import AttentionBackendName
except ModuleNotFoundError as error:
    raise told("diffusers", error) from None

from sdpa.nn.accelerate import Report, nothing_reached
from sdpa.patch import NAME, ROUTING

DISPATCH = "dispatch_attention_fn"
NATIVE = AttentionBackendName.NATIVE


class Routed:
    """What marks a class that `routed` made."""


def accelerate(model: torch.nn.Module) -> Report:
    """Route the attention of every processor in `model` here, in place.

    Only the class of a processor changes: its weights, state_dict and options stay. Set other processors, adapters,
    fused projections and slicing before, or `restore` first: diffusers compares classes where it resets processors. A
    processor that other models share is routed in those, too.

    Raises:
        TypeError: something that is no module, as a pipeline is.

    Returns:
        What was swapped, named as `model.attn_processors` does, and what was left alone and why. Layers that call
        attention without a processor are not listed: `sdpa.nn.accelerate(model, functional=True)` reaches those.

    Warns:
        UserWarning: no processor was reached.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"expected a torch.nn.Module, as pipeline.unet or .transformer is, got {type(model).__name__}")
    report = Report()
    for name, processor in processors_of(model):
        reason = why_not(processor)
        if reason is not None:
            report.left[name] = reason
            continue
        kind: type = type(processor)
        if not isinstance(processor, Routed):
            processor.__class__ = routed(kind)
        report.swapped.append(name)
    if not report.swapped:
        instead = "sdpa.nn.accelerate(model, functional=True)"
        warnings.warn(nothing_reached(model, report, "diffusers' attention processors", instead), stacklevel=2)
    return report


def restore(model: torch.nn.Module) -> list[str]:
    """Undo `accelerate`: processors of our classes become diffusers' again. Returns their names."""
    ours = {name: processor for name, processor in processors_of(model) if isinstance(processor, Routed)}
    for processor in ours.values():
        if isinstance(processor, Routed):  # not given back already under another name
            processor.__class__ = type(processor).__bases__[0]
    return list(ours)


def processors_of(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if hasattr(module, "set_processor") and getattr(module, "processor", None) is not None:
            yield f"{name}.processor".removeprefix("."), module.processor


def why_not(processor: object) -> str | None:
    """Why a processor stays as it is."""
    kind = type(processor)
    named = f"{kind.__module__}.{kind.__qualname__}"
    code = getattr(inspect.unwrap(getattr(kind, call_of(kind))), "__code__", None)
    if code is None:
        return f"is a {named}, which is not written in Python"
    if not {NAME, DISPATCH} & set(code.co_names):
        return f"is a {named}, whose call has neither F.{NAME} nor {DISPATCH} in it"
    backend = getattr(processor, "_attention_backend", None)
    if backend not in (None, NATIVE):
        return f"is set to the backend {AttentionBackendName(backend).value}; model.reset_attention_backend() first"
    if getattr(processor, "_parallel_config", None) is not None:
        return "computes attention in parallel over several devices, by diffusers' own operators"
    return None


def call_of(kind: type) -> str:
    """The name of the method that a processor's author wrote; adapters are modules, most with a call of their own."""
    return "forward" if kind.__call__ is torch.nn.Module.__call__ else "__call__"


@functools.cache
def routed(kind: type) -> type:
    """A class like `kind` whose call is routed here, with the signature that diffusers reads arguments' names from."""
    name = call_of(kind)
    original: Callable[..., Any] = getattr(kind, name)

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with ROUTING:
            return original(self, *args, **kwargs)

    members = {name: call, "__reduce__": reduced, "__module__": __name__, "__doc__": kind.__doc__}
    if hasattr(kind, "_attention_backend"):
        members["_attention_backend"] = NATIVE  # what was None means the process's default, which may be another
    return type(f"Routed{kind.__name__}", (kind, Routed), members)


def reduced(processor: Routed) -> tuple[Any, ...]:
    """A pickle names diffusers' class: ours is made again where it is read."""
    return blank, (type(processor).__bases__[0],), processor.__dict__


def blank(kind: type) -> Routed:
    ours: Any = routed(kind)
    return ours.__new__(ours)
