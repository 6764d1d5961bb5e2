"""The public class of SNGD. The mathematics is in `methods/hylo.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from mkor.checks import Schedule, one_of, positive, scheduled
from mkor.hybrid import HybridSwitch
from mkor.methods.hylo import SNGDMethod
from mkor.optimizer import Preconditioner

ROW_DTYPES = (None, torch.float32, torch.float64, torch.bfloat16)
"""Dtypes of rows; gradients of single rows are below what float16 holds."""


class SNGD(Preconditioner):
    """SNGD: the natural gradient of each layer, by the Sherman-Morrison-Woodbury identity.

    It keeps the rows of the last update: their number times the sides of the layer, and a kernel of
    their number squared. For batches of many tokens use `HyLo`.

    Source: eq. 13 of Mozaffari et al., NeurIPS 2023, and the works cited there. The paper's symbols
    stand in parentheses.

    Example:
        >>> base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> optimizer = mkor.SNGD(model, base)
    """

    def __init__(
        self,
        model: nn.Module,
        base: Optimizer,
        *,
        factor_update_steps: int | Callable[[int], int] = 10,
        warmup_steps: int = 10,
        damping: Schedule = 0.01,
        grad_worker_fraction: float = 1.0,
        rescale: str | None = "gradient",
        kl_clip: Schedule | None = None,
        skip: Sequence[str] = (),
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
            base: Any `torch.optim` optimizer over parameters of the model.
            factor_update_steps: Steps between updates of the rows (f).
            warmup_steps: Steps at the start that all update the rows.
            damping: Added to the curvature (μ), in its own scale: that of squared gradients of
                single rows.
            grad_worker_fraction: Fraction of the workers that hold a layer and precondition its
                gradient, rounded up to a divisor of their number. Below 1, state is divided,
                gradients cross in every step, and every worker must call `state_dict`.
            rescale: "gradient" keeps the norm of each layer's gradient, None keeps the result.
            kl_clip: Bound κ on Σ lr²⟨V, ∇W⟩ over all layers: updates V are scaled by
                √(κ/|Σ lr²⟨V, ∇W⟩|) where that is below 1; None leaves them.
            skip: Regular expressions; layers in whose name one of them is found are left to the
                base.
            state_dtype: Dtype of the rows; None for float32, or float64 for float64 parameters.
                Products with them are computed in at least float32.
            wire_dtype: Dtype of the rows while they cross workers.
            on_nonfinite: Rows that aren't finite are left out ("skip"), empty the layer's state
                ("reset"), or raise FloatingPointError before anything changes ("raise", which
                synchronises with the device in every step). Gradients that aren't finite reach the
                base as they are; only "raise" keeps them from it.
            hybrid: When the base optimizer takes over alone (MKOR-H); None for never.
            agreement_steps: Steps between checks that parameters, gradients and factors are equal
                on all workers, which wait for the device; None for never.

        Raises:
            TypeError: `model` or `base` is of the wrong type.
            ValueError: An option is out of range, or `base` doesn't fit the model.
        """
        one_of("state_dtype", state_dtype, ROW_DTYPES)
        damping = scheduled("damping", damping, positive, "positive and finite")
        super().__init__(
            model,
            base,
            SNGDMethod(damping, state_dtype, on_nonfinite),  # type: ignore[arg-type]
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
