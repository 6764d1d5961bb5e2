"""The public class of Eva. The mathematics is in `methods/eva.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mkor.checks import DTYPES, Schedule, one_of, positive, scheduled, weighted
from mkor.hybrid import HybridSwitch
from mkor.methods.eva import EvaMethod
from mkor.optimizer import Preconditioner


class Eva(Preconditioner):
    """Eva: gradients preconditioned by one averaged vector a side of each layer.

    Source: Zhang et al., "Eva: Practical Second-order Optimization with Kronecker-vectorized
    Approximation", ICLR 2023. Memory and time of an update grow with the width of a layer, not with
    its square, so the factors are updated in every step.

    Example:
        >>> base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> optimizer = mkor.Eva(model, base)
    """

    def __init__(
        self,
        model: nn.Module,
        base: Optimizer,
        *,
        factor_update_steps: int | Callable[[int], int] = 1,
        warmup_steps: int = 10,
        factor_decay: Schedule = 0.95,
        damping: Schedule = 0.03,
        rescale: str | None = None,
        kl_clip: Schedule | None = 0.001,
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
            factor_update_steps: Steps between updates of the averages.
            warmup_steps: Steps at the start that all update the averages.
            factor_decay: Weight of the old value in the moving averages of the vectors (γ).
            damping: λ, added to the curvature. It is absolute, so it fits a mean loss.
            rescale: "gradient" keeps the norm of the gradient, None keeps the result, which is
                about 1/λ times the gradient unless `kl_clip` shortens it.
            kl_clip: Bound κ on Σ lr²⟨V, ∇W⟩ over all layers: updates V are scaled by
                √(κ/|Σ lr²⟨V, ∇W⟩|) where that is below 1; None leaves them.
            skip: Regular expressions; layers in whose name one of them is found are left to the
                base.
            state_dtype: Dtype of the averages; None for float32, or float64 for float64
                parameters.
            wire_dtype: Dtype of the statistics while they cross workers.
            on_nonfinite: Statistics that aren't finite are left out ("skip"), reset the layer's
                averages ("reset"), or raise FloatingPointError before anything changes ("raise",
                which synchronises with the device in every step). Gradients that aren't finite
                reach the base as they are; only "raise" keeps them from it.
            hybrid: When the base optimizer takes over alone (MKOR-H); None for never.
            agreement_steps: Steps between checks that parameters, gradients and factors are equal
                on all workers, which wait for the device; None for never.

        Raises:
            TypeError: `model` or `base` is of the wrong type.
            ValueError: An option is out of range, or `base` doesn't fit the model.
        """
        one_of("state_dtype", state_dtype, DTYPES)
        factor_decay = weighted("factor_decay", factor_decay)
        damping = scheduled("damping", damping, positive, "positive and finite")
        options: dict[str, Any] = {
            "decay": factor_decay,
            "damping": damping,
            "state_dtype": state_dtype,
            "on_nonfinite": on_nonfinite,
        }
        super().__init__(
            model,
            base,
            EvaMethod(**options),
            factor_update_steps=factor_update_steps,
            warmup_steps=warmup_steps,
            rescale=rescale,
            kl_clip=kl_clip,
            skip=skip,
            wire_dtype=wire_dtype,
            on_nonfinite=on_nonfinite,
            hybrid=hybrid,
            agreement_steps=agreement_steps,
        )
