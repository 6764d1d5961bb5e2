"""Processes that ``torchrun`` starts, and how they end."""

from __future__ import annotations

import os
import sys


def launched() -> bool:
    """Whether ``torchrun`` started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def leave(code: int) -> None:
    """Ends the process without the interpreter's clean-up, in which gloo's threads may hang.

    They give tensors back to an interpreter that waits for them, or is no more
    (pytorch/pytorch#75097, #179291).

    Args:
        code: The exit code.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
