"""What users tell an optimizer of a batch: its loss, and which of its rows count."""

from __future__ import annotations

from typing import Any, SupportsFloat

from torch import Tensor

from mkor.capture.mask import check_mask
from mkor.delegate import Delegate
from mkor.engine import Engine
from mkor.handover import Handover


class Informed(Delegate):
    """Passes on what it is told to those who use it."""

    _engine: Engine
    _handover: Handover | None
    _closed: bool

    def observe_loss(self, loss: SupportsFloat) -> None:
        """Show the loss of a step to the hybrid switch; without one, nothing happens.

        The loss of a closure is seen by itself, unless others were shown for its step. Losses of
        several batches in a step are averaged, and over many workers it is the mean of theirs that
        counts. A loss counts once a step is taken: where a loss scaler skips it, the `zero_grad()`
        that drops its gradients drops it.

        Args:
            loss: A number of at least 0, or a tensor of one element. A tensor is not waited for, so
                that one which is negative or not finite is left out, and told in the log when the
                window ends.

        Raises:
            TypeError: The loss is not a number.
            ValueError: The loss is a tensor of several elements, or a number that is negative or
                not finite.
        """
        if self._handover is not None and not self._closed:
            self._handover.observe(loss)

    def set_mask(self, mask: Tensor | None) -> None:
        """Say which rows of the forward passes that come count in the statistics: not padding.

        The mask has the leading dimensions of the layers' inputs: [batch, tokens] goes for every
        linear layer on [batch, tokens, d], [batch] for every layer on a batch. Layers whose input
        has others, as behind a pooling, use all of their rows. It holds until the next mask, the
        end of the step or the `zero_grad()` that drops its batch, whichever comes first, and
        changes no gradient. Where no row counts, the factors stay as they are.

        Args:
            mask: True, or an integer that is not 0, where a row counts; None if all do.

        Raises:
            TypeError: The mask is no tensor of booleans or integers.
            ValueError: It has no dimension; or, in the next step that updates the factors, it fits
                no layer.
        """
        if mask is not None:
            check_mask(mask)
        if not self._closed:
            self._engine.capture.mask.set(mask)

    def _seen(self, loss: Any) -> Any:
        """Show the loss of a closure; returns it."""
        if loss is not None and self._handover is not None and not self._closed:
            self._handover.settle(loss)
        return loss

    def _forget(self) -> None:
        """Forget what belongs to gradients that are cleared."""
        self._engine.capture.mask.spend()
        self._engine.capture.clear()
        if self._handover is not None:
            self._handover.clear()
