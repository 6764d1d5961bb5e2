"""The sections that studies left in a folder: all of them, or an error that names the bad ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mkor_bench.errors import UserError
from mkor_bench.report.section import Section, read_section
from mkor_bench.studies import STUDIES
from mkor_bench.studies.kept import FOLDER_NAME as RUNS

PNG = b"\x89PNG\r\n\x1a\n"
PNG_END = b"IEND\xaeB`\x82"


@dataclass(frozen=True)
class Found:
    """A section, read and complete.

    Attributes:
        section: What the study found.
        conditions: How the results came about.
        path: Its file, relative to the folder of the report.
        images: The content of its figures, in their order.
    """

    section: Section
    conditions: Mapping[str, Any]
    path: Path
    images: tuple[bytes, ...]


def find_sections(folder: Path) -> list[Found]:
    """Reads the sections in a folder and in the folders in it.

    Args:
        folder: The output folder of a study, or of several.

    Returns:
        The sections in the order in which the command knows the studies.

    Raises:
        UserError: The folder does not exist or holds no section, or a file in it is damaged.
    """
    if not folder.is_dir():
        raise UserError(
            f"{str(folder)!r} is not a folder: name the --output of mkor study, such as "
            "runs/study/defaults."
        )
    found, damaged = [], []
    for path in _candidates(folder):
        try:
            found += _read(folder, path)
        except (OSError, ValueError, RecursionError) as error:
            damaged.append(f"{str(path)!r} ({_in_a_line(error)})")
    if damaged:
        raise UserError(_told(damaged))
    if not found:
        raise UserError(
            f"{str(folder)!r} holds no section of a report: do a study first, such as "
            f"mkor study {next(iter(STUDIES))} --quick --output {folder}; "
            f"studies: {', '.join(STUDIES)}."
        )
    return sorted(found, key=_order)


def _candidates(folder: Path) -> Iterator[Path]:
    for pattern in ("*.json", "*/*.json"):
        for path in sorted(folder.glob(pattern)):
            # A dot begins what is being written, and pieces of work lie in folders of their own.
            hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
            if path.is_file() and not hidden and path.parent.name != RUNS:
                yield path


def _read(folder: Path, path: Path) -> Sequence[Found]:
    read = read_section(path)
    if read is None:
        return ()
    section, conditions = read
    images = tuple(_image(path.with_name(figure.file)) for figure in section.figures)
    return (Found(section, conditions, path.relative_to(folder), images),)


def _image(path: Path) -> bytes:
    content = path.read_bytes()
    if not (content.startswith(PNG) and content.endswith(PNG_END)):
        raise ValueError(f"its figure {path.name!r} is no complete PNG file")
    return content


def _order(found: Found) -> tuple[int, str, Path]:
    known = list(STUDIES)
    study = found.section.study
    return (known.index(study) if study in known else len(known), study, found.path)


def _in_a_line(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "its JSON is nested too deeply"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{Path(error.filename).name}: {error.strerror}"
    return " ".join(str(error).split())


def _told(damaged: Sequence[str]) -> str:
    one = len(damaged) == 1
    return (
        f"{'a file is' if one else f'{len(damaged)} files are'} damaged: {', '.join(damaged)}. "
        f"Write {'it' if one else 'them'} anew with mkor study NAME --report --output FOLDER, "
        f"or remove {'it' if one else 'them'}; no report was written."
    )
