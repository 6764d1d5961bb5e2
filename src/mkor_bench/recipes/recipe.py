"""A recipe: a training at full size, in a TOML file.

Every mistake in a file names the file, the key, the rule and the remedy.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mkor_bench.errors import UserError, unknown_name
from mkor_bench.recipes.fields import Fields

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DTYPES = ("float32", "bfloat16")
BASES = ("sgd", "adamw", "lamb")
METHODS = ("MKOR", "KFAC", "Eva", "SNGD", "HyLo", "auto")
DECAYS = ("all", "matrices")
_OF_A_BASE = ("base", "base_options", "decays")
SCHEDULES: Mapping[str, frozenset[str]] = {
    "constant": frozenset(),
    "cosine": frozenset(),
    "polynomial": frozenset({"power"}),
    "milestones": frozenset({"milestones", "factor"}),
    "knee": frozenset({"window", "dwell", "beta", "factor"}),
}
"""Kinds of schedules, and what each needs besides ``warmup``."""


@dataclass(frozen=True)
class Schedule:
    """How the learning rate goes.

    Attributes:
        kind: One of :data:`SCHEDULES`.
        warmup: Steps in which it grows to its value.
        options: What the kind needs.
    """

    kind: str
    warmup: int
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Entrant:
    """One optimizer of a recipe.

    Attributes:
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
    fields = Fields(f"recipe {str(path)!r}", _load(path))
    entrants, common = fields.table("optimizers"), fields.table("common")
    if not entrants:
        raise UserError(f"{fields.where} has no optimizer: add a table [optimizers.NAME].")
    workers = fields.whole("workers", 1)
    recipe = Recipe(
        path=path,
        title=fields.text("title"),
        paper=fields.text("paper"),
        source=fields.text("source"),
        task=fields.text("task"),
        workers=workers,
        per_node=fields.whole("per_node", 1, default=min(workers, 4)),
        batch=fields.whole("batch", 1),
        dtype=fields.choice("dtype", DTYPES),
        seed=fields.whole("seed", 0, default=0),
        entrants={
            name: _entrant(f"{fields.where}, optimizers.{name}", name, table, common)
            for name, table in entrants.items()
        },
    )
    fields.end()
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


def _entrant(where: str, name: str, table: Any, common: Mapping[str, Any]) -> Entrant:
    if not isinstance(table, dict):
        raise UserError(f"{where} must be a table, got {table!r}.")
    own = table.get("method") == "auto"
    shared = {key: common[key] for key in common if not (own and key in _OF_A_BASE)}
    fields = Fields(where, {**shared, **table})
    method = fields.choice("method", METHODS, default=None)
    hybrid = fields.table("hybrid")
    steps = fields.whole("steps", 1)
    entrant = Entrant(
        name=name,
        method=method,
        options=fields.table("options"),
        hybrid=hybrid or None,
        base=None if own else fields.choice("base", BASES),
        base_options={} if own else fields.table("base_options"),
        decays="all" if own else fields.choice("decays", DECAYS, default="all"),
        lr=fields.positive("lr"),
        steps=steps,
        schedule=_schedule(where, fields.table("schedule"), steps),
    )
    fields.end()
    if method is None and (entrant.options or entrant.hybrid):
        raise UserError(f"{where} has options and no method: name one, or leave them out.")
    return entrant


def _schedule(where: str, table: Mapping[str, Any], steps: int) -> Schedule:
    fields = Fields(f"{where}.schedule", table)
    kind = fields.choice("kind", tuple(SCHEDULES))
    warmup = fields.whole("warmup", 0, default=0)
    options: dict[str, Any] = {}
    for key in sorted(SCHEDULES[kind]):
        if key == "milestones":
            options[key] = fields.take(key, list, "a list of steps in ascending order")
            whole = all(type(step) is int and 0 < step < steps for step in options[key])
            if not whole or options[key] != sorted(set(options[key])):
                raise fields.wrong(key, options[key], f"steps below {steps} in ascending order")
        else:
            read = fields.positive if key in {"power", "factor", "beta"} else fields.whole
            options[key] = read(key) if read == fields.positive else fields.whole(key, 1)
    fields.end()
    if warmup >= steps:
        raise fields.wrong("warmup", warmup, f"below the steps, {steps}")
    return Schedule(kind, warmup, options)
