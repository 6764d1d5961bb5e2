"""The public class of MKOR. The mathematics is in `methods/mkor.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mkor.checks import (
    DTYPES,
    Schedule,
    above_one,
    fraction,
    is_count,
    is_number,
    one_of,
    positive,
    require,
    scheduled,
    share,
)
from mkor.factors.dense import RULES
from mkor.hybrid import HybridSwitch
from mkor.methods.mkor import MKORMethod
from mkor.optimizer import Preconditioner

REPRESENTATIONS = ("dense", "window", "lowrank")
WIDE_SIDES = (None, "window", "lowrank")
WINDOW, RANK = 160, 40
OWN: dict[str, tuple[str, Any]] = {
    "rule": ("dense", "exact"),
    "norm_limit": ("dense", 2.0),
    "blend": ("dense", 0.95),
    "max_dim": ("dense", 8192),
    "wide_sides": ("dense", None),
    "packed": ("dense", False),
    "window": ("window", WINDOW),
    "rank": ("lowrank", RANK),
    "power": ("lowrank", 1.0),
}
"""Options that one representation alone makes use of, and their defaults."""
COUNTS = ("window", "rank")
"""Those of them that wide sides beside dense factors make use of as well."""


class MKOR(Preconditioner):
    """MKOR: gradients preconditioned by Kronecker factors that rank-1 updates keep inverted.

    Source: Mozaffari et al., "MKOR: Momentum-Enabled Kronecker-Factor-Based Optimizer Using Rank-1
    Updates", NeurIPS 2023, Algorithm 1. Symbols of the paper stand in parentheses.

    Example:
        >>> base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> optimizer = mkor.MKOR(model, base)
    """

    def __init__(
        self,
        model: nn.Module,
        base: Optimizer,
        *,
        statistic: str = "mean",
        vectors: int = 1,
        representation: str = "dense",
        window: int = WINDOW,
        rank: int = RANK,
        power: float = 1.0,
        rule: str = "exact",
        factor_update_steps: int | Callable[[int], int] = 10,
        warmup_steps: int = 10,
        factor_decay: Schedule = 0.9,
        damping: Schedule | None = 0.02,
        norm_limit: Schedule = 2.0,
        blend: Schedule = 0.95,
        momentum: Schedule | None = None,
        grad_worker_fraction: float = 1.0,
        rescale: str | None = "gradient",
        kl_clip: Schedule | None = None,
        skip: Sequence[str] = (),
        max_dim: int = 8192,
        wide_sides: str | None = None,
        packed: bool = False,
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
            statistic: What an update sees of a layer's rows: "mean" their mean, "sketch" sums with
                random signs, which stand for the whole covariance.
            vectors: Vectors per update (r): means of as many blocks of the batch, or as many sums.
            representation: How a factor is kept: "dense" as a matrix, "window" as the last `window`
                vectors, "lowrank" as the `rank` leading eigenvectors of their moving covariance.
            window: Vectors a side in a window (k); a side no wider keeps its whole covariance.
            rank: Eigenvectors a side in "lowrank" (k).
            power: Exponent p of a factor in "lowrank", (C + βI)⁻ᵖ of a side's covariance C: 1 is
                the inverse, ½ makes a gradient's covariance white.
            rule: How an update changes a dense inverse: "exact" inverts the moving average,
                "paper" follows eq. 5/6 as printed, "reference" what the authors' code computes.
            factor_update_steps: Steps between factor updates (f).
            warmup_steps: Steps at the start that all update the factors.
            factor_decay: Weight of the old factor in the moving average (γ); "reference" has none.
            damping: Weight of the identity relative to the trace of the statistics, which makes
                the update independent of the loss's scale; None uses the vectors as they are, as
                the paper does.
            norm_limit: Largest entry of an inverse before it is blended with the identity (ε);
                "reference" resets it instead. The reciprocal guards against vanishing.
            blend: Weight of the inverse in that blend (ζ).
            grad_worker_fraction: Fraction of the workers that hold a layer and precondition its
                gradient, rounded up to a divisor of their number. Below 1, state is divided,
                gradients cross in every step, and every worker must call `state_dict`.
            momentum: Decay β of a moving average of the gradient, whose Nesterov step is
                preconditioned in place of the gradient; None for the gradient. The base then needs
                no momentum of its own.
            rescale: "gradient" keeps the norm of the gradient (line 10), or of the momentum;
                "rms" gives each update a root mean square of 1, so that a learning rate is the
                size of a step; "fan_in" one of √(128/i), i inputs; None keeps the result.
            kl_clip: Bound κ on Σ lr²⟨V, ∇W⟩ over all layers: updates V are scaled by
                √(κ/|Σ lr²⟨V, ∇W⟩|) where that is below 1; None leaves them.
            skip: Regular expressions; layers in whose name one of them is found are left to the
                base.
            max_dim: Width of a side up to which it gets a dense factor.
            wide_sides: How wider ones are kept beside dense factors: "window" or "lowrank", as
                those representations keep every side; None for no factor, the identity.
            packed: Whether of a dense factor, which is symmetric, only one triangle is kept: half
                the memory, for a matrix that is made anew in every step, a layer at a time.
            state_dtype: Dtype of the factors and of the products with them; None for float32, or
                float64 for float64 parameters.
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
        dense = {"rule": rule, "norm_limit": norm_limit, "blend": blend, "max_dim": max_dim}
        kept = {"wide_sides": wide_sides, "packed": packed, "state_dtype": state_dtype}
        average = {"decay": factor_decay, "damping": damping, "power": power}
        options: dict[str, Any] = {
            "statistic": statistic,
            "vectors": vectors,
            "representation": representation,
            "on_nonfinite": on_nonfinite,
            **dense,
            **kept,
            **average,
        }
        super().__init__(
            model,
            base,
            MKORMethod(count=check(options, window, rank), **options),
            factor_update_steps=factor_update_steps,
            warmup_steps=warmup_steps,
            momentum=momentum,
            rescale=rescale,
            kl_clip=kl_clip,
            skip=skip,
            wire_dtype=wire_dtype,
            on_nonfinite=on_nonfinite,
            grad_worker_fraction=grad_worker_fraction,
            hybrid=hybrid,
            agreement_steps=agreement_steps,
        )


def check(options: dict[str, Any], window: int, rank: int) -> int:
    """Refuse options that are out of range, or that the representation makes no use of.

    Functions of the step are replaced in place by ones that check themselves later.

    Returns:
        Rows that the representation keeps a side.
    """
    one_of("rule", options["rule"], RULES)
    one_of("statistic", options["statistic"], ("mean", "sketch"))
    one_of("representation", options["representation"], REPRESENTATIONS)
    one_of("wide_sides", options["wide_sides"], WIDE_SIDES)
    require("packed", options["packed"], isinstance(options["packed"], bool), "True or False")
    one_of("state_dtype", options["state_dtype"], DTYPES)
    rules = {
        "decay": ("factor_decay", fraction, "between 0 and 1, both excluded"),
        "damping": ("damping", positive, "positive and finite, or None for raw statistics"),
        "norm_limit": ("norm_limit", above_one, "finite and greater than 1"),
        "blend": ("blend", share, "at least 0 and below 1"),
    }
    for key, (name, good, rule) in rules.items():
        if options[key] is not None or key != "damping":
            options[key] = scheduled(name, options[key], good, rule)
    above_zero = is_number(options["power"]) and 0 < options["power"] <= 1
    require("power", options["power"], above_zero, "above 0 and at most 1")
    counts = {"window": window, "rank": rank, **{k: options[k] for k in ("vectors", "max_dim")}}
    for name, value in counts.items():
        require(name, value, is_count(value, 1), "an integer of at least 1")
    refuse_unused(options | counts)
    thin = thin_option(options)[1]
    if thin == "window" and options["vectors"] > window:
        raise ValueError(
            f"vectors={options['vectors']} don't fit into window={window}: a window must hold at "
            "least one update"
        )
    return {None: 0, "window": window, "lowrank": rank}[thin]


def thin_option(options: dict[str, Any]) -> tuple[str, str | None]:
    """The option that says how sides without a matrix are kept, and its value."""
    name = "wide_sides" if options["representation"] == "dense" else "representation"
    return name, options[name]


def refuse_unused(options: dict[str, Any]) -> None:
    """Refuse a value that was set, but that the representation makes no use of."""
    chosen, (option, thin) = options["representation"], thin_option(options)
    for name, (owner, default) in OWN.items():
        used = chosen == owner or (name in COUNTS and thin == owner)
        if not used and options[name] != default:
            other = f" or wide_sides={owner!r}" if name in COUNTS else ""
            raise ValueError(
                f"{name}={options[name]!r} has no effect with representation={chosen!r}: it "
                f"belongs to representation={owner!r}{other}"
            )
    if thin is not None and options["damping"] is None:
        raise ValueError(
            f"damping=None is not possible with {option}={thin!r}, whose factors need a "
            "damping relative to the trace: choose a positive number"
        )
