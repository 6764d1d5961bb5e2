"""What the optimizer's part of a checkpoint must hold, told before anything is loaded.

A file may be damaged, or edited by hand. What is of a wrong kind is named by its place in the
state dict, with the rule and the remedy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from mkor.checks import is_count

Rule = tuple[str, Callable[[Any], bool]]
"""What a value must be, in words and as a test."""

COUNT: Rule = ("an integer of at least 0", lambda value: is_count(value, 0))
STEP: Rule = (
    "an integer of at least 0, or None",
    lambda value: value is None or is_count(value, 0),
)
NAMED: Rule = ("a dict", lambda value: isinstance(value, dict))
TENSORS: Rule = (
    "a dict of tensors",
    lambda value: isinstance(value, dict) and all(isinstance(t, Tensor) for t in value.values()),
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
ANY: Rule = ("there", lambda value: True)

PARTS = {"method": ANY, "base": ANY, "step": COUNT, "layers": NAMED, "parameters": NAMES}
"""What there must be."""

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
    for name, layer in packed["layers"].items():
        check_parts(layer, LAYER, f"{place}['layers']['{name}']")
        if any(t.is_meta for part in ("state", "momentum") for t in layer[part].values()):
            raise ValueError(
                f"the factors of layer '{name}' in this checkpoint are on the device 'meta' and "
                "have no values: read the file with torch.load(path, map_location='cpu')"
            )


def check_parts(held: Any, rules: dict[str, Rule], place: str) -> None:
    """Check that a dict holds what it must."""
    if not isinstance(held, dict):
        raise ValueError(f"{place} is {shown(held)} and must be a dict, so {REMEDY}")
    lacks = [key for key in rules if key not in held]
    if lacks:
        raise ValueError(f"{place} lacks {', '.join(lacks)}, so {REMEDY}")
    for key, (rule, good) in rules.items():
        if not good(held[key]):
            raise ValueError(
                f"{place}['{key}'] is {shown(held[key])} and must be {rule}, so {REMEDY}"
            )


def shown(value: Any) -> str:
    """A value in few words."""
    if isinstance(value, dict):
        kinds = sorted({type(entry).__name__ for entry in value.values()})
        return f"a dict of {', '.join(kinds)}"
    text = repr(value)
    return text if len(text) <= 40 else f"a {type(value).__name__}"
