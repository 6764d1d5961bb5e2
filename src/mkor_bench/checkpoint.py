"""A run on disk, and its exact continuation.

A checkpoint says which run it belongs to, so that ``--resume`` can refuse to continue
one run with the state of another. It is read with ``weights_only=True``: loading a file
that someone else made runs no code of theirs.
"""

from __future__ import annotations

from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mkor_bench.errors import UserError
from mkor_bench.files import write_atomically
from mkor_bench.train import Settings, Training

FILE_NAME = "checkpoint.pt"
FORMAT = "mkor-train-1"


def save_checkpoint(folder: Path, training: Training) -> None:
    """Replaces the folder's checkpoint by the run as it is now, or leaves the old one.

    Args:
        folder: The output folder.
        training: The run between two steps.
    """
    state = {
        "format": FORMAT,
        "task": training.task.name,
        "settings": asdict(training.settings),
        "step": training.run.step,
        **training.state_dict(),
    }
    write_atomically(folder / FILE_NAME, partial(torch.save, state))


def read_checkpoint(folder: Path) -> dict[str, Any]:
    """Reads a folder's checkpoint.

    Args:
        folder: The output folder of a run.

    Returns:
        What :func:`save_checkpoint` wrote.

    Raises:
        UserError: There is none, or the file is damaged or of another kind.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        raise UserError(
            f"no checkpoint to resume from: {str(path)!r} does not exist; "
            "run without --resume, or give its folder with --output."
        )
    try:
        state = torch.load(path, weights_only=True)
    except Exception as error:  # damaged files raise many kinds of errors
        raise UserError(
            f"checkpoint {str(path)!r} cannot be read ({type(error).__name__}): "
            "it is damaged or was not written by mkor train; "
            "remove it, or choose another folder with --output."
        ) from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise UserError(
            f"{str(path)!r} is not a checkpoint of mkor train: "
            "remove it, or choose another folder with --output."
        )
    return state


def refuse_to_overwrite(folder: Path) -> None:
    """Keeps a run from replacing another one's checkpoint, finished or not.

    Args:
        folder: The output folder of a new run.

    Raises:
        UserError: There is a checkpoint.
    """
    path = folder / FILE_NAME
    if path.exists():
        raise UserError(
            f"checkpoint {str(path)!r} exists already: continue its run with --resume, "
            "choose another folder with --output, or remove the file."
        )


def settings_to_resume(state: dict[str, Any], task: str, given: dict[str, Any]) -> Settings:
    """Reads a checkpoint's settings and checks them against what was asked for.

    Args:
        state: The checkpoint.
        task: The name of the task to continue.
        given: The settings that the user named; the others are the checkpoint's.

    Returns:
        The settings to continue with.

    Raises:
        UserError: Something differs; the message says what.
    """
    saved = {"task": state["task"], **state["settings"]}
    differ = [
        f"{name} {saved[name]!r} there, {value!r} here"
        for name, value in {"task": task, **given}.items()
        if saved[name] != value
    ]
    if differ:
        raise UserError(
            f"the checkpoint is of another run ({'; '.join(differ)}): "
            "give the same values, or another folder with --output."
        )
    return Settings(**{f.name: saved[f.name] for f in fields(Settings)})


def resume(training: Training, state: dict[str, Any]) -> None:
    """Puts a checkpoint's state into a new run of the same settings.

    Args:
        training: A run that has not begun.
        state: The checkpoint.

    Raises:
        UserError: The task's model has changed since.
    """
    saved, now = state["model"], training.model.state_dict()
    differ = [name for name in sorted({*saved, *now}) if _shape(saved, name) != _shape(now, name)]
    if differ:
        told = "; ".join(f"{n} {_shape(saved, n)} there, {_shape(now, n)} here" for n in differ[:3])
        more = f" and {len(differ) - 3} more" if len(differ) > 3 else ""
        raise UserError(
            f"the checkpoint is of another model ({told}{more}): the task has changed "
            "since; remove the file, or choose another folder with --output."
        )
    training.load_state_dict(state)


def _shape(tensors: dict[str, Any], name: str) -> str:
    return str(list(tensors[name].shape)) if name in tensors else "absent"
