"""Checks of what users pass: each error names the value, the rule and the remedy."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mkor.checks import (
    counted,
    is_count,
    is_number,
    one_of,
    positive,
    require,
    scheduled,
    share,
)
from mkor.distributed.comm import is_sharded
from mkor.distributed.team import team_of
from mkor.hybrid import HybridSwitch
from mkor.report import LayerInfo
from mkor.rescale import RESCALE
from mkor.warn import warn

WIRE_DTYPES = (None, torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""Dtypes of statistics on the wire; None is that of the statistics."""


def common_options(options: dict[str, Any]) -> dict[str, Any]:
    """Check the options that all methods share; functions of the step check themselves later."""
    warmup = options["warmup_steps"]
    every = counted("factor_update_steps", options["factor_update_steps"])
    require("warmup_steps", warmup, is_count(warmup, 0), "an integer of at least 0")
    one_of("rescale", options["rescale"], tuple(RESCALE))
    momentum = options.get("momentum")
    if momentum is not None:
        momentum = scheduled("momentum", momentum, share, "at least 0 and below 1, or None")
    between = options["agreement_steps"]
    sound = between is None or is_count(between, 1)
    require("agreement_steps", between, sound, "an integer of at least 1, or None")
    clip = options["kl_clip"]
    if clip is not None:
        clip = scheduled("kl_clip", clip, positive, "positive and finite, or None")
    one_of("on_nonfinite", options["on_nonfinite"], ("skip", "reset", "raise"))
    one_of("wire_dtype", options["wire_dtype"], WIRE_DTYPES)
    options = {"grad_worker_fraction": 1.0, **options}
    part = options["grad_worker_fraction"]
    good = is_number(part) and 0 < part <= 1
    require("grad_worker_fraction", part, good, "above 0 and at most 1")
    hybrid = options["hybrid"]
    if not isinstance(hybrid, HybridSwitch | None):
        got = "the class" if hybrid is HybridSwitch else type(hybrid).__name__
        raise TypeError(f"hybrid must be a mkor.HybridSwitch(...) or None, got {got}")
    patterns("skip", options["skip"])
    return {**options, "factor_update_steps": every, "kl_clip": clip, "momentum": momentum}


def patterns(name: str, value: Any) -> None:
    """Check an option that is a sequence of regular expressions."""
    several = isinstance(value, Collection) and not isinstance(value, (str, bytes))
    require(name, value, several, "a sequence of regular expressions")
    for pattern in value:
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise ValueError(
                f"{name}={pattern!r} is no regular expression ({error}); special characters such "
                "as '.' or '[' are escaped with a backslash"
            ) from error


def check_model(model: object) -> None:
    """Check that the model is a module that can be observed."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    check_wrappers(model)


def check_wrappers(model: nn.Module) -> None:
    """Refuse ways of spreading a model in which gradients or layers can't be seen as matrices."""
    for name, module in model.named_modules():
        if isinstance(module, nn.DataParallel) and len(module.device_ids) > 1:
            raise ValueError(
                "the model has a DataParallel over several devices, whose replicas can't be "
                "observed; use torch.nn.parallel.DistributedDataParallel instead"
            )
        if is_a(module, "FullyShardedDataParallel"):
            raise ValueError(
                f"module '{name}' is a FullyShardedDataParallel (FSDP1), which flattens its "
                "parameters so that no layer has its matrix; use "
                "torch.distributed.fsdp.fully_shard (FSDP2) or DistributedDataParallel instead"
            )
        if is_a(module, "DeepSpeedEngine"):
            raise ValueError(
                "the model is a DeepSpeedEngine, which keeps gradients in flat parts; use "
                "torch.distributed.fsdp.fully_shard or DistributedDataParallel instead"
            )
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_id"):
            raise ValueError(
                f"parameter '{name}' is partitioned by DeepSpeed's ZeRO; use "
                "torch.distributed.fsdp.fully_shard or DistributedDataParallel instead"
            )
    team_of(model)


def check_division(model: nn.Module, part: float) -> None:
    """Refuse to divide layers whose parameters are spread over workers themselves."""
    if part < 1 and any(is_sharded(parameter) for parameter in model.parameters()):
        raise ValueError(
            f"grad_worker_fraction={part} divides layers among workers, but the model's parameters "
            "are sharded already: leave it at 1, or use DistributedDataParallel"
        )


def is_a(thing: object, name: str) -> bool:
    """Whether an object is of a class of that name, whose module need not be installed."""
    return any(cls.__name__ == name for cls in type(thing).__mro__)


def check_base(base: object) -> None:
    """Check that the base is an optimizer instance."""
    if isinstance(base, type) and issubclass(base, Optimizer):
        raise TypeError(
            f"base must be an optimizer, got the class {base.__name__}; build it first: "
            f"{base.__name__}(model.parameters(), lr=...)"
        )
    if not isinstance(base, Optimizer):
        raise TypeError(f"base must be a torch.optim.Optimizer, got {type(base).__name__}")
    if hasattr(base, "precondition"):
        raise ValueError(
            f"base is {type(base).__name__}, which preconditions already; pass the optimizer that "
            "it was built on"
        )


def warn_idle(infos: Iterable[LayerInfo]) -> None:
    """Warn where no layer is preconditioned."""
    infos = list(infos)
    if any(info.preconditioned for info in infos):
        return
    reasons = dict.fromkeys(f"{i.name}: {i.reason}" for i in infos)
    shown = "; ".join(list(reasons)[:5])
    warn(f"no layer is preconditioned, so the base optimizer works alone ({shown})")


def check_closure(base: Optimizer, closure: Callable[[], Any] | None) -> Callable[[], Any]:
    """The closure, which the base can't do without."""
    if closure is None:
        raise TypeError(
            f"{type(base).__name__} evaluates the model itself: call step(closure) with a function "
            "that clears the gradients, computes the loss, calls backward() and returns the loss. "
            "A GradScaler passes no closure on; bfloat16 needs no loss scaling"
        )
    return function(closure)


def function(closure: object) -> Callable[[], Any]:
    """The closure, if it is a function."""
    if not callable(closure):
        raise TypeError(
            f"closure must be a function that computes the loss, got {type(closure).__name__}: "
            "call backward() and then step(); observe_loss(loss) is what shows a loss"
        )
    return closure


def check_second_pass(base: Optimizer) -> None:
    """Check that a base steps once an evaluation, so that the batch can be evaluated again."""
    if needs_closure(base):
        raise ValueError(
            f"base is {type(base).__name__}, which evaluates the model itself several times a "
            "step; this method evaluates it again after one step of its base: use SGD or AdamW"
        )


def check_momentum(base: Optimizer, hybrid: HybridSwitch | None) -> None:
    """Check that the gradient arrives once a step, and always by way of the momentum."""
    if needs_closure(base):
        raise ValueError(
            f"base is {type(base).__name__}, which evaluates the model itself several times a "
            "step, each of which momentum would take for a step: use SGD, or momentum=None"
        )
    if hybrid is not None:
        raise ValueError(
            "hybrid hands over to a base that would then step along the gradient in place of the "
            "momentum: use momentum=None and a base with a momentum of its own, or hybrid=None"
        )


def check_state_dict(state_dict: object) -> None:
    """Check that a checkpoint is one of an optimizer."""
    if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= state_dict.keys():
        got = list(state_dict)[:3] if isinstance(state_dict, dict) else type(state_dict).__name__
        raise ValueError(
            f"state_dict must be what an optimizer's state_dict() returned, with the keys 'state' "
            f"and 'param_groups'; got {got}"
        )


def check_parameters(model: nn.Module, groups: list[dict[str, Any]]) -> None:
    """Check that the groups hold parameters of the model and no others."""
    own = {id(parameter) for parameter in model.parameters()}
    foreign = [
        (number, tuple(parameter.shape))
        for number, group in enumerate(groups)
        for parameter in group["params"]
        if id(parameter) not in own
    ]
    if not own:
        raise ValueError("model has no parameters, so there is nothing to optimize")
    total = sum(len(group["params"]) for group in groups)
    if foreign and len(foreign) == total:
        raise ValueError(
            f"none of the base optimizer's {total} parameters belong to the model; build the base "
            "from model.parameters() of the model that is passed here"
        )
    if foreign:
        number, shape = foreign[0]
        raise ValueError(
            f"the base optimizer has {len(foreign)} parameters that are not the model's, the first "
            f"in group {number} with shape {shape}; pass a module that holds all of them, or "
            "optimize them with an optimizer of their own"
        )


def check_added(model: nn.Module, params: list[Tensor]) -> None:
    """Check that a group to be added has parameters of the model alone."""
    own = {id(parameter) for parameter in model.parameters()}
    foreign = [tuple(parameter.shape) for parameter in params if id(parameter) not in own]
    if foreign:
        raise ValueError(
            f"{len(foreign)} of the group's {len(params)} parameters are not the model's, the "
            f"first with shape {foreign[0]}; make their module a part of the model first"
        )


def listed(group: Any) -> dict[str, Any]:
    """A group whose parameters can be read twice; torch itself refuses a set of them.

    Raises:
        TypeError: The group is no dict.
    """
    if not isinstance(group, dict):
        got = type(group).__name__
        raise TypeError(f'param_group must be a dict with the key "params", got {got}')
    params = group["params"]
    return group if isinstance(params, (Tensor, set)) else {**group, "params": list(params)}


def tensors(params: Any) -> list[Tensor]:
    """The tensors of a group's "params": one, several, or pairs of a name and a tensor."""
    entries = [params] if isinstance(params, Tensor) else list(params)
    return [entry[1] if isinstance(entry, tuple) else entry for entry in entries]


def needs_closure(base: Optimizer) -> bool:
    """Whether the base's `step` can't run without a closure, as LBFGS's."""
    closure = inspect.signature(base.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
