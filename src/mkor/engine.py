"""The stages of a step in order: capture → synchronise → update → precondition → rescale.

This is the only file that sees more than one of them. It holds the per-layer state, runs the
methods' update generators together so that a round of theirs costs one collective, and keeps the
books that `optimizer.layers()` shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from mkor.capture.discover import Layer, LeftOut, find_layers
from mkor.capture.folds import observable
from mkor.capture.hooks import Capture
from mkor.capture.parallel import share_layers
from mkor.capture.rivals import refuse_rivals
from mkor.capture.views import View
from mkor.conditions import Marks, compared, marks
from mkor.distributed import comm
from mkor.faults import Faults, refuse_nonfinite
from mkor.messages import Exchange, Owned
from mkor.meter import Meter, device_of
from mkor.methods.base import Kind, LayerShape, Method, Seen, State, Update
from mkor.momentum import accelerate
from mkor.ownership import Ownership
from mkor.record import Record
from mkor.rescale import RESCALE, SIZED
from mkor.rewrite import Rewriter
from mkor.schedule import UpdateSchedule
from mkor.synchronise import Answers, answer, complete, run_together

BOOKS = ("index", "records", "ownership", "heard", "sizes", "resting", "paused", "faults")
"""What a copy of an engine takes over."""

OPTIONS = (
    *("momentum", "rescale", "kl_clip"),
    *("wire_dtype", "on_nonfinite", "grad_worker_fraction"),
)
"""Common options that an engine is given by name."""


class Engine:
    """Runs one method over the layers of one model."""

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        schedule: UpdateSchedule,
        *,
        skip: tuple[str, ...],
        momentum: float | Callable[[int], float] | None,
        rescale: str | None,
        kl_clip: float | Callable[[int], float] | None,
        wire_dtype: torch.dtype | None,
        on_nonfinite: str,
        grad_worker_fraction: float,
    ) -> None:
        """Keep the parts; `discover` finds the layers."""
        self.model = model
        self.method = method
        self.schedule = schedule
        self.skip = skip
        self.momentum = momentum
        self.rescale = rescale
        self.kl_clip = kl_clip
        self.on_nonfinite = on_nonfinite
        self.ownership = Ownership(grad_worker_fraction)
        self.wire_dtype = wire_dtype
        self.capture = Capture(method.absolute())
        self.layers: dict[str, Layer] = {}
        self.left: list[LeftOut] = []
        self.records: dict[str, Record] = {}
        self.faults = Faults()
        self.index = 0
        self.resting: int | None = None  # the number of steps after which it began to rest
        self.paused = False  # while the base optimizer is on trial
        self.heard = Meter("the gradient's size")  # ‖∇‖² in the period that runs
        self.sizes: tuple[float, ...] = ()  # of the last two periods
        self.marks: Marks = {}  # of the batch of this step, for a second pass

    def discover(self, optimized: set[int]) -> None:
        """Find the layers whose weights are optimized and (re)install the hooks."""
        known = {name: layer.view.shape for name, layer in self.layers.items()}
        self.layers, self.left = find_layers(self.model, optimized, self.skip, self.accept)
        self.team = share_layers(self.model, self.layers, self.method.at(self.index))
        kept = {n for n, layer in self.layers.items() if known.get(n) == layer.view.shape}
        self.records = {n: self.records[n] if n in kept else Record() for n in self.layers}
        self.ownership.cover({n: self.method.cost(la.view.shape) for n, la in self.layers.items()})
        if self.resting is None:
            self.capture.watch(self.layers, self.kinds(self.method.at(self.index).wants))
        self.listen()

    def rest(self, rest: bool, optimized: set[int]) -> None:
        """Free the factors and remove the hooks, or install hooks for new factors."""
        self.resting = self.index if rest else None
        self.paused = False
        self.layers, self.records, self.sizes = {}, {}, ()
        self.heard.clear()
        self.capture.watch({}, {})
        self.discover(optimized)

    def pause(self, paused: bool) -> None:
        """Keep the factors and hooks, but leave the gradients alone; or go on."""
        if paused != self.paused:
            self.paused = paused
            self.listen()

    def reopen(self, books: dict[str, Any]) -> None:
        """Go on with the books of the engine that this one is a copy of."""
        vars(self).update(books)
        if self.resting is not None:
            self.capture.watch({}, {})
        self.listen()

    def listen(self) -> None:
        """Observe the step that begins, if it updates the factors."""
        self.capture.armed = False
        if not self.working:
            return
        self.now = self.method.at(self.index).learn(self.sizes)
        if self.due:
            self.capture.arm(self.kinds(self.now.wants), self.seed)

    def listen_again(self) -> None:
        """Observe a second pass of this step."""
        self.capture.arm(self.kinds(self.now.wants_again), self.seed)

    def kinds(self, wants: Callable[[LayerShape], tuple[Kind, Kind]]) -> dict[str, Any]:
        """What a method wants of every layer."""
        return {name: wants(layer.view.shape) for name, layer in self.layers.items()}

    @property
    def working(self) -> bool:
        """Whether gradients are preconditioned."""
        return self.resting is None and not self.paused

    @property
    def seed(self) -> int:
        """A number of its own for every step and batch."""
        return self.team.seed(self.index)

    @property
    def due(self) -> bool:
        """Whether the current step updates the factors."""
        return self.schedule.due(self.index)

    def accept(self, view: View) -> str | None:
        """Why the method can't take a layer, or None if it can."""
        reason = observable(view, self.method.at(self.index).wants(view.shape)[1])
        has_factor = any(self.method.sides(view.shape))
        return reason or (None if has_factor else f"both sides are {self.method.limit()}")

    def update(self) -> None:
        """Fold what the layers showed into their factors, if this step is due."""
        for layer in self.layers.values():
            layer.view.settle()
        if not self.due:
            return
        refuse_rivals(self.capture)
        self.capture.mask.check()
        seen = self.collect()
        if self.on_nonfinite == "raise":
            refuse_nonfinite(self.layers, seen, self.index)
        self.marks = marks(seen) if self.method.second_pass else {}
        first = self.now.first()
        methods = {name: self.now if self.records[name].updates else first for name in seen}
        self.run({n: methods[n].update(self.state(n), seen[n]) for n in seen})
        for name in seen:
            self.records[name].updates += 1
            self.records[name].last_update = self.index

    def revisit(self) -> None:
        """Fold what the same batch showed after the base's step, for layers that were updated."""
        weights = [layer.view.weight for layer in self.layers.values()]
        trained = [weight for weight in weights if weight.requires_grad]
        known = any(record.updates for record in self.records.values())
        if trained and not known and all(weight.grad is None for weight in trained):
            self.faults.once(
                "the closure showed no gradients of any layer, so nothing is preconditioned: it "
                "must clear the gradients, compute the loss, call backward() and return the loss"
            )
        seen = {name: what for name, what in self.collect().items() if self.records[name].updates}
        seen = compared(self.marks, seen)
        self.run({n: self.now.revisit(self.state(n), what) for n, what in seen.items()})

    def run(self, updates: dict[str, Update]) -> None:
        """Run updates together and keep the states of the layers that this worker holds."""
        for name, state in run_together(updates, self.answer).items():
            if self.ownership.holds(name):
                self.records[name].state = state

    def answer(self, messages: dict[str, Exchange | Owned]) -> Answers:
        """What workers make together of one round of messages."""
        return answer(messages, self.ownership, self.wire_dtype)

    def precondition(self, lrs: dict[int, Any]) -> None:
        """Rewrite the gradients of the layers.

        `lrs` are the learning rates by the `id` of the parameter; only `kl_clip` needs them.
        """
        self.hear()
        views = self.ready()
        if self.momentum is not None:
            dense = {n: view for n, view in views.items() if view.gradient() is not None}
            layers = [(view, self.records[name].momentum) for name, view in dense.items()]
            accelerate(layers, self.value(self.momentum))
        clip = None if self.kl_clip is None else self.value(self.kl_clip)
        rewriter = Rewriter(self.now, RESCALE[self.rescale], clip, self.ownership)
        rewriter.rewrite(views, {name: self.state(name) for name in views}, lrs)

    def ready(self) -> dict[str, View]:
        """Layers that have factors, or all if that doesn't matter.

        It does unless gradients change without them: then no factors stand for the identity.
        """
        anyway = self.momentum is not None or self.rescale in SIZED
        return {n: la.view for n, la in self.layers.items() if anyway or self.records[n].updates}

    def value(self, option: float | Callable[[int], float]) -> float:
        """A number that may be a function of the step, at this step."""
        return option(self.index) if callable(option) else option

    def hear(self) -> None:
        """Add up the gradient's squared size, for a method that listens to it."""
        if self.method.listens() and self.layers:
            norms = [layer.view.square_share() for layer in self.layers.values()]
            self.heard.add(torch.stack([norm.to(norms[0]) for norm in norms]).sum())

    def advance(self) -> None:
        """End the step: forget its statistics and listen if the next one updates."""
        self.index += 1
        self.capture.mask.clear()
        if self.resting is not None:
            return
        period = self.method.listens()
        if period and self.index % period == 0:
            mean = self.heard.take(device_of(self.model.parameters()))
            self.sizes = self.sizes if mean is None else (*self.sizes, math.sqrt(mean))[-2:]
        self.capture.clear()
        self.listen()

    def collect(self) -> dict[str, Seen]:
        """Statistics of every layer that showed some; on many workers, of every layer."""
        seen: dict[str, Seen] = {}
        silent: list[str] = []
        together = comm.world_size() > 1
        for name, layer in self.layers.items():
            if not layer.view.weight.requires_grad:
                continue
            what = self.capture.collect(layer)
            if what is None and together:
                what = self.capture.nothing(layer)
            if what is not None:
                norm = layer.view.norm_share() if self.method.weighs() else None
                weight = layer.view.weights() if self.method.second_pass else None
                seen[name] = replace(what, gradient=norm, weight=weight)
            elif layer.view.weight.grad is not None and not self.records[name].updates:
                silent.append(name)
        self.faults.silent(silent, self.index)
        return complete({name: self.layers[name].view for name in seen}, seen)

    def state(self, name: str) -> State:
        """The layer's state: made at the first use, following its weight's device and dtype.

        Of a layer that other workers hold, its tensors have no memory.
        """
        record, view = self.records[name], self.layers[name].view
        weight = view.weight
        if not self.ownership.holds(name):
            return self.method.init(view.shape, torch.device("meta"), weight.dtype)
        if not record.state:
            return self.method.init(view.shape, weight.device, weight.dtype)
        return record.follow(weight, self.method.dtype)
