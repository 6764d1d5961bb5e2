"""LAMB: Adam whose step in each tensor is as long as the tensor itself, times the learning rate.

A step works on batches of tensors of one device and dtype. Everything stays on the device: step
counts, norms and ratios are tensors that the host never reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from mkor.baselines.batches import WIDE, Batch, batches, joint_norm
from mkor.checks import is_number, one_of, refuse_sparse, require

ADDED = (
    "max_grad_norm",
    "bias_correction",
    "trust_ratio",
    "max_weight_norm",
    "weight_decay_mode",
    "maximize",
)
"""Options that a checkpoint of another optimizer, such as AdamW, lacks."""


class LAMB(Optimizer):
    """LAMB: Adam's direction, scaled in each tensor to the norm of its weights.

    With the defaults a step is that of the fused implementation in NVIDIA apex (FusedLAMB), the
    first-order baseline of MKOR's paper; the options give the other published variants.

    Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes",
    ICLR 2020, Algorithm 2.

    Example:
        >>> optimizer = mkor.LAMB(model.parameters(), lr=1e-3)
        >>> preconditioned = mkor.MKOR(model, optimizer)
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        max_grad_norm: float | None = 1.0,
        bias_correction: bool = True,
        trust_ratio: str = "decayed",
        max_weight_norm: float | None = None,
        weight_decay_mode: str = "inside",
        maximize: bool = False,
    ) -> None:
        """Optimize tensors, or groups of them; a group may set every option for itself.

        Args:
            params: Parameters, named parameters or groups of them, as in `torch.optim`.
            lr: Learning rate: the relative change of the weights in a step. Where it is a tensor,
                the host does not read it.
            betas: Decay of the averages of the gradient and of its square.
            eps: Added to the root of the second average.
            weight_decay: Weight decay (λ).
            max_grad_norm: Largest norm of the gradients of all groups together; longer ones are
                scaled down to it, `.grad` itself is left alone. None for no limit.
            bias_correction: Whether the averages are divided by 1 − βᵗ.
            trust_ratio: Tensors whose step is scaled by ‖w‖/‖u‖: "decayed" leaves out groups
                without weight decay, "all" leaves out none.
            max_weight_norm: Largest ‖w‖ in the trust ratio; None for no limit.
            weight_decay_mode: "inside" adds λw to the direction, so that the trust ratio scales
                both; "decoupled" first multiplies w by 1 − lr·λ, as AdamW does.
            maximize: Whether to go up the gradient.

        Raises:
            ValueError: An option, of a group or of all, is out of range.
        """
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "max_grad_norm": max_grad_norm,
            "bias_correction": bias_correction,
            "trust_ratio": trust_ratio,
            "max_weight_norm": max_weight_norm,
            "weight_decay_mode": weight_decay_mode,
            "maximize": maximize,
        }
        check_options(defaults)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, whose options are checked as those of all.

        Args:
            param_group: The parameters as "params", and options of the group's own.

        Raises:
            ValueError: An option is out of range.
        """
        if isinstance(param_group, dict):
            check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Change every parameter that has a gradient.

        A gradient that isn't finite makes its own parameter NaN, as in `torch.optim`. An infinite
        one also has an infinite norm, to which `max_grad_norm` scales all others: to zero.

        Args:
            closure: Re-evaluates the model and returns the loss. It runs first, with gradients
                enabled.

        Returns:
            The closure's loss, or None.

        Raises:
            RuntimeError: A gradient is sparse; nothing was changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        used = [[p for p in g["params"] if p.grad is not None] for g in self.param_groups]
        everything = [p for params in used for p in params]
        refuse_sparse(everything, "LAMB", "every weight takes part in the norms of a step")
        norm = None
        if any(group["max_grad_norm"] is not None for group in self.param_groups):
            norm = joint_norm([p.grad for p in everything])
        for group, params in zip(self.param_groups, used, strict=True):
            for some in batches(params):
                update(Batch.of(some, self.state), group, norm)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict()` returned, exactly; AdamW's fits as well.

        Options that the checkpoint lacks keep the values that this optimizer was built with.

        Args:
            state_dict: The checkpoint. Its tensors are copied.

        Raises:
            ValueError: The groups don't fit.
        """
        final: dict[str, Any] = {}
        # torch casts moments to the dtype of the parameter, which loses bits of half-precision
        # parameters. The hooks run innermost: they see what other hooks made of the checkpoint.
        before = self.register_load_state_dict_pre_hook(lambda _, loaded: final.update(loaded))
        after = self.register_load_state_dict_post_hook(lambda _: self._restore(final), True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    def _restore(self, loaded: dict[str, Any]) -> None:
        """Copy the state from a checkpoint in the dtypes of this optimizer."""
        saved = [key for group in loaded["param_groups"] for key in group["params"]]
        own = [p for group in self.param_groups for p in group["params"]]
        for key, p in zip(saved, own, strict=True):
            for name, value in loaded["state"].get(key, {}).items():
                dtype = torch.float32 if name == "step" else WIDE.get(p.dtype, p.dtype)
                if isinstance(value, Tensor):
                    self.state[p][name] = value.to(p.device, dtype, copy=True)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over a state, with this optimizer's values for options that it lacks."""
        super().__setstate__(state)
        for group in self.param_groups:
            for name in ADDED:
                group.setdefault(name, self.defaults[name])


def update(batch: Batch, group: dict[str, Any], norm: Tensor | None) -> None:
    """Take the step of one batch; `norm` is that of the gradients of all groups."""
    dtype, lr, decay = batch.exp_avgs[0].dtype, group["lr"], group["weight_decay"]
    weights = [p.to(dtype) for p in batch.params]
    if isinstance(lr, Tensor):
        lr = lr.reshape(()).to(weights[0].device, dtype, non_blocking=True)
    average(batch, group, norm)
    updates = direction(batch, group)
    if decay != 0 and group["weight_decay_mode"] == "decoupled":
        torch._foreach_mul_(weights, 1 - lr * decay)
    elif decay != 0:
        torch._foreach_add_(updates, weights, alpha=decay)
    if decay != 0 or group["trust_ratio"] == "all":
        lr = (trust_ratios(weights, updates, group["max_weight_norm"]) * lr).unbind()
    torch._foreach_mul_(updates, lr)
    torch._foreach_sub_(weights, updates)
    if batch.params[0].dtype != dtype:
        torch._foreach_copy_(batch.params, weights)


def average(batch: Batch, group: dict[str, Any], norm: Tensor | None) -> None:
    """Count the step and take the gradients, clipped, into the averages."""
    grads, limit, (first, second) = batch.grads, group["max_grad_norm"], group["betas"]
    if norm is not None and limit is not None:
        norm = norm.to(grads[0].device, grads[0].dtype, non_blocking=True)
        # The comparison is false for NaN, which so stays in the parameter that it came from.
        grads = list(torch._foreach_div(grads, torch.where(norm > limit, norm / limit, 1.0)))
    if group["maximize"]:
        grads = list(torch._foreach_neg(grads))
    torch._foreach_add_(batch.steps, 1)
    torch._foreach_lerp_(batch.exp_avgs, grads, 1 - first)
    torch._foreach_mul_(batch.exp_avg_sqs, second)
    torch._foreach_addcmul_(batch.exp_avg_sqs, grads, grads, 1 - second)


def direction(batch: Batch, group: dict[str, Any]) -> list[Tensor]:
    """Adam's direction m̂ / (√v̂ + ε), in new tensors."""
    out = list(torch._foreach_sqrt(batch.exp_avg_sqs))
    add: Any = group["eps"]
    factor: Any = None
    if group["bias_correction"]:
        # On numbers, not on tensors: m̂ / (√v̂ + ε) = m / (√v + ε√c₂) · √c₂ / c₁.
        steps = torch.stack(batch.steps).to(out[0].dtype)
        first, second = (missing(beta, steps) for beta in group["betas"])
        add = (add * second.sqrt()).unbind()
        factor = (second.sqrt() / first).unbind()
    torch._foreach_add_(out, add)
    # Not a division, whose result would be new memory.
    torch._foreach_reciprocal_(out)
    torch._foreach_mul_(out, batch.exp_avgs)
    if factor is not None:
        torch._foreach_mul_(out, factor)
    return out


def missing(beta: float, steps: Tensor) -> Tensor:
    """The weight 1 − βᵗ of an average that began at zero, for each number of steps [n].

    By expm1, since in float32 the difference 1 − 0.999ᵗ has lost five digits at the first step.
    """
    return -torch.expm1(steps * (math.log(beta) if beta else -math.inf))


def trust_ratios(weights: list[Tensor], updates: list[Tensor], limit: float | None) -> Tensor:
    """‖w‖/‖u‖ of each tensor [n], with ‖w‖ at most `limit`; 1 where either norm is zero."""
    above = torch.stack(torch._foreach_norm(weights))
    below = torch.stack(torch._foreach_norm(updates))
    if limit is not None:
        above = above.clamp(max=limit)
    return torch.where((above == 0) | (below == 0), 1.0, above / below)


def check_options(options: dict[str, Any]) -> None:
    """Raise ValueError for an option out of range."""
    lr, betas = options["lr"], options["betas"]
    one = is_number(lr) or (isinstance(lr, Tensor) and lr.numel() == 1)
    good = one and 0 <= float(lr) < math.inf
    require("lr", lr, good, "a finite number of at least 0, or a tensor with one")
    pair = isinstance(betas, (tuple, list)) and len(betas) == 2
    good = pair and all(is_number(beta) and 0 <= beta < 1 for beta in betas)
    require("betas", betas, good, "two numbers of at least 0 and below 1")
    for name in ("eps", "weight_decay"):
        value = options[name]
        require(name, value, is_number(value) and value >= 0, "finite and at least 0")
    for name in ("max_grad_norm", "max_weight_norm"):
        value = options[name]
        positive = value is None or (is_number(value) and value > 0)
        require(name, value, positive, "positive and finite, or None for no limit")
    one_of("trust_ratio", options["trust_ratio"], ("decayed", "all"))
    one_of("weight_decay_mode", options["weight_decay_mode"], ("inside", "decoupled"))
    for name in ("bias_correction", "maximize"):
        one_of(name, options[name], (True, False))
