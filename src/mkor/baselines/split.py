"""AdamW for some groups; the parameters of the others step along their gradient as it is.

The base of `mkor.auto`, whose preconditioned gradients are finished updates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from mkor.baselines.batches import by_kind
from mkor.checks import is_number, one_of, require, share

RULES = ("direct", "adamw")
"""What a group's `update` may be."""

RATIO = 4.0
"""AdamW's learning rate in parts of the matrices', where none is given."""


class SplitAdamW(Optimizer):
    """AdamW where a group's `update` is "adamw"; where it is "direct", w ← (1 - lr·λ)w - lr·∇.

    Both decouple the weight decay λ from the gradient.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        adamw_lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        """Optimize groups, each with an `update` of its own.

        Args:
            params: Groups of parameters, as in `torch.optim`.
            lr: Learning rate of groups that name none.
            adamw_lr: That of "adamw" groups; None for 4 times `lr`.
            betas: AdamW's decays of the averages of the gradient and of its square.
            eps: Added to the root of the second average.
            weight_decay: Weight decay (λ).

        Raises:
            ValueError: An option is out of range.
        """
        check_rates(lr, adamw_lr)
        check_adamw(betas, eps, weight_decay)
        self._adamw = inner(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        self._rates = {"direct": lr, "adamw": RATIO * lr if adamw_lr is None else adamw_lr}
        super().__init__(params, {**self._adamw.defaults, "update": "adamw"})

    def __getstate__(self) -> dict[str, Any]:
        """What a copy takes over."""
        return {**super().__getstate__(), "_rates": self._rates}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over a state, of a copy or of a checkpoint."""
        super().__setstate__(state)
        self._adamw = inner()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, whose learning rate is by default that of its `update`.

        Raises:
            ValueError: `update` is unknown.
        """
        update = param_group.get("update", "adamw")
        one_of("update", update, RULES)
        super().add_param_group({"lr": self._rates[update], **param_group})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Change every parameter that has a gradient.

        Args:
            closure: Re-evaluates the model and returns the loss; it runs first.

        Returns:
            The closure's loss, or None.

        Raises:
            ValueError: A group's `update` is unknown.
        """
        for group in self.param_groups:
            one_of("update", group.get("update"), RULES)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["update"] == "direct":
                step_along(group)
        self._step_others()
        return loss

    # A compiled graph would hold on to the groups and the state that the inner optimizer was made
    # with.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _step_others(self) -> None:
        # Shared anew in each step, since loading a checkpoint replaces both.
        self._adamw.state = self.state
        others = [group for group in self.param_groups if group["update"] == "adamw"]
        self._adamw.param_groups = [
            {**group, "params": alike} for group in others for alike in by_kind(group["params"])
        ]
        self._adamw.step()


def check_rates(lr: Any, adamw_lr: Any) -> None:
    """Check learning rates: numbers, or tensors of one, as torch takes them."""
    rule = "finite and at least 0"
    require("lr", lr, is_rate(lr), rule)
    require("adamw_lr", adamw_lr, adamw_lr is None or is_rate(adamw_lr), f"{rule}, or None")


def is_rate(value: Any) -> bool:
    """Whether a value is a learning rate."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and is_rate(value.item())
    return is_number(value) and value >= 0


def check_adamw(betas: Any, eps: Any, weight_decay: Any) -> None:
    """Check AdamW's other options."""
    pair = isinstance(betas, Sequence) and len(betas) == 2
    good = pair and all(is_number(beta) and share(beta) for beta in betas)
    require("betas", betas, good, "two numbers of at least 0 and below 1")
    require("eps", eps, is_number(eps) and eps >= 0, "finite and at least 0")
    sound = is_number(weight_decay) and weight_decay >= 0
    require("weight_decay", weight_decay, sound, "finite and at least 0")


def inner(**options: Any) -> AdamW:
    """AdamW itself, which checks the options and knows what it wants in a group."""
    return AdamW([torch.zeros(1)], **options)


def step_along(group: dict[str, Any]) -> None:
    """One step of a group along its gradients, which those of frozen parameters are not."""
    params = [p for p in group["params"] if p.grad is not None and p.requires_grad]
    lr, decay = group["lr"], group["weight_decay"]
    for alike in by_kind(params):
        if decay != 0:
            torch._foreach_mul_(alike, 1 - lr * decay)
        grads = [p.grad for p in alike if p.grad is not None]
        if isinstance(lr, Tensor):  # whose value only the device may know
            for p, grad in zip(alike, grads, strict=True):
                p.sub_(grad * lr)
        else:
            torch._foreach_add_(alike, grads, alpha=-lr)
