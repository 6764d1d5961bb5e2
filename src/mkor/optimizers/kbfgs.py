"""The public class of K-BFGS. The mathematics is in `methods/kbfgs.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mkor.checks import (
    DTYPES,
    Schedule,
    fraction,
    is_count,
    is_number,
    one_of,
    require,
    scheduled,
    weighted,
)
from mkor.hybrid import HybridSwitch
from mkor.methods.kbfgs import KBFGSMethod
from mkor.optimizer import Preconditioner


class KBFGS(Preconditioner):
    """K-BFGS: gradients preconditioned by Kronecker factors that BFGS keeps inverted.

    Source: Goldfarb, Ren and Bahamou, "Practical Quasi-Newton Methods for Training Deep Neural
    Networks", NeurIPS 2020; with `memory` it is their K-BFGS(L).

    `step(closure)` is required. The closure clears the gradients, evaluates the loss, calls
    `backward()` and returns the loss, as for `torch.optim.LBFGS`. In a step that updates the
    factors it is evaluated twice, before and after the base's step, on the same batch and with the
    same random numbers; gradients and buffers, such as the running statistics of a batch
    normalisation, are restored after the second evaluation. The loss returned is the first one's.
    The closure must not clip gradients, since the two evaluations are compared; `kl_clip` bounds
    the step. A base that needs a closure itself (`torch.optim.LBFGS`) is refused.

    Example:
        >>> base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> optimizer = mkor.KBFGS(model, base)
        >>> def closure():
        ...     optimizer.zero_grad()
        ...     loss = criterion(model(inputs), targets)
        ...     loss.backward()
        ...     return loss
        >>> loss = optimizer.step(closure)
    """

    def __init__(
        self,
        model: nn.Module,
        base: Optimizer,
        *,
        factor_update_steps: int | Callable[[int], int] = 1,
        warmup_steps: int = 10,
        factor_decay: Schedule = 0.9,
        pair_decay: float = 0.9,
        damping: Schedule = 0.3,
        memory: int | None = None,
        grad_worker_fraction: float = 1.0,
        rescale: str | None = None,
        kl_clip: Schedule | None = 0.001,
        skip: Sequence[str] = (),
        max_dim: int = 8192,
        state_dtype: torch.dtype | None = None,
        wire_dtype: torch.dtype | None = None,
        on_nonfinite: str = "skip",
        hybrid: HybridSwitch | None = None,
        agreement_steps: int | None = None,
    ) -> None:
        """Wrap `base` so that it steps along preconditioned gradients.

        Options of type `Schedule` are numbers or functions of the step, counted from 0.

        Args:
            model: The model; layers are observed by hooks.
            base: Any `torch.optim` optimizer over parameters of the model that doesn't need a
                closure.
            factor_update_steps: Steps between factor updates. A step that updates evaluates the
                model twice.
            warmup_steps: Steps at the start that all update the factors, and in which H_a is the
                inverse of A afresh.
            factor_decay: Weight of the old value in the moving average A of the inputs' second
                moments.
            pair_decay: Weight of the old pair in the moving averages of s and y.
            damping: λ, below 1. Its square root is added to A, and is the least curvature that a
                pair of the output side is given. It is absolute, so it fits a mean loss.
            memory: Number of pairs (s, y) that stand for the output side's factor, whose matrix is
                then never formed: 2·memory·d_out numbers in place of d_out². None keeps the matrix.
            grad_worker_fraction: Fraction of the workers that hold a layer and precondition its
                gradient, rounded up to a divisor of their number. Below 1, state is divided,
                gradients cross in every step, and every worker must call `state_dict`.
            rescale: "gradient" keeps the norm of the gradient, None keeps the result.
            kl_clip: Bound κ on Σ lr²⟨V, ∇W⟩ over all layers: updates V are scaled by
                √(κ/|Σ lr²⟨V, ∇W⟩|) where that is below 1; None leaves them, as the authors do.
            skip: Regular expressions; layers in whose name one of them is found are left to the
                base.
            max_dim: A side wider than this gets no matrix as its factor.
            state_dtype: Dtype of the factors and of the products with them; None for float32, or
                float64 for float64 parameters. The means that are subtracted stay in float32.
            wire_dtype: Dtype of the statistics while they cross workers.
            on_nonfinite: Statistics that aren't finite are left out ("skip"), reset the layer's
                factors to the identity ("reset"), or raise FloatingPointError before anything
                changes ("raise", which synchronises with the device in every step). Gradients
                that aren't finite reach the base as they are; only "raise" keeps them from it.
            hybrid: When the base optimizer takes over alone (MKOR-H); None for never.
            agreement_steps: Steps between checks that parameters, gradients and factors are equal
                on all workers, which wait for the device; None for never.

        Raises:
            TypeError: `model` or `base` is of the wrong type.
            ValueError: An option is out of range, or `base` doesn't fit the model.
        """
        one_of("state_dtype", state_dtype, DTYPES)
        factor_decay = weighted("factor_decay", factor_decay)
        damping = scheduled("damping", damping, fraction, "between 0 and 1, both excluded")
        partial = is_number(pair_decay) and 0 <= pair_decay < 1
        require("pair_decay", pair_decay, partial, "at least 0 and below 1")
        several = memory is None or is_count(memory, 1)
        require("memory", memory, several, "an integer of at least 1, or None for a matrix")
        require("max_dim", max_dim, is_count(max_dim, 1), "an integer of at least 1")
        options: dict[str, Any] = {
            "damping": damping,
            "decay": factor_decay,
            "pair_decay": pair_decay,
            "memory": memory,
            "max_dim": max_dim,
            "start_steps": warmup_steps,
            "state_dtype": state_dtype,
            "on_nonfinite": on_nonfinite,
        }
        super().__init__(
            model,
            base,
            KBFGSMethod(**options),
            factor_update_steps=factor_update_steps,
            warmup_steps=warmup_steps,
            rescale=rescale,
            kl_clip=kl_clip,
            skip=skip,
            wire_dtype=wire_dtype,
            on_nonfinite=on_nonfinite,
            grad_worker_fraction=grad_worker_fraction,
            hybrid=hybrid,
            agreement_steps=agreement_steps,
        )
