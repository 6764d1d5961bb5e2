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

from mkor.blocks import Shares
from mkor.capture.views import View
from mkor.distributed import comm
from mkor.distributed.bucket import gather_flat, reduce_flat
from mkor.methods.base import Exchange, Seen

Groups = tuple[Any, ...]
Message = TypeVar("Message")
Result = TypeVar("Result")


def exchange(
    messages: dict[str, Exchange], wire_dtype: torch.dtype | None = None
) -> dict[str, dict[str, Tensor]]:
    """Combine one round of all layers' messages over workers, in flat buckets."""
    workers = comm.world_size()
    if workers == 1:
        return {n: {**m.sum, **m.mean, **m.gather} for n, m in messages.items()}
    out: dict[str, dict[str, Tensor]] = {name: {} for name in messages}
    keys = [(name, key) for name, m in messages.items() for key in (*m.sum, *m.mean)]
    tensors = [
        messages[n].sum[key] if key in messages[n].sum else messages[n].mean[key] / workers
        for n, key in keys
    ]
    reduced = reduce_flat(tensors, comm.all_reduce_sum, wire_dtype)
    keys += [(name, key) for name, m in messages.items() for key in m.gather]
    rows = [tensor for message in messages.values() for tensor in message.gather.values()]
    gathered = gather_flat(rows, comm.all_gather_counts, comm.all_gather_vectors, wire_dtype)
    for (name, key), tensor in zip(keys, reduced + gathered, strict=True):
        out[name][key] = tensor
    return out


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
        shares.append((what.gradient.square(), weight))
        shares += [(sums, weight) for sums in (what.shown, what.true) if sums is not None]
        shares += [(what.grads, bias)] if what.grads_reduced else []
    totals = iter(add_shares(shares))
    out = dict(seen)
    for name in names:
        what = replace(seen[name], gradient=next(totals).sqrt())
        if what.shown is not None:
            what = replace(what, shown=next(totals), true=next(totals))
        out[name] = replace(what, grads=next(totals)) if what.grads_reduced else what
    return out


def run_together(
    updates: dict[str, Generator[Message, dict[str, Tensor], Result]],
    exchange: Callable[[dict[str, Message]], dict[str, dict[str, Tensor]]],
) -> dict[str, Result]:
    """Run generators in lock-step, one exchange for all of them a round; their results by name.

    A worker that is alone runs one after the other: then the messages of one layer are held at a
    time, which may be as large as its factors.
    """
    if comm.world_size() == 1 and len(updates) > 1:
        return {n: run_together({n: update}, exchange)[n] for n, update in updates.items()}
    done: dict[str, Result] = {}
    answers: dict[str, dict[str, Tensor] | None] = dict.fromkeys(updates)
    while answers:
        waiting: dict[str, Message] = {}
        for name, answer in answers.items():
            try:
                update = updates[name]
                waiting[name] = next(update) if answer is None else update.send(answer)
            except StopIteration as stop:
                done[name] = stop.value
        answers = dict(exchange(waiting)) if waiting else {}
    return done
