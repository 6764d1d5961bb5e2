"""Lightning: a callback that tells the optimizers which tokens count, and their losses.

    trainer = Trainer(callbacks=[PreconditionerCallback()])

`configure_optimizers` returns the optimizer as any other. In automatic optimization its step runs
Lightning's closure, clipping included, and in manual optimization it is called as usual.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mkor.integrations.frameworks import (
    MASK,
    check_name,
    check_there,
    counts,
    load,
    unwrapped,
)
from mkor.optimizer import Preconditioner

Callback: Any = load("lightning.pytorch", "2.5").Callback


class PreconditionerCallback(Callback):  # type: ignore[misc]  # of a class without types
    """Tells the optimizers of a Trainer which tokens count, and their losses.

    The mask of each batch goes to `set_mask` of every optimizer that preconditions, and each loss
    that Lightning back-propagates to `observe_loss`. `mkor/layers`, `mkor/updates`, `mkor/skipped`
    and `mkor/resets` are logged with the rest.
    """

    def __init__(self, mask: str | None = MASK) -> None:
        """Read the mask from the batch.

        Args:
            mask: Its key in batches that are mappings, or its attribute; None for no mask. Batches
                may lack the default; another that they lack raises ValueError in training.

        Raises:
            TypeError: It is no name.
        """
        check_name(mask)
        self.mask = mask

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Look for the optimizers.

        Raises:
            TypeError: None of them preconditions.
        """
        if not preconditioners(trainer):
            kinds = ", ".join(type(optimizer).__name__ for optimizer in trainer.optimizers)
            raise TypeError(
                f"none of the optimizers preconditions ({kinds or 'there is none'}): let "
                "configure_optimizers return mkor.MKOR(self, base), or leave out this callback"
            )

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Set the mask of the batch."""
        key = self.mask
        if key is None:
            return
        mask = batch.get(key) if isinstance(batch, Mapping) else getattr(batch, key, None)
        if mask is None:
            check_there(key, names(batch))
        for optimizer in preconditioners(trainer):
            optimizer.set_mask(mask)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """Show the loss, without the factors of a scaler and of accumulation."""
        if loss.numel() != 1:
            return
        shown, scaler = loss.detach(), getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            shown = shown / scaler.scale(torch.ones_like(shown))
        if pl_module.automatic_optimization:
            shown = shown * trainer.accumulate_grad_batches
        for optimizer in preconditioners(trainer):
            optimizer.observe_loss(shown)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the counters."""
        own = preconditioners(trainer)
        if trainer.logger is not None and trainer.global_step % trainer.log_every_n_steps == 0:
            for number, optimizer in enumerate(own):
                suffix = f"/{number}" if len(own) > 1 else ""
                shown = {f"{key}{suffix}": value for key, value in counts(optimizer).items()}
                trainer.logger.log_metrics(shown, step=trainer.global_step)


def names(batch: Any) -> list[str]:
    """What a batch calls its parts."""
    return [
        str(name)
        for name in (batch if isinstance(batch, Mapping) else getattr(batch, "__dict__", ()))
    ]


def preconditioners(trainer: Any) -> list[Preconditioner]:
    """The optimizers of a Trainer that precondition."""
    own = [unwrapped(optimizer) for optimizer in trainer.optimizers]
    return [optimizer for optimizer in own if optimizer is not None]
