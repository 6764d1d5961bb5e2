"""Where data sets lie: a local folder whose files are checked, or the Hugging Face hub."""

from __future__ import annotations

import gzip
import hashlib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeAlias, TypeVar

from mkor_bench.errors import UserError

Row = TypeVar("Row")

HUB = "hub"
"""What --data says to fetch from the hub."""

BLANK = "<blank>"
"""Stands for data that are made up, which no option names: shapes can be checked without any."""

Place: TypeAlias = Path | Literal["hub", "<blank>"]
"""A folder, the hub, or made-up data."""

Store: TypeAlias = Place | None
"""The same, or nothing named."""

CHECKSUMS = "SHA256SUMS"
"""In the data folder, as ``sha256sum`` writes it: the files that it lists are checked."""

_REMEDY = "get it anew, or name other data with --data"
_CHECKSUM = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")


def local_files(store: Path, folder: str, *names: str) -> list[Path]:
    """Finds the files of a data set in the data folder, and checks them.

    Args:
        store: The data folder.
        folder: The data set's folder in it.
        names: The files that are needed.

    Returns:
        The path of each.

    Raises:
        UserError: One is missing, or differs from its checksum; or the file of checksums is not
            one.
    """
    paths = [store / folder / name for name in names]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise UserError(
            f"data folder {str(store)!r} lacks {folder}/{missing[0]}"
            f"{f' and {len(missing) - 1} more' if len(missing) > 1 else ''}: "
            "name a folder that has it with --data, or fetch the original with --data hub."
        )
    for path in paths:
        _check(store, path)
    return paths


def need_store(store: Store, what: str) -> Place:
    """Returns the store, or raises where none is named.

    Args:
        store: What --data named.
        what: The data set in words.

    Returns:
        The store.

    Raises:
        UserError: None was named.
    """
    if store is None:
        raise UserError(
            f"{what} is needed: name the folder that holds it with --data or in the environment "
            "variable MKOR_DATA, or fetch it with --data hub."
        )
    return store


def from_hub(path: str, name: str | None, split: str, *, streaming: bool = False) -> Any:
    """Loads a split of a data set from the hub, or from its cache.

    Args:
        path: The data set's name on the hub.
        name: Which part of it, if it has several.
        split: Such as "train".
        streaming: Whether to read it over the network as it is needed, and keep nothing.

    Returns:
        A ``datasets.Dataset``, or an ``IterableDataset`` that streams.

    Raises:
        UserError: The package is missing, or the hub cannot be reached.
    """
    try:
        from datasets import load_dataset
    except ImportError:
        raise UserError(
            "--data hub needs the package datasets: pip install datasets, "
            "or name a local folder with --data."
        ) from None
    with _fetching(path):
        return load_dataset(path, name, split=split, **({"streaming": True} if streaming else {}))


def streamed(rows: Iterable[Row], path: str) -> Iterator[Row]:
    """Goes through a data set that streams, and tells where the network fails in the middle.

    Args:
        rows: What :func:`from_hub` returned.
        path: The data set's name on the hub.

    Yields:
        The rows.

    Raises:
        UserError: The hub can no longer be reached.
    """
    with _fetching(path):
        yield from rows


def read_text(path: Path) -> str:
    """Reads a gzipped UTF-8 text.

    Args:
        path: The file.

    Returns:
        The text.

    Raises:
        UserError: It is something else, is cut short, or has no text.
    """
    rule = "it must be gzipped UTF-8 text"
    with reading(path, rule), gzip.open(path, "rt", encoding="utf-8", newline="\n") as file:
        text = file.read()
    if not text.strip():
        raise unfit(repr(str(path)), "it is empty", rule)
    return text


@contextmanager
def reading(path: Path, rule: str) -> Iterator[None]:
    """Tells in one line whatever goes wrong while a file is read and decoded.

    Args:
        path: The file.
        rule: What it must be.

    Raises:
        UserError: The file is cut short, or overwritten, or of another kind.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # the decoders of gzip, zip, NumPy and Pillow raise a dozen kinds
        reason = f"cannot be read ({_in_one_line(error)})"
        raise UserError(f"{str(path)!r} {reason}: {rule}; {_REMEDY}.") from error


def unfit(place: str, problem: str, rule: str) -> UserError:
    """Builds the error for data that are read but are not what the documentation says.

    Args:
        place: Where they are: a file, a line of it, or a data set of the hub.
        problem: What is there.
        rule: What must be there.

    Returns:
        The error.
    """
    return UserError(f"{place} is not as documented ({problem}): {rule}; {_REMEDY}.")


@contextmanager
def _fetching(path: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the hub's client raises a dozen kinds
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"data set {path!r} could not be fetched from the hub ({reason[:120]}): "
            "connect to the network once, or name a local folder with --data."
        ) from error


def _in_one_line(error: Exception) -> str:
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message[:120]}" if message else type(error).__name__


@cache
def _check(store: Path, path: Path) -> None:
    expected = _checksums(store).get(path.relative_to(store).as_posix())
    if expected is None:
        return
    if hashlib.sha256(path.read_bytes()).hexdigest() != expected:
        raise UserError(
            f"{str(path)!r} is damaged: its checksum is not the one in {CHECKSUMS}; "
            "copy it anew, or remove its line from there if it was changed on purpose."
        )


@cache
def _checksums(store: Path) -> dict[str, str]:
    path = store / CHECKSUMS
    if not path.is_file():
        return {}
    rule = "each line must be 64 hexadecimal digits, two spaces and a path, as sha256sum writes it"
    with reading(path, rule):
        lines = path.read_text(encoding="utf-8").splitlines()
    found = {}
    for number, line in enumerate(lines, 1):
        # sha256sum passes over both as well.
        if not line.strip() or line.startswith("#"):
            continue
        parts = _CHECKSUM.fullmatch(line)
        if parts is None:
            raise _no_checksum(path, f"line {number} is {line[:60]!r}", rule)
        found[PurePosixPath(parts[2]).as_posix()] = parts[1].lower()
    if not found:
        raise _no_checksum(path, "it has no checksum", rule)
    return found


def _no_checksum(path: Path, problem: str, rule: str) -> UserError:
    return UserError(
        f"{str(path)!r} cannot check the files ({problem}): {rule}; "
        "write it anew, or remove it to use the files unchecked."
    )
