"""Ring attention: a rank's own queries meet the keys and values of one rank after the other.

Liu, Zaharia and Abbeel, Ring Attention with Blockwise Transformers, 2023. Results of the steps are merged in float32 by
their log-sum-exp. The backward makes the steps again, so that what a rank holds does not grow with the number of ranks:
its own keys, those of a step and of the next, and what it hands on. The keys of a step come straight from the rank that
has them, and only those that some query sees. They travel while those before are computed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from sdpa.dispatch.context import effective, forced_text, request_text
from sdpa.dispatch.failure import LaunchError
from sdpa.dispatch.select import backward_setting, select
from sdpa.distributed.blocks import Block, narrow
from sdpa.distributed.links import Link, Passing, Shape, pieces_of, refuse_second_derivatives
from sdpa.distributed.modes import Part, blocks_of, count, first_block, needed, without_fields
from sdpa.distributed.modes import Results as Pair
from sdpa.distributed.parts import Interval, Intervals, common, merged, places
from sdpa.inputs import Options, build_inputs
from sdpa.mask import Mask
from sdpa.operators import call_backward, call_forward
from sdpa.problem import UNLIMITED, AttentionInputs, AttentionProblem, Results
from sdpa.sinks import sinks_grad


class Ring:
    """The mode: it is called with a rank's part."""

    def __init__(self, link: Link, steps: type[Steps] | None = None) -> None:
        self.link, self.steps = link, steps or Steps

    def __call__(self, part: Part) -> Pair:
        out, lse = RingAttention.apply(self.steps(self.link, part), *part[:3], part.mask.bias, part.sinks)
        return out, lse if part.returns_lse else None

    def local(self, part: Part) -> Part:
        return first_block(part._replace(returns_lse=True), self.link.rank, in_steps=True)


class Meeting(NamedTuple):
    """A call of a step: a block, or several side by side of which all rows see all keys."""

    block: Block  # the first of them
    rows: Interval  # of this rank's own queries
    keys: Interval  # of those that it holds at the step


class Steps:
    """What meets what at each step, and the calls of it."""

    def __init__(self, link: Link, part: Part) -> None:
        self.link, self.setting = link, request_text(part.options.get("kernel"))
        self.dropout_p, self.random = part.options.get("dropout_p", 0.0), part.random
        # A call that drops would draw a seed of its own.
        others = {name: value for name, value in part.options.items() if name not in ("kernel", "dropout_p")}
        self.options = Options(None, **others)
        self.blocks = blocks_of(part, in_steps=True)
        self.needs, self.keys = needed(self.blocks, part), part.keys.intervals
        self.rows = part.queries.intervals[link.rank]
        self.plan = [self.meetings(step) for step in range(link.ranks)]
        self.under_way: list[Passing] = []

    def given(self, step: int) -> Intervals:
        """What this rank hands on at a step, of its own keys. At the first they stay where they are."""
        own = self.keys[self.link.rank]
        return common(own, self.needs[(self.link.rank + step) % self.link.ranks]) if step else own

    def taken(self, step: int) -> Intervals:
        """What it takes."""
        theirs = self.keys[(self.link.rank - step) % self.link.ranks]
        return common(theirs, self.needs[self.link.rank]) if step else theirs

    def meetings(self, step: int) -> list[Meeting]:
        """What meets at a step."""
        taken, found = self.taken(step), list[Meeting]()
        if not step and self.keeps_order():
            whole = 0, count(taken)
            return [Meeting(Block(whole, whole, Mask(causal=True)), whole, whole)]
        for keys in taken:
            for rows in self.rows:
                block = self.blocks.of(rows, keys)
                if block is not None:
                    (own,), (held,) = places((block.rows,), self.rows), places((block.keys,), taken)
                    found.append(Meeting(block, own, held))
        return found if self.dropout_p else side_by_side(side_by_side(found, "keys"), "rows")

    def keeps_order(self) -> bool:
        """Whether own queries meet own keys as one causal call, however many intervals they are."""
        blocks = self.blocks
        is_causal = blocks.right == 0 and blocks.left == UNLIMITED and not blocks.shift and not blocks.mask.tensors()
        return is_causal and not self.dropout_p and self.rows == self.keys[self.link.rank] and count(self.rows) > 0

    def begin(self, step: int, k: Tensor, v: Tensor) -> Passing:
        """The keys and values of a step, on their way, those of all intervals side by side."""
        given, own = self.given(step), self.keys[self.link.rank]
        pieces = [pieces_of(t, given, own) if step else [t] for t in (k, v)]
        return self.pass_on(step, pieces, [of_rows(t, self.taken(step)) for t in (k, v)])

    def begin_back(self, step: int, k: Tensor, v: Tensor, gradients: list[Tensor]) -> Passing:
        """Their gradients, on their way."""
        return self.pass_on(-step, [[t] for t in gradients], [of_rows(t, self.given(step)) for t in (k, v)])

    def pass_on(self, step: int, given: Sequence[Sequence[Tensor]], shapes: Sequence[Shape]) -> Passing:
        self.under_way = [one for one in self.under_way if one.works]
        self.under_way.append(self.link.pass_on(step, given, shapes))
        return self.under_way[-1]

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """Where a call fails, what is under way arrives first: else the ranks' next exchange would wait for it."""
        try:
            yield
        except Exception:
            for one in self.under_way:
                one.wait()
            raise
        finally:
            self.under_way = []

    def add(self, dk: Total, dv: Total, step: int, returned: Passing) -> None:
        """Add to the gradients of this rank's own keys and values those that come back of a step."""
        own = merged(places(self.given(step), self.keys[self.link.rank]))
        for total, arrived in zip((dk, dv), returned.wait(), strict=True):
            pieces = arrived.split([end - begin for begin, end in own], 2) if own else ()
            for place, piece in zip(own, pieces, strict=True):
                total.add(place, piece)

    def forward(self, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
        return call_forward(inputs, True, self.setting)

    def backward(
        self, inputs: AttentionInputs, results: Results, upstream: Results, bias_grad: bool
    ) -> tuple[Tensor, ...]:
        """Gradients of a block, from results of whole rows."""
        asked = {"bias_grad": bias_grad, "lse_grad": upstream.lse is not None}
        extra = frozenset(name for name, on in asked.items() if on)
        problem = AttentionProblem.of(inputs, "backward", extra, (*results, upstream.out))
        kernel = select(problem, backward_setting(effective(self.setting), problem)).kernel
        assert results.lse is not None
        if not kernel.needs_whole_rows(problem, results.lse):
            try:  # by its name: a kernel that took its place might need what `results` are not
                return call_backward(inputs, results, upstream, bias_grad, forced_text(kernel.name))
            except (LaunchError, torch.OutOfMemoryError) as error:
                warnings.warn(f"{error}; another kernel answers instead, given the block's own results", stacklevel=2)
        return call_backward(inputs, *self.of_block_alone(inputs, results, upstream), bias_grad, self.setting)

    def of_block_alone(self, inputs: AttentionInputs, results: Results, upstream: Results) -> tuple[Results, Results]:
        """What a kernel needs for the same gradients that takes a block for whole rows: the block's own results, and
        the gradients that arrive at these through the merging."""
        assert results.lse is not None
        out, lse = call_forward(inputs, True, self.setting)
        share = (lse - results.lse).exp().masked_fill(lse == -torch.inf, 0.0)
        grad_out = upstream.out.to(share.dtype)
        of_row = (results.out.to(share.dtype) * grad_out).sum(3) - (0.0 if upstream.lse is None else upstream.lse)
        grad_lse = share * ((out.to(share.dtype) * grad_out).sum(3) - of_row)
        return Results(out, lse), Results((share.unsqueeze(3) * grad_out).to(out.dtype), grad_lse)

    def inputs(self, q: Tensor, k: Tensor, v: Tensor, block: Block, bias: Tensor | None) -> AttentionInputs:
        mask = block.mask if bias is None else block.mask.replace(bias=of_block(bias, block))
        found = build_inputs(q, k, v, self.options._replace(attn_mask=mask))
        if self.random is None:
            return found
        rng = self.random.of_block(block.rows[0], block.keys[0])
        return found._replace(dropout_p=float(self.dropout_p), rng=rng)


class RingAttention(torch.autograd.Function):
    """A rank's part of the output and of the log-sum-exp. What it saves is this rank's own."""

    @staticmethod
    def forward(
        ctx: Any, steps: Steps, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        total = Merged(q, v)
        with steps.finishing():
            passing = steps.begin(0, k, v)
            for step in range(steps.link.ranks):
                keys, values = passing.wait()
                if step + 1 < steps.link.ranks:
                    passing = steps.begin(step + 1, k, v)
                for block, rows, own in steps.plan[step]:
                    found = steps.forward(steps.inputs(at(q, rows), at(keys, own), at(values, own), block, bias))
                    total.add(rows, *found)
        out, lse = total.results()
        if sinks is not None:
            with_sinks(out, lse, sinks)
        out = out.to(q.dtype)
        ctx.steps = steps
        ctx.save_for_backward(q, k, v, bias, sinks, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        steps, (q, k, v, bias, sinks, out, lse) = ctx.steps, ctx.saved_tensors
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        dq, dk, dv = (Total(t.shape, lse) for t in (q, k, v))
        dbias = torch.zeros_like(bias, dtype=lse.dtype) if bias is not None and ctx.needs_input_grad[4] else None
        with steps.finishing():
            passing = steps.begin(0, k, v)
            home: list[tuple[int, Passing]] = []  # gradients on their way, of one step while the next is computed
            for step in range(steps.link.ranks):
                keys, values = passing.wait()
                if step + 1 < steps.link.ranks:
                    passing = steps.begin(step + 1, k, v)
                dkeys, dvalues = (Total(t.shape, lse) for t in (keys, values))
                for block, rows, own in steps.plan[step]:
                    inputs = steps.inputs(at(q, rows), at(keys, own), at(values, own), block, bias)
                    upstream = Results(at(grad_out, rows), None if grad_lse is None else at(grad_lse, rows))
                    results = Results(at(out, rows), at(lse, rows))
                    found = steps.backward(inputs, results, upstream, dbias is not None)
                    del inputs, results, upstream
                    for total, place, gradient in zip((dq, dkeys, dvalues), (rows, own, own), found, strict=False):
                        total.add(place, gradient)
                    if dbias is not None:
                        place = of_block(dbias, block)
                        place += found[3].reshape(place.shape)
                home.append((step, steps.begin_back(step, k, v, [dkeys.sum(), dvalues.sum()])))
                if step:
                    steps.add(dk, dv, *home.pop(0))
            steps.add(dk, dv, *home.pop())
        dsinks = None
        if sinks is not None and ctx.needs_input_grad[5]:
            delta = (out.to(lse.dtype) * grad_out.to(lse.dtype)).sum(3)
            dsinks = sinks_grad(sinks, lse, delta if grad_lse is None else delta - grad_lse)
        own = [total.sum().to(t.dtype) for total, t in zip((dq, dk, dv), (q, k, v), strict=True)]
        return (None, *own, None if dbias is None else dbias.to(bias.dtype), dsinks)


class Merged:
    """Results of all queries, in float32 at least, to which those of some queries and keys are added."""

    def __init__(self, q: Tensor, v: Tensor) -> None:
        self.q, self.size, self.dtype = q, v.shape[3], torch.promote_types(q.dtype, torch.float32)
        self.found: tuple[Tensor, Tensor] | None = None

    def add(self, rows: Interval, out: Tensor, lse: Tensor) -> None:
        if self.found is None and rows == (0, self.q.shape[2]):
            self.found = out.to(self.dtype), lse.to(self.dtype)
        else:
            all_out, all_lse = self.results()
            merge(at(all_out, rows), at(all_lse, rows), out, lse)

    def results(self) -> tuple[Tensor, Tensor]:
        if self.found is None:
            rows = self.q.shape[:3]
            out = self.q.new_zeros(*rows, self.size, dtype=self.dtype)
            self.found = out, self.q.new_full(rows, -torch.inf, dtype=self.dtype)
        return self.found


class Total:
    """Gradients of a tensor, in the dtype of the log-sum-exp, to which those of some rows are added."""

    def __init__(self, shape: Sequence[int], lse: Tensor) -> None:
        self.shape, self.lse = shape, lse
        self.found: Tensor | None = None

    def add(self, rows: Interval, gradient: Tensor) -> None:
        if self.found is None and rows == (0, self.shape[2]):
            self.found = gradient.to(self.lse.dtype)
        else:
            at(self.sum(), rows).add_(gradient)

    def sum(self) -> Tensor:
        if self.found is None:
            self.found = self.lse.new_zeros(self.shape)
        return self.found


def side_by_side(meetings: Sequence[Meeting], side: Literal["rows", "keys"]) -> list[Meeting]:
    """The same with those in one that lie side by side and whose rows all see all keys."""
    other = "rows" if side == "keys" else "keys"
    found: list[Meeting] = []
    for one in sorted(meetings, key=attrgetter(other, side)):
        last = found[-1] if found else one
        (begin, until), (after, end) = getattr(last, side), getattr(one, side)
        sees_all = all(without_fields(both.block.mask) is None for both in (last, one))
        if found and sees_all and until == after and getattr(last, other) == getattr(one, other):
            found[-1] = last._replace(keys=(begin, end)) if side == "keys" else last._replace(rows=(begin, end))
        else:
            found.append(one)
    return found


def of_rows(tensor: Tensor, of: Intervals) -> Shape:
    """The shape of a tensor with the rows of these intervals alone."""
    return (*tensor.shape[:2], count(of), tensor.shape[3])


def at(tensor: Tensor, rows: Interval) -> Tensor:
    return tensor[:, :, rows[0] : rows[1]]


def of_block(bias: Tensor, block: Block) -> Tensor:
    return narrow(narrow(bias, -2, block.rows), -1, block.keys)


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Add to results of some keys, in place, those of others."""
    launch = merging_launch(str(out.device)) if out.is_cuda else None
    if launch is not None:
        launch(out, lse, more, more_lse)
        return
    # The shares of both, each rounded by itself: of no keys at all they are 0, for -inf - -inf is no number.
    before, after = (torch.sigmoid(gap).nan_to_num_(0.0).unsqueeze(3) for gap in (lse - more_lse, more_lse - lse))
    out.mul_(before).addcmul_(more.to(out.dtype), after)
    torch.logaddexp(lse, more_lse, out=lse)


@lru_cache(maxsize=16)
def merging_launch(device: str) -> Callable[..., None] | None:
    """The kernel that merges in one launch, tried once; None where there is no Triton that can run or compile it."""
    try:
        from sdpa.kernels.triton import merge as module
    except ImportError:
        return None
    if module.unavailable():
        return None
    out, lse = torch.zeros(1, 1, 1, 16, device=device), torch.zeros(1, 1, 1, device=device)
    try:
        module.merge(out, lse, out, lse)
    except Exception as error:
        warnings.warn(f"a ring's steps are merged by torch's operations: {error}", stacklevel=2)
        return None
    return module.merge


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Add to results, in place, one more logit a head, which has no value."""
    both = torch.logaddexp(lse, sinks.to(lse.dtype).view(1, -1, 1))
    out.mul_((lse - both).exp().unsqueeze(3))
    lse.copy_(both)
