"""The public class of K-FAC. The mathematics is in `methods/kfac.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from mkor.checks import (
    Schedule,
    counted,
    is_count,
    one_of,
    positive,
    require,
    scheduled,
    weighted,
)
from mkor.hybrid import HybridSwitch
from mkor.methods.kfac import SOLVERS, KFACMethod
from mkor.optimizer import Preconditioner

STATE_DTYPES = (None, torch.float32, torch.float64, torch.bfloat16)
"""Dtypes of the state; squares of gradients leave the range of float16."""

INVERSE_DTYPES = (None, torch.float32, torch.float64)
"""Dtypes that matrices are decomposed in."""


class KFAC(Preconditioner):
    """K-FAC as KAISA runs it: gradients preconditioned by the covariances of both sides.

    Sources: Martens and Grosse, "Optimizing Neural Networks with Kronecker-factored Approximate
    Curvature", ICML 2015; Pauloski et al., "KAISA: An Adaptive Second-Order Optimizer Framework for
    Deep Neural Networks", SC 2021. Symbols stand in parentheses.

    Example:
        >>> base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> optimizer = mkor.KFAC(model, base)
    """

    def __init__(
        self,
        model: nn.Module,
        base: Optimizer,
        *,
        solver: str = "eigen",
        damping: Schedule = 0.001,
        damping_split: str = "factored",
        factor_decay: Schedule = 0.95,
        factor_update_steps: int | Callable[[int], int] = 10,
        inverse_update_steps: int | Callable[[int], int] = 100,
        warmup_steps: int = 10,
        weight_sharing: str = "expand",
        grad_worker_fraction: float = 1.0,
        rescale: str | None = None,
        kl_clip: Schedule | None = 0.001,
        skip: Sequence[str] = (),
        max_dim: int = 8192,
        state_dtype: torch.dtype | None = None,
        inverse_dtype: torch.dtype | None = None,
        wire_dtype: torch.dtype | None = None,
        on_nonfinite: str = "skip",
        hybrid: HybridSwitch | None = None,
        agreement_steps: int | None = None,
    ) -> None:
        """Wrap `base` so that it steps along preconditioned gradients.

        Options of type `Schedule` are numbers or functions of the step, counted from 0, and so are
        the two numbers of steps.

        Args:
            model: The model; layers are observed by hooks.
            base: Any `torch.optim` optimizer over parameters of the model.
            solver: "eigen" solves with A⊗G + λI by the eigenvectors of A and G; "inverse"
                multiplies by the inverse of each damped factor, half the products of a step.
            damping: Weight of the identity (λ). "eigen" takes the value of every step, "inverse"
                that of the step which inverts.
            damping_split: How "inverse" damps: "factored" adds √λ·π to A and √λ/π to G with
                π² = (tr A/d_A)/(tr G/d_G); "plain" adds λ to each, as KAISA's code does.
            factor_decay: Weight of the old covariance in the moving average (γ).
            factor_update_steps: Steps between two updates of the covariances.
            inverse_update_steps: Steps between two decompositions. They are made in updates of the
                covariances; one that falls between two updates waits for the next.
            warmup_steps: Steps at the start that all update and decompose.
            weight_sharing: What a row is where a weight is used at several places of a sample, as
                over tokens: "expand" takes each place as a row, "reduce" one row a sample
                (KFAC-expand and KFAC-reduce).
            grad_worker_fraction: Fraction of the workers that hold a layer and precondition its
                gradient, rounded up to a divisor of their number: 1 (KAISA's COMM-OPT) down to one
                worker (MEM-OPT). One worker decomposes a layer's factors and sends them to those.
                Below 1, state is divided, gradients cross in every step, and every worker must
                call `state_dict`.
            rescale: None keeps the result, "gradient" gives it the norm of the gradient.
            kl_clip: Bound κ on Σ lr²⟨V, ∇W⟩ over all layers: updates V are scaled by
                √(κ/|Σ lr²⟨V, ∇W⟩|) where that is below 1; None leaves them.
            skip: Regular expressions; layers in whose name one of them is found are left to the
                base.
            max_dim: A side wider than this gets no factor and counts as the identity.
            state_dtype: Dtype of the covariances, of what is made of them and of the products of a
                step; None for float32, or float64 for float64 parameters. float16 can't hold them.
            inverse_dtype: Dtype to decompose in; None for float32, or float64 for a state in it.
            wire_dtype: Dtype of the covariances while they cross workers.
            on_nonfinite: Covariances that aren't finite are left out ("skip"), start the average
                anew ("reset"), or raise FloatingPointError before anything changes ("raise", which
                synchronises with the device in every step). Gradients that aren't finite reach the
                base as they are; only "raise" keeps them from it.
            hybrid: When the base optimizer takes over alone (MKOR-H); None for never.
            agreement_steps: Steps between checks that parameters, gradients and factors are equal
                on all workers, which wait for the device; None for never.

        Raises:
            TypeError: `model` or `base` is of the wrong type.
            ValueError: An option is out of range, or `base` doesn't fit the model.
        """
        check_names(solver, damping_split, weight_sharing)
        check_dtypes(state_dtype, inverse_dtype)
        factor_decay = weighted("factor_decay", factor_decay)
        damping = scheduled("damping", damping, positive, "positive and finite")
        require("max_dim", max_dim, is_count(max_dim, 1), "an integer of at least 1")
        check_use(solver, damping_split)
        method = KFACMethod(
            solver=solver,
            decay=factor_decay,
            damping=damping,
            damping_split=damping_split,
            weight_sharing=weight_sharing,
            factor_update_steps=factor_update_steps,
            inverse_update_steps=counted("inverse_update_steps", inverse_update_steps),
            warmup_steps=warmup_steps,
            max_dim=max_dim,
            state_dtype=state_dtype,
            inverse_dtype=inverse_dtype,
            on_nonfinite=on_nonfinite,
        )
        super().__init__(
            model,
            base,
            method,
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


def check_names(solver: object, split: object, sharing: object) -> None:
    """Check the options that are names."""
    one_of("solver", solver, SOLVERS)
    one_of("damping_split", split, ("factored", "plain"))
    one_of("weight_sharing", sharing, ("expand", "reduce"))


def check_dtypes(state: object, inverse: object) -> None:
    """Check in what covariances are kept and decomposed."""
    one_of("state_dtype", state, STATE_DTYPES)
    one_of("inverse_dtype", inverse, INVERSE_DTYPES)


def check_use(solver: str, split: str) -> None:
    """Refuse a split of the damping where there is one damping."""
    if solver == "eigen" and split != "factored":
        raise ValueError(
            f"damping_split={split!r} has no effect with solver='eigen', which adds the damping to "
            "the product of both factors: leave it out, or choose solver='inverse'"
        )
