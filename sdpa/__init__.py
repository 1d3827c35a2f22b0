"""sdpa: one attention call that runs the fastest correct kernel for the hardware, dtype and mask, and says why."""

from sdpa.dispatch.context import sdpa_kernel
from sdpa.dispatch.explain import Explanation
from sdpa.dispatch.select import Choice, NoKernelError, last_choice
from sdpa.explain import explain
from sdpa.functional import scaled_dot_product_attention
from sdpa.mask import Mask
from sdpa.patch import install, patch, uninstall
from sdpa.problem import AttentionProblem
from sdpa.varlen import paged_attention, varlen_attention

__version__ = "0.1.0"
__all__ = [
    "AttentionProblem",
    "Choice",
    "Explanation",
    "Mask",
    "NoKernelError",
    "explain",
    "install",
    "last_choice",
    "paged_attention",
    "patch",
    "scaled_dot_product_attention",
    "sdpa_kernel",
    "uninstall",
    "varlen_attention",
]
