"""A checkpoint of a recipe's training, read with what is wrong with it told."""

from __future__ import annotations

from pathlib import Path
from textwrap import shorten
from typing import Any
from zipfile import is_zipfile

import torch

from mkor_bench.errors import UserError

CHECKPOINT_NAME = "recipe.pt"
KEYS = ("recipe", "optimizer_name", "workers", "model", "optimizer", "rates", "losses", "seconds")
"""What a checkpoint holds."""


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Reads a checkpoint.

    Args:
        path: The file.

    Returns:
        What it holds, all of :data:`KEYS` at least.

    Raises:
        UserError: There is none, it is damaged, or it holds something else.
    """
    if not path.is_file():
        raise UserError(f"{str(path)!r} does not exist: leave out --resume, or name its folder.")
    if not path.stat().st_size:
        raise unfit(path, "is empty")
    if not is_zipfile(path):  # the list of contents is at the end
        raise unfit(path, "was cut short, or is no checkpoint at all")
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds
        raise unfit(path, "is damaged, or holds more than data", error) from error
    if not isinstance(state, dict):
        raise unfit(path, f"holds no checkpoint but a {type(state).__name__}")
    lacking = [key for key in KEYS if key not in state]
    if lacking:
        raise unfit(path, f"is no checkpoint of a recipe: it lacks {', '.join(lacking)}")
    return state


def unfit(path: Path, why: str, error: Exception | None = None) -> UserError:
    """Builds the error for a checkpoint that cannot be continued.

    Args:
        path: The file.
        why: What is wrong with it.
        error: What was raised, if anything; told in a line of reasonable length.
    """
    if error is not None:
        told = shorten(" ".join(str(error).split()), 160, placeholder=" …")
        why += f" ({type(error).__name__}: {told})"
    return UserError(f"checkpoint {str(path)!r} {why}; remove it, or choose another --output.")
