"""The paper's knee-point learning rate scheduler (section 8.13).

A knee is where training has become slow for its learning rate: the smoothed rate of improvement is
below β times the mean rate of improvement since that learning rate was set.

    scheduler = mkor.KneePointLR(optimizer, beta=0.1, factor=0.5)
    for epoch in range(epochs):
        train(...)
        scheduler.step(validation_loss)
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, SupportsFloat

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mkor.checks import fraction, is_count, is_number, one_of, require
from mkor.meter import Meter, device_of
from mkor.packed import METER, SCHEDULER, check_parts
from mkor.rates import Rate, copies, floors, lowered, set_rate, single
from mkor.warn import warn

LOG = logging.getLogger("mkor")

REMEDY = "it is not what KneePointLR.state_dict() returned: load a whole one, or start anew"

NOT_SAVED = ("optimizer", "beside", "meter", "observed", "warned")
"""Attributes that are no part of the state."""


class KneePointLR(LRScheduler):
    """Multiplies the learning rates by a factor whenever the metric has passed a knee.

    With means m of the metric over windows, k of them since the rate was set, and signs for a
    metric that falls: rₖ = decay·rₖ₋₁ + (1−decay)·(mₖ₋₁ − mₖ), started without bias, and a knee is
    where rₖ < β·(m₀ − mₖ)/k, or where nothing improved since the rate was set (m₀ ≤ mₖ).

    Source: Mozaffari et al., NeurIPS 2023, section 8.13, which compares the smoothed rate with the
    improvement itself; it is divided by the number of windows here, so that both are rates.

    Example:
        >>> scheduler = mkor.KneePointLR(optimizer)
        >>> scheduler.step(validation_loss)  # once an epoch
        >>> per_batch = mkor.KneePointLR(optimizer, window=100, dwell=1000)
        >>> per_batch.step(loss)  # after each optimizer.step(); waits for the device in every 100th
        >>> warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
        >>> both = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, scheduler], [5])
        >>> scheduler.observe(validation_loss)  # since `both` passes no metric
        >>> both.step()
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        beta: float = 0.1,
        factor: float = 0.5,
        decay: float = 0.9,
        dwell: int = 10,
        floor: float | Sequence[float] = 0.0,
        mode: str = "min",
        window: int = 1,
        warmup: int = 0,
        beside: LRScheduler | None = None,
    ) -> None:
        """Take the rates of `optimizer` as they are; nothing changes until the first knee.

        Args:
            optimizer: Any `torch.optim` optimizer, `mkor`'s among them.
            beta: Part of the mean rate of improvement below which the smoothed one is a knee (β).
            factor: What the learning rates are multiplied by at a knee.
            decay: Weight of the old value in the smoothed rate of improvement.
            dwell: Least number of calls of `step` at a learning rate.
            floor: Least learning rate, or one for each group; a rate below it stays.
            mode: "min" for a metric that is to fall, such as a loss, "max" for one that is to rise.
            window: Calls of `step` whose metrics are averaged before they are looked at. A tensor
                is waited for once a window.
            warmup: Calls of `step` at the start whose metrics are left out.
            beside: A scheduler of the same optimizer that computes rates from its own base rates,
                as `LambdaLR` does, or that holds such ones; its base rates are lowered as well.

        Raises:
            TypeError: `optimizer` or `beside` is of the wrong type.
            ValueError: An option is out of range, or `beside` is of another optimizer.
        """
        check_kind("optimizer", optimizer, Optimizer, "torch.optim.Optimizer")
        require("beta", beta, is_number(beta) and fraction(beta), "between 0 and 1, both excluded")
        lowers = is_number(factor) and fraction(factor)
        require("factor", factor, lowers, "between 0 and 1, both excluded")
        require("decay", decay, is_number(decay) and 0 <= decay < 1, "at least 0 and below 1")
        require("dwell", dwell, is_count(dwell, 1), "an integer of at least 1")
        require("window", window, is_count(window, 1), "an integer of at least 1")
        require("warmup", warmup, is_count(warmup, 0), "an integer of at least 0")
        one_of("mode", mode, ("min", "max"))
        self.optimizer = optimizer
        self.beta, self.factor, self.decay, self.dwell = beta, factor, decay, dwell
        self.mode, self.window, self.warmup = mode, window, warmup
        self.floor = floor
        floors(floor, len(optimizer.param_groups))
        self.beside = check_beside(beside, optimizer)
        self.meter = Meter("the metric")
        self.knees = 0
        self.last_epoch = 0
        self.observed: SupportsFloat | None = None
        self.warned = False
        for group, rate in zip(optimizer.param_groups, copies(optimizer), strict=True):
            group.setdefault("initial_lr", rate)
        self.base_lrs = copies(optimizer, "initial_lr")
        self._last_lr = copies(optimizer)
        self._begin(None)

    def _begin(self, metric: float | None) -> None:
        """A learning rate was set when the metric was this."""
        self.first = self.last = metric
        self.windows = 0
        self.smoothed = 0.0

    def observe(self, metrics: SupportsFloat) -> None:
        """Show the metric to the next `step()`, where that is called without one.

        `SequentialLR`, `ChainedScheduler` and frameworks call it so. Only the last metric counts.

        Args:
            metrics: The metric, a number or a tensor of one element.

        Raises:
            TypeError: The metric is not a number.
            ValueError: The metric is a tensor of several elements.
        """
        Meter(self.meter.name).add(metrics)
        self.observed = metrics.detach() if isinstance(metrics, Tensor) else metrics

    def step(self, metrics: SupportsFloat | None = None) -> None:
        """Look at a metric and lower the learning rates if it has passed a knee.

        Metrics that aren't finite are left out; the log tells how many, and a window that holds no
        other warns, once. Over many workers it is the mean of theirs that
        counts, so that each of them must call this alike; they exchange it once a window.

        Args:
            metrics: The metric, a number or a tensor of one element; None takes what `observe`
                was shown since the last call.

        Raises:
            TypeError: There is no metric.
            ValueError: The metric is a tensor of several elements.
        """
        if self.last_epoch < 0:  # torch up to 2.8 begins it by step(0)
            self._initial_step()
            return
        metrics = self.observed if metrics is None else metrics
        if metrics is None:
            raise TypeError(
                "KneePointLR.step needs the metric: call step(loss); where another scheduler or a "
                "framework calls step(), such as SequentialLR, call observe(loss) before"
            )
        self.observed = None
        self.last_epoch += 1
        if self.last_epoch > self.warmup:
            self.meter.add(metrics)
            if self.meter.calls >= self.window:
                self._look()
        self._last_lr = copies(self.optimizer)

    def _look(self) -> None:
        """Lower the rates if the window that ends has a knee."""
        groups, shown = self.optimizer.param_groups, self.meter.calls
        mean = self.meter.take(device_of(p for g in groups for p in g["params"]))
        if self.meter.left_out:
            told = self.last_epoch, self.meter.left_out, shown
            LOG.warning("metric left out: call=%d metrics=%d of=%d", *told)
        if mean is None:
            self._warn(shown)
        elif self._knee(mean):
            self.knees += 1
            self._lower()
            self._begin(mean)
            LOG.info(
                "knee: call=%d metric=%.6g knees=%d lr=%.6g",
                *(self.last_epoch, mean, self.knees, float(groups[0]["lr"])),
            )

    def _warn(self, shown: int) -> None:
        """Tell once that nothing can be told of the metric."""
        if not self.warned:
            self.warned = True
            warn(
                f"the learning rate can't follow a metric that is not finite: of the {shown} that "
                f"KneePointLR was shown up to call {self.last_epoch} none was, and the rate stays. "
                "Look at the loss; if it is NaN from here on, the training has diverged"
            )

    def _initial_step(self) -> None:
        """Begin at the base rates, which `SequentialLR` asks of its first scheduler."""
        for group, rate in zip(self.optimizer.param_groups, self.base_lrs, strict=False):
            set_rate(group, rate)
        self._last_lr = copies(self.optimizer)
        self.last_epoch = 0
        self.observed = None

    def _update_lr(self, epoch: int | None = None) -> None:
        """Begin at the base rates, as `SequentialLR` asks of the others at their milestones."""
        self._initial_step()

    def _knee(self, metric: float) -> bool:
        """Whether the metric's next mean is a knee."""
        if self.first is None or self.last is None:
            self._begin(metric)
            return False
        sign = 1 if self.mode == "min" else -1
        gain, total = sign * (self.last - metric), sign * (self.first - metric)
        self.last = metric
        self.windows += 1
        self.smoothed = self.decay * self.smoothed + (1 - self.decay) * gain
        rate = self.smoothed / (1 - self.decay**self.windows)
        slow = total <= 0 or rate < self.beta * total / self.windows
        return slow and self.windows * self.window >= self.dwell

    @torch.no_grad()
    def _lower(self) -> None:
        """Lower the rates of all groups, and the base rates that `beside` computes with."""
        groups = self.optimizer.param_groups
        least = floors(self.floor, len(groups))
        # All first: groups may share one tensor.
        rates = [lowered(g["lr"], self.factor, low) for g, low in zip(groups, least, strict=True)]
        for group, rate in zip(groups, rates, strict=True):
            set_rate(group, rate)
        for scheduler in single(self.beside):
            bases = zip(scheduler.base_lrs, least, strict=False)  # groups came later without one
            scheduler.base_lrs = [lowered(base, self.factor, low) for base, low in bases]

    def get_lr(self) -> list[Rate]:
        """The present learning rates of the groups, copied."""
        return copies(self.optimizer)

    def get_last_lr(self) -> list[Rate]:
        """The learning rates of the groups after the last call of `step`, copied."""
        return self._last_lr

    def state_dict(self) -> dict[str, Any]:
        """Everything but the optimizer and `beside`, which have state dicts of their own."""
        own = {key: value for key, value in vars(self).items() if key not in NOT_SAVED}
        return {**own, "meter": self.meter.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, options included, as torch's schedulers do.

        Raises:
            TypeError: It is no dict.
            ValueError: It is of another kind of scheduler, or damaged; nothing is changed then.
        """
        check_kind("state_dict", state_dict, dict, "dict that KneePointLR.state_dict() returned")
        missing = self.state_dict().keys() - state_dict.keys()
        if missing:
            raise ValueError(
                f"state_dict must be what KneePointLR.state_dict() returned; it lacks "
                f"{', '.join(sorted(missing))}"
            )
        check_parts(state_dict, SCHEDULER, "state_dict", REMEDY)
        check_parts(state_dict["meter"], METER, "state_dict['meter']", REMEDY)
        state = dict(state_dict)
        self.meter.load_state_dict(state.pop("meter"))
        vars(self).update(state)


def check_kind(name: str, value: object, kind: type, title: str) -> None:
    """Raise TypeError unless the value is of the kind."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be a {title}, got {type(value).__name__}")


def check_beside(beside: LRScheduler | None, optimizer: Optimizer) -> LRScheduler | None:
    """The scheduler beside, which must be of the same optimizer."""
    if beside is None:
        return None
    check_kind("beside", beside, LRScheduler, "torch.optim.lr_scheduler.LRScheduler")
    if beside.optimizer.param_groups is not optimizer.param_groups:
        raise ValueError(
            f"beside is a {type(beside).__name__} of another optimizer; build both schedulers on "
            "the same one"
        )
    return beside
