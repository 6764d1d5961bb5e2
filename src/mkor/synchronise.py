"""Run the updates of all layers together, so that a round of theirs costs one collective."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mkor.distributed import comm
from mkor.distributed.bucket import gather_flat, reduce_flat
from mkor.methods.base import Exchange, State, Update


def exchange(
    messages: list[Exchange], wire_dtype: torch.dtype | None = None
) -> list[dict[str, Tensor]]:
    """Combine one round of all layers' messages over workers, in flat buckets."""
    workers = comm.world_size()
    if workers == 1:
        return [{**message.sum, **message.mean, **message.gather} for message in messages]
    out: list[dict[str, Tensor]] = [{} for _ in messages]
    keys = [(i, key) for i, m in enumerate(messages) for key in (*m.sum, *m.mean)]
    tensors = [
        messages[i].sum[key] if key in messages[i].sum else messages[i].mean[key] / workers
        for i, key in keys
    ]
    reduced = reduce_flat(tensors, comm.all_reduce_sum, wire_dtype)
    keys += [(i, key) for i, m in enumerate(messages) for key in m.gather]
    rows = [tensor for message in messages for tensor in message.gather.values()]
    gathered = gather_flat(rows, comm.all_gather_counts, comm.all_gather_vectors, wire_dtype)
    for (i, key), tensor in zip(keys, reduced + gathered, strict=True):
        out[i][key] = tensor
    return out


def run_together(
    updates: dict[str, Update],
    exchange: Callable[[list[Exchange]], list[dict[str, Tensor]]],
) -> dict[str, State]:
    """Run generators in lock-step, one exchange for all of them a round; their results by name.

    A worker that is alone runs one after the other: then the messages of one layer are held at a
    time, which may be as large as its factors.
    """
    if comm.world_size() == 1 and len(updates) > 1:
        return {n: run_together({n: update}, exchange)[n] for n, update in updates.items()}
    done: dict[str, State] = {}
    answers: dict[str, dict[str, Tensor] | None] = dict.fromkeys(updates)
    while answers:
        waiting: dict[str, Exchange] = {}
        for name, answer in answers.items():
            try:
                update = updates[name]
                waiting[name] = next(update) if answer is None else update.send(answer)
            except StopIteration as stop:
                done[name] = stop.value
        combined = exchange(list(waiting.values())) if waiting else []
        answers = dict(zip(waiting, combined, strict=True))
    return done
