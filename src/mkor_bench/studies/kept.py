"""A study's results on disk: one JSON file for each finished piece, never half of one.

Several processes may work in one folder. A process claims a piece by creating a file beside its
result; a claim whose process has ended is no longer one.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

from mkor_bench.errors import UserError
from mkor_bench.files import is_alive, write_atomically
from mkor_bench.report.machine import describe_machine, versions
from mkor_bench.report.results import to_json
from mkor_bench.studies.piece import Piece

FOLDER_NAME = "runs"


class Kept:
    """The results in a folder.

    Args:
        folder: The study's output folder; the results are in ``runs`` in it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / FOLDER_NAME
        self._records: dict[str, dict[str, Any]] = {}

    def get(self, piece: Piece) -> Mapping[str, Any] | None:
        """Looks a result up.

        Args:
            piece: The piece of work.

        Returns:
            What its function returned, or None where it has not been done.

        Raises:
            UserError: Its file is not what this module writes.
        """
        record = self._records.get(piece.key) or self._read(piece)
        if record is None:
            return None
        self._records[piece.key] = record
        result: Mapping[str, Any] = record["result"]
        return result

    def records(self) -> Sequence[Mapping[str, Any]]:
        """Returns all records that were found so far, each with its machine and versions."""
        return list(self._records.values())

    def put(self, piece: Piece, result: Mapping[str, Any]) -> None:
        """Keeps a result.

        Args:
            piece: The finished piece of work.
            result: What its function returned.

        Raises:
            UserError: The file cannot be written.
        """
        record = {
            "function": piece.function,
            "spec": piece.spec,
            "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "machine": describe_machine(),
            "versions": versions(),
            "sources": sources(),
            "result": result,
        }
        text = to_json(record)
        write_atomically(self._path(piece), lambda path: path.write_text(text, "utf-8"))

    @contextmanager
    def claim(self, piece: Piece) -> Iterator[bool]:
        """Keeps other processes from doing the same piece.

        Args:
            piece: The piece of work.

        Yields:
            Whether it is this process's to do.
        """
        path = self._path(piece).with_suffix(".claim")
        mine = _create(path) or (_is_stale(path) and _take_over(path))
        try:
            yield mine
        finally:
            if mine:
                path.unlink(missing_ok=True)

    def _path(self, piece: Piece) -> Path:
        return self.folder / piece.file_name

    def _read(self, piece: Piece) -> dict[str, Any] | None:
        path = self._path(piece)
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise _damaged(path, str(error)) from error
        if not isinstance(record, dict) or not isinstance(record.get("result"), dict):
            raise _damaged(path, "it has no result")
        lacking = {"machine", "versions", "sources"} - record.keys()
        if lacking:
            raise _damaged(path, f"it lacks {', '.join(sorted(lacking))}")
        if record.get("spec") != json.loads(json.dumps(piece.spec)):
            raise _damaged(path, "its spec is not the one that its name stands for")
        return record


@cache
def sources() -> str:
    """Returns a hash of the library's source files, which tells one state of it from another."""
    import mkor

    folder = Path(mkor.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _damaged(path: Path, reason: str) -> UserError:
    return UserError(f"{str(path)!r} is not a study's result ({reason}): remove it to do it anew.")


def _create(path: Path) -> bool:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(f"{socket.gethostname()} {os.getpid()} {_begin(os.getpid())}")
    except FileExistsError:
        return False
    return True


def _is_stale(path: Path) -> bool:
    """Tells whether the process of a claim has ended; those of other machines have not."""
    try:
        host, process, begin = path.read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return False  # just created, or just removed
    if host != socket.gethostname():
        return False
    return not is_alive(int(process)) or begin != _begin(int(process))


def _begin(process: int) -> str:
    """Returns when a process began, where the system tells: its number may be given anew."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text(encoding="utf-8")
    except OSError:
        return "unknown"
    # The name of the program, in parentheses, may hold spaces.
    return stat.rpartition(")")[2].split()[19]


def _take_over(path: Path) -> bool:
    # At worst two processes take it over and do the same piece; both write the same result.
    path.unlink(missing_ok=True)
    return _create(path)
