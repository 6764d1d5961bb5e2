"""The public class of HyLo. The mathematics is in `methods/hylo.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mkor.checks import Schedule, checked, is_count, is_number, one_of, positive, require, scheduled
from mkor.hybrid import HybridSwitch
from mkor.methods.hylo import COMPRESS, HyLoMethod
from mkor.optimizer import Preconditioner

SAMPLINGS = ("auto", *COMPRESS)
"""How rows may be picked."""

ROW_DTYPES = (None, torch.float32, torch.float64, torch.bfloat16)
"""Dtypes of rows; gradients of single rows are below what float16 holds."""


class HyLo(Preconditioner):
    """HyLo: the natural gradient of each layer by a fraction of the batch's rows.

    The rows are picked in the backward pass, so that no more than these are kept. With `rank=1` it
    is `SNGD`.

    Source: Mu et al., "HyLo: A Hybrid Low-Rank Natural Gradient Descent Method", SC 2022, as
    Mozaffari et al., NeurIPS 2023, use it.

    Example:
        >>> base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> optimizer = mkor.HyLo(model, base)
    """

    def __init__(
        self,
        model: nn.Module,
        base: Optimizer,
        *,
        rank: float = 0.1,
        sampling: str | Callable[[int], str] = "auto",
        switch_steps: int = 100,
        switch_change: float = 0.5,
        factor_update_steps: int | Callable[[int], int] = 10,
        warmup_steps: int = 10,
        damping: Schedule = 1.0,
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
            rank: Fraction of the rows of each call to keep (ρ); 1 keeps all.
            sampling: "kid" keeps the rows of an interpolative decomposition and writes the others
                in them, "kis" draws rows by their size and weights them, "auto" takes "kid" while
                the gradient's size changes fast and "kis" otherwise; or a function of the step
                that returns "kid" or "kis".
            switch_steps: Steps in a period of "auto"; the gradient's size is read from the device
                once a period.
            switch_change: Relative change of the gradient's size from one period to the next that
                "auto" takes for fast (η).
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
        part = is_number(rank) and 0 < rank <= 1
        require("rank", rank, part, "above 0 and at most 1")
        if callable(sampling):
            sampling = checked("sampling", sampling, is_way, f"one of {', '.join(COMPRESS)}")
        else:
            one_of("sampling", sampling, SAMPLINGS)
        require("switch_steps", switch_steps, is_count(switch_steps, 1), "an integer of at least 1")
        above = is_number(switch_change) and switch_change > 0
        require("switch_change", switch_change, above, "positive and finite")
        one_of("state_dtype", state_dtype, ROW_DTYPES)
        damping = scheduled("damping", damping, positive, "positive and finite")
        options: dict[str, Any] = {
            "rank": rank,
            "sampling": sampling,
            "damping": damping,
            "switch_steps": switch_steps,
            "switch_change": switch_change,
            "state_dtype": state_dtype,
            "on_nonfinite": on_nonfinite,
        }
        super().__init__(
            model,
            base,
            HyLoMethod(**options),
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


def is_way(value: object) -> bool:
    """Whether a value names a way of picking rows."""
    return value in tuple(COMPRESS)
