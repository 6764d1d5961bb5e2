"""``report.html``: the sections of a folder on one page that needs nothing besides itself.

The page loads nothing: its pictures are data URIs, and its content security policy allows no
other source and no script but its own. Jinja escapes every text that comes from a section.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from mkor_bench.files import write_atomically
from mkor_bench.report.collect import Found
from mkor_bench.report.machine import version
from mkor_bench.report.section import Table, Verdict, shown
from mkor_bench.report.table import NONE

FILE_NAME = "report.html"

LABELS = {"processor_hours": "processor time, h", "pieces": "pieces of work"}
"""Conditions whose names in the files say too little."""

SHORT = 140
"""Characters of a reason in the summary, at most."""

_NUMBER = re.compile(r"[×x<>≤≥≈~]?\s*([-+−]?\d+(?:\.\d+)?(?:e[-+]?\d+)?)")


def write_page(folder: Path, found: Sequence[Found]) -> None:
    """Writes ``report.html``.

    Args:
        folder: Where to.
        found: The sections, in order.
    """
    text = to_html(found)
    write_atomically(folder / FILE_NAME, lambda path: path.write_text(text, "utf-8", "replace"))


def to_html(found: Sequence[Found]) -> str:
    """Returns the page.

    Args:
        found: The sections, in order.

    Returns:
        HTML.
    """
    loader = PackageLoader("mkor_bench.report", "template")
    environment = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "code": code,
        "cell": shown,
        "sorted_as": sorted_as,
        "in_short": in_short,
        "told": told,
        "data_uri": data_uri,
    }
    style, script = (
        Markup(loader.get_source(environment, name)[0]) for name in ("report.css", "report.js")
    )
    return environment.get_template("report.html").render(
        found=found,
        counts=count_verdicts(found),
        failed=[each for each in found if each.section.verdict is Verdict.FAILS],
        size=size,
        brief=brief,
        aligned=aligned,
        labels=LABELS,
        Verdict=Verdict,
        version=version(),
        style=style,
        script=script,
        style_hash=policy_hash(style),
        script_hash=policy_hash(script),
    )


def count_verdicts(found: Sequence[Found]) -> str:
    """Tells in a sentence how many claims came to which verdict."""
    counts = Counter(each.section.verdict for each in found)
    words = {
        Verdict.HOLDS: ("holds", "hold"),
        Verdict.PARTLY: ("holds in part", "hold in part"),
        Verdict.FAILS: ("does not hold", "do not hold"),
        Verdict.OPEN: ("is not decided here", "are not decided here"),
    }
    parts = [f"{counts[v]} {words[v][counts[v] != 1]}" for v in Verdict if counts[v]]
    listed = " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))
    return f"Of {len(found)} claim{'s'[: len(found) - 1]} of the paper, {listed}."


def size(conditions: Mapping[str, Any]) -> str:
    """Tells at which size a study was done."""
    quick = conditions.get("quick")
    return "quick" if quick is True else "default" if quick is False else NONE


def brief(several: Any, keys: Sequence[str]) -> str:
    """Tells what differs among machines or versions by a few of their keys."""
    if not isinstance(several, (list, tuple)):
        return told(several)
    chosen = [
        {key: one[key] for key in keys if key in one} if isinstance(one, Mapping) else one
        for one in several
    ]
    return "; ".join(dict.fromkeys(map(told, chosen))) or NONE


def aligned(table: Table, column: int) -> Markup:
    """Returns the class of a column's cells: numbers stand one below the other."""
    cells = [row[column] for row in table.rows if row[column] is not None]
    numeric = all(isinstance(cell, (int, float)) and not isinstance(cell, bool) for cell in cells)
    return Markup(' class="number"' if cells and numeric else "")


def told(value: Any) -> str:
    """Returns a condition as text, however deep it is."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {told(item)}" for key, item in value.items()) or NONE
    if isinstance(value, (list, tuple)):
        deep = any(isinstance(item, (Mapping, list, tuple)) for item in value)
        return ("; " if deep else ", ").join(map(told, value)) or NONE
    return shown(value)


def sorted_as(cell: Any) -> str:
    """Returns the number that a cell is sorted by; empty for one that is sorted as text.

    A text that begins with a number, such as ``"1.98 ± 0.02"`` or ``"×2.6"``, is sorted by it.
    """
    if isinstance(cell, str):
        begin = _NUMBER.match(cell)
        return begin[1].replace("−", "-") if begin else ""
    known = isinstance(cell, (int, float)) and math.isfinite(cell)
    return repr(float(cell)) if known else ""


def in_short(text: str) -> str:
    """Returns the first sentence of a text, or the begin of it where that is long."""
    sentence = re.split(r"(?<=[.!?]) (?=[A-Z])", text, maxsplit=1)[0]
    return (
        textwrap.shorten(sentence, SHORT, placeholder=" …") if len(sentence) > SHORT else sentence
    )


def code(text: str) -> Markup:
    """Escapes a text, and marks what it has between backticks as code."""
    parts = re.split(r"`([^`]+)`", text)
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if place % 2 else escape(part)
        for place, part in enumerate(parts)
    )


def data_uri(image: bytes) -> str:
    """Returns a PNG file as an address that holds it."""
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


def policy_hash(text: str) -> str:
    """Returns what a content security policy calls an inline style or script by."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
