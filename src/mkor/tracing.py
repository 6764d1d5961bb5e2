"""An update and a step of a method on tensors without memory: what they keep, send and compute."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mkor.capture.blank import blank
from mkor.capture.discover import Layer
from mkor.distributed.bucket import widest
from mkor.flops import FlopCounter, fold_flops
from mkor.methods.base import Exchange, Method, State, Update, wide

META = torch.device("meta")

COUNT = torch.int64.itemsize
"""Bytes of a count of rows, which is gathered before them."""


@dataclass(frozen=True)
class Trace:
    """What one layer's update and step did.

    Attributes:
        messages: What the update yielded, in order.
        state: The state that it left.
        update_flops: Operations of the update, with those of the hooks.
        step_flops: Operations of preconditioning.
    """

    messages: list[Exchange]
    state: State
    update_flops: int
    step_flops: int

    @property
    def bytes(self) -> int:
        """Bytes of the state."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.state.values())


def trace_layers(
    method: Method, layers: dict[str, Layer], rows: dict[str, int], workers: int
) -> dict[str, Trace]:
    """Trace every layer; those that look alike are run once."""
    known: dict[Any, Trace] = {}
    traces: dict[str, Trace] = {}
    for name, layer in layers.items():
        view = layer.view
        key = (view.shape, view.weight.dtype, layer.bias_shows_gradient, type(view), rows[name])
        if key not in known:
            known[key] = trace(method, layer, rows[name], workers)
        traces[name] = known[key]
    return traces


def trace(method: Method, layer: Layer, rows: int, workers: int) -> Trace:
    """Run an update of a layer, its second pass if the method has one, and a step."""
    shape, dtype = layer.view.shape, layer.view.weight.dtype
    state = method.init(shape, META, dtype)
    weight = torch.zeros(shape.stack, shape.outputs, shape.inputs, dtype=wide(dtype), device=META)
    messages: list[Exchange] = []
    flops = 0
    passes = [(method.update, method.wants)]
    if method.second_pass:
        passes.append((method.revisit, method.wants_again))
    for update, wants in passes:
        kinds = wants(shape)
        with FlopCounter() as counter:
            seen = blank(layer, kinds, method.absolute(), META, rows)
            seen = replace(seen, weight=weight) if method.second_pass else seen
            state = drive(update(state, seen), messages, workers)
        flops += counter.total + fold_flops(kinds[0], shape.stack, rows, shape.inputs)
        if not seen.grads_reduced:
            flops += fold_flops(kinds[1], shape.stack, rows, shape.outputs)
    with FlopCounter() as counter:
        method.precondition(state, weight.to(dtype))
    return Trace(messages, state, flops, counter.total)


def drive(update: Update, messages: list[Exchange], workers: int) -> State:
    """Answer what an update yields as `workers` like this one would; its state."""
    answer: dict[str, Tensor] | None = None
    while True:
        try:
            message = next(update) if answer is None else update.send(answer)
        except StopIteration as stop:
            state: State = stop.value
            return state
        messages.append(message)
        rows = {key: torch.cat([t] * workers, dim=1) for key, t in message.gather.items()}
        answer = {**message.sum, **message.mean, **rows}


def on_the_wire(
    traces: dict[str, Trace], workers: int, wire_dtype: torch.dtype | None
) -> list[tuple[str, dict[str, int]]]:
    """The collectives of an update in order: its kind, and the bytes of its result by layer.

    All layers are in one bucket, whose dtype holds what all of them send (see `synchronise`).
    """
    out: list[tuple[str, dict[str, int]]] = []
    rounds = max((len(found.messages) for found in traces.values()), default=0)
    for number in range(rounds if workers > 1 else 0):
        messages = {n: t.messages[number] for n, t in traces.items() if number < len(t.messages)}
        sums = {n: (*m.sum.values(), *m.mean.values()) for n, m in messages.items()}
        rows = {n: tuple(m.gather.values()) for n, m in messages.items()}
        counts = {n: COUNT * workers * len(tensors) for n, tensors in rows.items()}
        gathered = {n: workers * size for n, size in sizes(rows, wire_dtype).items()}
        parts = (("sum", sizes(sums, wire_dtype)), ("gather", counts), ("gather", gathered))
        out += [(kind, bytes_of) for kind, bytes_of in parts if any(bytes_of.values())]
    return out


def sizes(tensors: dict[str, tuple[Tensor, ...]], wire_dtype: torch.dtype | None) -> dict[str, int]:
    """Bytes of tensors by layer, in the dtype of the bucket of all."""
    everything: Iterable[Tensor] = [t for own in tensors.values() for t in own]
    dtypes = [tensor.dtype for tensor in everything]
    size = (wire_dtype or widest(dtypes)).itemsize if dtypes else 0
    return {name: size * sum(t.numel() for t in own) for name, own in tensors.items()}
