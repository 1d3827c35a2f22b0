"""The pass that Inductor runs over each graph before autograd: there one replacement serves inference and training.

It stands where Inductor takes a user's pass, `pre_grad_custom_pass`, and runs the one that it found there first.
"""

from __future__ import annotations

import hashlib
import logging
from functools import cache
from pathlib import Path
from typing import Any

from torch.fx import Graph, Node

from sdpa.patterns.products import NotAttention
from sdpa.patterns.reading import changes_tensors, drop_unread, is_transformed, name_of, settle_writes
from sdpa.patterns.rewriting import rewrite
from sdpa.patterns.torchs import torchs_of
from sdpa.patterns.written import Written, written_of
from sdpa.torch_private import inductor_pass

LOG = logging.getLogger("sdpa.patterns")
FINDERS = {"softmax": written_of, "attention": torchs_of}

CONFIG: Any
Pass: Any
CONFIG, Pass = inductor_pass()


def replace(graph: Graph) -> int:
    """Put our operator in place of every attention that a graph writes out; says how many there were."""
    if not any(name_of(node) in FINDERS for node in graph.nodes) or is_transformed(graph):
        return 0
    if changes_tensors(graph):
        LOG.debug("a graph is left as it is: it changes the dimensions or the memory of a tensor in place")
        return 0
    drop_unread(graph)
    settle_writes(graph)
    count = 0
    for node in list(graph.nodes):
        found = attention_at(node)
        count += found is not None
    if count:
        graph.lint()
        LOG.info("attention of sdpa in place of %d written out", count)
    return count


def attention_at(node: Node) -> Written | None:
    """What was replaced at a node, None where nothing was; the reason is logged."""
    name = name_of(node)
    if name not in FINDERS:
        return None
    try:
        found = FINDERS[name](node)
        rewrite(found)
    except NotAttention as reason:
        LOG.debug("%s is left as it is: %s", node, reason)
        return None
    return found


@cache
def fingerprint() -> str:
    """Changes with every line of this folder, so that no graph made by other rules is found in a cache."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class WrittenOut(Pass):
    """The user's own pass, where there is one, and then ours."""

    def __init__(self, before: Any) -> None:
        self.before = before
        self.on = True

    def __call__(self, graph: Graph) -> None:
        for other in self.others():
            other(graph)
        if self.on:
            replace(graph)

    def others(self) -> tuple[Any, ...]:
        if self.before is None:
            return ()
        return tuple(self.before) if isinstance(self.before, (list, tuple)) else (self.before,)

    def uuid(self) -> Any:
        """None, which asks Inductor for no cache, where another pass has none."""
        keys = [other.uuid() if hasattr(other, "uuid") else None for other in self.others()]
        return None if None in keys else (fingerprint() if self.on else "", *keys)

    def uninstall(self) -> None:
        """What was there before; who replaced it again in the meantime has the last word."""
        self.on = False
        if CONFIG.pre_grad_custom_pass is self:
            CONFIG.pre_grad_custom_pass = self.before


def install() -> WrittenOut:
    """Our pass in Inductor's settings, in front of what was there."""
    found = WrittenOut(CONFIG.pre_grad_custom_pass)
    CONFIG.pre_grad_custom_pass = found
    return found
