"""Which of transformers' models let an attention interface compute their attention; a sentence for those that do not.

transformers takes a name like ours for every model. A model's module says what becomes of it: the classes that a model
is made of name ALL_ATTENTION_FUNCTIONS, or a table of classes of their own in which our name is missing, or neither.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from transformers import GenerationMixin, PreTrainedModel

INTERFACE = "ALL_ATTENTION_FUNCTIONS"
EAGER = "eager"  # the key that a model's own table of attention classes has at least


def check_models(name: str) -> None:
    """Let each model that is made with the implementation `name`, or set to it, be checked by `require_interface`, and
    continuous batching be refused. Both are public methods of transformers that it calls of every model."""
    resolve = getattr(PreTrainedModel, "get_correct_attn_implementation", None)
    if resolve is None or hasattr(resolve, "checked_by_sdpa"):
        return

    @functools.wraps(resolve)
    def checked(self: Any, requested_attention: str | None, *args: Any, **kwargs: Any) -> str:
        if requested_attention == f"paged|{name}":
            raise ValueError(no_paged_cache(name))
        found = resolve(self, requested_attention, *args, **kwargs)
        if found == name:
            require_interface(type(self), name)
        return found

    vars(checked)["checked_by_sdpa"] = True
    models: Any = PreTrainedModel
    models.get_correct_attn_implementation = checked
    generation: Any = GenerationMixin
    batching = getattr(generation, "init_continuous_batching", None)
    if batching is not None:
        generation.init_continuous_batching = before(batching, functools.partial(refuse_batching, name))


def before(method: Callable[..., Any], check: Callable[[Any], None]) -> Callable[..., Any]:
    @functools.wraps(method)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        check(self)
        return method(self, *args, **kwargs)

    return checked


def refuse_batching(name: str, model: Any) -> None:
    if model.config._attn_implementation == name:
        raise ValueError(no_paged_cache(name))


def no_paged_cache(name: str) -> str:
    return (
        f"{name} does not serve continuous batching, whose paged cache asks for an implementation that it knows; "
        "call sdpa.install() and use attn_implementation='sdpa' there, whose calls then come here"
    )


def require_interface(model: Any, name: str) -> None:
    """Raises ValueError for a class of models that computes attention by itself, and warns where that is a part of a
    model whose other parts are served."""
    answer = "none" if torch.compiler.is_compiling() else attention_of(model)
    own = f"{model.__name__} computes attention by its own code and not by transformers' attention interface"
    if answer == "own":
        other = "'sdpa' inside of sdpa.patch()" if model._supports_sdpa else "'eager'"
        raise ValueError(
            f"{own}, so {name} cannot serve it; use attn_implementation={other}, or where it is part of a larger model "
            f"a dict that says {name!r} for other parts only"
        )
    if answer == "part":
        warnings.warn(f"{own}; {name} serves the other parts of its model", stacklevel=2)


def require_interface_of(config: Any, name: str) -> None:
    """The same for what a configuration is of, where a name was set behind transformers' back."""
    if config is None or torch.compiler.is_compiling():
        return
    kind: Any = type(config)
    answers = {attention_of(model): model for model in models_of(kind)}
    if "own" in answers and "interface" not in answers:
        require_interface(answers["own"], name)


@functools.cache
def attention_of(model: Any) -> str:
    """Who computes the attention of a class of models: "interface", whoever is registered; "own", its own code; "part",
    its own code beside other models of its module that ask the interface; "none", nobody or models inside of it, which
    are asked by themselves."""
    found = reached(model)
    if any(type(value) is dict and EAGER in value for value in found.values()):
        return "own"
    if INTERFACE in found or getattr(model, "_supports_sdpa", False):
        return "interface"
    if not attention_classes(found):
        return "none"
    return "part" if any(INTERFACE in vars(module) for _, module in bases_of(model)) else "own"


@torch.compiler.assume_constant_result  # Dynamo would follow how it is found out
def adds_masks(config: type) -> bool:
    """Whether a configuration's models have, beside the interface, code of their own that adds masks to scores, and so
    wants -inf and 0 where ours are False and True. transformers' own "sdpa" hands out masks like ours."""
    return finds_additions(config)


@functools.cache
def finds_additions(config: type) -> bool:
    return any(not model._supports_sdpa and writes_attention(reached(model)) for model in models_of(config))


@functools.cache
def models_of(config: type) -> tuple[Any, ...]:
    """The classes of models beside a configuration, or none where they are not found."""
    try:
        module = importlib.import_module(config.__module__.replace("configuration_", "modeling_"))
    except ImportError:
        return ()
    here: list[Any] = [
        kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == module.__name__
    ]
    return tuple(kind for kind in here if issubclass(kind, PreTrainedModel) and kind.config_class is config)


def writes_attention(found: dict[str, Any]) -> bool:
    """Whether a class of attention among these is its own code: it takes a mask to a softmax without the interface."""
    names = [set().union(*({*c.co_names, *c.co_varnames} for c in codes(kind))) for kind in attention_classes(found)]
    return any({"softmax", "attention_mask"} <= used and INTERFACE not in used for used in names)


def attention_classes(found: dict[str, Any]) -> list[type]:
    return [
        v
        for v in found.values()
        if isinstance(v, type) and issubclass(v, torch.nn.Module) and "Attention" in v.__name__
    ]


@functools.cache
def reached(model: type) -> dict[str, Any]:
    """What the code of a class and of its bases names in their modules, and what that names there, and so on."""
    found: dict[str, Any] = {}
    for kind, module in bases_of(model):
        follow(kind, module, found)
    return found


def bases_of(model: type) -> list[tuple[type, ModuleType]]:
    """The models that a class derives from, itself first, with the modules they are written in."""
    kinds = [kind for kind in model.__mro__ if kind is not PreTrainedModel and issubclass(kind, PreTrainedModel)]
    return [(kind, sys.modules[kind.__module__]) for kind in kinds if kind.__module__ in sys.modules]


def follow(thing: Any, module: ModuleType, found: dict[str, Any]) -> None:
    """Add to `found` what the code of a class or function names in its module, and go on with what is made there."""
    for code in codes(thing):
        for name in code.co_names:
            value = vars(module).get(name)
            if value is None or name in found:
                continue
            found[name] = value
            for inner in value.values() if type(value) is dict else (value,):
                if getattr(inner, "__module__", None) == module.__name__:
                    follow(inner, module, found)


def codes(thing: Any) -> Iterator[CodeType]:
    """The code of a function, or of the methods of a class and of its bases in the same module."""
    if isinstance(thing, type):
        bases = [kind for kind in thing.__mro__ if kind.__module__ == thing.__module__]
        for method in [value for kind in bases for value in vars(kind).values()]:
            yield from codes(method) if isinstance(method, FunctionType) else ()
    elif callable(thing) and isinstance(code := getattr(inspect.unwrap(thing), "__code__", None), CodeType):
        yield from nested(code)


def nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from nested(constant)
