"""Conditions under which the mathematics runs and a batch is evaluated again.

The mathematics runs without a graph and without autocast, in the dtypes that it names. A second
pass must differ from the first in the weights alone: it sees the same random numbers, so that
dropout masks agree, and no gradients of the first; it leaves no trace in random states, buffers
such as the running statistics of a batch normalisation, or gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from mkor.methods.base import Seen


@contextmanager
def exact(tensors: Iterable[Tensor]) -> Iterator[None]:
    """No graph, and no autocast on the devices of the tensors."""
    kinds = {tensor.device.type for tensor in tensors}
    with torch.no_grad(), ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


Marks = dict[str, tuple[Tensor, Tensor | None]]
"""Of each layer the number of rows, and the sum of its inputs where no weight changes it."""

SAME = 1e-5
"""Largest difference between sums of the same inputs, relative to the largest of them."""


def marks(seen: dict[str, Seen]) -> Marks:
    """What a second pass over the same batch shows again, whatever the weights are."""
    return {
        name: (what.rows.clone(), what.input_sums.clone())
        if what.fed and what.input_sums is not None
        else (what.rows.clone(), None)
        for name, what in seen.items()
    }


def compared(first: Marks, seen: dict[str, Seen]) -> dict[str, Seen]:
    """What a second pass shows, and whether it is of the batch that the marks of the first tell of.

    One layer that differs speaks for all: most have inputs that the step has changed.
    """
    verdicts: list[Tensor] = []
    for name, (rows, sums) in marks(seen).items():
        known_rows, known_sums = first.get(name, (rows, None))
        verdicts.append(torch.eq(rows, known_rows).all())
        if sums is not None and known_sums is not None:
            change = (sums - known_sums).abs().amax()
            # Sums that aren't numbers are no other batch; they are left out as such.
            verdicts.append(~(change > SAME * known_sums.abs().amax()))
    if not verdicts:
        return seen
    same = torch.stack([verdict.to(verdicts[0].device) for verdict in verdicts]).all()
    return {name: replace(what, same=same.to(what.rows.device)) for name, what in seen.items()}


class Replay:
    """The random states at the time when it was made, to evaluate the model from them again."""

    def __init__(self, model: nn.Module) -> None:
        """Note the states of the CPU and of the devices of the model."""
        self.model = model
        kinds = {p.device.type for p in model.parameters()} - {"cpu", "meta"}
        self.kind = kinds.pop() if kinds else "cuda"
        used = {p.device.index or 0 for p in model.parameters() if p.device.type == self.kind}
        self.devices = sorted(used)
        self.host = torch.get_rng_state()
        module = getattr(torch, self.kind)
        self.states = [module.get_rng_state(index) for index in self.devices]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Random numbers as at the time of making; what the pass changes is restored after it.

        Gradients are set aside, so that a closure may clear them before or after its own.
        """
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        gradients = [(parameter, parameter.grad) for parameter in self.model.parameters()]
        for parameter, _ in gradients:
            parameter.grad = None
        try:
            with torch.random.fork_rng(self.devices, device_type=self.kind):
                torch.set_rng_state(self.host)
                module = getattr(torch, self.kind)
                for index, state in zip(self.devices, self.states, strict=True):
                    module.set_rng_state(state, index)
                yield
        finally:
            with torch.no_grad():
                for buffer, kept in buffers:
                    buffer.copy_(kept)
            for parameter, grad in gradients:
                parameter.grad = grad
