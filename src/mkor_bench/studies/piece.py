"""One piece of a study's work, and the hash that its result is found by."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Piece:
    """One piece of work, done once.

    Attributes:
        function: Does it, as ``module:function``. It is called with ``spec``, with what --data
            named and with a report of progress, and returns a dict that JSON can hold.
        spec: Everything that determines the result, as JSON can hold it.
        label: A name for people.
        steps: How much work it is, in steps of training.
        alone: Whether it measures time, so that no other piece may run beside it.
    """

    function: str
    spec: Mapping[str, Any] = field(hash=False)
    label: str
    steps: int
    alone: bool = False

    @property
    def key(self) -> str:
        """What the result is found by: a hash of the function and the spec."""
        text = json.dumps([self.function, self.spec], sort_keys=True, allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:24]

    @property
    def file_name(self) -> str:
        """The file with its result: the label as far as a file's name can hold it, and the key."""
        return f"{re.sub(r'[^A-Za-z0-9.=-]+', '_', self.label)[:100]}-{self.key}.json"
