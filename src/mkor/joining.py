"""Uneven inputs: a worker without batches left goes through the steps of the others (torch's Join).

It has nothing to add to their statistics, but takes part in what crosses, so that nobody waits. In
the end all workers have what the last of them to have batches has.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from mkor.agreement import Agreement
from mkor.conditions import exact
from mkor.distributed import comm
from mkor.distributed.guard import during
from mkor.informed import Informed
from mkor.meter import device_of
from mkor.methods.base import Method
from mkor.stateful import on_host
from mkor.validate import needs_closure


class Shadow(comm.JoinHook):
    """What a worker does that has no batches left."""

    def __init__(self, optimizer: Joining) -> None:
        """Watch the forward passes of the batches until then."""
        self.optimizer = optimizer
        self.rhythm = Rhythm(optimizer)

    def main_hook(self) -> None:
        """Take part in a step of the others."""
        self.rhythm.handle.remove()
        self.optimizer._shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Go on with the state of the last."""
        self.rhythm.handle.remove()
        self.optimizer._end_join(is_last_joiner)


class Rhythm:
    """Keeps to one forward pass a step, which is what workers without batches count on."""

    handle: RemovableHandle

    def __init__(self, optimizer: Joining) -> None:
        """Watch the model."""
        self.optimizer = weakref.ref(optimizer)
        self.last: int | None = None
        self.handle = optimizer.model.register_forward_pre_hook(self)

    def __call__(self, *_: Any) -> None:
        """Note a forward pass.

        Raises:
            RuntimeError: There was one in this step already.
        """
        optimizer = self.optimizer()
        if optimizer is None or not optimizer._joins:
            return
        if self.last == optimizer._engine.index:
            raise RuntimeError(
                "a second forward pass in a step under torch's Join, in which workers without "
                "batches count on one for each step: accumulate no gradients, skip no step and "
                "evaluate nothing inside of it, or give all workers as many batches"
            )
        self.last = optimizer._engine.index


class Joining(Informed, comm.Joinable):
    """An optimizer that can be entered into `Join([model, optimizer])`."""

    model: nn.Module
    _agreement: Agreement
    _method: Method
    _join_config: Any = None

    def join_hook(self, **options: Any) -> Shadow:
        """Called by `Join`.

        Raises:
            ValueError: A step has what a worker without a batch can't take part in.
        """
        del options
        parameters = list(self.model.parameters())
        reasons = {
            "this method evaluates each batch twice": self._method.second_pass,
            "its base evaluates the model several times a step": needs_closure(self.base),
            "each gradient is preconditioned by the worker that holds the layer, which may have "
            "none (grad_worker_fraction is below 1)": self._engine.ownership.divided,
            "parameters are sharded": any(map(comm.is_sharded, parameters)),
        }
        reason = next((text for text, holds in reasons.items() if holds), None)
        if reason is not None:
            raise ValueError(
                f"uneven inputs (torch's Join) are not supported where {reason}: give all workers "
                "as many batches, or let those that have none step on an empty batch"
            )
        return Shadow(self)

    @property
    def join_device(self) -> torch.device:
        """Where `Join` counts the workers that have batches."""
        return device_of(self.model.parameters()) or torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        """All workers.

        Raises:
            ValueError: The model doesn't come first.
        """
        if self._join_config.is_first_joinable:
            raise ValueError(
                "the optimizer comes first in Join(...), but each step begins with the model: "
                "enter them as Join([model, optimizer]), the model in DistributedDataParallel"
            )
        return comm.everyone()

    @property
    def _joins(self) -> bool:
        """Whether the optimizer takes part in a Join that runs."""
        return self._join_config is not None and self._join_config.enable

    @during("add up the statistics of a step")
    def _update(self) -> None:
        """What all workers do together in a step."""
        if not self._joins:
            check_join(self.model)
        self._agreement.check(compare=not self._joins)
        self._engine.update()

    def _shadow(self) -> None:
        """Take part in a step without a batch."""
        if self._closed:
            return
        if self._engine.working:
            with torch.no_grad(), exact(self.model.parameters()):
                self._update()
        self._advance()

    def _advance(self) -> None:
        """End a step."""
        raise NotImplementedError

    @during("take over the state of the last worker at the end of Join")
    def _end_join(self, last: bool) -> None:
        """Take over the state of the last worker that had a batch, and end the Join.

        Args:
            last: Whether this worker had batches to the end.
        """
        source = comm.largest(comm.rank() if last else -1, self.join_device)
        own = on_host(self.state_dict()) if comm.rank() == source else None
        found = comm.broadcast_object(own, source, comm.Group(tuple(range(comm.world_size()))))
        if comm.rank() != source:
            self.load_state_dict(found)
        # torch leaves it on, so that the next Join of the model alone would not be told from this.
        entered: list[Any] = [self, *self.model.modules()]
        for joined in entered:
            config = getattr(joined, "_join_config", None)
            if config is not None:
                joined._join_config = config._replace(enable=False)


def check_join(model: nn.Module) -> None:
    """Refuse uneven inputs that leave the workers that go on waiting for the others."""
    for module in model.modules():
        config = getattr(module, "_join_config", None)
        if config is not None and config.enable and not config.throw_on_early_termination:
            raise RuntimeError(
                "the model is trained under torch's Join without its optimizer, so that a worker "
                "without batches left takes no steps, while the others need its part: enter both, "
                "Join([model, optimizer]), let workers that have no batch step on an empty one, "
                "or stop all with the first by Join(..., throw_on_early_termination=True)"
            )
