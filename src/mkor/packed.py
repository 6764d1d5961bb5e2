"""What the optimizer's part of a checkpoint must hold, told before anything is loaded.

A file may be damaged, or edited by hand. What is of a wrong kind is named by its place in the
state dict, with the rule and the remedy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from mkor.checks import is_count, is_number

Rule = tuple[str, Callable[[Any], bool]]
"""What a value must be, in words and as a test."""


def is_real(value: Any) -> bool:
    """Whether a value is a number, be it infinite: sums of falls of the loss may overflow."""
    return isinstance(value, float) or is_number(value)


ONE: Rule = ("a tensor", lambda value: isinstance(value, Tensor))
COUNT: Rule = ("an integer of at least 0", lambda value: is_count(value, 0))
EPOCH: Rule = ("an integer of at least -1", lambda value: is_count(value, -1))
STEP: Rule = (
    "an integer of at least 0, or None",
    lambda value: value is None or is_count(value, 0),
)
NAMED: Rule = ("a dict", lambda value: isinstance(value, dict))
TENSORS: Rule = (
    "a dict of tensors",
    lambda value: isinstance(value, dict) and all(isinstance(t, Tensor) for t in value.values()),
)
CALLS: Rule = (
    "a list of dicts of tensors",
    lambda value: isinstance(value, list | tuple) and all(TENSORS[1](call) for call in value),
)
SHAPE: Rule = (
    "a list of three sizes",
    lambda value: (
        isinstance(value, list | tuple) and len(value) == 3 and all(is_count(n, 0) for n in value)
    ),
)
NAMES: Rule = (
    "a list of lists of names",
    lambda value: (
        isinstance(value, list | tuple)
        and all(isinstance(group, list | tuple) for group in value)
        and all(isinstance(name, str) for group in value for name in group)
    ),
)
NAME: Rule = ("a name, or None", lambda value: value is None or isinstance(value, str))
NUMBER: Rule = ("a number", is_real)
PACE: Rule = ("a number, or None", lambda value: value is None or is_real(value))
LENGTH: Rule = ("a number of at least 0", lambda value: is_real(value) and value >= 0)
SEVERAL: Rule = (
    "a list of numbers",
    lambda value: isinstance(value, list | tuple) and all(is_real(n) for n in value),
)
YES: Rule = ("True or False", lambda value: isinstance(value, bool))
ROWS: Rule = (
    "an integer of at least 0, or a tensor",
    lambda value: isinstance(value, Tensor) or is_count(value, 0),
)
SIZES: Rule = (
    "a dict of lists of sizes",
    lambda value: (
        isinstance(value, dict)
        and all(isinstance(sizes, list | tuple) for sizes in value.values())
        and all(is_count(n, 0) for sizes in value.values() for n in sizes)
    ),
)
MAYBE: Rule = ("a dict, or None", lambda value: value is None or isinstance(value, dict))
FEW: Rule = ("an integer from 0 to 60", lambda value: is_count(value, 0) and value <= 60)

SCHEDULER = {
    "meter": NAMED,
    **dict.fromkeys(("first", "last"), PACE),
    "smoothed": NUMBER,
    **dict.fromkeys(("windows", "knees"), COUNT),
    "last_epoch": EPOCH,
}
"""What there must be of a `KneePointLR`."""

METER = {"total": NUMBER, "finite": LENGTH, "calls": COUNT}
"""What there must be of a mean that runs."""

PARTS = {
    **dict.fromkeys(("method", "base"), NAME),
    "step": COUNT,
    **dict.fromkeys(("layers", "heard", "pending"), NAMED),
    "shapes": SIZES,
    "parameters": NAMES,
    "sizes": SEVERAL,
    "resting": STEP,
    "hybrid": MAYBE,
}
"""What there must be."""

HYBRID = {"course": NAMED, "meter": NAMED, "shown": NAMED, "stepped": YES, "seconds": LENGTH}
"""What there must be of a hybrid switch."""

COURSE = {
    "preconditioning": YES,
    **dict.fromkeys(("since", "windows", "low"), COUNT),
    **dict.fromkeys(("loss", "pace"), PACE),
    **dict.fromkeys(("sum", "reference"), NUMBER),
    "seconds": SEVERAL,
    "trials": FEW,
}
"""What there must be of its course."""

SEEN = {"calls": CALLS, "rows": ROWS}
"""What parts of a layer's statistics must be; the others are tensors."""

LAYER = {
    "shape": SHAPE,
    "updates": COUNT,
    "last_update": STEP,
    "state": TENSORS,
    "momentum": TENSORS,
}
"""What there must be of each layer."""

REMEDY = (
    "it is not what state_dict() returned: load a whole checkpoint, or delete 'preconditioner' "
    "from it and pass strict=False to load the base optimizer's state alone"
)


def check_packed(packed: Any, key: str) -> None:
    """Check the factors of a checkpoint.

    Args:
        packed: What stands under `key`.
        key: Where in the state dict.

    Raises:
        ValueError: Something is missing, of a wrong kind, or without values.
    """
    place = f"state_dict['{key}']"
    check_parts(packed, PARTS, place)
    check_parts(packed["heard"], METER, f"{place}['heard']")
    if packed["hybrid"] is not None:
        check_hybrid(packed["hybrid"], f"{place}['hybrid']")
    for name, seen in packed["pending"].items():
        own = {key: SEEN.get(key, ONE) for key in seen} if isinstance(seen, dict) else {}
        check_parts(seen, own, f"{place}['pending']['{name}']")
    for name, layer in packed["layers"].items():
        check_parts(layer, LAYER, f"{place}['layers']['{name}']")
        if any(t.is_meta for part in ("state", "momentum") for t in layer[part].values()):
            raise ValueError(
                f"the factors of layer '{name}' in this checkpoint are on the device 'meta' and "
                "have no values: read the file with torch.load(path, map_location='cpu')"
            )


def check_hybrid(held: dict[str, Any], place: str) -> None:
    """Check the state of a hybrid switch."""
    check_parts(held, HYBRID, place)
    check_parts(held["course"], COURSE, f"{place}['course']")
    for meter in ("meter", "shown"):
        check_parts(held[meter], METER, f"{place}['{meter}']")


def check_parts(held: Any, rules: dict[str, Rule], place: str, remedy: str = REMEDY) -> None:
    """Check that a dict holds what it must.

    Args:
        held: The dict.
        rules: What there must be, by key.
        place: Where it stands.
        remedy: What to do about it.

    Raises:
        ValueError: It doesn't.
    """
    if not isinstance(held, dict):
        raise ValueError(f"{place} is {shown(held)} and must be a dict, so {remedy}")
    lacks = [key for key in rules if key not in held]
    if lacks:
        raise ValueError(f"{place} lacks {', '.join(lacks)}, so {remedy}")
    for key, (rule, good) in rules.items():
        if not good(held[key]):
            raise ValueError(
                f"{place}['{key}'] is {shown(held[key])} and must be {rule}, so {remedy}"
            )


def shown(value: Any) -> str:
    """A value in few words."""
    if isinstance(value, dict):
        kinds = sorted({type(entry).__name__ for entry in value.values()})
        return f"a dict of {', '.join(kinds)}"
    text = repr(value)
    return text if len(text) <= 40 else f"a {type(value).__name__}"
