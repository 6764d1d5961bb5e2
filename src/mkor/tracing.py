"""An update and a step of a method on tensors without memory: what they keep, send and compute."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mkor.capture.blank import blank
from mkor.capture.discover import Layer
from mkor.flops import FlopCounter, fold_flops
from mkor.messages import Exchange, Owned, Stacked
from mkor.methods.base import Method, State, Update, wide

META = torch.device("meta")


@dataclass(frozen=True)
class Trace:
    """What one layer's update and step did.

    Attributes:
        messages: What the update yielded, in order.
        state: The state that it left.
        hook_flops: Operations of the hooks, on every worker.
        held_flops: Operations of the update, on workers that hold the layer.
        owned_flops: Those of the worker that owns it, besides.
        step_flops: Operations of preconditioning.
    """

    messages: list[Exchange | Owned]
    state: State
    hook_flops: int
    held_flops: int
    owned_flops: int
    step_flops: int

    @property
    def update_flops(self) -> int:
        """Operations of the update on the worker that owns the layer."""
        return self.hook_flops + self.held_flops + self.owned_flops

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
    messages: list[Exchange | Owned] = []
    hooks = held = owned = 0
    passes = [(method.update, method.wants)]
    if method.second_pass:
        passes.append((method.revisit, method.wants_again))
    for update, wants in passes:
        kinds = wants(shape)
        with FlopCounter() as counter:
            seen = blank(layer, kinds, method.absolute(), META, rows)
            seen = replace(seen, weight=weight) if method.second_pass else seen
            picked = counter.total
            state, dear = drive(update(state, seen), messages, workers, counter)
        hooks += picked + fold_flops(kinds[0], shape.stack, rows, shape.inputs)
        if not seen.grads_reduced:
            hooks += fold_flops(kinds[1], shape.stack, rows, shape.outputs)
        held += counter.total - picked - dear
        owned += dear
    with FlopCounter() as counter:
        method.precondition(state, weight.to(dtype))
    return Trace(messages, state, hooks, held, owned, counter.total)


def drive(
    update: Update, messages: list[Exchange | Owned], workers: int, counter: FlopCounter
) -> tuple[State, int]:
    """Answer what an update yields as `workers` like this one would.

    Returns:
        Its state, and the operations of what one worker computes for others.
    """
    owned = 0
    answer: dict[str, Tensor] | None = None
    while True:
        try:
            message = next(update) if answer is None else update.send(answer)
        except StopIteration as stop:
            return stop.value, owned
        if isinstance(message, Stacked):
            answer = message.function(message.state, message.given)
            continue
        messages.append(message)
        if isinstance(message, Owned):
            before = counter.total
            answer = message.compute()
            owned += counter.total - before
        else:
            rows = {key: torch.cat([t] * workers, dim=1) for key, t in message.gather.items()}
            answer = {**message.sum, **message.mean, **rows}
