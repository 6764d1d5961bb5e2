"""Processes that ``torchrun`` starts, and how they end."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager


def launched() -> bool:
    """Whether ``torchrun`` started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@contextmanager
def leaves_at_once() -> Iterator[None]:
    """Lets what ends a launched process end it without the interpreter's clean-up.

    There gloo's threads may hang: they give tensors back to an interpreter that waits for them, or
    is no more (pytorch/pytorch#75097, #179291). And the other workers wait until torchrun sees that
    one of them has ended.
    """
    try:
        yield
    except SystemExit as ended:
        if launched() and isinstance(ended.code, int):
            _leave(ended.code)
        raise
    except BaseException:
        if launched():
            traceback.print_exc()
            _leave(1)
        raise


def _leave(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
