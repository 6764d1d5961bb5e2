"""Files that are either the old version or the new one, never half of one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from mkor_bench.errors import UserError

ARCHIVE = "inline_container"
"""In torch's errors of writing, which are not OSErrors."""


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a file under a temporary name beside its own, then renames it; its folder is made.

    Args:
        path: The file to create or to replace.
        write: Writes the content to the path that it is given.

    Raises:
        UserError: It cannot be written, on a full disk for instance; an older file stays.
    """
    # The suffix stays the same, since matplotlib chooses the format by it.
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path)
        write(temporary)
        with temporary.open("rb") as written:
            os.fsync(written.fileno())  # a name must not outlive a power cut without its content
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:
        if isinstance(error, OSError):
            reason = error.strerror or str(error)
        elif ARCHIVE in str(error):
            reason = "the disk may be full"
        else:
            raise
        raise UserError(
            f"{str(path)!r} cannot be written ({reason}): make room or allow writing there, and "
            "repeat the command, or choose another folder with --output; what was there before "
            "is as it was, and finished work is kept."
        ) from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def remove_leftovers(path: Path) -> None:
    """Removes what processes that were killed while they wrote a file have left beside it.

    Args:
        path: The file.
    """
    for left in path.parent.glob(f".{path.stem}.*{path.suffix}"):
        number = left.name.removeprefix(f".{path.stem}.").removesuffix(path.suffix)
        if number.isdigit() and not is_alive(int(number)):
            left.unlink(missing_ok=True)


def is_alive(process: int) -> bool:
    """Tells whether a process of this machine has not ended yet."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # someone else's
    return True


def prepare_folder(folder: Path, files: Sequence[str] = (), folders: Sequence[str] = ()) -> None:
    """Creates an output folder and checks that it can hold what will be written to it.

    Args:
        folder: The folder; its parents are created too.
        files: The names of files that will be written there.
        folders: The names of folders that will be written there.

    Raises:
        UserError: The folder cannot be created or written to, or has something of
            another kind under one of these names.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(
            f"output folder {str(folder)!r} is not writable ({reason}): "
            "choose another with --output."
        ) from error
    for path in (folder / name for name in files):
        if path.is_dir():
            raise _in_the_way(path, "a folder", "a file")
    for path in (folder / name for name in folders):
        if path.exists() and not path.is_dir():
            raise _in_the_way(path, "a file", "a folder")


def _in_the_way(path: Path, found: str, needed: str) -> UserError:
    return UserError(
        f"{str(path)!r} is {found} where {needed} is to be written: "
        "remove it, or choose another folder with --output."
    )
