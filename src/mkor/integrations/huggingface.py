"""Hugging Face's Trainer: the optimizer as its factory, and a callback.

    trainer = Trainer(
        model,
        args,
        train_dataset=data,
        optimizer_cls_and_kwargs=optimizer_factory(mkor.auto, lr=args.learning_rate),
        callbacks=[PreconditionerCallback()],
    )

`optimizer_factory(mkor.MKOR, base)` is for the methods that surround another optimizer, which
`base` makes of parameter groups. `Trainer(optimizers=(optimizer, None))` with an
optimizer that was built before does as well.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mkor.integrations.frameworks import (
    MASK,
    check_name,
    check_there,
    counts,
    load,
    unwrapped,
)
from mkor.optimizer import Preconditioner

TrainerCallback: Any = load("transformers", "5.0").TrainerCallback

Build = Callable[[nn.Module], Preconditioner]


def optimizer_factory(
    method: Callable[..., Preconditioner],
    base: Callable[[list[dict[str, Any]]], Optimizer] | None = None,
    *,
    weight_decay: float | None = None,
    **options: Any,
) -> tuple[Callable[[], Build], dict[str, Any]]:
    """What `Trainer(optimizer_cls_and_kwargs=...)` takes, to make the optimizer of its model.

    So the Trainer may build the model late (`model_init`), or move it. Parameters that don't train
    are left out.

    Args:
        method: The class of the optimizer, such as `mkor.MKOR`, or `mkor.auto`.
        base: Makes the base optimizer of a list of parameter groups, such as
            `lambda groups: torch.optim.AdamW(groups, lr=args.learning_rate)`. None for
            `mkor.auto`, which has no other and takes its `lr` as an option.
        weight_decay: Weight decay of matrices; biases and the weights of norms have none. None
            for 0 with `base`, and for the default of `method` without.
        options: Those of `method`.

    Raises:
        TypeError: `method` or `base` is no such function, or `method` doesn't take the options.
    """
    check_method(method)
    check_base(base)
    check_call(method, base, {} if weight_decay is None or base else {"weight_decay"}, options)

    def build(model: nn.Module) -> Preconditioner:
        if base is not None:
            return method(model, base(decay_groups(model, weight_decay or 0.0)), **options)
        decay = {} if weight_decay is None else {"weight_decay": weight_decay}
        return method(model, **decay, **options)

    return lambda: build, {}


def check_method(method: object) -> None:
    """Raise TypeError unless it makes an optimizer that preconditions, as far as can be told."""
    kind = method if isinstance(method, type) else type(method)
    if issubclass(kind, Optimizer) and not isinstance(method, type):
        raise TypeError(
            f"method is an optimizer that is built already ({kind.__name__}): pass its class, or "
            "Trainer(optimizers=(optimizer, None)) in place of a factory"
        )
    plain = issubclass(kind, Optimizer) and not issubclass(kind, Preconditioner)
    if plain or not callable(method):
        raise TypeError(
            f"method must be a class such as mkor.MKOR, or mkor.auto, got {kind.__name__}; other "
            "optimizers need no factory of mkor's"
        )


def check_base(base: object) -> None:
    """Raise TypeError unless it can make an optimizer, or is None."""
    if isinstance(base, Optimizer) or not (base is None or callable(base)):
        raise TypeError(
            "base must be a function that makes an optimizer of parameter groups, such as "
            "lambda groups: torch.optim.AdamW(groups, lr=args.learning_rate), got "
            f"{type(base).__name__}"
        )


def check_call(
    method: Callable[..., Any], base: object, more: Collection[str], options: dict[str, Any]
) -> None:
    """Raise TypeError where `method` doesn't take what it will be called with."""
    name = getattr(method, "__name__", type(method).__name__)
    positional = [None] if base is None else [None, base]
    try:
        given = inspect.signature(method).bind(*positional, **options, **dict.fromkeys(more))
    except TypeError as error:
        raise TypeError(
            f"{name} can't be called so: {error}. Methods around another optimizer need `base`, "
            "which has the learning rate; options are those of the method"
        ) from error
    if base is not None and given.arguments.get("lr") is base:
        raise TypeError(f"{name} has no base optimizer: leave out `base`, and pass lr=...")


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameters that train: matrices with weight decay, and vectors without; no empty group."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


class PreconditionerCallback(TrainerCallback):  # type: ignore[misc]  # of a class without types
    """Tells the optimizer of a Trainer which tokens count, and its losses; logs its counters.

    While the model trains, a hook passes the mask of each forward pass to `set_mask` and the loss
    to `observe_loss`, and to a `KneePointLR` that the Trainer steps. The log gets `mkor/layers`,
    `mkor/updates`, `mkor/skipped` and `mkor/resets`.
    """

    def __init__(self, mask: str | None = MASK) -> None:
        """Read the mask from an argument of the model.

        Args:
            mask: Its name; None for a model whose mask is of other rows than its layers' inputs.
                A mask of more than two dimensions or of floats says nothing of rows and is ignored.
                Batches may lack the default; another that they lack raises ValueError in training.

        Raises:
            TypeError: It is no name.
        """
        check_name(mask)
        self.mask = mask
        self.handles: list[Any] = []

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: Any,
        optimizer: Any,
        lr_scheduler: Any = None,
        **_: Any,
    ) -> None:
        """Install the hooks.

        Raises:
            TypeError: The Trainer's optimizer does not precondition.
        """
        own = unwrapped(optimizer)
        if own is None:
            held = getattr(optimizer, "optimizer", optimizer)
            raise TypeError(
                f"the Trainer's optimizer is {type(held).__name__}, which preconditions "
                "nothing: pass optimizer_cls_and_kwargs=optimizer_factory(mkor.MKOR, ...) to the "
                "Trainer, or leave out this callback"
            )
        self.on_train_end(args, state, control)
        reference = weakref.ref(own)
        rates = observers(lr_scheduler)

        def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            optimizer = reference()
            if optimizer is not None and training(module):
                if self.mask is not None and self.mask not in kwargs:
                    check_there(self.mask, list(kwargs))
                optimizer.set_mask(row_mask(kwargs.get(self.mask)) if self.mask else None)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            optimizer = reference()
            loss = loss_of(output)
            if optimizer is not None and loss is not None and training(module):
                optimizer.observe_loss(loss)
                for scheduler in rates:
                    scheduler.observe(loss)

        self.handles = [
            model.register_forward_pre_hook(before, with_kwargs=True),
            model.register_forward_hook(after),
        ]

    def on_step_end(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any
    ) -> None:
        """Tell the optimizer that its gradients are gone: the Trainer clears those of the model."""
        own = unwrapped(optimizer)
        if own is not None:
            own.zero_grad()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()
        self.handles = []

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: dict[str, Any] | None = None,
        optimizer: Any = None,
        **_: Any,
    ) -> None:
        """Add the counters to a line of the training's log, and to the history that is saved."""
        own = unwrapped(optimizer)
        if own is None or logs is None or "loss" not in logs:
            return
        for line in (logs, state.log_history[-1]):
            line.update(counts(own))


def observers(scheduler: Any) -> list[Any]:
    """The schedulers that want to be shown the loss: one, or those that it holds."""
    held = getattr(scheduler, "_schedulers", ())
    shown = [scheduler] if hasattr(scheduler, "observe") else []
    return [inner for one in held for inner in observers(one)] + shown


def training(module: nn.Module) -> bool:
    """Whether a forward pass belongs to training."""
    return module.training and torch.is_grad_enabled()


def row_mask(mask: Any) -> Tensor | None:
    """A mask that says which rows count, or None."""
    if not isinstance(mask, Tensor) or mask.is_floating_point() or mask.dim() > 2:
        return None
    return mask


def loss_of(output: Any) -> Tensor | None:
    """The loss in a model's output, if there is one."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return loss.detach() if isinstance(loss, Tensor) and loss.numel() == 1 else None
