"""sdpa: one attention call that runs the fastest correct kernel for the hardware, dtype and mask, and says why."""

from importlib import import_module
from typing import TYPE_CHECKING

from sdpa import installed, pytrees  # noqa: F401  a sentence where torch is absent or old; pytrees for torch.export and torch.func
from sdpa.checkpointing import save_attention
from sdpa.decomposed import decomposed, decomposition_table
from sdpa.dispatch.autotune import autotune
from sdpa.dispatch.context import sdpa_kernel
from sdpa.dispatch.explain import Explanation
from sdpa.dispatch.select import Choice, NoKernelError, last_choice
from sdpa.explain import explain
from sdpa.functional import scaled_dot_product_attention
from sdpa.mask import Mask
from sdpa.patch import install, patch, uninstall
from sdpa.problem import AttentionProblem
from sdpa.standalone import operators_library
from sdpa.varlen import paged_attention, varlen_attention

if TYPE_CHECKING:
    from sdpa import integrations, nn  # noqa: F401
    from sdpa.bench.warm_up import warm_up
    from sdpa.nn.accelerate import accelerate, restore

__version__ = "0.1.0"
__all__ = [
    "AttentionProblem",
    "Choice",
    "Explanation",
    "Mask",
    "NoKernelError",
    "accelerate",
    "autotune",
    "decomposed",
    "decomposition_table",
    "explain",
    "install",
    "last_choice",
    "operators_library",
    "paged_attention",
    "patch",
    "restore",
    "save_attention",
    "scaled_dot_product_attention",
    "sdpa_kernel",
    "uninstall",
    "varlen_attention",
    "warm_up",
]
# What is imported when it is used, and from where.
LAZY = {"accelerate": "sdpa.nn", "restore": "sdpa.nn", "warm_up": "sdpa.bench.warm_up"}
PACKAGES = (
    "distributed",
    "integrations",
    "nn",
)  # imported when used; not in __all__, where `nn` would hide torch's `nn`


def __getattr__(name: str) -> object:
    if name in LAZY:
        return getattr(import_module(LAZY[name]), name)
    if name in PACKAGES:
        return import_module(f"sdpa.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *PACKAGES, *(name for name in globals() if name.startswith("__"))})
