"""The optimizers that the command knows by name, one row each.

A new method is one more row: a name, a sentence, and a function that builds the
optimizer for a model at a learning rate. Everything else about a comparison is the
same for all rows, so that it differs in the method alone.

A name may carry options for the builder, as in ``kfac:damping=0.01:inverse_update_steps=50``.

``torch`` and ``mkor`` are imported by the builders, so that ``mkor --help`` is quick.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from mkor_bench.errors import UserError, unknown_name

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    Builder = Callable[..., Optimizer]

MOMENTUM = 0.9
"""Momentum of SGD, alone and below MKOR."""


@dataclass(frozen=True)
class OptimizerRow:
    """One optimizer of the registry.

    Attributes:
        name: The name on the command line.
        description: One phrase for tables and reports.
        build: Makes the optimizer from a model and a learning rate; options by name.
        first_order: Whether it is a baseline that the second-order methods are to beat.
        base: The optimizer that it stands on, and is never to be worse than; None for none.
        made_by: The public name of mkor that makes it, whose defaults it has; None for none.
        compared: Whether `mkor compare` takes it where it is not told what to take.
        lr: What `mkor train` takes where neither the task nor the user says.
    """

    name: str
    description: str
    build: Builder
    first_order: bool = False
    base: str | None = None
    made_by: str | None = None
    compared: bool = False
    lr: float = 0.01


def _sgd(model: nn.Module, lr: float, **options: Any) -> Optimizer:
    from torch.optim import SGD

    return SGD(model.parameters(), lr=lr, **{"momentum": MOMENTUM, **options})


def _adamw(model: nn.Module, lr: float, **options: Any) -> Optimizer:
    from torch.optim import AdamW

    return AdamW(model.parameters(), lr=lr, **options)


def _lamb(model: nn.Module, lr: float, **options: Any) -> Optimizer:
    from mkor import LAMB

    return LAMB(model.parameters(), lr=lr, **options)


def _rival(model: nn.Module, lr: float, *, name: str, **options: Any) -> Optimizer:
    from mkor_bench import rivals

    build: Builder = getattr(rivals, name)
    return build(model, lr, **options)


def _auto(model: nn.Module, lr: float, **options: Any) -> Optimizer:
    from mkor import auto

    return auto(model, lr, **options)


def _wrapped(
    model: nn.Module,
    lr: float,
    *,
    method: str,
    base: Builder,
    switch: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    import mkor

    if switch is not None:
        options["hybrid"] = mkor.HybridSwitch(**switch)
    return getattr(mkor, method)(model, base(model, lr), **options)


def _on_sgd(name: str, description: str, method: str, **options: Any) -> OptimizerRow:
    build = partial(_wrapped, method=method, base=_sgd, **options)
    told = f"{description} on SGD with momentum 0.9"
    return OptimizerRow(name, told, build, base="sgd", made_by=method)


NORM: dict[str, Any] = {"rescale": "gradient", "kl_clip": None}
KFAC: dict[str, Any] = {"inverse_update_steps": 10, **NORM}
"""Small tasks are over before KAISA's interval of 100 steps pays. This, and dampings that are not a
method's default, come from ``benchmarks/tuning.py``."""

LOWRANK: dict[str, Any] = {
    "representation": "lowrank",
    "statistic": "sketch",
    "vectors": 16,
    "rank": 20,
    "factor_decay": 0.95,
    "damping": 0.01,
    "factor_update_steps": 1,
}

_ROWS = (
    OptimizerRow("sgd", "SGD with momentum 0.9", _sgd, first_order=True, compared=True),
    OptimizerRow("adamw", "AdamW", _adamw, first_order=True, compared=True),
    OptimizerRow("lamb", "LAMB", _lamb, first_order=True, made_by="LAMB"),
    OptimizerRow("soap", "SOAP", partial(_rival, name="build_soap")),
    OptimizerRow("muon", "Muon, AdamW on the rest", partial(_rival, name="build_muon")),
    OptimizerRow(
        "auto",
        "MKOR on the momentum, AdamW on the rest",
        _auto,
        base="adamw",
        made_by="auto",
        compared=True,
        lr=0.003,
    ),
    replace(_on_sgd("mkor", "MKOR", "MKOR"), compared=True),
    OptimizerRow(
        "mkor-adamw",
        "MKOR on AdamW",
        partial(_wrapped, method="MKOR", base=_adamw),
        base="adamw",
        made_by="MKOR",
        compared=True,
    ),
    _on_sgd("mkor-h", "MKOR that hands over", "MKOR", switch={"window": 15}),
    _on_sgd("mkor-lowrank", "MKOR with low-rank sketches", "MKOR", **LOWRANK),
    OptimizerRow(
        "mkor-lowrank-adamw",
        "MKOR with low-rank sketches on AdamW",
        partial(_wrapped, method="MKOR", base=_adamw, **LOWRANK),
        base="adamw",
        made_by="MKOR",
    ),
    _on_sgd("kfac", "K-FAC by inverses", "KFAC", solver="inverse", damping=0.003, **KFAC),
    _on_sgd("kaisa-eigen", "K-FAC by eigenvectors", "KFAC", solver="eigen", damping=0.01, **KFAC),
    _on_sgd("sngd", "SNGD", "SNGD", damping=1.0),
    _on_sgd("hylo-kis", "HyLo with sampled rows", "HyLo", sampling="kis"),
    _on_sgd("hylo-kid", "HyLo with decomposed rows", "HyLo", sampling="kid"),
    _on_sgd("eva", "Eva", "Eva", damping=1.0, **NORM),
    _on_sgd("kbfgs", "K-BFGS", "KBFGS", damping=0.9, **NORM),
)

OPTIMIZERS: dict[str, OptimizerRow] = {row.name: row for row in _ROWS}
"""Every optimizer by its name, in the order of the tables."""


def optimizer_row(name: str) -> OptimizerRow:
    """Looks an optimizer up.

    Args:
        name: Its name on the command line, which may carry options:
            ``name:option=value:option=value``.

    Returns:
        Its row of the registry, with the options in the builder.

    Raises:
        UserError: The name is unknown, and the nearest known names are suggested; or an
            option is not written as above.
    """
    plain, *texts = name.split(":")
    if plain not in OPTIMIZERS:
        raise unknown_name("optimizer", plain, OPTIMIZERS)
    row = OPTIMIZERS[plain]
    if not texts:
        return row
    options = dict(_parse_option(name, text) for text in texts)
    told = ", ".join(f"{option} {value}" for option, value in options.items())
    build = partial(_with_options, name=name, row=row.name, options=options)
    return replace(row, name=name, description=f"{row.description} with {told}", build=build)


def settled_options(name: str) -> dict[str, Any]:
    """Tells what an optimizer is built with, apart from the learning rate.

    Args:
        name: Its name, which may carry options.

    Returns:
        Every option that the library's defaults, the registry or the name set, as JSON can
        hold it: what makes two rows, or two states of one row, differ.
    """
    plain, *texts = name.split(":")
    row = optimizer_row(plain)
    fixed = row.build.keywords if isinstance(row.build, partial) else {}
    given = dict(_parse_option(name, text) for text in texts)
    options = {**_library_defaults(row), **fixed, **given}
    return {
        option: value if isinstance(value, (int, float, str, bool, type(None))) else _told(value)
        for option, value in options.items()
    }


def _library_defaults(row: OptimizerRow) -> dict[str, Any]:
    import mkor

    parameters = inspect.signature(getattr(mkor, row.made_by)).parameters if row.made_by else {}
    return {
        name: parameter.default
        for name, parameter in parameters.items()
        if parameter.default is not parameter.empty and name != "lr"
    }


def _told(value: Any) -> str:
    return str(getattr(value, "__name__", value))


def _with_options(
    model: nn.Module, lr: float, *, name: str, row: str, options: dict[str, Any]
) -> Optimizer:
    import torch

    kinds = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    options = {
        option: kinds.get(value, value) if option.endswith("_dtype") else value
        for option, value in options.items()
    }
    known = _library_defaults(OPTIMIZERS[row])  # empty where another library makes it
    unknown = [option for option in options if option not in known]
    if known and unknown:
        raise unknown_name(f"option of {row}", unknown[0], known)
    try:
        return OPTIMIZERS[row].build(model, lr, **options)
    except (TypeError, ValueError) as error:
        raise UserError(f"optimizer {name!r}: {error}") from error


def _parse_option(name: str, text: str) -> tuple[str, Any]:
    option, equals, value = text.partition("=")
    if not option.isidentifier() or not equals or not value:
        raise UserError(
            f"optimizer {name!r}: {text!r} is not an option: write name:option=value, "
            "such as kfac:damping=0.01."
        )
    try:
        return option, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return option, value  # a word, such as representation=window
