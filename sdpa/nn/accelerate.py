"""accelerate(model): torch's attention modules in a model become ours, in place; restore(model) undoes it.

Only the class of a module changes. Its parameters, buffers, hooks, names, requires_grad, train/eval, device and dtype
stay the same objects, so optimizers, tied weights, state_dicts and whoever holds a reference keep working.
"""

from __future__ import annotations

import threading
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.utils import parametrize

from sdpa.nn.attention import MultiheadAttention
from sdpa.nn.layers import TransformerDecoderLayer, TransformerEncoderLayer
from sdpa.nn.stacks import Transformer, TransformerDecoder, TransformerEncoder
from sdpa.patch import ROUTING
from sdpa.validate import check_flag

is_dynamo_compiling = torch.compiler.is_dynamo_compiling

OURS: dict[type[torch.nn.Module], type[torch.nn.Module]] = {
    torch.nn.MultiheadAttention: MultiheadAttention,
    torch.nn.TransformerEncoderLayer: TransformerEncoderLayer,
    torch.nn.TransformerDecoderLayer: TransformerDecoderLayer,
    torch.nn.TransformerEncoder: TransformerEncoder,
    torch.nn.TransformerDecoder: TransformerDecoder,
    torch.nn.Transformer: Transformer,
}
TORCHS = {ours: torchs for torchs, ours in OURS.items()}
OF_TORCH: tuple[type[torch.nn.Module], ...] = tuple(OURS)
OF_OURS: tuple[type[torch.nn.Module], ...] = tuple(TORCHS)
LAYERS = (torch.nn.TransformerEncoderLayer, torch.nn.TransformerDecoderLayer)
HANDLES = "_sdpa_routing_handles"  # attribute of a model whose functional calls are routed here


@dataclass
class Report:
    """What `accelerate` did: names of modules that were swapped, and those it left alone with the reason; and whether
    the model's functional calls are routed here, by this call or one before; and how many modules were ours already."""

    swapped: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    functional: bool = False
    ours: int = 0

    def __str__(self) -> str:
        count = len(self.swapped)
        lines = [f"swapped {count} module{'' if count == 1 else 's'}"]
        lines[0] += f": {', '.join(self.swapped)}" if self.swapped else ""
        if self.ours:
            lines[0] += f"; {self.ours} {'was' if self.ours == 1 else 'were'} ours already"
        elif self.functional and not self.swapped:
            lines = []
        lines += [f"left {name}: {reason}" for name, reason in self.left.items()]
        if self.functional:
            lines.append("routes scaled_dot_product_attention here while the model runs")
        return "\n".join(lines)


def accelerate(model: torch.nn.Module, *, functional: bool = False) -> Report:
    """Make torch's attention modules in `model` (itself among them) ours, in place.

    Call it before torch.compile, fully_shard (FSDP2), DistributedDataParallel and parametrizations, which keep or
    rename classes; a state_dict, an optimizer, hooks and tied weights may be there already. torch.jit.script and
    torch.fx.symbolic_trace know torch's modules only: `restore` the model before them.

    Args:
        model: any module.
        functional: also answer every torch.nn.functional.scaled_dot_product_attention that is called in the thread
            of `model`'s forward while it runs, compiled or not. What activation checkpointing will run again, outside
            of the forward, stays torch's, if it drops or if checkpointing is not reentrant: there call sdpa.install()
            instead. After an interruption (KeyboardInterrupt) inside of the forward, routing stays on in its thread.

    Returns:
        What was swapped, and what was left alone and why: subclasses (whose overrides may rely on torch's code),
        quantised modules, what they are part of and the attention of quantised layers, parametrized modules, modules
        with a forward of their own.

    Warns:
        UserWarning: nothing in `model` is ours afterwards.
    """
    check_module(model)
    check_flag("functional", functional, "accelerate")
    report = Report(functional=functional or hasattr(model, HANDLES))
    layers = {child: layer for layer in model.modules() if isinstance(layer, LAYERS) for child in layer.children()}
    for name, module in model.named_modules():
        if not isinstance(module, OF_TORCH):
            continue
        if isinstance(module, OF_OURS):
            report.ours += 1
            continue
        reason = why_not(module, layers.get(module))
        if reason is None:
            module.__class__ = OURS[type(module)]
            report.swapped.append(name or "(the model)")
        else:
            report.left[name or "(the model)"] = reason
    if functional and not hasattr(model, HANDLES):
        vars(model)[HANDLES] = (
            model.register_forward_pre_hook(route_here, prepend=True),
            model.register_forward_hook(route_back, always_call=True),
        )
    if not report.functional and not any(isinstance(module, OF_OURS) for module in model.modules()):
        warnings.warn(nothing_reached(model, report, "torch's attention modules", "functional=True"), stacklevel=2)
    return report


def nothing_reached(model: torch.nn.Module, report: Report, kind: str, instead: str) -> str:
    """The sentence for a model with none of a kind that could be swapped."""
    name, reason = next(iter(report.left.items()), ("", ""))
    why = f"{name} {reason}" if report.left else f"it has none of {kind}"
    return (
        f"accelerate reached nothing in this {type(model).__name__}: {why}; {instead} answers the calls of "
        "scaled_dot_product_attention that a model makes itself"
    )


def restore(model: torch.nn.Module) -> list[str]:
    """Undo `accelerate`: our modules in `model` become torch's again, and functional calls are routed here no more.
    Returns the names of the modules, and "functional calls of NAME" where a module's were routed.

    What fully_shard or a parametrization gave a class of its own since stays ours.
    """
    check_module(model)
    restored = []
    for name, module in model.named_modules():
        if type(module) in TORCHS:
            module.__class__ = TORCHS[type(module)]
            restored.append(name or "(the model)")
        handles = vars(module).pop(HANDLES, ())
        for handle in handles:
            handle.remove()
        if handles:
            restored.append(f"functional calls of {name or '(the model)'}")
    return restored


def check_module(model: object) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")


class Routed(threading.local):
    """Of each thread, the modules whose routing began and did not end."""

    def __init__(self) -> None:
        self.modules: list[int] = []


ROUTED = Routed()


def route_here(module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
    """A hook that can be pickled and copied with its model."""
    if not is_dynamo_compiling():
        ROUTED.modules.append(id(module))
    ROUTING.__enter__()


def route_back(module: torch.nn.Module, inputs: tuple[Any, ...], output: object) -> None:
    """Also called where another hook raised before `route_here`: the mode on top is then another's. Dynamo follows no
    threading.local, so hooks that it compiles do not tell this."""
    if not is_dynamo_compiling():
        modules = ROUTED.modules
        if modules and modules[-1] == id(module):
            modules.pop()
        elif output is None:  # else the forward ran, and its routing began where Dynamo compiled the other hook
            return
    ROUTING.__exit__(None, None, None)


def why_not(module: torch.nn.Module, layer: torch.nn.Module | None) -> str | None:
    """Why a module of torch's, or one derived from it, stays as it is. `layer` is the layer whose attention it is."""
    kind = type(module)
    if parametrize.is_parametrized(module):
        return "is parametrized; call accelerate before registering parametrizations"
    if kind not in OURS:
        return f"is a {kind.__module__}.{kind.__qualname__}, whose code may rely on torch's"
    if "forward" in vars(module):
        return "has a forward of its own, set on the instance"
    part = quantised_part(module)
    if part is not None:
        return f"is quantised: {part}"
    # A different rounding in attention may become a whole step of the quantisation that follows.
    part = None if layer is None else quantised_part(layer)
    return None if part is None else f"is in a layer that is quantised: {part}"


def quantised_part(module: torch.nn.Module) -> str | None:
    """The first module inside of one (or itself) whose weights only its own forward understands: one of torch.ao, or of
    integers, as bitsandbytes has them."""
    for name, inner in module.named_modules():
        kind, held = type(inner), dict(inner.named_parameters(recurse=False)) | dict(inner.named_buffers(recurse=False))
        weight = held.get("weight")  # not getattr, which would compute a parametrized weight
        is_integer = weight is not None and not (weight.is_floating_point() or weight.is_complex())
        if is_integer or kind.__module__.startswith("torch.ao.nn."):
            numbers = f" of {weight.dtype}" if weight is not None and is_integer else ""
            return f"{name} is a {kind.__module__}.{kind.__qualname__}{numbers}"
    return None
