"""Sizes and costs of a method on a model, from shapes alone.

Nothing here repeats what a method does. The method itself runs on tensors without memory, on the
statistics that each layer will show: what it yields is what crosses workers, what it returns is
its state, and its operations are counted (see `tracing`). So a new method is estimated like any
other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from mkor.capture.discover import Layer
from mkor.methods.base import Method
from mkor.optimizer import Preconditioner
from mkor.schedule import UpdateSchedule
from mkor.subject import Subject, check_count, rows_of
from mkor.texts import aligned, bytes_text, flops_text
from mkor.tracing import Trace, trace_layers
from mkor.wire import Collective, Crossing, Division, step_crossings, update_crossings

MOST_WORKERS = 2**20

LATER = range(1000, 2000)
"""Steps that stand for all: behind every warm-up, and whole periods of usual frequencies."""


@dataclass(frozen=True)
class LayerEstimate:
    """One layer, as it will be on the workers that hold it.

    Attributes:
        name: As in `optimizer.layers()`.
        kind: Class of the module.
        shape: Shape of the weight.
        reason: Why the layer is left to the base optimizer, or None.
        bytes: Bytes of state.
        wire: Bytes of what an update brings together from workers.
        update_flops: Operations of an update on the worker that owns the layer, hooks included.
        step_flops: Operations of preconditioning a gradient.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    reason: str | None = None
    bytes: int = 0
    wire: int = 0
    update_flops: int = 0
    step_flops: int = 0


@dataclass(frozen=True)
class UpdateEstimate:
    """One kind of update of the factors.

    Attributes:
        share: The share of the steps that make such an update.
        flops: Operations of the busiest worker.
        collectives: What crosses workers, in order.
    """

    share: float
    flops: int
    collectives: tuple[Collective, ...]

    @property
    def wire(self) -> int:
        """Bytes of all results."""
        return sum(collective.bytes for collective in self.collectives)


@dataclass(frozen=True)
class Estimate:
    """What `mkor.estimate` found; `print` shows it as a table.

    Attributes:
        method: Name of the method.
        workers: Number of workers.
        layers: One entry per layer, those left to the base optimizer last.
        updates: The kinds of update that later steps make, the dearest first.
        step_collectives: What crosses workers in every step.
        bytes_by_worker: Bytes of state of each worker.
        step_flops: Operations of preconditioning, which every step does, of the busiest worker.
    """

    method: str
    workers: int
    layers: tuple[LayerEstimate, ...]
    updates: tuple[UpdateEstimate, ...]
    step_collectives: tuple[Collective, ...]
    bytes_by_worker: tuple[int, ...]
    step_flops: int

    @property
    def bytes(self) -> int:
        """Bytes of state of the worker that keeps the most."""
        return max(self.bytes_by_worker)

    @property
    def wire(self) -> int:
        """Bytes that cross the network in an update: the sizes of what collectives return."""
        return self.updates[0].wire

    @property
    def update_flops(self) -> int:
        """Operations of an update on the busiest worker."""
        return self.updates[0].flops

    @property
    def step_wire(self) -> int:
        """Bytes that cross the network in every step, whether it updates or not."""
        return sum(collective.bytes for collective in self.step_collectives)

    @property
    def mean_wire(self) -> float:
        """Bytes that cross the network a step, on average."""
        return self.step_wire + sum(update.share * update.wire for update in self.updates)

    @property
    def mean_flops(self) -> float:
        """Operations of a step with its part of the updates, on average."""
        return self.step_flops + sum(update.share * update.flops for update in self.updates)

    def __repr__(self) -> str:
        """A table of the layers and of all together."""
        return table(self)


def estimate(
    model: nn.Module,
    method: Callable[..., Preconditioner],
    *,
    rows: int | Mapping[str, int] = 1,
    workers: int = 1,
    **options: Any,
) -> Estimate:
    """Tell what a method will keep, send and compute, before anything is trained.

    The model is not changed and may be on the "meta" device. An operation is an addition or a
    multiplication. On the wire count the sizes of what collectives return on a worker: an
    all-reduce of n bytes counts n, whatever the algorithm sends. The losses that a hybrid switch
    averages, and the second evaluation of K-BFGS's model, are not counted; of HyLo's "auto" the
    dearer "kid" is.

    Args:
        model: The model.
        method: The class of the optimizer, such as `mkor.MKOR`, or `mkor.auto`.
        rows: Rows that a worker's batch gives a layer: samples, or samples times tokens where a
            layer sees tokens (places, for K-FAC and sketches of convolutions). A number, or one by
            the name of the layer. Only the work of hooks depends on it, and all of SNGD and HyLo.
        workers: Number of workers.
        options: The options of the method.

    Returns:
        The estimate, layer by layer and in all.

    Raises:
        TypeError: `model` is no module, `method` no class of an optimizer, or an option is unknown.
        ValueError: An option, `rows` or `workers` is out of range.

    Example:
        >>> print(mkor.estimate(model, mkor.KFAC, rows=512, workers=8))
    """
    check_count("workers", workers, MOST_WORKERS)
    subject = Subject.of(model, method, options)
    common, chosen = subject.common, subject.method
    first = chosen.at(LATER[0]).first()
    layers, left = subject.layers(first)
    counts = rows_of(rows, layers)
    costs = {name: first.cost(layer.view.shape) for name, layer in layers.items()}
    division = Division.among(workers, common["grad_worker_fraction"], costs)
    updates: list[tuple[UpdateEstimate, tuple[LayerEstimate, ...]]] = []
    schedule = UpdateSchedule(common["factor_update_steps"], common["warmup_steps"])
    for now, share in shares(chosen, schedule).items():
        traces = trace_layers(now, layers, counts, workers)
        crossings = update_crossings(traces, division, common["wire_dtype"])
        made = summary(share, traces, crossings, division)
        updates.append((made, entries(layers, traces, crossings)))
    updates.sort(key=lambda pair: (pair[0].wire, pair[0].flops), reverse=True)
    found = updates[0][1]
    return Estimate(
        chosen.name,
        workers,
        (*found, *(LayerEstimate(m.name, m.kind, m.shape, m.reason) for m in left)),
        tuple(pair[0] for pair in updates),
        tuple(collective for collective, _ in step_crossings(layers, division)),
        tuple(division.by_worker({layer.name: layer.bytes for layer in found}, {})),
        division.busiest({layer.name: layer.step_flops for layer in found}, {}),
    )


def shares(method: Method, schedule: UpdateSchedule) -> dict[Method, float]:
    """The kinds of update that later steps make, and the share of the steps that make each."""
    kinds: dict[Method, float] = {}
    for step in LATER:
        if schedule.due(step):
            now = method.at(step)
            kinds[now] = kinds.get(now, 0) + 1 / len(LATER)
    return kinds or {method.at(LATER[0]): 0.0}


def summary(
    share: float, traces: dict[str, Trace], crossings: list[Crossing], division: Division
) -> UpdateEstimate:
    """An update of all layers together."""
    held = {name: found.held_flops for name, found in traces.items()}
    owned = {name: found.owned_flops for name, found in traces.items()}
    hooks = sum(found.hook_flops for found in traces.values())
    collectives = tuple(collective for collective, _ in crossings)
    return UpdateEstimate(share, hooks + division.busiest(held, owned), collectives)


def entries(
    layers: dict[str, Layer], traces: dict[str, Trace], crossings: list[Crossing]
) -> tuple[LayerEstimate, ...]:
    """One entry a layer."""
    return tuple(
        LayerEstimate(
            name,
            layer.view.kind,
            tuple(layer.view.weight.shape),
            None,
            traces[name].bytes,
            sum(by_layer.get(name, 0) for _, by_layer in crossings),
            traces[name].update_flops,
            traces[name].step_flops,
        )
        for name, layer in layers.items()
    )


def table(found: Estimate, most: int = 12) -> str:
    """A short table: the layers up to `most`, and all together."""
    own = [layer for layer in found.layers if layer.reason is None]
    rows = [("layer", "shape", "state", "wire", "update", "step")]
    for layer in own[:most]:
        shape = "x".join(map(str, layer.shape))
        rows.append((layer.name, shape, *quantities(layer)))
    if len(own) > most:
        rows.append((f"... and {len(own) - most} more", "", "", "", "", ""))
    rows.append(("all", "", *quantities(found)))
    on, made = several(found.workers, "worker"), several(len(own), "layer")
    mean = f"a step on average: {bytes_text(found.mean_wire)} on the wire, "
    lines = [f"{found.method} on {on}: {made} preconditioned", *aligned(rows, left=2)]
    lines.append(mean + flops_text(found.mean_flops))
    reasons = Counter(layer.reason for layer in found.layers if layer.reason is not None)
    lines += [f"base optimizer only: {count} x {reason}" for reason, count in reasons.items()]
    return "\n".join(lines)


def several(count: int, word: str) -> str:
    """A number of things."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def quantities(entry: LayerEstimate | Estimate) -> tuple[str, str, str, str]:
    """State, wire, and operations of an update and of a step."""
    return (
        bytes_text(entry.bytes),
        bytes_text(entry.wire),
        flops_text(entry.update_flops),
        flops_text(entry.step_flops),
    )
