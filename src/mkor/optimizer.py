"""The user's face: a model, a base optimizer, and a method that improves its gradients.

    base = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = mkor.MKOR(model, base)
    loss.backward(); optimizer.step(); optimizer.zero_grad()

The wrapper owns curvature only. Learning rates, momentum, weight decay and everything else live in
the base optimizer: `param_groups`, `state` and `defaults` *are* the base's, so schedulers and code
that edits groups act on the real thing.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mkor import checkpoint, validate
from mkor.agreement import Agreement
from mkor.capture import pending
from mkor.capture.hooks import remove_inert_hooks
from mkor.conditions import Replay, exact
from mkor.distributed.guard import during
from mkor.engine import BOOKS, OPTIONS, Engine
from mkor.faults import LOG
from mkor.handover import Handover
from mkor.joining import Joining
from mkor.meter import device_of
from mkor.methods.base import Method
from mkor.report import LayerInfo, faults_of, layer_infos, table
from mkor.schedule import UpdateSchedule
from mkor.stateful import Factors


class Preconditioner(Joining):
    """A `torch.optim.Optimizer` that rewrites `.grad` by a curvature method, then steps `base`.

    Subclasses choose the method; users build those. After `step()` the `.grad` of a preconditioned
    layer holds the preconditioned gradient until it is cleared.
    """

    def __init__(self, model: nn.Module, base: Optimizer, method: Method, **common: Any) -> None:
        """Attach to the layers of `model` whose weights `base` optimizes.

        Args:
            model: The model, wrapped or not.
            base: The optimizer that takes the steps.
            method: The curvature method.
            common: The options that all methods share.

        Raises:
            TypeError: `model` or `base` is of the wrong type.
            ValueError: `base` shares no parameter with the model or has others than the model's,
                or an option is out of range.
        """
        validate.check_model(model)
        validate.check_base(base)
        validate.check_parameters(model, base.param_groups)
        common = validate.common_options(common)
        validate.check_division(model, common["grad_worker_fraction"])
        if method.second_pass:
            validate.check_second_pass(base)
        if common["momentum"] is not None:
            validate.check_momentum(base, common["hybrid"])
        self._attach(model, base, method, common)
        validate.warn_idle(self.layers())

    def _attach(
        self, model: nn.Module, base: Optimizer, method: Method, common: dict[str, Any]
    ) -> None:
        self.model = model
        self.base = base
        self._method = method
        self._common = common
        self._preconditioned = False
        self._closed = False
        self._handover = Handover(common["hybrid"]) if common["hybrid"] is not None else None
        schedule = UpdateSchedule(common["factor_update_steps"], common["warmup_steps"])
        options = {key: common[key] for key in OPTIONS}
        self._engine = Engine(model, method, schedule, skip=tuple(common["skip"]), **options)
        self._agreement = Agreement(self._engine, base, common)
        Optimizer.__setstate__(self, {})
        self._engine.discover(self._optimized())
        self._finalizer = weakref.finalize(self, self._engine.capture.remove)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Precondition the gradients and step the base optimizer.

        Args:
            closure: Re-evaluates the model and returns the loss. It runs first, with gradients
                enabled. A base that evaluates it repeatedly (LBFGS) gets preconditioned gradients
                in each evaluation; the factors are updated in the first.

        Returns:
            The closure's loss, or None.
        """
        if self._method.second_pass and self._active:
            return self._step_twice(validate.check_closure(self, closure))
        if validate.needs_closure(self.base):
            return self._step_by_closure(validate.check_closure(self.base, closure))
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = self._seen(validate.function(closure)())
            self._preconditioned = False  # its gradients are new
        if not self._preconditioned:
            self.precondition()
        self._preconditioned = False
        self.base.step()
        return loss

    def precondition(self) -> None:
        """Rewrite the gradients, updating the factors if due, without stepping the base.

        For frameworks that step their own optimizer. A `step()` that follows doesn't precondition
        a second time; call this once per set of gradients.
        """
        if self._closed:
            return
        if self._method.second_pass and self._active:
            raise TypeError(
                f"{type(self).__name__} evaluates each batch again after the base's step, so it "
                "can't precondition alone: call step(closure)"
            )
        if self._active:
            self._rewrite()
        self._advance()
        self._preconditioned = True

    @property
    def _active(self) -> bool:
        """Whether gradients are preconditioned."""
        return not self._closed and self._engine.working

    def _advance(self) -> None:
        """End the step, and with it the phase if the hybrid switch says so."""
        self._engine.advance()
        handover = self._handover
        if handover is None or self._closed:
            return
        if handover.advance(self._engine.index, device_of(self.model.parameters())):
            self.log_events()
            self._engine.rest(not handover.course.preconditioning, self._optimized())
        self._engine.pause(handover.trying)

    def _rewrite(self, update: bool = True) -> None:
        with exact(self.model.parameters()):
            if update:
                self._update()
            self._engine.precondition(self._rates() if self._common["kl_clip"] else {})

    def _step_twice(self, closure: Callable[[], Any]) -> Any:
        replay = Replay(self.model) if self._engine.due else None
        with torch.enable_grad():
            loss = self._seen(closure())
        self._rewrite()
        self.base.step()
        try:
            if replay is not None:
                self._engine.listen_again()
                with replay.again():
                    with torch.enable_grad():
                        closure()
                    with exact(self.model.parameters()):
                        self._engine.revisit()
        finally:  # the base has stepped, whatever became of the second pass
            self._advance()
        return loss

    def _step_by_closure(self, closure: Callable[[], Any]) -> Any:
        evaluations = 0

        def preconditioned() -> Any:
            nonlocal evaluations
            with torch.enable_grad():
                loss = closure()
            if evaluations == 0:
                self._seen(loss)
            if self._active:
                self._rewrite(update=evaluations == 0)
                self._engine.capture.armed = False
            evaluations += 1
            return loss

        try:
            return self.base.step(preconditioned)
        finally:
            self._advance()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and the statistics, mask and losses that belong to them."""
        self._forget()
        self._preconditioned = False
        self.base.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the base optimizer; layers of the model it covers are preconditioned.

        Raises:
            ValueError: The group has parameters that are not the model's.
        """
        param_group = validate.listed(param_group)
        validate.check_added(self.model, validate.tensors(param_group["params"]))
        self.base.add_param_group(param_group)
        if not self._closed:
            self._engine.discover(self._optimized())

    def layers(self) -> list[LayerInfo]:
        """One record per layer: what is preconditioned, what is not and why, and its books."""
        return layer_infos(self._engine)

    def log_events(self) -> None:
        """Log the faults since the last call: one line a layer, by the logger `mkor`, as warnings.

        Steps count them on their device and wait for nothing; this reads the counters, so call it
        as often as the loss is read. `state_dict()` and a hand-over do it by themselves.
        """
        self._engine.faults.report(faults_of(self.layers()), self._engine.index)

    def close(self) -> None:
        """Remove every hook; from here on a step is the base optimizer's alone."""
        self._finalizer()
        self._closed = True

    def __repr__(self) -> str:
        """A short table of the layers."""
        closed = ", closed" if self._closed else ""
        title = f"{type(self).__name__} on {type(self.base).__name__}{closed}"
        return table(title, self.layers())

    @during("gather the factors for state_dict(), which all workers must call together")
    def state_dict(self) -> dict[str, Any]:
        """The base's state dict plus the factors by layer name, loadable with `weights_only=True`.

        As with torch's own optimizers, the tensors are the live ones, not copies. With a
        `grad_worker_fraction` below 1, every worker must call this: the others' factors are
        gathered, layer by layer, to the CPU. A worker that calls it alone waits for the time limit
        of the process group.
        """
        self._before_saving()
        self.log_events()
        packed = checkpoint.pack(self._engine, self.base, self._handover)
        return self._saved({**self.base.state_dict(), checkpoint.KEY: packed})

    @property
    def factors(self) -> Factors:
        """The factors, as `torch.distributed.checkpoint` saves and loads them (a `Stateful`)."""
        return Factors(self._engine, self.base, self._handover)

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Load what `state_dict` returned; tensors are copied.

        Args:
            state_dict: The checkpoint.
            strict: Whether it must fit this model and these groups exactly. If not, factors and
                the base's state are matched by name and what doesn't match starts anew; the log
                tells in what it differs.

        Raises:
            ValueError: `strict` and the checkpoint differs; nothing is changed then.
        """
        state_dict = self._loadable(state_dict)
        validate.check_state_dict(state_dict)
        loaded = copy.deepcopy(state_dict)
        different = checkpoint.load(self._engine, self.base, loaded, strict, self._handover)
        if different:
            LOG.warning("checkpoint differs: %s", "; ".join(different))
        self._engine.faults.counts = faults_of(self.layers())  # told where they were saved
        if self._closed:  # loading may have ended a rest
            self._engine.capture.remove()
        self._after_loading()

    def __getstate__(self) -> dict[str, Any]:
        """Everything but hooks; copying a model and its optimizer together keeps the pair bound."""
        return {
            "model": self.model,
            "base": self.base,
            "method": self._method,
            "common": self._common,
            "books": {key: getattr(self._engine, key) for key in BOOKS},
            "pending": pending.pack(self._engine.capture),
            "handover": self._handover,
            "closed": self._closed,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Attach to the copied model, in place of the inert hooks that came with it."""
        remove_inert_hooks(state["model"])
        self._attach(state["model"], state["base"], state["method"], state["common"])
        self._handover = state["handover"]
        self._engine.reopen(state["books"])
        pending.restore(self._engine.capture, state["pending"])
        if state["closed"]:
            self.close()
