"""A verdict from what was measured, never from what was hoped: three-valued logic on checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mkor_bench.report.section import Section, Verdict, to_markdown, write_section
from mkor_bench.studies.conditions import conditions
from mkor_bench.studies.kept import Kept
from mkor_bench.studies.study import Report, Request

QUICK = "The quick size shows that the study works; it is too small to decide anything."


@dataclass(frozen=True)
class Check:
    """One thing that the claim implies.

    Attributes:
        told: What, with the figures that decide it.
        met: Whether it was so; None where the figures cannot tell.
    """

    told: str
    met: bool | None


def judge(checks: Sequence[Check], quick: bool = False) -> tuple[Verdict, str]:
    """Decides on a claim.

    Args:
        checks: What it implies.
        quick: Whether the figures come from the quick size, which decides nothing.

    Returns:
        HOLDS where every check is met, FAILS where none is, PARTLY where some are and some are
        not, whatever the undecided ones are; else OPEN. And the reason in words.
    """
    words = {True: "Met", False: "Not met", None: "Not decided"}
    told = {met: [check.told for check in checks if check.met is met] for met in words}
    reason = " ".join(f"{words[met]}: {'; '.join(parts)}." for met, parts in told.items() if parts)
    if quick:
        return Verdict.OPEN, f"{QUICK} {reason}".strip()
    if not checks:
        return Verdict.OPEN, "Nothing that the claim is about was measured."
    if told[True] and told[False]:
        return Verdict.PARTLY, reason
    if told[None]:
        return Verdict.OPEN, reason
    return (Verdict.HOLDS if told[True] else Verdict.FAILS), reason


def conclude(
    asked: Request,
    kept: Kept,
    folder: Path,
    section: Section,
    data: Mapping[str, Any] | None = None,
) -> Report:
    """Writes a section, and shows it.

    Args:
        asked: What was done.
        kept: Its results.
        folder: The output folder, where the section's figures lie already.
        section: What was found.
        data: Whatever else is worth keeping, as JSON can hold it.

    Returns:
        The report.
    """
    files = write_section(folder, section, conditions(asked, kept.records()), data)
    return Report(files, (to_markdown(section),), section)
