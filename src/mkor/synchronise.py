"""Run the updates of all layers together, so that a round of theirs costs one collective.

What a worker knows of a gradient that is spread over workers is its share; shares add up over the
process groups that hold the other blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from mkor import triangle
from mkor.blocks import Shares
from mkor.capture.views import View
from mkor.distributed import comm
from mkor.distributed.bucket import gather_flat, reduce_flat
from mkor.messages import Exchange, Owned, Stacked
from mkor.methods.base import Seen
from mkor.ownership import Ownership
from mkor.stacking import run_stacked

Groups = tuple[Any, ...]
Result = TypeVar("Result")
Answers = dict[str, dict[str, Tensor]]


def answer(
    messages: dict[str, Exchange | Owned], ownership: Ownership, wire_dtype: torch.dtype | None
) -> Answers:
    """Answer one round of all layers' messages, except of layers that end here on this worker."""
    exchanges = {n: m for n, m in messages.items() if isinstance(m, Exchange)}
    answers = exchange(exchanges, wire_dtype)
    for name, message in exchanges.items():
        if message.last and not ownership.holds(name):
            del answers[name]
    return answers | ownership.share({n: m for n, m in messages.items() if isinstance(m, Owned)})


def exchange(messages: dict[str, Exchange], wire_dtype: torch.dtype | None) -> Answers:
    """Combine one round of all layers' messages over workers, in flat buckets."""
    workers = comm.world_size()
    if workers == 1:
        return {n: {**m.sum, **m.mean, **m.gather} for n, m in messages.items()}
    out: Answers = {name: {} for name in messages}
    keys = [(name, key) for name, m in messages.items() for key in (*m.sum, *m.mean)]
    tensors = [outgoing(messages[name], key, workers) for name, key in keys]
    totals = reduce_flat(tensors, comm.all_reduce_sum, wire_dtype)
    for (name, key), total in zip(keys, totals, strict=True):
        out[name][key] = incoming(messages[name], key, total)
    keys = [(name, key) for name, m in messages.items() for key in m.gather]
    rows = [messages[name].gather[key] for name, key in keys]
    gathered = gather_flat(rows, comm.all_gather_counts, comm.all_gather_vectors, wire_dtype)
    for (name, key), tensor in zip(keys, gathered, strict=True):
        out[name][key] = tensor
    return out


def outgoing(message: Exchange, key: str, workers: int) -> Tensor:
    """A tensor as it is added up: means by their share, symmetric matrices by their triangle."""
    if key in message.mean:
        return message.mean[key] / workers
    return triangle.pack(message.sum[key]) if key in message.symmetric else message.sum[key]


def incoming(message: Exchange, key: str, total: Tensor) -> Tensor:
    """The tensor itself from what was added up."""
    if key not in message.symmetric:
        return total
    return triangle.unpack(total, message.sum[key].shape[-1])


def exchange_shares(
    messages: dict[str, Shares], groups: dict[str, tuple[Groups, Groups]]
) -> dict[str, dict[str, Tensor]]:
    """Add up one round of what workers know of their blocks.

    Args:
        messages: By layer.
        groups: Process groups of the workers with other outputs and with other inputs, by layer.
    """
    keys: list[tuple[str, str]] = []
    shares: list[tuple[Tensor, Groups]] = []
    for name, message in messages.items():
        outputs, inputs = groups[name]
        sides = ((message.outputs, outputs), (message.inputs, inputs))
        for tensors, where in (*sides, (message.both, outputs + inputs)):
            keys += [(name, key) for key in tensors]
            shares += [(tensor, where) for tensor in tensors.values()]
    out: dict[str, dict[str, Tensor]] = {name: {} for name in messages}
    for (name, key), tensor in zip(keys, add_shares(shares), strict=True):
        out[name][key] = tensor
    return out


def add_shares(shares: list[tuple[Tensor, Groups]]) -> list[Tensor]:
    """Sums of tensors over their process groups, in one flat bucket for the same groups."""
    out = [tensor for tensor, _ in shares]
    for groups in dict.fromkeys(groups for _, groups in shares if groups):
        index = [i for i, (_, own) in enumerate(shares) if own == groups]
        reduce = partial(comm.all_reduce_over, groups=groups)
        for i, tensor in zip(
            index, reduce_flat([out[i] for i in index], reduce, None), strict=True
        ):
            out[i] = tensor
    return out


def complete(views: dict[str, View], seen: dict[str, Seen]) -> dict[str, Seen]:
    """Statistics in which what workers know of spread gradients is added up, in one collective."""
    names = [name for name in seen if views[name].scattered]
    shares: list[tuple[Tensor, Groups]] = []
    for name in names:
        what, (weight, bias) = seen[name], views[name].groups()
        square = None if what.gradient is None else what.gradient.square()
        known = (sums for sums in (square, what.shown, what.true) if sums is not None)
        shares += [(sums, weight) for sums in known]
        shares += [(what.grads, bias)] if what.grads_reduced else []
    totals = iter(add_shares(shares))
    out = dict(seen)
    for name in names:
        what = seen[name]
        if what.gradient is not None:
            what = replace(what, gradient=next(totals).sqrt())
        if what.shown is not None:
            what = replace(what, shown=next(totals), true=next(totals))
        out[name] = replace(what, grads=next(totals)) if what.grads_reduced else what
    return out


def run_together(
    updates: dict[str, Generator[Any, dict[str, Tensor], Result]],
    exchange: Callable[[dict[str, Any]], Answers],
) -> dict[str, Result]:
    """Run generators in lock-step, one exchange for all of them a round; their results by name.

    A generator that gets no answer ends there, without a result. A worker that is alone answers
    the messages of one layer after the other: then those of one are held at a time, which may be as
    large as its factors. What is to be stacked waits for all layers.
    """
    done: dict[str, Result] = {}
    answers: dict[str, dict[str, Tensor] | None] = dict.fromkeys(updates)
    alone = exchange if comm.world_size() == 1 else None
    while answers:
        messages: dict[str, Any] = {}
        for name, answer in answers.items():
            try:
                messages[name] = go_on(name, updates[name], answer, alone)
            except StopIteration as stop:
                done[name] = stop.value
        stacked = {n: m for n, m in messages.items() if isinstance(m, Stacked)}
        others = {n: m for n, m in messages.items() if n not in stacked}
        answers = {**(exchange(others) if others else {}), **run_stacked(stacked)}
    return done


def go_on(
    name: str,
    update: Generator[Any, dict[str, Tensor], Any],
    answer: dict[str, Tensor] | None,
    alone: Callable[[dict[str, Any]], Answers] | None,
) -> Any:
    """Resume a generator; the message that it then waits with, which `alone` can't answer."""
    message = next(update) if answer is None else update.send(answer)
    while alone is not None and not isinstance(message, Stacked):
        message = update.send(alone({name: message})[name])
    return message
