"""An α-β model of a step: work over a rate, and collectives by ring algorithms.

A message takes α seconds however short it is, and 1/β a byte. A ring all-reduce of n bytes over P
workers passes 2(P-1) messages of n/P bytes, an all-gather whose result has n bytes P-1 of them.
Nothing overlaps, so that the prediction is a bound from above.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkor import Collective, Estimate


@dataclass(frozen=True)
class Machine:
    """What workers and the network between them can do.

    Attributes:
        rate: Operations a second of a worker.
        bandwidth: β, bytes a second that a worker sends.
        latency: α, seconds a message.
    """

    rate: float
    bandwidth: float
    latency: float

    def seconds(self, kind: str, workers: int, size: float) -> float:
        """Time of a collective.

        Args:
            kind: "sum" or "gather".
            workers: P.
            size: Bytes of its result on a worker.
        """
        messages = (workers - 1) * (2 if kind == "sum" else 1)
        return messages * (self.latency + size / workers / self.bandwidth)

    def all_seconds(self, collectives: Iterable[Collective]) -> float:
        """Time of collectives, one after the other."""
        return sum(self.seconds(c.kind, c.workers, c.bytes) for c in collectives)


@dataclass(frozen=True)
class Step:
    """Seconds of a step on average, by what they are spent on.

    Attributes:
        model: The passes through the model, and the optimizer below.
        gradients: The all-reduce of the gradients.
        method: Work of the method.
        wire: Collectives of the method.
    """

    model: float
    gradients: float
    method: float
    wire: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.model + self.gradients + self.method + self.wire


def predict(
    machine: Machine, workers: int, flops: float, gradient_bytes: int, found: Estimate | None
) -> Step:
    """A step on average.

    Args:
        machine: What it runs on.
        workers: P.
        flops: Operations of a worker in its passes through the model.
        gradient_bytes: Bytes of all gradients.
        found: The estimate of the method, or None for the base optimizer alone.
    """
    model = flops / machine.rate
    gradients = machine.seconds("sum", workers, gradient_bytes)
    if found is None:
        return Step(model, gradients, 0.0, 0.0)
    wire = machine.all_seconds(found.step_collectives)
    wire += sum(u.share * machine.all_seconds(u.collectives) for u in found.updates)
    return Step(model, gradients, found.mean_flops / machine.rate, wire)
