"""A recipe: a training at full size, in a TOML file.

Every mistake in a file names the file, the key, the rule and the remedy.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mkor import HybridSwitch
from mkor_bench.errors import UserError, unknown_name
from mkor_bench.recipes.fields import Fields
from mkor_bench.recipes.options import BASES, METHODS, read_options
from mkor_bench.recipes.schedules import Schedule, Span, read_schedule

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DTYPES = ("float32", "bfloat16")
DECAYS = ("all", "matrices")
_KEYS = (
    *("title", "paper", "source", "task", "workers", "per_node", "batch", "dtype", "seed"),
    *("epoch", "common", "optimizers"),
)
_OF_A_BASE = ("base", "base_options", "decays")
_LENGTHS = ("steps", "epochs")
_ENTRANT_KEYS = ("method", "options", "hybrid", *_OF_A_BASE, "lr", *_LENGTHS, "schedule")
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
"""Names of optimizers; an output folder is named by them."""


@dataclass(frozen=True)
class Entrant:
    """One optimizer of a recipe.

    Attributes:
        where: The file and the table, for messages.
        name: In the recipe.
        method: A public name of mkor, or None for the base alone.
        options: Of the method.
        hybrid: Of a :class:`mkor.HybridSwitch`, or None for none.
        base: The optimizer below, or None where the method brings its own.
        base_options: Of the base.
        decays: Which parameters the base's weight decay is for: all, or matrices.
        lr: The learning rate.
        steps: How many.
        schedule: How the learning rate goes.
    """

    where: str
    name: str
    method: str | None
    options: Mapping[str, Any]
    hybrid: Mapping[str, Any] | None
    base: str | None
    base_options: Mapping[str, Any]
    decays: str
    lr: float
    steps: int
    schedule: Schedule


@dataclass(frozen=True)
class Recipe:
    """What a file says.

    Attributes:
        path: The file.
        title: What it trains.
        paper: Where the paper does it.
        source: Where the numbers come from.
        task: A task of the registry.
        workers: How many, one GPU each.
        per_node: How many of them are in one machine.
        batch: Samples of a step, of all workers together.
        dtype: Of the passes through the model.
        seed: Of everything.
        entrants: The optimizers by their names.
    """

    path: Path
    title: str
    paper: str
    source: str
    task: str
    workers: int
    per_node: int
    batch: int
    dtype: str
    seed: int
    entrants: Mapping[str, Entrant]

    def entrant(self, name: str) -> Entrant:
        """Looks an optimizer up.

        Args:
            name: Its name in the recipe.

        Returns:
            The optimizer.

        Raises:
            UserError: The recipe has none of that name.
        """
        if name not in self.entrants:
            raise unknown_name(f"optimizer of {self.path.name}", name, self.entrants)
        return self.entrants[name]


def read_recipe(path: Path) -> Recipe:
    """Reads a recipe.

    Args:
        path: The file.

    Returns:
        The recipe.

    Raises:
        UserError: The file cannot be read, or something in it is missing, unknown or out of range.
    """
    fields = Fields(f"recipe {str(path)!r}", _load(path), _KEYS)
    entrants, common = fields.table("optimizers"), fields.table("common")
    if not entrants:
        raise UserError(f"{fields.where} has no optimizer: add a table [optimizers.NAME].")
    Fields(f"{fields.where}, common", common, _ENTRANT_KEYS)
    workers, batch = fields.whole("workers", 1), fields.whole("batch", 1)
    samples = fields.whole("epoch", 1, default=None)
    epoch = None if samples is None else samples / batch
    recipe = Recipe(
        path=path,
        title=fields.text("title"),
        paper=fields.text("paper"),
        source=fields.text("source"),
        task=fields.text("task"),
        workers=workers,
        per_node=fields.whole("per_node", 1, default=min(workers, 4)),
        batch=batch,
        dtype=fields.choice("dtype", DTYPES),
        seed=fields.whole("seed", 0, default=0, most=2**32 - 1),
        entrants={
            name: _entrant(f"{fields.where}, optimizers", name, table, common, epoch)
            for name, table in entrants.items()
        },
    )
    if workers % recipe.per_node:
        raise fields.wrong("per_node", recipe.per_node, f"a divisor of workers, {workers}")
    return recipe


def _load(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"recipe {str(path)!r} cannot be read ({error.strerror}): name a file such as "
            "recipes/bert-large-reviews-4.toml."
        ) from None
    except ValueError as error:  # no UTF-8, or no TOML
        raise UserError(f"recipe {str(path)!r} is no TOML file: {error}.") from None


def _entrant(
    where: str, name: str, table: Any, common: Mapping[str, Any], epoch: float | None
) -> Entrant:
    if not _NAME.fullmatch(name):
        raise UserError(
            f"{where}: the name of an optimizer must be of letters, digits, dots, dashes and "
            f"underscores and not begin with a dot, got {name!r}."
        )
    where = f"{where}.{name}"
    if not isinstance(table, dict):
        raise UserError(f"{where} must be a table, got {table!r}.")
    alone = {**common, **table}.get("method") == "auto"
    replaced = {*(_OF_A_BASE if alone else ()), *(_LENGTHS if {*_LENGTHS} & {*table} else ())}
    shared = {key: common[key] for key in common if key not in replaced}
    fields = Fields(where, {**shared, **table}, _ENTRANT_KEYS)
    method = fields.choice("method", tuple(METHODS), default=None)
    options, switch = _of_a_method(fields, method)
    base = None if alone else fields.choice("base", tuple(BASES))
    base_options = fields.table("base_options")
    if base is not None:
        base_options = read_options(f"{where}.base_options", base_options, BASES[base])
    span, lr = _span(fields, epoch), fields.positive("lr")
    return Entrant(
        where=where,
        name=name,
        method=method,
        options=options,
        hybrid=switch,
        base=base,
        base_options=base_options,
        decays=fields.choice("decays", DECAYS, default="all"),
        lr=lr,
        steps=span.steps,
        schedule=read_schedule(f"{where}.schedule", fields.table("schedule"), span, lr),
    )


def _of_a_method(
    fields: Fields, method: str | None
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Returns the options and the switch."""
    options, switch = fields.table("options"), fields.table("hybrid")
    if method is None:
        if options or switch:
            raise UserError(
                f"{fields.where} has options and no method: name one, or leave them out."
            )
        return {}, None
    if method == "auto":
        if switch:
            raise UserError(
                f"{fields.where}: method 'auto' has no hybrid, since a base that took over would "
                "step along the bare gradient: leave it out."
            )
        fields.only([key for key in _ENTRANT_KEYS if key not in _OF_A_BASE], "method 'auto'")
    options = read_options(f"{fields.where}.options", options, METHODS[method])
    if not switch:
        return options, None
    return options, read_options(f"{fields.where}.hybrid", switch, HybridSwitch)


def _span(fields: Fields, epoch: float | None) -> Span:
    """Returns how long an optimizer trains: so many steps, or epochs."""
    rule = "a positive number"
    epochs = fields.number("epochs", rule, least=sys.float_info.min, default=None)
    steps = fields.whole("steps", 1, default=None)
    if epochs is None and steps is None:
        raise UserError(
            f"{fields.where} lacks 'steps': add it, a whole number of at least 1, or 'epochs' and, "
            "in [common], 'epoch', the samples of one."
        )
    if epochs is None:
        return Span(steps, epoch)
    if steps is not None:
        raise UserError(f"{fields.where} has both steps and epochs: leave one of them out.")
    if epoch is None:
        raise UserError(
            f"{fields.where}: epochs needs to know how long one is: add epoch, its samples, to "
            "the recipe, or give steps in their place."
        )
    if not 1 <= epochs * epoch <= 2**53:
        raise fields.wrong("epochs", epochs, f"from {1 / epoch:g}, a step, to {2**53 / epoch:g}")
    return Span(round(epochs * epoch), epoch)
