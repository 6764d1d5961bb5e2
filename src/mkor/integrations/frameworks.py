"""What the integrations share: the framework in a version that fits, and the optimizer it holds."""

from __future__ import annotations

import importlib
import re
from importlib import metadata
from typing import Any

from mkor.optimizer import Preconditioner

MASK = "attention_mask"
"""What frameworks call the mask of a batch, where one has a mask."""


def load(module: str, minimum: str) -> Any:
    """Import a framework's module.

    Args:
        module: Its dotted name, which begins with the package's name.
        minimum: The oldest version that will do.

    Raises:
        ImportError: The package is absent or too old.
    """
    package = module.partition(".")[0]
    remedy = f"pip install --upgrade '{package}>={minimum}'"
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError as error:
        raise ImportError(
            f"{package} {minimum} or newer is needed, and none is installed: {remedy}", name=package
        ) from error
    if release(found) < release(minimum):
        raise ImportError(
            f"{package} {minimum} or newer is needed, and {found} is installed: {remedy}",
            name=package,
        )
    return importlib.import_module(module)


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version that come before anything else."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def unwrapped(optimizer: object) -> Preconditioner | None:
    """The preconditioning optimizer inside what frameworks wrap around it, if there is one."""
    while not isinstance(optimizer, Preconditioner):
        optimizer = getattr(optimizer, "optimizer", None)
        if optimizer is None:
            return None
    return optimizer


def check_name(mask: object) -> None:
    """Raise TypeError unless the name of a mask is one, or None."""
    if not (mask is None or isinstance(mask, str)):
        raise TypeError(
            f"mask must be the name of the mask in a batch, or None, got {type(mask).__name__}"
        )


def check_there(mask: str, names: list[str]) -> None:
    """Raise ValueError where a mask that was asked for by its name is not among `names`."""
    if mask != MASK and mask not in names:
        raise ValueError(
            f"there is no mask '{mask}' in the batch, which has {', '.join(names) or 'no names'}: "
            "pass PreconditionerCallback(mask=...) one of these, or None for no mask"
        )


def counts(optimizer: Preconditioner) -> dict[str, int]:
    """What a framework's log shows; reads the counters back from the device."""
    infos = [info for info in optimizer.layers() if info.preconditioned]
    return {
        "mkor/layers": len(infos),
        "mkor/updates": max((info.updates for info in infos), default=0),
        "mkor/skipped": sum(info.skipped for info in infos),
        "mkor/resets": sum(info.resets for info in infos),
    }
